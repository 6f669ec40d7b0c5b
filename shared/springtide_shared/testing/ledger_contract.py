"""What every `Ledger` must do, as cases that run on each adapter, each on an empty ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from springtide_shared.errors import ConflictError, Reason
from springtide_shared.messages.job import JobState
from springtide_shared.ports.ledger import Changes, ChunkRow, JobRow, Ledger, OutboxRow, TaskRow
from springtide_shared.testing.expecting import refused

Case = Callable[[Ledger], Awaitable[None]]
CASES: Final[dict[str, Case]] = {}
"""Every case by name."""

ALL_BYTES: Final = bytes(range(256))


def case(function: Case) -> Case:
    """Register a case under its function's name."""
    CASES[function.__name__] = function
    return function


def job_row(
    job_id: str = "job-1",
    version: int = 1,
    *,
    state: JobState = JobState.RUNNING,
    tenant: str = "lab",
    body: bytes = b"body",
    spec: bytes = b"spec",
    created_at: float = 1_790_000_000.25,
) -> JobRow:
    """A job row that differs from the usual one as told."""
    return JobRow(
        job_id=job_id,
        tenant=tenant,
        state=state,
        created_at=created_at,
        version=version,
        spec=spec,
        body=body,
    )


def task_row(index: int, body: bytes = b"task", job_id: str = "job-1") -> TaskRow:
    """A task row."""
    return TaskRow(job_id=job_id, index=index, body=body)


def chunk_row(number: int, body: bytes = b"chunk", job_id: str = "job-1") -> ChunkRow:
    """A chunk row."""
    return ChunkRow(job_id=job_id, number=number, body=body)


def outbox_row(message_id: str, body: bytes = b"{}") -> OutboxRow:
    """An outbox row."""
    return OutboxRow(id=message_id, type_name="slice.run.v1", cluster="east", body=body)


async def contents(ledger: Ledger, jobs: Sequence[str] = ("job-1",)) -> list[object]:
    """All that the ledger holds of these jobs, for comparing before with after."""
    held: list[object] = [await ledger.jobs(), await ledger.outbox(10_000)]
    for job_id in jobs:
        held += [await ledger.job(job_id), await ledger.chunks(job_id), await ledger.tasks(job_id)]
    return held


@case
async def a_new_ledger_is_empty(ledger: Ledger) -> None:
    assert list(await ledger.jobs()) == []
    assert await ledger.job("job-1") is None
    assert list(await ledger.chunks("job-1")) == []
    assert list(await ledger.tasks("job-1")) == []
    assert list(await ledger.outbox()) == []
    assert await ledger.size_bytes() >= 0


@case
async def rows_come_back_as_they_were_committed(ledger: Ledger) -> None:
    epoch = await ledger.begin_epoch("one")
    job = job_row(body=ALL_BYTES, spec=ALL_BYTES[::-1], tenant="Chimie Îlot 3")
    answer = OutboxRow(
        id="01",
        type_name="job.answer.v1",
        cluster="",
        body=ALL_BYTES,
        to="amq.rabbitmq.reply-to.\x00é☃",
        correlation_id="\x00\n\x7f any text that a publisher may choose",
    )
    rows = Changes(
        epoch=epoch,
        jobs=[job],
        chunks=[chunk_row(0, ALL_BYTES), chunk_row(1, b"")],
        tasks=[task_row(0, b""), task_row(999_999, ALL_BYTES)],
        outbox=[answer, outbox_row("02", b"")],
    )
    await ledger.commit(rows)
    assert await ledger.job("job-1") == job
    assert list(await ledger.jobs()) == [job]
    assert list(await ledger.chunks("job-1")) == list(rows.chunks)
    assert list(await ledger.tasks("job-1")) == list(rows.tasks)
    assert list(await ledger.outbox()) == list(rows.outbox)


@case
async def an_empty_commit_changes_nothing(ledger: Ledger) -> None:
    epoch = await ledger.begin_epoch("one")
    await ledger.commit(Changes(epoch=epoch, jobs=[job_row()], tasks=[task_row(1)]))
    before = await contents(ledger)
    await ledger.commit(Changes(epoch=epoch))
    assert await contents(ledger) == before


@case
async def versions_go_up_by_one(ledger: Ledger) -> None:
    epoch = await ledger.begin_epoch("one")
    await refused(ConflictError, ledger.commit(Changes(epoch=epoch, jobs=[job_row(version=2)])))
    assert await ledger.job("job-1") is None
    await ledger.commit(Changes(epoch=epoch, jobs=[job_row()]))
    for wrong in (1, 3, 4):
        error = await refused(
            ConflictError, ledger.commit(Changes(epoch=epoch, jobs=[job_row(version=wrong)]))
        )
        assert error.fields["job"] == "job-1"
    await ledger.commit(Changes(epoch=epoch, jobs=[job_row(version=2, body=b"new")]))
    assert await ledger.job("job-1") == job_row(version=2, body=b"new")
    await ledger.commit(Changes(epoch=epoch, jobs=[job_row(version=3), job_row(version=4)]))
    assert await ledger.job("job-1") == job_row(version=4)


