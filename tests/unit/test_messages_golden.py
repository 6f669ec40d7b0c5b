"""Golden messages: what was once on the wire or in the store is still read and written the same."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from springtide_shared.messages import Message, decode, encode, registered, type_name
from springtide_shared.messages.schemas import RECORDS

GOLDEN = Path(__file__).parent / "golden"
MESSAGES = {type_name(cls): cls for cls in registered()}
ALL: dict[str, type[msgspec.Struct]] = {**MESSAGES, **{cls.__name__: cls for cls in RECORDS}}


def golden(name: str) -> bytes:
    return (GOLDEN / f"{name}.json").read_bytes().removesuffix(b"\n")


def test_every_message_and_record_has_one() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.json")) == sorted(ALL)


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_a_golden_message_is_decoded_and_encoded_to_the_byte(name: str) -> None:
    message: Message = decode(MESSAGES[name], golden(name))
    assert encode(message) == golden(name)


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: str(cls.__name__))
def test_a_golden_record_is_decoded_and_encoded_to_the_byte(cls: type[msgspec.Struct]) -> None:
    body = golden(cls.__name__)
    assert msgspec.json.encode(msgspec.json.decode(body, type=cls), order="deterministic") == body


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_golden_message_says_nothing_by_default(name: str) -> None:
    """A field left at its default is not in the file, so the file would not notice its renaming."""
    decoded = msgspec.json.decode(golden(name), type=ALL[name])
    given = msgspec.json.decode(golden(name))
    required = {field.name for field in msgspec.structs.fields(ALL[name]) if field.required}
    assert required <= set(given)
    assert len(given) == len(msgspec.to_builtins(decoded)), "fields that the code does not know"
