"""The bus in memory: for one process, for tests and for virtual time.

It keeps the promises of the port and none beyond: what a real broker can do to a message (double,
delay, reorder, lose the confirmation) it does on request, seeded. It owns no task: deliveries are
pulled by their consumer, delays are timers of the running loop.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from springtide_shared.errors import (
    InvalidFieldError,
    PermanentError,
    Reason,
    SpringtideError,
    TransientError,
)
from springtide_shared.messages.base import (
    Kind,
    Message,
    decode,
    encode,
    type_name,
    type_of,
)
from springtide_shared.ports.bus import DeadLetter, Delivery, Inbox, Subscription, Undecodable
from springtide_shared.ports.clock import Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong, each with its probability per message (and per queue that takes it)."""

    topics: tuple[str, ...] = ()
    """Which topics it strikes; empty: all."""
    seed: int = 0
    unconfirmed: float = 0.0
    """The publisher gets a TransientError; every second time the message was taken all the same."""
    lost: float = 0.0
    """Snapshots, broadcasts and answers only: confirmed, yet nobody gets it."""
    doubled: float = 0.0
    delayed: float = 0.0
    delay_seconds: float = 5.0
    """Longest delay; each is drawn evenly between 0 and this."""
    reordered: float = 0.0
    """Overtaken by the next message for the same queue."""


class Item:
    """One message in one queue."""

    __slots__ = (
        "body",
        "correlation_id",
        "deaths",
        "message",
        "message_id",
        "note",
        "reply_to",
        "retries",
        "seq",
        "tenant",
        "type_name",
    )

    def __init__(
        self,
        type_name: str,
        body: bytes,
        message: Message | None,
        message_id: str,
        correlation_id: str,
        reply_to: str,
        tenant: str,
    ) -> None:
        self.type_name = type_name
        self.body = body
        self.message = message
        """Set only where the broker passes structs instead of bodies."""
        self.message_id = message_id
        self.correlation_id = correlation_id
        self.reply_to = reply_to
        self.tenant = tenant
        self.seq = 0
        self.deaths = 0
        self.retries = 0
        self.note = ""

    def copy(self) -> Item:
        return Item(
            self.type_name,
            self.body,
            self.message,
            self.message_id,
            self.correlation_id,
            self.reply_to,
            self.tenant,
        )


class _Queue:
    """A queue with its consumers; the first of them is the active one if only one may be."""

    __slots__ = (
        "again",
        "consumers",
        "dead",
        "delivery_limit",
        "dropped",
        "durable",
        "later",
        "max_length",
        "name",
        "overtaken",
        "ready",
        "seq",
        "single_active",
        "waiters",
    )

    def __init__(
        self,
        name: str,
        *,
        durable: bool,
        single_active: bool,
        delivery_limit: int,
        max_length: int,
    ) -> None:
        self.name = name
        self.durable = durable
        self.single_active = single_active
        self.delivery_limit = delivery_limit
        self.max_length = max_length
        self.ready: deque[Item] = deque()
        self.again: deque[Item] = deque()
        """What consumers held when they ended. Given out singly: a consumer that ends with a whole
        batch must not make each message of it look like the culprit."""
        self.later = 0
        """Items on a timer: retries and delays."""
        self.overtaken: list[Item] = []
        """Held back by a fault until the next message has passed."""
        self.dead: list[DeadLetter] = []
        self.dropped = 0
        self.seq = 0
        self.consumers: list[_MemoryInbox] = []
        self.waiters: list[tuple[_MemoryInbox, asyncio.Future[None]]] = []

    def put(self, item: Item) -> None:
        self.seq += 1
        item.seq = self.seq
        ready = self.ready
        ready.append(item)
        if self.overtaken:
            held, self.overtaken = self.overtaken, []
            for late in held:
                self.seq += 1
                late.seq = self.seq
                ready.append(late)
        if not self.durable:
            while len(ready) > self.max_length:
                ready.popleft()
                self.dropped += 1
        if self.waiters:
            self.wake()

    def put_later(self, after: float, item: Item) -> None:
        self.later += 1
        asyncio.get_running_loop().call_later(after, self._due, item)

    def _due(self, item: Item) -> None:
        self.later -= 1
        self.put(item)

    def hold_back(self, item: Item, at_most: float) -> None:
        self.overtaken.append(item)
        asyncio.get_running_loop().call_later(at_most, self._release, item)

    def _release(self, item: Item) -> None:
        if item in self.overtaken:
            self.overtaken.remove(item)
            self.put(item)

    def give_back(self, items: Iterable[Item]) -> None:
        """What a consumer held when it ended: to be tried again in the old order, or parked."""
        for item in sorted(items, key=lambda one: one.seq):
            item.deaths += 1
            if not self.durable:
                continue
            if item.deaths >= self.delivery_limit:
                self.park(
                    item,
                    Reason.POISON,
                    f"{item.deaths} consumers ended while they held it{item.note}",
                )
            else:
                self.again.append(item)

    def park(self, item: Item, reason: Reason, detail: str) -> None:
        self.dead.append(
            DeadLetter(
                queue=self.name,
                type_name=item.type_name,
                message_id=item.message_id,
                body=item.body if item.message is None else encode(item.message),
                reason=str(reason),
                detail=detail,
                attempt=1 + item.deaths + item.retries,
            )
        )

    def wake(self) -> None:
        """Let as many waiting consumers look as there are items, longest waiting first."""
        left = len(self.ready) + len(self.again)
        kept: list[tuple[_MemoryInbox, asyncio.Future[None]]] = []
        for waiter in self.waiters:
            inbox, future = waiter
            if future.done():
                continue
            if left > 0 and inbox.can_take():
                future.set_result(None)
                left -= 1
            else:
                kept.append(waiter)
        self.waiters = kept

    def forget(self, waiter: tuple[_MemoryInbox, asyncio.Future[None]]) -> bool:
        """Whether it was still waiting, that is had not been woken."""
        if waiter not in self.waiters:
            return False
        self.waiters.remove(waiter)
        return True

    def unsettled(self) -> int:
        return sum(len(consumer.held) for consumer in self.consumers)


