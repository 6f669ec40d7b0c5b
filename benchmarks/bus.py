"""How many messages a second the bus carries: published, confirmed, delivered and acknowledged."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from benchmarks.registry import Figure
from benchmarks.servers import server
from springtide_shared.adapters.memory_bus import InMemoryBus, MemoryBroker
from springtide_shared.adapters.rabbit_bus import RabbitBus
from springtide_shared.messages import AttemptEvent, AttemptEvents, AttemptState
from springtide_shared.ports.bus import MessageBus, Subscription
from springtide_testbed.rabbitmq import RabbitMQ

IN_FLIGHT: Final = 100
"""Publications that wait for their confirmation at the same time."""
_MESSAGE: Final = AttemptEvents(
    cluster="bench",
    events=[
        AttemptEvent(
            job_id="01K0BENCH00000000000000000",
            index=index,
            attempt=1,
            state=AttemptState.RUNNING,
            at=1_790_000_000.0,
            pod_uid="0b0d6c5e-0000-4000-8000-000000000000",
            node="node-1",
        )
        for index in range(4)
    ],
)


def bus() -> list[Figure]:
    """Messages a second through the bus in memory and through RabbitMQ, confirmed and settled."""
    figures = [
        Figure(
            name="bus_messages_per_second_memory",
            value=round(asyncio.run(_carry(InMemoryBus(MemoryBroker()), 30_000))),
            unit="messages/s",
            goal="",
        )
    ]
    with server(RabbitMQ(), "AMQP_URL") as url:
        if url is not None:
            figures.append(
                Figure(
                    name="bus_messages_per_second_rabbitmq",
                    value=round(asyncio.run(_through_rabbit(url))),
                    unit="messages/s",
                    goal="",
                )
            )
    return figures


async def _through_rabbit(url: str) -> float:
    async with RabbitBus.connect(url) as connected:
        return await _carry(connected, 10_000)


async def _carry(carrier: MessageBus, count: int) -> float:
    """Messages a second, from the first publication to the last acknowledgement."""
    subscription = Subscription(queue="bench.attempt.events", types=(AttemptEvents,), prefetch=500)
    async with carrier.subscribe(subscription) as inbox:

        async def consume() -> None:
            taken = 0
            while taken < count:
                deliveries = await inbox.receive(200, 30.0)
                assert deliveries, f"{count - taken} messages did not come within 30 s"
                for delivery in deliveries:
                    assert delivery.message == _MESSAGE
                    await delivery.ack()
                taken += len(deliveries)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(consume(), name="consume")
            for _ in range(count // IN_FLIGHT):
                await asyncio.gather(
                    *(carrier.publish(_MESSAGE, cluster="bench") for _ in range(IN_FLIGHT))
                )
        return count / (time.perf_counter() - began)
