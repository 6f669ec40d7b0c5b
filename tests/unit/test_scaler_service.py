"""The scaler as a whole, in virtual time, on a cloud that does what the test says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from springtide_scaler.config import ScalerConfig
from springtide_scaler.service import Scaler
from springtide_shared.adapters.clock import SeededIds
from springtide_shared.adapters.memory_bus import InMemoryBus, MemoryBroker
from springtide_shared.adapters.memory_state import InMemoryLeases, InMemoryState
from springtide_shared.errors import (
    NotFoundError,
    PermanentError,
    Reason,
    SpringtideError,
    TransientError,
)
from springtide_shared.messages.cluster import (
    Capacity,
    Demand,
    NodeEvent,
    NodeEvents,
    NodeState,
    Plan,
    ShapeDemand,
    Slot,
    SlotState,
)
from springtide_shared.messages.migration import Vacate, VacateAction, VacateEvents, VacateStep
from springtide_shared.messages.shape import Shape
from springtide_shared.messages.task import AttemptKey
from springtide_shared.ports.bus import Inbox, Subscription
from springtide_shared.ports.cluster import (
    LABEL_SLOT,
    Instance,
    InstanceState,
    NodeGroupView,
    NodeView,
    PodChanges,
    PodPhase,
    PodView,
)
from springtide_shared.testing.virtual import VirtualClock, run_virtual
from springtide_shared.units import GiB, Resources

SHAPE = Shape(cpu_millis=1_000, memory_bytes=GiB)
BOOT = 60.0


@dataclass
class FakeCloud:
    """A cluster and its cloud, as ports; machines of 4 cores boot in a minute.

    `faults`: (operation, name of group or node) → errors that its next calls raise.
    `before_read`: runs before each fresh read of a node's pods.
    """

    clock: VirtualClock
    names: tuple[str, ...] = ("cheap", "dear")
    max_size: int = 10
    machines: dict[str, tuple[str, Instance]] = field(default_factory=dict)
    node_views: dict[str, NodeView] = field(default_factory=dict)
    pods: dict[str, PodView] = field(default_factory=dict)
    faults: dict[tuple[str, str], list[SpringtideError]] = field(default_factory=dict)
    before_read: Callable[[str], None] | None = None
    never_join: bool = False
    launched: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    version: int = 0

    # ---- NodeGroups
    async def groups(self) -> Sequence[NodeGroupView]:
        self._boot()
        return [
            NodeGroupView(
                name=name,
                instance_type=name,
                allocatable=Resources(cpu_millis=4_000, memory_bytes=16 * GiB, pods=110),
                price_per_hour=1.0 if name == "cheap" else 3.0,
                size=self.sizes.get(name, 0),
                max_size=self.max_size,
                boot_seconds=BOOT,
                instances=[item for group, item in self.machines.values() if group == name],
            )
            for name in self.names
        ]

    async def set_size(self, group: str, size: int, token: str) -> None:
        self._call("set_size", group)
        assert size <= self.max_size
        missing = size - self.sizes.get(group, 0)
        for _ in range(missing):
            self.launched += 1
            name = f"i-{self.launched}"
            self.machines[name] = (
                group,
                Instance(
                    instance_id=name, state=InstanceState.BOOTING, launched_at=self.clock.now()
                ),
            )
        self.sizes[group] = max(size, self.sizes.get(group, 0))

    async def terminate(self, group: str, instance_id: str) -> None:
        self._call("terminate", instance_id)
        assert not any(pod.node == f"n-{instance_id}" for pod in self.pods.values()), "in use"
        if self.machines.pop(instance_id, None) is not None:
            self.sizes[group] -= 1

    # ---- NodeControl
    async def cordon(self, node: str, *, cordoned: bool) -> None:
        self._call("cordon" if cordoned else "uncordon", node)
        self._node(node)
        self.node_views[node] = replace(self.node_views[node], cordoned=cordoned)

    async def label(self, node: str, labels: Mapping[str, str]) -> None:
        self._call("label", node)
        self._node(node)
        self.node_views[node] = replace(self.node_views[node], slot=labels[LABEL_SLOT])

    async def delete(self, node: str, uid: str) -> None:
        self._call("delete", node)
        assert self._node(node).uid == uid
        del self.node_views[node]

    # ---- ClusterView
    async def identity(self) -> str:
        return "fake"

    async def nodes(self) -> Sequence[NodeView]:
        self._boot()
        return [self.node_views[name] for name in sorted(self.node_views)]

    async def pods_on(self, node: str) -> Sequence[PodView]:
        if self.before_read is not None:
            self.before_read(node)
        return [pod for pod in self.pods.values() if pod.node == node]

    async def pods_since(self, version: int) -> PodChanges:
        return PodChanges(version=self.version, reset=True, pods=list(self.pods.values()), gone=[])

    async def wait_for_change(self, version: int, limit: float) -> None:
        await asyncio.sleep(limit)

    # ---- for tests
    def run_pod(self, node: str, name: str = "pod-1") -> None:
        self.pods[name] = PodView(
            name=name,
            uid=f"uid-{name}",
            attempt=AttemptKey("job", len(self.pods), 1),
            phase=PodPhase.RUNNING,
            node=node,
            requests=SHAPE.resources,
            created_at=self.clock.now(),
        )

    def fail(self, operation: str, name: str, error: SpringtideError, times: int = 1) -> None:
        self.faults.setdefault((operation, name), []).extend([error] * times)

    def times(self, operation: str, name: str) -> int:
        return self.calls.count((operation, name))

    def _call(self, operation: str, name: str) -> None:
        self.calls.append((operation, name))
        if errors := self.faults.get((operation, name)):
            raise errors.pop(0)

    def _node(self, name: str) -> NodeView:
        if name not in self.node_views:
            raise NotFoundError(Reason.UNKNOWN_NODE, node=name)
        return self.node_views[name]

    def _boot(self) -> None:
        now = self.clock.now()
        for name, (group, item) in self.machines.items():
            is_due = now >= item.launched_at + BOOT and not self.never_join
            if item.state is InstanceState.BOOTING and is_due:
                self.machines[name] = (group, replace(item, state=InstanceState.RUNNING))
                self.node_views[f"n-{name}"] = NodeView(
                    name=f"n-{name}",
                    uid=f"uid-{name}",
                    provider_id=name,
                    group=group,
                    ready=True,
                    allocatable=Resources(cpu_millis=4_000, memory_bytes=16 * GiB, pods=110),
                    created_at=item.launched_at + BOOT,
                    ready_at=item.launched_at + BOOT,
                )


class World:
    """A scaler, its cloud, and what a coordinator and a rescheduler would see of it."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.clock = VirtualClock(loop)
        self.cloud = FakeCloud(self.clock)
        self.broker = MemoryBroker()
        self.bus = InMemoryBus(self.broker)
        self.state = InMemoryState()
        self.leases = InMemoryLeases(self.clock)
        self.config = ScalerConfig(worth_factor=0.0)
        self.stop = asyncio.Event()
        self.wanted = 0
        self.demand_goes = True
        self.seq = 0
        self.lives = 0
        self.plan: Plan | None = None
        self.capacity: Capacity | None = None
        self.events: list[NodeEvent] = []
        self.answers: list[VacateEvents] = []
        self.tasks: asyncio.TaskGroup
        self.scaler: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """A life of the scaler."""
        self.lives += 1
        self.stop = asyncio.Event()
        service = Scaler(
            cluster="c1",
            bus=self.bus,
            view=self.cloud,
            nodes=self.cloud,
            groups=self.cloud,
            state=self.state,
            leases=self.leases,
            clock=self.clock,
            ids=SeededIds(self.clock, self.lives),
            config=self.config,
        )
        self.scaler = self.tasks.create_task(service.serve(self.stop), name="scaler")

    async def crash(self) -> None:
        """The scaler dies without a word."""
        assert self.scaler is not None
        self.scaler.cancel()
        await asyncio.wait([self.scaler])

    async def say_demand(self) -> None:
        while True:
            if self.demand_goes:
                self.seq += 1
                running = len(self.cloud.pods)
                shapes = [
                    ShapeDemand(
                        shape=SHAPE,
                        wanted=self.wanted,
                        running=running,
                        backlog=max(0, self.wanted - running),
                    )
                ]
                await self.bus.publish(
                    Demand(
                        cluster="c1",
                        epoch=1,
                        seq=self.seq,
                        valid_until=self.clock.now() + 15,
                        shapes=shapes,
                    ),
                    cluster="c1",
                )
            await asyncio.sleep(5.0)

    async def listen(self, inbox: Inbox) -> None:
        while True:
            for delivery in await inbox.receive(100):
                message = delivery.message
                if isinstance(message, Plan):
                    self.plan = message
                elif isinstance(message, Capacity):
                    self.capacity = message
                elif isinstance(message, NodeEvents):
                    self.events += message.events
                elif isinstance(message, VacateEvents):
                    self.answers.append(message)
                await delivery.ack()

    async def vacate(
        self, node: str, action: VacateAction = VacateAction.CORDON, lasts: float = 600.0
    ) -> None:
        await self.bus.publish(
            Vacate(
                cluster="c1",
                vacate_id="v-1",
                action=action,
                node=node,
                valid_until=self.clock.now() + lasts,
            ),
            cluster="c1",
        )

    async def until(self, check: Callable[[], bool], limit: float = 600.0) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit
        while not check():
            assert loop.time() < deadline, f"not within {limit} s: {self.cloud}"
            await asyncio.sleep(0.5)

    async def with_nodes(self, count: int) -> list[str]:
        """Names of `count` ready, labelled nodes that are in the plan."""
        self.wanted = 4 * count
        await self.until(lambda: len(self.slots(SlotState.READY)) == count)
        return sorted(slot.node for slot in self.slots(SlotState.READY))

    def slots(self, state: SlotState) -> list[Slot]:
        return [slot for slot in (self.plan.slots if self.plan else []) if slot.state is state]

    @property
    def slots_now(self) -> list[NodeView]:
        """Nodes that are labelled with a slot."""
        return [node for node in self.cloud.node_views.values() if node.slot]

    def states_of(self, node: str) -> list[NodeState]:
        return [event.state for event in self.events if event.node == node]


