"""How a message looks on the wire: AMQP properties and springtide's own headers; pure.

The headers are believed only from the bus's own user and from publishers named as trusted: anyone
else could claim another tenant by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

import aio_pika
from aio_pika.abc import AbstractIncomingMessage, DeliveryMode

from springtide_shared.ports.bus import DeadLetter

TENANT: Final = "x-springtide-tenant"
DEATHS: Final = "x-springtide-deaths"
RETRIES: Final = "x-springtide-retries"
WAIT: Final = "x-springtide-wait-ms"
"""What of a long retry is still to wait."""
RETRIED_FOR: Final = "x-springtide-retried-for"
"""Why it was last put off; for people who look at a queue."""
REASON: Final = "x-springtide-reason"
DETAIL: Final = "x-springtide-detail"

_BROKERS_OWN: Final = ("x-death", "x-first-death", "x-last-death", "x-delivery-count")
"""Headers that tell of former ways of a message: they would mislead on its next one."""
_MAX_DETAIL_CHARS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Everything of a message but its body."""

    type_name: str
    message_id: str
    correlation_id: str = ""
    reply_to: str = ""
    tenant: str = ""
    deaths: int = 0
    """Consumers that ended while they held it."""
    retries: int = 0
    wait: float = 0.0
    why_retried: str = ""
    timestamp: datetime | int | float | None = None
    foreign: Mapping[str, Any] = field(default_factory=dict)
    """Headers of others (trace context), kept on every way."""

    @property
    def attempt(self) -> int:
        """1 for the first delivery."""
        return 1 + self.deaths + self.retries


def read(incoming: AbstractIncomingMessage, believed: frozenset[str]) -> Envelope:
    """The envelope of a delivery, this delivery's death count included.

    `believed`: users whose springtide headers count.
    """
    headers = dict(incoming.headers or {})
    user = incoming.user_id or ""
    trusted = user in believed
    envelope = Envelope(
        type_name=incoming.type or incoming.routing_key or "",
        message_id=incoming.message_id or "",
        correlation_id=incoming.correlation_id or "",
        reply_to=incoming.reply_to or "",
        tenant=user,
        timestamp=incoming.timestamp,
        foreign={
            name: value
            for name, value in headers.items()
            if not name.startswith(("x-springtide-", *_BROKERS_OWN))
        },
    )
    if not trusted:
        return envelope
    return replace(
        envelope,
        tenant=str(headers.get(TENANT, user)),
        deaths=_number(headers.get(DEATHS)),
        retries=_number(headers.get(RETRIES)),
        wait=_number(headers.get(WAIT)) / 1000,
        why_retried=str(headers.get(RETRIED_FOR, "")),
    )


def deaths_of_delivery(incoming: AbstractIncomingMessage) -> int:
    """How often the broker took this message back from a consumer that ended, in this queue."""
    count = (incoming.headers or {}).get("x-delivery-count")
    if isinstance(count, int):
        return count
    return 1 if incoming.redelivered else 0


def write(
    body: bytes,
    envelope: Envelope,
    *,
    user: str,
    tenant_header: bool,
    reason: str = "",
    detail: str = "",
) -> aio_pika.Message:
    """The message for the broker. `user` empty: no user id, then no header of ours counts."""
    headers: dict[str, Any] = dict(envelope.foreign)
    if tenant_header:
        headers[TENANT] = envelope.tenant
    if envelope.deaths:
        headers[DEATHS] = envelope.deaths
    if envelope.retries:
        headers[RETRIES] = envelope.retries
    if envelope.why_retried:
        headers[RETRIED_FOR] = envelope.why_retried[:_MAX_DETAIL_CHARS]
    if envelope.wait > 0:
        # Rounded first: 2.031 s times 1000 is a hair above 2,031 ms, and must not become 2,032.
        headers[WAIT] = math.ceil(round(envelope.wait * 1000, 6))
    if reason:
        headers[REASON] = reason
        headers[DETAIL] = detail[:_MAX_DETAIL_CHARS]
    return aio_pika.Message(
        body,
        headers=headers,
        content_type="application/json",
        delivery_mode=DeliveryMode.PERSISTENT,
        correlation_id=envelope.correlation_id or None,
        reply_to=envelope.reply_to or None,
        message_id=envelope.message_id,
        timestamp=envelope.timestamp,
        type=envelope.type_name,
        user_id=user or None,
    )


def read_dead(incoming: AbstractIncomingMessage, queue: str) -> DeadLetter:
    """A parked message, whoever parked it: the adapter with a reason, or the broker."""
    headers = incoming.headers or {}
    reason, detail = headers.get(REASON), headers.get(DETAIL, "")
    attempt = 1 + _number(headers.get(DEATHS)) + _number(headers.get(RETRIES))
    if reason is None:
        cause = str(headers.get("x-first-death-reason", "unknown"))
        reason = "poison" if cause in ("delivery_limit", "delivery-limit") else cause
        detail = f"parked by the broker: {cause}"
    return DeadLetter(
        queue=queue,
        type_name=incoming.type or "",
        message_id=incoming.message_id or "",
        body=incoming.body,
        reason=str(reason),
        detail=str(detail),
        attempt=attempt,
    )


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
