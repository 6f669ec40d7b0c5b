"""The SQL ledger on SQLite: answers as in memory, faults translated, crashes survived."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, event
from sqlalchemy.exc import DBAPIError

import springtide_shared.migrations as migrations
from springtide_shared.adapters import sql_schema
from springtide_shared.adapters.memory_ledger import InMemoryLedger
from springtide_shared.adapters.sql_ledger import SqlLedger, migrate
from springtide_shared.errors import (
    ConflictError,
    InvalidFieldError,
    PermanentError,
    Reason,
    TransientError,
)
from springtide_shared.messages.job import JobState
from springtide_shared.ports.ledger import Changes, ChunkRow, JobRow, Ledger, OutboxRow, TaskRow
from springtide_shared.testing.expecting import refused
from springtide_shared.testing.ledger_contract import chunk_row, job_row, outbox_row, task_row


def url_of(path: Path) -> str:
    return f"sqlite:///{path}"


def with_ledger(path: Path, body: Callable[[SqlLedger], Awaitable[None]], **options: float) -> None:
    async def run() -> None:
        async with SqlLedger.open(url_of(path), migrate=True, **options) as ledger:
            await body(ledger)

    asyncio.run(run())


# ---- the same answers as in memory ----------------------------------------------------------

JOB_IDS = ("a", "B", "a-1")
job_ids = st.sampled_from(JOB_IDS)
bodies = st.binary(max_size=8)
indices = st.integers(0, 6)
jobs = st.builds(
    JobRow,
    job_id=job_ids,
    tenant=st.sampled_from(("t1", "t2")),
    state=st.sampled_from(JobState),
    created_at=st.floats(0, 2e9),
    version=st.integers(1, 4),
    spec=bodies,
    body=bodies,
)
outbox_ids = st.sampled_from(("01", "02", "0A", "0a"))
commits = st.builds(
    Changes,
    epoch=st.integers(0, 3),
    jobs=st.lists(jobs, max_size=2, unique_by=lambda row: row.job_id),
    chunks=st.lists(st.builds(ChunkRow, job_id=job_ids, number=indices, body=bodies), max_size=3),
    tasks=st.lists(st.builds(TaskRow, job_id=job_ids, index=indices, body=bodies), max_size=4),
    settled=st.lists(st.tuples(job_ids, indices), max_size=3),
    outbox=st.lists(
        st.builds(
            OutboxRow,
            id=outbox_ids,
            type_name=st.just("slice.run.v1"),
            cluster=st.sampled_from(("", "east")),
            body=bodies,
            to=st.text(max_size=3),
            correlation_id=st.text(max_size=3),
        ),
        max_size=2,
    ),
    sent=st.lists(outbox_ids, max_size=2),
)
steps = st.lists(st.one_of(commits, commits, st.just("epoch")), max_size=12)


def _likely(step: Changes, epoch: int, versions: dict[str, int]) -> Changes:
    """The step with numbers that mostly fit: of blind guesses nearly all would be conflicts."""
    return replace(
        step,
        epoch=epoch - (step.epoch == 3),
        jobs=[
            msgspec.structs.replace(row, version=versions[row.job_id] + 1 + (row.version == 4))
            for row in step.jobs
        ],
        outbox=[row for row in step.outbox if row.cluster or step.epoch == 2],
    )


async def _answer(ledger: Ledger, step: Changes | str) -> object:
    try:
        if isinstance(step, str):
            return await ledger.begin_epoch("holder")
        await ledger.commit(step)
    except ConflictError as error:
        return error.reason
    return "done"


async def _everything(ledger: Ledger) -> list[object]:
    seen: list[object] = [list(await ledger.outbox()), list(await ledger.outbox(1))]
    for active in (None, True, False):
        for tenant in (None, "t1"):
            seen.append(list(await ledger.jobs(active=active, tenant=tenant)))
            seen.append(list(await ledger.jobs(active=active, tenant=tenant, limit=1, after="B")))
    for job_id in JOB_IDS:
        seen.append(await ledger.job(job_id))
        for first, last in ((0, None), (2, 4), (3, 3)):
            seen.append(list(await ledger.chunks(job_id, first, last)))
            seen.append(list(await ledger.tasks(job_id, first, last)))
    return seen


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ledger") / "empty.db"
    asyncio.run(migrate(url_of(path)))
    return path


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sequence=steps)
def test_sqlite_and_memory_give_the_same_answers(
    sequence: list[Changes | str], empty_database: Path
) -> None:
    async def run() -> None:
        path = empty_database.with_name("run.db")
        for leftover in empty_database.parent.glob("run.db*"):
            leftover.unlink()
        shutil.copy(empty_database, path)
        model = InMemoryLedger()
        async with SqlLedger.open(url_of(path)) as ledger:
            epoch = 0
            for drawn in sequence:
                held = {job_id: await model.job(job_id) for job_id in JOB_IDS}
                versions = {job_id: row.version if row else 0 for job_id, row in held.items()}
                epoch += isinstance(drawn, str)
                step = drawn if isinstance(drawn, str) else _likely(drawn, epoch, versions)
                assert await _answer(ledger, step) == await _answer(model, step)
                assert await _everything(ledger) == await _everything(model)

    asyncio.run(run())


# ---- durability -----------------------------------------------------------------------------


def test_what_was_committed_is_there_after_reopening(tmp_path: Path) -> None:
    async def write(ledger: SqlLedger) -> None:
        epoch = await ledger.begin_epoch("one")
        await ledger.commit(Changes(epoch=epoch, jobs=[job_row()], tasks=[task_row(3)]))

    async def look(ledger: SqlLedger) -> None:
        assert await ledger.job("job-1") == job_row()
        assert list(await ledger.tasks("job-1")) == [task_row(3)]
        assert await ledger.begin_epoch("two") == 2

    with_ledger(tmp_path / "ledger.db", write)
    with_ledger(tmp_path / "ledger.db", look)


def test_every_connection_writes_through_to_the_disk(tmp_path: Path) -> None:
    async def look(ledger: SqlLedger) -> None:
        async with ledger._engine.connect() as one, ledger._engine.connect() as two:
            for connection in (one, two):
                for pragma, value in (("journal_mode", "wal"), ("synchronous", 2)):
                    answer = await connection.exec_driver_sql(f"PRAGMA {pragma}")
                    assert answer.scalar_one() == value

    with_ledger(tmp_path / "ledger.db", look)


_WRITER = """
import asyncio, sys
from springtide_shared.adapters.sql_ledger import SqlLedger
from springtide_shared.ports.ledger import Changes
from springtide_shared.testing.ledger_contract import job_row, outbox_row, task_row

