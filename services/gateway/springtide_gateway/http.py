"""The HTTP application: routes, authentication, and one shape for every fault."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import structlog
from litestar import Litestar, MediaType, Request, Response, get, post
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.enums import ScopeType
from litestar.exceptions import HTTPException, ValidationException
from litestar.middleware import (
    AbstractAuthenticationMiddleware,
    AuthenticationResult,
    DefineMiddleware,
)
from litestar.openapi import OpenAPIConfig, ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin, YamlRenderPlugin
from litestar.openapi.spec import (
    Components,
    OpenAPIMediaType,
    Operation,
    RequestBody,
    SecurityScheme,
)
from litestar.params import FromPath, FromQuery, PathParameter, QueryParameter
from litestar.response import Stream
from litestar.types import ASGIApp, Receive, Scope, Send

from springtide_gateway import policy
from springtide_gateway.config import GatewayConfig
from springtide_gateway.desk import Desk
from springtide_gateway.feeds import ClusterBoard, JobFeed
from springtide_gateway.streams import EventStream, read_object, within
from springtide_gateway.tokens import TokenTable
from springtide_shared.errors import (
    NotFoundError,
    PermanentError,
    Reason,
    SpringtideError,
    TransientError,
)
from springtide_shared.httpapi import (
    MAX_PAGE,
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
    TaskResult,
    WhoAmI,
)
from springtide_shared.ledger.reading import job_view, job_views, task_views
from springtide_shared.ledger.views import JobView, TaskState, TaskView
from springtide_shared.messages.base import MAX_BODY_BYTES
from springtide_shared.messages.job import JobCancel, JobSubmit, parse_job
from springtide_shared.messages.records import CompletionRecord, log_key, record_key
from springtide_shared.ports.clock import Clock, Ids
from springtide_shared.ports.ledger import Ledger
from springtide_shared.ports.store import ObjectStore
from springtide_shared.runtime.service import Health

VERSION: Final = "0.1.0"
_DISCARD_BYTES: Final = 64 * 1024 * 1024
"""How much of an oversized body is read and thrown away, so that its sender hears the answer."""
_JOB_ID: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$", re.ASCII)
_STREAM_OPT: Final = {"is_stream": True}
_RECORDS_AT_ONCE: Final = 8
_SHOWN_NAMES: Final = {"states": "state"}
"""Parameters whose name in the code is not the one in the query (`state` is the framework's)."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger(service="gateway")


@dataclass(slots=True, kw_only=True)
class Parts:
    """What the routes work with."""

    config: GatewayConfig
    ledger: Ledger
    store: ObjectStore
    clock: Clock
    ids: Ids
    desk: Desk
    feed: JobFeed
    board: ClusterBoard
    tokens: TokenTable
    health: Callable[[], Health]

    async def job_of(self, job_id: str, tenant: str) -> JobView:
        """The one ownership rule: a job of another tenant does not exist.

        Raises:
            NotFoundError: no such job, or not this tenant's.
        """
        view = await job_view(self.ledger, job_id) if _JOB_ID.fullmatch(job_id) else None
        if view is None or view.tenant != tenant:
            raise _no_such_job()
        return view

    async def task_of(self, job: JobView, index: int) -> TaskView:
        """One task of a job.

        Raises:
            NotFoundError: the array is shorter.
        """
        views = await task_views(self.ledger, job.spec.id, first=index, limit=1)
        if not 0 <= index < job.spec.size or not views:
            raise NotFoundError(
                Reason.NOT_FOUND, f"no task {index}: the array has 0 … {job.spec.size - 1}"
            )
        return views[0]

    async def record_of(self, job_id: str, task: TaskView) -> CompletionRecord:
        """The completion record that the ledger accepted for a succeeded task.

        Raises:
            NotFoundError: the task has not succeeded, or its record is gone.
            PermanentError: the object is not the record that was accepted.
        """
        if task.state is not TaskState.SUCCEEDED or task.record_attempt is None:
            raise NotFoundError(
                Reason.NOT_FOUND, f"task {task.index} is {task.state.value}: it has no result"
            )
        key = record_key(job_id, task.index, task.record_attempt)
        body = await within(self.config.store_limit_seconds, self.store.get(key))
        if hashlib.sha256(body).hexdigest() != task.digest:
            raise PermanentError(
                Reason.STALE, f"the record of task {task.index} was changed after its acceptance"
            )
        try:
            return msgspec.json.decode(body, type=CompletionRecord)
        except msgspec.DecodeError as error:
            raise PermanentError(
                Reason.MALFORMED, f"the record of task {task.index} cannot be read"
            ) from error


def _no_such_job() -> NotFoundError:
    return NotFoundError(Reason.UNKNOWN_JOB, "no job of this id")


JobRequest = Request[str, str, Any]


def parts_of(request: Request[Any, Any, Any]) -> Parts:
    """What the routes work with."""
    parts: Parts = request.app.state["parts"]
    return parts


IndexPath = Annotated[int, PathParameter(ge=0, description="Index of the task in the array.")]
LimitQuery = Annotated[
    int, QueryParameter(ge=1, le=MAX_PAGE, description="Most entries of a page.")
]
FirstQuery = Annotated[int, QueryParameter(ge=0, description="Lowest task index of the page.")]


# ---------------------------------------------------------------- jobs


def _inlined(schema: Any, parts: Any) -> Any:
    """The schema with its references written out: the framework knows no foreign components."""
    if isinstance(schema, dict):
        if isinstance(name := schema.get("$ref"), str):
            return _inlined(parts[name.rpartition("/")[2]], parts)
        return {key: _inlined(value, parts) for key, value in schema.items()}
    return [_inlined(one, parts) for one in schema] if isinstance(schema, list) else schema


def _told(description: str) -> ResponseSpec:
    return ResponseSpec(data_container=Problem, description=description, generate_examples=False)


_REFUSALS: Final = {
    200: ResponseSpec(
        data_container=Submitted,
        description="It was there already, with this content.",
        generate_examples=False,
    ),
    400: _told("No JSON, or a field is missing or of the wrong type."),
    409: _told("The id is taken by a different job, or was cancelled before it came."),
    413: _told("The body is larger than 1 MiB."),
    422: _told("A value is refused, or a field is not supported yet."),
    503: _told("No answer from the coordinator; the same again is harmless."),
}


@dataclass
class SubmitOperation(Operation):
    """Describes the body, which is read by hand so that faults name the field and the remedy."""

    def __post_init__(self) -> None:
        (schema,), parts = msgspec.json.schema_components(
            [JobSubmit], ref_template="#/components/schemas/{name}"
        )
        self.request_body = RequestBody(
            description="The job, the same as the body of a `job.submit` message.",
            required=True,
            content={"application/json": OpenAPIMediaType(schema=_inlined(schema, parts))},
        )


@post(
    f"{PREFIX}/jobs",
    request_max_body_size=None,
    responses=_REFUSALS,
    operation_class=SubmitOperation,
)
async def submit_job(request: JobRequest) -> Response[Submitted | Problem]:
    """Submit a job (body: `job.submit`). 201: taken; 200: it was there already, the same."""
    parts = parts_of(request)
    body = await _read_body(request)
    job, _spec = parse_job(body)
    before = await job_view(parts.ledger, job.id)
    answer = await parts.desk.ask(job, request.user)
    if not answer.accepted:
        status, problem = policy.refusal(answer)
        return Response(problem, status_code=status)
    created = before is None
    return Response(
        Submitted(id=job.id, created=created, url=policy.job_url(job.id)),
        status_code=201 if created else 200,
        headers={"location": policy.job_url(job.id)},
    )


@get(f"{PREFIX}/jobs")
async def list_jobs(
    request: JobRequest, limit: LimitQuery = 100, after: FromQuery[str] = ""
) -> JobPage:
    """Your jobs in id order."""
    parts = parts_of(request)
    views = await job_views(parts.ledger, tenant=request.user, limit=limit, after=after)
    return JobPage(
        jobs=[policy.job_info(view) for view in views],
        next=views[-1].spec.id if len(views) == limit else None,
    )


@get(f"{PREFIX}/jobs/{{job_id:str}}")
async def show_job(
    request: JobRequest, job_id: FromPath[str], spec: FromQuery[bool] = False
) -> JobInfo:
    """One job; `spec=true` shows what it runs, too."""
    parts = parts_of(request)
    return policy.job_info(await parts.job_of(job_id, request.user), with_spec=spec)


@post(f"{PREFIX}/jobs/{{job_id:str}}/cancel", status_code=202)
async def cancel_job(request: JobRequest, job_id: FromPath[str]) -> Response[Cancelling | Problem]:
    """Cancel a job. One that is unknown is cancelled should it still arrive (and 404 meanwhile)."""
    parts = parts_of(request)
    if not _JOB_ID.fullmatch(job_id):
        raise _no_such_job()
    view = await job_view(parts.ledger, job_id)
    if view is not None and view.tenant != request.user:
        raise _no_such_job()
    answer = await parts.desk.ask(JobCancel(id=job_id), request.user)
    if view is None:
        raise _no_such_job()
    if not answer.accepted:
        status, problem = policy.refusal(answer)
        return Response(problem, status_code=status)
    return Response(Cancelling(id=job_id, state=view.state), status_code=202)


@get(f"{PREFIX}/jobs/{{job_id:str}}/events", opt=_STREAM_OPT, media_type="text/event-stream")
async def follow_job(request: JobRequest, job_id: FromPath[str]) -> ASGIApp:
    """Server-sent events: `progress` with the state now and at each change, `end` at the last."""
    parts = parts_of(request)
    tenant = request.user

    async def read() -> JobProgress | None:
        async with asyncio.timeout(parts.config.request_limit_seconds):
            view = await job_view(parts.ledger, job_id)
        if view is None or view.tenant != tenant:
            return None
        return policy.progress_of(view, parts.clock.now())

    await parts.job_of(job_id, tenant)
    parts.feed.check_room()
    return EventStream(
        feed=parts.feed,
        job_id=job_id,
        tenant=tenant,
        read=read,
        heartbeat=parts.config.stream_heartbeat_seconds,
        limit=parts.config.stream_limit_seconds,
    )


# ---------------------------------------------------------------- tasks


@get(f"{PREFIX}/jobs/{{job_id:str}}/tasks")
async def list_tasks(
    request: JobRequest,
    job_id: FromPath[str],
    first: FirstQuery = 0,
    limit: LimitQuery = 100,
    states: Annotated[list[TaskState] | None, QueryParameter(name="state")] = None,
) -> TaskPage:
    """Tasks in index order; `state` (may be repeated) picks some."""
    parts = parts_of(request)
    job = await parts.job_of(job_id, request.user)
    views = await task_views(parts.ledger, job_id, first=first, limit=limit, states=states or None)
    return TaskPage(tasks=views, next=policy.next_index(views, limit, job.spec.size))


@get(f"{PREFIX}/jobs/{{job_id:str}}/results")
async def list_results(
    request: JobRequest,
    job_id: FromPath[str],
    first: FirstQuery = 0,
    limit: LimitQuery = 100,
) -> ResultPage:
    """Results of the succeeded tasks in index order: exit codes and outputs."""
    parts = parts_of(request)
    job = await parts.job_of(job_id, request.user)
    views = await task_views(
        parts.ledger, job_id, first=first, limit=limit, states=[TaskState.SUCCEEDED]
    )
    results: list[TaskResult] = []
    for start in range(0, len(views), _RECORDS_AT_ONCE):
        some = views[start : start + _RECORDS_AT_ONCE]
        read = await asyncio.gather(
            *(_result(parts, job_id, view) for view in some), return_exceptions=True
        )
        for one in read:
            if isinstance(one, BaseException):
                raise one
            results.append(one)
    return ResultPage(results=results, next=policy.next_index(views, limit, job.spec.size))


async def _result(parts: Parts, job_id: str, task: TaskView) -> TaskResult:
    try:
        record = await parts.record_of(job_id, task)
    except TransientError:
        raise
    except SpringtideError as error:
        return policy.result_of(job_id, task, None, str(error))
    return policy.result_of(job_id, task, record, "")


@get(f"{PREFIX}/jobs/{{job_id:str}}/tasks/{{index:int}}/logs", opt=_STREAM_OPT)
async def show_logs(
    request: JobRequest,
    job_id: FromPath[str],
    index: IndexPath,
    stream: Annotated[str, QueryParameter(pattern="^(stdout|stderr)$")] = "stdout",
    attempt: Annotated[int | None, QueryParameter(ge=1, le=65_535)] = None,
    tail_bytes: Annotated[int | None, QueryParameter(ge=1)] = None,
) -> Stream:
    """A log stream of a task: of the attempt that succeeded, else the newest, else `attempt`."""
    parts = parts_of(request)
    async with asyncio.timeout(parts.config.request_limit_seconds):
        job = await parts.job_of(job_id, request.user)
        task = await parts.task_of(job, index)
        shown = policy.attempt_shown(task, attempt)
        if shown == 0:
            raise NotFoundError(Reason.NOT_FOUND, f"task {index} has not started: no logs yet")
        key = log_key(job_id, index, shown, stream)
        found = await within(parts.config.store_limit_seconds, parts.store.head(key))
    if found is None:
        raise NotFoundError(
            Reason.NOT_FOUND,
            f"no {stream} of attempt {shown} of task {index}; logs are stored when an attempt ends",
        )
    start = max(0, found.size - tail_bytes) if tail_bytes else 0
    return Stream(
        read_object(parts.store, key, start, found.size, parts.config.store_limit_seconds),
        media_type="text/plain",
        headers={
            "content-length": str(found.size - start),
            "x-springtide-attempt": str(shown),
            "x-content-type-options": "nosniff",
        },
    )


@get(f"{PREFIX}/jobs/{{job_id:str}}/tasks/{{index:int}}/outputs/{{path:path}}", opt=_STREAM_OPT)
async def download_output(
    request: JobRequest, job_id: FromPath[str], index: IndexPath, path: FromPath[str]
) -> Stream:
    """A declared output of a succeeded task. Only what its completion record names is served."""
    parts = parts_of(request)
    async with asyncio.timeout(parts.config.request_limit_seconds):
        job = await parts.job_of(job_id, request.user)
        task = await parts.task_of(job, index)
        record = await parts.record_of(job_id, task)
        output = policy.output_named(record, path.removeprefix("/"))
        if output is None:
            raise NotFoundError(Reason.NOT_FOUND, f"task {index} has no output of this path")
        found = await within(parts.config.store_limit_seconds, parts.store.head(output.key))
    if found is None or found.size != output.size:
        raise NotFoundError(Reason.NOT_FOUND, "the output's object is gone or was changed")
    digest = b64encode(bytes.fromhex(output.sha256)).decode()
    return Stream(
        read_object(parts.store, output.key, 0, output.size, parts.config.store_limit_seconds),
        media_type="application/octet-stream",
        headers={
            "content-length": str(output.size),
            "content-disposition": "attachment",
            "repr-digest": f"sha-256=:{digest}:",
            "etag": f'"{output.sha256}"',
            "x-content-type-options": "nosniff",
        },
    )


# ---------------------------------------------------------------- the rest


@get(f"{PREFIX}/capacity")
async def show_capacity(request: JobRequest) -> CapacityInfo:
    """Clusters, their node groups, nodes and free places, as last heard."""
    parts = parts_of(request)
    return parts.board.shown(parts.clock.now())


@get(f"{PREFIX}/whoami")
async def who_am_i(request: JobRequest) -> WhoAmI:
    """Whose token this is."""
    return WhoAmI(tenant=request.user, version=VERSION)


@get("/healthz", exclude_from_auth=True)
async def healthz() -> dict[str, bool]:
    """200 while the event loop turns."""
    return {"alive": True}


@get("/readyz", exclude_from_auth=True)
async def readyz(request: JobRequest) -> Response[dict[str, Any]]:
    """200 if submits can be answered, else 503 with the reasons."""
    parts = parts_of(request)
    health = parts.health()
    return Response(
        {"ready": health.is_ready, "reasons": list(health.reasons)},
        status_code=200 if health.is_ready else 503,
    )


async def _read_body(request: JobRequest) -> bytes:
    """The body, at most `MAX_BODY_BYTES`.

    A bigger one is read to its end (within bounds) and thrown away: a sender that is cut off
    while it writes sees a broken connection instead of the reason.
    """
    kept: list[bytes] = []
    size = 0
    stream: AsyncIterator[bytes] = request.stream()
    async for piece in stream:
        size += len(piece)
        if size <= MAX_BODY_BYTES:
            kept.append(piece)
        else:
            kept.clear()
        if size > _DISCARD_BYTES:
            break
    if size > MAX_BODY_BYTES:
        raise PermanentError(
            Reason.TOO_LARGE,
            f"the body has {'more than ' if size > _DISCARD_BYTES else ''}{size} bytes, the limit"
            f" is {MAX_BODY_BYTES}; split the array or shorten its items",
        )
    return b"".join(kept)


# ---------------------------------------------------------------- around the routes


class TokenAuthentication(AbstractAuthenticationMiddleware):
    """`Authorization: Bearer <token>`; the request's user is then the tenant."""

    async def authenticate_request(
        self, connection: ASGIConnection[Any, Any, Any, Any]
    ) -> AuthenticationResult:
        """See the base.

        Raises:
            PermanentError: no token, or none that is known.
        """
        kind, _, token = connection.headers.get("authorization", "").partition(" ")
        tenant = None
        if kind.lower() == "bearer":
            tokens: TokenTable = connection.app.state["parts"].tokens
            tenant = tokens.tenant_of(token.strip())
        if tenant is None:
            raise PermanentError(
                Reason.UNAUTHORISED, "send `Authorization: Bearer <token>` with a valid token"
            )
        return AuthenticationResult(user=tenant, auth=None)


class RequestLimit:
    """Ends the work on a request after a while; streams have limits of their own."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        handler = scope.get("route_handler")
        if scope["type"] != ScopeType.HTTP or (
            handler is not None and handler.opt.get("is_stream")
        ):
            await self._app(scope, receive, send)
            return
        async with asyncio.timeout(self._seconds):
            await self._app(scope, receive, send)


def _answer(problem: Problem, status: int, retry_after: float | None = None) -> Response[Problem]:
    headers = {}
    if retry_after is not None or status == 503:
        headers["retry-after"] = str(max(1, math.ceil(retry_after or 5.0)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(problem, status_code=status, headers=headers, media_type=MediaType.JSON)


def _on_fault(request: Request[Any, Any, Any], error: Exception) -> Response[Problem]:
    assert isinstance(error, SpringtideError)
    status = policy.status_of(error)
    if status >= policy.INTERNAL:
        _log.warning("request.failed", path=request.url.path, status=status, error=str(error))
    if status == policy.INTERNAL:
        return _on_unknown(request, error)
    return _answer(policy.problem_of(error), status, getattr(error, "retry_after", None))


def _on_timeout(request: Request[Any, Any, Any], _error: Exception) -> Response[Problem]:
    _log.warning("request.expired", path=request.url.path)
    return _answer(
        Problem(reason=Reason.EXPIRED.value, detail="the work took too long; try again"), 503, 5.0
    )


def _on_http(_request: Request[Any, Any, Any], error: Exception) -> Response[Problem]:
    """The framework's own refusals: unknown paths, wrong methods, bad parameters."""
    assert isinstance(error, HTTPException)
    if isinstance(error, ValidationException):
        extra = error.extra if isinstance(error.extra, list) else []
        first: dict[str, Any] = extra[0] if extra and isinstance(extra[0], dict) else {}
        return _answer(
            Problem(
                reason=Reason.MALFORMED.value,
                detail=str(first.get("message", "a parameter is wrong")),
                field=_SHOWN_NAMES.get(key := str(first.get("key", "")), key),
                remedy="see /schema for this parameter",
            ),
            400,
        )
    reason = {404: Reason.NOT_FOUND, 413: Reason.TOO_LARGE, 401: Reason.UNAUTHORISED}.get(
        error.status_code, Reason.INTERNAL if error.status_code >= 500 else Reason.MALFORMED
    )
    detail = "no such path; see /schema" if error.status_code == 404 else error.detail
    if error.status_code >= 500:
        detail = "something went wrong here"
    return _answer(Problem(reason=reason.value, detail=detail), error.status_code)


def _on_unknown(request: Request[Any, Any, Any], error: Exception) -> Response[Problem]:
    """A fault of our own: the log has it under a number, the caller gets the number."""
    incident = parts_of(request).ids.new()
    _log.error(
        "request.broken",
        path=request.url.path,
        incident=incident,
        error=repr(error),
        exc_info=error,
    )
    return _answer(
        Problem(
            reason=Reason.INTERNAL.value,
            detail=f"something went wrong here; the gateway's log has it as incident {incident}",
        ),
        500,
    )


def build_app(parts: Parts) -> Litestar:
    """The application over these parts."""
    return Litestar(
        route_handlers=[
            submit_job,
            list_jobs,
            show_job,
            cancel_job,
            follow_job,
            list_tasks,
            list_results,
            show_logs,
            download_output,
            show_capacity,
            who_am_i,
            healthz,
            readyz,
        ],
        middleware=[
            DefineMiddleware(RequestLimit, seconds=parts.config.request_limit_seconds),
            DefineMiddleware(TokenAuthentication, exclude="^/schema"),
        ],
        exception_handlers={
            SpringtideError: _on_fault,
            TimeoutError: _on_timeout,
            HTTPException: _on_http,
            Exception: _on_unknown,
        },
        openapi_config=OpenAPIConfig(
            title="springtide",
            version=VERSION,
            description="Submit huge arrays of long tasks, follow them, fetch their results.",
            use_handler_docstrings=True,
            security=[{"token": []}],
            components=Components(
                security_schemes={"token": SecurityScheme(type="http", scheme="bearer")}
            ),
            path="/schema",
            render_plugins=[JsonRenderPlugin(), YamlRenderPlugin()],
        ),
        logging_config=None,
        debug=False,
        state=State({"parts": parts}),
    )
