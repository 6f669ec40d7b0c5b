"""Topics `attempt.*` and `inventory`: what became of attempts, as submitter and monitor saw it."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import msgspec

from springtide_shared.errors import Reason
from springtide_shared.messages.base import Kind, Message, Snapshot, register
from springtide_shared.messages.task import AttemptKey, AttemptNumber, Index, JobId


class AttemptState(StrEnum):
    """States of an attempt, from first to last; merging only ever moves forward."""

    DISPATCHED = "dispatched"
    """Its slice is on the way to a cluster."""
    PENDING = "pending"
    """Held by a submitter, or a pod that has no node yet."""
    RUNNING = "running"
    FINISHING = "finishing"
    """The program ended, the proof of it is not complete yet."""
    ENDED = "ended"


class AttemptEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One transition of one attempt; fenced by `pod_uid` where a pod exists."""

    job_id: JobId
    index: Index
    attempt: AttemptNumber
    state: AttemptState
    at: float
    pod_uid: str = ""
    node: str = ""
    reason: Reason | None = None
    """Set when ended (`completed` is the success), and while finishing or pending for a cause."""
    exit_code: int | None = None
    digest: str = ""
    """SHA-256 of the completion record, for a success."""
    record_attempt: int | None = None
    """The attempt whose record proves the success, where an earlier one already had."""
    migration_id: str = ""
    """For reason `migrated`: the saga; attempt n+1 goes to its pin."""
    pin_node: str = ""

    @property
    def key(self) -> AttemptKey:
        """Identity of the attempt."""
        return AttemptKey(self.job_id, self.index, self.attempt)


@register
class AttemptEvents(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A batch of transitions of one cluster's attempts."""

    topic: ClassVar[str] = "attempt.events"
    kind: ClassVar[Kind] = Kind.FACT
    producer: ClassVar[str] = "submitter"
    consumers: ClassVar[tuple[str, ...]] = ("coordinator", "rescheduler")
    duplicate: ClassVar[str] = (
        "nothing: attempts merge in a lattice, any order and repetition ends the same"
    )

    cluster: str
    events: list[AttemptEvent]


class AttemptFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What an ended attempt used. Seconds, cores, bytes."""

    job_id: JobId
    index: Index
    attempt: AttemptNumber
    pod_uid: str
    cpu_seconds: float
    wall_seconds: float
    efficiency: float
    """CPU seconds over requested cores times wall seconds."""
    peak_memory_bytes: int
    samples: int
    """How many samples it rests on; 0: too short to be seen."""


@register
class AttemptSummary(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Figures of ended attempts."""

    topic: ClassVar[str] = "attempt.summary"
    kind: ClassVar[Kind] = Kind.FACT
    producer: ClassVar[str] = "monitor"
    consumers: ClassVar[tuple[str, ...]] = ("coordinator",)
    duplicate: ClassVar[str] = "nothing: keyed by attempt and pod uid"

    cluster: str
    summaries: list[AttemptFigures]


class LiveAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One attempt that the submitter holds or whose pod exists."""

    job_id: JobId
    index: Index
    attempt: AttemptNumber
    state: AttemptState
    shape: str
    """Key of its shape."""
    cpu_millis: int
    memory_bytes: int
    pod_uid: str = ""
    node: str = ""
    slot: str = ""
    started_at: float | None = None
    checkpointable: bool = False

    @property
    def key(self) -> AttemptKey:
        """Identity of the attempt."""
        return AttemptKey(self.job_id, self.index, self.attempt)


@register
class Inventory(Snapshot, frozen=True, kw_only=True, omit_defaults=True):
    """All live attempts of a cluster, in parts.

    It may judge an attempt only if its slice's `seq` is below `settled_below` and all parts are
    there: absent then means that no pod and no held task of that identity exists.
    """

    topic: ClassVar[str] = "inventory"
    producer: ClassVar[str] = "submitter"
    consumers: ClassVar[tuple[str, ...]] = ("coordinator", "rescheduler")
    duplicate: ClassVar[str] = "nothing: an older or equal edition is dropped"

    settled_below: int
    slice_epoch: int
    """The dispatcher's epoch that `settled_below` counts in."""
    attempts: list[LiveAttempt] = []
