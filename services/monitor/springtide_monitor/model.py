"""What the monitor remembers of a pod: its counters made monotonic."""

from __future__ import annotations

import msgspec

from springtide_shared.ports.cluster import PodView


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """One pod's figures so far.

    `cpu_seconds` keeps growing over counter resets; `first_at`/`last_at` are the first and newest
    reading; `cores` is the newest rate, None before two readings.
    """

    pod: PodView
    cpu_seconds: float = 0.0
    last_raw: float | None = None
    last_at: float | None = None
    first_at: float | None = None
    cores: float | None = None
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    samples: int = 0
