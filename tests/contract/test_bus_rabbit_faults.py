"""What only a real broker and real processes can show: deaths, lost connections, silence."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import aio_pika
import pytest

from springtide_shared.adapters.rabbit_bus import RabbitBus, RabbitSettings
from springtide_shared.errors import PermanentError, Reason, TransientError
from springtide_shared.messages import JobCancel, SliceRun, encode, parse_job
from springtide_shared.messages.shape import Shape
from springtide_shared.messages.task import TaskTemplate
from springtide_shared.ports.bus import Delivery, Subscription
from springtide_shared.testing.bus_contract import cancel, commands, eventually_parked, one

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.real("rabbitmq")

MORTAL = """
import asyncio, os, signal, sys
from springtide_shared.adapters.rabbit_bus import RabbitBus
from springtide_shared.testing.bus_contract import commands

async def main(url, log):
    async with RabbitBus.connect(url) as bus, bus.subscribe(commands(prefetch=10)) as inbox:
        while deliveries := await inbox.receive(1, 2.0):
            for delivery in deliveries:
                with open(log, "a") as file:
                    file.write(f"{delivery.message_id} {delivery.attempt}\\n")
                if delivery.message_id == "poison":
                    os.kill(os.getpid(), signal.SIGKILL)
                await delivery.ack()

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_message_that_kills_processes_is_parked_after_three(
    rabbitmq_url: str, tmp_path: Path
) -> None:
    """B16, with real processes and SIGKILL; what stands behind it is handled exactly once."""
    log = tmp_path / "handled.txt"

    async def publish() -> None:
        async with RabbitBus.connect(rabbitmq_url) as bus:
            await bus.declare(commands())
            await bus.publish(cancel(666), cluster="c1", message_id="poison")
            for number in range(6):
                await bus.publish(cancel(number), cluster="c1", message_id=f"good-{number}")

    async def parked() -> list[tuple[str, str, int]]:
        async with RabbitBus.connect(rabbitmq_url) as bus:
            return await eventually_parked(bus, "q.slice.cancel", 1)

    asyncio.run(publish())
    ends = []
    for _ in range(5):
        process = subprocess.run(
            [sys.executable, "-c", MORTAL, rabbitmq_url, str(log)], timeout=60, check=False
        )
        ends.append(process.returncode)
        if process.returncode == 0:
            break
    assert ends == [-signal.SIGKILL] * 3 + [0]
    lines = log.read_text().splitlines()
    assert [line for line in lines if line.startswith("poison")] == [
        "poison 1",
        "poison 2",
        "poison 3",
    ]
    handled = sorted(line.split()[0] for line in lines if line.startswith("good"))
    assert handled == [f"good-{number}" for number in range(6)]
    ((reason, detail, attempt),) = asyncio.run(parked())
    assert reason == "poison"
    assert "3 consumers ended" in detail
    assert attempt == 4


def test_the_broker_parks_what_the_adapter_never_sees(rabbitmq_url: str) -> None:
    """The backstop: a consumer that ends before it can count still cannot loop for ever."""

    async def run() -> None:
        async with RabbitBus.connect(rabbitmq_url) as bus:
            await bus.declare(commands())
            await bus.publish(cancel(1), cluster="c1", message_id="id-1")
            stranger = await aio_pika.connect(rabbitmq_url)
            async with stranger:
                queue = await (await stranger.channel()).get_queue("q.slice.cancel")
                rejected = 0
                while incoming := await queue.get(fail=False, timeout=10):
                    await incoming.reject(requeue=True)
                    rejected += 1
                    assert rejected < 50, "no limit"
                    await asyncio.sleep(0.01)
            assert await eventually_parked(bus, "q.slice.cancel", 1) == [
                ("poison", "parked by the broker: delivery_limit", 1)
            ]

    asyncio.run(run())


