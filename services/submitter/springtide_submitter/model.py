"""What the submitter keeps in mind: attempts, slices in hand, sagas, cancels. No I/O, no clock."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import msgspec

from springtide_shared.errors import Reason
from springtide_shared.messages.attempts import AttemptEvent, AttemptState, LiveAttempt
from springtide_shared.messages.shape import Shape
from springtide_shared.messages.slices import Pin, Range, SliceCancel
from springtide_shared.messages.task import AttemptKey, TaskTemplate
from springtide_shared.ports.cluster import PodView
from springtide_shared.units import Resources

ANNOTATION_GRACE: Final = "springtide.io/grace-seconds"
ANNOTATION_CHECKPOINTABLE: Final = "springtide.io/checkpointable"
ANNOTATION_MIGRATION: Final = "springtide.io/migration"
"""Written on pods at creation, so that the next life of the submitter knows what this one did."""


class Stage(StrEnum):
    """Where an attempt stands here; finer than the published states."""

    HELD = "held"
    """No place yet."""
    QUEUED = "queued"
    """Has a place, waits for the meter."""
    CREATING = "creating"
    PENDING = "pending"
    """Its pod exists and has not started."""
    RUNNING = "running"
    PROVING = "proving"
    """Its pod has ended or vanished; the completion record is being looked up."""
    ENDED = "ended"
    """Its end is known; kept until the end is confirmed and its slice acked."""

    @property
    def is_unmade(self) -> bool:
        """Whether no pod is known to exist."""
        return self in (Stage.HELD, Stage.QUEUED, Stage.CREATING)


PUBLISHED: Final = {
    Stage.HELD: AttemptState.PENDING,
    Stage.QUEUED: AttemptState.PENDING,
    Stage.CREATING: AttemptState.PENDING,
    Stage.PENDING: AttemptState.PENDING,
    Stage.RUNNING: AttemptState.RUNNING,
    Stage.PROVING: AttemptState.FINISHING,
    Stage.ENDED: AttemptState.FINISHING,
}
"""How each stage is shown in an inventory (ended: its news may not have arrived yet)."""


class Intent(StrEnum):
    """Why we are ending a pod ourselves."""

    NONE = "none"
    CANCEL = "cancel"
    MIGRATE = "migrate"
    REPLACE = "replace"
    """Its slot is gone before it started: a fresh pod follows, same attempt."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One slice in hand. `open`: tasks that have neither a pod nor a confirmed refusal."""

    epoch: int
    seq: int
    open: int = 0
    is_acked: bool = False
    ended: list[Attempt] = field(default_factory=list)
    """Confirmed ends whose pods stay until this slice is acked."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt that this cluster has.

    `template` is None for a pod adopted from an earlier life: it can be watched and ended, but not
    made again.
    """

    key: AttemptKey
    shape: Shape
    shape_key: str
    resources: Resources
    stage: Stage
    held_at: float
    tenant: str = ""
    template: TaskTemplate | None = None
    item: str | None = None
    is_checkpointable: bool = False
    grace_seconds: float = 30.0
    slice_epoch: int = 0
    slice_seq: int = 0
    ticket: Ticket | None = None
    is_awaited: bool = False
    """Whether its ticket still counts it as open."""
    pin: Pin | None = None
    """Set while it goes to its reserved place."""
    slot: str = ""
    has_place: bool = False
    """Whether the slot book counts it in `slot`."""
    node: str = ""
    pod_uid: str = ""
    pod_name: str = ""
    view: PodView | None = None
    """Its pod as last seen; None until the view has shown it."""
    created_at: float = 0.0
    started_at: float | None = None
    intent: Intent = Intent.NONE
    saga_id: str = ""
    """The migration that ends it (intent `migrate`)."""
    why_held: Reason = Reason.NO_ROOM
    tries: int = 0
    """Creates that failed with an unknown outcome."""
    ended: AttemptEvent | None = None
    is_confirmed: bool = False
    is_gone: bool = False
    """Whether its pod has left the cluster."""
    shown: LiveAttempt | None = None
    """Its line in the inventory, made once per change."""

    @property
    def has_started(self) -> bool:
        """Whether its program may have run."""
        return self.started_at is not None


@dataclass(frozen=True, slots=True)
class Deletion:
    """A pod to remove. `is_final`: nothing more is awaited from it."""

    name: str
    uid: str
    grace_seconds: float
    key: AttemptKey
    is_final: bool = False


@dataclass(slots=True)
class Proof:
    """A completion record to look up, and what the end means if there is none.

    `fallback` None: the pod vanished, so it depends on its node.
    """

    key: AttemptKey
    pod_uid: str
    record_attempt: int
    node: str
    since: float
    fallback: Reason | None
    exit_code: int | None = None
    is_delayed: bool = False
    """Whether the store has failed to answer."""


class SagaDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What is persisted of one migration: the reservation, and that the source is being ended."""

    migration_id: str
    job_id: str
    index: int
    attempt: int
    pod_uid: str
    shape: Shape
    target_node: str
    valid_until: float
    is_ending: bool = False


@dataclass(slots=True)
class Saga:
    """One migration in hand. `version`: of its document."""

    document: SagaDocument
    version: int
    slot: str = ""
    """Slot in which the book holds its place; empty: none (not there yet, or spent)."""
    is_spent: bool = False
    """Attempt n+1 has taken the place."""

    @property
    def source(self) -> AttemptKey:
        """The attempt that moves."""
        return AttemptKey(self.document.job_id, self.document.index, self.document.attempt)


class CancelDocument(msgspec.Struct, frozen=True, kw_only=True):
    """One remembered cancel."""

    job_id: str
    ranges: list[Range] | None
    attempts_upto: int
    expires_at: float

    def covers(self, key: AttemptKey) -> bool:
        """Whether it cancels this attempt."""
        return (
            key.job_id == self.job_id
            and key.attempt <= self.attempts_upto
            and (self.ranges is None or any(first <= key.index < end for first, end in self.ranges))
        )


class DispatchDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The newest dispatcher epoch seen, and the slices that are settled in it for good."""

    epoch: int
    settled_below: int


def document_key(kind: str, text: str) -> str:
    """A ServiceState key for any text: the kind and a hash."""
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def cancel_text(cancel: SliceCancel) -> str:
    """Canonical text of what a cancel covers: equal cancels share one document."""
    return f"{cancel.job_id}|{cancel.ranges}|{cancel.attempts_upto}"


class CancelMemory:
    """Cancels by job, bounded, oldest first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._documents: dict[str, CancelDocument] = {}
        self._by_job: dict[str, dict[str, CancelDocument]] = {}

    def __len__(self) -> int:
        return len(self._documents)

    def add(self, key: str, document: CancelDocument) -> None:
        """Remember it under its document's key; the same again renews it."""
        self.forget(key)
        self._documents[key] = document
        self._by_job.setdefault(document.job_id, {})[key] = document

    def forget(self, key: str) -> None:
        """Drop one."""
        document = self._documents.pop(key, None)
        if document is not None:
            of_job = self._by_job[document.job_id]
            del of_job[key]
            if not of_job:
                del self._by_job[document.job_id]

    def covers(self, key: AttemptKey, now: float) -> bool:
        """Whether a cancel that has not expired names this attempt."""
        of_job = self._by_job.get(key.job_id)
        if of_job is None:
            return False
        return any(one.covers(key) and now < one.expires_at for one in of_job.values())

    def due(self, now: float) -> list[str]:
        """Keys to drop: expired ones, and the oldest beyond the bound."""
        found: list[str] = []
        surplus = len(self._documents) - self._most
        for key, document in self._documents.items():
            if surplus <= len(found) and now < document.expires_at:
                break
            found.append(key)
        return found


@dataclass(slots=True)
class _Seen:
    at: float
    is_acked: bool = False


@dataclass(slots=True)
class Sequences:
    """Which slices of the newest dispatcher epoch have been seen and settled.

    Numbers grow by one per slice, but messages may overtake one another or come twice. A number
    that is missing below one that came is waited for `gap_seconds`, then given up.
    """

    gap_seconds: float
    epoch: int = 0
    floor: int = 0
    """Every slice below is settled or given up."""
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _older_open: int = 0
    """Slices of earlier epochs that are still in hand."""

    def note(self, epoch: int, seq: int, now: float) -> bool:
        """Take a slice's number; False if this slice has been here before or was given up."""
        if epoch < self.epoch:
            return False
        if epoch > self.epoch:
            self._older_open += sum(not one.is_acked for one in self._seen.values())
            self.epoch, self.floor = epoch, 0
            self._seen.clear()
        if seq < self.floor or seq in self._seen:
            return False
        self._seen[seq] = _Seen(now)
        return True

    def settle(self, epoch: int, seq: int) -> None:
        """The slice is acked."""
        if epoch == self.epoch:
            if (seen := self._seen.get(seq)) is not None:
                seen.is_acked = True
        elif self._older_open:
            self._older_open -= 1

    def settled_below(self, now: float) -> int:
        """The lowest number that is not settled; 0 while anything of an earlier epoch is open."""
        while self._seen:
            seen = self._seen.get(self.floor)
            if seen is not None:
                if not seen.is_acked:
                    break
                del self._seen[self.floor]
                self.floor += 1
                continue
            lowest = min(self._seen)
            if now - self._seen[lowest].at < self.gap_seconds:
                break
            self.floor = lowest
        return 0 if self._older_open else self.floor
