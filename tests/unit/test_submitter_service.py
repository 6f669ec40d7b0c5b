"""The submitter in virtual time on a scripted cluster: what it makes, says and gives back."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from springtide_shared.adapters.clock import SeededIds
from springtide_shared.adapters.memory_bus import InMemoryBus, MemoryBroker
from springtide_shared.adapters.memory_state import InMemoryLeases, InMemoryState
from springtide_shared.adapters.memory_store import InMemoryStore
from springtide_shared.errors import PermanentError, Reason, TransientError
from springtide_shared.messages import (
    AttemptEvent,
    AttemptEvents,
    AttemptKey,
    AttemptState,
    Credit,
    Inventory,
    Message,
    Migrate,
    MigrateAction,
    MigrationEvents,
    MigrationStep,
    Pending,
    Pin,
    Plan,
    Shape,
    ShapeCredit,
    SliceCancel,
    SliceRun,
    Slot,
    SlotState,
    TaskTemplate,
)
from springtide_shared.messages.records import (
    ANNOTATION_CHECKPOINT,
    CheckpointOrder,
    CompletionRecord,
    record_key,
)
from springtide_shared.ports.bus import Inbox, Subscription
from springtide_shared.ports.cluster import PodPhase, PodView
from springtide_shared.testing.scripted_cluster import ScriptedCluster
from springtide_shared.testing.virtual import VirtualClock, run_virtual
from springtide_shared.units import GiB, Resources
from springtide_submitter.config import SubmitterConfig
from springtide_submitter.service import Submitter

SHAPE = Shape(cpu_millis=1000, memory_bytes=GiB)
NODE = Resources(cpu_millis=4000, memory_bytes=8 * GiB, scratch_bytes=64 * GiB, pods=110)
TEMPLATE = TaskTemplate(command=["run"], shape=SHAPE, grace_seconds=7.0)


class World:
    """Everything around one submitter; it survives the submitter's deaths."""

    def __init__(self, stack: AsyncExitStack, config: SubmitterConfig) -> None:
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.broker = MemoryBroker()
        self.bus = InMemoryBus(self.broker)
        self.state = InMemoryState()
        self.store = InMemoryStore()
        self.leases = InMemoryLeases(self.clock)
        self.cluster = ScriptedCluster(self.clock)
        self.config = config
        self.stack = stack
        self.submitter: Submitter | None = None
        self.task: asyncio.Task[None] | None = None
        self.stop = asyncio.Event()
        self.lives = 0
        self.seq = 0
        self.plan_seq = 0
        self.facts: dict[type[Message], Inbox] = {}
        self.slots: dict[str, Slot] = {}

    async def listen(self) -> None:
        for cls in (AttemptEvents, MigrationEvents, Credit, Inventory, Pending):
            durable = cls in (AttemptEvents, MigrationEvents)
            self.facts[cls] = await self.stack.enter_async_context(
                self.bus.subscribe(
                    Subscription(queue=f"test.{cls.topic}", types=(cls,), durable=durable)
                )
            )

    async def begin(self) -> Submitter:
        """A new life of the submitter."""
        self.lives += 1
        self.stop = asyncio.Event()
        self.submitter = Submitter(
            cluster="east",
            bus=self.bus,
            view=self.cluster,
            pods=self.cluster,
            state=self.state,
            store=self.store,
            leases=self.leases,
            clock=self.clock,
            ids=SeededIds(self.clock, self.lives),
            config=self.config,
        )
        self.task = asyncio.create_task(self.submitter.serve(self.stop), name="submitter")
        await asyncio.sleep(1)
        return self.submitter

    async def crash(self) -> None:
        """The process dies: nothing is settled or said."""
        assert self.task is not None
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task
        self.task = None

    async def end(self) -> None:
        if self.task is not None:
            self.stop.set()
            await self.task
            self.task = None

    async def give(self, message: Message) -> None:
        await self.bus.publish(message, cluster="east")

    async def slice(self, *ranges: tuple[int, int], attempt: int = 1, **changes: Any) -> SliceRun:
        self.seq += 1
        fields: dict[str, Any] = {
            "cluster": "east",
            "epoch": 1,
            "seq": self.seq,
            "job_id": "job",
            "tenant": "t",
            "template": TEMPLATE,
            "ranges": list(ranges),
            "attempt": attempt,
        }
        run = SliceRun(**{**fields, **changes})
        await self.give(run)
        return run

    async def plan(self, *slots: Slot, seconds: float = 1e6, epoch: int = 1) -> None:
        self.plan_seq += 1
        await self.give(
            Plan(
                cluster="east",
                epoch=epoch,
                seq=self.plan_seq,
                valid_until=self.clock.now() + seconds,
                slots=list(slots),
            )
        )
        await asyncio.sleep(0.3)

    def ready(self, name: str, places: int, *, state: SlotState = SlotState.READY) -> Slot:
        """A Ready slot with its node in the cluster."""
        self.cluster.add_node(f"node-{name}", NODE, slot=name)
        return Slot(
            slot=name,
            group="g",
            state=state,
            ready_at=self.clock.now(),
            places={SHAPE.key: places},
            node=f"node-{name}",
        )

    async def taken(self, cls: type[Message]) -> list[Any]:
        """What has been published since the last look."""
        found: list[Any] = []
        while deliveries := await self.facts[cls].receive(limit=100, timeout=0):
            for delivery in deliveries:
                found.append(delivery.message)
                await delivery.ack()
        return found

    async def events(self) -> list[AttemptEvent]:
        return [event for batch in await self.taken(AttemptEvents) for event in batch.events]

    async def ends(self) -> dict[tuple[int, int], AttemptEvent]:
        """Terminal events by (index, attempt)."""
        return {
            (event.index, event.attempt): event
            for event in await self.events()
            if event.state is AttemptState.ENDED
        }

    def pod(self, index: int, attempt: int = 1) -> PodView:
        return self.cluster.pod_of(AttemptKey("job", index, attempt))

    def depth(self) -> int:
        """Slices that are not settled."""
        return self.broker.depth("submitter.east.slices")

    async def record(self, pod: PodView) -> None:
        """What an agent leaves after success."""
        assert pod.attempt is not None
        key = pod.attempt
        record = CompletionRecord(
            job_id=key.job_id,
            index=key.index,
            attempt=key.attempt,
            pod_uid=pod.uid,
            exit_code=0,
            started_at=0.0,
            ended_at=1.0,
            progress_seconds=1.0,
        )
        await self.store.put(
            record_key(key.job_id, key.index, key.attempt), msgspec.json.encode(record)
        )


