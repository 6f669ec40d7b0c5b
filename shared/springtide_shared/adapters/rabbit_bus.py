"""The bus on RabbitMQ (3.10 to 4.3), through aio-pika.

Two connections: the broker stops reading from a connection that publishes while it is short of
memory or disk, and settling must not wait behind that. Settling is by ack or by publishing the
message anew and then ack, so that counters and reasons travel with it; see `rabbit_topology` for
the queues and `rabbit_wire` for the headers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractIncomingMessage, ExchangeType
from aio_pika.exceptions import (
    CONNECTION_EXCEPTIONS,
    ChannelNotFoundEntity,
    DeliveryError,
    PublishError,
)
from yarl import URL

from springtide_shared.adapters import rabbit_topology as topology
from springtide_shared.adapters import rabbit_wire as wire
from springtide_shared.adapters.clock import SystemClock, SystemIds
from springtide_shared.adapters.memory_bus import expected_type
from springtide_shared.adapters.rabbit_link import RabbitLink, translated
from springtide_shared.errors import PermanentError, Reason, SpringtideError, TransientError
from springtide_shared.messages.base import (
    Kind,
    Message,
    decode,
    encode,
    routing_key,
    type_name,
)
from springtide_shared.ports.bus import DeadLetter, Delivery, Inbox, Subscription, Undecodable
from springtide_shared.ports.clock import Clock, Ids

_ANSWERS_KEPT: Final = 10_000
_OPENING: Final = "it is being opened"


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitSettings:
    """How to reach and use the broker. Times in seconds."""

    url: str
    """`amqp(s)://user:password@host:port/vhost`; holds a secret, so it is never shown."""
    exchange: str = "springtide"
    user: str = ""
    """The broker's name for us; empty: the URL's. Needed where a certificate names the user."""
    identify: bool = False
    """Publish under our user, which consumers then see as the tenant."""
    trusted_publishers: tuple[str, ...] = ()
    """Users whose word on the tenant is believed: the gateway, which checked a token."""
    publish_limit: float = 10.0
    """Until a publication is confirmed; a broker with an alarm neither confirms nor refuses."""
    connect_limit: float = 10.0
    restore_limit: float = 120.0
    """How long a consumer tries to come back before it gives up."""
    heartbeat: int = 15
    """The client library gives a silent broker up after about three times this."""
    name: str = "springtide"
    """Shown for our connections in the broker's management."""

    def __repr__(self) -> str:
        return f"RabbitSettings({URL(self.url).with_password(None)}, exchange={self.exchange})"


