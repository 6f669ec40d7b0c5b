"""The task's corner of the store, with faults in the middle of everything."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from springtide_agent.depot import Depot
from springtide_agent.files import LocalFile
from springtide_shared.adapters.memory_store import InMemoryStore
from springtide_shared.errors import TransientError
from springtide_shared.messages.records import (
    CompletionRecord,
    Manifest,
    manifests_prefix,
    part_key,
    record_key,
)
from springtide_shared.messages.task import AttemptKey

JOB = "j"


def depot(store: InMemoryStore, attempt: int = 1, uid: str = "u") -> Depot:
    return Depot(store, AttemptKey(JOB, 3, attempt), uid)


def draft(attempt: int = 1) -> Manifest:
    return Manifest(
        job_id=JOB,
        index=3,
        attempt=attempt,
        pod_uid="u",
        seq=0,
        created_at=1.0,
        progress_seconds=2.0,
    )


def local(folder: Path, name: str, body: bytes) -> LocalFile:
    path = folder / name
    path.write_bytes(body)
    return LocalFile(path=name, local=path, size=len(body), sha256=hashlib.sha256(body).hexdigest())


def record(attempt: int, uid: str = "u", exit_code: int = 0) -> CompletionRecord:
    return CompletionRecord(
        job_id=JOB,
        index=3,
        attempt=attempt,
        pod_uid=uid,
        exit_code=exit_code,
        started_at=1.0,
        ended_at=2.0,
        progress_seconds=1.0,
    )


def test_equal_parts_are_uploaded_once(tmp_path: Path) -> None:
    async def main() -> None:
        store = InMemoryStore()
        one = depot(store)
        same, other = local(tmp_path, "same", b"s" * 100), local(tmp_path, "other", b"1")
        first = await one.save([same, other], draft())
        before = store.faults.calls["put_file"]
        second = await one.save([same, local(tmp_path, "other", b"2")], draft())
        assert store.faults.calls["put_file"] == before + 1
        assert (first.manifest.seq, second.manifest.seq) == (1, 2)

    asyncio.run(main())


def test_any_fault_while_saving_leaves_the_checkpoint_before_restorable(tmp_path: Path) -> None:
    async def main(failing: int, after_effect: bool) -> bool:
        store = InMemoryStore()
        one = depot(store)
        files = [local(tmp_path, name, name.encode()) for name in ("a", "b")]
        await one.save(files, draft())
        changed = [local(tmp_path, name, b"new " + name.encode()) for name in ("a", "b")]
        store.faults.calls.clear()
        skip = iter(range(failing))
        real = store.faults.call

        def call(operation: str):  # type: ignore[no-untyped-def]
            if next(skip, None) is None:
                store.faults.fail_next(1, after_effect=after_effect)
                store.faults.call = real  # type: ignore[method-assign]
            return real(operation)

        store.faults.call = call  # type: ignore[method-assign]
        try:
            newest = await one.save(changed, draft())
            await one.prune(newest, 2)
            struck = store.faults.call == real
        except TransientError:
            struck = True
        store.faults.call = real  # type: ignore[method-assign]
        restored = await depot(store, 2).restore(tmp_path / "to", tmp_path / "scratch")
        assert restored.found is not None
        assert not restored.passed_over
        got = {path.name: path.read_bytes() for path in (tmp_path / "to").iterdir()}
        assert got in (
            {"a": b"a", "b": b"b"},
            {"a": b"new a", "b": b"new b"},
        )
        return struck

    for after_effect in (False, True):
        runs = [asyncio.run(main(number, after_effect)) for number in range(20)]
        assert runs[0]
        assert not runs[-1], "the last runs are without a fault: all places were struck"


def test_prune_never_deletes_parts_that_a_kept_manifest_names(tmp_path: Path) -> None:
    async def main() -> None:
        store = InMemoryStore()
        one = depot(store)
        same = local(tmp_path, "same", b"same")
        for number in range(5):
            files = [same, local(tmp_path, "n", str(number).encode())]
            newest = await one.save(files, draft())
            await one.prune(newest, 2)
        manifests = await one.manifests()
        assert [found.manifest.seq for found in manifests] == [4, 5]
        parts = {info.key for info in await store.list(part_key(JOB, 3, ""))}
        assert parts == {file.key for found in manifests for file in found.manifest.files}

    asyncio.run(main())


def test_prune_deletes_nothing_while_the_new_one_is_not_whole(tmp_path: Path) -> None:
    async def main() -> None:
        store = InMemoryStore()
        one = depot(store)
        saved = [await one.save([local(tmp_path, "n", b"%d" % n)], draft()) for n in range(3)]
        await store.delete(saved[-1].manifest.files[0].key)
        assert await one.prune(saved[-1], 2) == 0
        assert len(await one.manifests()) == 3

    asyncio.run(main())


def test_a_part_found_damaged_is_written_again(tmp_path: Path) -> None:
    async def main() -> None:
        store = InMemoryStore()
        file = local(tmp_path, "n", b"good")
        found = await depot(store).save([file], draft())
        key = found.manifest.files[0].key
        await store.put(key, b"evil")
        two = depot(store, 2)
        restored = await two.restore(tmp_path / "to", tmp_path / "scratch")
        assert restored.found is None
        assert restored.passed_over == (found.key,)
        await two.save([file], draft(2))
        assert await store.get(key) == b"good"

    asyncio.run(main())


def test_numbers_go_on_behind_what_this_attempt_left(tmp_path: Path) -> None:
    async def main() -> None:
        store = InMemoryStore()
        for _ in range(2):
            await depot(store).save([local(tmp_path, "n", b"x")], draft())
        names = [info.key for info in await store.list(manifests_prefix(JOB, 3))]
        assert [name.rpartition("/")[2] for name in names] == [
            "00001-000001.json",
            "00001-000002.json",
        ]

    asyncio.run(main())


def test_the_lowest_valid_record_is_found_among_many_objects() -> None:
    async def main() -> None:
        store = InMemoryStore()
        for attempt in range(1, 9):
            for number in range(30):
                await store.put(
                    f"jobs/j/tasks/0000003/attempts/{attempt:05d}/outputs/{number}", b""
                )
        await depot(store, 2).complete(record(2, exit_code=1))
        await depot(store, 5).complete(record(5))
        await depot(store, 7).complete(record(7))
        store.faults.calls.clear()
        found = await depot(store, 8).success_record()
        assert found is not None
        assert found.attempt == 5
        assert store.faults.calls["list"] <= 6, "it skips whole attempts"
        assert await depot(store, 4).success_record() is None

    asyncio.run(main())


def test_a_record_whose_answer_was_lost_is_ours_and_another_pod_s_is_not() -> None:
    async def main() -> None:
        store = InMemoryStore()
        store.faults.fail_next(1, after_effect=True)
        one = depot(store)
        with pytest.raises(TransientError):
            await one.complete(record(1))
        assert await one.complete(record(1)) is None
        body = await store.get(record_key(JOB, 3, 1))
        assert hashlib.sha256(body).hexdigest() == Depot.digest_of(record(1))
        other = await depot(store, uid="v").complete(record(1, "v"))
        assert other is not None
        assert other.digest == Depot.digest_of(record(1))

    asyncio.run(main())
