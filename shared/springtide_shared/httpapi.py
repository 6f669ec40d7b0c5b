"""Bodies of the gateway's HTTP API, shared by the gateway and the client.

Times are seconds since 1970 UTC. All fields are always written, so that a reader finds the same
shape each time; a client ignores fields that it does not know.
"""

from __future__ import annotations

from typing import Final

import msgspec

from springtide_shared.ledger.views import TaskView
from springtide_shared.messages.job import JobSpec, JobState, TaskCounts, Waiting

PREFIX: Final = "/api/v1"
MAX_PAGE: Final = 1_000
"""Most entries of one page."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Every answer that is not a success. `reason` is stable; the rest is for people."""

    reason: str
    detail: str
    field: str = ""
    """Dotted path of what is refused, where one field is to blame (`array.items[3]`)."""
    value: str = ""
    """A short rendering of what was given there."""
    remedy: str = ""


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One job."""

    id: str
    name: str
    tenant: str
    application: str = ""
    labels: dict[str, str] = {}
    priority: int = 0
    size: int
    """Tasks in the array."""
    state: JobState
    counts: TaskCounts
    created_at: float
    ended_at: float | None = None
    waiting: list[Waiting] = []
    """Why its tasks wait, gravest cause first."""
    spec: JobSpec | None = None
    """Only where asked for (`?spec=true`)."""


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs in id order. `next`: give it as `after` for the next page; None: this was the last."""

    jobs: list[JobInfo]
    next: str | None = None


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a job that was taken. `created` False: it was there already, with this content."""

    id: str
    created: bool
    url: str
    """Path of the job below the gateway's address."""


class Cancelling(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a cancel that was taken; the job is `cancelling` until its last pod is gone."""

    id: str
    state: JobState
    """As last known before the cancel."""


class TaskPage(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks in index order. `next`: give it as `first` for the next page; None: the last one."""

    tasks: list[TaskView]
    next: int | None = None


class OutputInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One declared output. `url` is a path below the gateway's address; `size` in bytes."""

    path: str
    url: str
    size: int
    sha256: str


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a succeeded task left. `problem`: why its completion record cannot be shown."""

    index: int
    attempt: int
    """The attempt whose record this is."""
    digest: str
    """SHA-256 of the completion record that the ledger accepted."""
    exit_code: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    progress_seconds: float | None = None
    restored_progress_seconds: float | None = None
    outputs: list[OutputInfo] = []
    problem: str = ""


class ResultPage(msgspec.Struct, frozen=True, kw_only=True):
    """Results in index order; `next` as in `TaskPage`."""

    results: list[TaskResult]
    next: int | None = None


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Data of one `progress` event of a job's stream."""

    id: str
    state: JobState
    counts: TaskCounts
    at: float
    waiting: list[Waiting] = []
    """As in `JobInfo`."""


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A node that has joined. Ratios are over its allocatable CPU; None: no fresh figure."""

    node: str
    slot: str
    group: str
    cpu_millis: int
    memory_bytes: int
    price_per_hour: float
    cordoned: bool
    pods: int | None = None
    requested_ratio: float | None = None
    used_ratio: float | None = None


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A node group. `unavailable_reason`: why nothing can be bought of it now."""

    group: str
    instance_type: str
    cpu_millis: int
    memory_bytes: int
    price_per_hour: float
    size: int
    max_size: int
    unavailable_reason: str = ""


class ShapeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Places for one shape: attempts there now, and room that is free or due within a minute."""

    shape: str
    live: int
    free: int


class ClusterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster as its services last said; None: nothing fresh is known of that part."""

    cluster: str
    groups: list[GroupInfo] | None = None
    nodes: list[NodeInfo] | None = None
    shapes: list[ShapeInfo] | None = None
    decisions: list[str] = []
    """`<reason>: <what>` of the scaler's last cycle."""


class CapacityInfo(msgspec.Struct, frozen=True, kw_only=True):
    """All clusters that have spoken lately."""

    at: float
    clusters: list[ClusterInfo]


class WhoAmI(msgspec.Struct, frozen=True, kw_only=True):
    """Whose token this is, and which gateway answers."""

    tenant: str
    version: str