class _Core:
    """What all handles of one bus share: links, publishing channel, known delay queues."""

    def __init__(self, settings: RabbitSettings, clock: Clock, ids: Ids) -> None:
        url = URL(settings.url)
        self.settings = settings
        self.clock = clock
        self.ids = ids
        self.user = settings.user or url.user or ""
        if not self.user:
            raise PermanentError(
                Reason.INVALID_SPEC,
                "the broker's URL names no user; put it there or into the setting `user`",
            )
        self.believed = frozenset({self.user, *settings.trusted_publishers})
        url = url.update_query(heartbeat=str(settings.heartbeat))
        self.outgoing = RabbitLink(url, f"{settings.name}-out", ids, settings.connect_limit)
        self.incoming = RabbitLink(url, f"{settings.name}-in", ids, settings.connect_limit)
        self.trouble = ""
        """Why the last publication failed; empty once one succeeded."""
        self._publishing: AbstractChannel | None = None
        self._exchanges: dict[str, AbstractExchange] = {}
        self._lock = asyncio.Lock()
        self._delays_declared: dict[str, float] = {}

    async def publishing_channel(self) -> AbstractChannel:
        channel = self._publishing
        if channel is not None and not channel.is_closed:
            return channel
        async with self._lock:
            channel = self._publishing
            if channel is not None and not channel.is_closed:
                return channel
            connection = await self.outgoing.connection()
            channel = connection.channel(publisher_confirms=True, on_return_raises=True)
            await channel.initialize()
            self._exchanges = {
                "": channel.default_exchange,
                **await declare_exchanges(channel, self.settings.exchange),
            }
            self._delays_declared.clear()
            self._publishing = channel
            return channel

    async def send(
        self, exchange: str, key: str, body: bytes, mandatory: bool, **fields: Any
    ) -> None:
        """Publish and wait for the confirmation."""
        message = wire.write(body, **fields)
        try:
            with translated("publishing"):
                async with asyncio.timeout(self.settings.publish_limit):
                    await self._confirmed(exchange, key, message, mandatory)
        except TransientError as error:
            self.trouble = error.detail
            raise
        self.trouble = ""

    async def _confirmed(
        self, exchange: str, key: str, message: aio_pika.Message, mandatory: bool
    ) -> None:
        for last_try in (mandatory, True):
            await self.publishing_channel()
            try:
                await self._exchanges[exchange].publish(message, key, mandatory=mandatory)
            except PublishError as error:
                raise PermanentError(
                    Reason.CLUSTER_UNREACHABLE, "no queue takes it", key=key
                ) from error
            except DeliveryError as error:
                if mandatory:
                    raise TransientError(
                        Reason.BUS_UNAVAILABLE, "the broker refuses it: a queue is full", key=key
                    ) from error
                # A reader's private queue was going away while the broker routed to it. Once more
                # for the other readers, who take a doubled one in their stride; then let it be.
                if last_try:
                    return
            else:
                return

    async def delay(self, queue: str, body: bytes, envelope: wire.Envelope) -> None:
        """Put a message where it waits for `envelope.wait` seconds before it is in `queue`."""
        if envelope.wait <= 0:
            await self.forward("", queue, body, envelope)
            return
        delay_ms, remaining = topology.delay_for(envelope.wait)
        name = topology.delay_queue(queue, delay_ms)
        envelope = replace(envelope, wait=remaining)
        await self._declare_delay(name, queue, delay_ms)
        try:
            await self.forward("", name, body, envelope)
        except PermanentError:
            # Somebody deleted it since: once more, declared anew.
            self._delays_declared.pop(name, None)
            await self._declare_delay(name, queue, delay_ms)
            await self.forward("", name, body, envelope)

    async def _declare_delay(self, name: str, queue: str, delay_ms: int) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._delays_declared.get(name, -1e9) <= topology.DELAY_QUEUE_FRESH_SECONDS:
            return
        with translated("declaring a delay queue"):
            async with asyncio.timeout(self.settings.publish_limit):
                channel = await self.publishing_channel()
                arguments = dict(topology.delay_arguments(queue, delay_ms))
                await channel.declare_queue(name, durable=True, arguments=arguments)
        self._delays_declared[name] = now

    async def forward(
        self,
        exchange: str,
        key: str,
        body: bytes,
        envelope: wire.Envelope,
        reason: str = "",
        detail: str = "",
    ) -> None:
        """Publish a message that came to us anew, its tenant in a header of ours."""
        await self.send(
            exchange,
            key,
            body,
            True,
            envelope=envelope,
            user=self.user,
            tenant_header=True,
            reason=reason,
            detail=detail,
        )

    async def park(
        self, queue: str, body: bytes, envelope: wire.Envelope, reason: Reason, detail: str
    ) -> None:
        """To the dead letters of `queue`."""
        exchange = topology.dead_exchange(self.settings.exchange)
        await self.forward(exchange, queue, body, envelope, str(reason), detail)


async def declare_exchanges(channel: AbstractChannel, name: str) -> dict[str, AbstractExchange]:
    """The exchange of all topics and the one of dead letters."""
    dead = topology.dead_exchange(name)
    return {
        name: await channel.declare_exchange(name, ExchangeType.TOPIC, durable=True),
        dead: await channel.declare_exchange(dead, ExchangeType.DIRECT, durable=True),
    }