@asynccontextmanager
async def a_world(*, demand_goes: bool = True) -> AsyncIterator[World]:
    world = World()
    world.demand_goes = demand_goes
    async with AsyncExitStack() as stack:
        facts = await stack.enter_async_context(
            world.bus.subscribe(
                Subscription(queue="facts", types=(NodeEvents, VacateEvents), cluster="c1")
            )
        )
        snapshots = await stack.enter_async_context(
            world.bus.subscribe(
                Subscription(queue="snaps", types=(Plan, Capacity), cluster="c1", durable=False)
            )
        )
        async with asyncio.TaskGroup() as tasks:
            world.tasks = tasks
            helpers = [
                tasks.create_task(world.say_demand(), name="demand"),
                tasks.create_task(world.listen(facts), name="facts"),
                tasks.create_task(world.listen(snapshots), name="snapshots"),
            ]
            world.begin()
            yield world
            world.stop.set()
            assert world.scaler is not None
            await asyncio.wait([world.scaler])
            await asyncio.sleep(0.1)
            for helper in helpers:
                helper.cancel()


def simulate(test: Callable[[World], Awaitable[None]]) -> World:
    async def run() -> World:
        async with a_world() as world:
            await test(world)
        return world

    return run_virtual(run())


# ---- growth -----------------------------------------------------------------------------------
def test_demand_becomes_nodes_with_slots_and_then_nothing_again() -> None:
    async def test(world: World) -> None:
        world.wanted = 8
        await world.until(lambda: len(world.slots(SlotState.LAUNCHING)) == 2, 10)
        assert all(slot.places == {SHAPE.key: 4} for slot in world.slots(SlotState.LAUNCHING))
        ordered = sorted(slot.slot for slot in world.slots(SlotState.LAUNCHING))
        nodes = await world.with_nodes(2)
        assert nodes == ["n-i-1", "n-i-2"]
        assert sorted(slot.slot for slot in world.slots(SlotState.READY)) == ordered
        assert sorted(node.slot for node in world.cloud.node_views.values()) == ordered
        assert world.capacity is not None
        assert [node.node for node in world.capacity.nodes] == nodes
        assert [item.most for item in world.capacity.shapes] == [80]
        world.wanted = 0
        await world.until(lambda: not world.cloud.node_views)
        assert world.cloud.machines == {}
        assert world.cloud.sizes == {"cheap": 0}

    world = simulate(test)
    launched = NodeState.LAUNCHED, NodeState.JOINED, NodeState.CORDONED, NodeState.RELEASED
    for number in (1, 2):
        states = world.states_of(f"i-{number}") + world.states_of(f"n-i-{number}")
        assert tuple(states) == launched
    released = [event for event in world.events if event.state is NodeState.RELEASED]
    assert [(event.reason, event.price_per_hour) for event in released] == [("idle", 1.0)] * 2


