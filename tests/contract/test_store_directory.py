"""The store in memory and the one in a directory keep the contract of every object store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from springtide_shared.adapters.directory_store import DirectoryStore
from springtide_shared.adapters.memory_store import InMemoryStore
from springtide_shared.ports.store import ObjectStore
from springtide_shared.testing.store_contract import CASES
from springtide_shared.testing.virtual import run_virtual


async def _run(name: str, store: ObjectStore, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    await CASES[name](store, local)


@pytest.mark.parametrize("name", sorted(CASES))
def test_memory_store_keeps_the_contract(name: str, tmp_path: Path) -> None:
    run_virtual(_run(name, InMemoryStore(), tmp_path))


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("name", sorted(CASES))
def test_directory_store_keeps_the_contract(name: str, sync: bool, tmp_path: Path) -> None:
    root = tmp_path / "store"
    asyncio.run(_run(name, DirectoryStore(root, sync=sync), tmp_path))
    assert list((root / "incoming").iterdir()) == [], "nothing half-written is left"
