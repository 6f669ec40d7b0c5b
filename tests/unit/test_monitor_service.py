"""The monitor as a whole, in virtual time, on a cluster and counters that do what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import pytest

from springtide_monitor.adapters.sinks import InMemorySink
from springtide_monitor.config import MonitorConfig
from springtide_monitor.service import Monitor
from springtide_shared.adapters.clock import SeededIds
from springtide_shared.adapters.memory_bus import InMemoryBus, MemoryBroker
from springtide_shared.adapters.memory_state import InMemoryLeases
from springtide_shared.errors import PermanentError, Reason, TransientError
from springtide_shared.messages import (
    AttemptFigures,
    AttemptKey,
    AttemptSummary,
    Shape,
    TaskTemplate,
    Usage,
)
from springtide_shared.ports.bus import Inbox, Subscription
from springtide_shared.ports.cluster import PodPhase, PodSpec, PodView
from springtide_shared.ports.metrics import PodReading
from springtide_shared.testing.scripted_cluster import ScriptedCluster
from springtide_shared.testing.virtual import VirtualClock, run_virtual
from springtide_shared.units import GiB, Resources

CONFIG = MonitorConfig(sample_seconds=10.0, usage_seconds=15.0, summary_seconds=2.0)
TEMPLATE = TaskTemplate(command=["true"], shape=Shape(cpu_millis=2_000, memory_bytes=GiB))
SUMMARIES = Subscription(queue="coordinator.attempts", types=(AttemptSummary,))


class Counters:
    """What each running pod has used: so many cores since it began."""

    def __init__(self, cluster: ScriptedCluster, clock: VirtualClock) -> None:
        self._cluster = cluster
        self._clock = clock
        self.cores = 1.0
        self.is_down = False

    async def read(self) -> Sequence[PodReading]:
        """See `PodStats.read`."""
        if self.is_down:
            raise TransientError(Reason.CLUSTER_UNAVAILABLE, "no kubelet answers")
        now = self._clock.now()
        return [
            PodReading(
                pod_uid=pod.uid,
                at=now,
                cpu_seconds=self.cores * (now - pod.started_at),
                memory_bytes=1_000,
            )
            for pod in self._cluster.pods.values()
            if pod.phase is PodPhase.RUNNING and pod.started_at is not None
        ]


class World:
    """Cluster, broker and leases outlive the monitor."""

    def __init__(self) -> None:
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.broker = MemoryBroker()
        self.bus = InMemoryBus(self.broker)
        self.cluster = ScriptedCluster(self.clock)
        self.cluster.add_node("n1", Resources(cpu_millis=8_000, memory_bytes=8 * GiB, pods=10))
        self.stats = Counters(self.cluster, self.clock)
        self.sink = InMemorySink()
        self.leases = InMemoryLeases(self.clock)
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lives = 0

    def another(self) -> Monitor:
        self._lives += 1
        return Monitor(
            cluster="east",
            bus=InMemoryBus(self.broker),
            view=self.cluster,
            stats=self.stats,
            sink=self.sink,
            leases=self.leases,
            clock=self.clock,
            ids=SeededIds(self.clock, self._lives),
            config=CONFIG,
        )

    async def start(self) -> None:
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self.another().serve(self._stop), name="monitor")
        await asyncio.sleep(0.1)

    async def crash(self) -> None:
        """It ends without a last word; its lease runs out."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    async def stop(self) -> None:
        if self._task is not None:
            self._stop.set()
            await self._task

    async def run(self, index: int) -> PodView:
        """A pod of job `j` that runs on n1 from now on."""
        key = AttemptKey("j", index, 1)
        await self.cluster.create(
            PodSpec(name=key.pod_name, attempt=key, tenant="t", template=TEMPLATE)
        )
        return self.cluster.run(key.pod_name, "n1")


async def usage_of(inbox: Inbox) -> Usage:
    """The newest usage that has come."""
    found = [one.message for one in await inbox.receive(limit=1_000, timeout=0)]
    assert found, "no usage came"
    newest = found[-1]
    assert isinstance(newest, Usage)
    return newest