def test_a_forced_close_loses_nothing_confirmed(rabbitmq: Any) -> None:
    """Every connection is closed twice under load; stale settlements do nothing."""

    async def run() -> None:
        async with (
            RabbitBus.connect(rabbitmq.url) as publisher,
            RabbitBus.connect(rabbitmq.url) as consumer,
            consumer.subscribe(commands(prefetch=20)) as inbox,
        ):
            await asyncio.sleep(2)  # until the broker lists the connections
            confirmed: list[str] = []
            seen: dict[str, int] = {}
            stale: list[Delivery] = []
            loop = asyncio.get_running_loop()

            async def publish() -> None:
                number = 0
                until = loop.time() + 6
                while loop.time() < until:
                    number += 1
                    try:
                        await publisher.publish(
                            cancel(number), cluster="c1", message_id=f"m{number}"
                        )
                        confirmed.append(f"m{number}")
                    except TransientError:
                        await asyncio.sleep(0.05)
                    await asyncio.sleep(0.005)

            async def close() -> int:
                await asyncio.sleep(1)
                closed: int = await asyncio.to_thread(rabbitmq.close_connections)
                await asyncio.sleep(2.5)
                closed += await asyncio.to_thread(rabbitmq.close_connections)
                return closed

            async def consume(publishing: asyncio.Task[None]) -> None:
                while True:
                    deliveries = await inbox.receive(5, 3.0)
                    if not deliveries and publishing.done():
                        return
                    for delivery in deliveries:
                        seen[delivery.message_id] = seen.get(delivery.message_id, 0) + 1
                        if len(seen) % 7 == 0 and delivery.attempt == 1:
                            stale.append(delivery)  # settled late, when its channel may be gone
                        else:
                            await delivery.ack()
                    if len(stale) > 10:
                        await stale.pop(0).ack()

            async with asyncio.TaskGroup() as tasks:
                publishing = tasks.create_task(publish())
                closing = tasks.create_task(close())
                tasks.create_task(consume(publishing))
            assert closing.result() >= 4, "the connections were not closed"
            missing = [one_id for one_id in confirmed if one_id not in seen]
            assert not missing, f"{len(missing)} of {len(confirmed)} confirmed were lost"
            assert len(confirmed) > 100
            for delivery in stale:
                await delivery.ack()
            assert consumer.ready() == (True, "")
            assert not await consumer.dead_letters("q.slice.cancel")

    asyncio.run(run())


def test_a_consumer_that_the_broker_cancels_is_restored(rabbitmq_url: str) -> None:
    async def run() -> None:
        async with RabbitBus.connect(rabbitmq_url) as bus, bus.subscribe(commands()) as inbox:
            stranger = await aio_pika.connect(rabbitmq_url)
            async with stranger:
                channel = await stranger.channel()
                await channel.queue_delete("q.slice.cancel")
            assert not await inbox.receive(1, 0.5)  # notices, and declares it again
            await bus.publish(cancel(1), cluster="c1")
            assert (await one(inbox)).message == cancel(1)

    asyncio.run(run())


class Proxy:
    """Between client and broker; on request it swallows what the broker says."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._parts = parts
        self._writers: list[asyncio.StreamWriter] = []
        self.silent = False
        self.url = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Proxy]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        credentials = self._parts.netloc.rpartition("@")[0]
        netloc = f"{credentials}@127.0.0.1:{port}"
        self.url = urlunsplit(self._parts._replace(netloc=netloc))
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await asyncio.sleep(0.05)

    def cut(self) -> None:
        """End every connection without a word."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(*self._target)
        self._writers += [writer, ours]
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(reader, ours, lambda: False))
                tasks.create_task(self._pump(theirs, writer, lambda: self.silent))
        except* OSError:
            pass
        finally:
            writer.transport.abort()
            ours.transport.abort()

    @staticmethod
    async def _pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, swallow: Callable[[], bool]
    ) -> None:
        while data := await reader.read(65536):
            if not swallow():
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


