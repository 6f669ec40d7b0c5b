"""The faults of the bus in memory: each happens on request, none without, all by the seed."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from springtide_shared.adapters.clock import SeededIds
from springtide_shared.adapters.memory_bus import Faults, InMemoryBus, MemoryBroker
from springtide_shared.errors import PermanentError, Reason, TransientError
from springtide_shared.messages import Credit, JobCancel, SliceCancel
from springtide_shared.ports.bus import Inbox, Subscription
from springtide_shared.testing.bus_contract import cancel, commands, credit, one
from springtide_shared.testing.virtual import VirtualClock, run_virtual

COUNT = 400


async def publish_all(bus: InMemoryBus, count: int = COUNT) -> set[int]:
    """Numbers whose publication was not confirmed."""
    unconfirmed = set()
    for number in range(count):
        try:
            await bus.publish(cancel(number), cluster="c1")
        except TransientError:
            unconfirmed.add(number)
    return unconfirmed


async def take_all(inbox: Inbox) -> list[int]:
    seen = []
    while deliveries := await inbox.receive(50, 100.0):
        for delivery in deliveries:
            assert isinstance(delivery.message, SliceCancel)
            seen.append(int(delivery.message.job_id.removeprefix("job-")))
            await delivery.ack()
    return seen


def trace(faults: Faults) -> tuple[set[int], list[int]]:
    """What was not confirmed and what arrived, in order."""

    async def run() -> tuple[set[int], list[int]]:
        broker = MemoryBroker(faults=[faults])
        bus = InMemoryBus(broker)
        async with bus.subscribe(commands(prefetch=1000)) as inbox:
            unconfirmed = await publish_all(bus)
            seen = await take_all(inbox)
        broker.assert_nothing_left()
        return unconfirmed, seen

    return run_virtual(run())


def test_without_faults_everything_comes_once_in_order() -> None:
    assert trace(Faults()) == (set(), list(range(COUNT)))


def test_an_unconfirmed_message_may_or_may_not_have_been_taken() -> None:
    unconfirmed, seen = trace(Faults(unconfirmed=0.3, seed=1))
    assert 0.15 * COUNT < len(unconfirmed) < 0.45 * COUNT
    taken = unconfirmed & set(seen)
    assert 0.25 < len(taken) / len(unconfirmed) < 0.75
    assert set(range(COUNT)) - unconfirmed <= set(seen), "a confirmed one was lost"


def test_doubled_messages_come_twice() -> None:
    _, seen = trace(Faults(doubled=0.3, seed=1))
    assert set(seen) == set(range(COUNT))
    assert 0.15 * COUNT < len(seen) - COUNT < 0.45 * COUNT


@pytest.mark.parametrize("faults", [Faults(delayed=0.3, seed=1), Faults(reordered=0.3, seed=1)])
def test_delayed_and_reordered_messages_all_come(faults: Faults) -> None:
    _, seen = trace(faults)
    assert sorted(seen) == list(range(COUNT))
    overtaken = sum(a > b for a, b in itertools.pairwise(seen))
    assert overtaken > 0.1 * COUNT


def test_only_what_need_not_arrive_is_lost() -> None:
    async def run() -> None:
        bus = InMemoryBus(MemoryBroker(faults=[Faults(lost=0.5, seed=1)]))
        reader = Subscription(queue="credit", types=(Credit,), durable=False)
        async with bus.subscribe(reader) as snapshots, bus.subscribe(commands()) as inbox:
            for number in range(100):
                await bus.publish(credit(number), cluster="c1")
                await bus.publish(cancel(number), cluster="c1")
            assert 25 < len(await snapshots.receive(200, 1.0)) < 75
            assert len(await inbox.receive(200, 1.0)) == 100

    run_virtual(run())


def test_the_seed_decides() -> None:
    def faults(seed: int) -> Faults:
        return Faults(unconfirmed=0.1, doubled=0.1, delayed=0.1, reordered=0.1, seed=seed)

    assert trace(faults(1)) == trace(faults(1))
    assert trace(faults(1)) != trace(faults(2))


def test_faults_strike_the_named_topics_only_and_can_be_turned_off() -> None:
    async def run() -> None:
        broker = MemoryBroker(faults=[Faults(topics=("job.cancel",), unconfirmed=1.0)])
        bus = InMemoryBus(broker)
        both = commands(types=(SliceCancel, JobCancel), cluster="")
        async with bus.subscribe(both) as inbox:
            await bus.publish(cancel(1), cluster="c1")
            with pytest.raises(TransientError):
                await bus.publish(JobCancel(id="j"))
            broker.set_faults()
            await bus.publish(JobCancel(id="k"))
            messages = [delivery.message for delivery in await inbox.receive(10, 1.0)]
            assert messages[0] == cancel(1)
            assert messages[-1] == JobCancel(id="k")

    run_virtual(run())


def test_an_outage_refuses_and_keeps() -> None:
    async def run() -> None:
        broker = MemoryBroker()
        bus = InMemoryBus(broker)
        async with bus.subscribe(commands()) as inbox:
            await bus.publish(cancel(1), cluster="c1")
            broker.available = False
            assert bus.ready() == (False, "the broker is away")
            with pytest.raises(TransientError) as caught:
                await bus.publish(cancel(2), cluster="c1")
            assert caught.value.reason is Reason.BUS_UNAVAILABLE
            broker.available = True
            assert (await one(inbox)).message == cancel(1)
            assert not await inbox.receive(1, 1.0)

    run_virtual(run())


def test_structs_may_pass_without_the_codec() -> None:
    async def run() -> None:
        bus = InMemoryBus(MemoryBroker(codec=False))
        sent = cancel(1)
        async with bus.subscribe(commands()) as inbox:
            await bus.publish(sent, cluster="c1")
            delivery = await one(inbox)
            assert delivery.message is sent
            assert delivery.body.startswith(b"{")

    run_virtual(run())


def test_the_codec_makes_a_new_struct() -> None:
    async def run() -> None:
        bus = InMemoryBus(MemoryBroker())
        sent = cancel(1)
        async with bus.subscribe(commands()) as inbox:
            await bus.publish(sent, cluster="c1")
            message = (await one(inbox)).message
            assert message == sent
            assert message is not sent

    run_virtual(run())


def test_what_is_left_is_named() -> None:
    async def run() -> None:
        broker = MemoryBroker()
        bus = InMemoryBus(broker, ids=SeededIds(VirtualClock(asyncio.get_running_loop()), 1))
        async with bus.subscribe(commands()) as inbox:
            for number in range(4):
                await bus.publish(cancel(number), cluster="c1")
            held, put_off, parked = await inbox.receive(3, 1.0)
            await put_off.retry(5.0, Reason.NO_ROOM)
            await parked.dead_letter(Reason.STALE)
            with pytest.raises(AssertionError, match=r"3 not settled \(1 of them held\)") as caught:
                broker.assert_nothing_left()
            assert "1 parked (slice.cancel.v1 stale)" in str(caught.value)
            await held.ack()
            for delivery in await inbox.receive(1, 1.0):
                await delivery.ack()
            await (await one(inbox)).ack()
            broker.assert_nothing_left(parked=True)
            with pytest.raises(AssertionError):
                broker.assert_nothing_left()
            assert broker.published == {"slice.cancel": 4}
            assert broker.delivered == {"slice.cancel": 5}

    run_virtual(run())


def test_a_queue_is_not_declared_twice_differently() -> None:
    broker = MemoryBroker()
    broker.declare(commands())
    with pytest.raises(PermanentError):
        broker.declare(commands(single_active=True))


def test_a_declared_queue_keeps_what_comes_before_its_first_consumer() -> None:
    async def run() -> None:
        broker = MemoryBroker()
        bus = InMemoryBus(broker)
        broker.declare(commands())
        await bus.publish(cancel(1), cluster="c1")
        async with bus.subscribe(commands()) as inbox:
            assert (await one(inbox)).message == cancel(1)

    run_virtual(run())


def test_a_woken_and_cancelled_consumer_passes_the_word_on() -> None:
    """Two wait; the one that is woken is cancelled in the same turn: the other must get it."""

    async def run() -> None:
        bus = InMemoryBus(MemoryBroker())
        async with bus.subscribe(commands()) as first, bus.subscribe(commands()) as second:
            async with asyncio.TaskGroup() as tasks:
                doomed = tasks.create_task(first.receive(1))
                other = tasks.create_task(second.receive(1, 60.0))
                await asyncio.sleep(1)
                bus.broker.send(cancel(1), cluster="c1", message_id="m")  # wakes the first
                doomed.cancel()
            assert doomed.cancelled()
            assert [delivery.message for delivery in other.result()] == [cancel(1)]

    run_virtual(run())
