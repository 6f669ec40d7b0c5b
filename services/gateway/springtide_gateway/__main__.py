"""`springtide-gateway [CONFIG]`: the gateway as a process of its own."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import structlog

from springtide_gateway.config import GatewayConfig
from springtide_gateway.wiring import run
from springtide_shared.errors import SpringtideError
from springtide_shared.runtime import config, logs


def main() -> None:
    """Entry point of the command."""
    logs.setup()
    try:
        file = Path(sys.argv[1]) if len(sys.argv) > 1 else None
        asyncio.run(run(config.load(GatewayConfig, prefix="SPRINGTIDE_GATEWAY", file=file)))
    except SpringtideError as error:
        structlog.get_logger(service="gateway").error("start.refused", error=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
