"""What the rescheduler sees, decides and remembers: frozen states in a form that can be stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from springtide_rescheduler.lives import Lives
from springtide_shared.errors import Reason
from springtide_shared.messages.attempts import LiveAttempt
from springtide_shared.messages.cluster import CapacityNode, GroupCapacity, ShapeDemand
from springtide_shared.messages.migration import Migrate, MigrationStep, Vacate, VacateStep

TaskKey = tuple[str, int]
"""Job id and index: what outlives an attempt."""


# ---------------------------------------------------------------- states of one task's move
class Reserving(msgspec.Struct, frozen=True, tag="reserving"):
    """A place on the target was asked for."""

    until: float


class Reserved(msgspec.Struct, frozen=True, tag="reserved"):
    """The place is held; the source is not cordoned yet."""


class Saving(msgspec.Struct, frozen=True, tag="saving"):
    """The checkpoint was ordered; `until`: when the program thaws and goes on by itself."""

    until: float
    is_asked: bool = False
    """The submitter has confirmed: the order is on the pod."""


class Ending(msgspec.Struct, frozen=True, tag="ending"):
    """The manifest is verified, the submitter was told to end the attempt."""

    until: float
    order_until: float
    """When the program thaws. An END that has not left by then must not leave any more: it would
    cost what was computed since."""
    manifest: str
    progress_seconds: float
    save_seconds: float
    is_told: bool = False
    """The submitter has confirmed: the pod is being ended."""


class Restoring(msgspec.Struct, frozen=True, tag="restoring"):
    """The attempt has ended as migrated; n+1 is on its way to the pin."""

    until: float
    ended_at: float
    progress_seconds: float
    save_seconds: float


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """n+1 runs on the target. `resume_seconds`: from the end to running."""

    at: float
    resume_seconds: float
    progress_seconds: float
    save_seconds: float


class Cancelling(msgspec.Struct, frozen=True, tag="cancelling"):
    """CANCEL was sent; `is_gone`: the attempt has left the source by itself."""

    until: float
    reason: Reason
    is_gone: bool
    step: str
    """The state in which it failed."""


class Stayed(msgspec.Struct, frozen=True, tag="stayed"):
    """The task goes on where it was."""

    reason: Reason
    step: str


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """The task left the source without being moved: completed, failed, or lost with its node."""

    reason: Reason
    step: str


MoveState = Reserving | Reserved | Saving | Ending | Restoring | Moved | Cancelling | Stayed | Gone


class TaskMove(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a source node on its way to a target. `migration_id` names it everywhere."""

    migration_id: str
    job_id: str
    index: int
    attempt: int
    pod_uid: str
    cpu_millis: int
    memory_bytes: int
    target_node: str
    state: MoveState

    @property
    def task(self) -> TaskKey:
        """The task that moves."""
        return (self.job_id, self.index)


# ---------------------------------------------------------------- states of one node's vacating
class Gathering(msgspec.Struct, frozen=True, tag="gathering"):
    """Places are being reserved; the node is still open."""


class Cordoning(msgspec.Struct, frozen=True, tag="cordoning"):
    """The scaler was asked to close the node."""

    until: float


class Moving(msgspec.Struct, frozen=True, tag="moving"):
    """Closed; its tasks are saved, ended and restored, each at its own pace."""


class Releasing(msgspec.Struct, frozen=True, tag="releasing"):
    """Nothing of ours is left on it; the scaler gives it back."""

    until: float


class Undoing(msgspec.Struct, frozen=True, tag="undoing"):
    """Something went wrong: what has not ended stays, the node is opened again."""

    until: float
    reason: Reason
    step: str
    is_open: bool
    """No UNCORDON is owed: it never was cordoned, or the scaler has answered."""


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """The saga's end: `reason` None if the node was released."""

    reason: Reason | None
    step: str


Phase = Gathering | Cordoning | Moving | Releasing | Undoing | Closed


