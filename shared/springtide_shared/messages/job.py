"""Topics `job.*`: the platform's main interface, open to anyone with an AMQP library.

`JobSubmit` is what people write: snake case, sizes and durations as text with units or as plain
numbers. `parse_job` checks it to the last field; `JobSpec` is the same job normalised, which is
what the ledger keeps.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar, Final

import msgspec

from springtide_shared.errors import InvalidFieldError, PermanentError, Reason
from springtide_shared.messages.base import (
    MAX_BODY_BYTES,
    Kind,
    Message,
    explain,
    register,
)
from springtide_shared.messages.shape import Shape
from springtide_shared.messages.slices import MAX_SPEC_BYTES
from springtide_shared.messages.task import Ask, CheckpointSpec, JobId, Saved, TaskTemplate
from springtide_shared.units import parse_bytes, parse_cpu, parse_duration

MAX_TASKS: Final = 1_000_000
MAX_ITEM_BYTES: Final = 16 * 1024
MAX_NAME_CHARS: Final = 200

NOT_SUPPORTED: Final[dict[str, str]] = {
    "steps": "workflows",
    "deadline": "deadlines",
    "node": "node constraints",
    "gang": "gangs",
    "inputs": "declared inputs",
    "hints": "run-time hints",
    "array.items_from": "items from an object",
    "resources.gpu": "GPUs",
    "resources.extended": "extended resources",
    "limits.cost": "cost limits",
    "checkpoint.interval": "interval policies",
}
"""Fields that the design knows and this version does not act on: refused by name, never ignored."""


class ArraySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tasks: either `size` (1 … 1,000,000) or `items`, one text per task."""

    size: int | None = None
    items: list[str] | None = None


class ResourcesSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests of one task. `cpu` in cores, the others in bytes, text with units allowed."""

    cpu: str | int | float = 1
    memory: str | int = "256Mi"
    scratch: str | int = 0


class CheckpointRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the program saves its progress. `every` and `expected_save` in seconds or with units."""

    path: str = "."
    ask: Ask = Ask.NONE
    signal: str = "SIGUSR1"
    command: list[str] = []
    saved: Saved = Saved.QUIET
    every: str | int | float | None = None
    expected_save: str | int | float = 10


class RetrySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often a task may be tried again per class of reason; each class has its own count."""

    application: int = 2
    memory: int = 2
    infrastructure: int = 10
    preemption: int = 20


class LimitsSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`run_time` of one attempt in seconds or with units; `parallelism`: most tasks at once."""

    run_time: str | int | float | None = None
    parallelism: int | None = None


