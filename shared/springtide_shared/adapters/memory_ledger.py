"""The ledger in memory: for virtual time and for tests; the same answers as the SQL one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from springtide_shared.adapters.faults import Faults
from springtide_shared.errors import ConflictError, Reason
from springtide_shared.ports.ledger import Changes, ChunkRow, JobRow, OutboxRow, TaskRow

Row = TypeVar("Row", ChunkRow, TaskRow)

_ROW_OVERHEAD_BYTES = 16
"""Key numbers, lengths and row head, about what a database spends on them."""


class _Numbered(Generic[Row]):
    """Rows of one job by number, readable in order.

    Dispatch inserts in order and settling deletes anywhere; so the order is kept lazily: a read
    sorts once after a batch of writes, which costs less than keeping a sorted list at each write.
    """

    __slots__ = ("_order", "rows")

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self._order: list[int] | None = []

    def put(self, number: int, row: Row) -> None:
        if number not in self.rows:
            self._order = None
        self.rows[number] = row

    def drop(self, number: int) -> None:
        if self.rows.pop(number, None) is not None:
            self._order = None

    def between(self, first: int, last: int | None) -> list[Row]:
        if first == last:  # one row needs no order
            row = self.rows.get(first)
            return [] if row is None else [row]
        if self._order is None:
            self._order = sorted(self.rows)
        order = self._order
        end = len(order) if last is None else bisect_right(order, last)
        return [self.rows[number] for number in order[bisect_left(order, first) : end]]


class InMemoryLedger:
    """Keeps rows in dictionaries. Rows are immutable, so nothing is copied.

    Args:
        faults: lets calls fail on request (tests, simulation).
    """

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults("ledger")
        self._epoch = 0
        self._holder = ""
        self._jobs: dict[str, JobRow] = {}
        self._job_ids: list[str] = []
        self._chunks: dict[str, _Numbered[ChunkRow]] = {}
        self._tasks: dict[str, _Numbered[TaskRow]] = {}
        self._outbox: dict[str, OutboxRow] = {}
        self._outbox_ids: list[str] = []

    async def begin_epoch(self, holder: str) -> int:
        """See `Ledger.begin_epoch`."""
        with self.faults.call("begin_epoch"):
            self._epoch += 1
            self._holder = holder
            return self._epoch

    async def commit(self, changes: Changes) -> None:
        """See `Ledger.commit`. Everything is checked before anything is written."""
        with self.faults.call("commit"):
            if changes.epoch != self._epoch:
                raise ConflictError(
                    Reason.STALE,
                    "another epoch has begun",
                    epoch=changes.epoch,
                    current=self._epoch,
                )
            jobs = self._checked_jobs(changes.jobs)
            self._check_outbox(changes.outbox)
            for job_id, row in jobs.items():
                if job_id not in self._jobs:
                    insort(self._job_ids, job_id)
                self._jobs[job_id] = row
            for chunk in changes.chunks:
                _of(self._chunks, chunk.job_id).put(chunk.number, chunk)
            for task in changes.tasks:
                _of(self._tasks, task.job_id).put(task.index, task)
            for job_id, index in changes.settled:
                if (of_job := self._tasks.get(job_id)) is not None:
                    of_job.drop(index)
                    if not of_job.rows:
                        del self._tasks[job_id]
            for message in changes.outbox:
                self._outbox[message.id] = message
                insort(self._outbox_ids, message.id)
            for message_id in changes.sent:
                if self._outbox.pop(message_id, None) is not None:
                    del self._outbox_ids[bisect_left(self._outbox_ids, message_id)]

    def _checked_jobs(self, rows: Sequence[JobRow]) -> dict[str, JobRow]:
        """The rows as they will stand, with what never changes taken from the first version."""
        staged: dict[str, JobRow] = {}
        for row in rows:
            old = staged.get(row.job_id) or self._jobs.get(row.job_id)
            there = 0 if old is None else old.version
            if row.version != there + 1:
                raise ConflictError(
                    Reason.STALE,
                    "the job was changed by somebody else",
                    job=row.job_id,
                    version=row.version,
                )
            if old is not None:
                row = msgspec.structs.replace(  # noqa: PLW2901
                    row, tenant=old.tenant, created_at=old.created_at, spec=old.spec
                )
            staged[row.job_id] = row
        return staged

    def _check_outbox(self, rows: Sequence[OutboxRow]) -> None:
        new: set[str] = set()
        for row in rows:
            if row.id in self._outbox or row.id in new:
                raise ConflictError(
                    Reason.DUPLICATE_ID, "an outbox id is taken: make a fresh one", id=row.id
                )
            new.add(row.id)

    async def jobs(
        self,
        *,
        active: bool | None = None,
        tenant: str | None = None,
        limit: int = 1_000,
        after: str = "",
    ) -> Sequence[JobRow]:
        """See `Ledger.jobs`."""
        with self.faults.call("jobs"):
            found: list[JobRow] = []
            for position in range(bisect_right(self._job_ids, after), len(self._job_ids)):
                if len(found) >= limit:
                    break
                row = self._jobs[self._job_ids[position]]
                if (active is None or row.state.is_final is not active) and (
                    tenant is None or row.tenant == tenant
                ):
                    found.append(row)
            return found

    async def job(self, job_id: str) -> JobRow | None:
        """See `Ledger.job`."""
        with self.faults.call("job"):
            return self._jobs.get(job_id)

    async def chunks(
        self, job_id: str, first: int = 0, last: int | None = None
    ) -> Sequence[ChunkRow]:
        """See `Ledger.chunks`."""
        with self.faults.call("chunks"):
            of_job = self._chunks.get(job_id)
            return [] if of_job is None else of_job.between(first, last)

    async def tasks(
        self, job_id: str, first: int = 0, last: int | None = None
    ) -> Sequence[TaskRow]:
        """See `Ledger.tasks`."""
        with self.faults.call("tasks"):
            of_job = self._tasks.get(job_id)
            return [] if of_job is None else of_job.between(first, last)

    async def outbox(self, limit: int = 500) -> Sequence[OutboxRow]:
        """See `Ledger.outbox`."""
        with self.faults.call("outbox"):
            return [self._outbox[message_id] for message_id in self._outbox_ids[:limit]]

    async def size_bytes(self) -> int:
        """See `Ledger.size_bytes`: keys and bodies, with a database's usual overhead per row."""
        with self.faults.call("size_bytes"):
            size = 0
            for job in self._jobs.values():
                size += len(job.job_id) + len(job.tenant) + len(job.spec) + len(job.body)
                size += _ROW_OVERHEAD_BYTES
            for tables in (self._chunks, self._tasks):
                for job_id, of_job in tables.items():
                    size += (len(job_id) + _ROW_OVERHEAD_BYTES) * len(of_job.rows)
                    size += sum(len(row.body) for row in of_job.rows.values())
            for message in self._outbox.values():
                size += len(message.id) + len(message.body) + _ROW_OVERHEAD_BYTES
            return size


def _of(tables: dict[str, _Numbered[Row]], job_id: str) -> _Numbered[Row]:
    table = tables.get(job_id)
    if table is None:
        table = tables[job_id] = _Numbered()
    return table
