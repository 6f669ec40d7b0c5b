"""The ledger on SQLite and on PostgreSQL keeps the contract of every ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from springtide_shared.adapters.sql_ledger import SqlLedger
from springtide_shared.testing.ledger_contract import CASES
from springtide_shared.testing.virtual import VirtualLoop, run_virtual
from springtide_shared.testing.virtual_ledger import RealIoLedger


async def _run(name: str, url: str) -> None:
    async with SqlLedger.open(url, migrate=True) as ledger:
        await CASES[name](ledger)


@pytest.mark.parametrize("name", sorted(CASES))
def test_sqlite_ledger_keeps_the_contract(name: str, tmp_path: Path) -> None:
    asyncio.run(_run(name, f"sqlite:///{tmp_path}/ledger.db"))


@pytest.mark.real("postgresql")
@pytest.mark.parametrize("name", sorted(CASES))
def test_postgresql_ledger_keeps_the_contract(name: str, postgres_url: str) -> None:
    asyncio.run(_run(name, postgres_url))


@pytest.mark.parametrize("name", sorted(CASES))
def test_sqlite_ledger_takes_no_virtual_time(name: str, tmp_path: Path) -> None:
    async def run() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        opened = SqlLedger.open(f"sqlite:///{tmp_path}/ledger.db", migrate=True)
        with loop.real_io():
            ledger = await opened.__aenter__()
        try:
            await CASES[name](RealIoLedger(ledger))
        finally:
            with loop.real_io():
                await opened.__aexit__(None, None, None)
        return loop.time()

    assert run_virtual(run()) == 0