class VacateSaga(msgspec.Struct, frozen=True, kw_only=True):
    """Emptying one node. Stored whole at each step, before the step's command is sent."""

    vacate_id: str
    cluster: str
    node: str
    started_at: float
    valid_until: float
    """Of reservations and the cordon: what is left behind by a rescheduler that dies ends then."""
    gain: float
    """Expected saving when it was decided, in price units."""
    is_released: bool = False
    """The node is gone already, though moves of it are still on their way."""
    phase: Phase
    moves: list[TaskMove]

    @property
    def is_closed(self) -> bool:
        """Whether there is nothing left to do."""
        return isinstance(self.phase, Closed)

    def move(self, migration_id: str) -> TaskMove | None:
        """The move of that id."""
        return next((one for one in self.moves if one.migration_id == migration_id), None)


# ---------------------------------------------------------------- what happens to a saga
@dataclass(frozen=True, slots=True)
class Answered:
    """The submitter answered a `migrate`."""

    migration_id: str
    step: MigrationStep
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class NodeAnswered:
    """The scaler answered a `vacate`."""

    vacate_id: str
    step: VacateStep
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class ManifestVerified:
    """The checkpoint that was ordered is in the store, all its parts with their sizes."""

    migration_id: str
    key: str
    progress_seconds: float
    save_seconds: float


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """An attempt ended. `migration_id` for reason `migrated`."""

    job_id: str
    index: int
    attempt: int
    pod_uid: str
    reason: Reason
    at: float
    migration_id: str = ""


@dataclass(frozen=True, slots=True)
class AttemptRuns:
    """A task's attempt runs somewhere."""

    job_id: str
    index: int
    attempt: int
    at: float


@dataclass(frozen=True, slots=True)
class AttemptVanished:
    """Inventories have not named the source attempt for long enough."""

    migration_id: str


@dataclass(frozen=True, slots=True)
class NodeClosed:
    """A node takes nothing new or is gone: released, lost, interrupted."""

    node: str
    is_gone: bool


@dataclass(frozen=True, slots=True)
class NodeFilled:
    """The source holds attempts that are not of this saga: it cannot become empty."""

    vacate_id: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Look at the limits."""


Event = (
    Answered
    | NodeAnswered
    | ManifestVerified
    | AttemptEnded
    | AttemptRuns
    | AttemptVanished
    | NodeClosed
    | NodeFilled
    | TimePassed
)
Command = Migrate | Vacate


# ---------------------------------------------------------------- what a decision reads and gives
class Past(msgspec.Struct, frozen=True, array_like=True):
    """What is remembered of a task's moves, failed ones too."""

    moves: int
    rest_until: float
    progress_seconds: float = 0.0
    """Run time that its earlier attempts saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCosts:
    """What a move of one job's tasks takes, in seconds."""

    save_seconds: float
    resume_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Everything a decision reads, of one moment."""

    nodes: Sequence[CapacityNode]
    groups: Sequence[GroupCapacity]
    attempts: Sequence[LiveAttempt]
    demand: Sequence[ShapeDemand]
    sagas: Sequence[VacateSaga] = ()
    requested_ratios: Mapping[str, float] = field(default_factory=dict)
    """By node, from `usage`: foreign pods included."""
    used_ratios: Mapping[str, float] = field(default_factory=dict)
    """By node; absent: not known."""
    lives: Mapping[str, Lives] = field(default_factory=dict)
    costs: Mapping[str, MoveCosts] = field(default_factory=dict)
    past: Mapping[TaskKey, Past] = field(default_factory=dict)
    may_start: int = 0
    """How many more moves may begin now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One task and where it goes."""

    attempt: LiveAttempt
    target_node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Emptying:
    """A node that pays to be emptied. Money in the unit of the nodes' prices."""

    node: str
    moves: tuple[Move, ...]
    gain: float
    """Expected saving after all costs."""


class Why(StrEnum):
    """Why a node is not emptied; for the log."""

    NOT_MOVABLE = "not-movable"
    TOO_FRESH = "too-fresh"
    RESTING = "resting"
    EXPECTS_TASKS = "expects-tasks"
    WELL_USED = "well-used"
    BUSY = "busy"
    FOREIGN = "foreign-pods"
    """Pods of others would keep it from becoming empty."""
    RECEIVES = "receives"
    NO_GAIN = "no-gain"
    NO_ROOM = "no-room"
    LIMIT = "limit-reached"


@dataclass(frozen=True, slots=True)
class Left:
    """A node that is left as it is."""

    node: str
    why: Why
    gain: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """Outcome of one decision."""

    emptying: tuple[Emptying, ...]
    left: tuple[Left, ...]
