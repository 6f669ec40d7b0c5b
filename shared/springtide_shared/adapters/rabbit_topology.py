"""Names and arguments of what the RabbitMQ adapter declares; pure.

For each durable queue Q there are: Q itself; `Q.again`, where messages whose consumer ended are
tried one at a time; `Q.delay.<ms>`, made when a retry first needs it; `Q.dead`, for people.

Why `Q.again`: when a consumer's process ends, the broker counts a failed delivery for everything
that it had been sent, up to its whole prefetch. Counted in Q, one poisonous message would take
hundreds of innocent ones with it to the dead letters.
"""

from __future__ import annotations

from typing import Any, Final

from springtide_shared.messages.base import type_name
from springtide_shared.ports.bus import Subscription

Arguments = dict[str, Any]

BACKSTOP_DELIVERIES: Final = 20
"""The broker's own delivery limit. The adapter parks sooner and with its own reason; this one is
for a message that ends its consumer before the adapter can look at it."""

MAX_QUEUE_BYTES: Final = 1 << 30
"""Full: publishing is refused (a TransientError). Work waits in the ledger, not here."""

DELAYS_MS: Final = (
    100,
    250,
    500,
    1_000,
    2_000,
    3_000,
    5_000,
    8_000,
    12_000,
    20_000,
    30_000,
    45_000,
    60_000,
    90_000,
    120_000,
    180_000,
    300_000,
    600_000,
    1_200_000,
    1_800_000,
    3_600_000,
)
"""One queue a delay: in a queue of equal delays nobody waits for a longer one in front."""


def dead_exchange(exchange: str) -> str:
    """Where parked messages go, under the name of their queue."""
    return f"{exchange}.dead"


def dead_queue(queue: str) -> str:
    """Where a durable queue's dead letters wait for a person."""
    return f"{queue}.dead"


def again_queue(queue: str) -> str:
    """Where messages of consumers that ended are tried alone."""
    return f"{queue}.again"


def delay_queue(queue: str, delay_ms: int) -> str:
    """Where messages wait before they go back to `queue`."""
    return f"{queue}.delay.{delay_ms}"


def delay_for(after: float) -> tuple[int, float]:
    """The shortest delay that is not sooner than `after` seconds, and what then remains of it.

    Beyond the longest delay the message comes round and waits again.
    """
    wanted = after * 1000
    for delay_ms in DELAYS_MS:
        if delay_ms >= wanted:
            return delay_ms, 0.0
    return DELAYS_MS[-1], after - DELAYS_MS[-1] / 1000


def binding_keys(subscription: Subscription) -> tuple[str, ...]:
    """Routing patterns; without a cluster: every cluster's messages and those that name none."""
    suffix = f".{subscription.cluster}" if subscription.cluster else ".#"
    return tuple(type_name(cls) + suffix for cls in subscription.types)


def durable_arguments(exchange: str, queue: str, *, single_active: bool) -> Arguments:
    """For a queue and its `again`: replicated, bounded, dead-lettering without loss."""
    arguments: Arguments = {
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": dead_exchange(exchange),
        "x-dead-letter-routing-key": queue,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        "x-max-length-bytes": MAX_QUEUE_BYTES,
        "x-delivery-limit": BACKSTOP_DELIVERIES,
    }
    if single_active:
        arguments["x-single-active-consumer"] = True
    return arguments


def dead_arguments() -> Arguments:
    """Dead letters may be looked at as often as one likes (looking counts as a delivery)."""
    return {
        "x-queue-type": "quorum",
        "x-overflow": "reject-publish",
        "x-max-length-bytes": MAX_QUEUE_BYTES,
        "x-delivery-limit": 1_000_000_000,
    }


def delay_arguments(queue: str, delay_ms: int) -> Arguments:
    """The queue's own time-to-live sends everything back to `queue` by the default exchange.

    A message keeps no expiry of its own, so none is inherited on the way back. The queue goes when
    it was not used for long; see `DELAY_QUEUE_FRESH_SECONDS`.
    """
    return {
        "x-queue-type": "quorum",
        "x-message-ttl": delay_ms,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": queue,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        "x-max-length-bytes": MAX_QUEUE_BYTES,
        "x-expires": 2 * delay_ms + 2_000 * DELAY_QUEUE_FRESH_SECONDS,
    }


DELAY_QUEUE_FRESH_SECONDS: Final = 300
"""How long a declared delay queue is used before it is declared again, which restarts its expiry:
every message has left it long before the queue may go."""


def private_arguments(max_length: int) -> Arguments:
    """A consumer's own queue for snapshots, broadcasts and answers."""
    return {"x-queue-type": "classic", "x-max-length": max_length, "x-overflow": "drop-head"}
