"""What every `MessageBus` must do, as cases that run on the bus in memory and on a real broker.

A test module makes a `BusHarness` for its adapter and runs each of `CASES` on it. Times are short
enough for a real broker and are taken from the loop's clock, so that virtual time serves as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from springtide_shared.errors import InvalidFieldError, PermanentError, Reason
from springtide_shared.messages import (
    AttemptEvent,
    AttemptEvents,
    AttemptState,
    Credit,
    JobAnswer,
    JobCancel,
    JobEvents,
    JobState,
    JobSubmit,
    Message,
    ShapeCredit,
    SliceCancel,
    TaskCounts,
)
from springtide_shared.ports.bus import Delivery, Inbox, MessageBus, Subscription, Undecodable


class ForeignPublisher(Protocol):
    """Publishes bytes as a stranger's library would."""

    async def publish_body(
        self,
        name: str,
        body: bytes,
        *,
        cluster: str = "",
        message_id: str = "",
        correlation_id: str = "",
        reply_to: str = "",
        type_property: str | None = None,
    ) -> None:
        """See the adapters."""
        ...


class OpenBus(MessageBus, ForeignPublisher, Protocol):
    """The port plus the door for foreign bodies, which both adapters have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BusHarness:
    """One empty broker for one case."""

    bus: OpenBus
    """Publishes without a user."""
    user_bus: MessageBus
    """Publishes under `user`, as far as the broker validates it."""
    user: str
    other: Callable[[], AbstractAsyncContextManager[MessageBus]]
    """A further process's bus; leaving it ends its connection with whatever it still holds."""


Case = Callable[[BusHarness], Awaitable[None]]
CASES: Final[dict[str, Case]] = {}
"""Every case by name."""

PATIENCE: Final = 10.0
"""Seconds within which what must come has come."""
SILENCE: Final = 0.4
"""Seconds of nothing that count as "it does not come"."""


def case(function: Case) -> Case:
    """Register a case under its function's name."""
    CASES[function.__name__] = function
    return function


def cancel(number: int, cluster: str = "c1") -> SliceCancel:
    """A small command to a cluster."""
    return SliceCancel(cluster=cluster, epoch=1, job_id=f"job-{number}")


def commands(queue: str = "q.slice.cancel", **changes: object) -> Subscription:
    """A durable subscription to `cancel()`s; `changes` are other fields of it."""
    fields: dict[str, object] = {"queue": queue, "types": (SliceCancel,), "cluster": "c1"}
    return Subscription(**{**fields, **changes})  # type: ignore[arg-type]


def credit(seq: int, cluster: str = "c1") -> Credit:
    """A snapshot."""
    shapes = [ShapeCredit(shape="s1", live=seq, free=1)]
    return Credit(cluster=cluster, epoch=1, seq=seq, valid_until=1e10, shapes=shapes)


async def one(inbox: Inbox) -> Delivery:
    """The next delivery, which must come."""
    (delivery,) = await inbox.receive(1, PATIENCE) or _missing()
    return delivery


def _missing() -> Sequence[Delivery]:
    raise AssertionError(f"nothing came within {PATIENCE} s")


async def drain(inbox: Inbox, count: int) -> list[Delivery]:
    """The next `count` deliveries, which must come; not settled."""
    taken: list[Delivery] = []
    while len(taken) < count:
        taken.extend(await inbox.receive(count - len(taken), PATIENCE) or _missing())
    return taken


async def refused(publishing: Awaitable[None]) -> PermanentError:
    """The error of a publication that must be refused."""
    try:
        await publishing
    except PermanentError as error:
        return error
    raise AssertionError("it was taken")


async def assert_silent(inbox: Inbox) -> None:
    """Nothing comes for a while."""
    unexpected = await inbox.receive(1, SILENCE)
    assert not unexpected, f"not expected: {unexpected[0].body!r}"


