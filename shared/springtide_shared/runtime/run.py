"""Running services as a process: signals, a staged stop with a deadline, health."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from springtide_shared.runtime.service import Service

ONE_WISH_SECONDS: Final = 1.0
"""Signals this close together are one wish to end: `timeout` and a terminal's Ctrl-C reach the
process and its group, so that one wish arrives twice."""


def calm_collector() -> None:
    """Let the cyclic garbage collector leave alone what stays, and come less often.

    To be called once all is wired. Nearly everything that a service makes is freed by its reference
    count; to look for cycles after every 700 objects, and through all there is every now and then,
    took a sixth of the CPU, at times a tenth of a second in the middle of somebody's dispatch.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop`; one that comes a second later ends the process at once.

    Repeats within `ONE_WISH_SECONDS` of the first signal change nothing.
    """
    loop = asyncio.get_running_loop()
    caught = (signal.SIGTERM, signal.SIGINT)
    timer: asyncio.TimerHandle | None = None

    def let_go() -> None:
        # The system's own action, so that it works even if the loop is stuck by then.
        for number in caught:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    def on_signal() -> None:
        nonlocal timer
        if timer is None:
            stop.set()
            timer = loop.call_later(ONE_WISH_SECONDS, let_go)

    for number in caught:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        for number in caught:
            loop.remove_signal_handler(number)


async def serve_all(
    services: Sequence[Service], stop: asyncio.Event, *, drain: float = 10.0
) -> None:
    """Run services side by side until `stop`; one that fails ends all, loudly."""
    async with asyncio.TaskGroup() as group:
        for service in services:
            group.create_task(service.serve(stop, drain=drain), name=service.name)
