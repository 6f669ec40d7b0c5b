"""The ledger in memory keeps the contract of every ledger."""

from __future__ import annotations

import pytest

from springtide_shared.adapters.memory_ledger import InMemoryLedger
from springtide_shared.testing.ledger_contract import CASES
from springtide_shared.testing.virtual import run_virtual


@pytest.mark.parametrize("name", sorted(CASES))
def test_memory_ledger_keeps_the_contract(name: str) -> None:
    async def run() -> None:
        await CASES[name](InMemoryLedger())

    run_virtual(run())