class _RabbitDelivery:
    """One handing-over; bound to the channel it came on, so a stale one settles nothing."""

    __slots__ = ("_envelope", "_inbox", "_incoming", "_message", "_settled", "_type", "redelivered")

    def __init__(
        self,
        inbox: _RabbitInbox,
        incoming: AbstractIncomingMessage,
        envelope: wire.Envelope,
        cls: type[Message],
        message: Message | None,
    ) -> None:
        self._inbox = inbox
        self._incoming = incoming
        self._envelope = envelope
        self._type = cls
        self._message = message
        self._settled = False
        self.redelivered = bool(incoming.redelivered) or envelope.attempt > 1

    @property
    def message(self) -> Message:
        if self._message is None:
            raise PermanentError(Reason.MALFORMED, "this subscription is raw: read the body")
        return self._message

    @property
    def body(self) -> bytes:
        return self._incoming.body

    @property
    def type(self) -> type[Message]:
        return self._type

    @property
    def attempt(self) -> int:
        return self._envelope.attempt

    @property
    def message_id(self) -> str:
        return self._envelope.message_id

    @property
    def correlation_id(self) -> str:
        return self._envelope.correlation_id

    @property
    def reply_to(self) -> str:
        return self._envelope.reply_to

    @property
    def tenant(self) -> str:
        return self._envelope.tenant

    def _is_mine(self) -> bool:
        return not self._settled and self._inbox.is_current(self._incoming)

    async def ack(self) -> None:
        if self._is_mine():
            self._settled = True
            await self._inbox.acknowledge(self._incoming)
            self._inbox.settled()

    async def retry(self, after: float, reason: Reason, detail: str = "") -> None:
        if not self._is_mine():
            return
        self._settled = True
        later = replace(
            self._envelope,
            retries=self._envelope.retries + 1,
            wait=max(0.0, after),
            why_retried=f"{reason} {detail}".strip(),
        )
        try:
            await self._inbox.put_off(self._incoming, later)
        except BaseException:
            self._settled = False  # still ours: the caller may try again, else the broker does
            raise
        self._inbox.settled()

    async def dead_letter(self, reason: Reason, detail: str = "") -> None:
        if not self._is_mine():
            return
        self._settled = True
        try:
            await self._inbox.park(self._incoming, self._envelope, reason, detail)
        except BaseException:
            self._settled = False
            raise
        self._inbox.settled()


