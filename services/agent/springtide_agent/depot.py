"""The task's corner of the object store: records, manifests, parts, outputs, logs.

Whatever names other objects is written after them, so that a reader who finds it finds all of it.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from springtide_agent.files import LocalFile, digest, is_safe_path
from springtide_agent.policy import superseded
from springtide_shared.errors import NotFoundError
from springtide_shared.messages.records import (
    CompletionRecord,
    Manifest,
    StoredFile,
    log_key,
    manifest_key,
    manifests_prefix,
    output_key,
    part_key,
    record_key,
    task_prefix,
)
from springtide_shared.messages.task import AttemptKey
from springtide_shared.ports.store import ObjectInfo, ObjectStore

_PAGE: Final = 1_000
_ENCODER: Final = msgspec.json.Encoder(order="deterministic")


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A valid completion record that some attempt of the task left."""

    attempt: int
    digest: str


@dataclass(frozen=True, slots=True)
class FoundManifest:
    """A readable manifest of this task and its key; its parts are not verified yet."""

    key: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Restored:
    """What the program goes on from. `passed_over`: newer manifests that were damaged."""

    found: FoundManifest | None
    passed_over: tuple[str, ...]


class _DamagedError(Exception):
    """A part is missing or not what the manifest says."""


class Depot:
    """Reads and writes the objects of one task on behalf of one attempt.

    All methods raise what the store raises (`TransientError`, `PermanentError`); all may be
    repeated after a fault.
    """

    def __init__(self, store: ObjectStore, key: AttemptKey, pod_uid: str) -> None:
        self._store = store
        self._key = key
        self._pod_uid = pod_uid
        self._broken: frozenset[str] = frozenset()
        self._distrusted: frozenset[str] = frozenset()
        """Parts that were found damaged: they are written again even though they exist."""
        self._seq = 0

    # ------------------------------------------------------------ the record
    async def success_record(self) -> FoundRecord | None:
        """The valid record of an attempt up to this one; of several, the lowest attempt's."""
        job, index = self._key.job_id, self._key.index
        attempts = f"{task_prefix(job, index)}attempts/"
        after = ""
        while found := await self._store.list(attempts, limit=1, after=after):
            name = found[0].key[len(attempts) :].split("/", 1)[0]
            after = f"{attempts}{name}0"  # "0" sorts right behind "/": skips the whole attempt
            if name.isdecimal() and int(name) <= self._key.attempt:
                record = await self._record_of(int(name))
                if record is not None:
                    return record
        return None

    async def _record_of(self, attempt: int) -> FoundRecord | None:
        job, index = self._key.job_id, self._key.index
        try:
            body = await self._store.get(record_key(job, index, attempt))
        except NotFoundError:
            return None
        try:
            record = msgspec.json.decode(body, type=CompletionRecord)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        named = (record.job_id, record.index, record.attempt, record.exit_code)
        if named != (job, index, attempt, 0):
            return None
        return FoundRecord(attempt, hashlib.sha256(body).hexdigest())

    async def complete(self, record: CompletionRecord) -> FoundRecord | None:
        """Leave the record; None if it is there now, else the other pod's that was there first."""
        body = _ENCODER.encode(record)
        key = record_key(record.job_id, record.index, record.attempt)
        if await self._store.put_if_absent(key, body):
            return None
        there = await self._store.get(key)
        if there == body:
            return None  # an earlier try of ours whose answer was lost
        return FoundRecord(record.attempt, hashlib.sha256(there).hexdigest())

    @staticmethod
    def digest_of(record: CompletionRecord) -> str:
        """SHA-256 of the bytes that `complete` writes."""
        return hashlib.sha256(_ENCODER.encode(record)).hexdigest()

    # ------------------------------------------------------------ restore
    async def manifests(self) -> list[FoundManifest]:
        """All readable manifests of this task, oldest first; foreign and garbled ones left out."""
        found = []
        for info in await self._list(manifests_prefix(self._key.job_id, self._key.index)):
            try:
                body = await self._store.get(info.key)
                manifest = msgspec.json.decode(body, type=Manifest)
            except (NotFoundError, msgspec.DecodeError, UnicodeDecodeError):
                continue
            if self._is_ours(info.key, manifest):
                found.append(FoundManifest(info.key, manifest))
        return found

    def _is_ours(self, key: str, manifest: Manifest) -> bool:
        job, index = self._key.job_id, self._key.index
        return (
            (manifest.job_id, manifest.index) == (job, index)
            and key == manifest_key(job, index, manifest.attempt, manifest.seq)
            and all(
                is_safe_path(file.path) and file.key == part_key(job, index, file.sha256)
                for file in manifest.files
            )
        )

    async def restore(self, target: Path, scratch: Path) -> Restored:
        """Bring the newest whole checkpoint into `target` (emptied before); else the one before.

        Every part's size and SHA-256 are verified before any file appears in `target`.
        """
        passed_over: list[str] = []
        for found in reversed(await self.manifests()):
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            try:
                for file in found.manifest.files:
                    await self._fetch(file, scratch / file.path)
            except _DamagedError:
                passed_over.append(found.key)
                continue
            finally:
                self._broken = frozenset(passed_over)
            shutil.rmtree(target, ignore_errors=True)
            scratch.replace(target)
            return Restored(found, tuple(passed_over))
        return Restored(None, tuple(passed_over))

    async def _fetch(self, file: StoredFile, local: Path) -> None:
        local.parent.mkdir(parents=True, exist_ok=True)
        try:
            await self._store.get_file(file.key, local)
        except NotFoundError as error:
            raise _DamagedError(file.key) from error
        if await digest(local) != (file.size, file.sha256):
            self._distrusted |= {file.key}
            raise _DamagedError(file.key)

    # ------------------------------------------------------------ save
    async def save(self, files: Sequence[LocalFile], draft: Manifest) -> FoundManifest:
        """Upload the parts that are not there yet, then the manifest; returns it as written.

        `draft` carries all but its `seq` and `files`, which are set here.
        """
        job, index = self._key.job_id, self._key.index
        stored = []
        for file in files:
            key = part_key(job, index, file.sha256)
            await self._put_part(key, file)
            stored.append(StoredFile(path=file.path, key=key, size=file.size, sha256=file.sha256))
        if not self._seq:
            self._seq = await self._last_seq()
        while True:
            self._seq += 1
            manifest = msgspec.structs.replace(draft, seq=self._seq, files=stored)
            name = manifest_key(job, index, self._key.attempt, self._seq)
            if await self._store.put_if_absent(name, _ENCODER.encode(manifest)):
                return FoundManifest(name, manifest)

    async def _put_part(self, key: str, file: LocalFile) -> None:
        there = await self._store.head(key)
        if there is None or there.size != file.size or key in self._distrusted:
            await self._store.put_file(key, file.local)
            self._distrusted -= {key}

    async def _last_seq(self) -> int:
        """Highest number that this attempt's manifests bear already."""
        job, index, attempt = self._key.job_id, self._key.index, self._key.attempt
        head = manifest_key(job, index, attempt, 0).rpartition("-")[0] + "-"
        numbers = [info.key[len(head) :].removesuffix(".json") for info in await self._list(head)]
        return max((int(number) for number in numbers if number.isdecimal()), default=0)

    async def prune(self, newest: FoundManifest, keep: int) -> int:
        """Delete what `newest` supersedes, once all its parts are seen in the store.

        Manifests go first, oldest first, then the parts that no manifest left names: whatever
        interrupts this, each manifest that is still there is whole. Returns the manifests deleted.
        """
        for file in newest.manifest.files:
            info = await self._store.head(file.key)
            if info is None or info.size != file.size:
                self._distrusted |= {file.key}
                return 0
        found = await self.manifests()
        keys = [one.key for one in found]
        doomed = superseded(keys, newest.key, self._broken, keep)
        if not doomed:
            return 0
        for key in doomed:
            await self._store.delete(key)
        named = {file.key for one in found if one.key not in doomed for file in one.manifest.files}
        parts = part_key(self._key.job_id, self._key.index, "")
        for info in await self._list(parts):
            if info.key not in named:
                await self._store.delete(info.key)
        return len(doomed)

    # ------------------------------------------------------------ outputs and logs
    async def put_output(self, file: LocalFile) -> StoredFile:
        """Store one declared output under this attempt's prefix."""
        job, index, attempt = self._key.job_id, self._key.index, self._key.attempt
        key = output_key(job, index, attempt, file.path)
        await self._store.put_file(key, file.local)
        return StoredFile(path=file.path, key=key, size=file.size, sha256=file.sha256)

    async def put_log(self, stream: str, path: Path) -> None:
        """Store a log stream (`stdout`, `stderr`) as far as it was written."""
        job, index, attempt = self._key.job_id, self._key.index, self._key.attempt
        if path.exists():
            await self._store.put_file(log_key(job, index, attempt, stream), path)

    async def _list(self, prefix: str) -> list[ObjectInfo]:
        found: list[ObjectInfo] = []
        while True:
            after = found[-1].key if found else ""
            page = await self._store.list(prefix, limit=_PAGE, after=after)
            found += page
            if len(page) < _PAGE:
                return found
