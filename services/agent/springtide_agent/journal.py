"""The agent's own log: JSON lines on stderr, without a logging library (its start costs CPU)."""

from __future__ import annotations

import sys
from typing import TextIO

import msgspec

from springtide_shared.ports.clock import Clock


class Journal:
    """Writes events with fields. Never raises: a full disk must not end a running program."""

    def __init__(self, clock: Clock, stream: TextIO | None = None, **fields: object) -> None:
        self._clock = clock
        self._stream = stream or sys.stderr
        self._fields = fields

    def say(self, event: str, **fields: object) -> None:
        """One line."""
        line = {"at": round(self._clock.now(), 3), "event": event, **self._fields, **fields}
        try:
            text = msgspec.json.encode(line, enc_hook=str).decode()
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass
