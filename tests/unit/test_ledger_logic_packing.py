"""Rows say as much as was put in, in few bytes, and readers find every task exactly once."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from springtide_shared.adapters.memory_ledger import InMemoryLedger
from springtide_shared.errors import Reason
from springtide_shared.ledger.attempts import Account, Attempt, Facts
from springtide_shared.ledger.chunks import Chunk, codes_of, fold
from springtide_shared.ledger.reading import job_view, job_views, task_views
from springtide_shared.ledger.records import (
    CHARGES,
    NO_CHARGES,
    JobBody,
    Phase,
    TaskRecord,
    charge_of,
    is_budgeted,
    pack_body,
    pack_spec,
    pack_task,
    unpack_body,
    unpack_spec,
    unpack_task,
)
from springtide_shared.ledger.views import TaskState
from springtide_shared.messages import JobSpec, JobState, RetrySpec, Shape, TaskTemplate
from springtide_shared.ports.ledger import CHUNK_TASKS, Changes, ChunkRow, JobRow, TaskRow

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""
charges = st.tuples(*[st.integers(0, 300)] * len(CHARGES))


@st.composite
def settled_records(draw: st.DrawFn) -> TaskRecord:
    phase = draw(st.sampled_from([Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED]))
    attempt = draw(st.integers(1, 65_535))
    record = TaskRecord(
        phase=phase,
        attempt=attempt,
        charged=draw(st.just(NO_CHARGES) | charges),
        exit_code=draw(st.none() | st.integers(-64, 255)),
    )
    if phase is Phase.SUCCEEDED:
        record.digest = draw(st.binary(min_size=32, max_size=32))
        record.record_attempt = draw(st.just(attempt) | st.integers(1, attempt))
        record.reason = Reason.COMPLETED.value
    else:
        record.reason = draw(st.sampled_from(sorted(Reason))).value
    return record


def remembered(record: TaskRecord) -> tuple[object, ...]:
    """What a chunk keeps of a task; exit code 0 of a success goes without saying."""
    is_success = record.phase is Phase.SUCCEEDED
    return (
        record.phase,
        record.attempt,
        record.digest,
        record.record_attempt,
        record.reason,
        (record.exit_code or 0) if is_success else record.exit_code,
        record.charged,
    )


tables = st.dictionaries(st.integers(0, CHUNK_TASKS - 1), settled_records(), max_size=30)


@PATIENT
@given(tables, tables, st.integers(0, 244))
def test_a_chunk_gives_back_what_was_folded_in(
    first: dict[int, TaskRecord], second: dict[int, TaskRecord], number: int
) -> None:
    base = number * CHUNK_TASKS
    body, _ = fold(number, None, [(base + offset, one) for offset, one in first.items()])
    body, codes = fold(number, body, [(base + offset, one) for offset, one in second.items()])
    assert codes == codes_of(body)
    expected = first | second
    chunk = Chunk.unpack(number, body)
    found = {
        offset: record
        for offset in range(CHUNK_TASKS)
        if (record := chunk.get(base + offset)) is not None
    }
    assert found.keys() == expected.keys()
    for offset, record in found.items():
        assert remembered(record) == remembered(expected[offset])
    assert Counter(codes)[0] == CHUNK_TASKS - len(expected)


def test_folding_in_pieces_and_in_any_order_gives_the_same_bytes() -> None:
    records = {
        index: TaskRecord(
            phase=Phase.SUCCEEDED,
            attempt=1 + index % 3,
            record_attempt=1 + index % 3,
            digest=hashlib.sha256(bytes([index % 256])).digest(),
            charged=(index % 3, 0, 0, 0, 0, 0),
        )
        for index in range(1_000)
    }
    whole, _ = fold(0, None, records.items())
    order = list(records)
    random.Random(7).shuffle(order)
    body = None
    for start in range(0, len(order), 130):
        piece = [(index, records[index]) for index in order[start : start + 130]]
        body, _ = fold(0, body, piece)
    assert body == whole


def test_a_settled_task_costs_at_most_64_bytes_with_a_third_of_them_retried() -> None:
    rng = random.Random(3)
    records = []
    for index in range(CHUNK_TASKS):
        record = TaskRecord(phase=Phase.SUCCEEDED, attempt=1, digest=rng.randbytes(32))
        if rng.random() < 0.33:
            counts = [0] * len(CHARGES)
            for _ in range(rng.randint(1, 3)):
                counts[rng.randrange(len(CHARGES))] += 1
            record.charged = tuple(counts)
            record.attempt = 1 + sum(counts)
            record.exit_code = 0
        record.record_attempt = record.attempt
        records.append((index, record))
    body, _ = fold(0, None, records)
    assert len(body) / CHUNK_TASKS <= 40


def test_a_row_of_a_live_task_is_below_a_kibibyte() -> None:
    longest = "n" * 200
    facts = Facts(
        4, 255, "checkpoint-failed", "f" * 64, 65_535, 255, "m" * 64, longest, "u" * 64, longest
    )
    record = TaskRecord(
        phase=Phase.LIVE,
        attempt=65_535,
        floor=65_535,
        cluster="c" * 63,
        epoch=2**40,
        seq=2**40,
        facts=Attempt((Account(facts, True),)),
        reason="checkpoint-failed",
        exit_code=255,
        digest=b"d" * 32,
        record_attempt=65_535,
        charged=(65_535,) * len(CHARGES),
        not_before=1.8e9,
        pin_node="",
        cpu_seconds=1e9,
        at=1.8e9,
    )
    packed = pack_task(record)
    assert len(packed) <= 1_024
    assert unpack_task(packed) == record
    usual = TaskRecord(phase=Phase.LIVE, attempt=1, cluster="east", facts=Attempt(), at=1.8e9)
    assert len(pack_task(usual)) <= 64


def spec_of(size: int) -> JobSpec:
    shape = Shape(cpu_millis=1000, memory_bytes=1)
    return JobSpec(
        id="j",
        name="n",
        size=size,
        template=TaskTemplate(command=["true"], shape=shape),
        retry=RetrySpec(),
    )


def test_a_million_tasks_that_wait_cost_less_than_a_kibibyte() -> None:
    body = JobBody(size=1_000_000)
    assert len(pack_spec(spec_of(1_000_000))) + len(pack_body(body)) < 1_024
    assert unpack_body(pack_body(body)) == body
    assert unpack_spec(pack_spec(spec_of(5))) == spec_of(5)


def test_every_reason_is_charged_to_one_class() -> None:
    for reason in Reason:
        charge = charge_of(reason.value)
        assert -1 <= charge < len(CHARGES)
        assert is_budgeted(charge) == (0 <= charge < 4)
    assert charge_of(Reason.TIMEOUT.value) == -1
    assert CHARGES[charge_of(Reason.LOST.value)] == "infrastructure"


# ---------------------------------------------------------------- reading


@given(
    size=st.integers(1, 9_000),
    watermark=st.floats(0, 1),
    cancelled=st.booleans(),
    seed=st.integers(0, 99),
    first=st.integers(0, 9_000),
    limit=st.integers(1, 5_000),
)
@settings(PATIENT, max_examples=25)
def test_readers_find_every_task_once_wherever_it_is_kept(
    size: int, watermark: float, cancelled: bool, seed: int, first: int, limit: int
) -> None:
    rng = random.Random(seed)
    next_index = int(size * watermark)
    expected: list[TaskState] = []
    rows: list[TaskRow] = []
    to_fold: dict[int, list[tuple[int, TaskRecord]]] = {}
    for index in range(next_index):
        if rng.random() < 0.8:
            record = TaskRecord(
                phase=Phase.SUCCEEDED, attempt=1, record_attempt=1, digest=rng.randbytes(32)
            )
            to_fold.setdefault(index // CHUNK_TASKS, []).append((index, record))
            expected.append(TaskState.SUCCEEDED)
        else:
            phase = rng.choice([Phase.LIVE, Phase.QUEUED, Phase.FAILED])
            rows.append(
                TaskRow(job_id="j", index=index, body=pack_task(TaskRecord(phase=phase, attempt=1)))
            )
            state = {
                Phase.LIVE: TaskState.LIVE,
                Phase.QUEUED: TaskState.QUEUED,
                Phase.FAILED: TaskState.FAILED,
            }
            expected.append(state[phase])
    expected += [TaskState.CANCELLED if cancelled else TaskState.QUEUED] * (size - next_index)
    body = JobBody(
        size=size, next_index=next_index, cancelled_from=next_index if cancelled else None
    )

    async def read() -> None:
        ledger = InMemoryLedger()
        epoch = await ledger.begin_epoch("test")
        await ledger.commit(
            Changes(
                epoch=epoch,
                jobs=[
                    JobRow(
                        job_id="j",
                        tenant="t",
                        state=JobState.RUNNING,
                        created_at=1,
                        version=1,
                        spec=pack_spec(spec_of(size)),
                        body=pack_body(body),
                    )
                ],
                chunks=[
                    ChunkRow(job_id="j", number=number, body=fold(number, None, records)[0])
                    for number, records in to_fold.items()
                ],
                tasks=rows,
            )
        )
        views = await task_views(ledger, "j", first=first, limit=limit)
        assert [view.index for view in views] == list(range(size))[first : first + limit]
        assert [view.state for view in views] == expected[first : first + limit]
        failed = await task_views(ledger, "j", limit=10_000, states={TaskState.FAILED})
        assert [view.index for view in failed] == [
            index for index, state in enumerate(expected) if state is TaskState.FAILED
        ]
        assert await task_views(ledger, "unknown") == []

    asyncio.run(read())


def test_jobs_are_listed_in_pages_without_tombstones() -> None:
    async def read() -> None:
        ledger = InMemoryLedger()
        epoch = await ledger.begin_epoch("test")
        rows = []
        for n in range(10):
            is_tombstone = n % 3 == 0
            rows.append(
                JobRow(
                    job_id=f"j{n}",
                    tenant="a" if n % 2 else "b",
                    state=JobState.CANCELLED if is_tombstone else JobState.ACCEPTED,
                    created_at=n,
                    version=1,
                    spec=b"" if is_tombstone else pack_spec(spec_of(5)),
                    body=pack_body(JobBody(size=0 if is_tombstone else 5)),
                )
            )
        await ledger.commit(Changes(epoch=epoch, jobs=rows))
        views = await job_views(ledger, limit=4)
        assert [view.created_at for view in views] == [1, 2, 4, 5]
        views = await job_views(ledger, limit=4, after="j5")
        assert [view.created_at for view in views] == [7, 8]
        assert [view.created_at for view in await job_views(ledger, tenant="a")] == [1, 5, 7]
        assert await job_view(ledger, "j0") is None
        found = await job_view(ledger, "j1")
        assert found is not None
        assert found.counts.queued == 5

    asyncio.run(read())
