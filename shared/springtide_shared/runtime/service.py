"""What every service is made of: consumers and timers under one roof, ended in three steps.

A service subclasses `Service`, recovers in `start`, and names its loops: `consumer(...)` for what
comes over the bus, `timer(...)` for what is decided again and again. The base owns every task. Its
rules: a handler's `TransientError` gives the delivery back with a growing pause, a `PermanentError`
parks it with the reason, anything else ends the service loudly.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from springtide_shared.errors import ConflictError, PermanentError, Reason, TransientError
from springtide_shared.ports.bus import Delivery, MessageBus, Subscription
from springtide_shared.ports.clock import Clock, Ids

MAX_BACKOFF_SECONDS: Final = 300.0
_TOO_SHORT: Final = 1e-6
"""Seconds that are not worth a sleep."""


def backoff(
    attempt: int, ids: Ids, *, base: float = 1.0, most: float = MAX_BACKOFF_SECONDS
) -> float:
    """Growing pause with full jitter on its upper half, in seconds; `attempt` counts from 1."""
    ceiling = min(most, base * 2.0 ** min(attempt - 1, 30))
    return ids.uniform(ceiling / 2, ceiling)


class Wake:
    """Wakes a timer before its time; many calls wake it once. One waits at a time."""

    __slots__ = ("_alarm", "_due", "_is_called", "_waiter")

    def __init__(self) -> None:
        self._is_called = False
        self._due = math.inf
        """Loop time by which the wait ends in any case."""
        self._waiter: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None

    def __call__(self) -> None:
        self._is_called = True
        if self._waiter is not None:
            _resolve(self._waiter)

    def after(self, seconds: float) -> None:
        """Wake in `seconds` at the latest: the wait under way, or else the next one."""
        loop = asyncio.get_running_loop()
        self._due = min(self._due, loop.time() + seconds)
        if self._waiter is not None and self._alarm is not None:
            if self._due >= self._alarm.when():
                return
            self._alarm.cancel()
            self._alarm = loop.call_at(self._due, _resolve, self._waiter)

    def clear(self) -> None:
        """Forget what has been called for: whoever waited is about to look."""
        self._is_called = False
        self._due = math.inf

    async def wait(self, limit: float) -> None:
        """Until called, or `limit` seconds."""
        if not self._is_called:
            # A bare future and one timer: services wait many thousand times an hour.
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            due = min(self._due, loop.time() + limit)
            self._alarm = loop.call_at(due, _resolve, self._waiter)
            try:
                await self._waiter
            finally:
                self._alarm.cancel()
                self._waiter = self._alarm = None
        self.clear()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@dataclass(frozen=True, slots=True)
class Health:
    """Answer of `/readyz`: reasons are empty when ready."""

    reasons: tuple[str, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether the service can do its work now."""
        return not self.reasons


Handler = Callable[[Sequence[Delivery]], Awaitable[None]]
Loop = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class _Running:
    """One loop of a service. `idle`: it waits for input, so that a stop may cancel it."""

    name: str
    task: asyncio.Task[None] | None = None
    idle: bool = False
    beat: float = 0.0
    stall_limit: float = 0.0


