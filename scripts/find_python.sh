#!/usr/bin/env bash
# find_python.sh [MINOR...]: print the path of an interpreter that springtide runs on.
# Candidates, in this order: $PYTHON, python3.MINOR and python3 on the PATH, pyenv's versions.
# MINORs default to "11 12 13": the oldest supported one first, since it is the strictest.
set -euo pipefail
[ $# -gt 0 ] || set -- 11 12 13

# Prints the real interpreter behind $1 (no shim, no virtual environment) when its minor version is
# $2 and it can make virtual environments; Debian's python3 cannot without python3-venv.
probe() {
    "$1" - "$2" 2>/dev/null <<'PY'
import sys
import ensurepip, venv  # noqa

if sys.version_info[:2] != (3, int(sys.argv[1])) or sys.implementation.name != "cpython":
    raise SystemExit(1)
print(getattr(sys, "_base_executable", sys.executable))
PY
}

if [ -n "${PYTHON:-}" ]; then
    for minor in "$@"; do
        probe "$PYTHON" "$minor" && exit 0
    done
    echo "PYTHON=$PYTHON is no usable CPython of 3.{$(IFS=,; echo "$*")} with the venv module" >&2
    exit 1
fi

pyenv_root=${PYENV_ROOT:-$(command -v pyenv >/dev/null && pyenv root || true)}
for minor in "$@"; do
    for candidate in "python3.$minor" python3 "${pyenv_root:-/nonexistent}"/versions/3."$minor".*/bin/python; do
        probe "$candidate" "$minor" && exit 0
    done
done
cat >&2 <<TEXT
No Python of 3.{$(IFS=,; echo "$*")} with the venv module was found.
Install one (on Debian or Ubuntu: apt-get install python3 python3-venv) or name it: make setup PYTHON=/path/to/python3
TEXT
exit 1