def test_a_node_is_not_released_before_its_idle_time() -> None:
    async def test(world: World) -> None:
        await world.with_nodes(1)
        world.wanted = 0
        began = world.clock.now()
        await world.until(lambda: not world.cloud.machines)
        assert 60.0 <= world.clock.now() - began <= 85.0

    simulate(test)


def test_a_stock_out_moves_demand_to_other_groups_in_the_same_round() -> None:
    async def test(world: World) -> None:
        world.cloud.fail("set_size", "cheap", PermanentError(Reason.CAPACITY), times=99)
        world.wanted = 4
        await world.until(lambda: world.cloud.sizes.get("dear") == 1, 10)
        await asyncio.sleep(1)
        assert world.capacity is not None
        reasons = {item.group: item.unavailable_reason for item in world.capacity.groups}
        assert reasons == {"cheap": Reason.CAPACITY, "dear": None}
        assert world.cloud.times("set_size", "cheap") == 1, "backed off, not hammered"

    simulate(test)


def test_an_order_that_is_too_large_for_the_stock_is_halved_until_it_fits() -> None:
    async def test(world: World) -> None:
        world.cloud.fail("set_size", "cheap", PermanentError(Reason.QUOTA), times=2)
        world.wanted = 16
        await world.until(lambda: world.cloud.launched == 4, 10)
        assert world.cloud.sizes == {"cheap": 1, "dear": 3}

    simulate(test)