@asynccontextmanager
async def a_world(config: SubmitterConfig | None = None) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        world = World(stack, config or SubmitterConfig())
        await world.listen()
        try:
            yield world
        finally:
            await world.end()


Scene = Callable[[World], Coroutine[Any, Any, None]]


def virtual(scene: Scene) -> Callable[[], None]:
    """Run a test in virtual time in a world of its own."""

    @functools.wraps(scene)
    def test() -> None:
        async def main() -> None:
            async with a_world() as world:
                await scene(world)

        run_virtual(main(), limit=3 * 86_400)

    del test.__wrapped__  # pytest would look for fixtures
    return test


def lose_connection(world: World, name: str) -> None:
    """The consumer of a queue is cut off; what it held is delivered again."""
    queue = world.broker._queues[name]
    inbox = queue.consumers[0]
    inbox.closed = True
    queue.give_back(inbox.held.values())
    inbox.held.clear()
    for _, future in queue.waiters:
        future.set_result(None)


async def run_all(world: World, node: str, *indices: int, attempt: int = 1) -> None:
    for index in indices:
        world.cluster.run(world.pod(index, attempt).name, node)
    await asyncio.sleep(0.5)


# ---------------------------------------------------------------- life of a slice
@virtual
async def test_a_slice_becomes_pods_in_their_slot_and_is_acked_then(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 3))
    await world.slice((0, 3), items=["a", "b", "c"])
    await asyncio.sleep(1)
    assert [(spec.slot, spec.item) for spec in world.cluster.created] == [
        ("s1", "a"),
        ("s1", "b"),
        ("s1", "c"),
    ]
    assert world.depth() == 0
    await run_all(world, "node-s1", 0, 1, 2)
    world.cluster.end(world.pod(0).name, digest="d0")
    world.cluster.end(world.pod(1).name, exit_code=3)
    await asyncio.sleep(1)
    events = await world.events()
    assert [event.state for event in events if event.index == 0] == [
        AttemptState.PENDING,
        AttemptState.RUNNING,
        AttemptState.ENDED,
    ]
    ends = {event.index: event for event in events if event.state is AttemptState.ENDED}
    assert (ends[0].reason, ends[0].digest, ends[0].node) == (
        Reason.COMPLETED,
        "d0",
        "node-s1",
    )
    assert (ends[1].reason, ends[1].exit_code) == (Reason.APPLICATION_ERROR, 3)
    assert sorted(world.cluster.pods) == [world.pod(2).name]  # the ended ones are removed


@virtual
async def test_a_freed_place_is_filled_again_without_a_new_plan(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 1))
    await world.slice((0, 2))
    await asyncio.sleep(1)
    assert [spec.attempt.index for spec in world.cluster.created] == [0]
    assert world.depth() == 1
    await run_all(world, "node-s1", 0)
    world.cluster.end(world.pod(0).name, digest="d")
    await asyncio.sleep(1)
    assert [spec.attempt.index for spec in world.cluster.created] == [0, 1]
    assert world.depth() == 0


