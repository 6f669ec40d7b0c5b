"""`springtide-monitor [CONFIG]`: the monitor as a process of its own."""

from __future__ import annotations

from springtide_monitor.config import ProcessConfig
from springtide_monitor.wiring import run
from springtide_shared.runtime import process


def main() -> None:
    """Entry point of the command."""
    process.main("monitor", ProcessConfig, run)


if __name__ == "__main__":
    main()
