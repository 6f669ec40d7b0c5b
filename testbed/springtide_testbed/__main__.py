"""Command line of the test bed: up, env, status, down, install."""

from __future__ import annotations

import argparse
import getpass
import os
import shlex
import sys
import tempfile
from pathlib import Path

from springtide_testbed.bed import Testbed, default_parts, watch
from springtide_testbed.errors import PartUnavailableError, TestbedError


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done; 1 it failed (the reason is on stderr); 2 bad usage."""
    known = [part.name for part in default_parts()]
    parser = argparse.ArgumentParser(prog="python -m springtide_testbed", description=__doc__)
    parser.add_argument("command", choices=["up", "env", "status", "down", "install", "watch"])
    parser.add_argument(
        "--parts",
        default=",".join(known),
        help="which servers 'up' starts, separated by commas (default: all: %(default)s)",
    )
    parser.add_argument(
        "--home",
        type=Path,
        default=Path(os.environ.get("SPRINGTIDE_TESTBED_HOME") or _default_home()),
        help="folder of the bed; two folders are two beds (default: %(default)s, "
        "or SPRINGTIDE_TESTBED_HOME)",
    )
    options = parser.parse_args(arguments)
    bed = Testbed(options.home)
    try:
        match options.command:
            case "up":
                wanted = [name for name in options.parts.split(",") if name]
                for running in bed.up(wanted).values():
                    print(f"# {running.part} {running.version}, process {running.main.pid}")
                _print_env(bed)
            case "env":
                _print_env(bed)
            case "status":
                _print_status(bed)
            case "down":
                bed.down()
            case "install":
                return _install(bed)
            case "watch":
                watch(options.home)
    except TestbedError as error:
        print(f"springtide_testbed: {error}", file=sys.stderr)
        return 1
    return 0


def _default_home() -> str:
    return str(Path(tempfile.gettempdir()) / f"springtide-testbed-{getpass.getuser()}")


def _install(bed: Testbed) -> int:
    """Find or install the programs of every part; tells which are missing and what to do."""
    missing = 0
    for name, part in bed.parts.items():
        try:
            part.ensure_available()
        except PartUnavailableError as error:
            print(f"{name}: {error}", file=sys.stderr)
            missing += 1
    return 1 if missing else 0


def _print_env(bed: Testbed) -> None:
    for key, value in bed.env().items():
        print(f"export {key}={shlex.quote(value)}")


def _print_status(bed: Testbed) -> None:
    alive = bed.running()
    for name in bed.parts:
        if name in alive:
            print(f"{name}: up, version {alive[name].version}, process {alive[name].main.pid}")
        else:
            print(f"{name}: down")
    print(f"# home: {bed.home}")


if __name__ == "__main__":
    sys.exit(main())
