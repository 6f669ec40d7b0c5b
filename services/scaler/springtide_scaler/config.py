"""Settings of the scaler."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from springtide_scaler.policy import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerConfig:
    """Times in seconds."""

    round_seconds: float = 5.0
    """Between two rounds while all is quiet; changed demand and commands bring one forward."""
    busy_round_seconds: float = 2.0
    """Between two rounds while machines boot or leave, or nodes are being vacated."""
    least_round_seconds: float = 0.2
    """Least pause between two rounds, however often they are brought forward."""
    publish_seconds: float = 5.0
    """The plan is said at least this often; it is good for three such periods."""
    capacity_seconds: float = 15.0
    """The same for the capacity, which is far larger and of which a change is said at once."""
    idle_seconds: float = 60.0
    """How long a node must be empty and unneeded before it is released. Below the time that one
    round of dispatching takes, nodes are released between two tasks."""
    settle_seconds: float = 2.0
    """Between the plan without a node and the fresh read of it: pods on their way show up."""
    release_seconds: float = 30.0
    """What a release costs beyond `idle_seconds`; counts as paid for nothing when buying."""
    worth_factor: float = 3.0
    """A place is bought only if the work expected for it is at least this many times the seconds
    of boot and release. 0: buy for anything. Work of unknown length is always bought for."""
    max_launch_per_round: int = 100
    """Machines ordered in one round at most; the clouds' token buckets are of this size."""
    max_releasing: int = 500
    """Machines on their way out at one time: each is remembered until it is gone, in one document
    of limited size (256 KiB)."""
    join_limit_seconds: float = 600.0
    """A machine that is no ready node by then is terminated and its group backed off. At least
    three times the group's usual boot time in any case."""
    order_grace_seconds: float = 15.0
    """How long the cloud's answers may lag behind an order that it has accepted."""
    orphan_seconds: float = 30.0
    """A node object whose machine is gone is removed after this."""
    backoff_seconds: float = 60.0
    """First pause of a group after a stock-out, a quota or a fault; doubles with each one."""
    max_backoff_seconds: float = 900.0
    lease_seconds: float = 30.0
    """Life of the lease. A life that cannot renew for this long must end; it is real time, never
    scaled."""

    def __post_init__(self) -> None:
        for name in (
            "round_seconds",
            "busy_round_seconds",
            "publish_seconds",
            "capacity_seconds",
            "backoff_seconds",
            "lease_seconds",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        for name, least in (
            ("worth_factor", 0),
            ("max_launch_per_round", 1),
            ("max_releasing", 1),
        ):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}")

    @property
    def rules(self) -> Rules:
        """What the policies need of it."""
        return Rules(
            worth_factor=self.worth_factor,
            release_seconds=self.idle_seconds + self.release_seconds,
            max_launch=self.max_launch_per_round,
            max_releasing=self.max_releasing,
            idle_seconds=self.idle_seconds,
            settle_seconds=self.settle_seconds,
            join_limit_seconds=self.join_limit_seconds,
            order_grace_seconds=self.order_grace_seconds,
            orphan_seconds=self.orphan_seconds,
            backoff_seconds=self.backoff_seconds,
            max_backoff_seconds=self.max_backoff_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig(ScalerConfig):
    """Where a scaler that runs as a process of its own finds what it needs.

    Read from a file and `SPRINGTIDE_SCALER_<FIELD>` variables; the embedded stack hands adapters
    over instead.
    """

    cluster: str = ""
    """Name of the cluster, as jobs and the other services know it."""
    cluster_url: str = ""
    """Which cluster and cloud it is; the scheme picks the adapters."""
    amqp_url: str = ""
    state_dir: Path | None = None
    """For releases and vacates under way and for the lease; kept across restarts."""
    health_host: str = "127.0.0.1"
    health_port: int = 0
    """For `/healthz` and `/readyz`; 0 picks a free one, which the log names."""

    def policy(self) -> ScalerConfig:
        """The settings of the service itself."""
        return ScalerConfig(
            **{item.name: getattr(self, item.name) for item in fields(ScalerConfig)}
        )