class _MemoryDelivery:
    """One handing-over."""

    __slots__ = ("_body", "_inbox", "_item", "_message", "_settled", "_type")

    def __init__(
        self, inbox: _MemoryInbox, item: Item, cls: type[Message], message: Message | None
    ) -> None:
        self._inbox = inbox
        self._item = item
        self._type = cls
        self._message = message
        self._settled = False

    @property
    def message(self) -> Message:
        if self._message is None:
            raise PermanentError(Reason.MALFORMED, "this subscription is raw: read the body")
        return self._message

    @property
    def body(self) -> bytes:
        item = self._item
        return item.body if item.message is None else encode(item.message)

    @property
    def type(self) -> type[Message]:
        return self._type

    @property
    def attempt(self) -> int:
        return 1 + self._item.deaths + self._item.retries

    @property
    def redelivered(self) -> bool:
        return self._item.deaths + self._item.retries > 0

    @property
    def message_id(self) -> str:
        return self._item.message_id

    @property
    def correlation_id(self) -> str:
        return self._item.correlation_id

    @property
    def reply_to(self) -> str:
        return self._item.reply_to

    @property
    def tenant(self) -> str:
        return self._item.tenant

    def _settle(self) -> bool:
        if self._settled or self._inbox.closed:
            return False
        self._settled = True
        return self._inbox.settle(self._item)

    async def ack(self) -> None:
        self._settle()

    async def retry(self, after: float, reason: Reason, detail: str = "") -> None:
        if self._settle():
            self._item.retries += 1
            self._item.note = f"; last put off for {reason} {detail}".rstrip()
            self._inbox.queue.put_later(max(0.0, after), self._item)

    async def dead_letter(self, reason: Reason, detail: str = "") -> None:
        if self._settle():
            self._inbox.queue.park(self._item, reason, detail)


