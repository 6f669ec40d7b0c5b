"""Opens the adapters of a rescheduler that runs as a process of its own."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import structlog

from springtide_rescheduler.config import ProcessConfig
from springtide_rescheduler.service import Rescheduler
from springtide_shared.adapters.clock import SystemClock, SystemIds
from springtide_shared.adapters.directory_state import DirectoryLeases, DirectoryState
from springtide_shared.adapters.directory_store import DirectoryStore
from springtide_shared.adapters.rabbit_bus import RabbitBus, RabbitSettings
from springtide_shared.errors import InvalidFieldError
from springtide_shared.runtime.health import health_listener
from springtide_shared.runtime.run import serve_all, stop_on_signals


async def run(config: ProcessConfig) -> None:
    """Serve until a signal asks to end.

    Raises:
        InvalidFieldError: an address is missing.
        SpringtideError: the broker cannot be used, or another rescheduler has taken the cluster
            over (reason `stale`).
    """
    for name in ("cluster", "amqp_url", "state_dir", "store_dir"):
        if not getattr(config, name):
            raise InvalidFieldError(
                name, "(absent)", f"set SPRINGTIDE_RESCHEDULER_{name.upper()} or the file's {name}"
            )
    assert config.state_dir is not None
    assert config.store_dir is not None
    clock = SystemClock()
    ids = SystemIds(clock)
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        settings = RabbitSettings(
            url=config.amqp_url, name=f"springtide-rescheduler-{config.cluster}"
        )
        bus = await stack.enter_async_context(RabbitBus.connect(settings, clock=clock, ids=ids))
        rescheduler = Rescheduler(
            cluster=config.cluster,
            bus=bus,
            state=DirectoryState(config.state_dir / "documents"),
            store=DirectoryStore(config.store_dir),
            leases=DirectoryLeases(config.state_dir / "leases", clock),
            clock=clock,
            ids=ids,
            config=config.policy(),
        )
        port = await stack.enter_async_context(
            health_listener(
                config.health_host,
                config.health_port,
                lambda: {rescheduler.name: rescheduler.health()},
            )
        )
        structlog.get_logger(service=rescheduler.name).info("health.listening", port=port)
        with stop_on_signals(stop):
            await serve_all([rescheduler], stop)
