"""Keeps the book and the ledger in step: one change at a time, each one commit.

The book runs ahead of the ledger only inside a change. If a change fails, whether or not its commit
was taken, the book is read anew before the next one: nothing is guessed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from springtide_coordinator.model import Book, Job, Rules
from springtide_shared.errors import ConflictError
from springtide_shared.ledger.chunks import codes_of, fold
from springtide_shared.ledger.records import (
    pack_body,
    pack_task,
    unpack_body,
    unpack_spec,
    unpack_task,
)
from springtide_shared.messages import Message, SliceRun, decode, encode, type_name, type_of
from springtide_shared.ports.clock import Clock
from springtide_shared.ports.ledger import (
    CHUNK_TASKS,
    Changes,
    ChunkRow,
    JobRow,
    Ledger,
    OutboxRow,
    TaskRow,
)

_LOAD_CHUNKS: Final = 8
"""Chunks of a job that are read at once when it is recovered."""
_PAGE: Final = 500


class SupersededError(Exception):
    """Another coordinator has begun a newer epoch: this one may write no more and must end."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A promised message and its row."""

    row: OutboxRow
    message: Message


class Change:
    """What one commit will hold: the jobs it touches and the messages it promises."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self.jobs: dict[str, Job] = {}
        self.outgoing: list[Outgoing] = []
        self.turned: dict[str, Job] = {}
        """Jobs whose state changes with it."""

    def touch(self, job: Job) -> None:
        """This job's row, and its dirty tasks' rows, are to be written."""
        self.jobs[job.job_id] = job

    def turn(self, job: Job) -> None:
        """As `touch`, and its state is another now."""
        self.jobs[job.job_id] = self.turned[job.job_id] = job

    def send(
        self, message: Message, *, cluster: str = "", to: str = "", correlation_id: str = ""
    ) -> None:
        """Promise a message: it leaves after the commit, as often as it takes."""
        row = OutboxRow(
            id=self._keeper.next_outbox_id(),
            type_name=type_name(type(message)),
            cluster=cluster,
            body=encode(message),
            to=to,
            correlation_id=correlation_id,
        )
        self.outgoing.append(Outgoing(row, message))


class Keeper:
    """See the module. Its lock makes every change the only one."""

    def __init__(self, ledger: Ledger, clock: Clock, rules: Rules, holder: str) -> None:
        self._ledger = ledger
        self._clock = clock
        self._rules = rules
        self._holder = holder
        self._lock = asyncio.Lock()
        self._is_behind = False
        self._outbox_ids = 0
        self._seq: dict[str, int] = {}
        self._seq_kept: dict[str, int] = {}
        self.largest: dict[str, int] = {}
        """Cluster → memory of its largest node; outlives a book that is read anew."""
        self.book = Book(rules, self.largest)
        self.epoch = 0
        self.unsent: dict[str, Outgoing] = {}
        """Promised and committed, oldest first."""
        self.sent: dict[str, None] = {}
        """Sent; the next commit deletes their rows."""
        self.committed_at = -math.inf
        """On the monotonic clock."""

    async def begin(self) -> None:
        """Become the writer and read what the last life left."""
        self.epoch = await self._ledger.begin_epoch(self._holder)
        await self._load()

    def next_outbox_id(self) -> str:
        """Sorts by age, over all lives."""
        self._outbox_ids += 1
        return f"{self.epoch:010d}-{self._outbox_ids:012d}"

    def next_slice(self, cluster: str) -> int:
        """Number of the next slice for a cluster, without gaps within this epoch."""
        seq = self._seq[cluster] = self._seq.get(cluster, 0) + 1
        return seq

    @asynccontextmanager
    async def change(self) -> AsyncIterator[Change]:
        """Alone with the book; a fault inside makes it be read anew before the next change."""
        async with self._lock:
            if self._is_behind:
                await self._load()
            try:
                yield Change(self)
            except BaseException:
                self._is_behind = True
                raise

    async def find(self, job_id: str) -> Job | None:
        """A job of the book, else one that has ended, from the ledger (not taken into the book)."""
        job = self.book.jobs.get(job_id)
        if job is None and (row := await self._ledger.job(job_id)) is not None:
            job = _job_of(row)
        return job

    async def commit(self, change: Change) -> None:
        """Write a change, conclude the jobs it finishes, fold what has settled.

        Raises:
            SupersededError: a newer epoch has begun.
            TransientError: the ledger did not answer; it may have been taken.
        """
        now = self._clock.now()
        jobs: list[JobRow] = []
        chunks: list[ChunkRow] = []
        tasks: list[TaskRow] = []
        settled: list[tuple[str, int]] = []
        for job_id, job in change.jobs.items():
            if job.conclude(now):
                change.turned[job_id] = job
            for number in job.chunks_due():
                body, indices = await self._fold(job, number)
                chunks.append(ChunkRow(job_id=job_id, number=number, body=body))
                settled += [(job_id, index) for index in indices]
            records = job.tasks
            tasks += [
                TaskRow(job_id=job_id, index=index, body=pack_task(records[index]))
                for index in job.dirty
            ]
            jobs.append(
                JobRow(
                    job_id=job_id,
                    tenant=job.tenant,
                    state=job.state,
                    created_at=job.created_at,
                    version=job.version + 1,
                    spec=job.packed_spec,
                    body=pack_body(job.body),
                )
            )
        sent = list(self.sent)
        try:
            await self._ledger.commit(
                Changes(
                    epoch=self.epoch,
                    jobs=jobs,
                    chunks=chunks,
                    tasks=tasks,
                    settled=settled,
                    outbox=[outgoing.row for outgoing in change.outgoing],
                    sent=sent,
                )
            )
        except ConflictError as error:
            raise SupersededError(str(error)) from error
        self.committed_at = self._clock.monotonic()
        for job in change.jobs.values():
            job.version += 1
            job.dirty.clear()
            job.dirty_chunks.clear()
        for row_id in sent:
            self.sent.pop(row_id, None)
        for outgoing in change.outgoing:
            self.unsent[outgoing.row.id] = outgoing
        self._seq_kept = dict(self._seq)

    async def _fold(self, job: Job, number: int) -> tuple[bytes, list[int]]:
        stored = None
        if number in job.codes:
            rows = await self._ledger.chunks(job.job_id, number, number)
            stored = rows[0].body if rows else None
        body, codes = fold(number, stored, job.to_fold(number))
        await asyncio.sleep(0)  # a chunk costs a millisecond or two: others may run between them
        return body, job.folded_in(number, codes)

    async def _load(self) -> None:
        """The book as the ledger has it."""
        book = Book(self._rules, self.largest)
        after = ""
        while rows := await self._ledger.jobs(active=True, limit=_PAGE, after=after):
            after = rows[-1].job_id
            for row in rows:
                await self._load_job(book, row)
        self.unsent = {}
        self._seq = dict(self._seq_kept)
        # The outbox is read whole: `limit` grows until it comes back short.
        limit = _PAGE
        while len(kept := await self._ledger.outbox(limit)) == limit:
            limit *= 4
        for kept_row in kept:
            if kept_row.id in self.sent:
                continue
            message = decode(type_of(kept_row.type_name), kept_row.body)
            self.unsent[kept_row.id] = Outgoing(kept_row, message)
            if isinstance(message, SliceRun) and message.epoch == self.epoch:
                newest = max(self._seq.get(message.cluster, 0), message.seq)
                self._seq[message.cluster] = newest
        self._seq_kept = dict(self._seq)
        self.book = book
        self._is_behind = False

    async def _load_job(self, book: Book, row: JobRow) -> None:
        now = self._clock.now()
        job = _job_of(row)
        book.add(job)
        chunks = -(-job.body.next_index // CHUNK_TASKS)
        for first in range(0, chunks, _LOAD_CHUNKS):
            last = min(first + _LOAD_CHUNKS, chunks) - 1
            for chunk in await self._ledger.chunks(row.job_id, first, last):
                job.load_codes(chunk.number, codes_of(chunk.body))
            first_task, last_task = first * CHUNK_TASKS, (last + 1) * CHUNK_TASKS - 1
            for task in await self._ledger.tasks(row.job_id, first_task, last_task):
                job.load(task.index, unpack_task(task.body), now)
            await asyncio.sleep(0)


def _job_of(row: JobRow) -> Job:
    body = unpack_body(row.body)
    return Job(
        job_id=row.job_id,
        tenant=row.tenant,
        state=row.state,
        created_at=row.created_at,
        version=row.version,
        spec=unpack_spec(body.late_spec or row.spec) if body.size else None,
        packed_spec=row.spec,
        body=body,
    )
