"""The bus in memory keeps the contract of every bus, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from springtide_shared.adapters.memory_bus import InMemoryBus, MemoryBroker
from springtide_shared.ports.bus import MessageBus
from springtide_shared.testing.bus_contract import CASES, BusHarness
from springtide_shared.testing.virtual import run_virtual


@pytest.mark.parametrize("name", sorted(CASES))
def test_memory_bus_keeps_the_contract(name: str) -> None:
    broker = MemoryBroker()
    bus = InMemoryBus(broker)

    @asynccontextmanager
    async def other() -> AsyncIterator[MessageBus]:
        yield InMemoryBus(broker)

    harness = BusHarness(bus=bus, user_bus=bus.as_user("alice"), user="alice", other=other)

    async def run() -> None:
        await CASES[name](harness)

    run_virtual(run())