def test_a_group_that_does_not_answer_leaves_the_others_alone_and_comes_back() -> None:
    async def test(world: World) -> None:
        world.cloud.fail("set_size", "cheap", TransientError(Reason.CLUSTER_UNAVAILABLE))
        world.wanted = 4
        await world.until(lambda: world.cloud.sizes.get("dear") == 1, 10)
        await asyncio.sleep(120)
        world.wanted = 8
        await world.until(lambda: world.cloud.sizes.get("cheap") == 1, 10)

    simulate(test)


def test_a_machine_that_never_joins_is_ended_and_its_group_backed_off() -> None:
    async def test(world: World) -> None:
        world.cloud.never_join = True
        world.wanted = 4
        await world.until(lambda: "cheap" in world.cloud.sizes, 10)
        await world.until(lambda: world.cloud.sizes == {"cheap": 0, "dear": 1}, 700)
        assert world.cloud.times("terminate", "i-1") == 1
        await world.until(lambda: NodeState.RELEASED in world.states_of("i-1"), 20)

    world = simulate(test)
    (event,) = [event for event in world.events if event.state is NodeState.RELEASED]
    assert event.reason == "join-limit"


def test_a_machine_that_vanishes_is_told_as_lost_and_its_node_removed() -> None:
    async def test(world: World) -> None:
        (node,) = await world.with_nodes(1)
        del world.cloud.machines["i-1"]
        world.cloud.sizes["cheap"] = 0
        await world.until(lambda: NodeState.LOST in world.states_of(node), 10)
        await world.until(lambda: node not in world.cloud.node_views, 60)
        await world.until(lambda: len(world.slots(SlotState.READY)) == 1)

    simulate(test)


