"""`springtide-coordinator [CONFIG]`: the coordinator as a process of its own."""

from __future__ import annotations

from springtide_coordinator.config import ProcessConfig
from springtide_coordinator.wiring import run
from springtide_shared.runtime import process


def main() -> None:
    """Entry point of the command."""
    process.main("coordinator", ProcessConfig, run)


if __name__ == "__main__":
    main()