async def told(inbox: Inbox) -> list[AttemptFigures]:
    """Figures that have come since the last call."""
    found: list[AttemptFigures] = []
    for delivery in await inbox.receive(limit=1_000, timeout=0):
        assert isinstance(delivery.message, AttemptSummary)
        found += delivery.message.summaries
        await delivery.ack()
    return found


Scenario = Callable[[World, Inbox, Inbox], Awaitable[None]]


def in_world(scenario: Scenario) -> None:
    """Run a scenario with a monitor up, and inboxes for its usage and its summaries."""

    async def main() -> None:
        world = World()
        async with AsyncExitStack() as stack:
            usage = await stack.enter_async_context(
                world.bus.subscribe(
                    Subscription(queue="usage", types=(Usage,), cluster="east", durable=False)
                )
            )
            summaries = await stack.enter_async_context(world.bus.subscribe(SUMMARIES))
            await world.start()
            try:
                await scenario(world, usage, summaries)
            finally:
                await world.stop()

    run_virtual(main(), limit=86_400.0)


def test_usage_says_what_is_requested_and_what_is_used() -> None:
    async def scenario(world: World, usage: Inbox, _: Inbox) -> None:
        await world.run(0)
        await world.run(1)
        world.cluster.foreign("web", "n1", Resources(cpu_millis=1_000, memory_bytes=GiB, pods=1))
        world.cluster.remove("web")
        await asyncio.sleep(46)
        told_usage = await usage_of(usage)
        (node,) = told_usage.nodes
        assert (node.node, node.pods, node.requested_ratio) == ("n1", 2, 0.5)
        assert node.used_ratio == pytest.approx(2 / 8)
        (array,) = told_usage.arrays
        assert (array.job_id, array.pods, array.requested_cpu_millis) == ("j", 2, 4_000)
        assert array.used_cpu_millis == 2_000
        assert told_usage.valid_until > world.clock.now()

    in_world(scenario)


def test_samples_reach_the_sink_one_for_each_interval() -> None:
    async def scenario(world: World, _usage: Inbox, _: Inbox) -> None:
        await world.run(0)
        await asyncio.sleep(45)
        assert len(world.sink.samples) == 3, "the first reading has no interval"
        assert {sample.cpu_cores for sample in world.sink.samples} == {1.0}
        assert {sample.job_id for sample in world.sink.samples} == {"j"}

    in_world(scenario)


def test_an_ended_pod_is_summed_once() -> None:
    async def scenario(world: World, _usage: Inbox, summaries: Inbox) -> None:
        pod = await world.run(0)
        await asyncio.sleep(40)
        world.cluster.end(pod.name)
        await asyncio.sleep(10)
        (figures,) = await told(summaries)
        assert (figures.index, figures.attempt, figures.pod_uid) == (0, 1, pod.uid)
        assert figures.wall_seconds == pytest.approx(40.0)
        assert figures.cpu_seconds == pytest.approx(30.0, abs=10)
        assert figures.samples >= 3
        world.cluster.remove(pod.name)
        await asyncio.sleep(60)
        assert await told(summaries) == []

    in_world(scenario)


def test_a_pod_that_vanished_while_nobody_could_look_is_summed_too() -> None:
    async def scenario(world: World, _usage: Inbox, summaries: Inbox) -> None:
        pod = await world.run(0)
        await asyncio.sleep(40)
        world.cluster.remove(pod.name)
        world.cluster.compact()  # what changed is not told any more: the pods are listed afresh
        await world.run(1)
        await asyncio.sleep(20)
        (figures,) = await told(summaries)
        assert (figures.index, figures.samples >= 3) == (0, True)

    in_world(scenario)


