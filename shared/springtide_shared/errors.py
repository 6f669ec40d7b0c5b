"""Reason codes and the error taxonomy: every refusal and every end of an attempt names one.

The reason picks the retry path. Each class of reasons has a budget of its own, so that five spot
losses never use up the attempts that a bug in the program is allowed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Reason(StrEnum):
    """Why an attempt ended, a task waits or a message was refused. Stable: stored and published."""

    # ends of attempts
    COMPLETED = "completed"
    """Exit 0 and a valid completion record."""
    APPLICATION_ERROR = "application-error"
    """The program ended with an exit code other than 0, or without its declared outputs."""
    OUT_OF_MEMORY = "out-of-memory"
    DISK_PRESSURE = "disk-pressure"
    IMAGE_PULL = "image-pull"
    NODE_LOST = "node-lost"
    PREEMPTED = "preempted"
    """The cloud took a spot node back."""
    EVICTED = "evicted"
    CPU_MISMATCH = "cpu-mismatch"
    """Illegal instruction: the image needs a newer CPU level than the node has."""
    TIMEOUT = "timeout"
    """The task ran longer than `limits.run_time`."""
    CANCELLED = "cancelled"
    NEVER_STARTED = "never-started"
    """A redelivered slice found no pod: nothing ran, no budget is touched."""
    MIGRATED = "migrated"
    """Checkpointed and moved: no budget is touched."""
    CHECKPOINT_FAILED = "checkpoint-failed"
    STORE_UNAVAILABLE = "store-unavailable"
    LOST = "lost"
    """Absent from every inventory after the limit, node unknown."""
    # waiting and refusals
    UNSCHEDULABLE = "unschedulable"
    """No node group of any allowed cluster can ever hold the shape."""
    QUOTA = "quota"
    ADMISSION_DENIED = "admission-denied"
    INVALID_SPEC = "invalid-spec"
    CLUSTER_UNAVAILABLE = "cluster-unavailable"
    """The cluster's API did not take the pod within the limit; the slice was handed back."""
    CLUSTER_UNREACHABLE = "cluster-unreachable"
    """The slice could not be delivered to the cluster's submitter."""
    BUS_UNAVAILABLE = "bus-unavailable"
    """The broker did not confirm within the limit, or the connection to it is gone."""
    NOT_SUPPORTED = "not-supported"
    """A field that this version does not act on."""
    TOO_LARGE = "too-large"
    WRONG_VERSION = "wrong-version"
    MALFORMED = "malformed"
    DUPLICATE_ID = "duplicate-id"
    """The job id is taken by a different job."""
    UNKNOWN_JOB = "unknown-job"
    POISON = "poison"
    """The message ended its consumer as often as the delivery limit allows."""
    STALE = "stale"
    """Fenced off: an older attempt, pod uid or epoch."""
    NO_ROOM = "no-room"
    NO_CREDIT = "no-credit"
    NODE_CORDONED = "node-cordoned"
    UNKNOWN_NODE = "unknown-node"
    UNKNOWN_ATTEMPT = "unknown-attempt"
    CAPACITY = "capacity"
    """The cloud is out of stock for this type and zone."""
    LIMIT_REACHED = "limit-reached"
    NOT_EMPTY = "not-empty"
    EXPIRED = "expired"
    """A wait or a reservation reached its limit."""
    UNAUTHORISED = "unauthorised"
    NOT_FOUND = "not-found"
    """What was named is not there: an object, a document, a node."""
    INTERNAL = "internal"


class RetryClass(StrEnum):
    """Which budget a failed attempt is charged to."""

    APPLICATION = "application"
    MEMORY = "memory"
    INFRASTRUCTURE = "infrastructure"
    PREEMPTION = "preemption"
    FREE = "free"
    """Nothing of the task's own failed: re-run without charge (bounded by a sanity limit)."""
    NONE = "none"
    """Never retried."""


