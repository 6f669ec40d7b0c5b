"""How fast a large array is taken in, what it costs in the ledger, and whether neighbours notice.

Everything runs in this process on real time: the coordinator unchanged, the bus in memory with its
codec on, the ledger on SQLite with its usual durability.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from benchmarks.registry import Figure, data_folder
from springtide_coordinator.config import CoordinatorConfig
from springtide_coordinator.keeper import Keeper
from springtide_coordinator.model import Job, Rules
from springtide_coordinator.policy import Taken, take
from springtide_coordinator.service import Coordinator
from springtide_shared.adapters.clock import SystemClock, SystemIds
from springtide_shared.adapters.memory_bus import InMemoryBus, MemoryBroker
from springtide_shared.adapters.sql_ledger import SqlLedger
from springtide_shared.errors import Reason
from springtide_shared.ledger.attempts import facts_of
from springtide_shared.ledger.records import JobBody, pack_spec
from springtide_shared.messages import (
    AttemptEvent,
    AttemptEvents,
    AttemptState,
    Credit,
    JobAnswer,
    JobState,
    ShapeCredit,
    SliceCancel,
    SliceRun,
    parse_job,
)
from springtide_shared.ports.bus import Subscription
from springtide_shared.runtime import logs

TASKS: Final = 1_000_000
RETRIED: Final = 300_000
_BATCH: Final = 4_000
_CLUSTER: Final = "bench"
_COMPLETED: Final = [AttemptState.RUNNING, AttemptState.ENDED]


def _job_body(job_id: str, size: int) -> bytes:
    return msgspec.json.encode(
        {"id": job_id, "name": job_id, "command": ["true"], "array": {"size": size}}
    )


@dataclass(slots=True)
class _Stack:
    bus: InMemoryBus
    ledger: SqlLedger
    clock: SystemClock
    coordinator: Coordinator


@asynccontextmanager
async def _stack(folder: Path) -> AsyncIterator[_Stack]:
    clock = SystemClock()
    ids = SystemIds(clock)
    broker = MemoryBroker()
    async with SqlLedger.open(f"sqlite:///{folder / 'ledger.db'}", migrate=True) as ledger:
        coordinator = Coordinator(
            bus=InMemoryBus(broker), ledger=ledger, clock=clock, ids=ids, config=CoordinatorConfig()
        )
        stop = asyncio.Event()
        serving = asyncio.create_task(coordinator.serve(stop), name="coordinator")
        await asyncio.sleep(0.2)
        gc.collect()
        gc.freeze()  # as the coordinator's own process does
        try:
            yield _Stack(InMemoryBus(broker, "alice"), ledger, clock, coordinator)
        finally:
            gc.unfreeze()
            stop.set()
            await serving


async def _submit(stack: _Stack, job_id: str, size: int) -> float:
    """Seconds from publishing a job to its answer."""
    async with stack.bus.answers() as (address, inbox):
        start = time.perf_counter()
        await stack.bus.publish_body("job.submit.v1", _job_body(job_id, size), reply_to=address)
        (delivery,) = await inbox.receive(timeout=60)
        seconds = time.perf_counter() - start
        await delivery.ack()
        assert isinstance(delivery.message, JobAnswer)
        assert delivery.message.accepted, delivery.message
        return seconds


async def _intake() -> list[Figure]:
    with TemporaryDirectory(dir=data_folder()) as folder:
        async with _stack(Path(folder)) as stack:
            seconds = await _submit(stack, "million", TASKS)
            size = await stack.ledger.size_bytes()
    return [
        {"name": "intake_1m", "value": round(seconds, 4), "unit": "s", "goal": "<= 1"},
        {"name": "intake_1m_ledger_bytes", "value": size, "unit": "B", "goal": "<= 1048576"},
    ]


def intake_1m() -> list[Figure]:
    """Accept an array of a million tasks, one message; and its cost until tasks start."""
    logs.setup("warning")
    return asyncio.run(_intake())


# ---------------------------------------------------------------- bytes per settled task


def _event(index: int, attempt: int, state: AttemptState, reason: Reason | None) -> AttemptEvent:
    done = reason is Reason.COMPLETED
    return AttemptEvent(
        job_id="million",
        index=index,
        attempt=attempt,
        state=state,
        at=1.8e9,
        pod_uid=f"{index:08x}-0000-4000-8000-{attempt:012x}",
        node=f"node-{index % 2_000:04d}",
        reason=reason,
        exit_code=0 if done else (1 if reason is Reason.APPLICATION_ERROR else None),
        digest=hashlib.sha256(b"%d/%d" % (index, attempt)).hexdigest() if done else "",
    )


async def _settle_all(tasks: int, retried: int) -> list[Figure]:
    """Every task through dispatch, running and its end; scattered ones through failures first."""
    rng = random.Random(5)
    trouble: dict[int, list[Reason]] = {}
    kinds = [Reason.PREEMPTED, Reason.NODE_LOST, Reason.APPLICATION_ERROR, Reason.NEVER_STARTED]
    for index in rng.sample(range(tasks), retried):
        trouble[index] = [rng.choice(kinds) for _ in range(rng.choice([1, 1, 1, 2]))]
    clock = SystemClock()
    with TemporaryDirectory(dir=data_folder()) as folder:
        url = f"sqlite:///{Path(folder) / 'ledger.db'}"
        async with SqlLedger.open(url, migrate=True) as ledger:
            keeper = Keeper(ledger, clock, Rules(retry_pause_seconds=0.0), "bench")
            await keeper.begin()
            _, spec = parse_job(_job_body("million", tasks))
            job = Job(
                job_id=spec.id,
                tenant="alice",
                state=JobState.RUNNING,
                created_at=0.0,
                version=0,
                spec=spec,
                packed_spec=pack_spec(spec),
                body=JobBody(size=tasks),
            )
            started, began = time.perf_counter(), time.process_time()
            keeper.book.add(job)
            while job.body.queued:
                async with keeper.change() as change:
                    change.touch(job)
                    job.promote(2e9)
                    again = [index for group in list(job.ready.values()) for index in group]
                    again = again[:_BATCH]
                    job.dispatch_again(again, cluster=_CLUSTER, now=1.8e9)
                    count = min(_BATCH - len(again), job.body.fresh)
                    batch = again + job.dispatch_fresh(count, cluster=_CLUSTER, now=1.8e9)
                    job.stamp(batch, keeper.epoch, keeper.next_slice(_CLUSTER))
                    await keeper.commit(change)
                async with keeper.change() as change:
                    change.touch(job)
                    for index in batch:
                        attempt = job.tasks[index].attempt
                        fails = trouble.get(index, [])
                        reason = fails[attempt - 1] if attempt <= len(fails) else Reason.COMPLETED
                        running = _event(index, attempt, AttemptState.RUNNING, None)
                        ended = _event(index, attempt, AttemptState.ENDED, reason)
                        take(job, index, attempt, facts_of(running), 1.8e9)
                        assert take(job, index, attempt, facts_of(ended), 1.8e9) in (
                            Taken.SETTLED,
                            Taken.QUEUED,
                        )
                    await keeper.commit(change)
            assert job.body.succeeded == tasks
            assert job.state is JobState.SUCCEEDED
            assert not await ledger.tasks("million")
            size = await ledger.size_bytes()
            elapsed, cpu = time.perf_counter() - started, time.process_time() - began
    return [
        {
            "name": "ledger_bytes_per_task",
            "value": round(size / tasks, 2),
            "unit": "B",
            "goal": "<= 64",
        },
        {
            "name": "ledger_settle_tasks_per_second",
            "value": round(tasks / elapsed),
            "unit": "tasks/s",
            "goal": "",
        },
        {
            "name": "ledger_settle_cpu_us_per_task",
            "value": round(cpu / tasks * 1e6, 1),
            "unit": "us",
            "goal": "",
        },
    ]


def ledger_bytes_per_task(tasks: int = TASKS, retried: int = RETRIED) -> list[Figure]:
    """Ledger bytes per task after all have settled, with scattered retries of four kinds."""
    return asyncio.run(_settle_all(tasks, retried))


# ---------------------------------------------------------------- neighbours


async def _play_submitter(stack: _Stack, seen: dict[str, float], places: int) -> None:
    """Run every slice at once, as fast as the coordinator hands them out."""
    shape = parse_job(_job_body("x", 1))[1].template.shape.key
    subscription = Subscription(
        queue="submitter.bench.slice", types=(SliceRun, SliceCancel), cluster=_CLUSTER
    )
    async with stack.bus.subscribe(subscription) as inbox:
        await stack.bus.publish(
            Credit(
                cluster=_CLUSTER,
                epoch=1,
                seq=1,
                valid_until=stack.clock.now() + 3_600,
                shapes=[ShapeCredit(shape=shape, live=0, free=places)],
            )
        )
        while True:
            for delivery in await inbox.receive(limit=10):
                message = delivery.message
                assert isinstance(message, SliceRun)
                seen.setdefault(message.job_id, time.perf_counter())
                for state in _COMPLETED:
                    is_end = state is AttemptState.ENDED
                    reason = Reason.COMPLETED if is_end else None
                    events = [
                        msgspec.structs.replace(
                            _event(index, message.attempt, state, reason), job_id=message.job_id
                        )
                        for index in message.indices()
                    ]
                    await stack.bus.publish(AttemptEvents(cluster=_CLUSTER, events=events))
                await delivery.ack()


async def _neighbours(seconds: float) -> list[Figure]:
    latencies: list[float] = []
    with TemporaryDirectory(dir=data_folder()) as folder:
        async with _stack(Path(folder)) as stack:
            seen: dict[str, float] = {}
            edge = asyncio.create_task(_play_submitter(stack, seen, 20_000), name="submitter")
            await asyncio.sleep(0.2)
            began = time.process_time()
            submitting = asyncio.create_task(_submit(stack, "million", TASKS), name="million")
            end = time.perf_counter() + seconds
            number = 0
            while time.perf_counter() < end:
                number += 1
                job_id = f"small-{number}"
                start = time.perf_counter()
                body = _job_body(job_id, 3)
                await stack.bus.as_user("bob").publish_body("job.submit.v1", body)
                while job_id not in seen and time.perf_counter() < start + 30:
                    await asyncio.sleep(0.001)
                latencies.append(seen[job_id] - start)
                await asyncio.sleep(0.05)
            cpu = time.process_time() - began
            await submitting
            job = stack.coordinator.peek("million")
            settled = 0 if job is None else job.body.succeeded
            edge.cancel()
            await asyncio.gather(edge, return_exceptions=True)
    latencies.sort()
    p99 = latencies[min(len(latencies) - 1, int(len(latencies) * 0.99))]
    return [
        {
            "name": "neighbour_dispatch_p99_ms",
            "value": round(p99 * 1000, 1),
            "unit": "ms",
            "goal": "<= 200",
        },
        {
            "name": "neighbour_dispatch_median_ms",
            "value": round(latencies[len(latencies) // 2] * 1000, 1),
            "unit": "ms",
            "goal": "",
        },
        {
            "name": "neighbour_settled_meanwhile",
            "value": settled,
            "unit": "tasks",
            "goal": "",
        },
        {
            "name": "neighbour_cpu_ms_per_task",
            "value": round(cpu / max(1, settled) * 1000, 3),
            "unit": "ms",
            "goal": "",
        },
    ]


def neighbour_dispatch(seconds: float = 20.0) -> list[Figure]:
    """From submit to slice of another tenant's small jobs, while a million tasks are settled."""
    logs.setup("warning")
    return asyncio.run(_neighbours(seconds))
