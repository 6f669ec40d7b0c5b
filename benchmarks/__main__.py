"""Run benchmarks, each in a fresh process; write out/bench/<name>.json and print a table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.registry import BENCHMARKS, DATA_VARIABLE, Figure, is_met, load

OUT: Final = Path("out/bench")
LIMIT_SECONDS: Final = 3_600.0


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 all were measured (goals met or not), 1 at least one failed, 2 bad usage."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", metavar="NAME", choices=BENCHMARKS, help="run this one alone")
    parser.add_argument(
        "--data", metavar="DIR", type=Path, help="put databases here (default: a temporary folder)"
    )
    parser.add_argument("--list", action="store_true", help="name all benchmarks and end")
    parser.add_argument("--measure", choices=BENCHMARKS, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.list:
        for name in BENCHMARKS:
            print(f"{name:24} {(load(name).__doc__ or '').strip().splitlines()[0]}")
        return 0
    if options.measure:
        options.into.write_text(json.dumps(list(load(options.measure)())), encoding="utf-8")
        return 0
    if options.data is not None:
        options.data.mkdir(parents=True, exist_ok=True)
        os.environ[DATA_VARIABLE] = str(options.data.resolve())
    failed = [name for name in ([options.only] if options.only else BENCHMARKS) if not _run(name)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(name: str) -> bool:
    """Measure one benchmark in a process of its own: memory and CPU are then its alone."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "benchmarks", "--measure", name, "--into", str(into)]
        try:
            done = subprocess.run(command, check=False, timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{name}: no end within {LIMIT_SECONDS:.0f} s", file=sys.stderr)
            return False
        if done.returncode != 0:
            return False
        figures: list[Figure] = json.loads(into.read_text(encoding="utf-8"))
    told = {"command": f"python -m benchmarks --only {name}", "machine": _machine()}
    OUT.mkdir(parents=True, exist_ok=True)
    text = json.dumps([{**figure, **told} for figure in figures], indent=2)
    (OUT / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    for figure in figures:
        verdict = {None: "", True: "met", False: "NOT MET"}[is_met(figure)]
        print(
            f"{figure['name']:40} {figure['value']:>14,.6g} {figure['unit']:12}"
            f" {figure['goal']:12} {verdict}",
            flush=True,
        )
    return True


def _machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{os.cpu_count()} x {model}, {platform.system()}, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
