"""Opens the adapters of a rescheduler that runs as a process of its own."""

from __future__ import annotations

from contextlib import AsyncExitStack

from springtide_rescheduler.config import ProcessConfig
from springtide_rescheduler.service import Rescheduler
from springtide_shared.adapters.clock import SystemClock, SystemIds
from springtide_shared.adapters.directory_state import DirectoryLeases, DirectoryState
from springtide_shared.adapters.directory_store import DirectoryStore
from springtide_shared.adapters.rabbit_bus import RabbitBus, RabbitSettings
from springtide_shared.runtime.process import require, serve_with_health


async def run(config: ProcessConfig) -> None:
    """Serve until a signal asks to end.

    Raises:
        InvalidFieldError: an address is missing.
        SpringtideError: the broker cannot be used, or another rescheduler has taken the cluster
            over (reason `stale`).
    """
    require("rescheduler", config, "cluster", "amqp_url", "state_dir", "store_dir")
    assert config.state_dir is not None
    assert config.store_dir is not None
    clock = SystemClock()
    ids = SystemIds(clock)
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
        await serve_with_health(rescheduler, config)
