"""Objects, documents and leases in directories: several processes, deaths, disks that fail."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest

from springtide_shared.adapters import files
from springtide_shared.adapters.directory_state import DirectoryLeases, DirectoryState
from springtide_shared.adapters.directory_store import DirectoryStore
from springtide_shared.errors import PermanentError, Reason, TransientError
from springtide_shared.ports.state import Document
from springtide_shared.testing.expecting import refused
from springtide_shared.testing.lease_contract import SetClock


async def _unavailable(call: Awaitable[object]) -> TransientError:
    error = await refused(TransientError, call)
    assert error.reason is Reason.STORE_UNAVAILABLE
    return error


def _python(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


# ---- processes that race --------------------------------------------------------------------

_LEASE_RACER = """
import asyncio, sys
from pathlib import Path
from springtide_shared.adapters.directory_state import DirectoryLeases
from springtide_shared.testing.lease_contract import SetClock

async def main(root, holder):
    # ever later, so that the other's lease is always over by the next round
    clock = SetClock(0.0)
    leases = DirectoryLeases(Path(root), clock, sync=False)
    for round in range(100):
        lease = await leases.acquire("x", holder, 1e6)
        if lease is not None:
            print(lease.token, flush=True)
            await leases.release(lease)

asyncio.run(main(*sys.argv[1:]))
"""


def test_no_token_is_given_to_two_processes(tmp_path: Path) -> None:
    racers = [_python(_LEASE_RACER, tmp_path, f"holder-{i}") for i in range(3)]
    tokens: list[list[int]] = []
    for racer in racers:
        output, _ = racer.communicate(timeout=60)
        assert racer.returncode == 0
        tokens.append([int(line) for line in output.split()])
    everything = [token for own in tokens for token in own]
    assert len(everything) >= 100
    assert len(set(everything)) == len(everything)
    assert sorted(everything) == list(range(1, len(everything) + 1))
    assert all(own == sorted(own) for own in tokens)


_STATE_RACER = """
import asyncio, sys
from pathlib import Path
from springtide_shared.adapters.directory_state import DirectoryState
from springtide_shared.errors import ConflictError

async def main(root):
    state = DirectoryState(Path(root), sync=False)
    for _ in range(100):
        while True:
            found = await state.load("counter")
            count, version = (0, 0) if found is None else (int(found.body), found.version)
            try:
                await state.save("counter", b"%d" % (count + 1), version)
                break
            except ConflictError:
                pass

asyncio.run(main(sys.argv[1]))
"""


def test_no_update_of_a_document_is_lost(tmp_path: Path) -> None:
    racers = [_python(_STATE_RACER, tmp_path) for _ in range(3)]
    for racer in racers:
        racer.communicate(timeout=60)
        assert racer.returncode == 0
    found = asyncio.run(DirectoryState(tmp_path).load("counter"))
    assert found == Document("counter", 300, b"300")


_STORE_RACER = """
import asyncio, sys
from pathlib import Path
from springtide_shared.adapters.directory_store import DirectoryStore

async def main(root, name):
    store = DirectoryStore(Path(root), sync=False)
    for number in range(200):
        if await store.put_if_absent(f"record/{number}/r", name.encode()):
            print(number)
        await store.put(f"shared/{number % 3}/x", name.encode() * 1000)
        await store.delete(f"shared/{number % 3}/x")  # takes the folder away under the others

asyncio.run(main(*sys.argv[1:]))
"""


def test_each_record_is_written_by_one_process(tmp_path: Path) -> None:
    racers = {name: _python(_STORE_RACER, tmp_path, name) for name in ("a", "b", "c")}
    written: dict[int, str] = {}
    for name, racer in racers.items():
        output, _ = racer.communicate(timeout=60)
        assert racer.returncode == 0
        for number in map(int, output.split()):
            assert number not in written
            written[number] = name
    assert sorted(written) == list(range(200))

    async def look() -> None:
        store = DirectoryStore(tmp_path)
        for number, name in written.items():
            assert await store.get(f"record/{number}/r") == name.encode()
        assert list(await store.list("shared/")) == []

    asyncio.run(look())


# ---- deaths ---------------------------------------------------------------------------------

_STORE_WRITER = """
import asyncio, itertools, sys
from pathlib import Path
from springtide_shared.adapters.directory_store import DirectoryStore

async def main(root):
    store = DirectoryStore(Path(root), sync=False)
    for number in itertools.count():
        await store.put("k", bytes([number % 256]) * 4_000_000)
        print(number, flush=True)

asyncio.run(main(sys.argv[1]))
"""


def test_a_killed_writer_leaves_no_half_object(tmp_path: Path) -> None:
    for kill_after in (1, 2, 5, 9):
        with _python(_STORE_WRITER, tmp_path) as writer:
            assert writer.stdout is not None
            for _ in range(kill_after):
                writer.stdout.readline()
            time.sleep(0.0007 * kill_after)
            writer.kill()
        data = asyncio.run(DirectoryStore(tmp_path).get("k"))
        assert len(data) == 4_000_000
        assert data == data[:1] * len(data)
    incoming = tmp_path / "incoming"
    (incoming / "yesterday").write_bytes(b"x")
    (incoming / "fresh").write_bytes(b"x")
    old = time.time() - 90_000
    os.utime(incoming / "yesterday", (old, old))
    DirectoryStore(tmp_path)
    left = {path.name for path in incoming.iterdir()}
    assert "yesterday" not in left
    assert "fresh" in left, "another process may still be writing it"


_LOCK_HOLDER = """
import sys, time
from pathlib import Path
from springtide_shared.adapters.files import only_writer

