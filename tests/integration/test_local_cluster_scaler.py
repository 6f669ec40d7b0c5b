"""The scaler on the local cluster, in real time: from demand to processes and back to nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from springtide_lab.local import LocalCluster, LocalGroup
from springtide_scaler.config import ScalerConfig
from springtide_scaler.service import Scaler
from springtide_shared.adapters.clock import SystemClock, SystemIds
from springtide_shared.adapters.memory_bus import InMemoryBus, MemoryBroker
from springtide_shared.adapters.memory_state import InMemoryLeases, InMemoryState
from springtide_shared.messages.cluster import (
    Demand,
    NodeEvent,
    NodeEvents,
    NodeState,
    Plan,
    ShapeDemand,
    SlotState,
)
from springtide_shared.messages.shape import Shape
from springtide_shared.messages.task import AttemptKey, TaskTemplate
from springtide_shared.ports.bus import Inbox, Subscription
from springtide_shared.ports.cluster import PodPhase, PodSpec
from springtide_shared.runtime.config import scaled
from springtide_shared.units import GiB, MiB

SHAPE = Shape(cpu_millis=1_000, memory_bytes=64 * MiB)


def test_slots_bring_pods_to_their_nodes_and_the_machines_go_when_they_are_done(
    tmp_path: Path,
) -> None:
    script = tmp_path / "agent.sh"
    script.write_text("sleep 0.5\n")
    plans: list[Plan] = []
    events: list[NodeEvent] = []

    async def until(check: Callable[[], bool], limit: float = 20.0) -> None:
        deadline = time.monotonic() + limit
        while not check():
            assert time.monotonic() < deadline, f"not in time: {plans[-1:]} {events}"
            await asyncio.sleep(0.02)

    async def listen(inbox: Inbox) -> None:
        while True:
            for delivery in await inbox.receive(100):
                message = delivery.message
                if isinstance(message, Plan):
                    plans.append(message)
                elif isinstance(message, NodeEvents):
                    events.extend(message.events)
                await delivery.ack()

    async def run() -> None:
        clock = SystemClock()
        ids = SystemIds(clock)
        bus = InMemoryBus(MemoryBroker())
        cluster = LocalCluster(
            name="here",
            root=tmp_path / "cluster",
            groups=[
                LocalGroup(
                    name=name,
                    instance_type=name,
                    cpu_millis=1_000 * cores,
                    memory_bytes=2 * GiB,
                    price_per_hour=price,
                    boot_seconds=0.2,
                    max_size=4,
                )
                for name, cores, price in (("large", 4, 3.0), ("small", 1, 1.0))
            ],
            store_url=f"file://{tmp_path}/store",
            clock=clock,
            ids=ids,
            cores=2,
            oversubscription=3.0,
            agent_command=("/bin/sh", str(script)),
        )
        facts = Subscription(queue="facts", types=(NodeEvents,), cluster="here")
        snaps = Subscription(queue="snaps", types=(Plan,), cluster="here", durable=False)
        stop = asyncio.Event()
        async with (
            cluster,
            bus.subscribe(facts) as fact_inbox,
            bus.subscribe(snaps) as snap_inbox,
            asyncio.TaskGroup() as tasks,
        ):
            helpers = [
                tasks.create_task(listen(fact_inbox)),
                tasks.create_task(listen(snap_inbox)),
            ]
            scaler = Scaler(
                cluster="here",
                bus=bus,
                view=cluster,
                nodes=cluster.node_control,
                groups=cluster,
                state=InMemoryState(),
                leases=InMemoryLeases(clock),
                clock=clock,
                ids=ids,
                config=scaled(ScalerConfig(), 30),
            )
            serving = tasks.create_task(scaler.serve(stop))

            async def say(seq: int, wanted: int) -> None:
                shapes = [ShapeDemand(shape=SHAPE, wanted=wanted, running=0, backlog=wanted)]
                await bus.publish(
                    Demand(
                        cluster="here",
                        epoch=1,
                        seq=seq,
                        valid_until=clock.now() + 60,
                        shapes=shapes,
                    ),
                    cluster="here",
                )

            await asyncio.sleep(0.1)
            # 10 places cost least on three large nodes, but 6 cores are all there is to give out.
            await say(1, 10)

            def ready() -> list[tuple[str, int]]:
                return [
                    (slot.slot, sum(slot.places.values()))
                    for slot in plans[-1].slots
                    if slot.state is SlotState.READY
                ]

            await until(lambda: bool(plans) and sum(count for _, count in ready()) == 6)
            number = 0
            for slot, count in ready():
                for _ in range(count):
                    key = AttemptKey("job", number, 1)
                    number += 1
                    await cluster.create(
                        PodSpec(
                            name=key.pod_name,
                            attempt=key,
                            tenant="alice",
                            template=TaskTemplate(command=["x"], shape=SHAPE),
                            slot=slot,
                        )
                    )
            pods = (await cluster.pods_since(0)).pods
            assert all(pod.node for pod in pods), "a place in a ready slot is a place on a node"
            await say(2, 0)
            await until(lambda: sum(e.state is NodeState.RELEASED for e in events) == 3)
            ended = (await cluster.pods_since(0)).pods
            assert [pod.phase for pod in ended] == [PodPhase.SUCCEEDED] * 6, "nobody was cut off"
            assert await cluster.nodes() == []
            assert all(group.size == 0 for group in await cluster.groups())
            stop.set()
            await serving
            for helper in helpers:
                helper.cancel()

    asyncio.run(run())
