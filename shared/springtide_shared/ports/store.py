"""ObjectStore: whole objects under keys, as S3 and a directory both offer them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object. `etag` changes with its content."""

    key: str
    size: int
    etag: str


class ObjectStore(Protocol):
    """An object is whole or absent; readers never see half of one.

    Keys are relative paths of UTF-8 text without empty, `.` or `..` parts (else
    `InvalidFieldError`).
    All calls raise `TransientError(store-unavailable)` while the store does not answer and
    `NotFoundError` for a key that is not there.
    """

    @property
    def has_conditional_put(self) -> bool:
        """Whether `put_if_absent` is atomic among writers."""
        ...

    async def put(self, key: str, data: bytes) -> ObjectInfo:
        """Write or replace."""
        ...

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write only if there is none; False (and no change) if there is one."""
        ...

    async def put_file(self, key: str, path: Path) -> ObjectInfo:
        """Write or replace from a local file, without holding it in memory."""
        ...

    async def get(self, key: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes, or a range of them."""
        ...

    async def get_file(self, key: str, path: Path) -> None:
        """Into a local file, which appears whole or not at all."""
        ...

    async def head(self, key: str) -> ObjectInfo | None:
        """Its size and etag; None if absent."""
        ...

    async def list(
        self, prefix: str, *, limit: int = 1_000, after: str = ""
    ) -> Sequence[ObjectInfo]:
        """Objects whose keys begin with `prefix` and sort behind `after`, in key order."""
        ...

    async def delete(self, key: str) -> None:
        """Remove; nothing happens if it is absent."""
        ...
