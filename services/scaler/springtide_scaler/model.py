"""Values of the scaler: what it sees, what it decides, what it does, and what it must remember."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum

import msgspec

from springtide_shared.errors import Reason
from springtide_shared.messages.cluster import SlotState
from springtide_shared.ports.cluster import Instance, NodeGroupView, NodeView
from springtide_shared.units import Resources


# ---- what the planner sees and answers --------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNode:
    """One slot for the planner: a node, or a machine that will become one."""

    slot: str
    group: str
    state: SlotState
    allocatable: Resources
    running: Mapping[str, int] = field(default_factory=dict)
    """Shape key → live attempts that are on it or bound for it."""
    occupied: Resources = field(default_factory=Resources)
    """Requests of all its live pods, other people's too."""
    before: Mapping[str, int] = field(default_factory=dict)
    """Its pattern in the last plan: what was promised there is kept there if it is still wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanGroup:
    """One node group for the planner."""

    name: str
    allocatable: Resources
    price_per_hour: float
    boot_seconds: float
    room: int
    """How many more machines it may have."""
    blocked_until: float | None = None
    """Out of stock, at a quota or faulty until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPattern:
    """Places on one slot, running ones included."""

    slot: str
    places: Mapping[str, int]
    is_needed: bool
    """Whether something runs there or wanted work is to go there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """`count` nodes of one group, each with the same pattern."""

    group: str
    count: int
    places: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDecision:
    """Answer of the planner."""

    patterns: tuple[SlotPattern, ...]
    """One per slot given, in the order given."""
    purchases: tuple[Purchase, ...]
    unmet: Mapping[str, int]
    """Shape key → wanted places that neither exist nor are bought."""
    decisions: tuple[str, ...]
    """`<reason>: <what>`, for people."""


# ---- machines and slots -----------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """One slot from its order on. Machines carry no tag: orders meet them in order of launch."""

    slot: str
    group: str
    ordered_at: float
    instance: Instance | None = None
    """None: ordered, not seen yet."""
    node: NodeView | None = None
    """None: the machine has not joined yet."""

    @property
    def has_joined(self) -> bool:
        """Whether it has ever been a ready node."""
        return self.node is not None and (self.node.ready or self.node.ready_at is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Slots, machines and nodes brought together."""

    slots: tuple[SlotRecord, ...]
    lost: tuple[SlotRecord, ...] = ()
    """Their machines ended and nobody here asked for it."""
    orphans: tuple[NodeView, ...] = ()
    """Node objects without a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """A group that is left alone for a while."""

    until: float
    reason: Reason
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One reading of cluster and cloud."""

    nodes: Sequence[NodeView]
    groups: Sequence[NodeGroupView]


# ---- effects ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Grow:
    """Wish for `size` machines in a group."""

    group: str
    size: int


@dataclass(frozen=True, slots=True)
class Cordon:
    """Close a node for new pods, or open it."""

    node: str
    cordoned: bool


@dataclass(frozen=True, slots=True)
class Mark:
    """Label a node with its slot."""

    node: str
    slot: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """End that machine."""

    group: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class DeleteNode:
    """Remove the node object of a machine that is gone."""

    node: str
    uid: str


Effect = Grow | Cordon | Mark | Terminate | DeleteNode


# ---- what survives a restart ------------------------------------------------------------------
class ReleaseStep(StrEnum):
    """How far a release has come; written down before the effect of the step."""

    CORDON = "cordon"
    """To be cordoned, announced, and read afresh."""
    TERMINATE = "terminate"
    """Found empty: to be terminated, waited for, deleted and told. There is no way back."""


class ReleaseRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One machine on its way out, with all that is said of it once it is gone."""

    instance_id: str
    group: str
    slot: str
    node: str = ""
    """Empty: it never joined."""
    node_uid: str = ""
    step: ReleaseStep
    reason: str
    was_cordoned: bool = False
    """Cordoned by somebody else: a release that is called off leaves that as it was."""
    price_per_hour: float = 0.0
    cpu_millis: int = 0
    memory_bytes: int = 0


class VacateRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node that is kept closed on somebody's wish."""

    vacate_id: str
    node: str
    node_uid: str
    valid_until: float
    was_cordoned: bool = False


class VacateTurn(Enum):
    """What becomes of a vacated node in this round."""

    KEEP = "keep"
    CLOSE = "close"
    """The last life ended between its note and the effect, or somebody opened the node."""
    EXPIRED = "expired"
    NODE_GONE = "node-gone"


class Memory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that one scaler writes down. Everything else is read from cluster and cloud."""

    releases: dict[str, ReleaseRecord] = {}
    """By instance id."""
    vacates: dict[str, VacateRecord] = {}
    """By node name."""
