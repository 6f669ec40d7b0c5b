#!/usr/bin/env bash
# uv.sh ARGS...: run the uv that requirements-boot.txt pins; installed once, outside the clone.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
pins=$here/../requirements-boot.txt
cache=${SPRINGTIDE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/springtide}
boot=$cache/boot-$(cksum <"$pins" | tr -s ' ' -)

if [ ! -x "$boot/bin/uv" ]; then
    python=$("$here/find_python.sh")
    mkdir -p "$cache"
    draft=$(mktemp -d "$cache/boot-draft-XXXXXX")
    trap 'rm -rf "$draft"' EXIT
    "$python" -m venv "$draft"
    "$draft/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --only-binary :all: --require-hashes -r "$pins"
    # uv is one program that does not mind being moved. When another setup was quicker, its copy stays.
    mv -T "$draft" "$boot" 2>/dev/null || [ -x "$boot/bin/uv" ] || mv "$draft" "$boot"
    rm -rf "$draft"
    trap - EXIT
fi
# uv must neither fetch interpreters of its own nor pick up another project's environment.
unset VIRTUAL_ENV CONDA_PREFIX
export UV_PYTHON_DOWNLOADS=never UV_NO_PROGRESS=1
exec "$boot/bin/uv" "$@"
