"""Opens the adapters of a coordinator that runs as a process of its own."""

from __future__ import annotations

import asyncio
import gc
from contextlib import AsyncExitStack

import structlog

from springtide_coordinator.config import Config
from springtide_coordinator.service import Coordinator
from springtide_shared.adapters.clock import SystemClock, SystemIds
from springtide_shared.adapters.directory_store import DirectoryStore
from springtide_shared.adapters.rabbit_bus import RabbitBus, RabbitSettings
from springtide_shared.adapters.sql_ledger import SqlLedger
from springtide_shared.errors import InvalidFieldError
from springtide_shared.runtime.health import health_listener
from springtide_shared.runtime.run import serve_all, stop_on_signals


async def run(config: Config) -> None:
    """Serve until a signal asks to end.

    Raises:
        InvalidFieldError: an address is missing.
        SpringtideError: the broker or the database cannot be used, or another coordinator has taken
            over (reason `stale`).
    """
    for name in ("amqp_url", "database_url"):
        if not getattr(config, name):
            raise InvalidFieldError(
                name, "(absent)", f"set SPRINGTIDE_COORDINATOR_{name.upper()} or the file's {name}"
            )
    clock = SystemClock()
    ids = SystemIds(clock)
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        settings = RabbitSettings(
            url=config.amqp_url,
            name="springtide-coordinator",
            trusted_publishers=config.trusted_publishers,
        )
        bus = await stack.enter_async_context(RabbitBus.connect(settings, clock=clock, ids=ids))
        ledger = await stack.enter_async_context(
            SqlLedger.open(config.database_url, migrate=config.migrate)
        )
        coordinator = Coordinator(
            bus=bus,
            ledger=ledger,
            clock=clock,
            ids=ids,
            config=config,
            store=None if config.store_dir is None else DirectoryStore(config.store_dir),
        )
        port = await stack.enter_async_context(
            health_listener(
                config.health_host,
                config.health_port,
                lambda: {coordinator.name: coordinator.health()},
            )
        )
        structlog.get_logger(service=coordinator.name).info("health.listening", port=port)
        # What was imported stays: the collector need not walk through it, which takes a tenth of a
        # second in the middle of somebody's dispatch.
        gc.collect()
        gc.freeze()
        with stop_on_signals(stop):
            await serve_all([coordinator], stop)
