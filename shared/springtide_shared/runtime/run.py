"""Running services as a process: signals, a staged stop with a deadline, health."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from springtide_shared.runtime.service import Service


@contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop`; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    caught = (signal.SIGTERM, signal.SIGINT)

    def first(number: signal.Signals) -> None:
        stop.set()
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)

    for number in caught:
        loop.add_signal_handler(number, first, number)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


async def serve_all(
    services: Sequence[Service], stop: asyncio.Event, *, drain: float = 10.0
) -> None:
    """Run services side by side until `stop`; one that fails ends all, loudly."""
    async with asyncio.TaskGroup() as group:
        for service in services:
            group.create_task(service.serve(stop, drain=drain), name=service.name)