class _RabbitInbox:
    """The consuming end: a channel, its consumers, and what the broker has sent ahead."""

    def __init__(self, core: _Core, subscription: Subscription, name: str) -> None:
        self._core = core
        self._subscription = subscription
        self.name = name
        """Of the queue; a private one keeps its name through reconnects."""
        self._channel: AbstractChannel | None = None
        self._underlay: object = None
        self._buffer: deque[tuple[AbstractIncomingMessage, bool]] = deque()
        """Deliveries, and whether each came from the queue of those to be tried again."""
        self._arrived = asyncio.Event()
        self._lost = ""
        """Why there is no consumer now; empty while there is one."""
        self._held = 0
        """Deliveries handed out on this channel and not settled."""
        self._lock = asyncio.Lock()
        self._closed = False

    # -- life ------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Declare what is read, and consume it on a fresh channel."""
        await self._drop_channel()
        self._buffer.clear()
        self._held = 0
        self._lost = _OPENING
        subscription = self._subscription
        with translated(f"consuming {self.name}"):
            async with asyncio.timeout(self._core.settings.publish_limit):
                connection = await self._core.incoming.connection()
                channel = connection.channel(publisher_confirms=False)
                await channel.initialize()
                self._channel = channel
                underlay = await channel.get_underlay_channel()
                self._underlay = underlay
                underlay.on_consumer_cancel_callbacks.add(partial(self._on_cancel, underlay))
                channel.close_callbacks.add(self._on_close)
                exchange = self._core.settings.exchange
                await declare_exchanges(channel, exchange)
                if subscription.durable:
                    await declare_durable(channel, exchange, subscription)
                else:
                    await channel.declare_queue(
                        self.name,
                        exclusive=True,
                        auto_delete=True,
                        arguments=dict(topology.private_arguments(subscription.max_length)),
                    )
                    for key in topology.binding_keys(subscription):
                        await underlay.queue_bind(self.name, exchange, key)
                if subscription.durable:
                    # First the older ones, one at a time: then a death is one message's.
                    await channel.set_qos(prefetch_count=1)
                    again = await channel.get_queue(topology.again_queue(self.name), ensure=False)
                    await again.consume(self._on_again)
                await channel.set_qos(prefetch_count=subscription.prefetch)
                queue = await channel.get_queue(self.name, ensure=False)
                await queue.consume(self._on_message)
        if self._lost == _OPENING:
            self._lost = ""

    async def close(self) -> None:
        """Give back what is not settled."""
        self._closed = True
        self._arrived.set()
        self._buffer.clear()
        await self._drop_channel()

    async def _drop_channel(self) -> None:
        channel, self._channel, self._underlay = self._channel, None, None
        if channel is None:
            return
        channel.close_callbacks.discard(self._on_close)
        if channel.is_closed:
            return
        try:
            async with asyncio.timeout(self._core.settings.connect_limit):
                await channel.close()
        except (TimeoutError, *CONNECTION_EXCEPTIONS):
            pass  # a channel that is gone has given everything back already

    async def _on_message(self, incoming: AbstractIncomingMessage) -> None:
        self._buffer.append((incoming, False))
        self._arrived.set()

    async def _on_again(self, incoming: AbstractIncomingMessage) -> None:
        self._buffer.append((incoming, True))
        self._arrived.set()

    def _on_cancel(self, underlay: object, _frame: object) -> None:
        if underlay is self._underlay:
            self._lost = "the broker cancelled the consumer"
            self._arrived.set()

    def _on_close(self, channel: object, error: BaseException | None) -> None:
        if channel is self._channel:
            self._lost = f"the channel was closed: {error}"
            self._arrived.set()

    def is_current(self, incoming: AbstractIncomingMessage) -> bool:
        """Whether a delivery came on the channel that consumes now."""
        try:
            return self._underlay is not None and incoming.channel is self._underlay
        except CONNECTION_EXCEPTIONS:  # the library's way to say that its channel is closed
            return False

    # -- receiving -------------------------------------------------------------------------------

    async def receive(self, limit: int = 1, timeout: float | None = None) -> Sequence[Delivery]:
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        prefetch = self._subscription.prefetch
        while True:
            if self._closed:
                raise TransientError(
                    Reason.BUS_UNAVAILABLE, "the consumer was closed", queue=self.name
                )
            if self._lost:
                await self._restore(deadline)
            taken: list[Delivery] = []
            while self._buffer and len(taken) < limit and self._held < prefetch:
                incoming, tried_before = self._buffer[0]
                if not self.is_current(incoming):
                    self._buffer.popleft()
                    continue
                envelope, delivery, refusal = self._look(incoming, tried_before)
                if delivery is not None:
                    self._buffer.popleft()
                    self._held += 1
                    taken.append(delivery)
                    continue
                if taken:
                    break  # what follows waits for the broker; hand out what is ready first
                self._buffer.popleft()
                try:
                    await self._turn_away(incoming, envelope, refusal)
                except BaseException:
                    self._buffer.appendleft((incoming, tried_before))
                    raise
            if taken or (deadline is not None and loop.time() >= deadline):
                await asyncio.sleep(0)
                return taken
            if self._lost:
                continue
            # The buffer is empty, or this consumer holds all it may: a settlement sets it too.
            self._arrived.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._arrived.wait()
            except TimeoutError:
                return []

    def _look(
        self, incoming: AbstractIncomingMessage, tried_before: bool
    ) -> tuple[wire.Envelope, Delivery | None, SpringtideError | None]:
        """The delivery, or else its fault, or neither: then it must wait or be tried alone."""
        subscription = self._subscription
        envelope = wire.read(incoming, self._core.believed)
        died = wire.deaths_of_delivery(incoming)
        if died:
            envelope = replace(envelope, deaths=envelope.deaths + died)
        if subscription.durable:
            if envelope.deaths >= subscription.delivery_limit:
                poison = PermanentError(
                    Reason.POISON, f"{envelope.deaths} consumers ended while they held it"
                )
                return envelope, None, poison
            if envelope.wait > 0 or (died and not tried_before):
                return envelope, None, None
        try:
            cls = expected_type(envelope.type_name, subscription)
            message = None if subscription.raw else decode(cls, incoming.body)
        except SpringtideError as error:
            return envelope, None, error
        return envelope, _RabbitDelivery(self, incoming, envelope, cls, message), None

    async def _turn_away(
        self,
        incoming: AbstractIncomingMessage,
        envelope: wire.Envelope,
        refusal: SpringtideError | None,
    ) -> None:
        if refusal is None and envelope.wait > 0:
            await self._core.delay(self.name, incoming.body, envelope)
            await self.acknowledge(incoming)
        elif refusal is None:
            again = topology.again_queue(self.name)
            await self._core.forward("", again, incoming.body, envelope)
            await self.acknowledge(incoming)
        else:
            if refusal.reason is not Reason.POISON:
                await self._answer(incoming, envelope, refusal)
            await self.park(incoming, envelope, refusal.reason, refusal.detail)

    async def _answer(
        self, incoming: AbstractIncomingMessage, envelope: wire.Envelope, error: SpringtideError
    ) -> None:
        if self._subscription.on_undecodable is None:
            return
        answer = self._subscription.on_undecodable(
            Undecodable(
                type_name=envelope.type_name,
                message_id=envelope.message_id,
                correlation_id=envelope.correlation_id,
                tenant=envelope.tenant,
                body=incoming.body,
                error=error,
            )
        )
        if answer is None or not envelope.reply_to:
            return
        await self._core.send(
            "",
            envelope.reply_to,
            encode(answer),
            False,
            envelope=wire.Envelope(
                type_name=type_name(type(answer)),
                message_id=self._core.ids.new(),
                correlation_id=envelope.correlation_id or envelope.message_id,
                timestamp=self._core.clock.now(),
            ),
            user="",
            tenant_header=False,
        )

    async def _restore(self, deadline: float | None) -> None:
        """Consume again; returns without success when `deadline` comes first."""
        loop = asyncio.get_running_loop()
        last = loop.time() + self._core.settings.restore_limit
        async with self._lock:
            while self._lost and not self._closed:
                try:
                    async with asyncio.timeout_at(deadline):
                        await self.open()
                except TimeoutError:
                    return
                except TransientError as error:
                    if loop.time() >= last:
                        raise TransientError(
                            Reason.BUS_UNAVAILABLE,
                            f"the consumer of {self.name} could not be restored: {error.detail}",
                        ) from error
                    self._lost = error.detail or "not restored"
                    # The link itself pauses between failed tries; this is for a broker that
                    # accepts connections and then does not serve them.
                    await asyncio.sleep(min(0.1, max(0.0, last - loop.time())))

    # -- settling --------------------------------------------------------------------------------

    async def acknowledge(self, incoming: AbstractIncomingMessage) -> None:
        """Without effect if the channel is gone: then the broker delivers again."""
        try:
            await incoming.ack()
        except CONNECTION_EXCEPTIONS:
            pass

    def settled(self) -> None:
        """One of those handed out is settled: there is room for another."""
        self._held -= 1
        self._arrived.set()

    async def put_off(self, incoming: AbstractIncomingMessage, envelope: wire.Envelope) -> None:
        """Ack once the broker has it in a delay queue. A private queue has no retries."""
        if self._subscription.durable:
            await self._core.delay(self.name, incoming.body, envelope)
        await self.acknowledge(incoming)

    async def park(
        self,
        incoming: AbstractIncomingMessage,
        envelope: wire.Envelope,
        reason: Reason,
        detail: str,
    ) -> None:
        """Ack once the broker has it among the dead letters. A private queue has none."""
        if self._subscription.durable:
            await self._core.park(self.name, incoming.body, envelope, reason, detail)
        await self.acknowledge(incoming)