class _MemoryInbox:
    """The consuming end; takes from its queue when asked, so nothing is buffered twice."""

    __slots__ = ("_alone", "_broker", "closed", "held", "queue", "subscription")

    def __init__(self, broker: MemoryBroker, queue: _Queue, subscription: Subscription) -> None:
        self._broker = broker
        self.queue = queue
        self.subscription = subscription
        self.held: dict[int, Item] = {}
        self._alone = 0
        """Sequence number of the one it holds from those to be tried again; 0: none."""
        self.closed = False

    def room(self) -> int:
        """How many more deliveries this consumer may hold now."""
        if self.queue.single_active and self.queue.consumers[0] is not self:
            return 0
        return self.subscription.prefetch - len(self.held)

    def can_take(self) -> bool:
        """Whether there is something for this consumer."""
        queue = self.queue
        return bool(queue.ready or (queue.again and not self._alone)) and self.room() > 0

    def settle(self, item: Item) -> bool:
        if self.held.pop(item.seq, None) is None:
            return False
        if item.seq == self._alone:
            self._alone = 0
        if self.queue.waiters:
            self.queue.wake()
        return True

    async def receive(self, limit: int = 1, timeout: float | None = None) -> Sequence[Delivery]:
        taken = self._take(limit)
        if taken or (timeout is not None and timeout <= 0):
            await asyncio.sleep(0)  # a consumer of a full queue must let others run
            return taken
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            future: asyncio.Future[None] = loop.create_future()
            waiter = (self, future)
            self.queue.waiters.append(waiter)
            timer = None if deadline is None else loop.call_at(deadline, _resolve, future)
            try:
                await future
            except asyncio.CancelledError:
                if not self.queue.forget(waiter):
                    self.queue.wake()  # woken and cancelled at once: the next one must hear of it
                raise
            finally:
                if timer is not None:
                    timer.cancel()
            self.queue.forget(waiter)
            taken = self._take(limit)
            if self.queue.waiters:
                self.queue.wake()
            if taken or (deadline is not None and loop.time() >= deadline):
                return taken

    def _take(self, limit: int) -> list[Delivery]:
        if self.closed:
            raise TransientError(
                Reason.BUS_UNAVAILABLE, "the consumer was closed", queue=self.queue.name
            )
        queue = self.queue
        taken: list[Delivery] = []
        raw = self.subscription.raw
        while len(taken) < limit and self.can_take():
            again = bool(queue.again) and not self._alone
            item = queue.again.popleft() if again else queue.ready.popleft()
            try:
                cls = expected_type(item.type_name, self.subscription)
                message = item.message
                if message is None and not raw:
                    message = decode(cls, item.body)
            except SpringtideError as error:
                self._undecodable(item, error)
                continue
            self.held[item.seq] = item
            if again:
                self._alone = item.seq
            self._broker.delivered[cls.topic] += 1
            taken.append(_MemoryDelivery(self, item, cls, None if raw else message))
        return taken

    def _undecodable(self, item: Item, error: SpringtideError) -> None:
        self.queue.park(item, error.reason, error.detail)
        if self.subscription.on_undecodable is None:
            return
        answer = self.subscription.on_undecodable(
            Undecodable(
                type_name=item.type_name,
                message_id=item.message_id,
                correlation_id=item.correlation_id,
                tenant=item.tenant,
                body=item.body,
                error=error,
            )
        )
        if answer is not None and item.reply_to:
            self._broker.send(
                answer,
                to=item.reply_to,
                message_id=self._broker.next_id(),
                correlation_id=item.correlation_id or item.message_id,
            )


