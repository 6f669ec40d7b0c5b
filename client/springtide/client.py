"""The synchronous client and its `Job`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from springtide import calls, connection
from springtide.download import Download, is_there, sweep, target_of
from springtide.errors import (
    ExpiredError,
    JobFailedError,
    SpringtideClientError,
    UnreachableError,
    UsageError,
)
from springtide.jobfile import JobFile, job_of, read_job_file
from springtide.ulid import new_id
from springtide_shared.httpapi import (
    Cancelling,
    CapacityInfo,
    JobInfo,
    JobProgress,
    OutputInfo,
    Submitted,
    TaskResult,
    WhoAmI,
)
from springtide_shared.ledger.views import TaskView
from springtide_shared.messages.job import JobState

T = TypeVar("T")

OnProgress = Callable[[JobProgress], None]
PAGE = 500
TRANSPORT_FAULTS = (httpx.TransportError, httpx.InvalidURL)


class Client:
    """Speaks to one gateway. Use it as a context, or `close` it.

    Raises:
        SpringtideClientError: from every call; see `springtide.errors`.
    """

    def __init__(
        self, url: str = "", token_file: Path | None = None, *, endpoint: Any = None
    ) -> None:
        self.endpoint: connection.Endpoint = endpoint or connection.find(url, token_file)
        self._http = httpx.Client(**http_options(self.endpoint))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # ------------------------------------------------------------ calls
    def call(self, call: calls.Call[T], *, tries: int = calls.TRIES) -> T:
        """Make one call; repeats it while the gateway is away, a few times."""
        for attempt in range(1, tries + 1):
            retry_after: str | None = None
            try:
                response = self._http.request(
                    call.method, call.path, params=call.params, content=call.body
                )
            except TRANSPORT_FAULTS as error:
                if attempt == tries or isinstance(error, httpx.ReadTimeout):
                    raise self._unreachable(error) from error
            else:
                if attempt == tries or not calls.is_worth_another_try(response.status_code):
                    return calls.decoded(
                        call, response.status_code, response.content, self.endpoint.url
                    )
                retry_after = response.headers.get("retry-after")
            time.sleep(calls.pause_before(attempt, retry_after))
        raise AssertionError("the loop above returns or raises")

    def submit(self, job: JobFile) -> Submitted:
        """Submit; makes an id where the job has none. Doing it again is harmless."""
        return self.call(calls.submit(encoded(job)))

    def job(self, job_id: str) -> Job:
        """The job of that id (not looked up yet)."""
        return Job(self, job_id)

    def jobs(self, limit: int = PAGE) -> list[JobInfo]:
        """Your newest jobs by id, at most `limit`."""
        found: list[JobInfo] = []
        after = ""
        while True:
            page = self.call(calls.jobs(PAGE, after))
            found = (found + page.jobs)[-limit:]
            if page.next is None:
                return found
            after = page.next

    def capacity(self) -> CapacityInfo:
        """Clusters and their nodes."""
        return self.call(calls.capacity())

    def whoami(self) -> WhoAmI:
        """Whose token it is."""
        return self.call(calls.whoami(), tries=1)

    # ------------------------------------------------------------ streams
    def follow(self, job_id: str, timeout: float | None = None) -> Iterator[JobProgress]:
        """The job's state now and at each change, until it is final.

        Raises:
            ExpiredError: `timeout` seconds passed before.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        failures = 0
        while True:
            try:
                for event in self._events(job_id, deadline):
                    failures = 0
                    if event is None:
                        break
                    yield event
                    if event.state.is_final:
                        return
            except httpx.TransportError as error:
                failures += 1
                if failures >= calls.TRIES:
                    raise self._unreachable(error) from error
            except UnreachableError:
                failures += 1
                if failures >= calls.TRIES:
                    raise
            pause = calls.pause_before(max(1, failures), None)
            if deadline is not None and time.monotonic() + pause > deadline:
                pause = max(0.0, deadline - time.monotonic())
                time.sleep(pause)
                raise expired(job_id, timeout)
            time.sleep(pause)

    def _events(self, job_id: str, deadline: float | None) -> Iterator[JobProgress | None]:
        lines = calls.EventLines()
        options: dict[str, Any] = {}
        if deadline is not None:
            left = max(0.05, deadline - time.monotonic())
            options["timeout"] = httpx.Timeout(
                min(calls.READ_SECONDS, left), connect=min(calls.CONNECT_SECONDS, left)
            )
        try:
            with self._http.stream("GET", calls.events_path(job_id), **options) as response:
                if response.status_code != 200:
                    raise calls.fault(response.status_code, response.read(), self.endpoint.url)
                for line in response.iter_lines():
                    yield from lines.take(line)
                    if deadline is not None and time.monotonic() >= deadline:
                        return
        except httpx.ReadTimeout:
            if deadline is None or time.monotonic() < deadline:
                raise

    @contextmanager
    def open(self, path: str, params: Mapping[str, Any] | None = None) -> Iterator[Iterator[bytes]]:
        """The bytes behind a path of the gateway, in pieces."""
        calls.check_path(path)
        with self._http.stream("GET", path, params=dict(params or {})) as response:
            if response.status_code != 200:
                raise calls.fault(response.status_code, response.read(), self.endpoint.url)
            yield response.iter_bytes()

    def fetch(self, output: OutputInfo, target: Path) -> bool:
        """Download one output; False if it is there already. Verified, and whole or not at all."""
        if is_there(target, output):
            return False
        for attempt in range(1, calls.TRIES + 1):
            download = Download(target, output)
            try:
                with self.open(output.url) as pieces:
                    for piece in pieces:
                        download.write(piece)
                download.finish()
                return True
            except (httpx.TransportError, UnreachableError) as error:
                if attempt == calls.TRIES:
                    if isinstance(error, UnreachableError):
                        raise
                    raise self._unreachable(error) from error
            finally:
                download.abandon()
            time.sleep(calls.pause_before(attempt, None))
        raise AssertionError("the loop above returns or raises")

    def _unreachable(self, error: Exception) -> UnreachableError:
        return unreachable(self.endpoint, error)