@virtual
async def test_what_has_no_place_within_a_minute_is_handed_back(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 1))
    began = world.clock.now()
    await world.slice((0, 3))
    await asyncio.sleep(50)
    held = (await world.taken(Pending))[-1].held
    assert [(item.reason, item.count) for item in held] == [(Reason.NO_ROOM, 2)]
    assert not await world.ends()
    await asyncio.sleep(15)
    ends = await world.ends()
    assert {key: end.reason for key, end in ends.items()} == {
        (1, 1): Reason.CLUSTER_UNAVAILABLE,
        (2, 1): Reason.CLUSTER_UNAVAILABLE,
    }
    assert all(60 <= end.at - began < 62 for end in ends.values())
    assert world.depth() == 0


@virtual
async def test_a_launching_slot_gets_its_pods_when_it_is_due_soon(world: World) -> None:
    await world.begin()
    slot = Slot(
        slot="s1",
        group="g",
        state=SlotState.LAUNCHING,
        ready_at=world.clock.now() + 50,
        places={SHAPE.key: 2},
    )
    await world.plan(slot)
    await world.slice((0, 1))
    await asyncio.sleep(10)
    assert (await world.taken(Credit))[-1].shapes == [
        ShapeCredit(shape=SHAPE.key, live=1, free=1)  # one of two is waited for
    ]
    assert world.cluster.created == []
    await asyncio.sleep(15)
    assert [spec.slot for spec in world.cluster.created] == ["s1"]


@virtual
async def test_a_redelivered_slice_creates_nothing(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 1))
    await world.slice((0, 3))
    await asyncio.sleep(1)
    await run_all(world, "node-s1", 0)
    await world.crash()  # with two tasks held and the slice not acked
    await asyncio.sleep(40)
    await world.begin()
    await world.plan(world.ready("s1", 3))
    await asyncio.sleep(5)
    assert [spec.attempt.index for spec in world.cluster.created] == [0]
    ends = await world.ends()
    assert {key: end.reason for key, end in ends.items()} == {
        (1, 1): Reason.NEVER_STARTED,
        (2, 1): Reason.NEVER_STARTED,
    }
    assert world.depth() == 0
    world.cluster.end(world.pod(0).name, digest="d")
    await asyncio.sleep(1)
    assert (await world.ends())[0, 1].reason is Reason.COMPLETED


@virtual
async def test_a_slice_that_comes_twice_runs_once(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 4))
    run = await world.slice((0, 1))
    await asyncio.sleep(1)
    await run_all(world, "node-s1", 0)
    world.cluster.end(world.pod(0).name, digest="d")
    await asyncio.sleep(1)
    await world.give(run)
    await asyncio.sleep(2)
    assert len(world.cluster.created) == 1
    assert world.depth() == 0


@virtual
async def test_held_tasks_outlive_a_mere_reconnect(world: World) -> None:
    submitter = await world.begin()
    await world.plan(world.ready("s1", 1))
    await world.slice((0, 2))
    await asyncio.sleep(1)
    lose_connection(world, "submitter.east.slices")
    await asyncio.sleep(5)
    await run_all(world, "node-s1", 0)
    world.cluster.end(world.pod(0).name, digest="d")
    await asyncio.sleep(1)
    assert [spec.attempt.index for spec in world.cluster.created] == [0, 1]
    assert {key: end.reason for key, end in (await world.ends()).items()} == {
        (0, 1): Reason.COMPLETED
    }
    assert submitter.health().is_ready
    assert world.depth() == 0


@virtual
async def test_a_slice_of_an_older_dispatcher_is_refused(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 4))
    await world.slice((0, 1), epoch=5)
    await asyncio.sleep(1)
    await world.slice((1, 2), epoch=4)
    await asyncio.sleep(1)
    assert {key: end.reason for key, end in (await world.ends()).items()} == {(1, 1): Reason.STALE}
    assert world.depth() == 0


@virtual
async def test_the_newest_epoch_is_remembered_across_lives(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 4))
    await world.slice((0, 1), epoch=5)
    await asyncio.sleep(25)
    await world.crash()
    await asyncio.sleep(40)
    await world.begin()
    await world.slice((1, 2), epoch=4)
    await asyncio.sleep(1)
    assert (await world.ends())[1, 1].reason is Reason.STALE


@virtual
async def test_slices_before_the_first_list_wait_and_count_as_redelivered(world: World) -> None:
    world.cluster.is_down = True
    await world.begin()
    await asyncio.sleep(15)
    await world.slice((0, 1))
    await asyncio.sleep(5)
    assert not await world.events()
    assert world.depth() == 1
    world.cluster.is_down = False
    await asyncio.sleep(10)
    assert (await world.ends())[0, 1].reason is Reason.NEVER_STARTED
    assert world.depth() == 0
    assert world.cluster.created == []


@virtual
async def test_a_cluster_that_never_answers_gives_fresh_slices_back(world: World) -> None:
    world.cluster.is_down = True
    submitter = await world.begin()
    await asyncio.sleep(15)
    await world.slice((0, 2))
    await asyncio.sleep(65)
    assert {end.reason for end in (await world.ends()).values()} == {Reason.CLUSTER_UNAVAILABLE}
    assert world.depth() == 0
    assert not submitter.health().is_ready
    assert not await world.taken(Credit)  # nothing is offered


