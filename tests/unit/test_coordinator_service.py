"""The coordinator in virtual time, with its neighbours played by the test."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from springtide_coordinator.config import CoordinatorConfig
from springtide_coordinator.service import ATTEMPTS_QUEUE, JOBS_QUEUE, Coordinator
from springtide_shared.adapters.clock import SeededIds, SystemClock, SystemIds
from springtide_shared.adapters.memory_bus import InMemoryBus, MemoryBroker
from springtide_shared.adapters.memory_ledger import InMemoryLedger
from springtide_shared.adapters.memory_store import InMemoryStore
from springtide_shared.errors import PermanentError, Reason
from springtide_shared.ledger.reading import job_view, task_views
from springtide_shared.ledger.views import JobView, TaskState
from springtide_shared.messages import (
    AttemptEvent,
    AttemptEvents,
    AttemptFigures,
    AttemptState,
    AttemptSummary,
    Capacity,
    Credit,
    Demand,
    GroupCapacity,
    HeldTasks,
    Inventory,
    JobAnswer,
    JobCancel,
    JobEvents,
    JobState,
    LiveAttempt,
    NodeEvents,
    Pending,
    Shape,
    ShapeCredit,
    ShapeDemand,
    ShapePlaces,
    SliceCancel,
    SliceRun,
)
from springtide_shared.messages.records import CompletionRecord, record_key
from springtide_shared.ports.bus import Inbox, Subscription
from springtide_shared.testing.virtual import VirtualClock, run_virtual

SHAPE = Shape(cpu_millis=1000, memory_bytes=256 * 1024**2)
FAR = 1e12


def digest(text: object) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()


class World:
    """Bus, ledger and store outlive the coordinator; the test plays everyone else."""

    def __init__(self, **config: Any) -> None:
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.broker = MemoryBroker()
        self.bus = InMemoryBus(self.broker, "alice")
        self.ledger = InMemoryLedger()
        self.store = InMemoryStore()
        self.config = CoordinatorConfig(**config)
        self.coordinator: Coordinator
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._edges = AsyncExitStack()
        self._slices: dict[str, Inbox] = {}
        self._demands: dict[str, Inbox] = {}
        self._seq = 0
        self._lives = 0

    async def up(self, *clusters: str) -> None:
        for cluster in clusters:
            await self.join(cluster)
        await self.start()

    async def join(self, cluster: str) -> None:
        """A submitter and a scaler begin to listen."""
        self._slices[cluster] = await self._edges.enter_async_context(
            self.bus.subscribe(
                Subscription(
                    queue=f"submitter.{cluster}.slice",
                    types=(SliceRun, SliceCancel),
                    cluster=cluster,
                    prefetch=100_000,
                )
            )
        )
        self._demands[cluster] = await self._edges.enter_async_context(
            self.bus.subscribe(
                Subscription(queue="scaler", types=(Demand,), cluster=cluster, durable=False)
            )
        )

    async def start(self) -> None:
        self._lives += 1
        self._stop = asyncio.Event()
        self.coordinator = self.another()
        self._task = asyncio.create_task(self.coordinator.serve(self._stop), name="coordinator")
        await asyncio.sleep(0.01)

    def another(self) -> Coordinator:
        return Coordinator(
            bus=InMemoryBus(self.broker),
            ledger=self.ledger,
            clock=self.clock,
            ids=SeededIds(self.clock, self._lives),
            config=self.config,
            store=self.store,
        )

    async def crash(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    async def restart(self) -> None:
        await self.crash()
        await self.start()

    async def down(self) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task
        await self._edges.aclose()

    # ------------------------------------------------------------ neighbours
    async def submit(self, job_id: str, size: int = 1, **fields: Any) -> None:
        body = {
            "id": job_id,
            "name": job_id,
            "command": ["true"],
            "array": {"size": size},
            **fields,
        }
        await self.bus.publish_body("job.submit.v1", msgspec.json.encode(body))

    async def ask(
        self, type_name: str, body: object, *, user: str = "alice", correlation_id: str = "c"
    ) -> JobAnswer:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        bus = self.bus.as_user(user)
        async with bus.answers() as (address, inbox):
            await bus.publish_body(type_name, data, reply_to=address, correlation_id=correlation_id)
            (delivery,) = await inbox.receive(timeout=30)
            await delivery.ack()
            assert delivery.correlation_id == correlation_id
            assert isinstance(delivery.message, JobAnswer)
            return delivery.message

    async def credit(self, cluster: str, total: int, shape: Shape = SHAPE, live: int = 0) -> None:
        self._seq += 1
        await self.bus.publish(
            Credit(
                cluster=cluster,
                epoch=1,
                seq=self._seq,
                valid_until=self.clock.now() + 60,
                shapes=[ShapeCredit(shape=shape.key, live=live, free=total - live)],
            ),
            cluster=cluster,
        )
        await asyncio.sleep(3)

    async def capacity(self, cluster: str, most: dict[Shape, int]) -> None:
        self._seq += 1
        await self.bus.publish(
            Capacity(
                cluster=cluster,
                epoch=1,
                seq=self._seq,
                valid_until=self.clock.now() + 600,
                shapes=[ShapePlaces(shape=shape.key, most=n) for shape, n in most.items()],
            ),
            cluster=cluster,
        )

    async def pending(self, cluster: str, held: dict[str, int]) -> None:
        """So many attempts of each job are held for want of room, since 100 s."""
        self._seq += 1
        await self.bus.publish(
            Pending(
                cluster=cluster,
                epoch=1,
                seq=self._seq,
                valid_until=self.clock.now() + 45,
                held=[
                    HeldTasks(
                        job_id=job_id,
                        shape=SHAPE.key,
                        reason=Reason.NO_ROOM,
                        count=count,
                        oldest_at=self.clock.now() - 100,
                    )
                    for job_id, count in held.items()
                ],
            ),
            cluster=cluster,
        )

    async def inventory(
        self,
        cluster: str,
        settled: tuple[int, int],
        live: Iterable[tuple[str, int, int]] = (),
        began: float | None = None,
    ) -> None:
        self._seq += 1
        await self.bus.publish(
            Inventory(
                cluster=cluster,
                epoch=1,
                seq=self._seq,
                valid_until=self.clock.now() + 60,
                slice_epoch=settled[0],
                settled_below=settled[1],
                attempts=[
                    LiveAttempt(
                        job_id=job_id,
                        index=index,
                        attempt=attempt,
                        state=AttemptState.RUNNING,
                        shape=SHAPE.key,
                        cpu_millis=1000,
                        memory_bytes=1,
                        pod_uid=f"{job_id}-{index}-{attempt}",
                        node="n1",
                        started_at=began,
                    )
                    for job_id, index, attempt in live
                ],
            ),
            cluster=cluster,
        )
        await asyncio.sleep(1)

    async def report(
        self,
        cluster: str,
        job_id: str,
        indices: Iterable[int],
        attempt: int,
        state: AttemptState,
        reason: Reason | None = None,
        **fields: Any,
    ) -> None:
        events = []
        for index in indices:
            more = dict(fields)
            if reason is Reason.COMPLETED:
                more.setdefault("digest", digest((job_id, index)))
            events.append(
                AttemptEvent(
                    job_id=job_id,
                    index=index,
                    attempt=attempt,
                    state=state,
                    at=self.clock.now(),
                    pod_uid=more.pop("pod_uid", f"{job_id}-{index}-{attempt}"),
                    reason=reason,
                    **more,
                )
            )
        await self.bus.publish(AttemptEvents(cluster=cluster, events=events), cluster=cluster)
        await asyncio.sleep(0.5)

    async def end(
        self,
        cluster: str,
        job_id: str,
        indices: Iterable[int],
        attempt: int,
        reason: Reason,
        **fields: Any,
    ) -> None:
        await self.report(cluster, job_id, indices, attempt, AttemptState.ENDED, reason, **fields)

    async def sent(self, cluster: str) -> list[SliceRun | SliceCancel]:
        """What has come for the submitter since the last call."""
        found: list[SliceRun | SliceCancel] = []
        while deliveries := await self._slices[cluster].receive(limit=1_000, timeout=0):
            for delivery in deliveries:
                assert isinstance(delivery.message, SliceRun | SliceCancel)
                found.append(delivery.message)
                await delivery.ack()
        return found

    async def runs(self, cluster: str) -> list[SliceRun]:
        return [message for message in await self.sent(cluster) if isinstance(message, SliceRun)]

    async def demand(self, cluster: str) -> dict[str, int]:
        """Wanted places per shape in the newest demand."""
        return {item.shape.key: item.wanted for item in await self.demanded(cluster)}

    async def demanded(self, cluster: str) -> list[ShapeDemand]:
        """The newest demand."""
        newest: Demand | None = None
        while deliveries := await self._demands[cluster].receive(limit=1_000, timeout=0):
            for delivery in deliveries:
                assert isinstance(delivery.message, Demand)
                newest = delivery.message
                await delivery.ack()
        assert newest is not None, "no demand came"
        return newest.shapes

    async def view(self, job_id: str) -> JobView:
        view = await job_view(self.ledger, job_id)
        assert view is not None
        counts = view.counts
        total = counts.queued + counts.live + counts.succeeded + counts.failed + counts.cancelled
        assert total == view.spec.size, "counts sum to the array's size"
        return view


def in_world(scenario: Callable[[World], Awaitable[None]], *clusters: str, **config: Any) -> None:
    """Run a scenario with a coordinator and the edges of `clusters` up."""

    async def main() -> None:
        world = World(**config)
        await world.up(*clusters)
        try:
            await scenario(world)
        finally:
            await world.down()

    run_virtual(main(), limit=86_400.0)


def indices_of(slices: Sequence[SliceRun]) -> list[int]:
    return [index for one in slices for index in one.indices()]


# ---------------------------------------------------------------- the whole way


def test_an_array_goes_from_message_to_results() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 1_200)
        await asyncio.sleep(1)
        assert (await world.view("j")).state is JobState.ACCEPTED
        assert await world.ledger.tasks("j") == [], "an array that waits is one row"
        await world.credit("east", 1_000)
        slices = await world.runs("east")
        assert [len(one.indices()) for one in slices] == [500, 500]
        assert [one.seq for one in slices] == [1, 2]
        assert indices_of(slices) == list(range(1_000))
        view = await world.view("j")
        assert (view.state, view.counts.live, view.counts.queued) == (JobState.RUNNING, 1_000, 200)
        await world.report("east", "j", range(1_000), 1, AttemptState.RUNNING, node="n1")
        await world.end("east", "j", range(1_000), 1, Reason.COMPLETED, exit_code=0)
        await world.credit("east", 1_000)
        last = await world.runs("east")
        assert indices_of(last) == list(range(1_000, 1_200))
        await world.end("east", "j", range(1_000, 1_200), 1, Reason.COMPLETED, exit_code=0)
        view = await world.view("j")
        assert (view.state, view.counts.succeeded) == (JobState.SUCCEEDED, 1_200)
        assert view.ended_at is not None
        assert await world.ledger.tasks("j") == [], "all folded"
        tasks = await task_views(world.ledger, "j", first=995, limit=10)
        assert [task.index for task in tasks] == list(range(995, 1_005))
        for task in tasks:
            assert task.state is TaskState.SUCCEEDED
            assert task.digest == digest(("j", task.index))
        world.broker.assert_nothing_left()

    in_world(scenario, "east")


def test_no_credit_no_dispatch_and_expired_credit_is_none() -> None:
    async def scenario(world: World) -> None:
        await world.credit("east", 5)
        await asyncio.sleep(120)
        await world.submit("j", 10)
        await asyncio.sleep(30)
        assert await world.runs("east") == []
        await world.credit("east", 5)
        assert len(indices_of(await world.runs("east"))) == 5
        await world.credit("east", 5)
        assert await world.runs("east") == [], "a doubled credit is the same total"

    in_world(scenario, "east")


def test_items_travel_with_their_tasks_and_messages_stay_small() -> None:
    async def scenario(world: World) -> None:
        items = [f"{i}:" + "x" * 8_000 for i in range(120)]
        await world.submit("j", array={"items": items})
        await world.credit("east", 120)
        slices = await world.runs("east")
        assert len(slices) > 1
        assert indices_of(slices) == list(range(120))
        for one in slices:
            assert one.items == [items[index] for index in one.indices()]
            assert len(msgspec.json.encode(one)) < 900 * 1024

    in_world(scenario, "east")


# ---------------------------------------------------------------- retries


def test_each_class_of_reason_has_its_own_budget() -> None:
    """B39: five preemptions, then application failures; the third of them fails it."""

    async def scenario(world: World) -> None:
        await world.submit("j", 1, retry={"application": 2, "preemption": 10})
        await world.credit("east", 1)
        attempt = 0

        async def next_attempt(reason: Reason, **fields: Any) -> None:
            nonlocal attempt
            await asyncio.sleep(90)
            await world.credit("east", 1)
            (run,) = await world.runs("east")
            attempt += 1
            assert run.attempt == attempt
            await world.report("east", "j", [0], attempt, AttemptState.RUNNING)
            await world.end("east", "j", [0], attempt, reason, **fields)

        for _ in range(5):
            await next_attempt(Reason.PREEMPTED)
        for _ in range(2):
            await next_attempt(Reason.APPLICATION_ERROR, exit_code=3)
            await world.restart()
        (task,) = await task_views(world.ledger, "j")
        assert task.state is TaskState.QUEUED
        assert task.charged == {"application": 2, "preemption": 5}
        await next_attempt(Reason.APPLICATION_ERROR, exit_code=3)
        (task,) = await task_views(world.ledger, "j")
        assert (task.state, task.exit_code) == (TaskState.FAILED, 3)
        assert task.reason is Reason.APPLICATION_ERROR
        assert task.charged == {"application": 3, "preemption": 5}
        assert (await world.view("j")).state is JobState.FAILED

    in_world(scenario, "east")


def test_out_of_memory_asks_for_more() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 1)
        await world.credit("east", 1)
        await world.end("east", "j", [0], 1, Reason.OUT_OF_MEMORY)
        raised = Shape(cpu_millis=1000, memory_bytes=384 * 1024**2)
        await asyncio.sleep(12)
        assert await world.demand("east") == {raised.key: 1}
        await world.credit("east", 1, shape=raised)
        _, again = await world.runs("east")
        assert again.attempt == 2
        assert again.template.shape == raised
        await world.end("east", "j", [0], 2, Reason.COMPLETED)
        assert (await world.view("j")).state is JobState.SUCCEEDED
        assert world.coordinator._keeper.book.live == {}

    in_world(scenario, "east")


def test_no_more_memory_is_asked_for_than_the_largest_node_has() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 1)
        group = GroupCapacity(
            group="g",
            instance_type="t",
            cpu_millis=4000,
            memory_bytes=300 * 1024**2,
            price_per_hour=1,
            size=0,
            max_size=9,
            boot_seconds=60,
        )
        await world.bus.publish(
            Capacity(cluster="east", epoch=1, seq=1, valid_until=FAR, groups=[group])
        )
        await world.credit("east", 1)
        await world.end("east", "j", [0], 1, Reason.OUT_OF_MEMORY)
        await world.credit("east", 1)
        _, again = await world.runs("east")
        assert (again.attempt, again.template.shape) == (2, SHAPE)

    in_world(scenario, "east")


def test_never_started_is_free_but_its_pause_grows() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 1)
        starts = []
        for attempt in range(1, 9):
            while not (runs := await world.runs("east")):
                await world.credit("east", 1)
            starts.append(world.clock.now())
            assert runs[0].attempt == attempt
            await world.end("east", "j", [0], attempt, Reason.NEVER_STARTED, pod_uid="")
        pauses = [b - a for a, b in pairwise(starts)]
        assert pauses[0] < 5
        assert 25 < pauses[-1] < 70
        (task,) = await task_views(world.ledger, "j")
        assert (task.state, task.charged) == (TaskState.QUEUED, {"free": 8})

    in_world(scenario, "east")


def test_retries_go_before_fresh_tasks() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 10)
        await world.credit("east", 2)
        assert indices_of(await world.runs("east")) == [0, 1]
        await world.credit("east", 0)
        await world.end("east", "j", [0], 1, Reason.PREEMPTED)
        await asyncio.sleep(10)
        await world.credit("east", 3)
        again, fresh = await world.runs("east")
        assert (again.indices(), again.attempt) == ([0], 2)
        assert (fresh.indices(), fresh.attempt) == ([2], 1)

    in_world(scenario, "east")


def test_a_migrated_task_goes_on_at_its_pin_without_credit() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 1)
        await world.credit("east", 1)
        await world.runs("east")
        await asyncio.sleep(100)  # no credit is fresh any more
        await world.end("east", "j", [0], 1, Reason.MIGRATED, migration_id="m1", pin_node="n7")
        (run,) = await world.runs("east")
        assert run.attempt == 2
        assert run.pin is not None
        assert (run.pin.migration_id, run.pin.node) == ("m1", "n7")
        await world.end("east", "j", [0], 1, Reason.MIGRATED, migration_id="m1", pin_node="n7")
        assert await world.runs("east") == []
        (task,) = await task_views(world.ledger, "j")
        assert task.charged == {"migrated": 1}

    in_world(scenario, "east")


# ---------------------------------------------------------------- acceptance


def test_success_of_an_earlier_attempt_counts_until_the_next_one_runs() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 2)
        await world.credit("east", 2)
        await world.end("east", "j", [0, 1], 1, Reason.NODE_LOST)
        await asyncio.sleep(10)
        await world.credit("east", 2)
        assert [one.attempt for one in await world.runs("east")] == [1, 2]
        await world.report("east", "j", [1], 2, AttemptState.RUNNING)
        await world.end("east", "j", [0, 1], 1, Reason.COMPLETED)
        first, second = await task_views(world.ledger, "j")
        assert (first.state, first.record_attempt) == (TaskState.SUCCEEDED, 1)
        assert (second.state, second.attempt) == (TaskState.LIVE, 2)
        (cancel,) = await world.sent("east")
        assert isinstance(cancel, SliceCancel)
        assert (cancel.ranges, cancel.attempts_upto) == ([(0, 1)], 2)
        await world.end("east", "j", [1], 2, Reason.COMPLETED, digest=digest("second"))
        await world.end("east", "j", [0], 2, Reason.CANCELLED)
        view = await world.view("j")
        assert (view.state, view.counts.succeeded) == (JobState.SUCCEEDED, 2)
        (second,) = await task_views(world.ledger, "j", first=1)
        assert second.digest == digest("second")

    in_world(scenario, "east")


def test_an_earlier_record_is_accepted_through_the_attempt_that_found_it() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 1)
        await world.credit("east", 1)
        await world.end("east", "j", [0], 1, Reason.NODE_LOST)
        await asyncio.sleep(10)
        await world.credit("east", 1)
        await world.report("east", "j", [0], 2, AttemptState.RUNNING)
        await world.end("east", "j", [0], 2, Reason.COMPLETED, record_attempt=1)
        (task,) = await task_views(world.ledger, "j")
        assert (task.state, task.attempt, task.record_attempt) == (TaskState.SUCCEEDED, 2, 1)

    in_world(scenario, "east")


def test_a_success_without_its_records_digest_proves_nothing() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 1)
        await world.credit("east", 1)
        await world.end("east", "j", [0], 1, Reason.COMPLETED, digest="")
        (task,) = await task_views(world.ledger, "j")
        assert (task.state, task.charged) == (TaskState.QUEUED, {"infrastructure": 1})

    in_world(scenario, "east")


def test_a_late_success_lifts_a_failed_and_folded_task() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 2, retry={"infrastructure": 0}, limits={"parallelism": 1})
        await world.credit("east", 1)
        book = world.coordinator._keeper.book
        object.__setattr__(book.rules, "fold_rows", 1)  # fold at once
        await world.end("east", "j", [0], 1, Reason.NODE_LOST)
        (task, _) = await task_views(world.ledger, "j")
        assert task.state is TaskState.FAILED
        assert await world.ledger.tasks("j", 0, 0) == []
        await world.end("east", "j", [0], 1, Reason.COMPLETED)
        await world.credit("east", 1)
        await world.end("east", "j", [1], 1, Reason.COMPLETED)
        view = await world.view("j")
        assert (view.state, view.counts.succeeded) == (JobState.SUCCEEDED, 2)
        assert await world.ledger.tasks("j") == []
        assert [task.digest for task in await task_views(world.ledger, "j")] == [
            digest(("j", 0)),
            digest(("j", 1)),
        ]

    in_world(scenario, "east")


# ---------------------------------------------------------------- intake


def test_the_same_job_twice_is_one_job_with_one_answer() -> None:
    async def scenario(world: World) -> None:
        body = {"id": "j", "name": "n", "command": ["true"], "array": {"size": 3}}
        first = await world.ask("job.submit.v1", body)
        assert first == JobAnswer(job_id="j", accepted=True)
        assert await world.ask("job.submit.v1", body) == first
        other = await world.ask("job.submit.v1", {**body, "command": ["false"]})
        assert (other.accepted, other.reason, other.field) == (False, Reason.DUPLICATE_ID, "id")
        foreign = await world.ask("job.submit.v1", body, user="mallory")
        assert foreign.reason is Reason.DUPLICATE_ID
        await world.restart()
        assert await world.ask("job.submit.v1", body) == first
        assert (await world.view("j")).tenant == "alice"
        assert len(await world.ledger.jobs()) == 1

    in_world(scenario, "east")


@pytest.mark.parametrize(
    ("body", "field", "reason"),
    [
        (b"\xff{", "body", Reason.MALFORMED),
        (b"[]", "body", Reason.MALFORMED),
        ({"id": "x", "command": ["a"]}, "name", Reason.MALFORMED),
        ({"id": "x", "name": "n", "command": ["a"], "steps": []}, "steps", Reason.NOT_SUPPORTED),
        ({"id": "x", "name": "n", "command": ["a"], "tenant": "r"}, "tenant", Reason.INVALID_SPEC),
        (
            {"id": "x", "name": "n", "command": ["a"], "array": {"size": 10**9}},
            "array.size",
            Reason.INVALID_SPEC,
        ),
        (
            {"id": "x", "name": "n", "command": ["a"], "resources": {"cpu": -1}},
            "resources.cpu",
            Reason.INVALID_SPEC,
        ),
    ],
)
def test_a_bad_job_is_refused_by_field_and_parked(body: object, field: str, reason: Reason) -> None:
    async def scenario(world: World) -> None:
        answer = await world.ask("job.submit.v1", body)
        assert (answer.accepted, answer.reason, answer.field) == (False, reason, field)
        if isinstance(body, dict):
            assert answer.job_id == "x"
        (parked,) = await world.bus.dead_letters(JOBS_QUEUE)
        assert parked.reason == reason.value
        assert field in parked.detail
        good = {"id": "ok", "name": "n", "command": ["a"]}
        assert (await world.ask("job.submit.v1", good)).accepted

    in_world(scenario, "east")


def test_an_unknown_version_is_answered_and_parked() -> None:
    async def scenario(world: World) -> None:
        async with world.bus.answers() as (address, inbox):
            await world.bus.publish_body(
                "job.submit.v1", b"{}", reply_to=address, type_property="job.submit.v9"
            )
            (delivery,) = await inbox.receive(timeout=10)
            answer = delivery.message
            await delivery.ack()
        assert isinstance(answer, JobAnswer)
        assert answer.reason is Reason.WRONG_VERSION

    in_world(scenario, "east")


def test_a_redelivered_submit_after_a_lost_commit_answer_is_harmless() -> None:
    async def scenario(world: World) -> None:
        world.ledger.faults.fail_next(1, "commit", after_effect=True)
        world.ledger.faults.fail_next(1, "commit")
        body = {"id": "j", "name": "n", "command": ["true"], "array": {"size": 3}}
        assert (await world.ask("job.submit.v1", body)).accepted
        assert len(await world.ledger.jobs()) == 1
        await world.credit("east", 3)
        assert indices_of(await world.runs("east")) == [0, 1, 2]

    in_world(scenario, "east")


# ---------------------------------------------------------------- cancel


def test_cancel_wins_over_a_job_that_comes_later() -> None:
    async def scenario(world: World) -> None:
        assert (await world.ask("job.cancel.v1", JobCancel(id="j"))).accepted
        assert await job_view(world.ledger, "j") is None
        await world.restart()
        body = {"id": "j", "name": "n", "command": ["true"], "array": {"size": 3}}
        for _ in range(2):
            answer = await world.ask("job.submit.v1", body)
            assert (answer.accepted, answer.reason) == (True, Reason.CANCELLED)
        view = await world.view("j")
        assert (view.state, view.counts.cancelled) == (JobState.CANCELLED, 3)
        tasks = await task_views(world.ledger, "j")
        assert {task.state for task in tasks} == {TaskState.CANCELLED}
        await world.credit("east", 10)
        assert await world.runs("east") == []

    in_world(scenario, "east")


def test_cancelling_lasts_until_the_last_pod_is_gone() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 10)
        await world.credit("east", 4)
        await world.credit("east", 0)
        await world.end("east", "j", [0], 1, Reason.PREEMPTED)  # it waits for its retry
        await world.sent("east")
        assert (await world.ask("job.cancel.v1", JobCancel(id="j"))).accepted
        await asyncio.sleep(1)
        view = await world.view("j")
        assert view.state is JobState.CANCELLING
        assert (view.counts.queued, view.counts.live, view.counts.cancelled) == (0, 3, 7)
        (cancel,) = await world.sent("east")
        assert isinstance(cancel, SliceCancel)
        assert cancel.ranges is None
        await world.restart()
        await asyncio.sleep(40)
        repeats = await world.sent("east")
        assert repeats, "the cancel is repeated while pods live"
        assert all(isinstance(one, SliceCancel) for one in repeats)
        await world.end("east", "j", [1, 2], 1, Reason.CANCELLED)
        assert (await world.view("j")).state is JobState.CANCELLING
        await world.end("east", "j", [3], 1, Reason.NODE_LOST)
        view = await world.view("j")
        assert (view.state, view.counts.cancelled) == (JobState.CANCELLED, 10)
        assert (await world.ask("job.cancel.v1", JobCancel(id="j"))).accepted

    in_world(scenario, "east")


def test_only_its_own_tenant_cancels_a_job() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 1)
        answer = await world.ask("job.cancel.v1", JobCancel(id="j"), user="mallory")
        assert (answer.accepted, answer.reason) == (False, Reason.UNKNOWN_JOB)
        assert (await world.view("j")).state is JobState.ACCEPTED

    in_world(scenario, "east")


# ---------------------------------------------------------------- clusters


def test_an_undeliverable_slice_goes_back_to_the_queue() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 3, clusters=["west"])
        await world.credit("west", 3)  # nobody consumes west's slices
        tasks = await task_views(world.ledger, "j")
        assert {task.state for task in tasks} == {TaskState.QUEUED}
        assert {task.reason for task in tasks} == {Reason.CLUSTER_UNREACHABLE}
        await world.join("west")
        await asyncio.sleep(60)
        await world.credit("west", 3)
        runs = await world.runs("west")
        assert sorted(indices_of(runs)) == [0, 1, 2]
        assert len({index for one in runs for index in one.indices()}) == 3

    in_world(scenario, "east")


def test_demand_is_split_so_that_no_two_clusters_buy_for_one_task() -> None:
    async def scenario(world: World) -> None:
        await world.submit("both", 100)
        await world.submit("bound", 7, clusters=["west"])
        await asyncio.sleep(11)
        east, west = await world.demand("east"), await world.demand("west")
        assert (east[SHAPE.key], west[SHAPE.key]) == (50, 57), "equal parts while nobody has said"
        await world.capacity("east", {SHAPE: 30})
        await world.capacity("west", {SHAPE: 10})
        await asyncio.sleep(11)
        east, west = await world.demand("east"), await world.demand("west")
        assert (east[SHAPE.key], west[SHAPE.key]) == (75, 32)
        await world.credit("east", 30)
        await asyncio.sleep(11)
        east, west = await world.demand("east"), await world.demand("west")
        assert east[SHAPE.key] + west[SHAPE.key] == 107
        assert east[SHAPE.key] >= 30, "running ones are counted in"

    in_world(scenario, "east", "west", clusters=("east", "west"))


def test_parallelism_bounds_dispatch_and_demand() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 100, limits={"parallelism": 8})
        await asyncio.sleep(11)
        assert await world.demand("east") == {SHAPE.key: 8}
        await world.credit("east", 50)
        assert len(indices_of(await world.runs("east"))) == 8
        await asyncio.sleep(11)
        assert await world.demand("east") == {SHAPE.key: 8}
        await world.end("east", "j", range(3), 1, Reason.COMPLETED)
        await world.credit("east", 50)
        assert len(indices_of(await world.runs("east"))) == 3

    in_world(scenario, "east", clusters=("east",))


def test_demand_falls_to_nothing_when_all_is_done() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 2)
        await world.credit("east", 2)
        await world.end("east", "j", [0, 1], 1, Reason.COMPLETED)
        await asyncio.sleep(11)
        assert await world.demand("east") == {}

    in_world(scenario, "east", clusters=("east",))


def test_a_shape_that_no_cluster_can_hold_is_said_and_not_failed() -> None:
    async def scenario(world: World) -> None:
        async with world.bus.subscribe(
            Subscription(queue="listener", types=(JobEvents,), durable=False)
        ) as inbox:
            await world.submit("j", 2)
            await world.capacity("east", {SHAPE: 0})
            await asyncio.sleep(3)
            events = [one.message for one in await inbox.receive(limit=100, timeout=1)]
            reasons = [one.reason for one in events if isinstance(one, JobEvents)]
            assert reasons[-1] is Reason.UNSCHEDULABLE
            assert (await world.view("j")).counts.queued == 2
            (waiting,) = (await world.view("j")).waiting
            assert (waiting.reason, waiting.count) == (Reason.UNSCHEDULABLE, 2)
            assert waiting.detail == "no node group can hold 1 cores, 256Mi of memory"
            assert isinstance(events[-1], JobEvents)
            assert events[-1].waiting == [waiting]
            await world.restart()  # the next capacity tells it to the new life
            await world.capacity("east", {SHAPE: 0})
            await asyncio.sleep(3)
            assert (await world.view("j")).waiting == [waiting]
            await world.capacity("east", {SHAPE: 5})
            await asyncio.sleep(3)
            events = [one.message for one in await inbox.receive(limit=100, timeout=1)]
            reasons = [one.reason for one in events if isinstance(one, JobEvents)]
            assert reasons[-1] is None
            (waiting,) = (await world.view("j")).waiting
            assert waiting.reason is Reason.NO_CREDIT

    in_world(scenario, "east", clusters=("east",))


def test_what_a_cluster_holds_back_is_told_of_each_job() -> None:
    async def scenario(world: World) -> None:
        async with world.bus.subscribe(
            Subscription(queue="listener", types=(JobEvents,), durable=False)
        ) as inbox:
            await world.submit("a", 3)
            await world.submit("b", 3)
            await world.credit("east", 6)
            assert (await world.view("a")).waiting == []
            await world.pending("east", {"a": 2, "": 5})
            await asyncio.sleep(2)
            (waiting,) = (await world.view("a")).waiting
            assert (waiting.reason, waiting.count) == (Reason.NO_ROOM, 2)
            assert waiting.since == world.clock.now() - 102
            assert (await world.view("b")).waiting == []
            told = [one.message for one in await inbox.receive(limit=100, timeout=1)]
            of_a = [one for one in told if isinstance(one, JobEvents) and one.job_id == "a"]
            assert of_a[-1].waiting == [waiting]
            await asyncio.sleep(60)  # its word has expired: nobody knows any more
            assert (await world.view("a")).waiting == []
            await world.pending("east", {"b": 1})
            await world.end("east", "b", range(3), 1, Reason.COMPLETED)
            assert (await world.view("b")).waiting == []

    in_world(scenario, "east", clusters=("east",))


def test_a_limit_of_the_job_s_own_is_told_as_such() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 10, limits={"parallelism": 4})
        await world.credit("east", 3)
        told = [(one.reason, one.count) for one in (await world.view("j")).waiting]
        assert told == [(Reason.LIMIT_REACHED, 6), (Reason.NO_CREDIT, 1)]
        await world.bus.publish_body("job.cancel.v1", msgspec.json.encode({"id": "j"}))
        await asyncio.sleep(1)
        assert (await world.view("j")).waiting == []

    in_world(scenario, "east", clusters=("east",))


def test_tenants_share_what_there_is() -> None:
    async def scenario(world: World) -> None:
        await world.submit("big", 1_000)
        await asyncio.sleep(1)
        body = {"id": "small", "name": "n", "command": ["a"], "array": {"size": 1_000}}
        await world.ask("job.submit.v1", body, user="bob")
        await world.credit("east", 100)
        given = {"big": 0, "small": 0}
        for one in await world.runs("east"):
            given[one.job_id] += len(one.indices())
        assert given == {"big": 50, "small": 50}
        await world.submit("urgent", 5, priority=10)
        await world.credit("east", 110)
        given = {"big": 0, "small": 0, "urgent": 0}
        for one in await world.runs("east"):
            given[one.job_id] += len(one.indices())
        assert given["urgent"] == 5
        assert given["small"] > given["big"], "urgent ones count for their tenant"

    in_world(scenario, "east")


# ---------------------------------------------------------------- inventory


def test_what_two_inventories_miss_is_lost_and_run_again() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 3)
        await world.credit("east", 3)
        await world.report("east", "j", [0], 1, AttemptState.RUNNING, node="n1")
        epoch = world.coordinator._keeper.epoch
        await world.inventory("east", (epoch, 1))  # speaks for no slice yet
        await asyncio.sleep(70)
        await world.inventory("east", (epoch, 1))
        assert (await world.view("j")).counts.live == 3
        await world.inventory("east", (epoch, 2), [("j", 2, 1)])
        await asyncio.sleep(30)
        await world.inventory("east", (epoch, 2), [("j", 2, 1)])
        assert (await world.view("j")).counts.live == 3, "not far enough apart"
        await asyncio.sleep(40)
        await world.inventory("east", (epoch, 2), [("j", 2, 1)])
        first, second, third = await task_views(world.ledger, "j")
        assert (first.state, first.reason) == (TaskState.QUEUED, Reason.NODE_LOST)
        assert (second.state, second.reason) == (TaskState.QUEUED, Reason.LOST)
        assert first.charged == second.charged == {"infrastructure": 1}
        assert (third.state, third.attempt_state) == (TaskState.LIVE, AttemptState.RUNNING)
        assert third.node == "n1", "an inventory makes up for lost events"

    in_world(scenario, "east")


def test_a_record_in_the_store_beats_a_lost_node() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 2)
        await world.credit("east", 2)
        await world.report("east", "j", [0, 1], 1, AttemptState.RUNNING, node="n1")
        bodies = {}
        for index, uid in ((0, "j-0-1"), (1, "of another pod")):
            record = CompletionRecord(
                job_id="j",
                index=index,
                attempt=1,
                pod_uid=uid,
                exit_code=0,
                started_at=0,
                ended_at=1,
                progress_seconds=1,
            )
            bodies[index] = msgspec.json.encode(record)
            await world.store.put(record_key("j", index, 1), bodies[index])
        await world.restart()
        for _ in range(2):
            await world.inventory("east", (world.coordinator._keeper.epoch, 1))
            await asyncio.sleep(70)
        first, second = await task_views(world.ledger, "j")
        assert first.state is TaskState.SUCCEEDED
        assert first.digest == hashlib.sha256(bodies[0]).hexdigest()
        assert second.charged == {"infrastructure": 1}

    in_world(scenario, "east")


def test_attempts_that_no_task_waits_for_are_ended() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 2)
        await world.credit("east", 2)
        await world.end("east", "j", [0], 1, Reason.NEVER_STARTED, pod_uid="")
        await world.sent("east")
        epoch = world.coordinator._keeper.epoch
        alive = [("j", 0, 1), ("j", 1, 1), ("unheard-of", 0, 1)]
        await world.inventory("east", (epoch, 2), alive)
        assert [one for one in await world.sent("east") if isinstance(one, SliceCancel)] == []
        await world.inventory("east", (epoch, 2), alive)
        cancels = [one for one in await world.sent("east") if isinstance(one, SliceCancel)]
        assert [(one.job_id, one.ranges, one.attempts_upto) for one in cancels] == [
            ("j", [(0, 1)], 1)
        ]

    in_world(scenario, "east")


# ---------------------------------------------------------------- figures


def test_figures_are_summed_once() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 1)
        await world.credit("east", 1)
        figures = AttemptFigures(
            job_id="j",
            index=0,
            attempt=1,
            pod_uid="u",
            cpu_seconds=7.5,
            wall_seconds=10,
            efficiency=0.75,
            peak_memory_bytes=1,
            samples=3,
        )
        for _ in range(2):
            await world.bus.publish(AttemptSummary(cluster="east", summaries=[figures]))
            await asyncio.sleep(0.5)
        job = world.coordinator._keeper.book.jobs["j"]
        assert (job.body.cpu_seconds, job.body.summaries) == (7.5, 1)
        (task,) = await task_views(world.ledger, "j")
        assert task.cpu_seconds == 7.5

    in_world(scenario, "east")


def test_demand_says_how_long_tasks_run_once_enough_have_ended() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 20)
        await world.credit("east", 6)
        figures = [
            AttemptFigures(
                job_id="j",
                index=index,
                attempt=1,
                pod_uid="u",
                cpu_seconds=1.0,
                wall_seconds=30.0,
                efficiency=0.1,
                peak_memory_bytes=1,
                samples=1,
            )
            for index in range(5)
        ]
        await world.end("east", "j", range(5), 1, Reason.COMPLETED)
        await world.bus.publish(AttemptSummary(cluster="east", summaries=figures[:4]))
        await asyncio.sleep(11)
        (item,) = await world.demanded("east")
        assert item.expected_seconds is None, "four are too few"
        await world.bus.publish(AttemptSummary(cluster="east", summaries=figures[4:]))
        await asyncio.sleep(11)
        (item,) = await world.demanded("east")
        assert item.expected_seconds is None, "how long the sixth runs is not known"
        began = world.clock.now() - 1_000
        await world.inventory("east", (1, 10), [("j", 5, 1)], began=began)
        await asyncio.sleep(11)
        (item,) = await world.demanded("east")
        assert item.expected_seconds == pytest.approx((5 * 30 + 1_010) / 5, abs=3)
        assert item.wanted == 15

    in_world(scenario, "east", clusters=("east",))


def test_progress_is_published_at_most_once_a_second() -> None:
    async def scenario(world: World) -> None:
        async with world.bus.subscribe(
            Subscription(queue="listener", types=(JobEvents,), durable=False)
        ) as inbox:
            await world.submit("j", 100)
            await world.credit("east", 100)
            for index in range(100):
                await world.bus.publish(
                    AttemptEvents(
                        cluster="east",
                        events=[
                            AttemptEvent(
                                job_id="j",
                                index=index,
                                attempt=1,
                                state=AttemptState.ENDED,
                                at=0,
                                reason=Reason.COMPLETED,
                                digest=digest(index),
                            )
                        ],
                    )
                )
                await asyncio.sleep(0.05)
            await asyncio.sleep(2)
            events = [one.message for one in await inbox.receive(limit=1_000, timeout=1)]
        states = [one.state for one in events if isinstance(one, JobEvents)]
        assert len(states) <= 3 + 10, "three states and a line a second"
        assert len(states) >= 3 + 3
        assert states[0] is JobState.ACCEPTED
        assert states[-1] is JobState.SUCCEEDED

    in_world(scenario, "east")


# ---------------------------------------------------------------- lives


def test_a_second_coordinator_ends_the_first() -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 5)
        first = world._task
        assert first is not None
        await world.start()
        with pytest.raises(PermanentError) as caught:
            await first
        assert caught.value.reason is Reason.STALE
        await world.credit("east", 5)
        runs = await world.runs("east")
        assert indices_of(runs) == [0, 1, 2, 3, 4]
        assert {one.epoch for one in runs} == {2}

    in_world(scenario, "east")


@pytest.mark.parametrize("offset", range(12))
def test_nothing_is_lost_whenever_it_dies(offset: int) -> None:
    """Crash and restart every few moments, at other ones in each case; each task ends once."""

    async def scenario(world: World) -> None:
        total = 40
        running = True
        done: dict[int, int] = {}

        async def submitter() -> None:
            """Runs each slice's tasks at once; every seventh first attempt is preempted."""
            while running:
                for one in await world.runs("east"):
                    ended: dict[Reason, list[int]] = {}
                    for index in one.indices():
                        bad = index % 7 == 0 and one.attempt == 1
                        ended.setdefault(Reason.PREEMPTED if bad else Reason.COMPLETED, []).append(
                            index
                        )
                        if not bad:
                            done[index] = done.get(index, 0) + 1
                    await world.report(
                        "east", "j", one.indices(), one.attempt, AttemptState.RUNNING
                    )
                    for reason, indices in ended.items():
                        await world.end("east", "j", indices, one.attempt, reason)
                world._seq += 1
                await world.bus.publish(
                    Credit(
                        cluster="east",
                        epoch=1,
                        seq=world._seq,
                        valid_until=FAR,
                        shapes=[ShapeCredit(shape=SHAPE.key, live=0, free=15)],
                    )
                )
                await asyncio.sleep(0.37)

        edge = asyncio.create_task(submitter(), name="submitter")
        await world.submit("j", total)
        try:
            for n in range(400):
                await asyncio.sleep(0.003 + 0.081 * ((n * 7 + offset) % 12))
                if n % 3 == 0 and n < 60:
                    await world.restart()
                view = await job_view(world.ledger, "j")
                if view is not None and view.state.is_final:
                    break
        finally:
            running = False
            await edge
        view = await world.view("j")
        assert (view.state, view.counts.succeeded) == (JobState.SUCCEEDED, total)
        assert sorted(done) == list(range(total))
        tasks = await task_views(world.ledger, "j")
        assert [task.digest for task in tasks] == [digest(("j", i)) for i in range(total)]
        assert await world.bus.dead_letters(ATTEMPTS_QUEUE) == []

    in_world(scenario, "east", dispatch_seconds=0.5, retry_pause_most_seconds=2.0)