# ---- hold -------------------------------------------------------------------------------------
def test_expired_demand_buys_nothing_and_still_releases_empty_nodes() -> None:
    async def test(world: World) -> None:
        first, _ = await world.with_nodes(2)
        world.cloud.run_pod(first)
        world.demand_goes = False
        await world.until(lambda: list(world.cloud.node_views) == [first])
        await asyncio.sleep(300)
        assert list(world.cloud.node_views) == [first]
        assert world.cloud.launched == 2
        (slot,) = world.slots(SlotState.READY)
        assert slot.places == {SHAPE.key: 4}, "what runs, and the free room at price 0"
        assert world.plan is not None
        assert world.plan.valid_until > world.clock.now()

    simulate(test)


def test_without_any_demand_nothing_is_bought() -> None:
    async def test(world: World) -> None:
        await asyncio.sleep(60)
        assert world.cloud.launched == 0
        assert world.plan is not None
        assert world.capacity is not None
        assert world.capacity.decisions == ["hold: no-demand-yet"]

    async def run() -> None:
        async with a_world(demand_goes=False) as world:
            await test(world)

    run_virtual(run())


# ---- release ----------------------------------------------------------------------------------
def test_a_pod_that_arrives_between_cordon_and_fresh_read_saves_its_node() -> None:
    async def test(world: World) -> None:
        (node,) = await world.with_nodes(1)
        read: list[str] = []

        def arrive(name: str) -> None:
            assert world.cloud.node_views[name].cordoned, "read only after the cordon"
            assert world.plan is not None
            assert world.plan.slots == [], "and after a plan without it"
            read.append(name)
            world.cloud.run_pod(name)

        world.cloud.before_read = arrive
        world.wanted = 0
        await world.until(lambda: bool(read))
        world.cloud.before_read = None
        await world.until(lambda: not world.cloud.node_views[node].cordoned, 10)
        await world.until(lambda: [slot.node for slot in world.slots(SlotState.READY)] == [node])
        await asyncio.sleep(300)
        assert ("terminate", "i-1") not in world.cloud.calls
        assert world.states_of(node)[-2:] == [NodeState.CORDONED, NodeState.UNCORDONED]
        world.cloud.pods.clear()
        await world.until(lambda: not world.cloud.machines)

    simulate(test)


def test_demand_that_comes_back_keeps_the_node() -> None:
    async def test(world: World) -> None:
        await world.with_nodes(1)
        for _ in range(5):
            world.wanted = 0
            await asyncio.sleep(40)
            world.wanted = 4
            await asyncio.sleep(20)
        assert world.cloud.launched == 1
        assert len(world.cloud.node_views) == 1

    simulate(test)


def test_only_the_empty_machine_goes() -> None:
    async def test(world: World) -> None:
        first, second, third = await world.with_nodes(3)
        world.cloud.run_pod(first, "a")
        world.cloud.run_pod(third, "b")
        world.wanted = 2
        await world.until(lambda: second not in world.cloud.node_views)
        await asyncio.sleep(300)
        assert sorted(world.cloud.node_views) == [first, third]
        assert world.cloud.sizes == {"cheap": 2}

    simulate(test)


def test_faults_of_every_step_only_delay_a_release() -> None:
    async def test(world: World) -> None:
        (node,) = await world.with_nodes(1)
        away = TransientError(Reason.CLUSTER_UNAVAILABLE)
        for operation, name in (("cordon", node), ("terminate", "i-1"), ("delete", node)):
            world.cloud.fail(operation, name, away, times=2)
        world.state.faults.fail_next(1, "save", after_effect=True)
        world.state.faults.fail_next(1, "save")
        world.wanted = 0
        await world.until(lambda: NodeState.RELEASED in world.states_of(node))
        assert world.cloud.machines == {}
        assert world.cloud.node_views == {}

    world = simulate(test)
    assert world.states_of("n-i-1").count(NodeState.RELEASED) == 1