async def eventually_parked(bus: MessageBus, queue: str, count: int) -> list[tuple[str, str, int]]:
    """(reason, detail, attempt) of the dead letters, once there are `count` of them."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE
    while True:
        parked = await bus.dead_letters(queue)
        if len(parked) >= count or loop.time() > deadline:
            assert len(parked) == count, parked
            return [(letter.reason, letter.detail, letter.attempt) for letter in parked]
        await asyncio.sleep(0.05)


# -- the way of a message --------------------------------------------------------------------------


@case
async def a_message_arrives_as_it_was_sent(harness: BusHarness) -> None:
    async with harness.bus.subscribe(commands()) as inbox:
        await harness.bus.publish(
            cancel(1), cluster="c1", message_id="id-1", correlation_id="co-1", reply_to="r-1"
        )
        delivery = await one(inbox)
        assert delivery.message == cancel(1)
        assert delivery.type is SliceCancel
        assert delivery.attempt == 1
        assert not delivery.redelivered
        assert delivery.message_id == "id-1"
        assert delivery.correlation_id == "co-1"
        assert delivery.reply_to == "r-1"
        await delivery.ack()
        await assert_silent(inbox)


@case
async def every_message_has_an_id_of_its_own(harness: BusHarness) -> None:
    async with harness.bus.subscribe(commands()) as inbox:
        for number in range(5):
            await harness.bus.publish(cancel(number), cluster="c1")
        ids = [delivery.message_id for delivery in await drain(inbox, 5)]
        assert all(ids)
        assert len(set(ids)) == 5


@case
async def order_of_publishing_is_kept(harness: BusHarness) -> None:
    async with harness.bus.subscribe(commands(prefetch=20)) as inbox:
        for number in range(100):
            await harness.bus.publish(cancel(number), cluster="c1")
        seen: list[Message] = []
        while len(seen) < 100:
            for delivery in await drain(inbox, 1):
                seen.append(delivery.message)
                await delivery.ack()
        assert seen == [cancel(number) for number in range(100)]


@case
async def a_command_that_no_queue_takes_is_refused(harness: BusHarness) -> None:
    unroutable: list[Message] = [
        cancel(1),
        AttemptEvents(
            cluster="c1",
            events=[
                AttemptEvent(job_id="j", index=0, attempt=1, state=AttemptState.RUNNING, at=1.0)
            ],
        ),
    ]
    async with harness.bus.subscribe(commands(cluster="elsewhere")):
        for message in unroutable:
            refusal = await refused(harness.bus.publish(message, cluster="c1"))
            assert refusal.reason is Reason.CLUSTER_UNREACHABLE, refusal
    # The channel lives: what follows is taken.
    async with harness.bus.subscribe(commands()) as inbox:
        await harness.bus.publish(cancel(2), cluster="c1")
        assert (await one(inbox)).message == cancel(2)


@case
async def a_snapshot_or_broadcast_that_nobody_hears_is_dropped(harness: BusHarness) -> None:
    await harness.bus.publish(credit(1), cluster="c1")
    await harness.bus.publish(
        JobEvents(job_id="j", tenant="t", state=JobState.RUNNING, counts=TaskCounts(live=1), at=1.0)
    )


@case
async def a_cluster_reads_only_its_own(harness: BusHarness) -> None:
    async with (
        harness.bus.subscribe(commands("q1.slice.cancel", cluster="c1")) as first,
        harness.bus.subscribe(commands("q2.slice.cancel", cluster="c2")) as second,
        harness.bus.subscribe(commands("all.slice.cancel", cluster="")) as every,
    ):
        await harness.bus.publish(cancel(1, "c1"), cluster="c1")
        await harness.bus.publish(cancel(2, "c2"), cluster="c2")
        await harness.bus.publish(cancel(3, ""))
        assert (await one(first)).message == cancel(1, "c1")
        assert (await one(second)).message == cancel(2, "c2")
        seen = [delivery.message for delivery in await drain(every, 3)]
        assert seen == [cancel(1, "c1"), cancel(2, "c2"), cancel(3, "")]
        await assert_silent(first)
        await assert_silent(second)


@case
async def every_queue_gets_its_own_copy(harness: BusHarness) -> None:
    async with (
        harness.bus.subscribe(commands("a.slice.cancel")) as first,
        harness.bus.subscribe(commands("b.slice.cancel")) as second,
    ):
        await harness.bus.publish(cancel(1), cluster="c1")
        await (await one(first)).ack()
        assert (await one(second)).message == cancel(1)


@case
async def one_queue_may_take_several_types(harness: BusHarness) -> None:
    both = commands("jobs", types=(JobCancel, SliceCancel), cluster="")
    async with harness.bus.subscribe(both) as inbox:
        await harness.bus.publish(JobCancel(id="j"))
        await harness.bus.publish(cancel(1), cluster="c1")
        assert [delivery.type for delivery in await drain(inbox, 2)] == [JobCancel, SliceCancel]


@case
async def competing_consumers_share_the_work(harness: BusHarness) -> None:
    seen: list[Message] = []

    async def consume(inbox: Inbox) -> int:
        count = 0
        while deliveries := await inbox.receive(1, 1.0):
            for delivery in deliveries:
                seen.append(delivery.message)
                count += 1
                await asyncio.sleep(0.001)
                await delivery.ack()
        return count

    async with (
        harness.other() as other,
        harness.bus.subscribe(commands(prefetch=2)) as first,
        other.subscribe(commands(prefetch=2)) as second,
    ):
        for number in range(40):
            await harness.bus.publish(cancel(number), cluster="c1")
        async with asyncio.TaskGroup() as tasks:
            counts = [tasks.create_task(consume(inbox)) for inbox in (first, second)]
        assert all(count.result() > 0 for count in counts), "one of them did nothing"
    assert sorted(str(message) for message in seen) == sorted(
        str(cancel(number)) for number in range(40)
    )


@case
async def a_durable_queue_keeps_messages_while_nobody_consumes(harness: BusHarness) -> None:
    async with harness.bus.subscribe(commands()):
        pass
    for number in range(3):
        await harness.bus.publish(cancel(number), cluster="c1")
    async with harness.other() as later, later.subscribe(commands()) as inbox:
        deliveries = await drain(inbox, 3)
        assert [delivery.message for delivery in deliveries] == [cancel(n) for n in range(3)]
        assert not any(delivery.redelivered for delivery in deliveries)


@case
async def each_reader_of_snapshots_has_its_own_queue(harness: BusHarness) -> None:
    snapshots = Subscription(queue="reader.credit", types=(Credit,), durable=False)
    async with harness.bus.subscribe(snapshots) as first:
        async with harness.bus.subscribe(snapshots) as second:
            await harness.bus.publish(credit(1), cluster="c1")
            for inbox in (first, second):
                delivery = await one(inbox)
                assert delivery.message == credit(1)
                await delivery.ack()
        await harness.bus.publish(credit(2), cluster="c1")
        assert (await one(first)).message == credit(2)
    # Nobody reads now: nothing is kept for the next one.
    await harness.bus.publish(credit(3), cluster="c1")
    async with harness.bus.subscribe(snapshots) as again:
        await assert_silent(again)


@case
async def a_full_snapshot_queue_drops_its_oldest(harness: BusHarness) -> None:
    snapshots = Subscription(
        queue="reader.credit", types=(Credit,), durable=False, max_length=5, prefetch=1
    )
    async with harness.bus.subscribe(snapshots) as inbox:
        await harness.bus.publish(credit(0), cluster="c1")
        held = await one(inbox)  # fills the prefetch, so that the rest stays in the queue
        for seq in range(1, 21):
            await harness.bus.publish(credit(seq), cluster="c1")
        await held.ack()
        seen = []
        while deliveries := await inbox.receive(1, SILENCE):
            for delivery in deliveries:
                assert isinstance(delivery.message, Credit)
                seen.append(delivery.message.seq)
                await delivery.ack()
        assert seen == [16, 17, 18, 19, 20]


@case
async def prefetch_bounds_what_a_consumer_holds(harness: BusHarness) -> None:
    async with harness.bus.subscribe(commands(prefetch=3)) as inbox:
        for number in range(5):
            await harness.bus.publish(cancel(number), cluster="c1")
        held = await drain(inbox, 3)
        await assert_silent(inbox)
        await held[0].ack()
        assert (await one(inbox)).message == cancel(3)
        await assert_silent(inbox)


@case
async def single_active_gives_one_consumer_everything_until_it_goes(harness: BusHarness) -> None:
    subscription = commands(single_active=True)
    async with (
        harness.other() as other,
        harness.bus.subscribe(subscription) as active,
        other.subscribe(subscription) as standby,
    ):
        for number in range(3):
            await harness.bus.publish(cancel(number), cluster="c1")
        for delivery in await drain(active, 3):
            await delivery.ack()
        await assert_silent(standby)
    # The first leaves, the second takes over what it held.
    async with harness.other() as other:
        async with harness.bus.subscribe(subscription) as first:
            await harness.bus.publish(cancel(7), cluster="c1")
            assert (await one(first)).message == cancel(7)
            second_context = other.subscribe(subscription)
            second = await second_context.__aenter__()
            await assert_silent(second)
        try:
            delivery = await one(second)
            assert delivery.message == cancel(7)
            assert delivery.redelivered
            await delivery.ack()
        finally:
            await second_context.__aexit__(None, None, None)


@case
async def receive_returns_empty_after_its_time(harness: BusHarness) -> None:
    loop = asyncio.get_running_loop()
    async with harness.bus.subscribe(commands()) as inbox:
        began = loop.time()
        assert not await inbox.receive(10, 0.3)
        assert 0.25 <= loop.time() - began < 3
        assert not await inbox.receive(10, 0)


@case
async def receive_takes_no_more_than_asked(harness: BusHarness) -> None:
    async with harness.bus.subscribe(commands()) as inbox:
        for number in range(5):
            await harness.bus.publish(cancel(number), cluster="c1")
        seen = 0
        while seen < 5:
            deliveries = await inbox.receive(2, PATIENCE)
            assert 1 <= len(deliveries) <= 2
            seen += len(deliveries)


@case
async def a_cancelled_receive_loses_nothing(harness: BusHarness) -> None:
    async with harness.bus.subscribe(commands()) as inbox:
        waiting = asyncio.ensure_future(inbox.receive(1))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await harness.bus.publish(cancel(1), cluster="c1")
        assert (await one(inbox)).message == cancel(1)


# -- settling --------------------------------------------------------------------------------------


@case
async def what_a_consumer_held_is_delivered_again(harness: BusHarness) -> None:
    async with harness.other() as mortal, mortal.subscribe(commands()) as inbox:
        for number in range(3):
            await harness.bus.publish(cancel(number), cluster="c1")
        held = await drain(inbox, 3)
        await held[1].ack()
    await held[0].ack()  # too late: no effect, no error
    async with harness.bus.subscribe(commands()) as inbox:
        # One by one: a bus may give out those that ended a consumer only singly.
        for message in (cancel(0), cancel(2)):
            delivery = await one(inbox)
            assert delivery.message == message
            assert delivery.redelivered
            assert delivery.attempt == 2
            await delivery.ack()
        await assert_silent(inbox)


@case
async def a_second_settlement_is_ignored(harness: BusHarness) -> None:
    async with harness.bus.subscribe(commands()) as inbox:
        await harness.bus.publish(cancel(1), cluster="c1")
        await harness.bus.publish(cancel(2), cluster="c1")
        first, second = await drain(inbox, 2)
        await first.ack()
        await first.ack()
        await first.retry(0.0, Reason.INTERNAL)
        await first.dead_letter(Reason.INTERNAL)
        await second.ack()
        await assert_silent(inbox)
        assert not await harness.bus.dead_letters("q.slice.cancel")


@case
async def a_retry_comes_back_not_sooner_and_counted(harness: BusHarness) -> None:
    loop = asyncio.get_running_loop()
    async with harness.bus.subscribe(commands()) as inbox:
        await harness.bus.publish(
            cancel(1), cluster="c1", message_id="id-1", correlation_id="co-1", reply_to="r-1"
        )
        for attempt in (1, 2):
            delivery = await one(inbox)
            assert delivery.attempt == attempt
            await delivery.retry(0.5, Reason.CLUSTER_UNAVAILABLE, "not now")
            began = loop.time()
        delivery = await one(inbox)
        assert 0.5 <= loop.time() - began < 3
        assert delivery.attempt == 3
        assert delivery.redelivered
        assert delivery.message == cancel(1)
        assert (delivery.message_id, delivery.correlation_id) == ("id-1", "co-1")
        assert delivery.reply_to == "r-1"
        await delivery.ack()
        await assert_silent(inbox)


@case
async def a_short_retry_does_not_wait_for_a_long_one(harness: BusHarness) -> None:
    """B20."""
    loop = asyncio.get_running_loop()
    async with harness.bus.subscribe(commands()) as inbox:
        for number in range(3):
            await harness.bus.publish(cancel(number), cluster="c1")
        slow, quick, other = await drain(inbox, 3)
        await slow.retry(600.0, Reason.CLUSTER_UNAVAILABLE)
        await quick.retry(1.0, Reason.CLUSTER_UNAVAILABLE)
        began = loop.time()
        await other.ack()
        # Fresh ones pass meanwhile.
        await harness.bus.publish(cancel(9), cluster="c1")
        fresh = await one(inbox)
        assert fresh.message == cancel(9)
        assert fresh.attempt == 1
        await fresh.ack()
        back = await one(inbox)
        assert back.message == cancel(1)
        assert 1.0 <= loop.time() - began < 4.0
        await back.ack()
        await assert_silent(inbox)


@case
async def a_retry_keeps_its_count_through_a_consumers_end(harness: BusHarness) -> None:
    async with harness.other() as mortal, mortal.subscribe(commands()) as inbox:
        await harness.bus.publish(cancel(1), cluster="c1")
        await (await one(inbox)).retry(0.1, Reason.CLUSTER_UNAVAILABLE)
        assert (await one(inbox)).attempt == 2
    async with harness.bus.subscribe(commands()) as inbox:
        delivery = await one(inbox)
        assert delivery.attempt == 3
        await delivery.dead_letter(Reason.INVALID_SPEC, "given up")
    assert await eventually_parked(harness.bus, "q.slice.cancel", 1) == [
        ("invalid-spec", "given up", 3)
    ]


@case
async def a_message_that_ends_its_consumers_is_parked(harness: BusHarness) -> None:
    """B16: tried three times, then parked; those behind it are handled."""
    handled: list[Message] = []
    tries = 0
    async with harness.bus.subscribe(commands(prefetch=10)):
        pass
    await harness.bus.publish(cancel(666), cluster="c1", message_id="poison")
    for number in range(5):
        await harness.bus.publish(cancel(number), cluster="c1")
    for _ in range(12):
        async with harness.other() as mortal, mortal.subscribe(commands(prefetch=10)) as inbox:
            while deliveries := await inbox.receive(1, 1.0):
                (delivery,) = deliveries
                if delivery.message_id == "poison":
                    tries += 1
                    assert delivery.attempt == tries
                    break  # the process dies with all that it holds
                handled.append(delivery.message)
                await delivery.ack()
            else:
                break
    assert tries == 3
    assert sorted(map(str, handled)) == sorted(str(cancel(number)) for number in range(5))
    parked = await harness.bus.dead_letters("q.slice.cancel")
    assert [(one.message_id, one.reason) for one in parked] == [("poison", "poison")]
    assert parked[0].type_name == "slice.cancel.v1"


@case
async def a_batch_does_not_share_the_fate_of_its_culprit(harness: BusHarness) -> None:
    """B16 for consumers that take batches: the innocent ones are never parked."""
    handled: set[str] = set()
    poison_tries = 0
    async with harness.bus.subscribe(commands(prefetch=50)):
        pass
    for number in range(20):
        name = "poison" if number == 7 else f"good-{number}"
        await harness.bus.publish(cancel(number), cluster="c1", message_id=name)
    for _ in range(12):
        async with harness.other() as mortal, mortal.subscribe(commands(prefetch=50)) as inbox:
            while deliveries := await inbox.receive(50, 1.0):
                if any(delivery.message_id == "poison" for delivery in deliveries):
                    poison_tries += 1
                    break  # the whole batch is lost with the process
                for delivery in deliveries:
                    handled.add(delivery.message_id)
                    await delivery.ack()
            else:
                break
    assert poison_tries <= 3
    assert handled == {f"good-{number}" for number in range(20) if number != 7}
    parked = await harness.bus.dead_letters("q.slice.cancel")
    assert [(one.message_id, one.reason) for one in parked] == [("poison", "poison")]


@case
async def a_dead_letter_keeps_its_story(harness: BusHarness) -> None:
    async with harness.bus.subscribe(commands()) as inbox:
        await harness.bus.publish(cancel(1), cluster="c1", message_id="id-1")
        delivery = await one(inbox)
        body = delivery.body
        await delivery.dead_letter(Reason.UNKNOWN_JOB, "no job of this id")
        await assert_silent(inbox)
    for _ in range(2):  # looking does not take it away
        await eventually_parked(harness.bus, "q.slice.cancel", 1)
        (letter,) = await harness.bus.dead_letters("q.slice.cancel")
        assert letter.queue == "q.slice.cancel"
        assert letter.type_name == "slice.cancel.v1"
        assert letter.message_id == "id-1"
        assert letter.body == body
        assert (letter.reason, letter.detail) == ("unknown-job", "no job of this id")
        assert letter.attempt == 1
    assert not await harness.bus.dead_letters("nobody.has.this.queue")


# -- bad input -------------------------------------------------------------------------------------


@case
async def an_undecodable_body_is_parked_and_answered(harness: BusHarness) -> None:
    told: list[Undecodable] = []

    def answer(undecodable: Undecodable) -> Message:
        told.append(undecodable)
        error = undecodable.error
        return JobAnswer(
            job_id="",
            accepted=False,
            reason=error.reason,
            field=error.field if isinstance(error, InvalidFieldError) else "",
        )

    jobs = Subscription(queue="jobs", types=(JobCancel,), cluster="", on_undecodable=answer)
    async with harness.bus.answers() as (address, answers), harness.bus.subscribe(jobs) as inbox:
        bad: list[tuple[bytes, str | None]] = [
            (b"\xff\x00 not json", None),
            (b'{"id": 7}', None),
            (b'{"id": "j", "colour": "red"}', None),
            (b'{"id": "j"}', "job.cancel.v9"),
            (b'{"id": "j"}', "slice.cancel.v1"),
            (b'{"id": "' + b"j" * (1 << 20) + b'"}', None),
        ]
        for number, (body, claimed) in enumerate(bad):
            await harness.bus.publish_body(
                "job.cancel.v1",
                body,
                message_id=f"bad-{number}",
                correlation_id=f"co-{number}",
                reply_to=address,
                type_property=claimed,
            )
        await harness.bus.publish(JobCancel(id="good"))
        delivery = await one(inbox)
        assert delivery.message == JobCancel(id="good"), "a bad one reached the service"
        await delivery.ack()
        replies = await drain(answers, len(bad))
        found = {
            reply.correlation_id: (str(reply.message.reason), reply.message.field)
            for reply in replies
            if isinstance(reply.message, JobAnswer)
        }
        assert found == {
            "co-0": ("malformed", "body"),
            "co-1": ("malformed", "id"),
            "co-2": ("malformed", "colour"),
            "co-3": ("wrong-version", "type"),
            "co-4": ("wrong-version", "type"),
            "co-5": ("too-large", ""),
        }
    parked = await eventually_parked(harness.bus, "jobs", len(bad))
    assert [reason for reason, _, _ in parked] == [
        "malformed",
        "malformed",
        "malformed",
        "wrong-version",
        "wrong-version",
        "too-large",
    ]
    assert "id" in parked[1][1]
    assert [one.message_id for one in told] == [f"bad-{number}" for number in range(len(bad))]


@case
async def a_raw_subscription_gets_the_body_as_it_came(harness: BusHarness) -> None:
    raw = Subscription(queue="raw", types=(JobSubmit,), raw=True)
    async with harness.bus.subscribe(raw) as inbox:
        await harness.bus.publish_body("job.submit.v1", b'{"any": "thing"')
        delivery = await one(inbox)
        assert delivery.body == b'{"any": "thing"'
        assert delivery.type is JobSubmit
        try:
            message = delivery.message
        except PermanentError:
            pass
        else:
            raise AssertionError(f"decoded all the same: {message}")
        await delivery.dead_letter(Reason.MALFORMED, "as it came")
    assert await eventually_parked(harness.bus, "raw", 1) == [("malformed", "as it came", 1)]


@case
async def an_oversized_body_is_refused_before_it_harms_the_channel(harness: BusHarness) -> None:
    """B18: refused locally, while a parallel publish on the same channel succeeds."""
    huge = JobSubmit(id="huge", name="n", command=["x" * (40 << 20)])
    async with harness.bus.subscribe(commands()) as inbox:

        async def publish_huge() -> None:
            refusal = await refused(harness.bus.publish(huge))
            assert refusal.reason is Reason.TOO_LARGE, refusal

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publish_huge())
            tasks.create_task(harness.bus.publish(cancel(1), cluster="c1"))
        assert (await one(inbox)).message == cancel(1)


# -- who asks, and where answers go ----------------------------------------------------------------


@case
async def answers_reach_the_one_who_asked(harness: BusHarness) -> None:
    jobs = Subscription(queue="jobs", types=(JobCancel,))
    async with (
        harness.other() as other,
        harness.bus.subscribe(jobs) as inbox,
        other.answers() as (address, answers),
        other.answers() as (second, silent),
    ):
        assert address != second
        await other.publish(JobCancel(id="j"), reply_to=address, correlation_id="co-1")
        delivery = await one(inbox)
        answer = JobAnswer(job_id="j", accepted=True)
        await harness.bus.publish(
            answer, to=delivery.reply_to, correlation_id=delivery.correlation_id
        )
        await delivery.ack()
        reply = await one(answers)
        assert reply.message == answer
        assert reply.correlation_id == "co-1"
        await assert_silent(silent)


@case
async def an_answer_to_someone_gone_is_dropped(harness: BusHarness) -> None:
    async with harness.other() as other, other.answers() as (address, _):
        pass
    await harness.bus.publish(JobAnswer(job_id="j", accepted=True), to=address)


@case
async def the_tenant_is_the_user_that_the_broker_knows(harness: BusHarness) -> None:
    jobs = Subscription(queue="jobs", types=(JobCancel,))
    async with harness.bus.subscribe(jobs) as inbox:
        await harness.user_bus.publish(JobCancel(id="a"))
        await harness.bus.publish(JobCancel(id="b"))
        first, second = await drain(inbox, 2)
        assert first.tenant == harness.user
        assert second.tenant == ""
        await first.retry(0.0, Reason.INTERNAL)
        again = await one(inbox)
        assert again.tenant == harness.user, "a retry must not lose the tenant"


@case
async def a_bus_that_works_says_so(harness: BusHarness) -> None:
    assert harness.bus.ready() == (True, "")
