"""The rescheduler in virtual time against a scripted submitter, scaler and agents.

The scripted world keeps the promises of its messages (idempotent answers, fencing, one attempt of a
task at a time) and checks after every run that nothing was lost, frozen, reserved or left cordoned.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import structlog

from springtide_rescheduler.config import ReschedulerConfig
from springtide_rescheduler.service import Rescheduler
from springtide_shared.adapters.clock import SeededIds
from springtide_shared.adapters.memory_bus import Faults, InMemoryBus, MemoryBroker
from springtide_shared.adapters.memory_state import InMemoryLeases, InMemoryState
from springtide_shared.adapters.memory_store import InMemoryStore
from springtide_shared.errors import Reason, TransientError
from springtide_shared.messages.attempts import (
    AttemptEvent,
    AttemptEvents,
    AttemptState,
    Inventory,
    LiveAttempt,
)
from springtide_shared.messages.base import Message
from springtide_shared.messages.cluster import (
    Capacity,
    CapacityNode,
    Demand,
    NodeEvent,
    NodeEvents,
    NodeState,
)
from springtide_shared.messages.migration import (
    Migrate,
    MigrateAction,
    MigrationEvents,
    MigrationStep,
    Vacate,
    VacateAction,
    VacateEvents,
    VacateStep,
)
from springtide_shared.messages.records import Manifest, StoredFile, manifest_key, part_key
from springtide_shared.ports.bus import Subscription
from springtide_shared.ports.state import Document
from springtide_shared.testing.virtual import VirtualClock, run_virtual
from springtide_shared.units import GiB

CLUSTER = "c"
CONFIG = ReschedulerConfig(rest_seconds=100_000.0)
Task = tuple[str, int]


@dataclass
class Running:
    """One task's live attempt in the world."""

    attempt: int
    node: str
    cores: int
    started_at: float
    uid: str
    is_frozen: bool = False
    order: Migrate | None = None


