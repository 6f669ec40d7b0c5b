"""A ledger on a real database under services in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from springtide_shared.ports.ledger import Changes, ChunkRow, JobRow, Ledger, OutboxRow, TaskRow


class RealIoLedger:
    """Holds the virtual clock while the wrapped ledger works; in real time it changes nothing.

    Calls take no virtual time at all, so what a simulation finds does not depend on this machine's
    disk. Open and close the ledger inside the loop's `real_io()` as well.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def begin_epoch(self, holder: str) -> int:
        """See `Ledger.begin_epoch`."""
        with _clock_held():
            return await self._ledger.begin_epoch(holder)

    async def commit(self, changes: Changes) -> None:
        """See `Ledger.commit`."""
        with _clock_held():
            await self._ledger.commit(changes)

    async def jobs(
        self,
        *,
        active: bool | None = None,
        tenant: str | None = None,
        limit: int = 1_000,
        after: str = "",
    ) -> Sequence[JobRow]:
        """See `Ledger.jobs`."""
        with _clock_held():
            return await self._ledger.jobs(active=active, tenant=tenant, limit=limit, after=after)

    async def job(self, job_id: str) -> JobRow | None:
        """See `Ledger.job`."""
        with _clock_held():
            return await self._ledger.job(job_id)

    async def chunks(
        self, job_id: str, first: int = 0, last: int | None = None
    ) -> Sequence[ChunkRow]:
        """See `Ledger.chunks`."""
        with _clock_held():
            return await self._ledger.chunks(job_id, first, last)

    async def tasks(
        self, job_id: str, first: int = 0, last: int | None = None
    ) -> Sequence[TaskRow]:
        """See `Ledger.tasks`."""
        with _clock_held():
            return await self._ledger.tasks(job_id, first, last)

    async def outbox(self, limit: int = 500) -> Sequence[OutboxRow]:
        """See `Ledger.outbox`."""
        with _clock_held():
            return await self._ledger.outbox(limit)

    async def size_bytes(self) -> int:
        """See `Ledger.size_bytes`."""
        with _clock_held():
            return await self._ledger.size_bytes()


def _clock_held() -> AbstractContextManager[None]:
    real_io = getattr(asyncio.get_running_loop(), "real_io", None)
    return nullcontext() if real_io is None else real_io()