class Service:
    """Base of all services; see the module."""

    name = "service"

    def __init__(self, *, bus: MessageBus, clock: Clock, ids: Ids) -> None:
        self.bus = bus
        self.clock = clock
        self.ids = ids
        self.log: structlog.stdlib.BoundLogger = structlog.get_logger(service=self.name)
        self._stopping = False
        self._started = False
        self._running: list[_Running] = []

    # ------------------------------------------------------------ for subclasses
    async def start(self) -> None:
        """Recover what the last life left; before any loop runs."""

    def loops(self) -> Sequence[tuple[str, Loop]]:
        """(name, loop) pairs, made by `consumer` and `timer`."""
        raise NotImplementedError

    async def finish(self) -> None:
        """Last words, after all loops have ended in an orderly stop."""

    def not_ready(self) -> Sequence[str]:
        """Reasons of the service's own for not being ready."""
        return ()

    def consumer(
        self,
        subscription: Subscription,
        handler: Handler,
        *,
        batch: int = 100,
        least: float = 0.0,
    ) -> tuple[str, Loop]:
        """A loop that hands deliveries to `handler`, up to `batch` at a time, at most each `least`
        seconds: what comes meanwhile is handled together.

        The handler settles each delivery itself (ack, retry, dead_letter). Faults it raises are
        settled here for all deliveries of the batch that it left unsettled.
        """
        name = f"consume:{subscription.queue}"

        async def loop() -> None:
            me = self._me(name)
            failures = 0
            while not self._stopping:
                try:
                    async with self.bus.subscribe(subscription) as inbox:
                        while not self._stopping:
                            me.idle = True
                            deliveries = await inbox.receive(limit=batch)
                            me.idle = False
                            me.beat = self.clock.monotonic()
                            if deliveries:
                                await self._handle(deliveries, handler)
                                failures = 0
                                if least and len(deliveries) < batch:
                                    me.idle = True
                                    await asyncio.sleep(least)
                except TransientError as error:
                    failures += 1
                    self.log.warning("consumer.lost", queue=subscription.queue, error=str(error))
                    me.idle = True
                    await asyncio.sleep(backoff(failures, self.ids, most=30.0))

        return name, loop

    def timer(
        self,
        name: str,
        interval: float,
        action: Callable[[], Awaitable[None]],
        *,
        wake: Wake | None = None,
        least: float = 0.0,
        longest_backoff: float | None = None,
    ) -> tuple[str, Loop]:
        """A loop that runs `action` every `interval` s, earlier when woken, at most each `least` s.

        A transient fault or a lost race is logged, and the next round decides afresh; after
        repeated ones the pause grows to `longest_backoff` s (default and most: `interval`).
        """
        alarm = wake or Wake()
        most = interval if longest_backoff is None else min(interval, longest_backoff)

        async def loop() -> None:
            me = self._me(name)
            me.stall_limit = max(60.0, 10 * most)
            failures = 0
            while not self._stopping:
                me.beat = self.clock.monotonic()
                try:
                    await action()
                    failures = 0
                except (TransientError, ConflictError) as error:
                    failures += 1
                    self.log.warning("round.failed", round=name, error=str(error))
                if self._is_ending():
                    return
                me.idle = True
                if failures:
                    await asyncio.sleep(backoff(failures, self.ids, most=most))
                else:
                    rested = self.clock.monotonic()
                    await alarm.wait(max(interval, least))
                    early = least - (self.clock.monotonic() - rested)
                    if early > _TOO_SHORT:
                        await asyncio.sleep(early)
                    alarm.clear()
                me.idle = False

        return name, loop

    def watcher(
        self,
        name: str,
        wait: Callable[[], Awaitable[None]],
        action: Callable[[], Awaitable[None]],
    ) -> tuple[str, Loop]:
        """A loop that waits for news by `wait`, then runs `action`; a stop may cut the waiting.

        `wait` must have a limit of its own. A transient fault of either is logged, and after a
        growing pause the loop goes on.
        """

        async def loop() -> None:
            me = self._me(name)
            failures = 0
            while not self._stopping:
                me.idle = True
                try:
                    await wait()
                    me.idle = False
                    me.beat = self.clock.monotonic()
                    await action()
                    failures = 0
                except TransientError as error:
                    failures += 1
                    me.idle = True
                    self.log.warning("watch.failed", watch=name, error=str(error))
                    await asyncio.sleep(backoff(failures, self.ids, most=30.0))

        return name, loop

    # ------------------------------------------------------------ life
    async def serve(self, stop: asyncio.Event, *, drain: float = 10.0) -> None:
        """Run until `stop` is set (or a loop fails), then end within about `drain` seconds.

        Cancelling this instead is a crash: nothing is settled or said.
        """
        await self.start()
        self._started = True
        try:
            async with asyncio.TaskGroup() as group:
                for name, loop in self.loops():
                    running = self._me(name)
                    running.task = group.create_task(
                        self._guard(name, loop), name=f"{self.name}/{name}"
                    )
                watcher = group.create_task(self._end_on(stop, drain), name=f"{self.name}/stop")
                await asyncio.sleep(0)
                for running in list(self._running):
                    if running.task is not None:
                        await asyncio.wait([running.task])
                watcher.cancel()
            await self.finish()
        finally:
            self._started = False

    def health(self) -> Health:
        """Whether the service does its work now."""
        reasons = list(self.not_ready())
        if not self._started:
            reasons.append("not-started")
        ready, why = self.bus.ready()
        if not ready:
            reasons.append(f"bus: {why}")
        now = self.clock.monotonic()
        reasons += [
            f"loop {item.name} is stalled for {now - item.beat:.0f} s"
            for item in self._running
            if item.stall_limit and not item.idle and now - item.beat > item.stall_limit
        ]
        return Health(tuple(reasons))

    def _is_ending(self) -> bool:
        return self._stopping

    def _me(self, name: str) -> _Running:
        for item in self._running:
            if item.name == name:
                return item
        item = _Running(name, beat=self.clock.monotonic())
        self._running.append(item)
        return item

    async def _guard(self, name: str, loop: Loop) -> None:
        try:
            await loop()
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        except Exception as error:
            self.log.exception("loop.failed", loop=name, error=repr(error))
            raise
        else:
            if not self._stopping:
                raise RuntimeError(f"loop {name} of {self.name} ended by itself")

    async def _end_on(self, stop: asyncio.Event, drain: float) -> None:
        await stop.wait()
        self._stopping = True
        for item in self._running:
            if item.task is not None and item.idle:
                item.task.cancel()
        busy = [
            item.task for item in self._running if item.task is not None and not item.task.done()
        ]
        if busy:
            _, late = await asyncio.wait(busy, timeout=drain)
            for task in sorted(late, key=lambda task: task.get_name()):
                self.log.warning("drain.cut", loop=task.get_name(), after_seconds=drain)
                task.cancel()

    async def _handle(self, deliveries: Sequence[Delivery], handler: Handler) -> None:
        try:
            await handler(deliveries)
        except TransientError as error:
            self.log.warning("delivery.retried", error=str(error), deliveries=len(deliveries))
            for delivery in deliveries:
                pause = error.retry_after or backoff(delivery.attempt, self.ids)
                await delivery.retry(pause, error.reason, str(error))
        except ConflictError as error:
            for delivery in deliveries:
                await delivery.retry(
                    backoff(delivery.attempt, self.ids, base=0.1), Reason.STALE, str(error)
                )
        except PermanentError as error:
            if len(deliveries) > 1:
                # One of them is bad: hand them over one by one, so that only the bad one is parked.
                for delivery in deliveries:
                    await self._handle([delivery], handler)
            else:
                self.log.error("delivery.parked", error=str(error))
                await deliveries[0].dead_letter(error.reason, str(error))


class SnapshotWriter:
    """Numbers the editions of one producer's snapshots and cuts them into parts."""

    def __init__(self, cluster: str, epoch: int) -> None:
        self.cluster = cluster
        self.epoch = epoch
        self._seq: dict[type[Any], int] = {}

    def parts(
        self,
        cls: type[Any],
        valid_until: float,
        field_name: str,
        entries: Sequence[Any],
        *,
        per_part: int = 500,
        **fields: Any,
    ) -> list[Any]:
        """The next edition of `cls`: `entries` in `field_name`, at most `per_part` a message."""
        seq = self._seq[cls] = self._seq.get(cls, 0) + 1
        chunks = [entries[i : i + per_part] for i in range(0, len(entries), per_part)] or [()]
        return [
            cls(
                cluster=self.cluster,
                epoch=self.epoch,
                seq=seq,
                part=number,
                parts=len(chunks),
                valid_until=valid_until,
                **{field_name: list(chunk)},
                **fields,
            )
            for number, chunk in enumerate(chunks)
        ]
