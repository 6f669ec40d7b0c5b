"""Results into a directory: inside it only, whole or not at all, and not twice."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final

from springtide.errors import LocalError, SpringtideClientError
from springtide_shared.httpapi import OutputInfo

_PIECE: Final = 1024 * 1024


class DownloadRefusedError(SpringtideClientError):
    """What came is not what the result names, or its path leads elsewhere."""

    default_reason = "download-refused"


def target_of(folder: Path, index: int, path: str) -> Path:
    """Where an output goes: `<folder>/<index, 7 digits>/<path>`.

    Raises:
        DownloadRefusedError: the path is absolute, leads out of the folder, or goes through a
            symbolic link.
    """
    parts = PurePosixPath(path).parts
    unsafe = (
        not path
        or path.startswith("/")
        or "\\" in path
        or any(ord(char) < 32 for char in path)
        or any(part in ("", ".", "..") for part in path.split("/"))
        or (len(parts[0]) > 1 and parts[0][1] == ":")  # a drive's letter
    )
    if unsafe:
        raise DownloadRefusedError(
            f"the output path {path!r} leads out of the folder; it is not downloaded"
        )
    at = folder / f"{index:07d}"
    for part in ("", *parts[:-1]):
        at = at / part if part else at
        if at.is_symlink():
            raise DownloadRefusedError(f"{at} is a symbolic link: nothing is written through it")
    return at / parts[-1]


def is_there(target: Path, output: OutputInfo) -> bool:
    """Whether the file is there already with the right size and SHA-256."""
    try:
        if target.is_symlink() or not target.is_file() or target.stat().st_size != output.size:
            return False
        digest = hashlib.sha256()
        with target.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    except OSError:
        return False
    return digest.hexdigest() == output.sha256


class Download:
    """One output on its way: written aside, verified, then put in its place."""

    def __init__(self, target: Path, output: OutputInfo) -> None:
        self._target = target
        self._output = output
        self._digest = hashlib.sha256()
        self._size = 0
        self._aside = target.with_name(f".{target.name[:200]}.part-{os.getpid()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # O_EXCL and O_NOFOLLOW: what is written is a fresh file of ours, whoever else is here.
            self._aside.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
            self._file = os.fdopen(os.open(self._aside, flags, 0o644), "wb")
        except OSError as error:
            raise _cannot_write(target, error) from error

    def write(self, piece: bytes) -> None:
        """The next piece.

        Raises:
            DownloadRefusedError: more came than the result names.
            LocalError: the disk is full, or the like.
        """
        self._size += len(piece)
        if self._size > self._output.size:
            raise DownloadRefusedError(
                f"{self._output.path}: more than {self._output.size} bytes came"
            )
        self._digest.update(piece)
        try:
            self._file.write(piece)
        except OSError as error:
            raise _cannot_write(self._target, error) from error

    def finish(self) -> None:
        """All pieces came: verify, and put the file in its place.

        Raises:
            DownloadRefusedError: size or SHA-256 differ from what the result names.
            LocalError: it cannot be written.
        """
        output = self._output
        if self._size != output.size or self._digest.hexdigest() != output.sha256:
            raise DownloadRefusedError(
                f"{output.path}: what came has another size or SHA-256 than the result"
            )
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._aside.replace(self._target)
        except OSError as error:
            raise _cannot_write(self._target, error) from error

    def abandon(self) -> None:
        """Remove what was written; does nothing after `finish`."""
        try:
            self._file.close()
            self._aside.unlink(missing_ok=True)
        except OSError:
            pass


def sweep(folder: Path) -> None:
    """Remove parts that an earlier, killed download of ours left."""
    for left in _parts(folder):
        pid = left.name.rsplit("-", 1)[-1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc").exists():
            left.unlink(missing_ok=True)


def _parts(folder: Path) -> Iterable[Path]:
    return folder.glob("*/**/.*.part-*")


def _cannot_write(target: Path, error: OSError) -> LocalError:
    return LocalError(
        f"{target} cannot be written: {error.strerror}",
        remedy="choose another --download directory, or make room",
    )
