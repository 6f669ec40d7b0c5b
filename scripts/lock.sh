#!/usr/bin/env bash
# lock.sh [--upgrade]: write requirements.txt and requirements-boot.txt anew: every version, with
# hashes, for all supported interpreters, and without naming the place it comes from.
# Versions stay as they are where they still fit; --upgrade takes the newest.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=scripts/uv.sh

projects=() own=()
for project in shared/pyproject.toml services/*/pyproject.toml client/pyproject.toml lab/pyproject.toml testbed/pyproject.toml; do
    projects+=("$project")
    # Members that others depend on would get in with an absolute path; they are installed apart.
    own+=(--no-emit-package "$(sed -n 's/^name = "\(.*\)"$/\1/p' "$project" | head -n 1)")
done
compile=("$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes
    --no-emit-index-url --no-emit-find-links --no-header --no-annotate "$@")
# uv itself comes last: it may write a newer uv, which the next call would have to fetch first.
"${compile[@]}" "${own[@]}" "${projects[@]}" --all-extras --group pyproject.toml:dev -o requirements.txt
"${compile[@]}" --group pyproject.toml:boot -o requirements-boot.txt
if grep -nE '://|^-|file:' requirements.txt requirements-boot.txt; then
    echo "a requirements file names a place; see the lines above" >&2
    exit 1
fi