def test_a_silent_broker_ends_in_an_error_within_the_limit(rabbitmq_url: str) -> None:
    """An alarmed broker confirms nothing; publishing must say so instead of hanging."""

    async def run() -> None:
        async with Proxy(rabbitmq_url).serve() as proxy:
            settings = RabbitSettings(url=proxy.url, publish_limit=1.0, connect_limit=2.0)
            async with RabbitBus.connect(settings) as bus, bus.subscribe(commands()) as inbox:
                await bus.publish(cancel(1), cluster="c1")
                proxy.silent = True
                began = time.monotonic()
                with pytest.raises(TransientError) as caught:
                    await bus.publish(cancel(2), cluster="c1")
                assert time.monotonic() - began < 3
                assert caught.value.reason is Reason.BUS_UNAVAILABLE
                assert bus.ready()[0] is False
                proxy.silent = False
                proxy.cut()
                for _ in range(50):
                    try:
                        await bus.publish(cancel(3), cluster="c1", message_id="after")
                        break
                    except TransientError:
                        await asyncio.sleep(0.1)
                else:
                    pytest.fail("never came back")
                # The consumer comes back as well, by the next receive().
                ids: list[str] = []
                while "after" not in ids:
                    delivery = await one(inbox)
                    ids.append(delivery.message_id)
                    await delivery.ack()
                assert bus.ready() == (True, "")

    asyncio.run(run())


def test_a_consumer_that_cannot_come_back_says_so(rabbitmq_url: str) -> None:
    async def run() -> None:
        async with Proxy(rabbitmq_url).serve() as proxy:
            settings = RabbitSettings(
                url=proxy.url, publish_limit=1.0, connect_limit=0.5, restore_limit=1.0
            )
            async with RabbitBus.connect(settings) as bus, bus.subscribe(commands()) as inbox:
                proxy.silent = True  # new connections are accepted, never served
                proxy.cut()
                with pytest.raises(TransientError) as caught:
                    async with asyncio.timeout(20):
                        await inbox.receive(1)
                assert "could not be restored" in str(caught.value)

    asyncio.run(run())


@pytest.mark.slow
def test_long_work_in_slices_keeps_the_heartbeat(rabbitmq_url: str) -> None:
    """B19: heartbeat 5 s, while 100,000 tasks are checked, cut into slices and encoded."""

    async def run() -> None:
        settings = RabbitSettings(url=rabbitmq_url, heartbeat=5)
        longest = 0.0
        async with RabbitBus.connect(settings) as bus, bus.subscribe(commands()) as inbox:
            await bus.publish(cancel(1), cluster="c1")
            held = await one(inbox)  # unsettled all the while: a lost connection would redeliver it
            began = last = time.monotonic()
            while time.monotonic() - began < 12:  # more than two missed heartbeats
                await _expand_a_big_job()
                now = time.monotonic()
                longest, last = max(longest, now - last), now
            assert not await inbox.receive(1, 0.5), "it was delivered again"
            await held.ack()
            await bus.publish(cancel(2), cluster="c1")
            delivery = await one(inbox)
            assert (delivery.message, delivery.redelivered) == (cancel(2), False)

    asyncio.run(run())


async def _expand_a_big_job() -> None:
    items = ",".join(f'"item-{n}"' for n in range(60_000))
    body = f'{{"id":"j","name":"n","command":["x"],"array":{{"items":[{items}]}}}}'.encode()
    _, spec = parse_job(body)
    await asyncio.sleep(0)
    template = TaskTemplate(command=["x"], shape=Shape(cpu_millis=1000, memory_bytes=1 << 20))
    assert spec.items is not None
    for first in range(0, 100_000, 500):
        encode(
            SliceRun(
                cluster="c1",
                epoch=1,
                seq=first,
                job_id="j",
                tenant="t",
                template=template,
                ranges=[(first, first + 500)],
                attempt=1,
                items=(spec.items[first : first + 500] or None),
            )
        )
        if first % 5_000 == 0:
            await asyncio.sleep(0)


