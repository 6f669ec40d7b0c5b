"""The ledger on a failing PostgreSQL: faults translated, limits kept, no password shown."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from springtide_shared.adapters import sql_schema
from springtide_shared.adapters.sql_ledger import SqlLedger, migrate
from springtide_shared.errors import ConflictError, PermanentError, Reason, TransientError
from springtide_shared.ports.ledger import Changes
from springtide_shared.testing.expecting import refused
from springtide_shared.testing.ledger_contract import job_row, task_row

pytestmark = pytest.mark.real("postgresql")


def with_ledger(url: str, body: Callable[[SqlLedger, Any], Awaitable[None]], limit: float) -> None:
    """Run `body` with a ledger and an operator's own connection to its database."""

    async def run() -> None:
        operator = await asyncpg.connect(url)
        try:
            async with SqlLedger.open(url, migrate=True, limit_seconds=limit) as ledger:
                await body(ledger, operator)
        finally:
            await operator.close()

    asyncio.run(run())


async def _unavailable(url: str, call: Awaitable[object]) -> None:
    error = await refused(TransientError, call)
    assert error.reason is Reason.STORE_UNAVAILABLE
    _shows_no_password(url, error)


def _shows_no_password(url: str, error: Exception) -> None:
    password = urlsplit(url).password
    assert password
    assert password not in "".join(traceback.format_exception(error))


def test_lost_connections_are_replaced(postgres_url: str) -> None:
    async def body(ledger: SqlLedger, operator: Any) -> None:
        epoch = await ledger.begin_epoch("one")
        await operator.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await _unavailable(postgres_url, ledger.commit(Changes(epoch=epoch, jobs=[job_row()])))
        await ledger.commit(Changes(epoch=epoch, jobs=[job_row()]))
        assert await ledger.job("job-1") == job_row()

    with_ledger(postgres_url, body, 5)


def test_a_call_that_hangs_ends_at_its_limit(postgres_url: str) -> None:
    async def body(ledger: SqlLedger, operator: Any) -> None:
        epoch = await ledger.begin_epoch("one")
        loop = asyncio.get_running_loop()
        async with operator.transaction():
            await operator.execute("LOCK TABLE tasks IN ACCESS EXCLUSIVE MODE")
            changes = Changes(epoch=epoch, jobs=[job_row()], tasks=[task_row(1)])
            for call in (ledger.commit(changes), ledger.tasks("job-1")):
                start = loop.time()
                await _unavailable(postgres_url, call)
                assert loop.time() - start < 5
        assert await ledger.job("job-1") is None, "nothing of it is applied afterwards"
        await ledger.commit(changes)
        assert list(await ledger.tasks("job-1")) == [task_row(1)]

    with_ledger(postgres_url, body, 0.5)


def test_a_read_only_server_is_unavailable(postgres_url: str) -> None:
    async def body(ledger: SqlLedger, operator: Any) -> None:
        epoch = await ledger.begin_epoch("one")
        database = await operator.fetchval("SELECT current_database()")
        await operator.execute(
            f'ALTER DATABASE "{database}" SET default_transaction_read_only = on'
        )
        await ledger._engine.dispose()
        await _unavailable(postgres_url, ledger.commit(Changes(epoch=epoch, jobs=[job_row()])))
        assert list(await ledger.jobs()) == []

    with_ledger(postgres_url, body, 5)


def test_wrong_credentials_are_told_apart(postgres_url: str) -> None:
    parts = urlsplit(postgres_url)
    wrong_password = parts._replace(
        netloc=f"{parts.username}:Hush-Hush-9@{parts.hostname}:{parts.port}"
    )
    wrong_database = parts._replace(path="/no-such-database")

    async def run() -> None:
        for address in (wrong_password, wrong_database):
            url = urlunsplit(address)
            error = await refused(PermanentError, SqlLedger.open(url).__aenter__())
            assert error.reason is Reason.UNAUTHORISED
            _shows_no_password(url, error)

    asyncio.run(run())


def test_a_new_epoch_waits_for_commits_under_way(postgres_url: str) -> None:
    """Else a commit that had read the old epoch could still land after the new one began."""

    async def body(ledger: SqlLedger, operator: Any) -> None:
        epoch = await ledger.begin_epoch("one")
        async with operator.transaction():
            await operator.execute("LOCK TABLE tasks IN ACCESS EXCLUSIVE MODE")
            late = asyncio.create_task(
                ledger.commit(Changes(epoch=epoch, jobs=[job_row()], tasks=[task_row(1)]))
            )
            while not await operator.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND wait_event_type = 'Lock'"
            ):
                await asyncio.sleep(0.01)
            begin = asyncio.create_task(ledger.begin_epoch("two"))
            await asyncio.sleep(0.2)
            assert not begin.done()
        await late
        assert await begin == epoch + 1
        await refused(ConflictError, ledger.commit(Changes(epoch=epoch, jobs=[job_row("x")])))

    with_ledger(postgres_url, body, 10)


def test_migrations_and_tables_agree(postgres_url: str) -> None:
    def differences(connection: Connection) -> object:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return compare_metadata(context, sql_schema.metadata)

    async def body(ledger: SqlLedger, operator: Any) -> None:
        async with ledger._engine.connect() as connection:
            assert await connection.run_sync(differences) == []

    with_ledger(postgres_url, body, 10)


def test_migrations_go_up_and_down_and_race(postgres_url: str) -> None:
    async def tables() -> set[str]:
        connection = await asyncpg.connect(postgres_url)
        try:
            rows = await connection.fetch(
                "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
            )
        finally:
            await connection.close()
        return {row["tablename"] for row in rows}

    async def run() -> None:
        for _ in range(2):
            await asyncio.gather(*(migrate(postgres_url) for _ in range(3)))
            assert await tables() == {*sql_schema.metadata.tables, "alembic_version"}
            await migrate(postgres_url, "base")
            assert await tables() == {"alembic_version"}

    asyncio.run(run())


def test_our_own_mistakes_are_not_swallowed(postgres_url: str) -> None:
    async def body(ledger: SqlLedger, operator: Any) -> None:
        await operator.execute("DROP TABLE chunks")
        error = await refused(DBAPIError, ledger.chunks("job-1"))
        _shows_no_password(postgres_url, error)

    with_ledger(postgres_url, body, 5)