# ---- vacate -----------------------------------------------------------------------------------
def test_a_vacated_node_is_closed_and_released_once_empty() -> None:
    async def test(world: World) -> None:
        (node,) = await world.with_nodes(1)
        world.cloud.run_pod(node)
        world.wanted = 1
        await asyncio.sleep(6)
        await world.vacate(node)
        await world.until(lambda: bool(world.answers), 5)
        assert world.answers[0].step is VacateStep.CORDONED
        assert world.cloud.node_views[node].cordoned
        await world.until(lambda: bool(world.slots(SlotState.CORDONED)), 10)
        (slot,) = world.slots(SlotState.CORDONED)
        assert slot.places == {SHAPE.key: 1}, "keeps what runs, offers nothing"
        assert world.cloud.launched == 1, "its attempt still counts as a place"
        world.wanted = 0
        await asyncio.sleep(6)  # else the pod's end leaves a wish that a new node would be for
        began = world.clock.now()
        world.cloud.pods.clear()
        await world.until(lambda: not world.cloud.machines)
        assert world.clock.now() - began < 20, "no idle time for what is wished away"
        await world.until(lambda: len(world.answers) == 2, 10)
        assert world.answers[1].step is VacateStep.RELEASED

    world = simulate(test)
    (event,) = [event for event in world.events if event.state is NodeState.RELEASED]
    assert event.reason == "vacated"


def test_repeated_wishes_get_the_same_answer() -> None:
    async def test(world: World) -> None:
        (node,) = await world.with_nodes(1)
        world.cloud.run_pod(node)
        for _ in range(3):
            await world.vacate(node)
        await world.until(lambda: len(world.answers) == 3, 10)
        assert {answer.step for answer in world.answers} == {VacateStep.CORDONED}
        assert world.cloud.times("cordon", node) == 1
        for _ in range(2):
            await world.vacate(node, VacateAction.UNCORDON)
        await world.until(lambda: len(world.answers) == 5, 10)
        assert {answer.step for answer in world.answers[3:]} == {VacateStep.UNCORDONED}
        assert not world.cloud.node_views[node].cordoned

    simulate(test)


def test_a_wish_that_cannot_be_met_is_refused_with_a_reason() -> None:
    async def test(world: World) -> None:
        (node,) = await world.with_nodes(1)
        await world.vacate("no-such-node")
        await world.vacate(node, lasts=-1.0)
        await world.until(lambda: len(world.answers) == 2, 10)
        assert [(answer.step, answer.reason) for answer in world.answers] == [
            (VacateStep.REFUSED, Reason.UNKNOWN_NODE),
            (VacateStep.REFUSED, Reason.EXPIRED),
        ]

    simulate(test)


def test_a_wish_expires_and_the_node_opens_again() -> None:
    async def test(world: World) -> None:
        (node,) = await world.with_nodes(1)
        world.cloud.run_pod(node)
        await world.vacate(node, lasts=100)
        await asyncio.sleep(90)
        assert world.cloud.node_views[node].cordoned
        await asyncio.sleep(20)
        assert not world.cloud.node_views[node].cordoned
        assert [(answer.step, answer.reason) for answer in world.answers] == [
            (VacateStep.CORDONED, None),
            (VacateStep.UNCORDONED, Reason.EXPIRED),
        ]

    simulate(test)


def test_a_node_that_somebody_else_closed_stays_closed() -> None:
    async def test(world: World) -> None:
        (node,) = await world.with_nodes(1)
        world.cloud.run_pod(node)
        world.cloud.node_views[node] = replace(world.cloud.node_views[node], cordoned=True)
        await world.vacate(node, lasts=50)
        await asyncio.sleep(100)
        assert world.cloud.node_views[node].cordoned
        assert world.cloud.times("uncordon", node) == 0

    simulate(test)


