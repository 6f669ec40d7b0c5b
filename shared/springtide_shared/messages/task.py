"""What a submitter and an agent must know of a task to run it: the job's spec, normalised."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Annotated

import msgspec

from springtide_shared.messages.shape import Shape

JobId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
Index = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000)]
AttemptNumber = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class AttemptKey(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """Identity of an attempt: job id / task index / attempt number."""

    job_id: str
    index: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.job_id}/{self.index}/{self.attempt}"

    @property
    def pod_name(self) -> str:
        """DNS-safe name of its pod, at most 63 characters, unique by a hash of the whole id."""
        digest = hashlib.sha256(str(self).encode()).hexdigest()[:10]
        head = "".join(c if c.isalnum() else "-" for c in self.job_id.lower())[:24].strip("-")
        return f"st-{head}-{self.index}-{self.attempt}-{digest}"


class Ask(StrEnum):
    """How the agent asks a program to save its progress."""

    SIGNAL = "signal"
    COMMAND = "command"
    FILE = "file"
    NONE = "none"
    """The program saves by itself; what it last saved is what there is."""


class Saved(StrEnum):
    """How the agent knows that the files under the checkpoint path are whole."""

    QUIET = "quiet"
    """No file changed for a while after the request."""
    ATOMIC = "atomic"
    """The program replaces files by rename, so they are whole at any moment."""


class CheckpointSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a task saves its progress. Times in seconds.

    `ask` signal: `signal` goes to the program's process group leader; command: `command` is run in
    the task's working directory; file: the file `request` appears in the checkpoint directory.
    `every_seconds` None: the agent picks the interval by Young's rule from `expected_save_seconds`.
    """

    path: str = "."
    """Below the checkpoint directory; what is there is saved."""
    ask: Ask = Ask.NONE
    signal: str = "SIGUSR1"
    command: list[str] = []
    saved: Saved = Saved.QUIET
    every_seconds: float | None = None
    expected_save_seconds: float = 10.0


class TaskTemplate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What all tasks of an array share. Times in seconds."""

    command: list[str]
    env: dict[str, str] = {}
    working_dir: str = ""
    """Below the task's own directory; empty: that directory itself."""
    image: str = ""
    application: str = ""
    shape: Shape
    outputs: list[str] = []
    """Paths below the output directory that a success must leave."""
    checkpoint: CheckpointSpec | None = None
    run_time_seconds: float | None = None
    """Limit for one attempt; then it is ended with reason `timeout`."""
    grace_seconds: float = 30.0
    """Between the polite request to end and the kill."""
