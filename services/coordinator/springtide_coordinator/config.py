"""Settings of the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from springtide_coordinator.model import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """What the coordinator is told. Times in seconds."""

    clusters: tuple[str, ...] = ()
    """Clusters to send demand to from the start; others join when their services are heard."""
    dispatch_seconds: float = 2.0
    """Longest pause between two dispatch rounds; also how late a retry's pause may end."""
    dispatch_least_seconds: float = 0.05
    """Shortest pause: more tasks share a commit and a slice."""
    attempts_least_seconds: float = 0.5
    """Shortest pause between two commits of what became of attempts: more of it shares one. The
    first after a quiet time is taken at once."""
    demand_seconds: float = 10.0
    """Period of the demand snapshots; they hold for three of it."""
    demand_least_seconds: float = 1.0
    job_events_seconds: float = 1.0
    """A job's progress is published at most this often."""
    reconcile_seconds: float = 5.0
    """How often cancels are repeated if due, the outbox tidied, our being the only one checked."""
    cancel_repeat_seconds: float = 15.0
    linger_seconds: float = 60.0
    """How long an ended job is kept at hand for figures that come late."""
    lost_after_seconds: float = 60.0
    """How far apart two inventories must both miss an attempt; below a node's usual hiccup, work
    is run twice."""
    retry_pause_seconds: float = 1.0
    """Before the first retry; doubles up to `retry_pause_most_seconds`."""
    retry_pause_most_seconds: float = 60.0
    free_limit: int = 1_000
    memory_factor: float = 1.5
    memory_raises: int = 3
    """After an out-of-memory end the next attempt asks for `memory_factor` more, so many times."""
    holder: str = "coordinator"
    """Written beside the epoch, for people."""

    def __post_init__(self) -> None:
        for name in (
            "dispatch_seconds",
            "demand_seconds",
            "job_events_seconds",
            "reconcile_seconds",
            "cancel_repeat_seconds",
            "lost_after_seconds",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0")
        if self.memory_factor < 1:
            raise ValueError("memory_factor must be at least 1")
        if self.retry_pause_most_seconds < self.retry_pause_seconds:
            raise ValueError("retry_pause_most_seconds must not be below retry_pause_seconds")

    @property
    def rules(self) -> Rules:
        """The part that decisions depend on."""
        return Rules(
            retry_pause_seconds=self.retry_pause_seconds,
            retry_pause_most_seconds=self.retry_pause_most_seconds,
            free_limit=self.free_limit,
            memory_factor=self.memory_factor,
            memory_raises=self.memory_raises,
            lost_after_seconds=self.lost_after_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig(CoordinatorConfig):
    """Where a coordinator that runs as a process of its own finds what it needs.

    Read from a file and `SPRINGTIDE_COORDINATOR_<FIELD>` variables; the embedded stack hands
    adapters over instead.
    """

    amqp_url: str = ""
    trusted_publishers: tuple[str, ...] = ()
    """Broker users whose word on a message's tenant is believed: the gateway's."""
    database_url: str = ""
    """`postgresql://…` or `sqlite:///…`."""
    migrate: bool = False
    """Bring the database's schema to this build's first; else a deploy step does."""
    store_dir: Path | None = None
    """Directory of the job object store; without it an attempt that vanished is lost, whatever it
    left there."""
    health_host: str = "127.0.0.1"
    health_port: int = 0
    """For `/healthz` and `/readyz`; 0 picks a free one, which the log names."""

    def policy(self) -> CoordinatorConfig:
        """The settings of the service itself."""
        return CoordinatorConfig(
            **{item.name: getattr(self, item.name) for item in fields(CoordinatorConfig)}
        )
