"""`/healthz` and `/readyz` on a small HTTP listener of our own: no framework for two paths."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from springtide_shared.runtime.service import Health

_REQUEST_LIMIT_SECONDS: Final = 5.0


@asynccontextmanager
async def health_listener(
    host: str, port: int, checks: Callable[[], dict[str, Health]]
) -> AsyncIterator[int]:
    """Serve both paths while the context is open; yields the port (0 picks a free one).

    `/healthz` answers 200 while the event loop turns; `/readyz` answers 200 if every check is
    ready, else 503, with the reasons as JSON either way.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_LIMIT_SECONDS):
                request = await reader.readline()
                while (await reader.readline()).strip():
                    pass
            parts = request.split()
            path = parts[1] if len(parts) > 1 else b""
            body: dict[str, object]
            if path == b"/healthz":
                status, body = "200 OK", {"alive": True}
            elif path == b"/readyz":
                found = checks()
                ready = all(item.is_ready for item in found.values())
                status = "200 OK" if ready else "503 Service Unavailable"
                body = {
                    "ready": ready,
                    **{name: list(item.reasons) for name, item in found.items()},
                }
            else:
                status, body = "404 Not Found", {"paths": ["/healthz", "/readyz"]}
            data = json.dumps(body).encode()
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode()
                + data
            )
            async with asyncio.timeout(_REQUEST_LIMIT_SECONDS):
                await writer.drain()
        except (TimeoutError, ConnectionError, ValueError):
            pass  # a probe that went away has nothing to be told
        finally:
            writer.close()

    server = await asyncio.start_server(answer, host, port, limit=8192)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
