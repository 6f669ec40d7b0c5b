"""What the gateway decides: status codes of faults, and what a reader is shown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from springtide_shared.errors import (
    InvalidFieldError,
    NotFoundError,
    Reason,
    SpringtideError,
    TransientError,
)
from springtide_shared.httpapi import (
    PREFIX,
    ClusterInfo,
    GroupInfo,
    JobInfo,
    JobProgress,
    NodeInfo,
    OutputInfo,
    Problem,
    ShapeInfo,
    TaskResult,
)
from springtide_shared.ledger.views import JobView, TaskState, TaskView
from springtide_shared.messages.cluster import Capacity, Credit, Usage
from springtide_shared.messages.job import JobAnswer
from springtide_shared.messages.records import CompletionRecord, StoredFile, task_prefix

_STATUS: Final[dict[str, int]] = {
    Reason.MALFORMED: 400,
    Reason.WRONG_VERSION: 400,
    Reason.UNAUTHORISED: 401,
    Reason.ADMISSION_DENIED: 403,
    Reason.NOT_FOUND: 404,
    Reason.UNKNOWN_JOB: 404,
    Reason.DUPLICATE_ID: 409,
    Reason.CANCELLED: 409,
    Reason.TOO_LARGE: 413,
    Reason.INVALID_SPEC: 422,
    Reason.NOT_SUPPORTED: 422,
    Reason.UNSCHEDULABLE: 422,
    Reason.QUOTA: 429,
    Reason.LIMIT_REACHED: 429,
    Reason.BUS_UNAVAILABLE: 503,
    Reason.CLUSTER_UNREACHABLE: 503,
    Reason.STORE_UNAVAILABLE: 503,
    Reason.EXPIRED: 503,
}

INTERNAL: Final = 500


def status_of(error: SpringtideError) -> int:
    """The HTTP status for a fault of ours; 500 for what no caller can mend."""
    if isinstance(error, InvalidFieldError) and error.reason is Reason.TOO_LARGE:
        return 422  # one field is too long, the body as a whole was not
    if isinstance(error, NotFoundError):
        return 404
    if isinstance(error, TransientError):
        return _STATUS.get(error.reason, 503)
    return _STATUS.get(error.reason, INTERNAL)


def problem_of(error: SpringtideError) -> Problem:
    """The fault as its caller sees it."""
    if isinstance(error, InvalidFieldError):
        return Problem(
            reason=error.reason.value,
            detail=error.detail,
            field=error.field,
            value=error.value,
            remedy=error.remedy,
        )
    return Problem(reason=error.reason.value, detail=error.detail)


def refusal(answer: JobAnswer) -> tuple[int, Problem]:
    """Status and body for a job that the coordinator rejected."""
    reason = answer.reason or Reason.INVALID_SPEC
    status = _STATUS.get(reason, 422)
    return status, Problem(reason=reason.value, detail=answer.detail, field=answer.field)


def job_info(view: JobView, *, with_spec: bool = False) -> JobInfo:
    """The job as its tenant sees it."""
    spec = view.spec
    return JobInfo(
        id=spec.id,
        name=spec.name,
        tenant=view.tenant,
        application=spec.template.application,
        labels=spec.labels,
        priority=spec.priority,
        size=spec.size,
        state=view.state,
        counts=view.counts,
        created_at=view.created_at,
        ended_at=view.ended_at,
        waiting=view.waiting,
        spec=spec if with_spec else None,
    )


def progress_of(view: JobView, now: float) -> JobProgress:
    """The job's state as an event of its stream."""
    return JobProgress(
        id=view.spec.id, state=view.state, counts=view.counts, at=now, waiting=view.waiting
    )


def is_news(event: JobProgress, shown: JobProgress) -> bool:
    """Whether to show `event` after `shown`: a late broadcast must not take progress back.

    Tasks settle for good, so their number tells the order; the clocks of two machines would not.
    """
    if shown.state.is_final or _settled(event) < _settled(shown):
        return False
    return (event.state, event.counts, event.waiting) != (shown.state, shown.counts, shown.waiting)


