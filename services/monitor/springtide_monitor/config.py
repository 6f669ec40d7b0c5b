"""Settings of the monitor."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from springtide_shared.units import MiB


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
    summary_seconds: float = 10.0
    """Longest wait of an ended attempt's figures for company in one message."""
    watch_seconds: float = 30.0
    """Longest silence of the pod watch before it is read again anyway."""
    watch_least_seconds: float = 1.0
    """Least pause between two reads of changed pods."""
    lease_seconds: float = 15.0
    """Time to live of the monitor's lease."""
    summaries_per_message: int = 200
    """Figures in one message of them."""

    def __post_init__(self) -> None:
        """Refuse combinations that cannot work."""
        for item in fields(MonitorConfig):
            if getattr(self, item.name) <= 0:
                raise ValueError(f"{item.name} is {getattr(self, item.name)}; give more than 0")
        if self.valid_seconds <= self.usage_seconds:
            raise ValueError("valid_seconds must be above usage_seconds, or usage is often unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig(MonitorConfig):
    """Where a monitor that runs as a process of its own finds what it needs.

    Read from a file and `SPRINGTIDE_MONITOR_<FIELD>` variables; the embedded stack hands adapters
    over instead.
    """

    cluster: str = ""
    """Name of the cluster, as jobs and the other services know it."""
    cluster_url: str = ""
    """Which cluster it is; the scheme picks the adapters."""
    amqp_url: str = ""
    state_dir: Path | None = None
    """For the lease; kept across restarts."""
    samples_file: Path | None = None
    """Samples go here, one JSON object a line."""
    samples_bytes: int = 64 * MiB
    """At this size the file moves to `*.old.jsonl`, in place of the one before."""
    health_host: str = "127.0.0.1"
    health_port: int = 0
    """For `/healthz` and `/readyz`; 0 picks a free one, which the log names."""

    def policy(self) -> MonitorConfig:
        """The settings of the service itself."""
        return MonitorConfig(
            **{item.name: getattr(self, item.name) for item in fields(MonitorConfig)}
        )
