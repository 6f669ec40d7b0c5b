"""Keeps services alive in one process, and crashes them on request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from springtide_shared.ports.clock import Ids
from springtide_shared.runtime.service import Health, Service, backoff

STABLE_SECONDS = 60.0
"""A life as long as this forgives the failures before it."""


@dataclass(slots=True)
class Seat:
    """One service's place: what lives there now, and how to make the next one."""

    name: str
    make: Callable[[], Service]
    service: Service | None = None
    task: asyncio.Task[None] | None = None
    lives: int = 0
    crashes: int = 0
    idle_until: float = 0.0


@dataclass(slots=True)
class Supervisor:
    """Runs every service in a seat of its own and makes a new one when it fails.

    A service that ends with an error is replaced after a growing pause; its state is what its
    stores hold, exactly as for a process that was killed.
    """

    ids: Ids
    restart_seconds: float = 1.0
    """First pause before a failed service is made anew."""
    seats: dict[str, Seat] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    last_errors: dict[str, BaseException] = field(default_factory=dict)

    def add(self, name: str, make: Callable[[], Service]) -> None:
        """Give a service a seat; call before `serve`."""
        self.seats[name] = Seat(name, make)

    async def serve(self, stop: asyncio.Event, *, drain: float = 10.0) -> None:
        """Run all services until `stop`."""
        async with asyncio.TaskGroup() as group:
            for seat in self.seats.values():
                group.create_task(self._keep(seat, stop, drain), name=f"seat/{seat.name}")

    async def crash(self, name: str, pause: float = 0.0) -> None:
        """End a service as a kill would: nothing is settled or said. Back after `pause` seconds."""
        seat = self.seats[name]
        task = seat.task
        if task is None or task.done():
            return
        seat.crashes += 1
        seat.idle_until = asyncio.get_running_loop().time() + pause
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task])

    def health(self) -> dict[str, Health]:
        """Readiness of every service."""
        return {
            seat.name: seat.service.health() if seat.service else Health(("not-running",))
            for seat in self.seats.values()
        }

    async def _keep(self, seat: Seat, stop: asyncio.Event, drain: float) -> None:
        loop = asyncio.get_running_loop()
        log = structlog.get_logger(service="supervisor")
        failures = 0
        while not stop.is_set():
            began = loop.time()
            seat.service = seat.make()
            seat.lives += 1
            seat.task = loop.create_task(
                seat.service.serve(stop, drain=drain), name=f"service/{seat.name}"
            )
            try:
                await asyncio.wait([seat.task])
            finally:
                if not seat.task.done():
                    seat.task.cancel()
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait([seat.task])
            if stop.is_set() and not seat.task.cancelled():
                if (error := seat.task.exception()) is not None:
                    log.error("service.failed_in_stop", seat=seat.name, error=repr(error))
                return
            failures = 0 if loop.time() - began > STABLE_SECONDS else failures + 1
            pause = self.restart_seconds
            if not seat.task.cancelled():
                error = seat.task.exception()
                self.failures[seat.name] += 1
                if error is not None:
                    self.last_errors[seat.name] = _leaf(error)
                log.error("service.failed", seat=seat.name, error=repr(error), failures=failures)
                pause = backoff(failures, self.ids, base=self.restart_seconds, most=60.0)
            pause = max(pause, seat.idle_until - loop.time())
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await stop.wait()


def _leaf(error: BaseException) -> BaseException:
    """The first fault inside nested groups: what people need to read."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