# ---------------------------------------------------------------- the meter
@virtual
async def test_the_meter_obeys_retry_after_and_slows_down(world: World) -> None:
    submitter = await world.begin()
    await world.plan(world.ready("s1", 4))
    pace = submitter.core.meter.pace
    world.cluster.create_faults.append(
        TransientError(Reason.CLUSTER_UNAVAILABLE, "429", retry_after=20.0)
    )
    began = world.clock.now()
    await world.slice((0, 1))
    await asyncio.sleep(19)
    assert world.cluster.created == []
    assert submitter.core.meter.pace == pytest.approx(0.7 * pace)
    await asyncio.sleep(3)
    assert 20 <= world.pod(0).created_at - began <= 22
    assert world.depth() == 0


@virtual
async def test_creates_keep_to_the_pace(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 200))
    began = world.clock.now()
    await world.slice((0, 200))
    await asyncio.sleep(30)
    times = [world.pod(index).created_at - began for index in range(200)]
    for second in range(5):
        # 40 tokens saved up, then at most the pace, which grows by its root twice a second
        pace = 20.0
        allowed = 40.0
        for _ in range(2 * (second + 1)):
            allowed += pace / 2
            pace += pace**0.5
        assert sum(time <= second + 1 for time in times) <= allowed + 1
    assert max(times) < 30


@virtual
async def test_a_pod_that_can_never_be_made_ends_with_the_reason(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 4))
    world.cluster.create_faults.append(PermanentError(Reason.ADMISSION_DENIED, "policy"))
    await world.slice((0, 1))
    await asyncio.sleep(1)
    assert (await world.ends())[0, 1].reason is Reason.ADMISSION_DENIED
    assert world.depth() == 0


@virtual
async def test_a_create_that_only_seemed_to_fail_is_found_again(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 4))
    world.cluster.late_faults.append(TransientError(Reason.CLUSTER_UNAVAILABLE, "lost answer"))
    await world.slice((0, 1))
    await asyncio.sleep(5)
    assert len(world.cluster.created) == 1
    assert world.depth() == 0
    assert not await world.ends()


# ---------------------------------------------------------------- cancels
@virtual
async def test_a_cancel_ends_what_runs_and_drops_what_is_held(world: World) -> None:
    await world.begin()
    world.cluster.ends_on_delete = False
    await world.plan(world.ready("s1", 1))
    await world.slice((0, 2))
    await asyncio.sleep(1)
    await run_all(world, "node-s1", 0)
    await world.give(SliceCancel(cluster="east", epoch=1, job_id="job"))
    await asyncio.sleep(1)
    assert world.cluster.deleted == [(world.pod(0).name, world.pod(0).uid, 7.0)]
    assert {key: end.reason for key, end in (await world.ends()).items()} == {
        (1, 1): Reason.CANCELLED
    }
    world.cluster.remove(world.pod(0).name)
    await asyncio.sleep(2)
    assert (await world.ends())[0, 1].reason is Reason.CANCELLED
    assert world.depth() == 0


@virtual
async def test_a_cancel_is_remembered_by_the_next_life(world: World) -> None:
    await world.begin()
    await world.give(SliceCancel(cluster="east", epoch=1, job_id="job", ranges=[(0, 5)]))
    await asyncio.sleep(1)
    await world.crash()
    await asyncio.sleep(40)
    await world.begin()
    await world.plan(world.ready("s1", 4))
    await world.slice((4, 6))
    await asyncio.sleep(2)
    assert [spec.attempt.index for spec in world.cluster.created] == [5]
    assert (await world.ends())[4, 1].reason is Reason.CANCELLED


@virtual
async def test_success_wins_over_a_cancel_that_came_late(world: World) -> None:
    await world.begin()
    world.cluster.ends_on_delete = False
    await world.plan(world.ready("s1", 1))
    await world.slice((0, 1))
    await asyncio.sleep(1)
    await run_all(world, "node-s1", 0)
    await world.give(SliceCancel(cluster="east", epoch=1, job_id="job"))
    await asyncio.sleep(1)
    world.cluster.end(world.pod(0).name, digest="d")
    await asyncio.sleep(1)
    assert (await world.ends())[0, 1].reason is Reason.COMPLETED


# ---------------------------------------------------------------- ends and proofs
@virtual
async def test_a_pod_stays_until_its_end_is_confirmed_and_its_slice_acked(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 1))
    await world.slice((0, 2))  # task 1 is held, so the slice stays open
    await asyncio.sleep(1)
    pod = world.pod(0)
    await run_all(world, "node-s1", 0)
    world.slots.clear()
    await world.plan(Slot(slot="s1", group="g", state=SlotState.CORDONED, ready_at=0.0))
    world.broker.available = False
    world.cluster.end(pod.name, digest="d")
    await asyncio.sleep(5)
    assert pod.name in world.cluster.pods  # not confirmed
    world.broker.available = True
    await asyncio.sleep(10)
    assert (await world.ends())[0, 1].reason is Reason.COMPLETED
    assert world.depth() == 1
    assert pod.name in world.cluster.pods  # confirmed, but the slice is not acked
    await asyncio.sleep(60)
    assert world.depth() == 0
    assert pod.name not in world.cluster.pods


