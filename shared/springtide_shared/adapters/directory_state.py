"""ServiceState and Leases in a directory, for services that share one machine."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from springtide_shared.adapters.documents import changed_since, check_document, check_prefix
from springtide_shared.adapters.files import (
    in_thread_if,
    only_writer,
    replace_file,
    sync_folder,
    unavailable,
)
from springtide_shared.adapters.leasing import LeaseRecord, granted, released
from springtide_shared.errors import PermanentError, Reason
from springtide_shared.ports.clock import Clock
from springtide_shared.ports.state import Document, Lease

T = TypeVar("T")

_SUFFIX = ".doc"


class _Folder:
    """One directory with one lock; names of ours are upper case, keys and names never are."""

    def __init__(self, root: Path, what: str, *, sync: bool) -> None:
        self.root = root
        self.sync = sync
        self._what = what
        with self.translated():
            root.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unavailable(self._what, error, path=str(self.root)) from error

    async def change(self, work: Callable[[], T]) -> T:
        """Run `work` as the only writer, in a thread: it waits for the lock and the disk."""

        def locked() -> T:
            with self.translated(), only_writer(self.root / "LOCK"):
                return work()

        return await in_thread_if(True, locked)

    async def look(self, work: Callable[[], T], *, heavy: bool = False) -> T:
        """Run `work`, which only reads. A file is replaced as a whole, so no lock is needed."""

        def translated() -> T:
            with self.translated():
                if not self.root.is_dir():  # unmounted or removed is not the same as empty
                    raise OSError(errno.ENOENT, "the directory is gone")
                return work()

        return await in_thread_if(heavy, translated)

    def path(self, name: str) -> Path:
        return self.root / f"{name}{_SUFFIX}"

    def read(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def write(self, path: Path, data: bytes) -> None:
        replace_file(path, data, sync=self.sync)

    def remove(self, path: Path) -> None:
        path.unlink()
        if self.sync:
            sync_folder(self.root)


class DirectoryState:
    """One file per document: a line with its version, then the body.

    Args:
        root: made if absent; one directory per service and cluster.
        sync: put each change on the disk before the call returns (else a power cut may undo it).

    Raises:
        TransientError: `root` cannot be made.
    """

    def __init__(self, root: Path, *, sync: bool = True) -> None:
        self._folder = _Folder(root, "service state", sync=sync)

    async def load(self, key: str) -> Document | None:
        """See `ServiceState.load`."""
        check_document(key)
        return await self._folder.look(lambda: self._load(key))

    async def save(self, key: str, body: bytes, expected: int) -> int:
        """See `ServiceState.save`."""
        check_document(key, body, expected)

        def work() -> int:
            found = self._version(key)
            if found != expected:
                raise changed_since(key, expected, found)
            version = (found or self._floor()) + 1
            self._folder.write(self._folder.path(key), b"%d\n" % version + body)
            return version

        return await self._folder.change(work)

    async def delete(self, key: str, expected: int) -> None:
        """See `ServiceState.delete`."""
        check_document(key, expected=expected)

        def work() -> None:
            found = self._version(key)
            if found == 0:
                return
            if found != expected:
                raise changed_since(key, expected, found)
            # The floor first: dying in between must not let the key come back below it.
            if found > self._floor():
                self._folder.write(self._folder.root / "FLOOR", b"%d" % found)
            self._folder.remove(self._folder.path(key))

        await self._folder.change(work)

    async def list(self, prefix: str) -> Sequence[Document]:
        """See `ServiceState.list`."""
        check_prefix(prefix)

        def work() -> list[Document]:
            keys = [
                path.name.removesuffix(_SUFFIX)
                for path in self._folder.root.iterdir()
                if path.name.endswith(_SUFFIX)
            ]
            found = (self._load(key) for key in sorted(keys) if key.startswith(prefix))
            return [document for document in found if document is not None]

        return await self._folder.look(work, heavy=True)

    def _load(self, key: str) -> Document | None:
        data = self._folder.read(self._folder.path(key))
        if data is None:
            return None
        version, _, body = data.partition(b"\n")
        if not version.isdigit():
            raise _damaged(self._folder.path(key))
        return Document(key, int(version), body)

    def _version(self, key: str) -> int:
        document = self._load(key)
        return 0 if document is None else document.version

    def _floor(self) -> int:
        """Highest version of any deleted document: a key that comes back starts above it, so that
        a writer who knew the deleted one is refused."""
        return int(self._folder.read(self._folder.root / "FLOOR") or b"0")


class DirectoryLeases:
    """One small file per lease, kept for good: its token only grows.

    Args:
        root: made if absent; shared by all who compete.
        clock: its `now` decides what has expired; all who compete must agree on it.
        sync: put each change on the disk before the call returns.

    Raises:
        TransientError: `root` cannot be made.
    """

    def __init__(self, root: Path, clock: Clock, *, sync: bool = True) -> None:
        self._folder = _Folder(root, "lease keeper", sync=sync)
        self._clock = clock

    async def acquire(self, name: str, holder: str, ttl: float) -> Lease | None:
        """See `Leases.acquire`."""
        granted(None, name, holder, ttl, 0.0)  # refuses bad values before a file gets their name

        def work() -> Lease | None:
            # the clock is read under the lock: waiting for it must not lengthen anyone's lease
            record = granted(self._load(name), name, holder, ttl, self._clock.now())
            if record is None:
                return None
            self._save(name, record)
            return record.lease(name)

        return await self._folder.change(work)

    async def release(self, lease: Lease) -> None:
        """See `Leases.release`."""

        def work() -> None:
            record = released(self._load(lease.name), lease)
            if record is not None:
                self._save(lease.name, record)

        await self._folder.change(work)

    def _load(self, name: str) -> LeaseRecord | None:
        path = self._folder.path(name)
        data = self._folder.read(path)
        if data is None:
            return None
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(data, type=LeaseRecord)
        raise _damaged(path)

    def _save(self, name: str, record: LeaseRecord) -> None:
        self._folder.write(self._folder.path(name), msgspec.json.encode(record))


def _damaged(path: Path) -> PermanentError:
    return PermanentError(
        Reason.INTERNAL,
        "a file of ours is damaged: somebody else wrote it, or the disk did; look at it before"
        " removing it",
        path=str(path),
    )
