"""`springtide-rescheduler [CONFIG]`: the rescheduler as a process of its own."""

from __future__ import annotations

from springtide_rescheduler.config import ProcessConfig
from springtide_rescheduler.wiring import run
from springtide_shared.runtime import process


def main() -> None:
    """Entry point of the command."""
    process.main("rescheduler", ProcessConfig, run)


if __name__ == "__main__":
    main()
