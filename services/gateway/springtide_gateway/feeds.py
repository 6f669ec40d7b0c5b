"""What the gateway hears over the bus and hands on: progress of jobs, snapshots of clusters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from springtide_gateway.policy import cluster_info
from springtide_shared.errors import Reason, TransientError
from springtide_shared.httpapi import CapacityInfo, JobProgress
from springtide_shared.messages.cluster import Capacity, Credit, Usage
from springtide_shared.messages.job import JobEvents
from springtide_shared.runtime.snapshots import SnapshotShelf


class Listener:
    """One reader of one job's progress. Only the newest event waits: events say totals."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self._newest: JobProgress | None = None
        self._arrived = asyncio.Event()
        self.is_closed = False

    def put(self, event: JobProgress) -> None:
        """Hand over an event; an older one that waits is dropped."""
        self._newest = event
        self._arrived.set()

    def close(self) -> None:
        """The gateway ends: the reader shall, too."""
        self.is_closed = True
        self._arrived.set()

    async def next(self, limit: float) -> JobProgress | None:
        """The newest event; None if none came within `limit` seconds or the feed is closed."""
        try:
            async with asyncio.timeout(limit):
                await self._arrived.wait()
        except TimeoutError:
            return None
        if not self.is_closed:
            self._arrived.clear()
        event, self._newest = self._newest, None
        return event


class JobFeed:
    """Hands events to those who listen to that job."""

    def __init__(self, max_listeners: int) -> None:
        self._max = max_listeners
        self._count = 0
        self._listeners: dict[str, list[Listener]] = {}
        self._closed = False

    def take(self, event: JobEvents) -> None:
        """One event from the bus; only listeners of the job's own tenant get it."""
        for listener in self._listeners.get(event.job_id, ()):
            if listener.tenant == event.tenant:
                listener.put(
                    JobProgress(
                        id=event.job_id,
                        state=event.state,
                        counts=event.counts,
                        at=event.at,
                        waiting=event.waiting,
                    )
                )

    @contextmanager
    def listen(self, job_id: str, tenant: str) -> Iterator[Listener]:
        """Listen while the context is open.

        Raises:
            TransientError: too many listen already (`limit-reached`).
        """
        self.check_room()
        listener = Listener(tenant)
        if self._closed:
            listener.close()
        self._count += 1
        self._listeners.setdefault(job_id, []).append(listener)
        try:
            yield listener
        finally:
            self._count -= 1
            self._listeners[job_id].remove(listener)
            if not self._listeners[job_id]:
                del self._listeners[job_id]

    def check_room(self) -> None:
        """Before a response is begun that cannot be taken back.

        Raises:
            TransientError: too many listen already (`limit-reached`).
        """
        if self._count >= self._max:
            raise TransientError(
                Reason.LIMIT_REACHED,
                f"{self._max} event streams are open; close one or ask for the job's state instead",
                retry_after=10.0,
            )

    def close(self) -> None:
        """End all streams, now and those to come."""
        self._closed = True
        for listeners in self._listeners.values():
            for listener in listeners:
                listener.close()


class ClusterBoard:
    """The newest snapshots of all clusters."""

    def __init__(self) -> None:
        self._capacity: SnapshotShelf[Capacity] = SnapshotShelf()
        self._usage: SnapshotShelf[Usage] = SnapshotShelf()
        self._credit: SnapshotShelf[Credit] = SnapshotShelf()

    def take(self, message: Any) -> None:
        """One snapshot part from the bus."""
        match message:
            case Capacity():
                self._capacity.take(message)
            case Usage():
                self._usage.take(message)
            case Credit():
                self._credit.take(message)

    def shown(self, now: float) -> CapacityInfo:
        """All clusters of which anything fresh is known, by name."""
        capacity = {one.cluster: one.parts for one in self._capacity.all_fresh(now)}
        usage = {one.cluster: one.parts for one in self._usage.all_fresh(now)}
        credit = {one.cluster: one.parts for one in self._credit.all_fresh(now)}
        names = sorted({*capacity, *usage, *credit})
        return CapacityInfo(
            at=now,
            clusters=[
                cluster_info(
                    name, capacity.get(name, ()), usage.get(name, ()), credit.get(name, ())
                )
                for name in names
            ],
        )
