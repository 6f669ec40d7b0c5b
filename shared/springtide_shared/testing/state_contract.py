"""What every `ServiceState` must do, as cases that run on each adapter, each on an empty one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from springtide_shared.errors import ConflictError, InvalidFieldError, Reason
from springtide_shared.ports.state import Document, ServiceState
from springtide_shared.testing.expecting import refused

Case = Callable[[ServiceState], Awaitable[None]]
CASES: Final[dict[str, Case]] = {}
"""Every case by name."""


def case(function: Case) -> Case:
    """Register a case under its function's name."""
    CASES[function.__name__] = function
    return function


@case
async def a_document_comes_back_with_its_version(state: ServiceState) -> None:
    assert await state.load("saga.1") is None
    assert await state.save("saga.1", b"one", 0) == 1
    assert await state.load("saga.1") == Document("saga.1", 1, b"one")
    for version, body in ((2, b""), (3, bytes(range(256))), (4, b"12\n34\n"), (5, b"x" * 262_144)):
        assert await state.save("saga.1", body, version - 1) == version
        assert await state.load("saga.1") == Document("saga.1", version, body)


@case
async def a_stale_writer_is_refused(state: ServiceState) -> None:
    await refused(ConflictError, state.save("k", b"x", 1))
    assert await state.load("k") is None
    await state.save("k", b"one", 0)
    await refused(ConflictError, state.save("k", b"x", 0))
    await state.save("k", b"two", 1)
    for wrong in (0, 1, 3):
        await refused(ConflictError, state.save("k", b"x", wrong))
        await refused(ConflictError, state.delete("k", wrong))
    assert await state.load("k") == Document("k", 2, b"two")


@case
async def a_deleted_document_is_gone(state: ServiceState) -> None:
    await state.delete("k", 0)
    await state.delete("k", 7)
    await state.save("k", b"one", 0)
    await state.delete("k", 1)
    assert await state.load("k") is None
    assert list(await state.list("")) == []
    await refused(ConflictError, state.save("k", b"x", 1))


@case
async def who_knew_a_deleted_document_cannot_touch_its_successor(state: ServiceState) -> None:
    first = await state.save("k", b"one", 0)
    await state.delete("k", first)
    second = await state.save("k", b"another", 0)
    assert second > first
    await refused(ConflictError, state.save("k", b"x", first))
    await refused(ConflictError, state.delete("k", first))
    assert await state.load("k") == Document("k", second, b"another")


@case
async def listing_is_by_prefix_in_key_order(state: ServiceState) -> None:
    names = [
        "b",
        "a",
        "a.b",
        "a-b",
        "ab",
        "a_",
        "0",
        ".",
        "..",
        ".lock",
        "lock",
        "floor",
        "x" * 128,
    ]
    for name in names:
        await state.save(name, name.encode(), 0)
    for prefix in ("", "a", "a.", "b", "zz", ".", "x" * 128):
        expected = [Document(n, 1, n.encode()) for n in sorted(names) if n.startswith(prefix)]
        assert list(await state.list(prefix)) == expected, prefix


@case
async def of_racing_writers_one_wins(state: ServiceState) -> None:
    await state.save("k", b"start", 0)

    async def attempt(number: int) -> bool:
        try:
            await state.save("k", b"%d" % number, 1)
        except ConflictError:
            return False
        return True

    won = await asyncio.gather(*(attempt(number) for number in range(10)))
    assert sum(won) == 1
    assert await state.load("k") == Document("k", 2, b"%d" % won.index(True))


@case
async def bad_keys_and_bodies_are_refused(state: ServiceState) -> None:
    for key in ("", "A", "a/b", "../x", "a b", "é", "a\n", "x" * 129):
        for call in (state.load(key), state.save(key, b"x", 0), state.delete(key, 0)):
            assert (await refused(InvalidFieldError, call)).field == "key"
    for prefix in ("A", "a/", "../"):
        assert (await refused(InvalidFieldError, state.list(prefix))).field == "prefix"
    too_large = await refused(InvalidFieldError, state.save("k", b"x" * (256 * 1024 + 1), 0))
    assert too_large.reason is Reason.TOO_LARGE
    assert (await refused(InvalidFieldError, state.save("k", b"", -1))).field == "expected"
    assert list(await state.list("")) == []
