"""Topics `migrate`, `vacate` and their answers: how the tail is packed.

One saga moves one task: reserve a target (submitter) → cordon the source (scaler) → ask for a
checkpoint (submitter, by pod annotation) → manifest verified in the store (rescheduler reads it) →
end the attempt (submitter) → the coordinator issues n+1 with the pin → restored.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from springtide_shared.errors import Reason
from springtide_shared.messages.base import Kind, Message, register
from springtide_shared.messages.task import AttemptNumber, Index, JobId


class MigrateAction(StrEnum):
    """What the rescheduler wishes of the submitter."""

    RESERVE = "reserve"
    """Hold one place of the task's shape on `target_node` until `valid_until`."""
    CHECKPOINT = "checkpoint"
    """Ask the agent to save, upload and keep the program frozen until ended or released."""
    END = "end"
    """The manifest is verified: end the attempt as `migrated` and keep the place for n+1."""
    CANCEL = "cancel"
    """Withdraw the request, thaw the program, give the place back."""


@register
class Migrate(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One step of a migration saga, idempotent by (migration id, action)."""

    topic: ClassVar[str] = "migrate"
    kind: ClassVar[Kind] = Kind.COMMAND
    producer: ClassVar[str] = "rescheduler"
    consumers: ClassVar[tuple[str, ...]] = ("submitter",)
    duplicate: ClassVar[str] = "the same answer again"

    cluster: str
    migration_id: str
    action: MigrateAction
    job_id: JobId
    index: Index
    attempt: AttemptNumber
    pod_uid: str
    source_node: str
    target_node: str
    valid_until: float


class MigrationStep(StrEnum):
    """What the submitter answers."""

    RESERVED = "reserved"
    REQUESTED = "requested"
    """The annotation is on the pod."""
    ENDING = "ending"
    """The pod is being ended; its terminal event follows in `attempt.events`."""
    RESTORED = "restored"
    """Attempt n+1 runs on the target: the reservation is spent."""
    CANCELLED = "cancelled"
    REFUSED = "refused"


@register
class MigrationEvents(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to one `migrate`, or news of its saga."""

    topic: ClassVar[str] = "migration.events"
    kind: ClassVar[Kind] = Kind.FACT
    producer: ClassVar[str] = "submitter"
    consumers: ClassVar[tuple[str, ...]] = ("rescheduler",)
    duplicate: ClassVar[str] = "nothing: the saga ignores what it is past"

    cluster: str
    migration_id: str
    step: MigrationStep
    reason: Reason | None = None
    detail: str = ""
    at: float


class VacateAction(StrEnum):
    """What the rescheduler wishes of the scaler."""

    CORDON = "cordon"
    UNCORDON = "uncordon"


@register
class Vacate(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Close a node for new pods, to empty and release it; undone after `valid_until`."""

    topic: ClassVar[str] = "vacate"
    kind: ClassVar[Kind] = Kind.COMMAND
    producer: ClassVar[str] = "rescheduler"
    consumers: ClassVar[tuple[str, ...]] = ("scaler",)
    duplicate: ClassVar[str] = "the same answer again"

    cluster: str
    vacate_id: str
    action: VacateAction
    node: str
    valid_until: float


class VacateStep(StrEnum):
    """What the scaler answers."""

    CORDONED = "cordoned"
    UNCORDONED = "uncordoned"
    RELEASED = "released"
    REFUSED = "refused"


@register
class VacateEvents(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to one `vacate`, or news of its node."""

    topic: ClassVar[str] = "vacate.events"
    kind: ClassVar[Kind] = Kind.FACT
    producer: ClassVar[str] = "scaler"
    consumers: ClassVar[tuple[str, ...]] = ("rescheduler",)
    duplicate: ClassVar[str] = "nothing: the saga ignores what it is past"

    cluster: str
    vacate_id: str
    node: str
    step: VacateStep
    reason: Reason | None = None
    at: float
