"""The bus on a real RabbitMQ keeps the contract of every bus, and what only a broker can show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from springtide_shared.adapters.rabbit_bus import RabbitBus, RabbitSettings
from springtide_shared.ports.bus import MessageBus
from springtide_shared.testing.bus_contract import CASES, BusHarness

pytestmark = pytest.mark.real("rabbitmq")


async def with_harness(url: str, prefix: str, run: Callable[[BusHarness], Awaitable[None]]) -> None:
    settings = RabbitSettings(url=url, exchange=f"{prefix}springtide")
    named = RabbitSettings(url=url, exchange=f"{prefix}springtide", identify=True)

    @asynccontextmanager
    async def other() -> AsyncIterator[MessageBus]:
        async with RabbitBus.connect(settings) as bus:
            yield bus

    async with RabbitBus.connect(settings) as bus, RabbitBus.connect(named) as user_bus:
        user = urlsplit(url).username or ""
        await run(BusHarness(bus=bus, user_bus=user_bus, user=user, other=other))


@pytest.mark.parametrize("name", sorted(CASES))
def test_rabbit_bus_keeps_the_contract(name: str, rabbitmq_url: str) -> None:
    asyncio.run(with_harness(rabbitmq_url, "", CASES[name]))