@case
async def what_never_changes_stays_as_it_was_first(ledger: Ledger) -> None:
    epoch = await ledger.begin_epoch("one")
    await ledger.commit(Changes(epoch=epoch, jobs=[job_row(spec=b"first", tenant="lab")]))
    other = job_row(
        version=2, spec=b"second", tenant="thief", created_at=1.0, state=JobState.FAILED
    )
    await ledger.commit(Changes(epoch=epoch, jobs=[other]))
    kept = job_row(version=2, spec=b"first", tenant="lab", state=JobState.FAILED)
    assert await ledger.job("job-1") == kept
    assert list(await ledger.jobs(tenant="lab")) == [kept]


@case
async def a_conflict_leaves_nothing_of_its_commit(ledger: Ledger) -> None:
    epoch = await ledger.begin_epoch("one")
    await ledger.commit(
        Changes(
            epoch=epoch,
            jobs=[job_row("job-1"), job_row("job-2")],
            tasks=[task_row(1), task_row(2)],
            chunks=[chunk_row(0)],
            outbox=[outbox_row("01")],
        )
    )
    before = await contents(ledger, ("job-1", "job-2", "job-3"))
    stale = Changes(
        epoch=epoch,
        jobs=[job_row("job-1", 2), job_row("job-3"), job_row("job-2", 5)],
        tasks=[task_row(1, b"changed"), task_row(3)],
        chunks=[chunk_row(0, b"changed"), chunk_row(1)],
        settled=[("job-1", 2)],
        outbox=[outbox_row("02")],
        sent=["01"],
    )
    await refused(ConflictError, ledger.commit(stale))
    assert await contents(ledger, ("job-1", "job-2", "job-3")) == before


@case
async def a_taken_outbox_id_is_a_conflict(ledger: Ledger) -> None:
    epoch = await ledger.begin_epoch("one")
    await ledger.commit(Changes(epoch=epoch, jobs=[job_row()], outbox=[outbox_row("01")]))
    before = await contents(ledger)
    again = Changes(
        epoch=epoch,
        jobs=[job_row(version=2)],
        tasks=[task_row(5)],
        outbox=[outbox_row("02"), outbox_row("01", b"another")],
    )
    error = await refused(ConflictError, ledger.commit(again))
    assert error.reason is Reason.DUPLICATE_ID
    assert await contents(ledger) == before


@case
async def a_newer_epoch_fences_off_the_older(ledger: Ledger) -> None:
    first = await ledger.begin_epoch("one")
    await ledger.commit(Changes(epoch=first, jobs=[job_row()]))
    second = await ledger.begin_epoch("two")
    assert second > first
    before = await contents(ledger)
    late = Changes(
        epoch=first, jobs=[job_row(version=2)], tasks=[task_row(1)], outbox=[outbox_row("01")]
    )
    error = await refused(ConflictError, ledger.commit(late))
    assert error.reason is Reason.STALE
    await refused(ConflictError, ledger.commit(Changes(epoch=first, sent=["01"])))
    assert await contents(ledger) == before
    await ledger.commit(Changes(epoch=second, jobs=[job_row(version=2)]))


@case
async def an_epoch_that_never_began_may_not_write(ledger: Ledger) -> None:
    epoch = await ledger.begin_epoch("one")
    await refused(ConflictError, ledger.commit(Changes(epoch=epoch + 1, jobs=[job_row()])))
    assert list(await ledger.jobs()) == []


@case
async def epochs_begun_at_once_differ(ledger: Ledger) -> None:
    epochs = await asyncio.gather(*(ledger.begin_epoch(f"holder-{i}") for i in range(5)))
    assert len(set(epochs)) == 5
    assert await ledger.begin_epoch("last") > max(epochs)


@case
async def of_racing_commits_one_wins(ledger: Ledger) -> None:
    epoch = await ledger.begin_epoch("one")
    await ledger.commit(Changes(epoch=epoch, jobs=[job_row()]))

    async def attempt(number: int) -> bool:
        changes = Changes(
            epoch=epoch,
            jobs=[job_row(version=2, body=b"%d" % number)],
            tasks=[task_row(number)],
        )
        try:
            await ledger.commit(changes)
        except ConflictError:
            return False
        return True

    won = await asyncio.gather(*(attempt(number) for number in range(8)))
    assert sum(won) == 1
    winner = won.index(True)
    assert await ledger.job("job-1") == job_row(version=2, body=b"%d" % winner)
    assert list(await ledger.tasks("job-1")) == [task_row(winner)]