def expected_type(name: str, subscription: Subscription) -> type[Message]:
    """The message type of a delivery.

    Raises:
        InvalidFieldError: unknown to this build, or none that the subscription asked for.
    """
    cls = type_of(name)
    if subscription.types and cls not in subscription.types:
        wanted = ", ".join(type_name(one) for one in subscription.types)
        raise InvalidFieldError("type", name, f"this queue takes {wanted}", Reason.WRONG_VERSION)
    return cls


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class MemoryBroker:
    """What all buses of one process share: queues, bindings, faults and counters.

    `codec` False passes structs instead of encoding and decoding each message: cheaper, but it no
    longer shows that a message survives the wire.
    """

    def __init__(self, *, codec: bool = True, faults: Sequence[Faults] = ()) -> None:
        self.codec = codec
        self.published: Counter[str] = Counter()
        """Messages taken, by topic (for messages per task)."""
        self.delivered: Counter[str] = Counter()
        """Deliveries handed out, by topic; a redelivery counts again."""
        self.available = True
        """False: an outage; publishing raises TransientError, queues keep what they have."""
        self._queues: dict[str, _Queue] = {}
        self._bindings: dict[str, list[tuple[str, _Queue]]] = {}
        self._routes: dict[tuple[str, str], tuple[_Queue, ...]] = {}
        self._ids = 0
        self._faults: list[tuple[Faults, random.Random]] = []
        self.set_faults(*faults)

    def set_faults(self, *faults: Faults) -> None:
        """From now on; the first that names a message's topic strikes it. None: all goes well."""
        self._faults = [(fault, random.Random(fault.seed)) for fault in faults]

    def next_id(self) -> str:
        """An identifier for a message or a queue, the same in every run."""
        self._ids += 1
        return f"m{self._ids:08d}"

    # -- queues ----------------------------------------------------------------------------------

    def declare(self, subscription: Subscription) -> None:
        """Make a durable queue and its bindings without consuming it."""
        self._declare_durable(subscription)

    def _declare_durable(self, subscription: Subscription) -> _Queue:
        queue = self._queues.get(subscription.queue)
        if queue is None:
            queue = _Queue(
                subscription.queue,
                durable=True,
                single_active=subscription.single_active,
                delivery_limit=subscription.delivery_limit,
                max_length=0,
            )
            self._queues[queue.name] = queue
        elif (queue.single_active, queue.delivery_limit) != (
            subscription.single_active,
            subscription.delivery_limit,
        ):
            raise PermanentError(
                Reason.INVALID_SPEC,
                "the queue exists with another single_active or delivery_limit",
                queue=queue.name,
            )
        self._bind(queue, subscription)
        return queue

    def _declare_own(self, subscription: Subscription) -> _Queue:
        queue = _Queue(
            f"{subscription.queue}.{self.next_id()}",
            durable=False,
            single_active=False,
            delivery_limit=1,
            max_length=subscription.max_length,
        )
        self._queues[queue.name] = queue
        self._bind(queue, subscription)
        return queue

    def _bind(self, queue: _Queue, subscription: Subscription) -> None:
        for cls in subscription.types:
            bound = self._bindings.setdefault(type_name(cls), [])
            if (subscription.cluster, queue) not in bound:
                bound.append((subscription.cluster, queue))
        self._routes.clear()

    def _delete(self, queue: _Queue) -> None:
        del self._queues[queue.name]
        for name, bound in self._bindings.items():
            self._bindings[name] = [one for one in bound if one[1] is not queue]
        self._routes.clear()

    def open(self, subscription: Subscription) -> _MemoryInbox:
        """A consumer of the subscription's queue."""
        queue = (
            self._declare_durable(subscription)
            if subscription.durable
            else self._declare_own(subscription)
        )
        inbox = _MemoryInbox(self, queue, subscription)
        queue.consumers.append(inbox)
        return inbox

    def close(self, inbox: _MemoryInbox) -> None:
        """End a consumer; what it holds goes back to its queue."""
        inbox.closed = True
        queue = inbox.queue
        queue.consumers.remove(inbox)
        waiting, queue.waiters = queue.waiters, []
        for waiter in waiting:
            if waiter[0] is inbox:
                _resolve(waiter[1])
            else:
                queue.waiters.append(waiter)
        queue.give_back(inbox.held.values())
        inbox.held.clear()
        if not queue.durable:
            self._delete(queue)
        else:
            queue.wake()

    def route(self, name: str, cluster: str) -> tuple[_Queue, ...]:
        """The queues that take a type for a cluster."""
        route = self._routes.get((name, cluster))
        if route is None:
            found: dict[str, _Queue] = {}
            for wanted, queue in self._bindings.get(name, ()):
                if wanted in ("", cluster):
                    found[queue.name] = queue
            route = self._routes[name, cluster] = tuple(found.values())
        return route

    # -- publishing ------------------------------------------------------------------------------

    def send(
        self,
        message: Message,
        *,
        cluster: str = "",
        to: str = "",
        message_id: str,
        correlation_id: str = "",
        reply_to: str = "",
        tenant: str = "",
    ) -> None:
        """Take one message into the queues it belongs to."""
        cls = type(message)
        # The size limit holds without the codec too, hence only codec=False skips the encoding.
        body, kept = (encode(message), None) if self.codec else (b"", message)
        item = Item(type_name(cls), body, kept, message_id, correlation_id, reply_to, tenant)
        self.send_item(item, cls.topic, cls.kind, cluster=cluster, to=to)

    def send_item(
        self, item: Item, topic: str, kind: Kind, *, cluster: str = "", to: str = ""
    ) -> None:
        """The same for a message that is encoded already; all messages pass here."""
        if not self.available:
            raise TransientError(Reason.BUS_UNAVAILABLE, "the broker is away", topic=topic)
        if to:
            queue = self._queues.get(to)
            queues: tuple[_Queue, ...] = () if queue is None else (queue,)
        else:
            queues = self.route(item.type_name, cluster)
        if not queues and kind in (Kind.COMMAND, Kind.FACT):
            raise PermanentError(
                Reason.CLUSTER_UNREACHABLE,
                "no queue takes it",
                topic=topic,
                cluster=cluster,
                to=to,
            )
        self.published[topic] += 1
        if self._faults:
            self._send_badly(item, topic, kind, queues)
            return
        last = len(queues) - 1
        for n, queue in enumerate(queues):
            queue.put(item if n == last else item.copy())

    def _send_badly(self, item: Item, topic: str, kind: Kind, queues: tuple[_Queue, ...]) -> None:
        struck = [one for one in self._faults if not one[0].topics or topic in one[0].topics]
        if not struck:
            for queue in queues:
                queue.put(item.copy())
            return
        faults, rng = struck[0]
        unconfirmed = rng.random() < faults.unconfirmed
        taken = not unconfirmed or rng.random() < 0.5
        if kind not in (Kind.COMMAND, Kind.FACT) and rng.random() < faults.lost:
            taken = False
        if taken:
            for queue in queues:
                copies = 2 if rng.random() < faults.doubled else 1
                for _ in range(copies):
                    if rng.random() < faults.delayed:
                        queue.put_later(rng.uniform(0.0, faults.delay_seconds), item.copy())
                    elif rng.random() < faults.reordered:
                        queue.hold_back(item.copy(), faults.delay_seconds)
                    else:
                        queue.put(item.copy())
        if unconfirmed:
            raise TransientError(
                Reason.BUS_UNAVAILABLE, "not confirmed; it may have been taken", topic=topic
            )

    # -- looking in ------------------------------------------------------------------------------

    def dead_letters(self, queue: str) -> list[DeadLetter]:
        """What is parked for a durable queue, oldest first."""
        found = self._queues.get(queue)
        return [] if found is None else list(found.dead)

    def depth(self, queue: str) -> int:
        """Messages of a queue that are not settled: waiting, on a timer, or held by consumers."""
        found = self._queues[queue]
        return (
            len(found.ready)
            + len(found.again)
            + found.later
            + len(found.overtaken)
            + found.unsettled()
        )

    def assert_nothing_left(self, *, parked: bool = False) -> None:
        """Every message in a durable queue has been settled, and (unless `parked`) none parked.

        Raises:
            AssertionError: names each queue with what it still has.
        """
        left = []
        for name, queue in self._queues.items():
            if not queue.durable:
                continue
            if depth := self.depth(name):
                left.append(f"{name}: {depth} not settled ({queue.unsettled()} of them held)")
            if queue.dead and not parked:
                reasons = ", ".join(f"{one.type_name} {one.reason}" for one in queue.dead[:5])
                left.append(f"{name}: {len(queue.dead)} parked ({reasons})")
        if left:
            raise AssertionError("messages are left: " + "; ".join(left))