@dataclass
class World:
    """Everything outside of the rescheduler."""

    clock: VirtualClock
    broker: MemoryBroker
    store: InMemoryStore
    running: dict[Task, Running]
    cores: dict[str, int]
    script: dict[str, str] = field(default_factory=dict)
    """Action → `refuse`, `refuse:<reason>`, `silent`, or a scene of its own; absent: all is well.
    `first:` before it lets it happen once only."""
    cordoned: set[str] = field(default_factory=set)
    released: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    reserved: dict[str, tuple[str, int, float]] = field(default_factory=dict)
    """Migration → node, cores, until."""
    cancelled: set[str] = field(default_factory=set)
    ended: dict[Task, list[Reason]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    asked: Counter[Task] = field(default_factory=Counter)
    """How often each task was asked to save."""
    answers: dict[tuple[str, str], Message] = field(default_factory=dict)
    hooks: dict[str, Callable[[Any], Awaitable[None]]] = field(default_factory=dict)
    """What else happens when a command arrives, by action."""
    later: list[asyncio.Task[None]] = field(default_factory=list)
    seq: int = 0
    cordon_until: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bus = InMemoryBus(self.broker)
        for queue, cls in (("submitter.c.migrate", Migrate), ("scaler.c.vacate", Vacate)):
            self.broker.declare(Subscription(queue=queue, types=(cls,), cluster=CLUSTER))

    # -------------------------------------------------------- acts
    def after(self, seconds: float, act: Callable[[], Awaitable[None]]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            await act()

        self.later.append(asyncio.get_running_loop().create_task(wait(), name="world/later"))

    async def publish(self, message: Message) -> None:
        for _ in range(20):
            try:
                return await self.bus.publish(message, cluster=CLUSTER)
            except TransientError:
                await asyncio.sleep(1.0)
        raise AssertionError("the broker never confirmed")

    async def tell(self, task: Task, state: AttemptState, **fields: Any) -> None:
        event = AttemptEvent(
            job_id=task[0], index=task[1], state=state, at=self.clock.now(), **fields
        )
        await self.publish(AttemptEvents(cluster=CLUSTER, events=[event]))

    async def end(self, task: Task, reason: Reason, migration_id: str = "") -> Running:
        gone = self.running.pop(task)
        self.ended.setdefault(task, []).append(reason)
        await self.tell(
            task,
            AttemptState.ENDED,
            attempt=gone.attempt,
            pod_uid=gone.uid,
            reason=reason,
            migration_id=migration_id,
        )
        return gone

    async def start(self, task: Task, attempt: int, node: str, cores: int) -> None:
        assert task not in self.running, "two attempts of one task at once"
        assert node not in self.released + self.lost
        uid = f"uid-{task[1]}-{attempt}"
        self.running[task] = Running(attempt, node, cores, self.clock.now(), uid)
        used = sum(one.cores for one in self.running.values() if one.node == node)
        assert used <= self.cores[node], "a node is oversold"
        await self.tell(task, AttemptState.RUNNING, attempt=attempt, pod_uid=uid, node=node)

    async def lose_node(self, node: str) -> None:
        if node in self.lost + self.released:
            return
        self.lost.append(node)
        await self.node_event(node, NodeState.LOST)
        for task in [task for task, one in self.running.items() if one.node == node]:
            gone = await self.end(task, Reason.NODE_LOST)
            self.after(60.0, lambda t=task, g=gone: self.start(t, g.attempt + 1, "n9", g.cores))

    async def node_event(self, node: str, state: NodeState) -> None:
        event = NodeEvent(node=node, slot=node, group="g", state=state, at=self.clock.now())
        await self.publish(NodeEvents(cluster=CLUSTER, events=[event]))

    def behaviour(self, action: str) -> str:
        how = self.script.get(action, "")
        if how.startswith("first:"):
            del self.script[action]
            return how[6:]
        return how

    # -------------------------------------------------------- submitter and agents
    async def migrate(self, command: Migrate) -> None:
        action = str(command.action)
        self.seen[action] += 1
        if action in self.hooks:
            await self.hooks.pop(action)(command)
        how = self.behaviour(action)
        if how == "silent":
            return
        key = (command.migration_id, action)
        answer = self.answers.get(key)
        if answer is None:
            step, reason = await self.answer(command, how)
            answer = MigrationEvents(
                cluster=CLUSTER,
                migration_id=command.migration_id,
                step=step,
                reason=reason,
                at=self.clock.now(),
            )
            self.answers[key] = answer
        await self.publish(answer)

    async def answer(self, command: Migrate, how: str) -> tuple[MigrationStep, Reason | None]:
        task = (command.job_id, command.index)
        one = self.running.get(task)
        mine = one is not None and (one.attempt, one.uid) == (command.attempt, command.pod_uid)
        if command.action is MigrateAction.CANCEL:
            self.cancelled.add(command.migration_id)
            self.reserved.pop(command.migration_id, None)
            if mine and one is not None and one.order is not None:
                one.order, one.is_frozen = None, False
            return MigrationStep.CANCELLED, None
        if command.migration_id in self.cancelled or not mine or one is None:
            return MigrationStep.REFUSED, Reason.STALE
        if how.startswith("refuse"):
            return MigrationStep.REFUSED, Reason(how.partition(":")[2] or "no-room")
        match command.action:
            case MigrateAction.RESERVE:
                held = sum(c for n, c, _ in self.reserved.values() if n == command.target_node)
                used = sum(o.cores for o in self.running.values() if o.node == command.target_node)
                closed = command.target_node in self.cordoned or command.target_node in self.lost
                if closed or held + used + one.cores > self.cores[command.target_node]:
                    return MigrationStep.REFUSED, Reason.NO_ROOM
                place = (command.target_node, one.cores, command.valid_until)
                self.reserved[command.migration_id] = place
                return MigrationStep.RESERVED, None
            case MigrateAction.CHECKPOINT:
                assert command.source_node in self.cordon_until, "the source was never closed"
                assert command.migration_id in self.reserved, "no place is held"
                one.order = command
                self.asked[task] += 1
                if how != "no-manifest":
                    self.after(20.0, lambda: self.save(command, is_damaged=how == "damaged"))
                self.after(command.valid_until - self.clock.now(), lambda: self.thaw(task, command))
                return MigrationStep.REQUESTED, None
            case _:
                assert one.is_frozen or how == "thawed", "ended without a saved state"
                gone = await self.end(task, Reason.MIGRATED, command.migration_id)
                if how != "never-restored":
                    self.after(25.0, lambda: self.restore(command, gone))
                else:
                    self.after(400.0, lambda: self.restore(command, gone))
                return MigrationStep.ENDING, None

    async def thaw(self, task: Task, order: Migrate) -> None:
        one = self.running.get(task)
        if one is not None and one.order is order:
            one.order, one.is_frozen = None, False

    async def save(self, command: Migrate, *, is_damaged: bool) -> None:
        one = self.running.get((command.job_id, command.index))
        if one is None or one.order is not command:
            return
        one.is_frozen = True
        key = part_key(command.job_id, command.index, "ab")
        await self.put(key, b"x" if is_damaged else b"xyz")
        manifest = Manifest(
            job_id=command.job_id,
            index=command.index,
            attempt=command.attempt,
            pod_uid=command.pod_uid,
            seq=1,
            created_at=self.clock.now(),
            progress_seconds=1_234.0,
            save_seconds=20.0,
            migration_id=command.migration_id,
            files=[StoredFile(path="s", key=key, size=3, sha256="ab")],
        )
        name = manifest_key(command.job_id, command.index, command.attempt, 1)
        await self.put(name, msgspec.json.encode(manifest))

    async def put(self, key: str, body: bytes) -> None:
        while True:
            try:
                await self.store.put(key, body)
                return
            except TransientError:
                await asyncio.sleep(2.0)

    async def restore(self, command: Migrate, gone: Running) -> None:
        task = (command.job_id, command.index)
        place = self.reserved.pop(command.migration_id, None)
        is_pinned = place is not None and self.clock.now() < place[2]
        node = command.target_node if is_pinned and command.target_node not in self.lost else "n9"
        await self.start(task, gone.attempt + 1, node, gone.cores)
        if is_pinned and node == command.target_node:
            await self.publish(
                MigrationEvents(
                    cluster=CLUSTER,
                    migration_id=command.migration_id,
                    step=MigrationStep.RESTORED,
                    at=self.clock.now(),
                )
            )

    # -------------------------------------------------------- scaler
    async def vacate(self, command: Vacate) -> None:
        action = str(command.action)
        self.seen[action] += 1
        if action in self.hooks:
            await self.hooks.pop(action)(command)
        how = self.behaviour(action)
        if how == "silent":
            return
        if how.startswith("refuse") or command.node in self.lost + self.released:
            step, reason = VacateStep.REFUSED, Reason.UNKNOWN_NODE
        elif command.action is VacateAction.CORDON:
            self.cordoned.add(command.node)
            self.cordon_until[command.node] = command.valid_until
            step, reason = VacateStep.CORDONED, None
        else:
            self.cordoned.discard(command.node)
            step, reason = VacateStep.UNCORDONED, None
        await self.publish(
            VacateEvents(
                cluster=CLUSTER,
                vacate_id=command.vacate_id,
                node=command.node,
                step=step,
                reason=reason,
                at=self.clock.now(),
            )
        )

    async def scale(self) -> None:
        """Release empty cordoned nodes; open those whose cordon ran out."""
        while True:
            await asyncio.sleep(10.0)
            for node in sorted(self.cordoned - set(self.released) - set(self.lost)):
                if any(one.node == node for one in self.running.values()):
                    if self.clock.now() >= self.cordon_until[node]:
                        self.cordoned.discard(node)
                elif self.script.get("release") != "silent":
                    self.released.append(node)
                    await self.node_event(node, NodeState.RELEASED)

    async def snapshots(self) -> None:
        while True:
            self.seq += 1
            head: dict[str, Any] = {
                "cluster": CLUSTER,
                "epoch": 1,
                "seq": self.seq,
                "valid_until": self.clock.now() + 45.0,
            }
            gone = self.released + self.lost
            nodes = [
                CapacityNode(
                    node=name,
                    slot=name,
                    group="g",
                    cpu_millis=cores * 1000,
                    memory_bytes=cores * GiB,
                    price_per_hour=cores * 0.04,
                    cordoned=name in self.cordoned,
                )
                for name, cores in sorted(self.cores.items())
                if name not in gone
            ]
            attempts = [
                LiveAttempt(
                    job_id=task[0],
                    index=task[1],
                    attempt=one.attempt,
                    state=AttemptState.RUNNING,
                    shape="s",
                    cpu_millis=one.cores * 1000,
                    memory_bytes=one.cores * GiB,
                    pod_uid=one.uid,
                    node=one.node,
                    slot=one.node,
                    started_at=one.started_at,
                    checkpointable=True,
                )
                for task, one in sorted(self.running.items())
            ]
            for message in (
                Inventory(**head, settled_below=9, slice_epoch=1, attempts=attempts),
                Capacity(**head, nodes=nodes),
                Demand(**head),
            ):
                with contextlib.suppress(TransientError):
                    await self.bus.publish(message, cluster=CLUSTER)
            await asyncio.sleep(15.0)

    async def serve(self, cls: type[Message], queue: str, handler: Any) -> None:
        subscription = Subscription(queue=queue, types=(cls,), cluster=CLUSTER)
        async with self.bus.subscribe(subscription) as inbox:
            while True:
                for delivery in await inbox.receive(10):
                    await handler(delivery.message)
                    await delivery.ack()

    @contextlib.asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        tasks = [
            loop.create_task(one)
            for one in (
                self.serve(Migrate, "submitter.c.migrate", self.migrate),
                self.serve(Vacate, "scaler.c.vacate", self.vacate),
                self.snapshots(),
                self.scale(),
            )
        ]
        try:
            yield
            for task in tasks:
                assert not task.done(), task.exception()
        finally:
            for task in [*tasks, *self.later]:
                task.cancel()
            results = await asyncio.gather(*tasks, *self.later, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result


class Stand:
    """A world, what outlives the service, and the service in it."""

    def __init__(self, faults: tuple[Faults, ...] = (), seed: int = 0) -> None:
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.broker = MemoryBroker(faults=faults)
        self.broker.declare(
            Subscription(
                queue="rescheduler.c.events",
                types=(AttemptEvents, MigrationEvents, VacateEvents, NodeEvents),
                cluster=CLUSTER,
                single_active=True,
            )
        )
        self.state: Any = InMemoryState()
        self.store = InMemoryStore()
        self.leases = InMemoryLeases(self.clock)
        self.ids = SeededIds(self.clock, seed)
        start = self.clock.now() - 3_600.0
        self.world = World(
            self.clock,
            self.broker,
            self.store,
            running={
                ("j", 0): Running(1, "n0", 4, start, "u0"),
                ("j", 1): Running(1, "n0", 4, start, "u1"),
                ("j", 2): Running(1, "n1", 16, start, "u2"),
            },
            cores={"n0": 24, "n1": 24, "n9": 100},
        )
        self.bus: Any = InMemoryBus(self.broker)
        self.service: Rescheduler

    def make(self) -> Rescheduler:
        self.service = Rescheduler(
            cluster=CLUSTER,
            bus=self.bus,
            state=self.state,
            store=self.store,
            leases=self.leases,
            clock=self.clock,
            ids=self.ids,
            config=CONFIG,
        )
        return self.service

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Rescheduler]:
        stop = asyncio.Event()
        service = self.make()
        task = asyncio.get_running_loop().create_task(service.serve(stop))
        try:
            yield service
            assert not task.done(), task.exception()
        finally:
            stop.set()
            await task

    async def check(self) -> None:
        """Nothing is lost, doubled, frozen, held or closed at the end."""
        world = self.world
        assert not await self.state.list("rescheduler.vacate."), "a saga never ended"
        for task in (("j", 0), ("j", 1), ("j", 2)):
            finished = world.ended.get(task, [])[-1:] == [Reason.COMPLETED]
            assert (task in world.running) != finished, task
        assert not [task for task, one in world.running.items() if one.is_frozen]
        assert not [m for m, (_, _, until) in world.reserved.items() if until > self.clock.now()]
        assert not world.cordoned - set(world.released) - set(world.lost)
        assert not self.broker.dead_letters("rescheduler.c.events")


RUN_SECONDS = 2_500.0


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Logs of thousands of virtual cycles are nobody's reading."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


async def story(stand: Stand, seconds: float = RUN_SECONDS) -> Rescheduler:
    async with stand.world.alive():
        async with stand.serving() as service:
            await asyncio.sleep(seconds)
            for _ in range(150):  # a later try may be on its way
                if not await stand.state.list("rescheduler.vacate."):
                    break
                await asyncio.sleep(10.0)
        await stand.check()
    return service


def test_a_node_with_two_tasks_is_emptied_and_released() -> None:
    async def main() -> None:
        stand = Stand()
        service = await story(stand)
        world = stand.world
        assert world.released == ["n0"]
        assert {task: one.node for task, one in world.running.items()} == {
            ("j", 0): "n1",
            ("j", 1): "n1",
            ("j", 2): "n1",
        }
        assert service.counts["moved"] == 2
        assert service.counts["released"] == 1
        assert world.seen == {"reserve": 2, "checkpoint": 2, "end": 2, "cordon": 1}

    run_virtual(main())


STAYS: list[dict[str, str]] = [
    {"reserve": "refuse"},
    {"reserve": "silent"},
    {"cordon": "refuse"},
    {"cordon": "silent"},
    {"checkpoint": "refuse:checkpoint-failed"},
    {"checkpoint": "silent"},
    {"checkpoint": "no-manifest"},
    {"checkpoint": "damaged"},
    {"end": "refuse:expired"},
    {"end": "silent"},
    {"checkpoint": "no-manifest", "uncordon": "silent"},
    {"checkpoint": "no-manifest", "cancel": "silent"},
]
FIRST: list[dict[str, str]] = [
    {"reserve": "first:refuse"},
    {"checkpoint": "first:refuse:checkpoint-failed"},
    {"checkpoint": "first:no-manifest"},
    {"end": "first:refuse:expired"},
]


@pytest.mark.parametrize("script", FIRST, ids=str)
def test_one_task_that_cannot_move_loses_nobody_anything(script: dict[str, str]) -> None:
    async def main() -> None:
        stand = Stand()
        stand.world.script = dict(script)
        service = await story(stand)
        assert len(stand.world.running) == 3
        assert any(name.startswith("failed:") for name in service.counts)
        assert all(set(why) == {Reason.MIGRATED} for why in stand.world.ended.values())

    run_virtual(main())


@pytest.mark.parametrize("script", STAYS, ids=str)
def test_a_failure_at_any_step_leaves_everything_where_it_was(script: dict[str, str]) -> None:
    async def main() -> None:
        stand = Stand()
        stand.world.script = dict(script)
        service = await story(stand)
        world = stand.world
        assert not world.released
        assert {task: one.node for task, one in world.running.items()} == {
            ("j", 0): "n0",
            ("j", 1): "n0",
            ("j", 2): "n1",
        }
        assert {one.attempt for one in world.running.values()} == {1}
        assert service.counts["moved"] == 0
        assert any(name.startswith("failed:") for name in service.counts)

    run_virtual(main())


@pytest.mark.parametrize(
    "action",
    ["reserve", "cordon", "checkpoint", "end"],
    ids=lambda action: f"silent once: {action}",
)
def test_a_command_that_got_no_answer_is_sent_again(action: str) -> None:
    async def main() -> None:
        stand = Stand()
        stand.world.script = {action: "first:silent"}
        service = await story(stand)
        assert stand.world.released == ["n0"]
        assert service.counts["moved"] == 2

    run_virtual(main())


@pytest.mark.parametrize("action", ["reserve", "cordon", "checkpoint", "end"])
@pytest.mark.parametrize("reason", [Reason.COMPLETED, Reason.APPLICATION_ERROR])
def test_a_task_that_ends_by_itself_wins_and_its_node_is_released_all_the_same(
    action: str, reason: Reason
) -> None:
    async def main() -> None:
        stand = Stand()
        world = stand.world

        async def ends(command: Any) -> None:
            gone = await world.end(("j", 0), reason)
            if reason is not Reason.COMPLETED:
                world.after(30.0, lambda: world.start(("j", 0), 2, "n9", gone.cores))

        world.hooks[action] = ends
        service = await story(stand)
        assert service.counts["moved"] >= 1
        assert world.released[0] == "n0"
        assert world.ended["j", 0][0] is reason
        assert world.ended["j", 1][0] is Reason.MIGRATED

    run_virtual(main())


@pytest.mark.parametrize("action", ["reserve", "cordon", "checkpoint", "end"])
def test_a_target_that_is_lost_costs_no_task_its_work(action: str) -> None:
    async def main() -> None:
        stand = Stand()
        world = stand.world
        world.hooks[action] = lambda command: world.lose_node("n1")
        await story(stand)
        for task in (("j", 0), ("j", 1)):
            assert set(world.ended.get(task, [])) <= {Reason.MIGRATED}

    run_virtual(main())


@pytest.mark.parametrize("action", ["reserve", "cordon", "checkpoint", "end"])
def test_a_source_that_is_lost_ends_the_saga(action: str) -> None:
    async def main() -> None:
        stand = Stand()
        world = stand.world
        world.hooks[action] = lambda command: world.lose_node("n0")
        await story(stand)
        assert len(world.running) == 3

    run_virtual(main())


def test_a_task_that_is_not_restored_in_time_is_given_up_but_not_lost() -> None:
    async def main() -> None:
        stand = Stand()
        stand.world.script = {"end": "never-restored"}
        service = await story(stand)
        assert service.counts["failed:restoring:expired"] >= 2
        assert len(stand.world.running) == 3

    run_virtual(main())


def test_a_node_that_nobody_releases_closes_the_saga() -> None:
    async def main() -> None:
        stand = Stand()
        stand.world.script = {"release": "silent"}
        async with stand.world.alive(), stand.serving() as service:
            await asyncio.sleep(RUN_SECONDS)
            assert service.counts["kept:expired"] == 1
            assert not await stand.state.list("rescheduler.vacate.")

    run_virtual(main())


def test_a_source_that_takes_a_new_task_before_it_is_closed_is_left() -> None:
    async def main() -> None:
        stand = Stand()
        world = stand.world
        world.script = {"cordon": "silent"}
        world.hooks["cordon"] = lambda command: world.start(("j", 9), 1, "n0", 4)
        async with world.alive(), stand.serving() as service:
            await asyncio.sleep(60.0 + 45.0)
            assert service.counts["kept:not-empty"] == 1
        assert world.seen["checkpoint"] == 0

    run_virtual(main())


# ---------------------------------------------------------------- restarts
class Crashes:
    """Lets the service die at the k-th call of one of its effects."""

    def __init__(self, at: int, *, after_effect: bool) -> None:
        self.at = at
        self.after_effect = after_effect
        self.count = 0
        self.struck = asyncio.Event()

    async def around(self, effect: Callable[[], Awaitable[Any]]) -> Any:
        self.count += 1
        if self.count == self.at and not self.struck.is_set():
            if self.after_effect:
                await effect()
            self.struck.set()
            await asyncio.Event().wait()
        return await effect()


class CrashingState:
    """ServiceState in front of a service that may die in `save` and `delete`."""

    def __init__(self, state: InMemoryState, crashes: Crashes) -> None:
        self._state = state
        self._crashes = crashes

    async def load(self, key: str) -> Document | None:
        return await self._state.load(key)

    async def list(self, prefix: str) -> Any:
        return await self._state.list(prefix)

    async def save(self, key: str, body: bytes, expected: int) -> int:
        found = await self._crashes.around(lambda: self._state.save(key, body, expected))
        return int(found)

    async def delete(self, key: str, expected: int) -> None:
        await self._crashes.around(lambda: self._state.delete(key, expected))


class CrashingBus:
    """A bus in front of a service that may die in `publish`."""

    def __init__(self, bus: InMemoryBus, crashes: Crashes) -> None:
        self._bus = bus
        self._crashes = crashes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def publish(self, message: Message, **fields: Any) -> None:
        await self._crashes.around(lambda: self._bus.publish(message, **fields))


async def crash_story(stand: Stand, at: int, away: float, *, after_effect: bool, what: str) -> bool:
    """Run until the k-th effect, die there, come back after `away` seconds; True if it died."""
    crashes = Crashes(at, after_effect=after_effect)
    state, bus = stand.state, stand.bus
    if what == "state":
        stand.state = CrashingState(state, crashes)
    else:
        stand.bus = CrashingBus(bus, crashes)
    async with stand.world.alive():
        first = asyncio.get_running_loop().create_task(stand.make().serve(asyncio.Event()))
        struck = asyncio.get_running_loop().create_task(crashes.struck.wait())
        await asyncio.wait(
            (first, struck), timeout=RUN_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        assert not first.done(), first.exception()
        has_died = struck.done()
        first.cancel()
        struck.cancel()
        await asyncio.gather(first, struck, return_exceptions=True)
        stand.state, stand.bus = state, bus
        await asyncio.sleep(away)
        async with stand.serving():
            await asyncio.sleep(RUN_SECONDS)
        await stand.check()
    return has_died


@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("what", ["state", "publish"])
def test_a_restart_at_every_step_goes_on(what: str, after_effect: bool) -> None:
    async def main(at: int) -> tuple[bool, list[str]]:
        stand = Stand()
        died = await crash_story(stand, at, 40.0, after_effect=after_effect, what=what)
        return died, stand.world.released

    died_at = 0
    for at in range(1, 60):
        died, released = run_virtual(main(at))
        assert released == ["n0"], f"the move did not go on after a crash at effect {at}"
        if not died:
            break
        died_at = at
    assert died_at >= 7, "every state of the saga was struck"


@pytest.mark.parametrize("at", range(1, 12))
def test_a_long_absence_at_any_step_undoes_or_finishes(at: int) -> None:
    async def main() -> None:
        stand = Stand()
        await crash_story(stand, at, 3_000.0, after_effect=True, what="state")
        assert len(stand.world.running) == 3

    run_virtual(main())


def test_history_outlives_a_restart() -> None:
    async def main() -> None:
        stand = Stand()
        stand.world.script = {"checkpoint": "no-manifest"}
        await story(stand, 1_500.0)
        assert stand.world.asked["j", 0] == 1
        async with stand.world.alive(), stand.serving() as service:
            await asyncio.sleep(1_000.0)
            assert service.counts["left:resting"] > 0
        assert stand.world.asked["j", 0] == 1

    run_virtual(main())


# ---------------------------------------------------------------- faults
@pytest.mark.parametrize("seed", range(12))
def test_doubled_late_and_overtaken_messages_change_nothing_in_the_end(seed: int) -> None:
    faults = Faults(
        seed=seed,
        unconfirmed=0.15,
        lost=0.2,
        doubled=0.3,
        delayed=0.3,
        delay_seconds=25.0,
        reordered=0.2,
    )

    async def main() -> None:
        stand = Stand(faults=(faults,), seed=seed)
        for number in range(6):
            stand.state.faults.outage(70.0 + 40 * number, 73.0 + 40 * number)
        await story(stand, 6_000.0)

    run_virtual(main())


@pytest.mark.parametrize("seed", range(6))
def test_state_and_store_that_fail_in_between(seed: int) -> None:
    async def main() -> None:
        stand = Stand(seed=seed)
        stand.state.faults.fail_next(1 + seed, "save", after_effect=seed % 2 == 0)
        stand.store.faults.outage(60.0, 110.0 + 10 * seed)
        await story(stand)
        assert stand.world.released == ["n0"]

    run_virtual(main())


def test_the_same_seed_gives_the_same_run() -> None:
    async def main(seed: int) -> list[tuple[str, int]]:
        stand = Stand(seed=seed)
        service = await story(stand)
        return sorted(service.counts.items())

    assert run_virtual(main(1)) == run_virtual(main(1))


def test_two_reschedulers_of_one_cluster_take_turns() -> None:
    async def main() -> None:
        stand = Stand()
        async with stand.world.alive(), stand.serving() as first:
            second = asyncio.get_running_loop().create_task(stand.make().serve(asyncio.Event()))
            await asyncio.sleep(RUN_SECONDS)
            assert not stand.service.counts, "the second waits for the lease"
            assert first.counts["moved"] == 2
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)

    run_virtual(main())
