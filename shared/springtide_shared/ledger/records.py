"""The bodies of job and task rows, and how they are packed.

A job row tells the whole of an array that has not started: a watermark stands for all the tasks
that were never dispatched. A task has a row of its own only from its dispatch until it is folded
into its chunk.
"""

from __future__ import annotations

import zlib
from enum import IntEnum
from typing import Final

import msgspec

from springtide_shared.errors import Reason, RetryClass, retry_class
from springtide_shared.ledger.attempts import NO_EXIT, STAGES, Attempt
from springtide_shared.ledger.views import TaskState, TaskView
from springtide_shared.messages.attempts import AttemptState
from springtide_shared.messages.job import JobSpec, TaskCounts, Waiting

CHARGES: Final = (
    "application",
    "memory",
    "infrastructure",
    "preemption",
    "free",
    "migrated",
)
"""What ended attempts are counted under, in the order of `TaskRecord.charged`; the last two have
no budget."""
_CHARGE: Final = {name: i for i, name in enumerate(CHARGES)}
NO_CHARGES: Final = (0,) * len(CHARGES)


class Phase(IntEnum):
    """State of a task. The last three are settled; their numbers are the codes in chunks."""

    QUEUED = 0
    SUCCEEDED = 1
    FAILED = 2
    CANCELLED = 3
    LIVE = 4

    @property
    def is_settled(self) -> bool:
        """Whether no further attempt will be made."""
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED)


_STATE: Final = {
    Phase.QUEUED: TaskState.QUEUED,
    Phase.LIVE: TaskState.LIVE,
    Phase.SUCCEEDED: TaskState.SUCCEEDED,
    Phase.FAILED: TaskState.FAILED,
    Phase.CANCELLED: TaskState.CANCELLED,
}


class TaskRecord(msgspec.Struct, array_like=True, gc=False):
    """A task that has been dispatched at least once. Mutable: there may be 100,000 of them.

    `gc=False`, as in all that hangs on it: no cycle can form, and the collector would otherwise
    walk through all of them again and again, which stops the loop for tenths of a second.

    Times in seconds since 1970.
    """

    phase: Phase = Phase.QUEUED
    attempt: int = 0
    """Number of the newest attempt."""
    floor: int = 0
    """Highest attempt that has reported running: successes of earlier ones come too late."""
    cluster: str = ""
    epoch: int = 0
    seq: int = 0
    """The slice that carried the newest attempt: the dispatcher's epoch and its number there."""
    facts: Attempt = Attempt()
    """Of the newest attempt."""
    reason: str = ""
    """Of the newest end."""
    exit_code: int | None = None
    digest: bytes = b""
    record_attempt: int = 0
    charged: tuple[int, ...] = NO_CHARGES
    not_before: float = 0.0
    level: int = 0
    """How often its memory was raised."""
    migration_id: str = ""
    pin_node: str = ""
    """Where the next attempt must go, while queued or live after a migration."""
    cpu_seconds: float | None = None
    summed: int = 0
    """Highest attempt whose figures are in the job's sum."""
    at: float = 0.0
    """Of the newest dispatch or end."""


class JobBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What changes of a job. `queued` is what the other counts leave of `size`."""

    size: int
    """0: a tombstone, the job itself has not come."""
    next_index: int = 0
    """Watermark: no task from here on was ever dispatched."""
    live: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    cancelled_from: int | None = None
    """All tasks from here on were cancelled before they ever started."""
    charged: list[int] = msgspec.field(default_factory=lambda: list(NO_CHARGES))
    """Sums over all tasks, ordered as `CHARGES`."""
    stale: int = 0
    """Successes that came after a later attempt had begun to run."""
    cpu_seconds: float = 0.0
    summaries: int = 0
    wall_seconds: float = 0.0
    """Run time of all ended attempts whose figures have come."""
    measured: int = 0
    """How many of those ended their task; the others were moved or go on in a later attempt."""
    ended_at: float | None = None
    waiting: list[Waiting] = msgspec.field(default_factory=list)
    """Why its tasks waited when the row was written."""
    late_spec: bytes = b""
    """The packed spec of a job that came after its tombstone."""

    @property
    def queued(self) -> int:
        """Tasks that wait: never started ones and those to be tried again."""
        return self.size - self.live - self.succeeded - self.failed - self.cancelled

    @property
    def fresh(self) -> int:
        """Tasks that were never dispatched and still may be."""
        return 0 if self.cancelled_from is not None else self.size - self.next_index

    def counts(self) -> TaskCounts:
        """As published."""
        return TaskCounts(
            queued=self.queued,
            live=self.live,
            succeeded=self.succeeded,
            failed=self.failed,
            cancelled=self.cancelled,
        )


_TASK_ENCODER: Final = msgspec.msgpack.Encoder()
_TASK_DECODER: Final = msgspec.msgpack.Decoder(TaskRecord)
_BODY_DECODER: Final = msgspec.msgpack.Decoder(JobBody)
_SPEC_ENCODER: Final = msgspec.json.Encoder(order="deterministic")
_SPEC_DECODER: Final = msgspec.json.Decoder(JobSpec)


def pack_spec(spec: JobSpec) -> bytes:
    """Compressed JSON; equal specs give equal bytes."""
    return zlib.compress(_SPEC_ENCODER.encode(spec), 6)


def unpack_spec(packed: bytes) -> JobSpec:
    """The reverse of `pack_spec`."""
    return _SPEC_DECODER.decode(zlib.decompress(packed))


def pack_body(body: JobBody) -> bytes:
    """A few dozen bytes, whatever the size of the array."""
    return _TASK_ENCODER.encode(body)


def unpack_body(packed: bytes) -> JobBody:
    """The reverse of `pack_body`."""
    return _BODY_DECODER.decode(packed)


def pack_task(record: TaskRecord) -> bytes:
    """At most 1 KiB: names of clusters and nodes are the only long parts."""
    return _TASK_ENCODER.encode(record)


def unpack_task(packed: bytes) -> TaskRecord:
    """The reverse of `pack_task`."""
    return _TASK_DECODER.decode(packed)


def charge_of(reason: str) -> int:
    """Position in `CHARGES` that an end for `reason` is counted under; -1: under none."""
    if reason == Reason.MIGRATED:
        return _CHARGE["migrated"]
    return _CHARGE.get(retry_class(Reason(reason)).value, -1)


def is_budgeted(charge: int) -> bool:
    """Whether the job's `retry` limits this class."""
    return 0 <= charge < _CHARGE["free"]


FREE: Final = _CHARGE[RetryClass.FREE.value]
MIGRATED: Final = _CHARGE["migrated"]
MEMORY: Final = _CHARGE[RetryClass.MEMORY.value]


def charges_shown(charged: tuple[int, ...]) -> dict[str, int]:
    """The counters that are not 0, by name."""
    return {name: count for name, count in zip(CHARGES, charged, strict=True) if count}


def task_view(index: int, record: TaskRecord) -> TaskView:
    """A task as readers see it."""
    known = record.facts.known
    live = record.phase is Phase.LIVE
    attempt_state: AttemptState | None = None
    reason = record.reason
    if live:
        attempt_state = STAGES[record.facts.stage]
        reason = known.reason if known is not None else ""
    exit_code = record.exit_code
    if live and known is not None and known.exit_code != NO_EXIT:
        exit_code = known.exit_code
    return TaskView(
        index=index,
        state=_STATE[record.phase],
        attempt=record.attempt,
        attempt_state=attempt_state,
        cluster=record.cluster,
        node="" if known is None else known.node,
        reason=Reason(reason) if reason else None,
        exit_code=exit_code,
        digest=record.digest.hex(),
        record_attempt=record.record_attempt or None,
        charged=charges_shown(record.charged),
        cpu_seconds=record.cpu_seconds,
    )
