"""The asynchronous client: the same calls as `springtide.client`, to be awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from springtide import calls, connection
from springtide.client import (
    PAGE,
    TRANSPORT_FAULTS,
    as_job_file,
    encoded,
    expired,
    http_options,
    unreachable,
)
from springtide.errors import UnreachableError
from springtide.jobfile import JobFile
from springtide_shared.httpapi import (
    Cancelling,
    CapacityInfo,
    JobInfo,
    JobProgress,
    Submitted,
    TaskResult,
    WhoAmI,
)
from springtide_shared.ledger.views import TaskView

T = TypeVar("T")


class AsyncClient:
    """Speaks to one gateway. Use it as an async context, or `aclose` it.

    Raises:
        SpringtideClientError: from every call; see `springtide.errors`.
    """

    def __init__(
        self,
        url: str = "",
        token_file: Path | None = None,
        *,
        endpoint: connection.Endpoint | None = None,
    ) -> None:
        self.endpoint = endpoint or connection.find(url, token_file)
        self._http = httpx.AsyncClient(**http_options(self.endpoint))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def call(self, call: calls.Call[T], *, tries: int = calls.TRIES) -> T:
        """Make one call; repeats it while the gateway is away, a few times."""
        for attempt in range(1, tries + 1):
            retry_after: str | None = None
            try:
                response = await self._http.request(
                    call.method, call.path, params=call.params, content=call.body
                )
            except TRANSPORT_FAULTS as error:
                if attempt == tries or isinstance(error, httpx.ReadTimeout):
                    raise unreachable(self.endpoint, error) from error
            else:
                if attempt == tries or not calls.is_worth_another_try(response.status_code):
                    return calls.decoded(
                        call, response.status_code, response.content, self.endpoint.url
                    )
                retry_after = response.headers.get("retry-after")
            await asyncio.sleep(calls.pause_before(attempt, retry_after))
        raise AssertionError("the loop above returns or raises")

    async def submit(self, job: JobFile) -> Submitted:
        """Submit; makes an id where the job has none. Doing it again is harmless."""
        return await self.call(calls.submit(encoded(job)))

    def job(self, job_id: str) -> AsyncJob:
        """The job of that id (not looked up yet)."""
        return AsyncJob(self, job_id)

    async def capacity(self) -> CapacityInfo:
        """Clusters and their nodes."""
        return await self.call(calls.capacity())

    async def whoami(self) -> WhoAmI:
        """Whose token it is."""
        return await self.call(calls.whoami(), tries=1)

    async def follow(self, job_id: str) -> AsyncIterator[JobProgress]:
        """The job's state now and at each change, until it is final."""
        failures = 0
        while True:
            lines = calls.EventLines()
            try:
                async with self._http.stream("GET", calls.events_path(job_id)) as response:
                    if response.status_code != 200:
                        body = await response.aread()
                        raise calls.fault(response.status_code, body, self.endpoint.url)
                    async for line in response.aiter_lines():
                        for event in lines.take(line):
                            failures = 0
                            if event is None:
                                continue
                            yield event
                            if event.state.is_final:
                                return
            except (httpx.TransportError, UnreachableError) as error:
                failures += 1
                if failures >= calls.TRIES:
                    if isinstance(error, UnreachableError):
                        raise
                    raise unreachable(self.endpoint, error) from error
            await asyncio.sleep(calls.pause_before(max(1, failures), None))


class AsyncJob:
    """One job, by its id."""

    def __init__(self, client: AsyncClient, job_id: str) -> None:
        self.client = client
        self.id = job_id

    def __repr__(self) -> str:
        return f"AsyncJob({self.id!r})"

    async def status(self) -> JobInfo:
        """State and counts now."""
        return await self.client.call(calls.job(self.id))

    async def wait(
        self, timeout: float | None = None, progress: Callable[[JobProgress], None] | None = None
    ) -> JobInfo:
        """Until the job is final; returns it, whether it succeeded or not.

        Raises:
            ExpiredError: `timeout` seconds passed; the job goes on.
        """
        try:
            async with asyncio.timeout(timeout):
                async for event in self.client.follow(self.id):
                    if progress is not None:
                        progress(event)
        except TimeoutError:
            raise expired(self.id, timeout) from None
        return await self.status()

    async def tasks(self, states: Sequence[str] = (), first: int = 0) -> AsyncIterator[TaskView]:
        """Tasks in index order, page by page."""
        at: int | None = first
        while at is not None:
            page = await self.client.call(calls.tasks(self.id, at, PAGE, states))
            for task in page.tasks:
                yield task
            at = page.next

    async def results(self, first: int = 0) -> AsyncIterator[TaskResult]:
        """Results of the tasks that have succeeded so far, in index order, page by page."""
        at: int | None = first
        while at is not None:
            page = await self.client.call(calls.results(self.id, at, PAGE))
            for result in page.results:
                yield result
            at = page.next

    async def cancel(self) -> Cancelling:
        """Cancel; returns at once."""
        return await self.client.call(calls.cancel(self.id))


async def submit(
    job: Mapping[str, Any] | Path | str | None = None, *, client: AsyncClient, **fields: Any
) -> AsyncJob:
    """Submit a job and return it at once; see `springtide.submit`."""
    return client.job((await client.submit(as_job_file(job, fields))).id)