# ---- restart ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "moment", ["ordered", "booting", "ready", "cordoned", "terminated", "deleted"]
)
def test_a_life_that_ends_in_any_step_is_continued(moment: str) -> None:
    """Crash right after the effect named; the next life must neither lose nor double a machine."""

    async def test(world: World) -> None:
        cloud = world.cloud
        effects = {
            "ordered": ("set_size", "cheap"),
            "cordoned": ("cordon", "n-i-1"),
            "terminated": ("terminate", "i-1"),
            "deleted": ("delete", "n-i-1"),
        }
        world.wanted = 4
        if moment == "ordered":
            await world.until(lambda: bool(cloud.machines), 10)
        elif moment == "booting":
            await world.until(lambda: bool(world.slots(SlotState.LAUNCHING)), 10)
        elif moment == "ready":
            await world.with_nodes(1)
        else:
            await world.with_nodes(1)
            world.wanted = 0
            world.demand_goes = True
            await world.until(lambda: effects[moment] in cloud.calls)
        slots_before = [slot.slot for slot in world.slots(SlotState.READY)]
        await world.crash()
        world.begin()
        if moment in ("ordered", "booting", "ready"):
            await asyncio.sleep(40)
            await world.with_nodes(1)
            if moment == "ready":
                assert [s.slot for s in world.slots(SlotState.READY)] == slots_before
            assert cloud.launched == 1
            world.wanted = 0
        await world.until(lambda: not cloud.machines and not cloud.node_views)
        await world.until(lambda: NodeState.RELEASED in world.states_of("n-i-1"), 60)
        await asyncio.sleep(100)
        assert cloud.launched == 1
        assert cloud.sizes == {"cheap": 0}

    simulate(test)


def test_a_restart_remembers_who_wished_a_node_closed_and_until_when() -> None:
    async def test(world: World) -> None:
        (node,) = await world.with_nodes(1)
        world.cloud.run_pod(node)
        await world.vacate(node, lasts=200)
        await world.until(lambda: bool(world.answers), 5)
        await world.crash()
        world.begin()
        await asyncio.sleep(100)
        assert world.cloud.node_views[node].cordoned
        await asyncio.sleep(110)
        assert not world.cloud.node_views[node].cordoned
        assert world.answers[-1].step is VacateStep.UNCORDONED

    simulate(test)


def test_a_cordon_that_a_death_cut_off_is_made_up_for() -> None:
    async def test(world: World) -> None:
        (node,) = await world.with_nodes(1)
        world.cloud.run_pod(node)
        away = TransientError(Reason.CLUSTER_UNAVAILABLE)
        world.cloud.fail("cordon", node, away)
        await world.vacate(node)
        await world.until(lambda: world.cloud.times("cordon", node) == 1, 5)
        await world.crash()
        world.begin()
        await world.until(lambda: world.cloud.node_views[node].cordoned, 60)

    simulate(test)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_fails_no_pod_is_cut_off_and_no_machine_is_left(seed: int) -> None:
    """Demand comes and goes, pods bind late, calls fail, the scaler dies again and again."""
    dice = random.Random(seed)

    async def submit(world: World) -> None:
        """A submitter that trusts the plan, with pods that bind up to 3 s after their creation."""
        number = 0
        while True:
            await asyncio.sleep(dice.uniform(0.5, 3.0))
            for slot in world.slots(SlotState.READY):
                here = sum(pod.node == slot.node for pod in world.cloud.pods.values())
                free = slot.places.get(SHAPE.key, 0) - here
                if free > 0 and len(world.cloud.pods) < world.wanted:
                    number += 1
                    loop = asyncio.get_running_loop()
                    loop.call_later(dice.uniform(0.0, 3.0), bind, world, slot.node, f"p{number}")

    def bind(world: World, node: str, name: str) -> None:
        view = world.cloud.node_views.get(node)
        if view is not None and not view.cordoned:
            world.cloud.run_pod(node, name)
            lasts = dice.uniform(5.0, 400.0)
            asyncio.get_running_loop().call_later(lasts, world.cloud.pods.pop, name, None)

    async def test(world: World) -> None:
        submitting = world.tasks.create_task(submit(world), name="submitter")
        away = TransientError(Reason.CLUSTER_UNAVAILABLE)
        for _ in range(40):
            world.wanted = dice.choice([0, 0, 1, 5, 20, 60])
            for _ in range(dice.randrange(4)):
                name = f"i-{dice.randrange(1, 30)}"
                world.cloud.fail("terminate", name, away)
                world.cloud.fail(dice.choice(["cordon", "label", "delete"]), f"n-{name}", away)
                group = dice.choice(world.cloud.names)
                reason = dice.choice([Reason.CAPACITY, Reason.QUOTA])
                world.cloud.fail("set_size", group, PermanentError(reason))
            if dice.random() < 0.3:
                world.state.faults.fail_next(1, "save", after_effect=dice.random() < 0.5)
            await asyncio.sleep(dice.uniform(1.0, 120.0))
            if dice.random() < 0.5:
                await world.crash()
                world.begin()
        world.wanted = 0
        submitting.cancel()
        await world.until(lambda: not world.cloud.pods, 500)
        world.cloud.faults.clear()
        await world.until(lambda: not world.cloud.machines and not world.cloud.node_views, 1200)
        await asyncio.sleep(60)
        assert set(world.cloud.sizes.values()) <= {0}
        document = await world.state.load("scaler.c1")
        assert document is None or document.body == b"{}"

    world = simulate(test)
    # Everything that was ever launched is told as launched and as gone.
    launched = {event.slot for event in world.events if event.state is NodeState.LAUNCHED}
    gone = [event for event in world.events if event.state is NodeState.RELEASED]
    assert world.cloud.launched > 0
    assert {event.node.removeprefix("n-") for event in gone} == {
        f"i-{number}" for number in range(1, world.cloud.launched + 1)
    }
    assert {event.slot for event in gone} <= launched