@virtual
async def test_exit_0_without_a_digest_is_proved_from_the_store(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 2))
    await world.slice((0, 2))
    await asyncio.sleep(1)
    await run_all(world, "node-s1", 0, 1)
    await world.record(world.pod(0))
    world.cluster.end(world.pod(0).name)
    world.cluster.end(world.pod(1).name)
    await asyncio.sleep(2)
    ends = await world.ends()
    assert ends[0, 1].reason is Reason.COMPLETED
    assert len(ends[0, 1].digest) == 64
    assert ends[1, 1].reason is Reason.STORE_UNAVAILABLE  # exit 0, nothing behind it


@virtual
async def test_while_the_store_is_down_the_attempt_is_finishing(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 2))
    await world.slice((0, 2))
    await asyncio.sleep(1)
    await run_all(world, "node-s1", 0, 1)
    await world.record(world.pod(0))
    world.store.faults.is_down = True
    world.cluster.end(world.pod(0).name)
    await asyncio.sleep(60)
    last = [event for event in await world.events() if event.index == 0][-1]
    assert (last.state, last.reason) == (AttemptState.FINISHING, Reason.STORE_UNAVAILABLE)
    world.store.faults.is_down = False
    await asyncio.sleep(10)
    assert (await world.ends())[0, 1].reason is Reason.COMPLETED
    world.store.faults.is_down = True
    world.cluster.end(world.pod(1).name)
    await asyncio.sleep(620)
    assert (await world.ends())[1, 1].reason is Reason.STORE_UNAVAILABLE


@virtual
async def test_a_vanished_pod_is_proved_or_blamed_on_its_node(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 2), world.ready("s2", 1), world.ready("s3", 1))
    await world.slice((0, 4))
    await asyncio.sleep(1)
    await run_all(world, "node-s1", 0, 1)
    await run_all(world, "node-s2", 2)
    await run_all(world, "node-s3", 3)
    await world.record(world.pod(0))
    world.cluster.remove(world.pod(0).name)
    world.cluster.remove(world.pod(1).name)
    world.cluster.lose_node("node-s2")
    world.cluster.lose_node("node-s3", stays=True)
    await asyncio.sleep(2)
    assert {key: end.reason for key, end in (await world.ends()).items()} == {
        (0, 1): Reason.COMPLETED,
        (1, 1): Reason.LOST,
        (2, 1): Reason.NODE_LOST,
        (3, 1): Reason.NODE_LOST,
    }


@virtual
async def test_a_watch_that_lost_everything_is_made_good_by_a_list(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 2))
    await world.slice((0, 2))
    await asyncio.sleep(1)
    await run_all(world, "node-s1", 0, 1)
    world.cluster.end(world.pod(0).name, digest="d")
    world.cluster.pods.pop(world.pod(1).name)
    world.cluster.compact()
    world.cluster._changed.set()
    await asyncio.sleep(10)
    assert {key: end.reason for key, end in (await world.ends()).items()} == {
        (0, 1): Reason.COMPLETED,
        (1, 1): Reason.LOST,
    }


@virtual
async def test_foreign_pods_are_never_touched(world: World) -> None:
    world.cluster.add_node("n", NODE)
    world.cluster.foreign("theirs", "n", SHAPE.resources)
    await world.begin()
    await world.plan()
    await asyncio.sleep(30)
    assert world.cluster.deleted == []
    assert not await world.events()
    assert all(not edition.attempts for edition in await world.taken(Inventory))


# ---------------------------------------------------------------- slots
@virtual
async def test_unstarted_pods_of_a_failed_slot_move_without_a_new_attempt(world: World) -> None:
    await world.begin()
    world.cluster.ends_on_delete = False
    now = world.clock.now()
    launching = Slot(
        slot="s1",
        group="g",
        state=SlotState.LAUNCHING,
        ready_at=now + 10,
        places={SHAPE.key: 2},
    )
    await world.plan(launching)
    await world.slice((0, 2))
    await asyncio.sleep(1)
    first = [world.pod(0).uid, world.pod(1).uid]
    await world.plan(world.ready("s2", 2))
    await asyncio.sleep(1)
    assert [uid for _, uid, _ in world.cluster.deleted] == first
    assert len(world.cluster.created) == 2  # not before the old ones are gone
    world.cluster.remove(world.pod(0).name)
    world.cluster.remove(world.pod(1).name)
    await asyncio.sleep(2)
    assert [
        (spec.attempt.index, spec.attempt.attempt, spec.slot) for spec in world.cluster.created[2:]
    ] == [
        (0, 1, "s2"),
        (1, 1, "s2"),
    ]
    assert not await world.ends()
    await run_all(world, "node-s2", 0, 1)
    await asyncio.sleep(2)
    assert (await world.taken(Inventory)) is not None
    states = [event.state for event in await world.events()]
    assert states.count(AttemptState.RUNNING) == 2