def _settled(event: JobProgress) -> int:
    return event.counts.succeeded + event.counts.failed + event.counts.cancelled


def next_index(views: Sequence[TaskView], limit: int, end: int) -> int | None:
    """Where the next page begins; None if `views` reach the end of the array."""
    if len(views) < limit:
        return None
    following = views[-1].index + 1
    return following if following < end else None


def attempt_shown(view: TaskView, wanted: int | None) -> int:
    """Which attempt's logs to show: the one asked for, else that of the result, else the newest."""
    if wanted is not None:
        return wanted
    if view.state is TaskState.SUCCEEDED and view.record_attempt is not None:
        return view.record_attempt
    return view.attempt


def output_named(record: CompletionRecord, path: str) -> StoredFile | None:
    """The output of that path, if the record names one and it is the task's own object."""
    prefix = task_prefix(record.job_id, record.index)
    for output in record.outputs:
        if output.path == path and output.key.startswith(prefix):
            return output
    return None


def result_of(
    job_id: str, view: TaskView, record: CompletionRecord | None, problem: str
) -> TaskResult:
    """A succeeded task's result; without its record only what the ledger knows."""
    attempt = view.record_attempt or view.attempt
    if record is None:
        return TaskResult(
            index=view.index,
            attempt=attempt,
            digest=view.digest,
            exit_code=view.exit_code,
            problem=problem,
        )
    return TaskResult(
        index=view.index,
        attempt=attempt,
        digest=view.digest,
        exit_code=record.exit_code,
        started_at=record.started_at,
        ended_at=record.ended_at,
        progress_seconds=record.progress_seconds,
        restored_progress_seconds=record.restored_progress_seconds,
        outputs=[
            OutputInfo(
                path=output.path,
                url=output_url(job_id, view.index, output.path),
                size=output.size,
                sha256=output.sha256,
            )
            for output in record.outputs
        ],
    )


def job_url(job_id: str) -> str:
    """Path of a job below the gateway's address."""
    return f"{PREFIX}/jobs/{job_id}"


def output_url(job_id: str, index: int, path: str) -> str:
    """Path of an output below the gateway's address, percent-encoded."""
    return f"{job_url(job_id)}/tasks/{index}/outputs/{percent_encoded(path)}"


_PLAIN: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~/")


def percent_encoded(path: str) -> str:
    """The path with all but letters, digits, `-._~` and `/` percent-encoded (RFC 3986)."""
    data = path.encode(errors="replace")
    return "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in data)


def cluster_info(
    cluster: str,
    capacity: Sequence[Capacity],
    usage: Sequence[Usage],
    credit: Sequence[Credit],
) -> ClusterInfo:
    """One cluster from the parts of its fresh snapshots; an empty sequence: none is fresh."""
    measured = {node.node: node for part in usage for node in part.nodes}
    nodes = [
        NodeInfo(
            node=node.node,
            slot=node.slot,
            group=node.group,
            cpu_millis=node.cpu_millis,
            memory_bytes=node.memory_bytes,
            price_per_hour=node.price_per_hour,
            cordoned=node.cordoned,
            pods=seen.pods if (seen := measured.get(node.node)) is not None else None,
            requested_ratio=seen.requested_ratio if seen is not None else None,
            used_ratio=seen.used_ratio if seen is not None else None,
        )
        for part in capacity
        for node in part.nodes
    ]
    groups = [
        GroupInfo(
            group=group.group,
            instance_type=group.instance_type,
            cpu_millis=group.cpu_millis,
            memory_bytes=group.memory_bytes,
            price_per_hour=group.price_per_hour,
            size=group.size,
            max_size=group.max_size,
            unavailable_reason=group.unavailable_reason.value if group.unavailable_reason else "",
        )
        for part in capacity
        for group in part.groups
    ]
    shapes = [
        ShapeInfo(shape=shape.shape, live=shape.live, free=shape.free)
        for part in credit
        for shape in part.shapes
    ]
    return ClusterInfo(
        cluster=cluster,
        groups=groups if capacity else None,
        nodes=nodes if capacity else None,
        shapes=shapes if credit else None,
        decisions=[text for part in capacity for text in part.decisions],
    )