def test_who_has_lost_the_lease_changes_nothing_more() -> None:
    async def test(world: World) -> None:
        await world.with_nodes(1)
        assert world.scaler is not None
        stolen = await world.leases.acquire("scaler.c1", "a thief", 1.0)
        assert stolen is None
        world.leases.faults.is_down = True
        await asyncio.sleep(40)
        calls = len(world.cloud.calls)
        world.wanted = 40
        await asyncio.sleep(60)
        assert len(world.cloud.calls) == calls

    with pytest.raises(ExceptionGroup) as failed:
        simulate(test)
    assert failed.group_contains(PermanentError, match="lease")


def test_a_memory_that_cannot_be_read_is_refused_by_name() -> None:
    async def run() -> None:
        world = World()
        await world.state.save("scaler.c1", b'{"releases": 7}', 0)
        async with asyncio.TaskGroup() as tasks:
            world.tasks = tasks
            world.begin()

    with pytest.raises(ExceptionGroup) as failed:
        run_virtual(run())
    assert failed.group_contains(PermanentError, match=r"scaler\.c1")


def test_a_thousand_nodes_come_and_go_within_the_limits_of_messages_and_memory() -> None:
    async def test(world: World) -> None:
        world.cloud.max_size = 2_000
        world.wanted = 4_800
        await world.until(lambda: len(world.slots_now) == 1_200, 200)
        await world.crash()
        world.begin()
        told = len(world.events)
        await world.until(lambda: len(world.events) >= told + 2_400, 120)
        world.wanted = 0
        await world.until(lambda: not world.cloud.machines, 300)
        await world.until(lambda: not world.cloud.node_views, 60)

    simulate(test)


def test_facts_that_nobody_takes_yet_are_told_later() -> None:
    """A coordinator that has never run has no queue: its facts wait for it here."""

    async def run() -> None:
        world = World()
        async with asyncio.TaskGroup() as tasks:
            world.tasks = tasks
            world.begin()
            world.wanted = 4
            saying = tasks.create_task(world.say_demand(), name="demand")
            await asyncio.sleep(100)
            facts = Subscription(queue="facts", types=(NodeEvents, VacateEvents), cluster="c1")
            async with world.bus.subscribe(facts) as inbox:
                listening = tasks.create_task(world.listen(inbox), name="facts")
                await world.until(lambda: len(world.events) == 2, 20)
                world.stop.set()
                assert world.scaler is not None
                await asyncio.wait([world.scaler])
                listening.cancel()
                saying.cancel()
        assert [event.state for event in world.events] == [NodeState.LAUNCHED, NodeState.JOINED]

    run_virtual(run())
