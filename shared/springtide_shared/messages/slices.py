"""Topics `slice.*`: which tasks a submitter is given to run, and which it must end."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from springtide_shared.messages.base import Kind, Message, register
from springtide_shared.messages.task import AttemptNumber, Index, JobId, TaskTemplate

MAX_SLICE_TASKS = 500
MAX_SPEC_BYTES = 64 * 1024

Range = tuple[Index, Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]]
"""Task indices from the first to just before the second."""


class Pin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A reserved place that a migrated task goes to; it bypasses credit."""

    migration_id: str
    node: str


@register
class SliceRun(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Run these tasks, all under one attempt number; at most 500.

    `seq` grows by one per slice and cluster; an inventory that names a sequence speaks for all
    slices below it.
    """

    topic: ClassVar[str] = "slice.run"
    kind: ClassVar[Kind] = Kind.COMMAND
    producer: ClassVar[str] = "coordinator"
    consumers: ClassVar[tuple[str, ...]] = ("submitter",)
    duplicate: ClassVar[str] = (
        "a redelivered slice creates nothing: pods found are adopted, the rest is never-started"
    )

    cluster: str
    epoch: int
    """The dispatcher's leadership epoch; a lower one than the newest seen is refused (`stale`)."""
    seq: int
    job_id: JobId
    tenant: str
    template: TaskTemplate
    ranges: list[Range]
    attempt: AttemptNumber
    items: list[str] | None = None
    """One per task in the order of `ranges`; None where the job has a size only."""
    pin: Pin | None = None

    def indices(self) -> list[int]:
        """The task indices in order."""
        return [index for first, end in self.ranges for index in range(first, end)]


@register
class SliceCancel(Message, frozen=True, kw_only=True, omit_defaults=True):
    """End attempts of a job; remembered by the submitter for longer than a redelivery can take."""

    topic: ClassVar[str] = "slice.cancel"
    kind: ClassVar[Kind] = Kind.COMMAND
    producer: ClassVar[str] = "coordinator"
    consumers: ClassVar[tuple[str, ...]] = ("submitter",)
    duplicate: ClassVar[str] = "nothing: what is gone stays gone"

    cluster: str
    epoch: int
    job_id: JobId
    ranges: list[Range] | None = None
    """None: every task of the job."""
    attempts_upto: AttemptNumber = 65_535