@virtual
async def test_a_cordoned_slot_keeps_what_runs_and_takes_nothing_new(world: World) -> None:
    await world.begin()
    slot = world.ready("s1", 2)
    await world.plan(slot)
    await world.slice((0, 1))
    await asyncio.sleep(1)
    await run_all(world, "node-s1", 0)
    await world.plan(msgspec.structs.replace(slot, state=SlotState.CORDONED))
    await world.slice((1, 2))
    await asyncio.sleep(6)
    assert len(world.cluster.created) == 1
    assert world.cluster.deleted == []
    assert (await world.taken(Credit))[-1].shapes == [ShapeCredit(shape=SHAPE.key, live=2, free=0)]


@virtual
async def test_without_a_plan_held_tasks_go_unpinned_onto_free_room(world: World) -> None:
    world.cluster.add_node("n1", NODE)  # 4 cores, 3 of them free
    world.cluster.foreign("theirs", "n1", SHAPE.resources)
    await world.begin()
    await world.plan(seconds=5)
    await world.slice((0, 5))
    await asyncio.sleep(4)
    assert world.cluster.created == []
    await asyncio.sleep(20)
    assert [(spec.slot, spec.node) for spec in world.cluster.created] == [("", "")] * 3
    assert (await world.taken(Credit))[-1].shapes[0].free == 0  # expired: nothing is offered
    await asyncio.sleep(50)
    assert {key: end.reason for key, end in (await world.ends()).items()} == {
        (3, 1): Reason.CLUSTER_UNAVAILABLE,
        (4, 1): Reason.CLUSTER_UNAVAILABLE,
    }


# ---------------------------------------------------------------- restart
@virtual
async def test_the_next_life_adopts_pods_with_all_that_matters(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 3))
    await world.slice((0, 2), template=msgspec.structs.replace(TEMPLATE, grace_seconds=11.0))
    await asyncio.sleep(1)
    await run_all(world, "node-s1", 0, 1)
    await world.crash()
    world.cluster.end(world.pod(1).name, digest="d")  # nobody looks
    await asyncio.sleep(40)
    await world.taken(Inventory)
    submitter = await world.begin()
    await world.plan(world.ready("s1", 3))
    await asyncio.sleep(6)
    assert (await world.ends())[1, 1].reason is Reason.COMPLETED
    credit = (await world.taken(Credit))[-1]
    assert credit.epoch == 2
    assert credit.shapes == [ShapeCredit(shape=SHAPE.key, live=1, free=2)]
    await asyncio.sleep(40)
    lines = (await world.taken(Inventory))[-1].attempts
    assert [(line.index, line.state, line.node, line.slot) for line in lines] == [
        (0, AttemptState.RUNNING, "node-s1", "s1")
    ]
    await world.give(SliceCancel(cluster="east", epoch=1, job_id="job"))
    await asyncio.sleep(1)
    assert world.cluster.deleted[-1][2] == 11.0
    assert submitter.health().is_ready


@virtual
async def test_inventory_speaks_only_for_settled_slices(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 1))
    await asyncio.sleep(65)
    await world.slice((0, 1), seq=7)
    await world.slice((1, 2), seq=8)  # has no place
    await asyncio.sleep(30)
    edition = (await world.taken(Inventory))[-1]
    assert edition.settled_below == 0  # numbers below 7 may still be on the way
    await asyncio.sleep(25)
    assert (await world.taken(Inventory))[-1].settled_below in (0, 8)
    await asyncio.sleep(60)
    edition = (await world.taken(Inventory))[-1]
    assert (edition.slice_epoch, edition.settled_below) == (1, 9)  # 8 was handed back


@virtual
async def test_two_submitters_for_one_cluster_do_not_work_at_once(world: World) -> None:
    await world.begin()
    await world.plan(world.ready("s1", 4))
    first, task, stop = world.submitter, world.task, world.stop
    await world.begin()
    assert world.submitter is not None
    await asyncio.sleep(20)
    assert first is not None
    assert first.health().is_ready
    assert not world.submitter.health().is_ready
    stop.set()
    assert task is not None
    await task  # an orderly end gives the lease back
    await asyncio.sleep(10)
    assert world.submitter.health().is_ready


# ---------------------------------------------------------------- migrations
async def a_task_to_move(world: World, *, target_places: int = 1) -> tuple[PodView, Slot, Slot]:
    """Task 0 runs on node-s1; node-s2 is there."""
    await world.begin()
    one, two = world.ready("s1", 1), world.ready("s2", target_places)
    await world.plan(one)
    await world.slice((0, 1))
    await asyncio.sleep(1)
    await run_all(world, "node-s1", 0)
    await world.plan(one, two)
    await world.events()
    return world.pod(0), one, two


