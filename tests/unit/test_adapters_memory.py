"""Faults on request: what the in-memory adapters do when they are told to fail."""

from __future__ import annotations

import asyncio

from springtide_shared.adapters.faults import Faults
from springtide_shared.adapters.memory_ledger import InMemoryLedger
from springtide_shared.adapters.memory_state import InMemoryLeases, InMemoryState
from springtide_shared.adapters.memory_store import InMemoryStore
from springtide_shared.errors import Reason, TransientError
from springtide_shared.ports.ledger import Changes
from springtide_shared.testing.expecting import refused
from springtide_shared.testing.lease_contract import SetClock
from springtide_shared.testing.ledger_contract import job_row, task_row
from springtide_shared.testing.virtual import run_virtual


def test_a_fault_before_its_effect_leaves_none() -> None:
    async def run() -> None:
        store = InMemoryStore()
        store.faults.fail_next(2, "put")
        for _ in range(2):
            error = await refused(TransientError, store.put("k", b"x"))
            assert error.reason is Reason.STORE_UNAVAILABLE
            assert await store.head("k") is None, "other operations go on"
        await store.put("k", b"x")
        assert store.faults.calls == {"put": 3, "head": 2}
        assert store.bytes_written == 1

    run_virtual(run())


def test_a_lost_answer_leaves_its_effect() -> None:
    async def run() -> None:
        store, ledger = InMemoryStore(), InMemoryLedger()
        store.faults.fail_next(after_effect=True)
        await refused(TransientError, store.put_if_absent("k", b"x"))
        assert await store.put_if_absent("k", b"y") is False
        assert await store.get("k") == b"x"
        epoch = await ledger.begin_epoch("one")
        ledger.faults.fail_next(1, "commit", after_effect=True)
        await refused(TransientError, ledger.commit(Changes(epoch=epoch, jobs=[job_row()])))
        assert await ledger.job("job-1") == job_row()

    run_virtual(run())


def test_an_outage_lasts_as_long_as_told() -> None:
    async def run() -> None:
        state = InMemoryState()
        state.faults.outage(10.0, 20.0)
        failed = []
        for second in range(30):
            try:
                await state.load("k")
            except TransientError:
                failed.append(second)
            await asyncio.sleep(1.0)
        assert failed == list(range(10, 20))

    run_virtual(run())


def test_a_keeper_that_is_down_answers_nothing() -> None:
    async def run() -> None:
        leases = InMemoryLeases(SetClock())
        leases.faults.is_down = True
        await refused(TransientError, leases.acquire("l", "a", 5.0))
        leases.faults.is_down = False
        lease = await leases.acquire("l", "a", 5.0)
        assert lease is not None
        assert lease.token == 1

    run_virtual(run())


def test_adapters_can_share_one_outage() -> None:
    async def run() -> None:
        faults = Faults("machine")
        store, ledger = InMemoryStore(faults), InMemoryLedger(faults)
        faults.is_down = True
        await refused(TransientError, store.get("k"))
        await refused(TransientError, ledger.jobs())

    run_virtual(run())


def test_a_settled_job_leaves_nothing_behind_in_memory() -> None:
    async def run() -> None:
        ledger = InMemoryLedger()
        epoch = await ledger.begin_epoch("one")
        before = await ledger.size_bytes()
        rows = [task_row(i) for i in range(1_000)]
        await ledger.commit(Changes(epoch=epoch, tasks=rows))
        assert await ledger.size_bytes() > 1_000 * len(rows[0].body)
        await ledger.commit(Changes(epoch=epoch, settled=[("job-1", i) for i in range(1_000)]))
        assert await ledger.size_bytes() == before

    run_virtual(run())
