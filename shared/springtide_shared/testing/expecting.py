"""How contract cases say that a call must be refused."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

E = TypeVar("E", bound=Exception)


async def refused(kind: type[E], call: Awaitable[object]) -> E:
    """The error of a call that must raise `kind`; any other error passes."""
    try:
        answer = await call
    except kind as error:
        return error
    raise AssertionError(f"not refused with {kind.__name__}: it answered {answer!r}")
