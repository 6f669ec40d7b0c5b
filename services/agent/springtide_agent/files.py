"""Looking at directories, hashing and copying files without holding up the event loop."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from springtide_agent.policy import SeenFile

_CHUNK_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFile:
    """One file to be stored: its path below the declared directory and where its bytes are now."""

    path: str
    local: Path
    size: int
    sha256: str


def is_safe_path(path: str) -> bool:
    """Whether `path` is relative and stays below its directory."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path


def look(root: Path, below: str = ".", *, skip: frozenset[str] = frozenset()) -> list[SeenFile]:
    """All regular files in `root / below` (or that file itself), in path order.

    Paths are relative to `root`. Symbolic links and special files are passed over: what is stored
    must not reach outside, and a pipe has no bytes to keep.
    """
    start = root / below
    try:
        mode = start.lstat().st_mode
    except OSError:
        return []
    found = _walk(start) if stat.S_ISDIR(mode) else iter([start])
    seen = []
    for file in found:
        path = file.relative_to(root).as_posix()
        if path in skip:
            continue
        try:
            info = file.lstat()
        except OSError:
            continue  # it vanished: the next look decides
        if stat.S_ISREG(info.st_mode):
            seen.append(SeenFile(path, info.st_size, info.st_mtime_ns, info.st_ino))
    return sorted(seen)


def _walk(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
    except OSError:
        return
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))
        else:
            yield Path(entry.path)


async def digest(path: Path, copy_to: Path | None = None) -> tuple[int, str]:
    """Size and SHA-256 of the file that is open while it is read, copied on the way if wished.

    A file replaced by rename meanwhile is read to its old end; one that is rewritten in place may
    come out torn, which the caller notices by looking again.

    Raises:
        OSError: it cannot be read (or is a symbolic link).
    """
    source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    target = -1
    try:
        if copy_to is not None:
            target = os.open(copy_to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        total, sha = 0, hashlib.sha256()
        while chunk := os.read(source, _CHUNK_BYTES):
            sha.update(chunk)
            total += len(chunk)
            view = memoryview(chunk)
            while target >= 0 and view:
                view = view[os.write(target, view) :]
            if len(chunk) == _CHUNK_BYTES:
                await asyncio.sleep(0)  # a signal to end must not wait for gigabytes
        return total, sha.hexdigest()
    finally:
        os.close(source)
        if target >= 0:
            os.close(target)


def write_whole(path: Path, data: bytes) -> None:
    """Replace `path` by rename, so that a reader sees all or nothing."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    part.replace(path)
