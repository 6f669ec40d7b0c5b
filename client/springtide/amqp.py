"""Straight to a broker: publish `job.submit` and wait for the coordinator's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from springtide.errors import (
    DuplicateIdError,
    ExpiredError,
    RefusedError,
    SpringtideClientError,
    UnauthorisedError,
    UnreachableError,
)
from springtide.jobfile import JobFile
from springtide.ulid import new_id
from springtide_shared.adapters.rabbit_bus import RabbitBus, RabbitSettings
from springtide_shared.errors import PermanentError, Reason, SpringtideError
from springtide_shared.messages.job import JobAnswer, parse_job

T = TypeVar("T")

CONNECT_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 30.0
_URL_REMEDY: Final = "write the broker's URL as amqp://user:password@host:port/vhost"


def settings(url: str) -> RabbitSettings:
    """How to reach the broker. Publishing under our own user makes it the job's tenant."""
    return RabbitSettings(
        url=url,
        identify=True,
        name="springtide-client",
        connect_limit=CONNECT_SECONDS,
        publish_limit=CONNECT_SECONDS,
    )


def submit(job: JobFile, url: str, limit: float = ANSWER_SECONDS) -> str:
    """Publish the job; returns its id once the coordinator has accepted it.

    Raises:
        SpringtideClientError: refused, not reachable, not authorised, or no answer in time.
    """
    return asyncio.run(_translated(_submit(job, url, limit)))


def check(url: str) -> None:
    """Connect and leave again.

    Raises:
        SpringtideClientError: not reachable, or the broker refuses the user.
    """
    asyncio.run(_translated(_connect(url)))


async def _connect(url: str) -> None:
    async with RabbitBus.connect(settings(url)):
        pass


async def _submit(job: JobFile, url: str, limit: float) -> str:
    job.content.setdefault("id", new_id())
    job.check()
    message, _ = parse_job(job.content)
    correlation = new_id()
    async with RabbitBus.connect(settings(url)) as bus, bus.answers() as (address, inbox):
        await bus.publish(message, correlation_id=correlation, reply_to=address)
        try:
            async with asyncio.timeout(limit):
                while True:
                    for delivery in await inbox.receive():
                        await delivery.ack()
                        answer = delivery.message
                        if delivery.correlation_id == correlation and isinstance(answer, JobAnswer):
                            return _taken(answer)
        except TimeoutError:
            raise ExpiredError(
                f"job {message.id}: the coordinator did not answer within {limit:g} s; the job"
                " may have been taken",
                remedy="submit it again with the same id: that is harmless",
            ) from None


def _taken(answer: JobAnswer) -> str:
    if answer.accepted:
        return answer.job_id
    reason = answer.reason or Reason.INVALID_SPEC
    kind = DuplicateIdError if reason is Reason.DUPLICATE_ID else RefusedError
    raise kind(
        answer.detail or f"the coordinator refused it: {reason.value}",
        reason=reason.value,
        field=answer.field,
    )


async def _translated(work: Awaitable[T]) -> T:
    try:
        return await work
    except SpringtideError as error:
        raise _as_client_error(error) from error
    except ValueError as error:  # the URL itself; its text may hold a password, so none is shown
        raise UnreachableError("the broker's URL is malformed", remedy=_URL_REMEDY) from error


def _as_client_error(error: SpringtideError) -> SpringtideClientError:
    reason = error.reason.value
    if error.reason is Reason.UNAUTHORISED:
        return UnauthorisedError(
            error.detail, reason=reason, remedy="check user, password and virtual host of the URL"
        )
    if error.reason is Reason.CLUSTER_UNREACHABLE:
        return UnreachableError(
            "the broker has no queue for jobs: no coordinator has ever run there",
            reason=reason,
            remedy="start a coordinator, or check the virtual host of the URL",
        )
    if error.reason is Reason.TOO_LARGE:
        return RefusedError(
            error.detail, reason=reason, remedy="split the array or shorten its items"
        )
    if isinstance(error, PermanentError):
        return UnreachableError(error.detail, reason=reason, remedy=_URL_REMEDY)
    return UnreachableError(
        error.detail, reason=reason, remedy="is the broker running, and is the URL right?"
    )