def migrate(world: World, action: MigrateAction, pod: PodView, **changes: Any) -> Migrate:
    fields: dict[str, Any] = {
        "cluster": "east",
        "migration_id": "M1",
        "action": action,
        "job_id": "job",
        "index": 0,
        "attempt": 1,
        "pod_uid": pod.uid,
        "source_node": "node-s1",
        "target_node": "node-s2",
        "valid_until": world.clock.now() + 300,
    }
    return Migrate(**{**fields, **changes})


async def asked(world: World, command: Migrate) -> MigrationEvents:
    await world.give(command)
    await asyncio.sleep(0.5)
    (answer,) = await world.taken(MigrationEvents)
    assert isinstance(answer, MigrationEvents)
    assert answer.migration_id == command.migration_id
    return answer


async def free_places(world: World) -> int:
    await world.taken(Credit)
    await asyncio.sleep(6)
    credit = (await world.taken(Credit))[-1]
    return sum(shape.free for shape in credit.shapes)


@virtual
async def test_a_task_moves_to_its_reserved_place(world: World) -> None:
    pod, _, _ = await a_task_to_move(world)
    assert await free_places(world) == 1
    reserved = await asked(world, migrate(world, MigrateAction.RESERVE, pod))
    assert reserved.step is MigrationStep.RESERVED
    assert await free_places(world) == 0  # taken out of the credit
    requested = await asked(world, migrate(world, MigrateAction.CHECKPOINT, pod))
    assert requested.step is MigrationStep.REQUESTED
    order = msgspec.json.decode(
        world.pod(0).annotations[ANNOTATION_CHECKPOINT], type=CheckpointOrder
    )
    assert order.migration_id == "M1"
    ending = await asked(world, migrate(world, MigrateAction.END, pod))
    assert ending.step is MigrationStep.ENDING
    assert world.cluster.deleted == [(pod.name, pod.uid, 2.0)]
    end = (await world.ends())[0, 1]
    assert (end.reason, end.migration_id, end.pin_node) == (Reason.MIGRATED, "M1", "node-s2")
    await world.slice((0, 1), attempt=2, pin=Pin(migration_id="M1", node="node-s2"))
    await asyncio.sleep(1)
    assert (world.cluster.created[-1].node, world.cluster.created[-1].slot) == ("node-s2", "")
    await run_all(world, "node-s2", 0, attempt=2)
    (restored,) = await world.taken(MigrationEvents)
    assert restored.step is MigrationStep.RESTORED
    assert not await world.state.list("saga-")
    assert await free_places(world) == 1  # the source's


@virtual
async def test_the_same_command_twice_gets_the_same_answer(world: World) -> None:
    pod, _, _ = await a_task_to_move(world)
    command = migrate(world, MigrateAction.RESERVE, pod)
    first = await asked(world, command)
    assert await asked(world, command) == first
    assert len(await world.state.list("saga-")) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target_node": "elsewhere"}, Reason.UNKNOWN_NODE),
        ({"index": 7}, Reason.UNKNOWN_ATTEMPT),
        ({"attempt": 2}, Reason.UNKNOWN_ATTEMPT),
        ({"pod_uid": "older"}, Reason.STALE),
        ({"target_node": "node-full"}, Reason.NO_ROOM),
        ({"target_node": "node-shut"}, Reason.NODE_CORDONED),
        ({"valid_until": 1.0}, Reason.EXPIRED),
    ],
)
def test_a_reservation_is_refused_with_the_reason(changes: dict[str, Any], reason: Reason) -> None:
    async def scene(world: World) -> None:
        pod, _, _ = await a_task_to_move(world)
        world.cluster.add_node("node-full", NODE)
        for number in range(4):
            world.cluster.foreign(f"theirs-{number}", "node-full", SHAPE.resources)
        world.cluster.add_node("node-shut", NODE)
        world.cluster.cordon("node-shut")
        answer = await asked(world, migrate(world, MigrateAction.RESERVE, pod, **changes))
        assert (answer.step, answer.reason) == (MigrationStep.REFUSED, reason)
        assert not await world.state.list("saga-")

    virtual(scene)()


@virtual
async def test_a_place_is_reserved_once(world: World) -> None:
    pod, _, _ = await a_task_to_move(world)
    world.cluster.add_node("node-s2", Resources(cpu_millis=1000, memory_bytes=GiB, pods=5))
    first = await asked(world, migrate(world, MigrateAction.RESERVE, pod))
    second = await asked(world, migrate(world, MigrateAction.RESERVE, pod, migration_id="M2"))
    assert first.step is MigrationStep.RESERVED
    assert (second.step, second.reason) == (MigrationStep.REFUSED, Reason.NO_ROOM)