@case
async def chunks_and_tasks_come_by_range_in_order(ledger: Ledger) -> None:
    epoch = await ledger.begin_epoch("one")
    numbers = [7, 0, 12, 100_000, 3, 99, 10, 999_999]
    await ledger.commit(
        Changes(
            epoch=epoch,
            chunks=[chunk_row(n) for n in numbers] + [chunk_row(5, job_id="job-10")],
            tasks=[task_row(n) for n in numbers] + [task_row(5, job_id="job-10")],
        )
    )
    ranges: list[tuple[int, int | None]] = [
        (0, None), (0, 0), (3, 12), (4, 9), (13, 98), (100, None), (999_999, 999_999), (8, 2),
    ]  # fmt: skip
    for first, last in ranges:
        top = 10**7 if last is None else last
        expected = [n for n in sorted(numbers) if first <= n <= top]
        assert [row.number for row in await ledger.chunks("job-1", first, last)] == expected
        assert [row.index for row in await ledger.tasks("job-1", first, last)] == expected


@case
async def rows_are_replaced_and_settled(ledger: Ledger) -> None:
    epoch = await ledger.begin_epoch("one")
    await ledger.commit(
        Changes(epoch=epoch, tasks=[task_row(i) for i in range(4)], chunks=[chunk_row(0)])
    )
    await ledger.commit(
        Changes(
            epoch=epoch,
            tasks=[task_row(1, b"new"), task_row(9)],
            chunks=[chunk_row(0, b"new")],
            settled=[("job-1", 0), ("job-1", 9), ("job-1", 77), ("no-such-job", 0)],
        )
    )
    expected = [task_row(1, b"new"), task_row(2), task_row(3)]
    assert list(await ledger.tasks("job-1")) == expected, "a row both put and settled is settled"
    assert list(await ledger.chunks("job-1")) == [chunk_row(0, b"new")]


@case
async def jobs_come_by_state_and_tenant_page_by_page(ledger: Ledger) -> None:
    epoch = await ledger.begin_epoch("one")
    states = list(JobState)
    ids = ["B", "a", "Z-1", "a0", "a-0", "_x", "0", "Zz", "b_1", "a_", "A"]
    rows = [
        job_row(job_id, state=states[i % len(states)], tenant=f"t{i % 2}")
        for i, job_id in enumerate(ids)
    ]
    await ledger.commit(Changes(epoch=epoch, jobs=rows))
    in_order = sorted(rows, key=lambda row: row.job_id.encode())
    assert list(await ledger.jobs()) == in_order
    for active in (None, True, False):
        for tenant in (None, "t0", "t1", "t2"):
            expected = [
                row
                for row in in_order
                if (active is None or row.state.is_final is not active)
                and (tenant is None or row.tenant == tenant)
            ]
            paged: list[JobRow] = []
            while page := await ledger.jobs(
                active=active, tenant=tenant, limit=2, after=paged[-1].job_id if paged else ""
            ):
                assert len(page) <= 2
                paged += page
            assert paged == expected, (active, tenant)
    done = job_row("B", 2, state=JobState.SUCCEEDED)
    await ledger.commit(Changes(epoch=epoch, jobs=[done]))
    assert "B" not in [row.job_id for row in await ledger.jobs(active=True)]
    assert "B" in [row.job_id for row in await ledger.jobs(active=False)]


@case
async def the_outbox_is_read_oldest_first(ledger: Ledger) -> None:
    epoch = await ledger.begin_epoch("one")
    ids = ["01K", "01A", "01a", "00Z", "01B"]
    await ledger.commit(Changes(epoch=epoch, outbox=[outbox_row(i) for i in ids]))
    assert [row.id for row in await ledger.outbox()] == sorted(ids)
    assert [row.id for row in await ledger.outbox(2)] == ["00Z", "01A"]
    await ledger.commit(
        Changes(epoch=epoch, sent=["00Z", "01B", "never-there"], outbox=[outbox_row("02")])
    )
    assert [row.id for row in await ledger.outbox()] == ["01A", "01K", "01a", "02"]


@case
async def large_rows_and_large_commits_go_through(ledger: Ledger) -> None:
    epoch = await ledger.begin_epoch("one")
    spec = ALL_BYTES * 4096
    await ledger.commit(Changes(epoch=epoch, jobs=[job_row(spec=spec)]))
    before = await ledger.size_bytes()
    rows = [task_row(i, b"%06d" % i * 100) for i in range(2_000)]
    await ledger.commit(
        Changes(
            epoch=epoch,
            jobs=[job_row(version=2)],
            tasks=rows,
            outbox=[outbox_row("01", spec)],
        )
    )
    assert await ledger.size_bytes() > before + 2_000 * 600
    assert list(await ledger.tasks("job-1")) == rows
    assert list(await ledger.outbox()) == [outbox_row("01", spec)]
    settled = [("job-1", i) for i in range(2_000)]
    await ledger.commit(Changes(epoch=epoch, settled=settled, sent=["01"]))
    assert list(await ledger.tasks("job-1")) == []
    assert await ledger.job("job-1") == job_row(version=2, spec=spec)
