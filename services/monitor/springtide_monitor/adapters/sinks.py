"""MetricSink on JSON lines, and in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from springtide_shared.ports.metrics import Sample


class JsonLinesSink:
    """Appends one JSON object a line; at `most_bytes` it moves to `*.old.jsonl`.

    A full or unwritable disk drops samples and counts them; the first drop of a row is logged.
    """

    def __init__(self, path: Path, most_bytes: int = 64 * 1024 * 1024) -> None:
        self._path = path
        self._most = most_bytes
        self._dropped = 0
        self._failing = False

    @property
    def dropped(self) -> int:
        """Samples that could not be written."""
        return self._dropped

    def emit(self, samples: Sequence[Sample]) -> None:
        """Append the samples; a few kilobytes go to the page cache, so nobody waits for a disk."""
        data = b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                if file.tell() + len(data) > self._most:
                    self._path.replace(self._path.with_suffix(".old.jsonl"))
                    self._path.write_bytes(data)
                else:
                    file.write(data)
            self._failing = False
        except OSError as error:
            self._dropped += len(samples)
            if not self._failing:
                structlog.get_logger(service="monitor").warning(
                    "samples.dropped", file=str(self._path), error=error.strerror
                )
            self._failing = True

    async def aclose(self) -> None:
        """Nothing is held back."""


class InMemorySink:
    """Keeps the newest `most` samples."""

    def __init__(self, most: int = 100_000) -> None:
        self.samples: list[Sample] = []
        self._most = most
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """Samples pushed out by newer ones."""
        return self._dropped

    def emit(self, samples: Sequence[Sample]) -> None:
        """Keep the samples."""
        self.samples.extend(samples)
        over = len(self.samples) - self._most
        if over > 0:
            del self.samples[:over]
            self._dropped += over

    async def aclose(self) -> None:
        """Nothing to write."""
