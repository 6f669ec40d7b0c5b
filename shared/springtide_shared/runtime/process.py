"""A service as a process of its own: its command, its settings, its health, its end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog

from springtide_shared.errors import InvalidFieldError, SpringtideError
from springtide_shared.runtime import config, logs
from springtide_shared.runtime.health import health_listener
from springtide_shared.runtime.run import calm_collector, serve_all, stop_on_signals
from springtide_shared.runtime.service import Service

C = TypeVar("C")


class HealthSettings(Protocol):
    """Settings that say where `/healthz` and `/readyz` are served; port 0 picks a free one."""

    @property
    def health_host(self) -> str:
        """Address to listen on."""
        ...

    @property
    def health_port(self) -> int:
        """Port to listen on."""
        ...


def prefix_of(service: str) -> str:
    """What the names of a service's variables begin with: `SPRINGTIDE_<SERVICE>`."""
    return f"SPRINGTIDE_{service.upper()}"


def main(service: str, settings: type[C], run: Callable[[C], Awaitable[None]]) -> None:
    """The command `springtide-<service> [CONFIG]`: read the settings, run, exit 1 on a refusal."""
    logs.setup()
    log = structlog.get_logger(service=service)

    async def running() -> None:
        file = Path(sys.argv[1]) if len(sys.argv) > 1 else None
        await run(config.load(settings, prefix=prefix_of(service), file=file))

    try:
        asyncio.run(running())
    except SpringtideError as error:
        log.error("start.refused", error=str(error))
        sys.exit(1)
    except BaseExceptionGroup as group:
        known, rest = group.split(SpringtideError)
        if rest is not None or known is None:
            raise
        log.error("service.ended", errors=[str(error) for error in known.exceptions])
        sys.exit(1)


def require(service: str, settings: Any, *names: str) -> None:
    """Refuse settings that lack one of these, before anything is opened.

    Raises:
        InvalidFieldError: one is absent; names its variable.
    """
    for name in names:
        if not getattr(settings, name):
            raise InvalidFieldError(
                name, "(absent)", f"set {prefix_of(service)}_{name.upper()} or the file's {name}"
            )


async def serve_with_health(service: Service, settings: HealthSettings) -> None:
    """Serve until a signal asks to end, and tell whoever asks whether it is ready."""
    stop = asyncio.Event()
    async with health_listener(
        settings.health_host, settings.health_port, lambda: {service.name: service.health()}
    ) as port:
        structlog.get_logger(service=service.name).info("health.listening", port=port)
        calm_collector()
        with stop_on_signals(stop):
            await serve_all([service], stop)
