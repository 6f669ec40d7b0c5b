"""What every `ObjectStore` must do, as cases that run on each adapter, each on an empty store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from springtide_shared.errors import InvalidFieldError, NotFoundError
from springtide_shared.ports.store import ObjectStore
from springtide_shared.testing.expecting import refused

Case = Callable[[ObjectStore, Path], Awaitable[None]]
CASES: Final[dict[str, Case]] = {}
"""Every case by name; the second argument is an empty local folder."""

BIG: Final = bytes(range(256)) * 8_192
"""2 MiB: above every adapter's limit for doing things at once."""


def case(function: Case) -> Case:
    """Register a case under its function's name."""
    CASES[function.__name__] = function
    return function


async def keys(
    store: ObjectStore, prefix: str = "", *, limit: int = 1_000, after: str = ""
) -> list[str]:
    """Keys of one page."""
    return [info.key for info in await store.list(prefix, limit=limit, after=after)]


@case
async def an_object_comes_back_as_it_was_put(store: ObjectStore, _local: Path) -> None:
    for key, data in (("a", b""), ("b/c", b"\x00\xff\r\n"), ("big", BIG), ("Ünï/ç o d:é\n", b"x")):
        info = await store.put(key, data)
        assert (info.key, info.size) == (key, len(data))
        assert await store.get(key) == data
        assert await store.head(key) == info


@case
async def a_put_replaces(store: ObjectStore, _local: Path) -> None:
    await store.put("k", b"a long first version")
    await store.put("k", b"second")
    assert await store.get("k") == b"second"
    assert await keys(store) == ["k"]


@case
async def what_is_absent_is_said_to_be(store: ObjectStore, local: Path) -> None:
    await store.put("a/b", b"x")
    for key in ("nothing", "a", "a/b/c", "a/c"):
        await refused(NotFoundError, store.get(key))
        await refused(NotFoundError, store.get(key, offset=1, length=1))
        await refused(NotFoundError, store.get_file(key, local / "copy"))
        assert await store.head(key) is None
        await store.delete(key)
    assert list(local.iterdir()) == []
    assert await keys(store) == ["a/b"]


@case
async def the_etag_follows_the_content(store: ObjectStore, _local: Path) -> None:
    seen = []
    for number in range(50):
        info = await store.put("k", b"%02d" % number)
        assert await store.head("k") == info
        seen.append(info.etag)
    assert len(set(seen)) == 50
    (listed,) = await store.list("k")
    assert listed.etag == seen[-1]


@case
async def put_if_absent_writes_once(store: ObjectStore, _local: Path) -> None:
    assert await store.put_if_absent("a/k", b"first") is True
    assert await store.put_if_absent("a/k", b"second") is False
    assert await store.get("a/k") == b"first"
    await store.delete("a/k")
    assert await store.put_if_absent("a/k", BIG) is True
    assert await store.get("a/k") == BIG


@case
async def of_racing_writers_one_is_first(store: ObjectStore, _local: Path) -> None:
    if not store.has_conditional_put:
        return
    won = await asyncio.gather(*(store.put_if_absent("deep/er/k", b"%d" % i) for i in range(20)))
    assert sum(won) == 1
    assert await store.get("deep/er/k") == b"%d" % won.index(True)


@case
async def ranges_are_cut_at_the_end(store: ObjectStore, _local: Path) -> None:
    await store.put("k", b"0123456789")
    assert await store.get("k", offset=3) == b"3456789"
    assert await store.get("k", offset=3, length=4) == b"3456"
    assert await store.get("k", length=0) == b""
    assert await store.get("k", offset=8, length=100) == b"89"
    assert await store.get("k", offset=10) == b""
    assert await store.get("k", offset=99, length=5) == b""
    await store.put("big", BIG)
    assert await store.get("big", offset=300, length=1_000_000) == BIG[300:1_000_300]
    await refused(InvalidFieldError, store.get("k", offset=-1))
    await refused(InvalidFieldError, store.get("k", length=-1))


