"""What readers of the ledger (the gateway, people) see of jobs and tasks."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from springtide_shared.errors import Reason
from springtide_shared.messages.attempts import AttemptState
from springtide_shared.messages.job import JobSpec, JobState, TaskCounts, Waiting


class TaskState(StrEnum):
    """State of a task, as people ask for it."""

    QUEUED = "queued"
    LIVE = "live"
    """An attempt is under way; `attempt_state` says how far."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One job. Times in seconds since 1970."""

    spec: JobSpec
    tenant: str
    state: JobState
    counts: TaskCounts
    created_at: float
    ended_at: float | None = None
    waiting: list[Waiting] = []
    """Why its tasks wait, gravest cause first."""


class TaskView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One task. `charged`: failed attempts per retry class."""

    index: int
    state: TaskState
    attempt: int = 0
    """Number of the newest attempt; 0: none yet."""
    attempt_state: AttemptState | None = None
    cluster: str = ""
    node: str = ""
    reason: Reason | None = None
    exit_code: int | None = None
    digest: str = ""
    """SHA-256 of the accepted completion record."""
    record_attempt: int | None = None
    """The attempt whose record is the result."""
    charged: dict[str, int] = {}
    cpu_seconds: float | None = None
    """Of the newest attempt, where still known."""
