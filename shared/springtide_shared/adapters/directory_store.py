"""The object store in a directory: one file per object, for the embedded stack and for tests."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from springtide_shared.adapters.files import in_thread_if, sync_folder, unavailable, write_new
from springtide_shared.adapters.keys import check_key, check_range, path_conflict
from springtide_shared.errors import NotFoundError, Reason
from springtide_shared.ports.store import ObjectInfo

T = TypeVar("T")

SMALL_BYTES: Final = 256 * 1024
"""Reads and unsynced writes up to this size happen on the event loop: tens of microseconds."""
_PUT_TRIES: Final = 100
"""Each try is lost only to a delete of another process in the microseconds between two calls."""


class DirectoryStore:
    """Objects are files below `root/objects`; what is being written lies in `root/incoming`.

    A finished file is moved or linked to its name in one step. What a killed writer leaves in
    `incoming` is dropped by the next store that finds it a day old.

    Args:
        root: made if absent; on one file system.
        sync: put each object on the disk before the call returns; without it a power cut (not a
            crash of a process) may leave objects empty or gone.

    Raises:
        TransientError: `root` cannot be made.
    """

    def __init__(self, root: Path, *, sync: bool = True) -> None:
        self._root = root
        self._objects = root / "objects"
        self._incoming = root / "incoming"
        self._sync = sync
        with self._translated(""):
            self._objects.mkdir(parents=True, exist_ok=True)
            self._incoming.mkdir(exist_ok=True)
            _sweep(self._incoming)

    @property
    def has_conditional_put(self) -> bool:
        """See `ObjectStore.has_conditional_put`; a hard link is made only if the name is free."""
        return True

    async def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `ObjectStore.put`."""
        target = self._path(key)
        heavy = self._sync or len(data) > SMALL_BYTES
        return await in_thread_if(heavy, lambda: self._put(key, target, data))

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `ObjectStore.put_if_absent`."""
        target = self._path(key)

        def work() -> bool:
            with self._translated(key):
                if target.is_file():  # saves writing the bytes; the link below decides
                    return False
                with self._written(data) as fresh:
                    try:
                        self._name(key, target, lambda: os.link(fresh, target))
                    except FileExistsError:
                        if target.is_dir():
                            raise path_conflict(key, f"{key}/…") from None
                        return False
                return True

        return await in_thread_if(self._sync or len(data) > SMALL_BYTES, work)

    async def put_file(self, key: str, path: Path) -> ObjectInfo:
        """See `ObjectStore.put_file`. Faults of `path` itself are raised as they are (OSError)."""
        target = self._path(key)

        def work() -> ObjectInfo:
            with path.open("rb") as source:
                return self._put(key, target, source)

        return await in_thread_if(True, work)

    async def get(self, key: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """See `ObjectStore.get`."""
        target = self._path(key)
        check_range(offset, length)

        def work(file: BinaryIO) -> bytes:
            with file, self._translated(key):
                file.seek(offset)
                return file.read() if length is None else file.read(length)

        file = self._opened(key, target)
        try:
            rest = max(0, os.fstat(file.fileno()).st_size - offset)
        except BaseException:
            file.close()
            raise
        wanted = rest if length is None else min(rest, length)
        return await in_thread_if(wanted > SMALL_BYTES, lambda: work(file))

    async def get_file(self, key: str, path: Path) -> None:
        """See `ObjectStore.get_file`. Faults of `path` itself are raised as they are (OSError)."""
        target = self._path(key)

        def work() -> None:
            part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
            with self._opened(key, target) as source:
                write_new(part, source, sync=False)
            try:
                part.replace(path)
            except BaseException:
                with suppress(OSError):
                    part.unlink()
                raise

        await in_thread_if(True, work)

    async def head(self, key: str) -> ObjectInfo | None:
        """See `ObjectStore.head`."""
        target = self._path(key)
        with self._translated(key):
            try:
                status = target.stat()
            except (FileNotFoundError, NotADirectoryError):
                self._require_root()
                return None
            return None if target.is_dir() else _info(key, status)

    async def list(
        self, prefix: str, *, limit: int = 1_000, after: str = ""
    ) -> Sequence[ObjectInfo]:
        """See `ObjectStore.list`."""

        def work() -> list[ObjectInfo]:
            found: list[ObjectInfo] = []
            with self._translated(prefix):
                self._require_root()
                for info in _walk(self._objects, "", prefix, after):
                    if len(found) >= limit:
                        break
                    found.append(info)
            return found

        return await in_thread_if(True, work) if limit > 0 else []

    async def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        target = self._path(key)
        with self._translated(key):
            try:
                target.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                self._require_root()
                return
            # Folders are no objects: an emptied one would block its own name for an object.
            for folder in target.parents:
                if folder == self._objects:
                    break
                try:
                    folder.rmdir()
                except OSError:
                    break

    def _path(self, key: str) -> Path:
        return self._objects / check_key(key)

    def _opened(self, key: str, target: Path) -> BinaryIO:
        with self._translated(key):
            try:
                return target.open("rb")
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                self._require_root()
                raise NotFoundError(Reason.NOT_FOUND, "no such object", key=key) from None

    def _put(self, key: str, target: Path, source: bytes | BinaryIO) -> ObjectInfo:
        with self._translated(key), self._written(source) as fresh:
            status = fresh.stat()
            self._name(key, target, lambda: fresh.replace(target))
            return _info(key, status)

    @contextmanager
    def _written(self, source: bytes | BinaryIO) -> Iterator[Path]:
        """A finished file under a name of its own, for the caller to move or link."""
        fresh = self._incoming / uuid.uuid4().hex
        write_new(fresh, source, sync=self._sync)
        try:
            # The kernel stamps files with the time of its last tick (milliseconds): two contents
            # of one size could get one etag. A stamp of our own tells them apart.
            stamp = time.time_ns()
            os.utime(fresh, ns=(stamp, stamp))
            yield fresh
        finally:
            with suppress(FileNotFoundError):
                fresh.unlink()

    def _name(self, key: str, target: Path, give: Callable[[], object]) -> None:
        """Give the finished file its name, making folders; a delete may take them away again."""
        for last in (tries == _PUT_TRIES - 1 for tries in range(_PUT_TRIES)):
            try:
                give()
            except FileNotFoundError:
                if last:
                    raise
                self._require_root()
                self._make_folders(key, target.parent)
            except NotADirectoryError:
                other = self._object_above(target)
                if other is not None or last:
                    raise path_conflict(key, other or "a part of it") from None
            except IsADirectoryError:
                raise path_conflict(key, f"{key}/…") from None
            else:
                break
        if self._sync:
            with suppress(FileNotFoundError):  # deleted already, with its folder
                sync_folder(target.parent)

    def _make_folders(self, key: str, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._sync:
                for made in folder.parents:
                    sync_folder(made)
                    if made == self._objects:
                        break
        except (FileExistsError, NotADirectoryError):
            if (other := self._object_above(folder / "x")) is not None:
                raise path_conflict(key, other) from None
        except FileNotFoundError:
            pass
        # no folder and no object in its way: a delete took it away, the caller tries again

    def _object_above(self, target: Path) -> str | None:
        for folder in target.parents:
            if folder.is_file():
                return str(folder.relative_to(self._objects))
        return None

    def _require_root(self) -> None:
        """An unmounted or removed store is not an empty one."""
        if not self._objects.is_dir():
            raise OSError(errno.ENOENT, "the store's directory is gone")

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unavailable("object store", error, key=key, root=str(self._root)) from error


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    etag = f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"
    return ObjectInfo(key, status.st_size, etag)


def _walk(folder: Path, base: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
    """Objects in key order; folders that can hold none of those asked for are not opened.

    A folder sorts as its name with a slash, so that `a-b` comes before `a/b`, as in any store.
    """
    try:
        with os.scandir(folder) as entries:
            found = sorted(
                (f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name, entry)
                for entry in entries
            )
    except FileNotFoundError:  # deleted meanwhile
        return
    for name, entry in found:
        key = base + name
        if name.endswith("/"):
            may_match = key.startswith(prefix) or prefix.startswith(key)
            is_behind = key > after or after.startswith(key)
            if may_match and is_behind:
                yield from _walk(folder / entry.name, key, prefix, after)
        elif key > after and key.startswith(prefix) and entry.is_file(follow_symlinks=False):
            try:
                yield _info(key, entry.stat(follow_symlinks=False))
            except FileNotFoundError:
                continue


def _sweep(incoming: Path) -> None:
    """Drop what writers that were killed left behind."""
    oldest = time.time() - 86_400
    for entry in os.scandir(incoming):
        with suppress(FileNotFoundError):
            if entry.stat().st_mtime < oldest:
                Path(entry.path).unlink()
