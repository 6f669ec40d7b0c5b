"""Opens the adapters of a gateway that runs as a process of its own."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from springtide_gateway.config import ProcessConfig
from springtide_gateway.service import Gateway
from springtide_shared.adapters.clock import SystemClock, SystemIds
from springtide_shared.adapters.directory_store import DirectoryStore
from springtide_shared.adapters.rabbit_bus import RabbitBus, RabbitSettings
from springtide_shared.adapters.sql_ledger import SqlLedger
from springtide_shared.runtime.process import require
from springtide_shared.runtime.run import serve_all, stop_on_signals


async def run(config: ProcessConfig) -> None:
    """Serve until a signal asks to end.

    Raises:
        InvalidFieldError: an address is missing.
        SpringtideError: the broker or the database cannot be used.
    """
    require("gateway", config, "amqp_url", "database_url", "store_dir")
    assert config.store_dir is not None
    clock = SystemClock()
    ids = SystemIds(clock)
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        settings = RabbitSettings(url=config.amqp_url, name="springtide-gateway")
        bus = await stack.enter_async_context(RabbitBus.connect(settings, clock=clock, ids=ids))
        ledger = await stack.enter_async_context(SqlLedger.open(config.database_url))
        gateway = Gateway(
            bus=bus,
            ledger=ledger,
            store=DirectoryStore(config.store_dir),
            clock=clock,
            ids=ids,
            config=config.policy(),
        )
        with stop_on_signals(stop):
            await serve_all([gateway], stop)