class Job:
    """One job, by its id."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.client = client
        self.id = job_id

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    def status(self) -> JobInfo:
        """State and counts now."""
        return self.client.call(calls.job(self.id))

    def wait(self, timeout: float | None = None, progress: bool | OnProgress = False) -> JobInfo:
        """Until the job is final; returns it, whether it succeeded or not.

        Args:
            timeout: seconds; None waits as long as it takes.
            progress: True shows a bar on stderr; a function gets each change.

        Raises:
            ExpiredError: `timeout` passed; the job goes on.
        """
        if progress is True:
            from springtide.view import follow_with_bar

            follow_with_bar(self, timeout)
        else:
            for event in self.client.follow(self.id, timeout):
                if progress:
                    progress(event)
        return self.status()

    def tasks(self, states: Sequence[str] = (), first: int = 0) -> Iterator[TaskView]:
        """Tasks in index order, page by page; `states` picks some (`failed`, `live`, …)."""
        at: int | None = first
        while at is not None:
            page = self.client.call(calls.tasks(self.id, at, PAGE, states))
            yield from page.tasks
            at = page.next

    def results(self, first: int = 0) -> Iterator[TaskResult]:
        """Results of the tasks that have succeeded so far, in index order, page by page."""
        at: int | None = first
        while at is not None:
            page = self.client.call(calls.results(self.id, at, PAGE))
            yield from page.results
            at = page.next

    def logs(self, index: int = 0, stream: str = "stdout", attempt: int | None = None) -> str:
        """A log stream of a task, as text; of the attempt that succeeded, else of the newest."""
        return b"".join(self.log_pieces(index, stream, attempt)).decode(errors="replace")

    def log_pieces(
        self, index: int = 0, stream: str = "stdout", attempt: int | None = None
    ) -> Iterator[bytes]:
        """A log stream of a task as it is, in pieces."""
        call = calls.logs(self.id, index, stream, attempt)
        try:
            with self.client.open(call.path, call.params) as pieces:
                yield from pieces
        except httpx.TransportError as error:
            raise unreachable(self.client.endpoint, error) from error

    def cancel(self) -> Cancelling:
        """Cancel; returns at once, the job is `cancelling` until its last pod is gone."""
        return self.client.call(calls.cancel(self.id))

    def download(
        self, folder: Path | str, on_file: Callable[[Path, bool], None] | None = None
    ) -> list[Path]:
        """All outputs into `<folder>/<index>/<path>`; files that are there already stay.

        Args:
            folder: made if absent; nothing is written outside it.
            on_file: called for each file, with whether it was downloaded now.

        Raises:
            DownloadRefusedError: an output's path leads elsewhere, or what came is not it.
        """
        root = Path(folder)
        sweep(root)
        files: list[Path] = []
        for result in self.results():
            if result.problem:
                raise SpringtideClientError(
                    f"task {result.index}: its result cannot be shown: {result.problem}",
                    reason="stale",
                )
            for output in result.outputs:
                target = target_of(root, result.index, output.path)
                fetched = self.client.fetch(output, target)
                files.append(target)
                if on_file is not None:
                    on_file(target, fetched)
        return files

    def require_success(self) -> JobInfo:
        """The job, if it has succeeded.

        Raises:
            JobFailedError: it failed, was cancelled, or has not ended.
        """
        info = self.status()
        if info.state is not JobState.SUCCEEDED:
            raise failed(info)
        return info


def failed(info: JobInfo) -> JobFailedError:
    """The end of a job that is no success."""
    counts = info.counts
    return JobFailedError(
        f"job {info.id} is {info.state.value}: {counts.succeeded} of {info.size} tasks succeeded,"
        f" {counts.failed} failed, {counts.cancelled} were cancelled",
        reason=f"job-{info.state.value}",
        remedy=f"springtide status {info.id} --tasks --state failed",
    )


def http_options(endpoint: connection.Endpoint) -> dict[str, Any]:
    """What the sync and the async HTTP client have in common."""
    return {
        "base_url": endpoint.url,
        "headers": {"authorization": f"Bearer {endpoint.token}"},
        "timeout": httpx.Timeout(calls.READ_SECONDS, connect=calls.CONNECT_SECONDS),
        # A proxy of the environment has no way to this machine's own loopback.
        "trust_env": not endpoint.is_loopback,
        "follow_redirects": False,
    }


def prepared(job: JobFile) -> JobFile:
    """The job with an id, checked to the last field before anything is sent.

    Raises:
        JobFileError: the job is wrong.
    """
    job.content.setdefault("id", new_id())
    job.check()
    return job


def encoded(job: JobFile) -> bytes:
    """The body of a submit.

    Raises:
        JobFileError: the job is wrong.
    """
    return msgspec.json.encode(prepared(job).content)


def expired(job_id: str, timeout: float | None) -> ExpiredError:
    """The caller's own limit was reached."""
    return ExpiredError(
        f"job {job_id} has not ended within {timeout:g} s; it goes on",
        remedy=f"springtide watch {job_id}",
    )


def unreachable(endpoint: connection.Endpoint, error: Exception) -> UnreachableError:
    """No connection, with the likely cause."""
    alive = endpoint.pid is not None and connection.is_alive(endpoint.pid)
    return calls.unreachable(endpoint.url, error, endpoint.pid, alive)


def as_job_file(job: Mapping[str, Any] | Path | str | None, fields: Mapping[str, Any]) -> JobFile:
    """A job from a mapping, a file's path, keyword arguments, or a mix (the last ones win).

    Raises:
        UsageError: nothing was given.
        JobFileError: the file is wrong.
    """
    if job is None and not fields:
        raise UsageError("give a mapping, a job file's path, or the job's fields as arguments")
    file = read_job_file(Path(job)) if isinstance(job, Path | str) else job_of(job or {})
    for name, value in fields.items():
        file.content[name] = value
        file.given_by[name] = f"submit({name}=…)"
    return file