with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_is_waited_for_with_a_limit_and_freed_by_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.only_writer.__wrapped__, "__defaults__", (0.3,))  # type: ignore[attr-defined]
    state, leases = DirectoryState(tmp_path), DirectoryLeases(tmp_path, SetClock())
    with _python(_LOCK_HOLDER, tmp_path / "LOCK") as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"

        async def blocked() -> None:
            await _unavailable(state.save("k", b"x", 0))
            await _unavailable(leases.acquire("l", "a", 5.0))
            assert await state.load("k") is None, "reading needs no lock"

        asyncio.run(blocked())
        os.kill(holder.pid, signal.SIGKILL)

    async def free() -> None:
        assert await state.save("k", b"x", 0) == 1
        assert await leases.acquire("l", "a", 5.0) is not None

    asyncio.run(free())


def test_a_token_outlives_the_process_and_an_unfinished_write(tmp_path: Path) -> None:
    clock = SetClock()

    async def take() -> int:
        lease = await DirectoryLeases(tmp_path, clock).acquire("l", "a", 5.0)
        assert lease is not None
        return lease.token

    first = asyncio.run(take())
    (tmp_path / "NEW").write_bytes(b"{half a rec")  # of a writer that died before its rename
    clock.at += 6
    assert asyncio.run(take()) == first + 1


def test_a_damaged_file_of_ours_is_reported_not_overwritten(tmp_path: Path) -> None:
    state, leases = DirectoryState(tmp_path / "s"), DirectoryLeases(tmp_path / "l", SetClock())
    (tmp_path / "s" / "k.doc").write_bytes(b"not ours")
    (tmp_path / "l" / "k.doc").write_bytes(b"not ours")

    async def run() -> None:
        for call in (state.load("k"), state.save("k", b"x", 0), leases.acquire("k", "a", 5.0)):
            error = await refused(PermanentError, call)
            assert error.reason is Reason.INTERNAL
            assert "k.doc" in str(error)

    asyncio.run(run())
    assert (tmp_path / "s" / "k.doc").read_bytes() == b"not ours"


# ---- disks ----------------------------------------------------------------------------------


def test_a_store_that_is_gone_is_not_an_empty_one(tmp_path: Path) -> None:
    root, local = tmp_path / "store", tmp_path / "local"
    local.write_bytes(b"x")
    store = DirectoryStore(root)
    state, leases = DirectoryState(tmp_path / "s"), DirectoryLeases(tmp_path / "l", SetClock())

    async def run() -> None:
        await store.put("a/k", b"x")
        await state.save("k", b"x", 0)
        for path in (root, tmp_path / "s", tmp_path / "l"):
            shutil.rmtree(path)
        for call in (
            store.put("a/k", b"y"),
            store.put_if_absent("a/k", b"y"),
            store.put_file("a/k", local),
            store.get("a/k"),
            store.get_file("a/k", tmp_path / "copy"),
            store.head("a/k"),
            store.list(""),
            store.delete("a/k"),
            state.load("k"),
            state.save("k", b"y", 1),
            state.list(""),
            state.delete("k", 1),
            leases.acquire("l", "a", 5.0),
        ):
            await _unavailable(call)

    asyncio.run(run())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["local"], "nothing is made anew"


def test_a_disk_that_takes_no_more_is_unavailable(tmp_path: Path) -> None:
    """A limit on file size stands for the full disk: the kernel refuses the same write."""
    store, state = DirectoryStore(tmp_path / "store"), DirectoryState(tmp_path / "state")

    async def run() -> None:
        await store.put("k", b"before")
        await state.save("k", b"before", 0)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        try:
            await _unavailable(store.put("k", b"x" * 50_000))
            await _unavailable(store.put_if_absent("new", b"x" * 50_000))
            await _unavailable(state.save("k", b"x" * 50_000, 1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert await store.get("k") == b"before"
        assert await store.head("new") is None
        assert await state.load("k") == Document("k", 1, b"before")
        assert await state.save("k", b"after", 1) == 2

    asyncio.run(run())
    assert list((tmp_path / "store" / "incoming").iterdir()) == []


def test_a_root_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TransientError):
        DirectoryStore(tmp_path / "file" / "store")
    with pytest.raises(TransientError):
        DirectoryState(tmp_path / "file" / "state")


def test_links_laid_into_the_store_are_not_followed_by_listing(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"x")

    async def run() -> None:
        await store.put("a/k", b"x")
        (tmp_path / "store/objects/a/folder").symlink_to(tmp_path / "outside")
        (tmp_path / "store/objects/a/link").symlink_to(tmp_path / "outside/secret")
        assert [info.key for info in await store.list("")] == ["a/k"]

    asyncio.run(run())


def test_listing_opens_only_folders_that_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path, sync=False)
    opened: list[str] = []
    scandir = os.scandir

    def counted(path: Path) -> object:
        opened.append(str(Path(path).relative_to(tmp_path / "objects")))
        return scandir(path)

    async def run() -> None:
        for job in range(20):
            for task in range(3):
                await store.put(f"job-{job:02}/{task}/out", b"x")
        monkeypatch.setattr(os, "scandir", counted)
        await store.list("job-07/1/")
        assert sorted(opened) == [".", "job-07", "job-07/1"]
        opened.clear()
        page = await store.list("", limit=2, after="job-18/1/out")
        assert [info.key for info in page] == ["job-18/2/out", "job-19/0/out"]
        assert "job-17" not in opened
        assert "job-19/2" not in opened

    asyncio.run(run())


def test_lock_files_exclude_openers_of_the_same_process(tmp_path: Path) -> None:
    with (
        files.only_writer(tmp_path / "LOCK"),
        (tmp_path / "LOCK").open("ab") as other,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
