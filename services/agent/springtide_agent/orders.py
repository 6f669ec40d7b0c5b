"""The pod's annotations, read from the file that the cluster keeps up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from springtide_shared.messages.records import ANNOTATION_CHECKPOINT, CheckpointOrder


class Orders:
    """The checkpoint order on the pod. Reads the file only after it was replaced."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen: tuple[int, int, int] | None = None
        self._order: CheckpointOrder | None = None

    def current(self) -> CheckpointOrder | None:
        """The order that stands now; a file that is absent or garbled orders nothing."""
        try:
            info = self._file.stat()
            seen = (info.st_ino, info.st_mtime_ns, info.st_size)
            if seen != self._seen:
                self._order = _parse(self._file.read_bytes())
                self._seen = seen
        except OSError:
            self._seen, self._order = None, None
        return self._order


def _parse(body: bytes) -> CheckpointOrder | None:
    try:
        annotations: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
        text = annotations.get(ANNOTATION_CHECKPOINT)
        if not isinstance(text, str) or not text:
            return None
        return msgspec.json.decode(text, type=CheckpointOrder)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
