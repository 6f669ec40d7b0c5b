"""`springtide-agent exec --pod FILE`: run one attempt as its pod document says."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import msgspec

from springtide_agent.config import AgentConfig
from springtide_agent.journal import Journal
from springtide_agent.service import Agent
from springtide_agent.wiring import open_store
from springtide_shared.adapters.clock import SystemClock, SystemIds
from springtide_shared.messages.base import explain
from springtide_shared.messages.pod import PodDocument

EXIT_USAGE = 64
"""The pod document cannot be read: nothing was started, nothing was written."""


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="springtide-agent", description=__doc__)
    commands = parser.add_subparsers(dest="form", required=True)
    wrapper = commands.add_parser("exec", help="run the program as this process's child")
    wrapper.add_argument("--pod", required=True, type=Path, help="the pod document (JSON)")
    arguments = parser.parse_args()
    try:
        document = msgspec.json.decode(arguments.pod.read_bytes(), type=PodDocument)
    except OSError as error:
        sys.exit(_usage(f"{arguments.pod}: {error.strerror}"))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        sys.exit(_usage(f"{arguments.pod}: {explain(error)}"))
    clock = SystemClock()
    agent = Agent(
        document=document,
        open_store=lambda: open_store(document.store_url),
        clock=clock,
        ids=SystemIds(clock),
        config=AgentConfig(),
        journal=Journal(clock, attempt=str(document.attempt), pod_uid=document.pod_uid),
    )
    sys.exit(asyncio.run(agent.run()))


def _usage(text: str) -> int:
    print(f"springtide-agent: {text}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    main()
