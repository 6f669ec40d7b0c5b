"""How many tasks a second the ledger takes through their life, on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.registry import Figure, data_folder
from benchmarks.servers import server
from springtide_shared.adapters.sql_ledger import SqlLedger
from springtide_shared.messages.job import JobState
from springtide_shared.ports.ledger import (
    CHUNK_TASKS,
    Changes,
    ChunkRow,
    JobRow,
    Ledger,
    OutboxRow,
    TaskRow,
)
from springtide_testbed.postgresql import PostgreSQL

TASKS: Final = 100_000
BATCH: Final = 500
"""Tasks a commit, as in the largest slice."""
GOAL: Final = ">= 1000"
"""48,000 places with tasks of a minute would end 800 a second: the platform's worst case."""
_JOB: Final = "01K0BENCH00000000000000000"


def ledger() -> list[Figure]:
    """Dispatch and settle 100,000 tasks in commits of 500, on SQLite and on PostgreSQL."""
    figures: list[Figure] = []
    with TemporaryDirectory(dir=data_folder()) as folder:
        figures += _figures("sqlite", f"sqlite:///{Path(folder) / 'ledger.db'}")
    # as in deployment: what a commit promised is on the disk when it returns
    durable = {"fsync": "on", "full_page_writes": "on"}
    with server(PostgreSQL(settings=durable), "DATABASE_URL") as url:
        if url is not None:
            figures += _figures("postgresql", url)
    return figures


def _figures(name: str, url: str) -> list[Figure]:
    seconds, cpu_seconds = asyncio.run(_measure(url))
    return [
        Figure(
            name=f"ledger_tasks_per_second_{name}",
            value=round(TASKS / seconds),
            unit="tasks/s",
            goal=GOAL,
        ),
        Figure(
            name=f"ledger_cpu_ms_per_task_{name}",
            value=round(cpu_seconds / TASKS * 1000, 4),
            unit="ms",
            goal="",
        ),
    ]


async def _measure(url: str) -> tuple[float, float]:
    async with SqlLedger.open(url, migrate=True) as opened:
        wall, cpu = time.perf_counter(), time.process_time()
        await _live(opened)
        return time.perf_counter() - wall, time.process_time() - cpu


async def _live(ledger: Ledger) -> None:
    """The commits of an array's life: dispatch, sent, running, settled and folded."""
    epoch = await ledger.begin_epoch("benchmark")
    version = 1

    def job() -> JobRow:
        return JobRow(
            job_id=_JOB,
            tenant="bench",
            state=JobState.RUNNING,
            created_at=0.0,
            version=version,
            spec=b"s" * 1_000,
            body=b"b" * 200,
        )

    await ledger.commit(Changes(epoch=epoch, jobs=[job()]))
    for start in range(0, TASKS, BATCH):
        indices = range(start, start + BATCH)
        version += 1
        slice_run = OutboxRow(
            id=f"{version:026}", type_name="slice.run.v1", cluster="c1", body=b"o" * 2_000
        )
        rows = [TaskRow(job_id=_JOB, index=i, body=b"d" * 40) for i in indices]
        await ledger.commit(Changes(epoch=epoch, jobs=[job()], tasks=rows, outbox=[slice_run]))
        sent = [row.id for row in await ledger.outbox()]
        await ledger.commit(Changes(epoch=epoch, sent=sent))
        version += 1
        rows = [TaskRow(job_id=_JOB, index=i, body=b"r" * 160) for i in indices]
        await ledger.commit(Changes(epoch=epoch, jobs=[job()], tasks=rows))
        version += 1
        chunks = [
            ChunkRow(
                job_id=_JOB,
                number=number,
                body=b"c" * 40 * min(indices[-1] + 1 - number * CHUNK_TASKS, CHUNK_TASKS),
            )
            for number in range(start // CHUNK_TASKS, indices[-1] // CHUNK_TASKS + 1)
        ]
        settled = [(_JOB, i) for i in indices]
        await ledger.commit(Changes(epoch=epoch, jobs=[job()], chunks=chunks, settled=settled))
    assert not await ledger.tasks(_JOB)
    assert len(await ledger.chunks(_JOB)) == -(-TASKS // CHUNK_TASKS)