@pytest.mark.parametrize("after_effect", [False, True])
def test_a_failing_ledger_loses_nothing(after_effect: bool) -> None:
    async def scenario(world: World) -> None:
        await world.submit("j", 20)
        await asyncio.sleep(1)
        for _ in range(4):
            world.ledger.faults.fail_next(1, "commit", after_effect=after_effect)
            await world.credit("east", 20)
        await asyncio.sleep(30)
        runs = await world.runs("east")
        assert sorted(indices_of(runs)) == list(range(20))
        assert [one.seq for one in runs] == list(range(1, len(runs) + 1)), "no gap in the numbers"
        world.ledger.faults.fail_next(2, "commit", after_effect=after_effect)
        await world.end("east", "j", range(20), 1, Reason.COMPLETED)
        await asyncio.sleep(60)
        assert (await world.view("j")).state is JobState.SUCCEEDED

    in_world(scenario, "east")


def test_news_of_nodes_is_taken() -> None:
    async def scenario(world: World) -> None:
        await world.bus.publish(NodeEvents(cluster="north", events=[]), cluster="north")
        await asyncio.sleep(15)
        world.broker.assert_nothing_left()
        assert "north" in world.coordinator._clusters

    in_world(scenario, "east")


def test_a_big_array_does_not_hold_up_the_loop() -> None:
    """In real time: checking, packing and slicing 100,000 items, heartbeats go on meanwhile.

    A beat is late by the processor time spent since the last one: what else the machine does is
    not the coordinator's fault.
    """
    items = [f"{i:06d}" for i in range(100_000)]
    lags: list[float] = []

    async def beat() -> None:
        while True:
            start = time.process_time()
            await asyncio.sleep(0.01)
            lags.append(time.process_time() - start)

    async def main() -> None:
        broker, clock = MemoryBroker(), SystemClock()
        bus, ledger, stop = InMemoryBus(broker, "alice"), InMemoryLedger(), asyncio.Event()
        coordinator = Coordinator(
            bus=bus, ledger=ledger, clock=clock, ids=SystemIds(clock), config=CoordinatorConfig()
        )
        serving = asyncio.create_task(coordinator.serve(stop))
        beating = asyncio.create_task(beat())
        await asyncio.sleep(0.1)
        body = {"id": "big", "name": "n", "command": ["a"], "array": {"items": items}}
        queue = Subscription(
            queue="s", types=(SliceRun, SliceCancel), cluster="east", prefetch=10_000
        )
        async with bus.subscribe(queue) as inbox, bus.answers() as (address, answers):
            await bus.publish_body("job.submit.v1", msgspec.json.encode(body), reply_to=address)
            (answer,) = await answers.receive(timeout=30)
            await answer.ack()
            assert isinstance(answer.message, JobAnswer)
            assert answer.message.accepted
            offer = ShapeCredit(shape=SHAPE.key, live=0, free=len(items))
            await bus.publish(
                Credit(
                    cluster="east", epoch=1, seq=1, valid_until=clock.now() + 600, shapes=[offer]
                )
            )
            got: list[str] = []
            while len(got) < len(items):
                for delivery in await inbox.receive(limit=10, timeout=30):
                    assert isinstance(delivery.message, SliceRun)
                    assert delivery.message.items is not None
                    got += delivery.message.items
                    assert delivery.attempt == 1
                    await delivery.ack()
        stop.set()
        await serving
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        assert got == items

    asyncio.run(main())
    assert max(lags) < 1.0
