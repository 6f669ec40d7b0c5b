"""Files as a keeper of truth: whole or absent, on the disk when we say so, one writer at a time."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from springtide_shared.errors import Reason, TransientError

T = TypeVar("T")

LOCK_LIMIT_SECONDS: Final = 5.0
"""Holders keep the lock for milliseconds; one that was stopped in the middle must not stop us."""
_COPY_BYTES: Final = 1024 * 1024


async def in_thread_if(heavy: bool, work: Callable[[], T]) -> T:
    """Run blocking file work beside the event loop if it is heavy, else at once.

    A small file that the kernel answers from its cache takes tens of microseconds, less than the
    hop to a thread and back; what waits for the disk (`fsync`) or copies megabytes would hold up
    every other task of the process.
    """
    return await asyncio.to_thread(work) if heavy else work()


def unavailable(what: str, error: OSError, **fields: object) -> TransientError:
    """A fault of the file system (full, read-only, not permitted, gone) as one of ours."""
    return TransientError(
        Reason.STORE_UNAVAILABLE,
        f"the {what} does not take the call ({error.strerror or type(error).__name__})",
        **fields,  # type: ignore[arg-type]
    )


def write_new(path: Path, source: bytes | BinaryIO, *, sync: bool) -> None:
    """Write a file that nobody knows of yet; removed again if that fails.

    `sync`: its bytes are on the disk on return; without it a power cut may leave an empty file
    behind under the name it gets next.
    """
    try:
        with path.open("xb") as file:
            if isinstance(source, bytes):
                file.write(source)
            else:
                shutil.copyfileobj(source, file, _COPY_BYTES)
            if sync:
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on the disk: without it a rename may be undone by a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, *, sync: bool) -> None:
    """Give `path` this content, whole or not at all. The caller is the only writer."""
    fresh = path.with_name("NEW")
    with suppress(FileNotFoundError):
        fresh.unlink()  # of a writer that died here
    write_new(fresh, data, sync=sync)
    fresh.replace(path)
    if sync:
        sync_folder(path.parent)


@contextmanager
def only_writer(lock: Path, limit_seconds: float = LOCK_LIMIT_SECONDS) -> Iterator[None]:
    """Hold the lock file against all other openers, also in this process; freed by any death.

    Raises:
        TransientError: somebody else held it for longer than the limit.
    """
    with lock.open("ab") as file:
        deadline = time.monotonic() + limit_seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TransientError(
                        Reason.STORE_UNAVAILABLE,
                        f"another process has held the lock for {limit_seconds:g} s",
                        lock=str(lock),
                    ) from None
                time.sleep(random.uniform(0.001, 0.005))
        yield
