"""Each message names the services that really read it: those that subscribe to it in their code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from springtide_shared.messages import JobAnswer, JobEvents, Message, registered

ROOT = Path(__file__).parents[2]
SERVICES = sorted(path.name for path in (ROOT / "services").iterdir() if path.is_dir())


def types_read(source: str) -> set[str]:
    """Names of the classes in every `Subscription(types=...)` of a module.

    Raises:
        ValueError: the types of one are not written out, so that nobody can tell.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Subscription":
            (types,) = [word.value for word in node.keywords if word.arg == "types"]
            if not isinstance(types, ast.Tuple):
                raise ValueError(f"line {node.lineno}: write the types as a tuple")
            found |= {ast.unparse(item) for item in types.elts}
    return found


def readers() -> dict[str, set[str]]:
    """Class name -> services with a subscription to it."""
    found: dict[str, set[str]] = {}
    for service in SERVICES:
        for file in (ROOT / "services" / service / f"springtide_{service}").rglob("*.py"):
            if file.name != "testing.py":
                for name in types_read(file.read_text(encoding="utf-8")):
                    found.setdefault(name, set()).add(service)
    return found


@pytest.mark.parametrize("cls", registered(), ids=lambda cls: cls.topic)
def test_a_message_names_the_services_that_subscribe_to_it(cls: type[Message]) -> None:
    real = readers().get(cls.__name__, set())
    if cls is JobAnswer:  # sent to an address, not to a topic
        assert (cls.consumers, real) == (("the publisher",), set())
    elif cls is JobEvents:  # the gateway is one listener of many
        assert (cls.consumers, real) == (("anyone",), {"gateway"})
    else:
        assert set(cls.consumers) == real
    assert len(set(cls.consumers)) == len(cls.consumers)


def test_every_subscription_is_to_a_message() -> None:
    assert readers().keys() <= {cls.__name__ for cls in registered()}
    assert readers(), "the scan finds subscriptions at all"