def test_a_new_life_counts_what_the_counters_say_in_full() -> None:
    async def scenario(world: World, _usage: Inbox, summaries: Inbox) -> None:
        pod = await world.run(0)
        short = await world.run(1)
        await asyncio.sleep(60)
        await world.crash()
        world.cluster.end(short.name)
        await asyncio.sleep(CONFIG.lease_seconds + 5)
        await world.start()
        await asyncio.sleep(60)
        world.cluster.end(pod.name)
        await asyncio.sleep(20)
        found = {figures.index: figures for figures in await told(summaries)}
        whole = found[0]
        assert whole.cpu_seconds == pytest.approx(whole.wall_seconds, abs=11)
        assert whole.wall_seconds > 120
        assert found[1].samples == 0
        assert found[1].wall_seconds == pytest.approx(60.0, abs=1)

    in_world(scenario)


def test_counters_that_cannot_be_read_never_look_like_idleness() -> None:
    async def scenario(world: World, usage: Inbox, _: Inbox) -> None:
        await world.run(0)
        await asyncio.sleep(46)
        assert (await usage_of(usage)).nodes[0].used_ratio is not None
        world.stats.is_down = True
        await asyncio.sleep(2 * CONFIG.fresh_seconds)
        told_usage = await usage_of(usage)
        assert told_usage.nodes[0].used_ratio is None
        assert told_usage.arrays[0].used_cpu_millis is None
        assert told_usage.nodes[0].requested_ratio == 0.25, "what is requested needs no counter"
        world.stats.is_down = False
        await asyncio.sleep(46)
        assert (await usage_of(usage)).nodes[0].used_ratio == pytest.approx(1 / 8)

    in_world(scenario)


def test_a_cluster_that_does_not_answer_is_asked_again() -> None:
    async def scenario(world: World, usage: Inbox, summaries: Inbox) -> None:
        pod = await world.run(0)
        await asyncio.sleep(20)
        world.cluster.is_down = True
        await asyncio.sleep(120)
        world.cluster.is_down = False
        world.cluster.end(pod.name)
        await asyncio.sleep(60)
        assert [figures.index for figures in await told(summaries)] == [0]
        assert (await usage_of(usage)).nodes[0].pods == 0

    in_world(scenario)


def test_figures_wait_for_the_broker_and_for_somebody_who_takes_them() -> None:
    async def main() -> None:
        world = World()
        await world.start()
        try:
            pod = await world.run(0)
            await asyncio.sleep(20)
            world.cluster.end(pod.name)
            await asyncio.sleep(60)  # no coordinator has ever declared its queue
            async with world.bus.subscribe(SUMMARIES) as inbox:
                world.broker.available = False
                await asyncio.sleep(60)
                world.broker.available = True
                await asyncio.sleep(60)
                assert [figures.index for figures in await told(inbox)] == [0]
        finally:
            await world.stop()

    run_virtual(main(), limit=86_400.0)


def test_a_stop_while_the_broker_is_away_still_frees_the_lease() -> None:
    async def scenario(world: World, _usage: Inbox, _: Inbox) -> None:
        pod = await world.run(0)
        await asyncio.sleep(20)
        world.broker.available = False
        world.cluster.end(pod.name)
        await asyncio.sleep(5)
        await world.stop()
        world.broker.available = True
        before = world.clock.now()
        await world.start()
        assert world.clock.now() - before < 1.0

    in_world(scenario)


def test_only_one_monitor_speaks_for_a_cluster() -> None:
    async def scenario(world: World, usage: Inbox, _: Inbox) -> None:
        other = asyncio.create_task(world.another().serve(asyncio.Event()), name="other")
        await asyncio.sleep(60)
        assert (await usage_of(usage)).epoch == 1, "the second one waits"
        await world.crash()
        await asyncio.sleep(60)
        assert (await usage_of(usage)).epoch == 2
        world.leases.faults.is_down = True  # it cannot know any more that it is the only one
        with pytest.raises(ExceptionGroup) as ended:
            async with asyncio.timeout(60):
                await other
        world.leases.faults.is_down = False
        assert ended.value.subgroup(PermanentError) is not None

    in_world(scenario)
