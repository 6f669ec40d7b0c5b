"""Settings of the monitor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """All times in seconds."""

    sample_seconds: float = 15.0
    """Between two readings of all pods; at a few seconds the reading itself shows in the bill."""
    usage_seconds: float = 15.0
    """Between two usage snapshots."""
    gap_seconds: float = 120.0
    """Two readings further apart than this say nothing about the time between: no sample."""
    fresh_seconds: float = 60.0
    """A node whose newest sample is older has no `used_ratio`: unknown is never idle."""
    valid_seconds: float = 45.0
    """How long a usage snapshot may be used."""
    summary_seconds: float = 2.0
    """Longest wait of an ended attempt's figures for company in one message."""
    watch_seconds: float = 30.0
    """Longest silence of the pod watch before it is read again anyway."""
    watch_least_seconds: float = 1.0
    """Least pause between two reads of changed pods."""
    lease_seconds: float = 15.0
    """Time to live of the monitor's lease."""
    summaries_per_message: int = 200
