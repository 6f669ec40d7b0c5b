"""Documents and leases, in memory and in a directory, keep the contracts of every keeper."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from springtide_shared.adapters.directory_state import DirectoryLeases, DirectoryState
from springtide_shared.adapters.memory_state import InMemoryLeases, InMemoryState
from springtide_shared.testing import lease_contract, state_contract
from springtide_shared.testing.lease_contract import SetClock
from springtide_shared.testing.virtual import run_virtual


@pytest.mark.parametrize("name", sorted(state_contract.CASES))
def test_memory_state_keeps_the_contract(name: str) -> None:
    async def run() -> None:
        await state_contract.CASES[name](InMemoryState())

    run_virtual(run())


@pytest.mark.parametrize("name", sorted(state_contract.CASES))
def test_directory_state_keeps_the_contract(name: str, tmp_path: Path) -> None:
    async def run() -> None:
        await state_contract.CASES[name](DirectoryState(tmp_path / "state"))

    asyncio.run(run())


@pytest.mark.parametrize("name", sorted(lease_contract.CASES))
def test_memory_leases_keep_the_contract(name: str) -> None:
    async def run() -> None:
        clock = SetClock()
        await lease_contract.CASES[name](InMemoryLeases(clock), clock)

    run_virtual(run())


@pytest.mark.parametrize("name", sorted(lease_contract.CASES))
def test_directory_leases_keep_the_contract(name: str, tmp_path: Path) -> None:
    async def run() -> None:
        clock = SetClock()
        await lease_contract.CASES[name](DirectoryLeases(tmp_path / "leases", clock), clock)

    asyncio.run(run())