async def main(url):
    async with SqlLedger.open(url) as ledger:
        epoch = await ledger.begin_epoch("writer")
        job = await ledger.job("job-1")
        version = 0 if job is None else job.version
        while True:
            version += 1
            await ledger.commit(Changes(
                epoch=epoch,
                jobs=[job_row(version=version)],
                tasks=[task_row(i, b"%d" % version) for i in range(300)],
                settled=[("job-1", 1_000 + version - 1)],
                outbox=[outbox_row(f"{version:09}", b"x" * 5_000)],
            ))
            await ledger.commit(Changes(epoch=epoch, tasks=[task_row(1_000 + version)]))
            print(version, flush=True)

asyncio.run(main(sys.argv[1]))
"""


def test_a_killed_writer_leaves_whole_commits_only(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    asyncio.run(migrate(url_of(path)))
    confirmed = 0
    for wait_for in (1, 4, 9):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, url_of(path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for _ in range(wait_for):
                confirmed = int(writer.stdout.readline())
            os.kill(writer.pid, signal.SIGKILL)
            confirmed = max([confirmed, *map(int, writer.stdout.read().split())])
        assert writer.returncode == -signal.SIGKILL

        async def look(ledger: SqlLedger, confirmed: int = confirmed) -> None:
            job = await ledger.job("job-1")
            assert job is not None
            assert job.version in (confirmed, confirmed + 1)
            tasks = list(await ledger.tasks("job-1", 0, 299))
            assert tasks == [task_row(i, b"%d" % job.version) for i in range(300)]
            assert [row.id for row in await ledger.outbox(100_000)] == [
                f"{version:09}" for version in range(1, job.version + 1)
            ]

        with_ledger(path, look)
        check = sqlite3.connect(path)
        assert check.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        check.close()


def test_a_cancelled_commit_is_whole_or_absent_and_blocks_nobody(tmp_path: Path) -> None:
    async def body(ledger: SqlLedger) -> None:
        epoch = await ledger.begin_epoch("one")
        await ledger.commit(Changes(epoch=epoch, jobs=[job_row()]))
        for hops in range(60):
            job = await ledger.job("job-1")
            assert job is not None
            changes = Changes(
                epoch=epoch,
                jobs=[job_row(version=job.version + 1)],
                tasks=[task_row(i, b"%d" % (job.version + 1)) for i in range(50)],
            )
            commit = asyncio.create_task(ledger.commit(changes))
            for _ in range(hops):
                await asyncio.sleep(0.0001)
            commit.cancel()
            await asyncio.gather(commit, return_exceptions=True)
            # whoever comes next finds no lock that nobody holds any more
            async with asyncio.timeout(2):
                await ledger.commit(Changes(epoch=epoch, chunks=[chunk_row(hops)]))
            after = await ledger.job("job-1")
            assert after is not None
            tasks = {row.body for row in await ledger.tasks("job-1")}
            assert tasks == ({b"%d" % after.version} if after.version > 1 else set())
        await ledger.commit(Changes(epoch=epoch, tasks=[task_row(99)]))

    with_ledger(tmp_path / "ledger.db", body)


# ---- faults ---------------------------------------------------------------------------------


async def _unavailable(call: Awaitable[object]) -> TransientError:
    error = await refused(TransientError, call)
    assert error.reason is Reason.STORE_UNAVAILABLE
    return error


def test_a_locked_database_is_unavailable_then_works(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"

    async def body(ledger: SqlLedger) -> None:
        epoch = await ledger.begin_epoch("one")
        blocker = sqlite3.connect(path, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        try:
            error = await _unavailable(ledger.commit(Changes(epoch=epoch, jobs=[job_row()])))
            assert "locked" in str(error)
            assert list(await ledger.jobs()) == [], "reading goes on"
        finally:
            blocker.execute("ROLLBACK")
            blocker.close()
        await ledger.commit(Changes(epoch=epoch, jobs=[job_row()]))

    with_ledger(path, body, limit_seconds=0.5)


@pytest.mark.parametrize(
    ("pragma", "word"), [("query_only=1", "readonly"), ("max_page_count=24", "full")]
)
def test_a_full_or_read_only_database_is_unavailable(
    tmp_path: Path, pragma: str, word: str
) -> None:
    async def body(ledger: SqlLedger) -> None:
        epoch = await ledger.begin_epoch("one")
        await ledger.commit(Changes(epoch=epoch, jobs=[job_row()]))
        await ledger._engine.dispose()

        def hinder(connection: sqlite3.Connection, _record: object) -> None:
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA {pragma}")
            cursor.close()

        event.listen(ledger._engine.sync_engine, "connect", hinder)
        big = [task_row(i, b"x" * 1_000) for i in range(500)]
        error = await _unavailable(
            ledger.commit(Changes(epoch=epoch, jobs=[job_row(version=2)], tasks=big))
        )
        assert word in str(error)
        assert await ledger.job("job-1") == job_row()
        event.remove(ledger._engine.sync_engine, "connect", hinder)
        await ledger._engine.dispose()
        await ledger.commit(Changes(epoch=epoch, jobs=[job_row(version=2)], tasks=big))

    with_ledger(tmp_path / "ledger.db", body)


def test_a_damaged_file_is_permanent(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(b"this is no database at all" * 1_000)

    async def run() -> None:
        for make in (True, False):
            opened = SqlLedger.open(url_of(path), migrate=make)
            error = await refused(PermanentError, opened.__aenter__())
            assert error.reason is Reason.INTERNAL

    asyncio.run(run())


def test_our_own_mistakes_are_not_swallowed(tmp_path: Path) -> None:
    async def body(ledger: SqlLedger) -> None:
        epoch = await ledger.begin_epoch("one")
        wrong = TaskRow(job_id="job-1", index=1, body=None)  # type: ignore[arg-type]
        await refused(DBAPIError, ledger.commit(Changes(epoch=epoch, tasks=[wrong])))
        async with ledger._engine.begin() as connection:
            await connection.exec_driver_sql("DROP TABLE tasks")
        await refused(DBAPIError, ledger.tasks("job-1"))

    with_ledger(tmp_path / "ledger.db", body)


def test_texts_of_errors_show_no_body(tmp_path: Path) -> None:
    async def body(ledger: SqlLedger) -> None:
        epoch = await ledger.begin_epoch("one")
        async with ledger._engine.begin() as connection:
            await connection.exec_driver_sql("DROP TABLE tasks")
        row = task_row(1, b"a-token-of-the-user")
        error = await refused(DBAPIError, ledger.commit(Changes(epoch=epoch, tasks=[row])))
        assert "a-token-of-the-user" not in "".join(traceback.format_exception(error))

    with_ledger(tmp_path / "ledger.db", body)


# ---- addresses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ledger.db",
        "mysql://root:Hush-Hush-9@db/x",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///x.db?mode=ro",
        "postgresql://user:Hush-Hush-9@host:notaport/x",
        "postgresql//user:Hush-Hush-9@host/x",
    ],
)
def test_addresses_that_we_cannot_serve_are_refused_without_the_password(url: str) -> None:
    async def run() -> None:
        for call in (SqlLedger.open(url).__aenter__(), migrate(url)):
            error = await refused(InvalidFieldError, call)
            assert error.field == "database_url"
            assert "Hush-Hush-9" not in "".join(traceback.format_exception(error))

    asyncio.run(run())


def test_an_unreachable_server_is_unavailable_without_the_password() -> None:
    async def run() -> None:
        opened = SqlLedger.open("postgresql://user:Hush-Hush-9@127.0.0.1:1/x", limit_seconds=2)
        error = await _unavailable(opened.__aenter__())
        assert "127.0.0.1:1" in str(error)
        assert "Hush-Hush-9" not in "".join(traceback.format_exception(error))

    asyncio.run(run())


def test_a_mistyped_path_makes_no_new_ledger(tmp_path: Path) -> None:
    async def run() -> None:
        opened = SqlLedger.open(url_of(tmp_path / "typo.db"))
        error = await refused(PermanentError, opened.__aenter__())
        assert error.reason is Reason.NOT_FOUND
        nowhere = SqlLedger.open(url_of(tmp_path / "no" / "folder.db"), migrate=True)
        await _unavailable(nowhere.__aenter__())

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []


# ---- the schema -----------------------------------------------------------------------------


def test_revisions_are_those_of_the_migrations() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.set_main_option("path_separator", "os")
    scripts = ScriptDirectory.from_config(config)
    in_order = [script.revision for script in scripts.walk_revisions()][::-1]
    assert tuple(in_order) == migrations.REVISIONS
    assert scripts.get_heads() == [migrations.REVISIONS[-1]]


def test_tables_are_those_that_the_migrations_leave(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    asyncio.run(migrate(url_of(path)))
    engine = create_engine(url_of(path))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, sql_schema.metadata) == []
        sql = "SELECT name FROM sqlite_master WHERE sql LIKE '%WITHOUT ROWID%'"
        assert connection.exec_driver_sql(sql).scalars().all() == ["tasks"]
    engine.dispose()


def _tables(path: Path) -> set[str]:
    connection = sqlite3.connect(path)
    try:
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {name for (name,) in rows if not name.startswith("sqlite_")}
    finally:
        connection.close()


def test_migrations_go_up_and_down_and_up_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    for _ in range(2):
        asyncio.run(migrate(url_of(path)))
        asyncio.run(migrate(url_of(path)))
        assert _tables(path) == {*sql_schema.metadata.tables, "alembic_version"}
        asyncio.run(migrate(url_of(path), "base"))
        assert _tables(path) == {"alembic_version"}
        asyncio.run(migrate(url_of(path), migrations.REVISIONS[0]))
    with pytest.raises(InvalidFieldError, match="revision"):
        asyncio.run(migrate(url_of(path), "0999"))


def test_two_processes_may_migrate_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        url = url_of(tmp_path / "ledger.db")
        await asyncio.gather(*(migrate(url) for _ in range(4)))

    asyncio.run(run())
    assert _tables(tmp_path / "ledger.db") == {*sql_schema.metadata.tables, "alembic_version"}


def test_an_older_or_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"

    async def opens(*, make: bool = False) -> PermanentError:
        return await refused(
            PermanentError, SqlLedger.open(url_of(path), migrate=make).__aenter__()
        )

    sqlite3.connect(path).close()
    error = asyncio.run(opens())
    assert error.reason is Reason.WRONG_VERSION
    assert "older" in str(error)
    asyncio.run(migrate(url_of(path)))
    connection = sqlite3.connect(path)
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.commit()
    connection.close()
    for make in (False, True):
        error = asyncio.run(opens(make=make))
        assert error.reason is Reason.WRONG_VERSION
        assert "newer" in str(error)
        assert "9999" in str(error)


def test_a_failed_migration_leaves_the_old_schema(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE outbox (foreign_table TEXT)")  # in the last table's way
    connection.close()
    with pytest.raises(DBAPIError):
        asyncio.run(migrate(url_of(path)))
    assert _tables(path) == {"outbox"}


def test_reads_go_on_beside_a_long_write(tmp_path: Path) -> None:
    async def body(ledger: SqlLedger) -> None:
        epoch = await ledger.begin_epoch("one")
        rows = [task_row(i, b"x" * 300) for i in range(20_000)]
        commit = asyncio.create_task(
            ledger.commit(Changes(epoch=epoch, tasks=rows, outbox=[outbox_row("1")]))
        )
        seen = 0
        while not commit.done():
            assert len(await ledger.tasks("job-1")) in (0, 20_000)
            seen += 1
        await commit
        assert seen >= 2

    with_ledger(tmp_path / "ledger.db", body)