@virtual
async def test_a_cancelled_migration_leaves_the_task_where_it_is(world: World) -> None:
    pod, _, _ = await a_task_to_move(world)
    await asked(world, migrate(world, MigrateAction.RESERVE, pod))
    await asked(world, migrate(world, MigrateAction.CHECKPOINT, pod))
    answer = await asked(world, migrate(world, MigrateAction.CANCEL, pod))
    assert answer.step is MigrationStep.CANCELLED
    assert ANNOTATION_CHECKPOINT not in world.pod(0).annotations
    assert await free_places(world) == 1
    assert not await world.state.list("saga-")
    late = await asked(world, migrate(world, MigrateAction.END, pod))
    assert (late.step, late.reason) == (MigrationStep.REFUSED, Reason.STALE)
    assert world.pod(0).phase is PodPhase.RUNNING


@virtual
async def test_an_expired_reservation_is_given_back_and_ends_nothing(world: World) -> None:
    pod, _, _ = await a_task_to_move(world)
    command = migrate(world, MigrateAction.RESERVE, pod, valid_until=world.clock.now() + 30)
    await asked(world, command)
    await asyncio.sleep(40)
    assert await free_places(world) == 1
    answer = await asked(world, migrate(world, MigrateAction.END, pod))
    assert (answer.step, answer.reason) == (MigrationStep.REFUSED, Reason.EXPIRED)
    assert world.pod(0).phase is PodPhase.RUNNING


@virtual
async def test_a_task_that_completes_while_it_is_moved_has_succeeded(world: World) -> None:
    pod, _, _ = await a_task_to_move(world)
    world.cluster.ends_on_delete = False
    await asked(world, migrate(world, MigrateAction.RESERVE, pod))
    await asked(world, migrate(world, MigrateAction.END, pod))
    world.cluster.end(pod.name, digest="d")
    await asyncio.sleep(1)
    assert (await world.ends())[0, 1].reason is Reason.COMPLETED
    assert await free_places(world) == 2
    assert not await world.state.list("saga-")


@virtual
async def test_a_pin_without_its_reservation_is_placed_like_any_other(world: World) -> None:
    await a_task_to_move(world)
    await world.slice((0, 1), attempt=2, pin=Pin(migration_id="unknown", node="node-s2"))
    await asyncio.sleep(1)
    assert (world.cluster.created[-1].node, world.cluster.created[-1].slot) == ("", "s2")


@virtual
async def test_reservations_and_endings_survive_a_restart(world: World) -> None:
    pod, one, two = await a_task_to_move(world)
    await asked(world, migrate(world, MigrateAction.RESERVE, pod))
    await world.crash()
    await asyncio.sleep(40)
    await world.begin()
    await world.plan(one, two, epoch=2)
    assert await free_places(world) == 0  # still reserved
    world.cluster.ends_on_delete = False
    await asked(world, migrate(world, MigrateAction.END, pod))
    await world.crash()
    world.cluster.remove(pod.name)  # it goes while nobody looks
    await asyncio.sleep(40)
    await world.begin()
    await asyncio.sleep(2)
    end = (await world.ends())[0, 1]
    assert (end.reason, end.migration_id, end.pin_node) == (Reason.MIGRATED, "M1", "node-s2")


@virtual
async def test_a_pinned_pod_that_cannot_start_goes_elsewhere(world: World) -> None:
    pod, one, two = await a_task_to_move(world)
    await asked(world, migrate(world, MigrateAction.RESERVE, pod))
    await asked(world, migrate(world, MigrateAction.END, pod))
    await world.slice((0, 1), attempt=2, pin=Pin(migration_id="M1", node="node-s2"))
    await asyncio.sleep(1)
    await world.plan(one, msgspec.structs.replace(two, state=SlotState.CORDONED))
    await asyncio.sleep(2)
    assert (world.cluster.created[-1].node, world.cluster.created[-1].slot) == ("", "s1")
    assert world.cluster.created[-1].attempt.attempt == 2


# ---------------------------------------------------------------- faults of the keepers
@virtual
async def test_a_cancel_whose_memory_cannot_be_written_comes_again(world: World) -> None:
    await world.begin()
    world.state.faults.fail_next(2)
    await world.give(SliceCancel(cluster="east", epoch=1, job_id="job"))
    await asyncio.sleep(10)
    assert len(await world.state.list("cancel-")) == 1
    assert world.depth() == 0


def test_cancels_are_forgotten_after_their_time() -> None:
    async def main() -> None:
        async with a_world(SubmitterConfig(cancel_memory_seconds=3600.0)) as world:
            await world.begin()
            await world.give(SliceCancel(cluster="east", epoch=1, job_id="job"))
            await asyncio.sleep(3590)
            assert len(await world.state.list("cancel-")) == 1
            await asyncio.sleep(300)
            assert not await world.state.list("cancel-")

    run_virtual(main())


@virtual
async def test_a_lost_lease_ends_the_service(world: World) -> None:
    await world.begin()
    world.leases._records.clear()
    assert await world.leases.acquire("submitter.east", "other", 1e6) is not None
    assert world.task is not None
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(asyncio.shield(world.task), 60)
    assert caught.group_contains(PermanentError, match="another holder")
    world.task = None
