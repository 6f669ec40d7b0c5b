"""`springtide-rescheduler [CONFIG]`: the rescheduler as a process of its own."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import structlog

from springtide_rescheduler.config import ProcessConfig
from springtide_rescheduler.wiring import run
from springtide_shared.errors import SpringtideError
from springtide_shared.runtime import config, logs


def main() -> None:
    """Entry point of the command."""
    logs.setup()
    log = structlog.get_logger(service="rescheduler")
    try:
        file = Path(sys.argv[1]) if len(sys.argv) > 1 else None
        asyncio.run(run(config.load(ProcessConfig, prefix="SPRINGTIDE_RESCHEDULER", file=file)))
    except SpringtideError as error:
        log.error("start.refused", error=str(error))
        sys.exit(1)
    except BaseExceptionGroup as group:
        known, rest = group.split(SpringtideError)
        if rest is not None or known is None:
            raise
        log.error("service.ended", errors=[str(error) for error in known.exceptions])
        sys.exit(1)


if __name__ == "__main__":
    main()
