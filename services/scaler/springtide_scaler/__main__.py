"""`springtide-scaler [CONFIG]`: the scaler as a process of its own."""

from __future__ import annotations

from springtide_scaler.config import ProcessConfig
from springtide_scaler.wiring import run
from springtide_shared.runtime import process


def main() -> None:
    """Entry point of the command."""
    process.main("scaler", ProcessConfig, run)


if __name__ == "__main__":
    main()
