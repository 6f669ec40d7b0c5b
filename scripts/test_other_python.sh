#!/usr/bin/env bash
# test_other_python.sh: the unit tests on the newest supported interpreter other than .venv's own.
# Says why and succeeds when there is none: the other versions are a second opinion, not a need.
set -euo pipefail
cd "$(dirname "$0")/.."
own=$(.venv/bin/python -c 'import sys; print(sys.version_info[1])')
others=()
for minor in 13 12 11; do
    [ "$minor" = "$own" ] || others+=("$minor")
done
unset PYTHON # it names the interpreter of .venv
if ! python=$(scripts/find_python.sh "${others[@]}" 2>/dev/null); then
    echo "unit tests on another interpreter: skipped, no Python 3.{$(IFS=,; echo "${others[*]}")} here"
    exit 0
fi
minor=$("$python" -c 'import sys; print(sys.version_info[1])')
venv=.venv-3.$minor
# Up to date when newer than all it is made of, as make judges it for .venv.
fresh=yes
[ "$(cat "$venv/.springtide" 2>/dev/null)" = "$PWD" ] || fresh=no
for input in requirements.txt pyproject.toml */pyproject.toml services/*/pyproject.toml; do
    [ "$venv/.springtide" -nt "$input" ] || fresh=no
done
[ "$fresh" = yes ] || PYTHON=$python scripts/setup.sh "$venv" "$minor"
exec "$venv/bin/python" -m pytest -q -n "${WORKERS:-2}" -p no:cacheprovider tests/unit