@case
async def files_go_in_and_out(store: ObjectStore, local: Path) -> None:
    source, copy = local / "source", local / "copy"
    source.write_bytes(BIG)
    info = await store.put_file("a/big", source)
    assert (info.key, info.size) == ("a/big", len(BIG))
    assert await store.head("a/big") == info
    assert source.read_bytes() == BIG, "the source stays"
    source.write_bytes(b"changed afterwards")
    copy.write_bytes(b"what was there before")
    await store.get_file("a/big", copy)
    assert copy.read_bytes() == BIG
    assert sorted(path.name for path in local.iterdir()) == ["copy", "source"]
    await refused(FileNotFoundError, store.put_file("a/none", local / "no-such-file"))
    assert await store.head("a/none") is None


@case
async def listing_is_in_key_order_and_in_pages(store: ObjectStore, _local: Path) -> None:
    names = [
        "a", "b-1", "b/1", "b/10", "b/2/x", "b/2-", "b/2.", "b.x", "b0", "c/", "c/d/e/f", "é", "z",
    ]  # fmt: skip
    everything = sorted((n for n in names if not n.endswith("/")), key=str.encode)
    for name in reversed(everything):
        await store.put(name, name.encode())
    assert await keys(store) == everything
    for prefix in ("", "b", "b/", "b/2", "b/2/", "c/d/e/f", "c/d/e/fg", "d", "é", "/"):
        expected = [n for n in everything if n.startswith(prefix)]
        assert await keys(store, prefix) == expected, prefix
        for limit in (1, 2, 5):
            paged: list[str] = []
            while page := await keys(store, prefix, limit=limit, after=paged[-1] if paged else ""):
                assert len(page) <= limit
                paged += page
            assert paged == expected, (prefix, limit)
        for after in ("", "b", "b-", "b/1", "b/2", "b/2/", "b/2/x", "b0", "zz"):
            assert await keys(store, prefix, after=after) == [n for n in expected if n > after]
    assert await keys(store, limit=0) == []
    sizes = {info.key: info.size for info in await store.list("")}
    assert sizes == {name: len(name.encode()) for name in everything}


@case
async def a_deleted_object_is_gone(store: ObjectStore, _local: Path) -> None:
    await store.put("a/b/c", b"x")
    await store.put("a/d", b"y")
    await store.delete("a/b/c")
    await store.delete("a/b/c")
    assert await store.head("a/b/c") is None
    assert await keys(store) == ["a/d"]
    await store.put("a/b", b"a folder before, an object now")
    assert await keys(store) == ["a/b", "a/d"]


@case
async def keys_that_are_no_paths_are_refused(store: ObjectStore, local: Path) -> None:
    bad = [
        "", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "../a", "a/..", "./a", "a/.", "a\0b",
        "\ud800", "x" * 300, "/".join(["abcdefghi"] * 200),
    ]  # fmt: skip
    for key in bad:
        for call in (
            store.put(key, b"x"),
            store.put_if_absent(key, b"x"),
            store.put_file(key, local / "f"),
            store.get(key),
            store.get_file(key, local / "f"),
            store.head(key),
            store.delete(key),
        ):
            error = await refused(InvalidFieldError, call)
            assert error.field == "key"
    assert await keys(store) == []


@case
async def a_key_is_never_anothers_folder(store: ObjectStore, local: Path) -> None:
    """Keys are paths: what S3 would take and a directory cannot hold is refused by all alike."""
    await store.put("a/b", b"x")
    (local / "f").write_bytes(b"z")
    for key in ("a", "a/b/c", "a/b/c/d"):
        await refused(InvalidFieldError, store.put(key, b"y"))
        await refused(InvalidFieldError, store.put_if_absent(key, b"y"))
        await refused(InvalidFieldError, store.put_file(key, local / "f"))
    assert await keys(store) == ["a/b"]
    assert await store.get("a/b") == b"x"


@case
async def readers_never_see_half_an_object(store: ObjectStore, _local: Path) -> None:
    await store.put("k", b"\0" * 300_000)

    async def write() -> None:
        for number in range(1, 30):
            await store.put("k", bytes([number]) * 300_000)

    async def read() -> None:
        while not writing.done():
            data = await store.get("k")
            assert len(data) == 300_000
            assert data == data[:1] * len(data)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(write())
        tasks.create_task(read())
