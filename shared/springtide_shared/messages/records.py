"""Objects that an agent leaves in the store: checkpoint manifests and completion records.

They are written last, after everything that they name, so a record that exists is whole.
"""

from __future__ import annotations

import msgspec

from springtide_shared.messages.task import AttemptNumber, Index, JobId


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file: its path below the declared directory, and the object that holds its bytes."""

    path: str
    key: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A checkpoint. Restorable if every file is there with its size and SHA-256."""

    job_id: JobId
    index: Index
    attempt: AttemptNumber
    pod_uid: str
    seq: int
    """Grows by one per checkpoint of an attempt."""
    created_at: float
    progress_seconds: float
    """Run time behind this checkpoint, restored progress included."""
    save_seconds: float = 0.0
    """From the request to the last uploaded byte."""
    migration_id: str = ""
    """Set if a migration asked for it; the program stays frozen until ended or released."""
    files: list[StoredFile] = []


class CompletionRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An attempt's end with exit 0 and all declared outputs in the store."""

    job_id: JobId
    index: Index
    attempt: AttemptNumber
    pod_uid: str
    exit_code: int
    started_at: float
    ended_at: float
    progress_seconds: float
    """Run time of the program, restored progress included."""
    restored_from: str = ""
    """Key of the manifest it was restored from."""
    restored_progress_seconds: float = 0.0
    outputs: list[StoredFile] = []


def task_prefix(job_id: str, index: int) -> str:
    """Everything of one task."""
    return f"jobs/{job_id}/tasks/{index:07d}/"


def attempt_prefix(job_id: str, index: int, attempt: int) -> str:
    """Everything that one attempt alone writes."""
    return f"{task_prefix(job_id, index)}attempts/{attempt:05d}/"


def record_key(job_id: str, index: int, attempt: int) -> str:
    """The completion record of an attempt."""
    return f"{attempt_prefix(job_id, index, attempt)}completion.json"


def output_key(job_id: str, index: int, attempt: int, path: str) -> str:
    """One declared output file of an attempt."""
    return f"{attempt_prefix(job_id, index, attempt)}outputs/{path}"


def log_key(job_id: str, index: int, attempt: int, stream: str) -> str:
    """A log stream (`stdout`, `stderr`) of an attempt."""
    return f"{attempt_prefix(job_id, index, attempt)}{stream}.log"


def manifests_prefix(job_id: str, index: int) -> str:
    """All manifests of a task; their names sort from oldest to newest."""
    return f"{task_prefix(job_id, index)}checkpoints/manifests/"


def manifest_key(job_id: str, index: int, attempt: int, seq: int) -> str:
    """One manifest."""
    return f"{manifests_prefix(job_id, index)}{attempt:05d}-{seq:06d}.json"


def part_key(job_id: str, index: int, sha256: str) -> str:
    """One content-addressed part of a task's checkpoints."""
    return f"{task_prefix(job_id, index)}checkpoints/parts/{sha256}"


# What the submitter writes on a pod and the agent reads (in Kubernetes a downward-API file).
ANNOTATION_CHECKPOINT = "springtide.io/checkpoint-request"
"""JSON `CheckpointOrder`; empty or absent: none asked, thaw if frozen."""


class CheckpointOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint asked for by a migration."""

    migration_id: str
    valid_until: float
    """Thaw and go on if not ended by then (seconds since 1970)."""


# Exit codes of the agent's own, above the range that programs commonly use.
EXIT_REFUSED_RECORD_EXISTS = 213
"""An earlier attempt left a valid success record; the termination message names it."""
EXIT_OUTPUT_MISSING = 214
"""The program ended with 0 but a declared output is not there."""
EXIT_STORE_UNAVAILABLE = 215
"""Outputs could not be stored within the limit."""
EXIT_RUN_TIME = 216
"""`limits.run_time` was reached."""
EXIT_CANNOT_START = 217
"""The command cannot be executed."""


class Termination(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The pod's termination message: what the submitter needs without reading the store."""

    digest: str = ""
    """SHA-256 of the completion record's bytes."""
    record_attempt: int | None = None
    detail: str = ""
