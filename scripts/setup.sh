#!/usr/bin/env bash
# setup.sh VENV [MINOR...]: make the virtual environment VENV hold exactly what requirements.txt
# says, and every member of the workspace as an editable install. Run again it only mends.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
shift
uv=scripts/uv.sh

usable() { "$venv/bin/python" -c 'import sys; assert (3, 11) <= sys.version_info < (3, 14)' 2>/dev/null; }
if [ -n "${PYTHON:-}" ] || ! usable; then
    python=$(scripts/find_python.sh "$@")
    wanted=$("$python" -c 'import sys; print(sys.version)')
    if ! usable || [ "$("$venv/bin/python" -c 'import sys; print(sys.version)')" != "$wanted" ]; then
        $uv venv --quiet --clear --python "$python" "$venv"
    fi
fi

members=()
for member in shared client lab testbed services/*/; do
    members+=(-e "./${member%/}")
done
$uv pip sync --quiet --require-hashes --python "$venv/bin/python" requirements.txt
# The build back end is part of uv itself, so that these need no network.
$uv pip install --quiet --no-deps --python "$venv/bin/python" "${members[@]}"
pwd >"$venv/.springtide"
echo "$venv: $("$venv/bin/python" --version), $($uv pip list --quiet --python "$venv/bin/python" --format freeze | wc -l) packages"
