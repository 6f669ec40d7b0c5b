"""Settings of the submitter. All `_seconds` fields are divided by a demonstration's time factor."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitterConfig:
    """What one submitter is told; every field has a default that suits a real cluster."""

    lease_seconds: float = 30.0
    """Life of the lease; another submitter takes over at the earliest after it."""
    first_list_seconds: float = 10.0
    """How long a start waits for the first list of pods. Later the service runs without it and
    holds what comes; slices that come before the list are treated as redelivered."""
    hold_seconds: float = 60.0
    """A task that has no pod after this long is handed back (`cluster-unavailable`)."""
    window_seconds: float = 30.0
    """Pods are created for a launching slot that is due within this. Longer: more pods pend and
    the scheduler retries them; shorter: nodes idle between their start and their first pod."""
    credit_horizon_seconds: float = 60.0
    """Places of launching slots count as free credit if due within this."""
    credit_seconds: float = 5.0
    """Longest time between two credits."""
    credit_least_seconds: float = 1.0
    """Shortest time between two credits."""
    pending_seconds: float = 15.0
    """Longest time between two words on what is held; a change is said with the next credit."""
    inventory_seconds: float = 20.0
    """Time between two inventories."""
    snapshot_periods: float = 3.0
    """A snapshot is valid for this many of its periods."""
    events_least_seconds: float = 1.0
    """Least time between two messages of transitions: more of them share one. The first after a
    quiet time goes at once."""
    events_patience_seconds: float = 2.0
    """A pod that is made or starts is said this late at most, or with the next end."""
    events_most: int = 200
    """Transitions in one message."""
    watch_wait_seconds: float = 5.0
    """How long one wait for changes may take."""
    watch_least_seconds: float = 0.05
    """Changes are gathered this long before they are read."""
    relist_seconds: float = 300.0
    """All pods are read afresh this often: watches lose events."""
    lag_seconds: float = 30.0
    """A pod that we created may be missing from the view for this long."""
    gap_seconds: float = 60.0
    """A slice whose number was skipped is waited for this long before inventory speaks for it."""
    unpinned_after_seconds: float = 15.0
    """After a start, held tasks wait this long for the first plan before they go unpinned."""
    rooms_seconds: float = 2.0
    """Without a plan, free room on nodes is counted this often."""
    pending_limit_seconds: float = 900.0
    """A pod that has not started after this long is withdrawn and its task placed again."""
    pin_limit_seconds: float = 60.0
    """The same for a migrated task's pod on its reserved node."""
    tick_seconds: float = 1.0
    """How often limits are looked at."""
    finishing_limit_seconds: float = 600.0
    """How long a proof of success is looked for while the object store does not answer."""
    migrate_grace_seconds: float = 2.0
    """Grace period of a pod whose checkpoint is verified: it has nothing more to save."""
    cancel_memory_seconds: float = 86_400.0
    """How long a cancel is remembered; must exceed what a redelivery can take."""
    cancel_memory_most: int = 20_000
    """Cancels remembered at once; beyond it the oldest go."""
    create_limit_seconds: float = 20.0
    """Limit of one call to the cluster's API."""
    create_concurrency: int = 8
    """Creates under way at once; the same again for deletes."""
    pace_pods_per_second: float = 20.0
    """Pace of creates at the start; the meter adapts it."""
    pace_least: float = 1.0
    pace_most: float = 200.0
    """A pod costs about eight API writes, so 200/s is beyond what one API server takes."""
    burst: float = 2.0
    """Tokens saved up, in seconds of pace (a ratio: not scaled)."""
    calm_latency: float = 0.02
    """Creates that take less than five times this never slow the pace; 0.1 s is half of what the
    API's p99 may be. Real time, not scaled."""
    loop_seconds: float = 2.0
    """Control loop of the meter: create + schedule + watch."""
    adapt_seconds: float = 0.5
    """How often the pace follows the measured latency."""
    max_pods: int = 30_000
    """Hard ceiling of pods with springtide's name on them in this cluster."""
    prefetch: int = 1_000
    """Slices held unsettled at once."""

    def __post_init__(self) -> None:
        """Refuse combinations that cannot work."""
        for item in fields(SubmitterConfig):
            if getattr(self, item.name) <= 0:
                raise ValueError(f"{item.name} is {getattr(self, item.name)}; give more than 0")
        if self.pace_least > self.pace_most:
            raise ValueError("pace_least is above pace_most; swap them")
        if self.credit_least_seconds > self.credit_seconds:
            raise ValueError("credit_least_seconds is above credit_seconds; swap them")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig(SubmitterConfig):
    """Where a submitter that runs as a process of its own finds what it needs.

    Read from a file and `SPRINGTIDE_SUBMITTER_<FIELD>` variables; the embedded stack hands adapters
    over instead.
    """

    cluster: str = ""
    """Name of the cluster, as jobs and the other services know it."""
    cluster_url: str = ""
    """Which cluster it is; the scheme picks the adapters."""
    amqp_url: str = ""
    state_dir: Path | None = None
    """For cancels, migrations and the lease; kept across restarts."""
    store_dir: Path | None = None
    """The job object store (read only)."""
    health_host: str = "127.0.0.1"
    health_port: int = 0
    """For `/healthz` and `/readyz`; 0 picks a free one, which the log names."""

    def policy(self) -> SubmitterConfig:
        """The settings of the service itself."""
        return SubmitterConfig(
            **{item.name: getattr(self, item.name) for item in fields(SubmitterConfig)}
        )