def test_wrong_credentials_are_named_and_not_told(
    rabbitmq_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """B56: the text of an error and the log hold no password."""
    parts = urlsplit(rabbitmq_url)
    secret = "not-the-password-31415"
    netloc = f"{parts.username}:{secret}@{parts.hostname}:{parts.port}"
    url = urlunsplit(parts._replace(netloc=netloc))

    async def run() -> None:
        async with RabbitBus.connect(url):
            pytest.fail("it let us in")

    with caplog.at_level(logging.DEBUG), pytest.raises(PermanentError) as caught:
        asyncio.run(run())
    assert caught.value.reason is Reason.UNAUTHORISED
    assert secret not in str(caught.value) + repr(caught.value) + caplog.text
    assert secret not in repr(RabbitSettings(url=url))


def test_no_broker_is_a_transient_fault() -> None:
    async def run() -> None:
        async with RabbitBus.connect("amqp://u:secret-27182@127.0.0.1:1/"):
            pytest.fail("nobody listens there")

    with pytest.raises(TransientError) as caught:
        asyncio.run(run())
    assert caught.value.reason is Reason.BUS_UNAVAILABLE
    assert "secret-27182" not in str(caught.value)


def test_a_header_alone_makes_no_tenant(rabbitmq_url: str) -> None:
    """Only who is named by the broker as trusted may speak for a tenant."""
    jobs = Subscription(queue="jobs", types=(JobCancel,))

    async def run() -> None:
        async with RabbitBus.connect(rabbitmq_url) as bus, bus.subscribe(jobs) as inbox:
            stranger = await aio_pika.connect(rabbitmq_url)
            async with stranger:
                channel = await stranger.channel()
                exchange = await channel.get_exchange("springtide")
                forged = aio_pika.Message(
                    encode(JobCancel(id="j")),
                    headers={"x-springtide-tenant": "victim", "x-springtide-deaths": 9},
                    type="job.cancel.v1",
                )
                await exchange.publish(forged, "job.cancel.v1")
            delivery = await one(inbox)
            assert delivery.tenant == ""
            assert delivery.attempt == 1
            await bus.as_user("alice").publish(JobCancel(id="j"))
            assert (await one(inbox)).tenant == "alice"

    asyncio.run(run())


def test_a_stranger_needs_no_type_property(rabbitmq_url: str) -> None:
    """The routing key names the type where the publisher's library sets no `type`."""
    jobs = Subscription(queue="jobs", types=(JobCancel,))

    async def run() -> None:
        async with RabbitBus.connect(rabbitmq_url) as bus, bus.subscribe(jobs) as inbox:
            stranger = await aio_pika.connect(rabbitmq_url)
            async with stranger:
                channel = await stranger.channel()
                exchange = await channel.get_exchange("springtide")
                await exchange.publish(aio_pika.Message(b'{"id": "j"}'), "job.cancel.v1")
            assert (await one(inbox)).message == JobCancel(id="j")

    asyncio.run(run())


def test_another_declaration_of_a_queue_is_refused_with_the_remedy(rabbitmq_url: str) -> None:
    async def run() -> None:
        async with RabbitBus.connect(rabbitmq_url) as bus:
            await bus.declare(commands())
            with pytest.raises(PermanentError) as caught:
                await bus.declare(commands(single_active=True))
            assert caught.value.reason is Reason.INVALID_SPEC
            assert "drain and delete it" in str(caught.value)
            async with bus.subscribe(commands()):  # the connection lives
                pass

    asyncio.run(run())


def test_delays_go_on_past_the_longest_queue(
    rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry longer than the longest delay queue goes round, and comes not sooner."""
    from springtide_shared.adapters import rabbit_topology

    monkeypatch.setattr(rabbit_topology, "DELAYS_MS", (100, 500))

    async def run() -> None:
        async with RabbitBus.connect(rabbitmq_url) as bus, bus.subscribe(commands()) as inbox:
            await bus.publish(cancel(1), cluster="c1")
            await (await one(inbox)).retry(1.4, Reason.CLUSTER_UNAVAILABLE)
            began = time.monotonic()
            delivery = await one(inbox)
            assert 1.4 <= time.monotonic() - began < 5
            assert delivery.attempt == 2

    asyncio.run(run())
