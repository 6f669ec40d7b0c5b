"""The object store in memory, for virtual time and tests, with counters and faults on request."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from pathlib import Path

from springtide_shared.adapters.faults import Faults
from springtide_shared.adapters.keys import check_key, check_range, path_conflict
from springtide_shared.errors import NotFoundError, Reason
from springtide_shared.ports.store import ObjectInfo


class InMemoryStore:
    """Keeps whole objects in a dictionary.

    `faults.calls` counts the calls by operation; `bytes_written` and `bytes_read` count payload.

    Args:
        faults: lets calls fail on request (tests, simulation).
    """

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults("object store")
        self.bytes_written = 0
        self.bytes_read = 0
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}
        self._keys: list[str] = []

    @property
    def has_conditional_put(self) -> bool:
        """See `ObjectStore.has_conditional_put`."""
        return True

    async def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `ObjectStore.put`."""
        check_key(key)
        with self.faults.call("put"):
            return self._write(key, data)

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `ObjectStore.put_if_absent`."""
        check_key(key)
        with self.faults.call("put_if_absent"):
            if key in self._objects:
                return False
            self._write(key, data)
            return True

    async def put_file(self, key: str, path: Path) -> ObjectInfo:
        """See `ObjectStore.put_file`; this store holds all in memory."""
        check_key(key)
        with self.faults.call("put_file"):
            return self._write(key, path.read_bytes())

    async def get(self, key: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """See `ObjectStore.get`."""
        check_key(key)
        check_range(offset, length)
        with self.faults.call("get"):
            data = self._read(key)
            part = data[offset : None if length is None else offset + length]
            self.bytes_read += len(part)
            return part

    async def get_file(self, key: str, path: Path) -> None:
        """See `ObjectStore.get_file`."""
        check_key(key)
        with self.faults.call("get_file"):
            data = self._read(key)
            self.bytes_read += len(data)
            part = path.with_name(f".{path.name}.part")
            part.write_bytes(data)
            part.replace(path)

    async def head(self, key: str) -> ObjectInfo | None:
        """See `ObjectStore.head`."""
        check_key(key)
        with self.faults.call("head"):
            found = self._objects.get(key)
            return None if found is None else found[1]

    async def list(
        self, prefix: str, *, limit: int = 1_000, after: str = ""
    ) -> Sequence[ObjectInfo]:
        """See `ObjectStore.list`."""
        with self.faults.call("list"):
            found: list[ObjectInfo] = []
            start = max(bisect_left(self._keys, prefix), bisect_right(self._keys, after))
            for position in range(start, len(self._keys)):
                key = self._keys[position]
                if len(found) >= limit or not key.startswith(prefix):
                    break
                found.append(self._objects[key][1])
            return found

    async def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        check_key(key)
        with self.faults.call("delete"):
            if self._objects.pop(key, None) is not None:
                del self._keys[bisect_left(self._keys, key)]

    def _write(self, key: str, data: bytes) -> ObjectInfo:
        if key not in self._objects:
            self._check_path(key)
            insort(self._keys, key)
        etag = hashlib.blake2b(data, digest_size=16).hexdigest()
        info = ObjectInfo(key, len(data), etag)
        self._objects[key] = (bytes(data), info)
        self.bytes_written += len(data)
        return info

    def _check_path(self, key: str) -> None:
        """Keys are paths: refuse here what a directory would refuse."""
        parts = key.split("/")
        for depth in range(1, len(parts)):
            if (folder := "/".join(parts[:depth])) in self._objects:
                raise path_conflict(key, folder)
        below = bisect_left(self._keys, f"{key}/")
        if below < len(self._keys) and self._keys[below].startswith(f"{key}/"):
            raise path_conflict(key, self._keys[below])

    def _read(self, key: str) -> bytes:
        found = self._objects.get(key)
        if found is None:
            raise NotFoundError(Reason.NOT_FOUND, "no such object", key=key)
        return found[0]
