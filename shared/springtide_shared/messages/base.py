"""What every message has in common: topic, version, kind, limits and the codec.

A message is a frozen struct whose class names its topic and version; on the wire it is UTF-8 JSON
under the routing key `<topic>.v<version>[.<cluster>]`. Times are seconds since 1970 UTC as numbers.
Unknown fields are ignored (an older service reads a newer one), except in a job; missing or wrong
ones are refused by path.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, ClassVar, Final, TypeVar

import msgspec

from springtide_shared.errors import InvalidFieldError, PermanentError, Reason
from springtide_shared.units import MiB

MAX_BODY_BYTES: Final = MiB
"""Bigger inputs go by reference; brokers refuse far larger bodies by closing the channel."""


class Kind(StrEnum):
    """How a topic is delivered and what losing one message costs."""

    COMMAND = "command"
    """Durable, confirmed, must be routable."""
    FACT = "fact"
    """Durable, confirmed, kept until each of its consumers has settled it."""
    SNAPSHOT = "snapshot"
    """Totals with a use-by time: a lost one costs a period, a doubled one nothing."""
    BROADCAST = "broadcast"
    """For whoever listens at the moment."""
    ANSWER = "answer"
    """Sent to the `reply_to` of a command."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages; subclasses set `topic`, `version` and `kind`."""

    topic: ClassVar[str] = ""
    version: ClassVar[int] = 1
    kind: ClassVar[Kind] = Kind.FACT
    producer: ClassVar[str] = ""
    """Which part publishes it (for the messages page)."""
    consumers: ClassVar[tuple[str, ...]] = ()
    duplicate: ClassVar[str] = ""
    """What a doubled delivery does (for the messages page)."""


class Snapshot(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Head of all snapshots: which producer, which edition, which part of it, use by when."""

    kind: ClassVar[Kind] = Kind.SNAPSHOT

    cluster: str
    epoch: int
    """Grows with each life of the producer; a lower one is out of date whatever its `seq`."""
    seq: int
    part: int = 0
    parts: int = 1
    valid_until: float
    """Seconds since 1970. After it the consumer holds: no purchase, no dispatch."""


M = TypeVar("M", bound=Message)

_REGISTRY: dict[tuple[str, int], type[Message]] = {}
_TYPES: dict[str, type[Message]] = {}
"""By type name, for the deliveries of which each names one."""
_ENCODER: Final = msgspec.json.Encoder(order="deterministic")
_DECODERS: dict[type[Message], msgspec.json.Decoder[Any]] = {}
_PATH: Final = re.compile(r" - at `(?:\$\.?)?([^`]*)`$")
_MISSING: Final = re.compile(r"missing required field `([^`]*)`")
_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")


def register(cls: type[M]) -> type[M]:
    """Class decorator: make a message type known to the codec under its topic and version."""
    key = (cls.topic, cls.version)
    if not cls.topic or key in _REGISTRY:
        raise TypeError(f"topic and version of {cls.__name__} are empty or taken: {key}")
    _REGISTRY[key] = cls
    _TYPES[type_name(cls)] = cls
    return cls


def registered() -> tuple[type[Message], ...]:
    """All message types, ordered by topic."""
    return tuple(_REGISTRY[key] for key in sorted(_REGISTRY))


def type_name(cls: type[Message]) -> str:
    """`<topic>.v<version>`: the AMQP `type` property and the head of the routing key."""
    return f"{cls.topic}.v{cls.version}"


def routing_key(cls: type[Message], cluster: str = "") -> str:
    """`<topic>.v<version>[.<cluster>]`."""
    return f"{type_name(cls)}.{cluster}" if cluster else type_name(cls)


def type_of(name: str) -> type[Message]:
    """The message type behind a `type` property or a routing key.

    Raises:
        PermanentError: no such topic, or a version that this build does not read.
    """
    if (known_type := _TYPES.get(name)) is not None:
        return known_type
    match = re.match(r"^([a-z]+\.[a-z]+|[a-z]+)\.v(\d{1,4})(?:\.|$)", name)
    if match is not None and (cls := _REGISTRY.get((match[1], int(match[2])))) is not None:
        return cls
    known = ", ".join(type_name(cls) for cls in registered())
    raise InvalidFieldError(
        "type", name, f"known types and versions are: {known}", Reason.WRONG_VERSION
    )


def encode(message: Message) -> bytes:
    """The message as its JSON body.

    Raises:
        PermanentError: the body would be larger than `MAX_BODY_BYTES` (reason `too-large`).
    """
    body = _ENCODER.encode(message)
    if len(body) > MAX_BODY_BYTES:
        raise PermanentError(
            Reason.TOO_LARGE,
            f"{type_name(type(message))} has {len(body)} bytes, the limit is {MAX_BODY_BYTES};"
            " send bigger inputs by reference",
        )
    return body


def decode(cls: type[M], body: bytes) -> M:
    """The message in `body`, strictly typed.

    Raises:
        InvalidFieldError: not JSON, a missing field or a wrong type; names the field's path.
        PermanentError: larger than `MAX_BODY_BYTES`.
    """
    if len(body) > MAX_BODY_BYTES:
        raise PermanentError(Reason.TOO_LARGE, f"{len(body)} bytes, the limit is {MAX_BODY_BYTES}")
    decoder = _DECODERS.get(cls)
    if decoder is None:
        decoder = _DECODERS[cls] = msgspec.json.Decoder(cls)
    try:
        message: M = decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise explain(error) from error
    return message


def explain(error: Exception) -> InvalidFieldError:
    """A decoding fault as an error that names the field's path, what was there and the remedy."""
    text = str(error)
    path = match[1] if (match := _PATH.search(text)) else ""
    bare = _PATH.sub("", text)
    if missing := _MISSING.search(bare):
        path = f"{path}.{missing[1]}".strip(".")
        return InvalidFieldError(path, "(absent)", "this field is required", Reason.MALFORMED)
    if unknown := _UNKNOWN.search(bare):
        path = f"{path}.{unknown[1]}".strip(".")
        return InvalidFieldError(path, "(given)", "no such field; leave it out", Reason.MALFORMED)
    if not isinstance(error, msgspec.ValidationError):
        return InvalidFieldError("body", bare, "send one UTF-8 JSON object", Reason.MALFORMED)
    return InvalidFieldError(
        path or "body", bare, "see the schema of this message", Reason.MALFORMED
    )
