"""Calls of the HTTP API as values, so that the sync and the async client share all but the I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote

import msgspec

from springtide.errors import (
    DuplicateIdError,
    NotFoundError,
    RefusedError,
    SpringtideClientError,
    UnauthorisedError,
    UnreachableError,
)
from springtide_shared.httpapi import (
    PREFIX,
    Cancelling,
    CapacityInfo,
    JobInfo,
    JobPage,
    JobProgress,
    Problem,
    ResultPage,
    Submitted,
    TaskPage,
    WhoAmI,
)

T = TypeVar("T")

TRIES: Final = 4
"""For each call: all of them may be repeated without harm."""
CONNECT_SECONDS: Final = 5.0
READ_SECONDS: Final = 45.0
"""Above the gateway's own limit for a request, so that its answer is heard."""
_JOB_ID: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$", re.ASCII)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request and the type of its answer."""

    method: str
    path: str
    answer: type[T]
    params: dict[str, Any] = field(default_factory=dict)
    body: bytes | None = None


def submit(body: bytes) -> Call[Submitted]:
    """Submit a job."""
    return Call("POST", f"{PREFIX}/jobs", Submitted, body=body)


def job(job_id: str, *, spec: bool = False) -> Call[JobInfo]:
    """One job."""
    return Call("GET", _job(job_id), JobInfo, {"spec": "true"} if spec else {})


def jobs(limit: int, after: str) -> Call[JobPage]:
    """A page of jobs."""
    return Call("GET", f"{PREFIX}/jobs", JobPage, {"limit": limit, "after": after})


def cancel(job_id: str) -> Call[Cancelling]:
    """Cancel a job."""
    return Call("POST", f"{_job(job_id)}/cancel", Cancelling)


def tasks(job_id: str, first: int, limit: int, states: Iterable[str]) -> Call[TaskPage]:
    """A page of tasks."""
    params = {"first": first, "limit": limit, "state": list(states)}
    return Call("GET", f"{_job(job_id)}/tasks", TaskPage, params)


def results(job_id: str, first: int, limit: int) -> Call[ResultPage]:
    """A page of results."""
    return Call("GET", f"{_job(job_id)}/results", ResultPage, {"first": first, "limit": limit})


def logs(job_id: str, index: int, stream: str, attempt: int | None) -> Call[bytes]:
    """A log stream of a task."""
    params: dict[str, Any] = {"stream": stream}
    if attempt is not None:
        params["attempt"] = attempt
    return Call("GET", f"{_job(job_id)}/tasks/{index}/logs", bytes, params)


def events_path(job_id: str) -> str:
    """Path of a job's event stream."""
    return f"{_job(job_id)}/events"


def capacity() -> Call[CapacityInfo]:
    """Clusters and nodes."""
    return Call("GET", f"{PREFIX}/capacity", CapacityInfo)


def whoami() -> Call[WhoAmI]:
    """Whose token it is."""
    return Call("GET", f"{PREFIX}/whoami", WhoAmI)


def _job(job_id: str) -> str:
    if not _JOB_ID.fullmatch(job_id):
        raise NotFoundError(
            f"{job_id[:80]!r} is no job id", reason="unknown-job", remedy="run `springtide status`"
        )
    return f"{PREFIX}/jobs/{quote(job_id)}"


def decoded(call: Call[T], status: int, body: bytes, url: str) -> T:
    """The answer.

    Raises:
        SpringtideClientError: the fault that the gateway told.
    """
    if status >= 300:
        raise fault(status, body, url)
    try:
        return msgspec.json.decode(body, type=call.answer)
    except msgspec.DecodeError as error:
        raise UnreachableError(
            f"what answers at {url} is no springtide of this version: {error}",
            remedy="check --url, or install the same version on both sides",
        ) from error


def fault(status: int, body: bytes, url: str) -> SpringtideClientError:
    """A refusal of the gateway as an exception."""
    try:
        problem = msgspec.json.decode(body, type=Problem)
    except msgspec.DecodeError:
        if is_worth_another_try(status):
            return UnreachableError(
                f"{url} is busy, or a proxy before it finds nobody (status {status})",
                remedy="try again in a minute",
            )
        return UnreachableError(
            f"{url} answered with status {status} and no reason: it is no springtide",
            remedy="check --url",
        )
    named = {
        "reason": problem.reason,
        "field": problem.field,
        "value": problem.value,
        "remedy": problem.remedy,
    }
    kind: type[SpringtideClientError]
    if status in (401, 403):
        kind = UnauthorisedError
    elif status == 404:
        kind = NotFoundError
    elif status == 409 and problem.reason == "duplicate-id":
        kind = DuplicateIdError
        named["remedy"] = named["remedy"] or "submit it under another id"
    elif is_worth_another_try(status):
        kind = UnreachableError
    elif status < 500:
        kind = RefusedError
    else:
        kind = SpringtideClientError
    return kind(problem.detail, **named)


def check_path(path: str) -> None:
    """The token goes to the gateway's own paths only, whatever an answer says.

    Raises:
        UnreachableError: the path names another host.
    """
    if not path.startswith(f"{PREFIX}/"):
        raise UnreachableError(f"the gateway names an address outside its own: {path[:200]!r}")


def is_worth_another_try(status: int) -> bool:
    """Whether the same request may fare better later."""
    return status in (429, 502, 503, 504)


def pause_before(attempt: int, retry_after: str | None, most: float = 8.0) -> float:
    """Seconds to wait before try `attempt` + 1."""
    try:
        told = float(retry_after) if retry_after else 0.0
    except ValueError:
        told = 0.0
    return min(most, max(told, 0.25 * 2.0**attempt))


def unreachable(url: str, error: Exception, pid: int | None, alive: bool) -> UnreachableError:
    """No connection: say what is most likely the cause."""
    if pid is not None and not alive:
        return UnreachableError(
            f"springtide is not running: the `springtide up` that left its address ({url},"
            f" process {pid}) has ended",
            remedy="run `springtide up` in another terminal",
        )
    what = str(error) or type(error).__name__
    return UnreachableError(
        f"springtide does not answer at {url}: {what}",
        remedy="is it running? `springtide doctor` looks for the cause",
    )


class EventLines:
    """Takes the lines of a stream of server-sent events and gives whole events."""

    def __init__(self) -> None:
        self._name = ""
        self._data: list[str] = []

    def take(self, line: str) -> Iterator[JobProgress | None]:
        """Events that this line completes; None for the end of the stream."""
        if line.startswith(":"):
            return
        if line:
            key, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if key == "event":
                self._name = value
            elif key == "data":
                self._data.append(value)
            return
        name, data = self._name, "\n".join(self._data)
        self._name, self._data = "", []
        if name == "end":
            yield None
        elif name == "progress":
            yield msgspec.json.decode(data, type=JobProgress)