async def declare_durable(
    channel: AbstractChannel, exchange: str, subscription: Subscription
) -> None:
    """A durable queue with its bindings, its second chance and its dead letters."""
    name = subscription.queue
    dead = await channel.declare_queue(
        topology.dead_queue(name), durable=True, arguments=dict(topology.dead_arguments())
    )
    await dead.bind(topology.dead_exchange(exchange), name)
    arguments = topology.durable_arguments(exchange, name, single_active=subscription.single_active)
    await channel.declare_queue(topology.again_queue(name), durable=True, arguments=dict(arguments))
    queue = await channel.declare_queue(name, durable=True, arguments=dict(arguments))
    for key in topology.binding_keys(subscription):
        await queue.bind(exchange, key)


class RabbitBus:
    """One user's bus on a broker; `connect` makes it.

    A subscription that is not durable has neither retries nor dead letters: both only acknowledge.
    """

    def __init__(self, core: _Core, tenant: str | None = None) -> None:
        self._core = core
        self._tenant = tenant

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        settings: RabbitSettings | str,
        *,
        clock: Clock | None = None,
        ids: Ids | None = None,
    ) -> AsyncIterator[RabbitBus]:
        """The bus, connected; `settings` may be a URL alone.

        Raises:
            TransientError: the broker cannot be reached.
            PermanentError: it refuses user, password or virtual host.
        """
        if isinstance(settings, str):
            settings = RabbitSettings(url=settings)
        clock = clock or SystemClock()
        core = _Core(settings, clock, ids or SystemIds(clock))
        try:
            with translated("connecting"):
                async with asyncio.timeout(settings.connect_limit):
                    await core.incoming.connection()
                    await core.publishing_channel()
            yield cls(core)
        finally:
            await core.outgoing.close()
            await core.incoming.close()

    def as_user(self, user: str) -> RabbitBus:
        """A handle that publishes on behalf of a tenant.

        Consumers believe it only if they name our broker user among their `trusted_publishers`.
        """
        return RabbitBus(self._core, user)

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
        """See the port."""
        cls = type(message)
        await self._publish(
            encode(message),
            exchange="" if to else self._core.settings.exchange,
            key=to or routing_key(cls, cluster),
            mandatory=cls.kind in (Kind.COMMAND, Kind.FACT),
            type_property=type_name(cls),
            message_id=message_id,
            correlation_id=correlation_id,
            reply_to=reply_to,
        )

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
            TransientError: not confirmed within the publish limit.
        """
        await self._publish(
            body,
            exchange=self._core.settings.exchange,
            key=f"{name}.{cluster}" if cluster else name,
            mandatory=True,
            type_property=name if type_property is None else type_property,
            message_id=message_id,
            correlation_id=correlation_id,
            reply_to=reply_to,
        )

    async def _publish(
        self,
        body: bytes,
        *,
        exchange: str,
        key: str,
        mandatory: bool,
        type_property: str,
        message_id: str,
        correlation_id: str,
        reply_to: str,
    ) -> None:
        core = self._core
        on_behalf = self._tenant is not None
        await core.send(
            exchange,
            key,
            body,
            mandatory,
            envelope=wire.Envelope(
                type_name=type_property,
                message_id=message_id or core.ids.new(),
                correlation_id=correlation_id,
                reply_to=reply_to,
                tenant=self._tenant or "",
                timestamp=core.clock.now(),
            ),
            user=core.user if on_behalf or core.settings.identify else "",
            tenant_header=on_behalf,
        )

    async def declare(self, *subscriptions: Subscription) -> None:
        """Make durable queues without consuming them (a deploy step, for `job.*`)."""
        with translated("declaring queues"):
            async with asyncio.timeout(self._core.settings.publish_limit):
                connection = await self._core.incoming.connection()
                channel = connection.channel(publisher_confirms=False)
                await channel.initialize()
                try:
                    await declare_exchanges(channel, self._core.settings.exchange)
                    for subscription in subscriptions:
                        await declare_durable(channel, self._core.settings.exchange, subscription)
                finally:
                    await channel.close()

    @asynccontextmanager
    async def subscribe(self, subscription: Subscription) -> AsyncIterator[Inbox]:
        """Consume while the context is open; leaving it gives back what is not settled."""
        name = subscription.queue
        if not subscription.durable:
            name = f"{name}.{self._core.ids.new()}"
        inbox = _RabbitInbox(self._core, subscription, name)
        try:
            await inbox.open()
            yield inbox
        finally:
            await inbox.close()

    @asynccontextmanager
    async def answers(self) -> AsyncIterator[tuple[str, Inbox]]:
        """A private address for `reply_to`, and its inbox."""
        subscription = Subscription(
            queue=f"{self._core.settings.exchange}.answers",
            types=(),
            durable=False,
            max_length=_ANSWERS_KEPT,
        )
        inbox = _RabbitInbox(
            self._core, subscription, f"{subscription.queue}.{self._core.ids.new()}"
        )
        try:
            await inbox.open()
            yield inbox.name, inbox
        finally:
            await inbox.close()

    async def dead_letters(self, queue: str, limit: int = 100) -> Sequence[DeadLetter]:
        """The messages parked for a durable queue, oldest first; they stay there."""
        letters: list[DeadLetter] = []
        with translated(f"reading dead letters of {queue}"):
            async with asyncio.timeout(self._core.settings.publish_limit):
                connection = await self._core.incoming.connection()
                channel = connection.channel(publisher_confirms=False)
                await channel.initialize()
                try:
                    dead = await channel.get_queue(topology.dead_queue(queue))
                    while len(letters) < limit:
                        incoming = await dead.get(fail=False)
                        if incoming is None:
                            break
                        letters.append(wire.read_dead(incoming, queue))
                except ChannelNotFoundEntity:
                    return []
                finally:
                    # Nothing was settled: closing the channel gives all of them back.
                    if not channel.is_closed:
                        await channel.close()
        return letters

    def ready(self) -> tuple[bool, str]:
        """Whether publishing and consuming work now; else the reason."""
        core = self._core
        if core.trouble:
            return False, core.trouble
        if not core.incoming.is_open or not core.outgoing.is_open:
            return False, "no connection to the broker"
        return True, ""
