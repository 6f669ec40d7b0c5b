"""MetricSink and PodStats: what the monitor reads and where its samples go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One normalised sample of one pod: a rate over an interval, never a raw counter."""

    at: float
    """End of the interval, seconds since 1970."""
    interval_seconds: float
    cluster: str
    node: str
    pod_uid: str
    job_id: str
    index: int
    attempt: int
    cpu_cores: float
    memory_bytes: int


class PodReading(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Raw counters of one pod at one moment, as the source gives them."""

    pod_uid: str
    at: float
    cpu_seconds: float
    """Total since the pod began; may fall back to 0 when a process restarts."""
    memory_bytes: int
    """Resident now."""


class PodStats(Protocol):
    """Counters of all running pods of a cluster."""

    async def read(self) -> Sequence[PodReading]:
        """One reading per running pod; a pod that cannot be read is left out."""
        ...


class MetricSink(Protocol):
    """Takes samples; never raises and never blocks its caller; drops are counted."""

    def emit(self, samples: Sequence[Sample]) -> None:
        """Hand over samples."""
        ...

    @property
    def dropped(self) -> int:
        """Samples that could not be kept."""
        ...

    async def aclose(self) -> None:
        """Write out what is held."""
        ...
