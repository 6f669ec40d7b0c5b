"""Topics between one cluster's services and the coordinator: demand, plan, credit, nodes, usage."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import msgspec

from springtide_shared.errors import Reason
from springtide_shared.messages.base import Kind, Message, Snapshot, register
from springtide_shared.messages.shape import Shape


class ShapeCredit(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Places for one shape. `total` = `live` + `free`; all shapes' `free` are feasible together."""

    shape: str
    live: int
    """Attempts the cluster has now, held ones and those on cordoned nodes included."""
    free: int
    """Unreserved places that are free or due within 60 s."""

    @property
    def total(self) -> int:
        """What the coordinator's own live count may rise to."""
        return self.live + self.free


@register
class Credit(Snapshot, frozen=True, kw_only=True, omit_defaults=True):
    """Places that a cluster offers, as totals."""

    topic: ClassVar[str] = "credit"
    producer: ClassVar[str] = "submitter"
    consumers: ClassVar[tuple[str, ...]] = ("coordinator", "gateway")
    duplicate: ClassVar[str] = "nothing: totals"

    shapes: list[ShapeCredit] = []


class HeldTasks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Attempts of one job and shape that wait in the submitter for one cause."""

    shape: str
    reason: Reason
    count: int
    oldest_at: float
    """Since when the oldest of them has been held."""
    job_id: str = ""
    """Empty: of several jobs, as older submitters say it."""


@register
class Pending(Snapshot, frozen=True, kw_only=True, omit_defaults=True):
    """Attempts that a cluster holds without a running pod, with reasons and ages."""

    topic: ClassVar[str] = "pending"
    producer: ClassVar[str] = "submitter"
    consumers: ClassVar[tuple[str, ...]] = ("coordinator",)
    duplicate: ClassVar[str] = "nothing: totals"

    held: list[HeldTasks] = []


class ShapeDemand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Places wanted for one shape in one cluster."""

    shape: Shape
    wanted: int
    """Total, running ones included; limits of the jobs applied."""
    running: int
    backlog: int
    """Tasks that have no place yet and may use this cluster."""
    expected_seconds: float | None = None
    """Expected run time of a backlog task; None: unknown, too few have ended yet."""


@register
class Demand(Snapshot, frozen=True, kw_only=True, omit_defaults=True):
    """Total places wanted per shape, apportioned so that no two scalers buy for the same task."""

    topic: ClassVar[str] = "demand"
    producer: ClassVar[str] = "coordinator"
    consumers: ClassVar[tuple[str, ...]] = ("scaler", "rescheduler")
    duplicate: ClassVar[str] = "nothing: totals"

    shapes: list[ShapeDemand] = []


class SlotState(StrEnum):
    """Life of a slot."""

    LAUNCHING = "launching"
    READY = "ready"
    CORDONED = "cordoned"
    """Keeps what runs, takes nothing new."""


class Slot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One planned node and the places on it. `places` counts running ones too: it is a pattern."""

    slot: str
    group: str
    state: SlotState
    ready_at: float
    """When it is, or is expected to be, ready."""
    places: dict[str, int] = {}
    """Shape key → places in total on this node."""
    node: str = ""
    """Name once joined."""
    price_per_hour: float = 0.0


@register
class Plan(Snapshot, frozen=True, kw_only=True, omit_defaults=True):
    """All slots of a cluster. A slot that is absent from a whole plan does not exist any more."""

    topic: ClassVar[str] = "plan"
    producer: ClassVar[str] = "scaler"
    consumers: ClassVar[tuple[str, ...]] = ("submitter",)
    duplicate: ClassVar[str] = "nothing: totals"

    slots: list[Slot] = []


class GroupCapacity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One node group as the scaler sees it. Prices in currency units per hour."""

    group: str
    instance_type: str
    cpu_millis: int
    memory_bytes: int
    price_per_hour: float
    size: int
    max_size: int
    boot_seconds: float
    unavailable_reason: Reason | None = None
    unavailable_until: float | None = None


class ShapePlaces(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How many tasks of a shape the cluster could hold at most, were it grown to its limits."""

    shape: str
    most: int
    """0: no group can ever hold it."""


class CapacityNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One node that has joined. CPU and memory are allocatable."""

    node: str
    slot: str
    group: str
    cpu_millis: int
    memory_bytes: int
    price_per_hour: float
    cordoned: bool = False


@register
class Capacity(Snapshot, frozen=True, kw_only=True, omit_defaults=True):
    """What a cluster could grow to, at what price, and why the last decisions fell as they did."""

    topic: ClassVar[str] = "capacity"
    producer: ClassVar[str] = "scaler"
    consumers: ClassVar[tuple[str, ...]] = ("coordinator", "rescheduler", "gateway")
    duplicate: ClassVar[str] = "nothing: totals"

    groups: list[GroupCapacity] = []
    shapes: list[ShapePlaces] = []
    """For every shape of the last demand."""
    nodes: list[CapacityNode] = []
    """Every node that has joined and is not released, in name order; only in part 0."""
    decisions: list[str] = []
    """`<reason>: <what>` of the last cycle, newest last; for people."""


class NodeState(StrEnum):
    """What happened to a node."""

    LAUNCHED = "launched"
    JOINED = "joined"
    CORDONED = "cordoned"
    UNCORDONED = "uncordoned"
    INTERRUPTED = "interrupted"
    """The cloud will take it back soon."""
    RELEASED = "released"
    LOST = "lost"


class NodeEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One step in a node's life."""

    node: str
    slot: str
    group: str
    state: NodeState
    at: float
    instance: str = ""
    """Machine behind it: the one name that it keeps from the wish to the end."""
    price_per_hour: float = 0.0
    cpu_millis: int = 0
    """Allocatable."""
    memory_bytes: int = 0
    reason: str = ""


@register
class NodeEvents(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Steps of nodes' lives, interruption notices at once."""

    topic: ClassVar[str] = "node.events"
    kind: ClassVar[Kind] = Kind.FACT
    producer: ClassVar[str] = "scaler"
    consumers: ClassVar[tuple[str, ...]] = ("coordinator", "rescheduler")
    duplicate: ClassVar[str] = "nothing: keyed by node and state, a released node stays released"

    cluster: str
    events: list[NodeEvent]


class NodeUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Ratios over a node's allocatable CPU. `used_ratio` None: no fresh sample, never idle."""

    node: str
    cpu_millis: int
    memory_bytes: int
    requested_ratio: float
    used_ratio: float | None = None
    pods: int = 0


class ArrayUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One array's running pods in this cluster."""

    job_id: str
    pods: int
    requested_cpu_millis: int
    used_cpu_millis: int | None = None


@register
class Usage(Snapshot, frozen=True, kw_only=True, omit_defaults=True):
    """Requested and used ratios per node and array."""

    topic: ClassVar[str] = "usage"
    producer: ClassVar[str] = "monitor"
    consumers: ClassVar[tuple[str, ...]] = ("rescheduler", "gateway")
    duplicate: ClassVar[str] = "nothing: totals"

    nodes: list[NodeUsage] = []
    arrays: list[ArrayUsage] = []