@register
class JobSubmit(Message, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A job: an array of similar tasks. Publishing the same id and content twice is harmless.

    `command` is an argument list, never a shell line. Each task finds `SPRINGTIDE_TASK_INDEX`,
    `SPRINGTIDE_ITEM`, `SPRINGTIDE_ATTEMPT` and its directories in its environment. The tenant is
    the broker-validated user or the token's, never a field of the body.
    """

    topic: ClassVar[str] = "job.submit"
    kind: ClassVar[Kind] = Kind.COMMAND
    producer: ClassVar[str] = "anyone"
    consumers: ClassVar[tuple[str, ...]] = ("coordinator",)
    duplicate: ClassVar[str] = "the same answer again; a different body under a taken id is refused"

    id: JobId
    """Made by the publisher (a UUID or ULID)."""
    name: str
    """For people; 1 … 200 characters without line breaks."""
    command: list[str]
    """Program and arguments, handed over byte for byte; no shell reads them."""
    application: str = ""
    """What it is a run of; with the image it is what versions are compared by."""
    labels: dict[str, str] = {}
    """At most 64; names of letters, digits and `. _ / -`."""
    priority: int = 0
    """-1000 … 1000; higher is dispatched first."""
    image: str = ""
    """Container image; the local cluster runs the command as a process and ignores it."""
    env: dict[str, str] = {}
    """Names beginning with `SPRINGTIDE_` are refused: springtide sets them."""
    working_dir: str = ""
    """Below the task's own directory; relative, without `..`."""
    array: ArraySpec = ArraySpec(size=1)
    """How many tasks, or their items."""
    resources: ResourcesSpec = ResourcesSpec()
    """What each task requests."""
    outputs: list[str] = []
    """Paths below the output directory that a success must leave."""
    checkpoint: CheckpointRequest | None = None
    """How its progress is saved; None: a task that is moved or lost begins anew."""
    retry: RetrySpec = RetrySpec()
    """Further attempts allowed per class of reason."""
    limits: LimitsSpec = LimitsSpec()
    """Bounds on time and on tasks at once."""
    clusters: list[str] = []
    """Where it may run; empty: anywhere."""
    grace: str | int | float = 30
    """Between the polite request to end and the kill, in seconds or with units."""


@register
class JobCancel(Message, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Cancel a job. Of an unknown job it leaves a tombstone: cancel wins, whatever comes first."""

    topic: ClassVar[str] = "job.cancel"
    kind: ClassVar[Kind] = Kind.COMMAND
    producer: ClassVar[str] = "anyone"
    consumers: ClassVar[tuple[str, ...]] = ("coordinator",)
    duplicate: ClassVar[str] = "the same answer again"

    id: JobId


@register
class JobAnswer(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to `job.submit` or `job.cancel`, sent to `reply_to`."""

    topic: ClassVar[str] = "job.answer"
    kind: ClassVar[Kind] = Kind.ANSWER
    producer: ClassVar[str] = "coordinator"
    consumers: ClassVar[tuple[str, ...]] = ("the publisher",)
    duplicate: ClassVar[str] = "nothing"

    job_id: str
    accepted: bool
    reason: Reason | None = None
    field: str = ""
    detail: str = ""


class JobState(StrEnum):
    """Life of a job."""

    ACCEPTED = "accepted"
    RUNNING = "running"
    CANCELLING = "cancelling"
    """Until the last of its pods is gone."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """All tasks settled, at least one without success."""
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing more happens to the job."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class TaskCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks of a job by state; they sum to the array's size."""

    queued: int = 0
    live: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks of a job that do not run yet, for one cause."""

    reason: Reason
    """`unschedulable`: no node group can ever hold them; `limit-reached`: `limits.parallelism`;
    `no-credit`: no cluster offers a place yet; else why a cluster holds them back."""
    count: int
    since: float | None = None
    """Since when the oldest of them has been held; None: no cluster holds them."""
    detail: str = ""
    """The same for people."""


@register
class JobEvents(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Progress of one job, at most once a second and at each change of its state."""

    topic: ClassVar[str] = "job.events"
    kind: ClassVar[Kind] = Kind.BROADCAST
    producer: ClassVar[str] = "coordinator"
    consumers: ClassVar[tuple[str, ...]] = ("anyone",)
    duplicate: ClassVar[str] = "nothing: totals"

    job_id: str
    tenant: str
    state: JobState
    counts: TaskCounts
    at: float
    reason: Reason | None = None
    """Why nothing moves: `unschedulable` while no cluster that it may use can hold its tasks."""
    waiting: list[Waiting] = []
    """Why its tasks wait, gravest cause first; what pauses before a retry is left out."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job, checked and normalised: whole units, no text to parse."""

    id: str
    name: str
    labels: dict[str, str] = {}
    priority: int = 0
    size: int
    items: list[str] | None = None
    template: TaskTemplate
    retry: RetrySpec = RetrySpec()
    parallelism: int | None = None
    clusters: list[str] = []


_ENV_NAME: Final = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,255}$", re.ASCII)
_LABEL: Final = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?$", re.ASCII)
_JOB_ID: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$", re.ASCII)
_CLUSTER: Final = re.compile(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", re.ASCII)
_SIGNALS: Final = frozenset(item.name for item in signal.Signals) - {"SIGKILL", "SIGSTOP"}


def parse_job(body: bytes | Mapping[str, Any]) -> tuple[JobSubmit, JobSpec]:
    """Check a job body to the last field.

    Args:
        body: the JSON body, or the same already decoded (a YAML job file).

    Raises:
        InvalidFieldError: names the field's path, the value and the remedy; reason
            `not-supported` for a field that a later version will act on.
        PermanentError: too large.
    """
    if isinstance(body, bytes):
        if len(body) > MAX_BODY_BYTES:
            raise PermanentError(
                Reason.TOO_LARGE,
                f"the body has {len(body)} bytes, the limit is {MAX_BODY_BYTES};"
                " put large items into objects and name them in `array.items`",
            )
        try:
            raw = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise explain(error) from error
    else:
        raw = dict(body)
    if not isinstance(raw, dict):
        raise InvalidFieldError("body", raw, "send one JSON object", Reason.MALFORMED)
    _refuse_unknown_fields(raw, JobSubmit, "")
    try:
        job = msgspec.convert(raw, JobSubmit)
    except (msgspec.ValidationError, RecursionError) as error:
        raise explain(error) from error
    return job, normalise(job)


def _refuse_unknown_fields(raw: Mapping[str, Any], cls: type[msgspec.Struct], path: str) -> None:
    """Name the first field that `cls` does not have; tell a later version's from a slip."""
    nested: dict[str, type[msgspec.Struct]] = {
        "array": ArraySpec,
        "resources": ResourcesSpec,
        "checkpoint": CheckpointRequest,
        "retry": RetrySpec,
        "limits": LimitsSpec,
    }
    for name, value in raw.items():
        full = f"{path}{name}"
        if not isinstance(name, str) or name not in cls.__struct_fields__:
            shown = str(full)[:80]
            if full in NOT_SUPPORTED:
                what = NOT_SUPPORTED[full]
                raise InvalidFieldError(
                    shown,
                    value,
                    f"not supported yet: this version does not act on {what}; leave it out",
                    Reason.NOT_SUPPORTED,
                )
            known = ", ".join(cls.__struct_fields__)
            raise InvalidFieldError(shown, value, f"no such field; the fields here are {known}")
        if not path and name in nested and isinstance(value, dict):
            _refuse_unknown_fields(value, nested[name], f"{name}.")


def normalise(job: JobSubmit) -> JobSpec:
    """The job in whole units, every value checked.

    Raises:
        InvalidFieldError: names the field's path, the value and the remedy.
    """
    _check_names(job)
    _check_command(job)
    size, items = _check_array(job.array)
    shape = Shape(
        cpu_millis=_parsed("resources.cpu", job.resources.cpu, parse_cpu),
        memory_bytes=_parsed("resources.memory", job.resources.memory, parse_bytes),
        scratch_bytes=_parsed("resources.scratch", job.resources.scratch, parse_bytes),
    )
    if shape.cpu_millis < 1:
        raise InvalidFieldError("resources.cpu", job.resources.cpu, "ask for at least 1m")
    if shape.memory_bytes < 1:
        raise InvalidFieldError("resources.memory", job.resources.memory, "ask for at least 1 byte")
    run_time = None
    if job.limits.run_time is not None:
        run_time = _parsed("limits.run_time", job.limits.run_time, parse_duration)
        if run_time <= 0:
            raise InvalidFieldError("limits.run_time", job.limits.run_time, "give more than 0 s")
    parallelism = job.limits.parallelism
    if parallelism is not None and not 1 <= parallelism <= MAX_TASKS:
        raise InvalidFieldError("limits.parallelism", parallelism, "give 1 … 1,000,000 or nothing")
    template = TaskTemplate(
        command=job.command,
        env=job.env,
        working_dir=_relative("working_dir", job.working_dir) if job.working_dir else "",
        image=job.image,
        application=job.application,
        shape=shape,
        outputs=[_relative(f"outputs[{i}]", path) for i, path in enumerate(job.outputs)],
        checkpoint=_check_checkpoint(job.checkpoint) if job.checkpoint else None,
        run_time_seconds=run_time,
        grace_seconds=_parsed("grace", job.grace, parse_duration),
    )
    if (spec_bytes := len(msgspec.json.encode(template))) > MAX_SPEC_BYTES:
        raise InvalidFieldError(
            "command",
            f"{spec_bytes} bytes of command and env",
            f"the limit is {MAX_SPEC_BYTES} bytes; put long arguments into items or a file",
            Reason.TOO_LARGE,
        )
    return JobSpec(
        id=job.id,
        name=job.name,
        labels=job.labels,
        priority=job.priority,
        size=size,
        items=items,
        template=template,
        retry=_check_retry(job.retry),
        parallelism=parallelism,
        clusters=job.clusters,
    )


def _parsed(field: str, value: Any, parse: Any) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        raise InvalidFieldError(field, value, str(error)) from error


def _plain(field: str, text: str, most: int) -> None:
    if len(text) > most:
        raise InvalidFieldError(field, text, f"{len(text)} characters, the limit is {most}")
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise InvalidFieldError(field, text, "leave out control characters and line breaks")


def _no_nul(field: str, text: str) -> None:
    # NUL cannot stand in an argument, a lone surrogate cannot be encoded; all else is data and
    # reaches the program byte for byte, since no shell ever sees it.
    if "\0" in text:
        raise InvalidFieldError(field, text, "leave out NUL characters")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidFieldError(field, ascii(text), "write valid Unicode") from error


def _check_names(job: JobSubmit) -> None:
    if not _JOB_ID.fullmatch(job.id):
        raise InvalidFieldError(
            "id", job.id, "use 1 … 64 letters, digits, _ or -, beginning with a letter or digit"
        )
    if not job.name.strip():
        raise InvalidFieldError("name", job.name, "give the job a name")
    _plain("name", job.name, MAX_NAME_CHARS)
    _plain("application", job.application, MAX_NAME_CHARS)
    _plain("image", job.image, 512)
    for text, field in ((job.name, "name"), (job.application, "application"), (job.image, "image")):
        _no_nul(field, text)
    if not -1000 <= job.priority <= 1000:
        raise InvalidFieldError("priority", job.priority, "give -1000 … 1000")
    if len(job.labels) > 64:
        raise InvalidFieldError("labels", f"{len(job.labels)} labels", "the limit is 64")
    for name, value in job.labels.items():
        if not _LABEL.fullmatch(name):
            raise InvalidFieldError("labels", name, "label names: letters, digits, . _ / - (≤ 63)")
        _plain(f"labels.{name}", value, 256)
        _no_nul(f"labels.{name}", value)
    for i, cluster in enumerate(job.clusters):
        if not _CLUSTER.fullmatch(cluster):
            raise InvalidFieldError(
                f"clusters[{i}]", cluster, "cluster names: lower-case letters, digits and - (≤ 63)"
            )
    if len(set(job.clusters)) != len(job.clusters):
        raise InvalidFieldError("clusters", str(job.clusters), "name each cluster once")


def _check_command(job: JobSubmit) -> None:
    if not job.command or not job.command[0].strip():
        raise InvalidFieldError(
            "command", job.command, "give a program and its arguments as a list"
        )
    if any(char in job.command[0] for char in "\n\r"):
        raise InvalidFieldError("command[0]", job.command[0], "a program's name has no line breaks")
    for i, argument in enumerate(job.command):
        _no_nul(f"command[{i}]", argument)
    for name, value in job.env.items():
        if not _ENV_NAME.fullmatch(name):
            raise InvalidFieldError(
                "env", name, "names: letters, digits and _, not beginning with a digit"
            )
        if name.startswith("SPRINGTIDE_"):
            raise InvalidFieldError(
                f"env.{name}", value, "names beginning with SPRINGTIDE_ are set by springtide"
            )
        _no_nul(f"env.{name}", value)


def _check_array(array: ArraySpec) -> tuple[int, list[str] | None]:
    if array.items is not None:
        if array.size is not None:
            raise InvalidFieldError("array", "size and items", "give one of them")
        if not array.items:
            raise InvalidFieldError("array.items", "[]", "give at least one item")
        for i, item in enumerate(array.items):
            if len(item) > MAX_ITEM_BYTES or len(item.encode(errors="replace")) > MAX_ITEM_BYTES:
                raise InvalidFieldError(
                    f"array.items[{i}]", item, f"the limit is {MAX_ITEM_BYTES} bytes"
                )
            _no_nul(f"array.items[{i}]", item)
        if len(array.items) > MAX_TASKS:
            raise InvalidFieldError("array.items", f"{len(array.items)} items", "at most 1,000,000")
        return len(array.items), array.items
    if array.size is None or not 1 <= array.size <= MAX_TASKS:
        raise InvalidFieldError("array.size", array.size, "give 1 … 1,000,000 tasks")
    return array.size, None


def _relative(field: str, path: str) -> str:
    _plain(field, path, 1024)
    _no_nul(field, path)
    parts = path.split("/")
    if not path or path.startswith("/") or ".." in parts:
        raise InvalidFieldError(field, path, "give a relative path without `..`")
    return path


def _check_checkpoint(given: CheckpointRequest) -> CheckpointSpec:
    every = None
    if given.every is not None:
        every = _parsed("checkpoint.every", given.every, parse_duration)
        if every <= 0:
            raise InvalidFieldError("checkpoint.every", given.every, "give more than 0 s")
    if given.ask is Ask.SIGNAL and given.signal not in _SIGNALS:
        raise InvalidFieldError(
            "checkpoint.signal", given.signal, "name a signal that a program can catch (SIGUSR1)"
        )
    if given.ask is Ask.COMMAND and not given.command:
        raise InvalidFieldError(
            "checkpoint.command", given.command, "give the command that asks for a save"
        )
    for i, argument in enumerate(given.command):
        _no_nul(f"checkpoint.command[{i}]", argument)
    return CheckpointSpec(
        path=_relative("checkpoint.path", given.path),
        ask=given.ask,
        signal=given.signal,
        command=given.command,
        saved=given.saved,
        every_seconds=every,
        expected_save_seconds=_parsed(
            "checkpoint.expected_save", given.expected_save, parse_duration
        ),
    )


def _check_retry(retry: RetrySpec) -> RetrySpec:
    for name in retry.__struct_fields__:
        if not 0 <= (value := getattr(retry, name)) <= 10_000:
            raise InvalidFieldError(f"retry.{name}", value, "give 0 … 10,000")
    return retry