RETRY_CLASS: Final[dict[Reason, RetryClass]] = {
    Reason.APPLICATION_ERROR: RetryClass.APPLICATION,
    Reason.CPU_MISMATCH: RetryClass.INFRASTRUCTURE,
    Reason.OUT_OF_MEMORY: RetryClass.MEMORY,
    Reason.DISK_PRESSURE: RetryClass.INFRASTRUCTURE,
    Reason.IMAGE_PULL: RetryClass.INFRASTRUCTURE,
    Reason.NODE_LOST: RetryClass.INFRASTRUCTURE,
    Reason.LOST: RetryClass.INFRASTRUCTURE,
    Reason.CHECKPOINT_FAILED: RetryClass.INFRASTRUCTURE,
    Reason.STORE_UNAVAILABLE: RetryClass.INFRASTRUCTURE,
    Reason.PREEMPTED: RetryClass.PREEMPTION,
    Reason.EVICTED: RetryClass.PREEMPTION,
    Reason.MIGRATED: RetryClass.FREE,
    Reason.NEVER_STARTED: RetryClass.FREE,
    Reason.CLUSTER_UNAVAILABLE: RetryClass.FREE,
    Reason.CLUSTER_UNREACHABLE: RetryClass.FREE,
    Reason.QUOTA: RetryClass.FREE,
    Reason.STALE: RetryClass.FREE,
    Reason.TIMEOUT: RetryClass.NONE,
    Reason.CANCELLED: RetryClass.NONE,
    Reason.ADMISSION_DENIED: RetryClass.NONE,
    Reason.INVALID_SPEC: RetryClass.NONE,
    Reason.UNSCHEDULABLE: RetryClass.NONE,
}
"""Reasons that end an attempt without success, each with the budget that pays for the next one."""


def retry_class(reason: Reason) -> RetryClass:
    """The budget for `reason`; a reason that no table names is infrastructure's fault."""
    return RETRY_CLASS.get(reason, RetryClass.INFRASTRUCTURE)


class SpringtideError(Exception):
    """A fault with a stable reason and named details; `str()` is for people and holds no secret."""

    def __init__(self, reason: Reason, detail: str = "", **fields: object) -> None:
        super().__init__(reason, detail, fields)
        self.reason = reason
        self.detail = detail
        self.fields = fields

    def __str__(self) -> str:
        named = " ".join(f"{name}={value!r}" for name, value in self.fields.items())
        return ": ".join(part for part in (str(self.reason), self.detail, named) if part)


class TransientError(SpringtideError):
    """Worth another try later; `retry_after` seconds if the other side named a pause."""

    def __init__(
        self, reason: Reason, detail: str = "", retry_after: float | None = None, **fields: object
    ) -> None:
        super().__init__(reason, detail, **fields)
        self.retry_after = retry_after


class PermanentError(SpringtideError):
    """The same call fails again: dead-letter, refuse or fail what asked for it."""


class ConflictError(SpringtideError):
    """Somebody else wrote first: read again, decide again."""


class NotFoundError(SpringtideError):
    """What was named does not exist (any more)."""


def shown(value: object) -> str:
    """A rendering of bad input for people, at most 80 characters, whatever the input is."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # Python refuses to write out integers of thousands of digits
        text = "an integer of more than 4,300 digits"
    return text if len(text) <= 80 else text[:77] + "..."


class InvalidFieldError(PermanentError):
    """Bad input: names the field, the value and the remedy.

    `field` is a dotted path (`resources.cpu`, `array.items[3]`), `value` a short rendering of what
    was given, `remedy` what to write instead.
    """

    def __init__(
        self, field: str, value: object, remedy: str, reason: Reason = Reason.INVALID_SPEC
    ) -> None:
        text = shown(value)
        super().__init__(reason, f"{field}: {text!r} is refused; {remedy}")
        self.field = field
        self.value = text
        self.remedy = remedy
