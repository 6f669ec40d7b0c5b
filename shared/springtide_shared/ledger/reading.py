"""What readers ask of the ledger: jobs and tasks as views, from rows that others write.

Reading takes no lock. A task row is read before the chunk it may be folded into meanwhile, so that
no task is missed between the two; where both tell of a task, its own row is newer or the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from springtide_shared.ledger.chunks import Chunk
from springtide_shared.ledger.records import (
    JobBody,
    TaskRecord,
    task_view,
    unpack_body,
    unpack_spec,
    unpack_task,
)
from springtide_shared.ledger.views import JobView, TaskState, TaskView
from springtide_shared.ports.ledger import CHUNK_TASKS, JobRow, Ledger

MAX_LIMIT: Final = 10_000
"""Most views that one call returns."""


def job_view_of(row: JobRow) -> JobView | None:
    """The job in a row; None for a tombstone, whose job has not come."""
    body = unpack_body(row.body)
    if body.size == 0:
        return None
    return JobView(
        spec=unpack_spec(body.late_spec or row.spec),
        tenant=row.tenant,
        state=row.state,
        counts=body.counts(),
        created_at=row.created_at,
        ended_at=body.ended_at,
        waiting=body.waiting,
    )


async def job_view(ledger: Ledger, job_id: str) -> JobView | None:
    """One job; None if there is none of that id."""
    row = await ledger.job(job_id)
    return None if row is None else job_view_of(row)


async def job_views(
    ledger: Ledger, *, tenant: str | None = None, limit: int = 100, after: str = ""
) -> list[JobView]:
    """Jobs in id order behind `after`, of one tenant or of all; at most `limit` of them."""
    limit = max(0, min(limit, MAX_LIMIT))
    found: list[JobView] = []
    while len(found) < limit:
        wanted = limit - len(found)
        rows = await ledger.jobs(tenant=tenant, limit=wanted, after=after)
        found += [view for row in rows if (view := job_view_of(row)) is not None]
        if len(rows) < wanted:
            break
        after = rows[-1].job_id
    return found


async def task_views(
    ledger: Ledger,
    job_id: str,
    *,
    first: int = 0,
    limit: int = 1_000,
    states: Collection[TaskState] | None = None,
) -> list[TaskView]:
    """Tasks in index order from `first` on, all or those in `states`; at most `limit` of them.

    Without `states` the next page begins at `first + limit`, else behind the last index returned.
    An unknown job has no tasks.
    """
    row = await ledger.job(job_id)
    if row is None:
        return []
    body = unpack_body(row.body)
    limit = max(0, min(limit, MAX_LIMIT))
    found: list[TaskView] = []
    at = max(0, first)
    while at < body.size and len(found) < limit:
        # Never more than a chunk at once: a job of a million tasks is read in pieces.
        chunk_end = (at // CHUNK_TASKS + 1) * CHUNK_TASKS
        last = min(body.size, chunk_end) - 1
        if states is None:
            last = min(last, at + limit - len(found) - 1)
        views = await _window(ledger, job_id, body, at, last)
        found += [view for view in views if states is None or view.state in states]
        at = last + 1
    return found[:limit]


async def _window(
    ledger: Ledger, job_id: str, body: JobBody, first: int, last: int
) -> Sequence[TaskView]:
    """Views of all tasks `first` … `last` (inclusive) of one chunk."""
    records: dict[int, TaskRecord] = {}
    chunk: Chunk | None = None
    # One that was dispatched since the job row was read may lie behind the watermark: look anyway.
    for task in await ledger.tasks(job_id, first, last):
        records[task.index] = unpack_task(task.body)
    number = first // CHUNK_TASKS
    for stored in await ledger.chunks(job_id, number, number):
        chunk = Chunk.unpack(number, stored.body)
    views: list[TaskView] = []
    for index in range(first, last + 1):
        record = records.get(index)
        if record is None and chunk is not None:
            record = chunk.get(index)
        if record is not None:
            views.append(task_view(index, record))
        elif body.cancelled_from is not None and index >= body.cancelled_from:
            views.append(TaskView(index=index, state=TaskState.CANCELLED))
        else:
            views.append(TaskView(index=index, state=TaskState.QUEUED))
    return views
