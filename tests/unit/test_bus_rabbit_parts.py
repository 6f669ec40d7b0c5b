"""The pure parts of the RabbitMQ adapter."""

from __future__ import annotations

from typing import Any, cast

from aio_pika.abc import AbstractIncomingMessage
from hypothesis import given
from hypothesis import strategies as st

from springtide_shared.adapters import rabbit_topology as topology
from springtide_shared.adapters import rabbit_wire as wire


class Incoming:
    """As much of a delivery as the wire module reads."""

    def __init__(self, message: Any, **changes: Any) -> None:
        self.body = message.body
        self.headers = message.headers
        self.user_id = message.user_id
        self.type = message.type
        self.routing_key = "slice.cancel.v1.c1"
        self.message_id = message.message_id
        self.correlation_id = message.correlation_id
        self.reply_to = message.reply_to
        self.timestamp = message.timestamp
        self.redelivered = False
        for name, value in changes.items():
            setattr(self, name, value)


def incoming(message: Any, **changes: Any) -> AbstractIncomingMessage:
    return cast("AbstractIncomingMessage", Incoming(message, **changes))


@given(st.floats(min_value=0.001, max_value=30 * 86400.0))
def test_a_delay_is_never_short_and_hardly_long(after: float) -> None:
    waited, remaining, hops = 0.0, after, 0
    while remaining > 0:
        delay_ms, remaining = topology.delay_for(remaining)
        waited += delay_ms / 1000
        hops += 1
    assert waited >= after - 1e-6
    assert waited <= max(0.1, 2.5 * after)
    assert hops <= 1 + after / 3600 + 1


def test_a_five_second_retry_comes_back_in_five_to_eight() -> None:
    """B20."""
    delay_ms, remaining = topology.delay_for(5.0)
    assert 5_000 <= delay_ms <= 8_000
    assert remaining == 0


def test_a_delay_queue_outlives_everything_put_into_it() -> None:
    for delay_ms in topology.DELAYS_MS:
        expires = topology.delay_arguments("q", delay_ms)["x-expires"]
        assert expires > topology.DELAY_QUEUE_FRESH_SECONDS * 1000 + delay_ms


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
envelopes = st.builds(
    wire.Envelope,
    type_name=st.just("slice.cancel.v1"),
    message_id=texts.filter(bool),
    correlation_id=texts,
    reply_to=texts,
    tenant=texts,
    deaths=st.integers(0, 100),
    retries=st.integers(0, 100),
    wait=st.integers(0, 10_000_000).map(lambda ms: ms / 1000),
    why_retried=texts,
    foreign=st.dictionaries(st.sampled_from(["traceparent", "x-app"]), texts),
)


@given(envelopes)
def test_an_envelope_survives_the_wire(envelope: wire.Envelope) -> None:
    sent = wire.write(b"{}", envelope, user="me", tenant_header=True)
    assert wire.read(incoming(sent), frozenset({"me"})) == envelope
    assert sent.expiration is None  # none can be inherited


@given(envelopes)
def test_headers_of_a_stranger_count_for_nothing(envelope: wire.Envelope) -> None:
    sent = wire.write(b"{}", envelope, user="", tenant_header=True)
    for user in (None, "mallory"):
        read = wire.read(incoming(sent, user_id=user), frozenset({"me"}))
        assert read.tenant == (user or "")
        assert (read.deaths, read.retries, read.wait) == (0, 0, 0.0)
        assert read.foreign == envelope.foreign


def test_the_brokers_own_headers_are_not_carried_on() -> None:
    sent = wire.write(
        b"{}",
        wire.Envelope(
            type_name="slice.cancel.v1",
            message_id="m",
            foreign={"x-death": [], "x-first-death-queue": "q", "x-delivery-count": 2, "a": "b"},
        ),
        user="me",
        tenant_header=False,
    )
    assert wire.read(incoming(sent), frozenset({"me"})).foreign == {"a": "b"}


def test_deaths_are_counted_by_every_kind_of_broker() -> None:
    sent = wire.write(
        b"{}", wire.Envelope(type_name="t", message_id="m"), user="", tenant_header=False
    )
    assert wire.deaths_of_delivery(incoming(sent)) == 0
    assert wire.deaths_of_delivery(incoming(sent, redelivered=True)) == 1
    assert wire.deaths_of_delivery(incoming(sent, headers={"x-delivery-count": 4})) == 4