class InMemoryBus:
    """One user's bus on a broker. `user` becomes the `tenant` of what it publishes.

    `ids` makes message ids; without it they are numbered by the broker.
    """

    def __init__(self, broker: MemoryBroker, user: str = "", ids: Ids | None = None) -> None:
        self.broker = broker
        self.user = user
        self._ids = ids

    def as_user(self, user: str) -> InMemoryBus:
        """The same broker under another user."""
        return InMemoryBus(self.broker, user, self._ids)

    def _new_id(self) -> str:
        return self.broker.next_id() if self._ids is None else self._ids.new()

    async def publish(
        self,
        message: Message,
        *,
        cluster: str = "",
        message_id: str = "",
        correlation_id: str = "",
        reply_to: str = "",
        to: str = "",
    ) -> None:
        self.broker.send(
            message,
            cluster=cluster,
            to=to,
            message_id=message_id or self._new_id(),
            correlation_id=correlation_id,
            reply_to=reply_to,
            tenant=self.user,
        )
        await asyncio.sleep(0)  # a confirmation takes a turn of the loop, as with a real broker

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
        """Publish bytes as they are under the type `name`, as a stranger's library would.

        `type_property` differs from `name` only where a publisher is mistaken.

        Raises:
            PermanentError: no queue takes the type.
        """
        item = Item(
            name, body, None, message_id or self._new_id(), correlation_id, reply_to, self.user
        )
        queues = self.broker.route(name, cluster)
        if not queues:
            raise PermanentError(Reason.CLUSTER_UNREACHABLE, "no queue takes it", type=name)
        item.type_name = name if type_property is None else type_property
        for queue in queues:
            queue.put(item.copy())
        await asyncio.sleep(0)

    @asynccontextmanager
    async def subscribe(self, subscription: Subscription) -> AsyncIterator[Inbox]:
        """Consume while the context is open; leaving it gives back what is not settled."""
        inbox = self.broker.open(subscription)
        try:
            yield inbox
        finally:
            self.broker.close(inbox)

    @asynccontextmanager
    async def answers(self) -> AsyncIterator[tuple[str, Inbox]]:
        """A private address for `reply_to`, and its inbox."""
        inbox = self.broker.open(
            Subscription(queue="answers", types=(), durable=False, max_length=10_000)
        )
        try:
            yield inbox.queue.name, inbox
        finally:
            self.broker.close(inbox)

    async def dead_letters(self, queue: str, limit: int = 100) -> Sequence[DeadLetter]:
        """The messages parked for a durable queue, oldest first; they stay there."""
        return self.broker.dead_letters(queue)[:limit]

    def ready(self) -> tuple[bool, str]:
        """Whether publishing and consuming work now; else the reason."""
        return (True, "") if self.broker.available else (False, "the broker is away")
