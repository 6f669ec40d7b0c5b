"""Opens the adapters of a coordinator that runs as a process of its own."""

from __future__ import annotations

from contextlib import AsyncExitStack

from springtide_coordinator.config import ProcessConfig
from springtide_coordinator.service import Coordinator
from springtide_shared.adapters.clock import SystemClock, SystemIds
from springtide_shared.adapters.directory_store import DirectoryStore
from springtide_shared.adapters.rabbit_bus import RabbitBus, RabbitSettings
from springtide_shared.adapters.sql_ledger import SqlLedger
from springtide_shared.runtime.process import require, serve_with_health


async def run(config: ProcessConfig) -> None:
    """Serve until a signal asks to end.

    Raises:
        InvalidFieldError: an address is missing.
        SpringtideError: the broker or the database cannot be used, or another coordinator has taken
            over (reason `stale`).
    """
    require("coordinator", config, "amqp_url", "database_url")
    clock = SystemClock()
    ids = SystemIds(clock)
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
            config=config.policy(),
            store=None if config.store_dir is None else DirectoryStore(config.store_dir),
        )
        await serve_with_health(coordinator, config)
