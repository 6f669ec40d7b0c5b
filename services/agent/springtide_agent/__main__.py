"""`springtide-agent exec --pod FILE`: run one attempt as its pod document says."""

# ruff: noqa: E402 - what is imported first decides what a start costs

from __future__ import annotations

import sys

# msgspec takes its helpers from typing_extensions if that is installed, which doubles the cost of
# its import; on the Pythons we support it finds the same in `typing`. Hundreds of agents start.
_is_first = "typing_extensions" not in sys.modules
if _is_first:
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
import msgspec

if _is_first:
    del sys.modules["typing_extensions"]

import asyncio
from pathlib import Path
from typing import Final

from springtide_agent.config import AgentConfig
from springtide_agent.journal import Journal
from springtide_agent.service import Agent
from springtide_agent.wiring import open_store
from springtide_shared.adapters.clock import SystemClock, SystemIds
from springtide_shared.errors import InvalidFieldError
from springtide_shared.messages.base import explain
from springtide_shared.messages.pod import PodDocument
from springtide_shared.runtime.config import load

_USAGE: Final = "usage: springtide-agent exec --pod FILE (one pod document, JSON)"
EXIT_USAGE: Final = 64
"""The pod document cannot be read: nothing was started, nothing was written."""


def main() -> None:
    """Entry point of the command."""
    arguments = sys.argv[1:]
    if arguments in (["-h"], ["--help"]):
        print(_USAGE)
        return
    if len(arguments) != 3 or arguments[:2] != ["exec", "--pod"]:
        sys.exit(_usage(_USAGE))
    file = Path(arguments[2])
    try:
        document = msgspec.json.decode(file.read_bytes(), type=PodDocument)
    except OSError as error:
        sys.exit(_usage(f"{file}: {error.strerror}"))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        sys.exit(_usage(f"{file}: {explain(error)}"))
    try:
        config = load(AgentConfig, prefix="SPRINGTIDE_AGENT")
    except InvalidFieldError as error:
        sys.exit(_usage(str(error)))
    clock = SystemClock()
    agent = Agent(
        document=document,
        open_store=lambda: open_store(document.store_url),
        clock=clock,
        ids=SystemIds(clock),
        config=config,
        journal=Journal(clock, attempt=str(document.attempt), pod_uid=document.pod_uid),
    )
    sys.exit(asyncio.run(agent.run()))


def _usage(text: str) -> int:
    print(f"springtide-agent: {text}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    main()
