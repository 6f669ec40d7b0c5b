"""`springtide-gateway [CONFIG]`: the gateway as a process of its own."""

from __future__ import annotations

from springtide_gateway.config import ProcessConfig
from springtide_gateway.wiring import run
from springtide_shared.runtime import process


def main() -> None:
    """Entry point of the command."""
    process.main("gateway", ProcessConfig, run)


if __name__ == "__main__":
    main()
