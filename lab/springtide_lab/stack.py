"""All services of springtide wired into one process, over whatever adapters it is given.

The laptop's embedded stack and the simulation in virtual time both stand on this; the services are
the same classes that run as processes of their own elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from springtide_coordinator.config import CoordinatorConfig
from springtide_coordinator.service import Coordinator
from springtide_lab.supervisor import Supervisor
from springtide_monitor.config import MonitorConfig
from springtide_monitor.service import Monitor
from springtide_rescheduler.config import ReschedulerConfig
from springtide_rescheduler.service import Rescheduler
from springtide_scaler.config import ScalerConfig
from springtide_scaler.service import Scaler
from springtide_shared.ports.bus import MessageBus
from springtide_shared.ports.clock import Clock, Ids
from springtide_shared.ports.cluster import ClusterView, NodeControl, NodeGroups, PodControl
from springtide_shared.ports.ledger import Ledger
from springtide_shared.ports.metrics import MetricSink, PodStats
from springtide_shared.ports.state import Leases, ServiceState
from springtide_shared.ports.store import ObjectStore
from springtide_shared.runtime.config import scaled
from springtide_submitter.config import SubmitterConfig
from springtide_submitter.service import Submitter


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterParts:
    """One cluster's ports."""

    name: str
    view: ClusterView
    pods: PodControl
    nodes: NodeControl
    groups: NodeGroups
    stats: PodStats
    sink: MetricSink
    state: ServiceState


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """Settings of every service, and which run."""

    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    submitter: SubmitterConfig = field(default_factory=SubmitterConfig)
    scaler: ScalerConfig = field(default_factory=ScalerConfig)
    rescheduler: ReschedulerConfig = field(default_factory=ReschedulerConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    rescheduling: bool = True
    """Off: the tail is left where it is; empty nodes are released all the same."""

    def scaled(self, factor: float) -> StackConfig:
        """The same with every time constant of policy divided by `factor`."""
        return scaled(self, factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the services of all clusters share. `ids_for` gives each service ids of its own."""

    bus: MessageBus
    ledger: Ledger
    store: ObjectStore
    leases: Leases
    clock: Clock
    ids_for: Callable[[str], Ids]


def seat_services(
    supervisor: Supervisor, shared: Shared, clusters: Sequence[ClusterParts], config: StackConfig
) -> None:
    """Give every service a seat: one coordinator, and one set per cluster."""
    supervisor.add(
        "coordinator",
        lambda: Coordinator(
            bus=shared.bus,
            ledger=shared.ledger,
            store=shared.store,
            clock=shared.clock,
            ids=shared.ids_for("coordinator"),
            config=config.coordinator,
        ),
    )
    for parts in clusters:
        _seat_set(supervisor, shared, parts, config)


def _seat_set(
    supervisor: Supervisor, shared: Shared, parts: ClusterParts, config: StackConfig
) -> None:
    cluster = parts.name
    supervisor.add(
        f"submitter.{cluster}",
        lambda: Submitter(
            cluster=cluster,
            bus=shared.bus,
            view=parts.view,
            pods=parts.pods,
            state=parts.state,
            store=shared.store,
            leases=shared.leases,
            clock=shared.clock,
            ids=shared.ids_for(f"submitter.{cluster}"),
            config=config.submitter,
        ),
    )
    supervisor.add(
        f"scaler.{cluster}",
        lambda: Scaler(
            cluster=cluster,
            bus=shared.bus,
            view=parts.view,
            nodes=parts.nodes,
            groups=parts.groups,
            state=parts.state,
            leases=shared.leases,
            clock=shared.clock,
            ids=shared.ids_for(f"scaler.{cluster}"),
            config=config.scaler,
        ),
    )
    supervisor.add(
        f"monitor.{cluster}",
        lambda: Monitor(
            cluster=cluster,
            bus=shared.bus,
            view=parts.view,
            stats=parts.stats,
            sink=parts.sink,
            leases=shared.leases,
            clock=shared.clock,
            ids=shared.ids_for(f"monitor.{cluster}"),
            config=config.monitor,
        ),
    )
    if config.rescheduling:
        supervisor.add(
            f"rescheduler.{cluster}",
            lambda: Rescheduler(
                cluster=cluster,
                bus=shared.bus,
                state=parts.state,
                store=shared.store,
                leases=shared.leases,
                clock=shared.clock,
                ids=shared.ids_for(f"rescheduler.{cluster}"),
                config=config.rescheduler,
            ),
        )
