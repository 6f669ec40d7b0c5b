"""`springtide-submitter [CONFIG]`: the submitter as a process of its own."""

from __future__ import annotations

from springtide_shared.runtime import process
from springtide_submitter.config import ProcessConfig
from springtide_submitter.wiring import run


def main() -> None:
    """Entry point of the command."""
    process.main("submitter", ProcessConfig, run)


if __name__ == "__main__":
    main()
