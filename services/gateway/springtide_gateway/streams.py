"""Bodies that come in pieces: server-sent events and objects of the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

import msgspec
import structlog
from litestar.types import HTTPResponseBodyEvent, HTTPResponseStartEvent, Receive, Scope, Send

from springtide_gateway.feeds import JobFeed, Listener
from springtide_gateway.policy import is_news
from springtide_shared.errors import Reason, SpringtideError, TransientError
from springtide_shared.httpapi import JobProgress
from springtide_shared.ports.store import ObjectStore

T = TypeVar("T")

PIECE_BYTES: Final = 1024 * 1024

_log: structlog.stdlib.BoundLogger = structlog.get_logger(service="gateway")


class EventStream:
    """An ASGI response: the job's state now, then each change, until it is final.

    Broadcasts may be lost, so whenever the stream was quiet for `heartbeat` seconds the state is
    read anew. Ends with an `end` event whose reason is `final`, `limit` or `stopping`.
    """

    def __init__(
        self,
        *,
        feed: JobFeed,
        job_id: str,
        tenant: str,
        read: Callable[[], Awaitable[JobProgress | None]],
        heartbeat: float,
        limit: float,
    ) -> None:
        self._feed = feed
        self._job_id = job_id
        self._tenant = tenant
        self._read = read
        self._heartbeat = heartbeat
        self._limit = limit

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one reader; ends with it."""
        with self._feed.listen(self._job_id, self._tenant) as listener:
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-store"),
                (b"x-accel-buffering", b"no"),
            ]
            await send(
                HTTPResponseStartEvent(type="http.response.start", status=200, headers=headers)
            )
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write(listener, send), name="events/write")
                reader = group.create_task(_until_gone(receive), name="events/gone")
                await asyncio.wait([writer, reader], return_when=asyncio.FIRST_COMPLETED)
                writer.cancel()
                reader.cancel()

    async def _write(self, listener: Listener, send: Send) -> None:
        why = "limit"
        try:
            async with asyncio.timeout(self._limit):
                why = await self._follow(listener, send)
        except TimeoutError:
            pass
        end = _event("end", msgspec.json.encode({"reason": why}))
        await send(HTTPResponseBodyEvent(type="http.response.body", body=end, more_body=False))

    async def _follow(self, listener: Listener, send: Send) -> str:
        shown: JobProgress | None = None
        event: JobProgress | None = None
        while True:
            if event is None:
                event = await self._read_now()
            if event is not None and (shown is None or is_news(event, shown)):
                shown = event
                body = _event("progress", msgspec.json.encode(event))
            else:
                body = b": alive\n\n"
            await send(HTTPResponseBodyEvent(type="http.response.body", body=body, more_body=True))
            if shown is not None and shown.state.is_final:
                return "final"
            if listener.is_closed:
                return "stopping"
            event = await listener.next(self._heartbeat)

    async def _read_now(self) -> JobProgress | None:
        try:
            return await self._read()
        except SpringtideError as error:
            _log.warning("event_stream.read_failed", error=str(error))
            return None  # a sign of life is sent; the next round reads again


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_object(
    store: ObjectStore, key: str, start: int, end: int, limit: float
) -> AsyncIterator[bytes]:
    """Bytes `start` … `end` of an object, a piece at a time, each read within `limit` seconds."""
    while start < end:
        piece = await within(
            limit, store.get(key, offset=start, length=min(PIECE_BYTES, end - start))
        )
        if not piece:
            raise TransientError(Reason.STORE_UNAVAILABLE, "the object became shorter meanwhile")
        start += len(piece)
        yield piece


async def within(limit: float, call: Awaitable[T]) -> T:
    """The store's answer.

    Raises:
        TransientError: none within `limit` seconds (`store-unavailable`).
    """
    try:
        async with asyncio.timeout(limit):
            return await call
    except TimeoutError:
        raise TransientError(
            Reason.STORE_UNAVAILABLE, f"no answer from the store within {limit:g} s"
        ) from None
