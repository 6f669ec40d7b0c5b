"""Ledger: loads rows and commits changes with their outbox as one; all logic is elsewhere, pure.

Rows are small on purpose. An array of a million tasks is one job row until its tasks start; a chunk
row packs 4,096 settled tasks; only live or not-clean tasks have rows of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from springtide_shared.messages.job import JobState

CHUNK_TASKS: Final = 4_096


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """One job. `spec` never changes after the first version; `body` does."""

    job_id: str
    tenant: str
    state: JobState
    created_at: float
    version: int
    """1 for a new row; each commit that touches the job raises it by one."""
    spec: bytes
    body: bytes
    """Counts, watermark and the like, packed by the ledger's pure code."""


class ChunkRow(msgspec.Struct, frozen=True, kw_only=True):
    """States of 4,096 tasks from `number * 4096` on, packed."""

    job_id: str
    number: int
    body: bytes


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """A task that is live or not clean, packed."""

    job_id: str
    index: int
    body: bytes


class OutboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """A message that the commit promised; sent after it, then deleted. `id` sorts by age."""

    id: str
    type_name: str
    cluster: str
    body: bytes
    to: str = ""
    """A `reply_to` address instead of a routing key."""
    correlation_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """One commit: all of it or nothing."""

    epoch: int
    jobs: Sequence[JobRow] = ()
    """Version 1 inserts; version n needs version n-1 there."""
    chunks: Sequence[ChunkRow] = ()
    tasks: Sequence[TaskRow] = ()
    settled: Sequence[tuple[str, int]] = ()
    """Task rows (job id, index) to delete: they are folded into a chunk."""
    outbox: Sequence[OutboxRow] = ()
    sent: Sequence[str] = ()
    """Outbox ids to delete."""


class Ledger(Protocol):
    """The durable record of jobs and tasks.

    All calls raise `TransientError` while the database does not answer.
    """

    async def begin_epoch(self, holder: str) -> int:
        """Become the writer: returns a number above all earlier ones, whose commits now fail."""
        ...

    async def commit(self, changes: Changes) -> None:
        """Apply all or nothing, durable on return.

        Raises:
            ConflictError: a job's version is not the one expected, or a newer epoch has begun.
        """
        ...

    async def jobs(
        self,
        *,
        active: bool | None = None,
        tenant: str | None = None,
        limit: int = 1_000,
        after: str = "",
    ) -> Sequence[JobRow]:
        """Job rows in id order behind `after`; `active`: only those not (or only those) final."""
        ...

    async def job(self, job_id: str) -> JobRow | None:
        """One job row."""
        ...

    async def chunks(
        self, job_id: str, first: int = 0, last: int | None = None
    ) -> Sequence[ChunkRow]:
        """Chunk rows numbered `first` … `last` (inclusive), in order."""
        ...

    async def tasks(
        self, job_id: str, first: int = 0, last: int | None = None
    ) -> Sequence[TaskRow]:
        """Task rows with indices `first` … `last` (inclusive), in order."""
        ...

    async def outbox(self, limit: int = 500) -> Sequence[OutboxRow]:
        """Unsent messages, oldest first."""
        ...

    async def size_bytes(self) -> int:
        """Bytes that the rows take, indices included where the database can tell."""
        ...
