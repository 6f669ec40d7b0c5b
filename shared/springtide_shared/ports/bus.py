"""MessageBus: at-least-once delivery of typed messages, as any broker can promise it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from springtide_shared.errors import Reason, SpringtideError
from springtide_shared.messages.base import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecodable:
    """A delivery that never reached the service, for an answer to who sent it."""

    type_name: str
    message_id: str
    correlation_id: str
    tenant: str
    body: bytes
    error: SpringtideError


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """What a consumer reads.

    `durable`: one queue of this name shared by all who consume it, kept while nobody does; retries
    and dead letters work. Not durable (snapshots, broadcasts): a queue of one's own that goes with
    its consumer, bounded, dropping its oldest when full.
    """

    queue: str
    """For durable ones by convention `<service>[.<cluster>].<topic>`."""
    types: tuple[type[Message], ...]
    cluster: str = ""
    """Empty: all clusters (and messages that carry none)."""
    durable: bool = True
    prefetch: int = 200
    """Most deliveries held unsettled."""
    single_active: bool = False
    """Only one of the consumers gets deliveries at a time: order is kept."""
    delivery_limit: int = 3
    """Deliveries of one message that end with its consumer's death, before it is parked."""
    max_length: int = 1_000
    """For a queue that is not durable."""
    on_undecodable: Callable[[Undecodable], Message | None] | None = None
    """Answer for `reply_to`; the body is dead-lettered with its reason in any case."""
    raw: bool = False
    """Deliver bodies undecoded (`Delivery.body`), for consumers with a decoder of their own."""


class Delivery(Protocol):
    """One handing-over of one message; settled exactly once.

    A second settlement is ignored. Settling after the consumer or its connection is gone has no
    effect: the broker delivers again.
    """

    @property
    def message(self) -> Message:
        """The decoded message. Raises for a raw subscription."""
        ...

    @property
    def body(self) -> bytes:
        """The body as it came."""
        ...

    @property
    def type(self) -> type[Message]:
        """The message's type, known before the body is decoded."""
        ...

    @property
    def attempt(self) -> int:
        """1 for the first delivery; grows by deaths of consumers and by `retry`."""
        ...

    @property
    def redelivered(self) -> bool:
        """Whether an earlier delivery may have had effects."""
        ...

    @property
    def message_id(self) -> str:
        """Made by the publisher."""
        ...

    @property
    def correlation_id(self) -> str:
        """Given by the publisher, returned with an answer; may be empty."""
        ...

    @property
    def reply_to(self) -> str:
        """Where an answer goes; empty: none is wanted."""
        ...

    @property
    def tenant(self) -> str:
        """The broker-validated user; empty: the publisher set none."""
        ...

    async def ack(self) -> None:
        """Done: its effects are durable."""
        ...

    async def retry(self, after: float, reason: Reason, detail: str = "") -> None:
        """Deliver again in about `after` seconds (never sooner), counted; others are not held up.

        Raises:
            TransientError: the broker did not take it; the delivery is still unsettled.
        """
        ...

    async def dead_letter(self, reason: Reason, detail: str = "") -> None:
        """Park it for a person, with the reason in its headers.

        Raises:
            TransientError: the broker did not take it; the delivery is still unsettled.
        """
        ...


class Inbox(Protocol):
    """The consuming end of a subscription."""

    async def receive(self, limit: int = 1, timeout: float | None = None) -> Sequence[Delivery]:
        """At least one delivery, up to `limit` that are already there; empty after `timeout` s.

        Messages that ended a consumer may come singly, each after the one before was settled.

        Raises:
            TransientError: the consumer was lost and could not be restored.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A parked message, for tests and operators."""

    queue: str
    type_name: str
    message_id: str
    body: bytes
    reason: str
    detail: str
    attempt: int


class MessageBus(Protocol):
    """Publishes and consumes.

    Publishing returns once the broker has taken responsibility; deliveries come at least once, in
    the order of publishing per key at most.
    """

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
        """Publish under the routing key of the message's type and `cluster`.

        `to` sends it to one `reply_to` address instead. `message_id` defaults to a fresh one.

        Raises:
            TransientError: not confirmed within the publish limit (it may have been taken).
            PermanentError: a command or fact that no queue takes (`cluster-unreachable`), or a body
                over the limit (`too-large`).
        """
        ...

    def subscribe(self, subscription: Subscription) -> AbstractAsyncContextManager[Inbox]:
        """Consume while the context is open; leaving it gives back what is not settled."""
        ...

    def as_user(self, user: str) -> MessageBus:
        """The same bus publishing for a tenant, as far as consumers trust this publisher."""
        ...

    def answers(self) -> AbstractAsyncContextManager[tuple[str, Inbox]]:
        """A private address for `reply_to`, and its inbox."""
        ...

    async def dead_letters(self, queue: str, limit: int = 100) -> Sequence[DeadLetter]:
        """The messages parked for a durable queue, oldest first; they stay there."""
        ...

    def ready(self) -> tuple[bool, str]:
        """Whether publishing and consuming work now; else the reason."""
        ...
