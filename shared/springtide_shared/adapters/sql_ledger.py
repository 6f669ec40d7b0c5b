"""The ledger on SQL: PostgreSQL in deployment, SQLite on a laptop, the same migrations.

SQLite runs with a write-ahead log and `synchronous=FULL`: what a commit promised is on the disk
when it returns, also after a power cut. (`NORMAL` would be quicker and may lose the last commits
then, although pods were already started for them.) PostgreSQL's default promises the same.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeVar

from sqlalchemy import URL, bindparam, delete, event, insert, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    ProgrammingError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.sql import Executable

from springtide_shared.adapters import sql_schema as schema
from springtide_shared.errors import (
    ConflictError,
    InvalidFieldError,
    PermanentError,
    Reason,
    SpringtideError,
    TransientError,
)
from springtide_shared.messages.job import JobState
from springtide_shared.migrations import REVISIONS
from springtide_shared.ports.ledger import Changes, ChunkRow, JobRow, OutboxRow, TaskRow

T = TypeVar("T")

LIMIT_SECONDS: Final = 10.0
"""Longest that one call may take before it counts as unanswered."""
MIGRATION_LIMIT_SECONDS: Final = 300.0

_WRITES: Final = "springtide_writes"
"""Execution option: this transaction writes, so SQLite takes its write lock at the start."""
_MIGRATION_LOCK: Final = 0x5350_5249_4E47  # "SPRING": an advisory lock's number is a convention
_TAKEN_SQLITE: Final = frozenset(
    {sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_UNIQUE}
)
_TAKEN_POSTGRESQL: Final = "23505"
_DAMAGED_SQLITE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_AWAY_SQLITE: Final = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_READONLY,
    }
)
_AWAY_POSTGRESQL: Final = ("08", "25006", "40", "53", "55", "57", "58")
"""SQLSTATE heads: connection, read-only server, rolled back, out of resources (disk, memory,
connections), locked, shut down or starting, system error."""
_REFUSED_POSTGRESQL: Final = ("28", "3D", "42501")
"""SQLSTATE heads: wrong credentials, no such database, no permission."""


class SqlLedger:
    """Keeps rows in a database; made by `SqlLedger.open`.

    Several processes may have one ledger open; the epoch decides whose commits count.
    """

    def __init__(self, engine: AsyncEngine, limit_seconds: float) -> None:
        self._engine = engine
        self._limit = limit_seconds
        self._is_sqlite = engine.dialect.name == "sqlite"
        self._statements = _Statements(is_sqlite=self._is_sqlite)
        self._calls: set[asyncio.Task[Any]] = set()
        """What runs now on SQLite; see `_call`."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls, url: str, *, migrate: bool = False, limit_seconds: float = LIMIT_SECONDS
    ) -> AsyncIterator[Self]:
        """The ledger at `url`, closed at the context's end.

        Args:
            url: `sqlite:///relative.db`, `sqlite:////absolute.db` or
                `postgresql://user:password@host:port/database`.
            migrate: bring the schema to this build's revision first (and make a SQLite file).
            limit_seconds: longest that one call may take.

        Raises:
            InvalidFieldError: `url` names no database that this adapter serves.
            PermanentError: the schema is older or newer than this build (`wrong-version`), or the
                database refuses our credentials (`unauthorised`).
            TransientError: the database does not answer.
        """
        address = _parse_url(url)
        if address.get_backend_name() == "sqlite" and not migrate:
            _require_file(address)
        engine = _make_engine(address, limit_seconds)
        try:
            async with _translated(engine, "open", MIGRATION_LIMIT_SECONDS):
                if migrate:
                    await _migrate(engine, "head")
                else:
                    await _check_revision(engine)
                    if engine.dialect.name == "sqlite":
                        await _use_write_ahead_log(engine)
            ledger = cls(engine, limit_seconds)
            try:
                yield ledger
            finally:
                await ledger._ended(set(ledger._calls))
        finally:
            await engine.dispose()

    async def begin_epoch(self, holder: str) -> int:
        """See `Ledger.begin_epoch`."""

        async def work(connection: AsyncConnection) -> int:
            await connection.execute(self._statements.raise_epoch, {"new_holder": holder})
            return int((await connection.execute(self._statements.read_epoch)).scalar_one())

        return await self._write("begin_epoch", work)

    async def commit(self, changes: Changes) -> None:
        """See `Ledger.commit`. After a `TransientError` it may have been applied: read again."""
        await self._write("commit", lambda connection: self._commit(connection, changes))

    async def _commit(self, connection: AsyncConnection, changes: Changes) -> None:
        do = self._statements
        current = (await connection.execute(do.share_epoch)).scalar_one()
        if current != changes.epoch:
            raise ConflictError(
                Reason.STALE,
                "another epoch has begun",
                epoch=changes.epoch,
                current=int(current),
            )
        # in key order: two writers that lock rows in different orders would block each other
        for job in sorted(changes.jobs, key=lambda row: (row.job_id, row.version)):
            await self._write_job(connection, job)
        if changes.chunks:
            await connection.execute(do.put_chunk, [_chunk_values(r) for r in changes.chunks])
        if changes.tasks:
            await connection.execute(do.put_task, [_task_values(r) for r in changes.tasks])
        if changes.settled:
            await connection.execute(
                do.drop_task, [{"of_job": job, "at": index} for job, index in changes.settled]
            )
        if changes.outbox:
            await connection.execute(do.put_message, [_message_values(r) for r in changes.outbox])
        if changes.sent:
            await connection.execute(do.drop_message, [{"sent_id": i} for i in changes.sent])

    async def jobs(
        self,
        *,
        active: bool | None = None,
        tenant: str | None = None,
        limit: int = 1_000,
        after: str = "",
    ) -> Sequence[JobRow]:
        """See `Ledger.jobs`."""
        query = _SELECT_JOB.where(schema.jobs.c.job_id > after)
        if active is not None:
            query = query.where(schema.jobs.c.is_final.is_(not active))
        if tenant is not None:
            query = query.where(schema.jobs.c.tenant == tenant)
        rows = await self._read("jobs", query.order_by(schema.jobs.c.job_id).limit(limit))
        return [_job_row(row) for row in rows]

    async def job(self, job_id: str) -> JobRow | None:
        """See `Ledger.job`."""
        rows = await self._read("job", _SELECT_JOB.where(schema.jobs.c.job_id == job_id))
        return _job_row(rows[0]) if rows else None

    async def chunks(
        self, job_id: str, first: int = 0, last: int | None = None
    ) -> Sequence[ChunkRow]:
        """See `Ledger.chunks`."""
        table = schema.chunks
        query = select(table.c.number, table.c.body).where(
            table.c.job_id == job_id, table.c.number >= first
        )
        if last is not None:
            query = query.where(table.c.number <= last)
        rows = await self._read("chunks", query.order_by(table.c.number))
        return [ChunkRow(job_id=job_id, number=number, body=body) for number, body in rows]

    async def tasks(
        self, job_id: str, first: int = 0, last: int | None = None
    ) -> Sequence[TaskRow]:
        """See `Ledger.tasks`."""
        table = schema.tasks
        query = select(table.c.task_index, table.c.body).where(
            table.c.job_id == job_id, table.c.task_index >= first
        )
        if last is not None:
            query = query.where(table.c.task_index <= last)
        rows = await self._read("tasks", query.order_by(table.c.task_index))
        return [TaskRow(job_id=job_id, index=index, body=body) for index, body in rows]

    async def outbox(self, limit: int = 500) -> Sequence[OutboxRow]:
        """See `Ledger.outbox`."""
        rows = await self._read(
            "outbox", select(schema.outbox).order_by(schema.outbox.c.id).limit(limit)
        )
        return [
            OutboxRow(
                id=row.id,
                type_name=row.type_name,
                cluster=row.cluster,
                body=row.body,
                to=_to_text(row.reply_to),
                correlation_id=_to_text(row.correlation_id),
            )
            for row in rows
        ]

    async def size_bytes(self) -> int:
        """See `Ledger.size_bytes`.

        SQLite: pages in use, without the write-ahead log. PostgreSQL: tables, indices and TOAST,
        dead rows included until they are vacuumed.
        """
        rows = await self._read("size_bytes", self._statements.size)
        return int(rows[0][0])

    async def _write_job(self, connection: AsyncConnection, row: JobRow) -> None:
        do = self._statements
        values = {"state": str(row.state), "is_final": row.state.is_final, "body": row.body}
        if row.version == 1:
            done = await connection.execute(
                do.insert_job,
                {
                    "job_id": row.job_id,
                    "tenant": row.tenant,
                    "created_at": row.created_at,
                    "version": 1,
                    **values,
                },
            )
            if done.rowcount == 1:
                await connection.execute(do.insert_spec, {"job_id": row.job_id, "spec": row.spec})
        else:
            done = await connection.execute(
                do.update_job,
                {
                    "of_job": row.job_id,
                    "old_version": row.version - 1,
                    "version": row.version,
                    **values,
                },
            )
        if done.rowcount != 1:
            raise ConflictError(
                Reason.STALE,
                "the job was changed by somebody else",
                job=row.job_id,
                version=row.version,
            )

    async def _write(self, operation: str, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """Run `work` as one transaction."""

        async def transaction() -> T:
            async with self._engine.connect() as raw:
                connection = await raw.execution_options(**{_WRITES: True})
                async with connection.begin():
                    return await work(connection)

        return await self._call(operation, transaction)

    async def _read(self, operation: str, query: Executable) -> Sequence[Any]:
        async def reading() -> Sequence[Any]:
            async with self._engine.connect() as connection:
                return (await connection.execute(query)).all()

        return await self._call(operation, reading)

    async def _call(self, operation: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if not self._is_sqlite:
            async with _translated(self._engine, operation, self._limit):
                return await work()
        # SQLite's driver must not be interrupted: a transaction that is dropped in the middle keeps
        # the write lock until the garbage collector finds it. So a call always runs to its end,
        # which the driver's own limit on waiting brings near, whatever becomes of its caller.
        async with _translated(self._engine, operation, None):
            call = asyncio.create_task(work(), name=f"ledger.{operation}")
            self._calls.add(call)
            call.add_done_callback(self._forget)
            try:
                done, _ = await asyncio.wait({call}, timeout=self._limit)
            except asyncio.CancelledError:
                await self._ended({call})
                raise
            if not done:
                raise TimeoutError
            return call.result()

    def _forget(self, call: asyncio.Task[Any]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # its caller may be gone: nobody else looks at it then

    async def _ended(self, calls: set[asyncio.Task[Any]]) -> None:
        """Wait until these calls ended, or for the limit; cancelling does not shorten it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limit
        while not all(call.done() for call in calls) and loop.time() < deadline:
            with suppress(asyncio.CancelledError):
                await asyncio.wait(calls, timeout=deadline - loop.time())


async def migrate(url: str, revision: str = "head") -> None:
    """Bring the schema at `url` to `revision`, up or down, as one transaction.

    Args:
        url: as for `SqlLedger.open`.
        revision: one of `migrations.REVISIONS`, `head` (the newest) or `base` (no tables: all data
            is dropped).

    Raises:
        InvalidFieldError: no such database, no such revision.
        PermanentError: the schema was made by a newer build.
        TransientError: the database does not answer.
    """
    if revision not in (*REVISIONS, "head", "base"):
        known = ", ".join((*REVISIONS, "head", "base"))
        raise InvalidFieldError("revision", revision, f"give one of {known}")
    engine = _make_engine(_parse_url(url), LIMIT_SECONDS)
    try:
        async with _translated(engine, "migrate", MIGRATION_LIMIT_SECONDS):
            await _migrate(engine, revision)
    finally:
        await engine.dispose()


async def _use_write_ahead_log(engine: AsyncEngine) -> None:
    """Switch a SQLite file over, once for good: readers then never wait for the writer.

    The switch needs the file for itself and SQLite does not wait for that, so two processes that
    make a ledger at once try again; the caller's time limit ends it.
    """
    while True:
        async with engine.connect() as connection:
            try:
                mode = await connection.exec_driver_sql("PRAGMA journal_mode")
                if mode.scalar_one() == "wal":
                    return
                await connection.exec_driver_sql("PRAGMA journal_mode=WAL")
                continue
            except DBAPIError as error:
                code = getattr(error.orig, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
                if code & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
        # in a thread: another process's work takes real time, also under a clock that is held
        await asyncio.to_thread(time.sleep, 0.02)


async def _migrate(engine: AsyncEngine, revision: str) -> None:
    wanted = {"head": REVISIONS[-1], "base": None}.get(revision, revision)
    if engine.dialect.name == "sqlite":
        await _use_write_ahead_log(engine)
    if await _revision(engine) == wanted:
        return  # without loading the migration library: it costs more than all the rest
    async with engine.connect() as raw:
        connection = await raw.execution_options(**{_WRITES: True})
        async with connection.begin():
            if engine.dialect.name == "postgresql":
                await connection.execute(
                    text("SELECT pg_advisory_xact_lock(:number)"), {"number": _MIGRATION_LOCK}
                )
            current = await connection.run_sync(_read_revision)
            if current is not None and current not in REVISIONS:
                raise _too_new(current)
            await connection.run_sync(_run_steps, revision, current)


def _run_steps(connection: Connection, revision: str, current: str | None) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parents[1] / "migrations"))
    config.set_main_option("path_separator", "os")
    at = 0 if current is None else REVISIONS.index(current) + 1
    to = {"head": len(REVISIONS), "base": 0}.get(revision)
    if to is None:
        to = REVISIONS.index(revision) + 1
    if to < at:
        command.downgrade(config, revision)
    else:
        command.upgrade(config, revision)


async def _check_revision(engine: AsyncEngine) -> None:
    found = await _revision(engine)
    if found == REVISIONS[-1]:
        return
    if found is not None and found not in REVISIONS:
        raise _too_new(found)
    raise PermanentError(
        Reason.WRONG_VERSION,
        "the ledger's schema is older than this build; migrate it first",
        found=found or "none",
        needed=REVISIONS[-1],
    )


def _too_new(found: str) -> PermanentError:
    return PermanentError(
        Reason.WRONG_VERSION,
        "the ledger's schema was made by a newer build; run that one, or migrate down with it",
        found=found,
        needed=REVISIONS[-1],
    )


async def _revision(engine: AsyncEngine) -> str | None:
    """The schema's revision; None for an empty database."""
    async with engine.connect() as connection:
        return await connection.run_sync(_read_revision)


def _read_revision(connection: Connection) -> str | None:
    if not connection.dialect.has_table(connection, "alembic_version"):
        return None
    rows = connection.execute(text("SELECT version_num FROM alembic_version")).all()
    return str(rows[0][0]) if rows else None


def _parse_url(url: str) -> URL:
    """The address with its async driver. Errors never show `url`: it holds a password."""
    remedy = (
        "give sqlite:///relative.db, sqlite:////absolute.db or"
        " postgresql://user:password@host:port/database"
    )
    try:
        address = make_url(url)
        backend = address.get_backend_name()
    except (ArgumentError, ValueError):
        raise InvalidFieldError("database_url", "(not shown)", remedy) from None
    if backend in ("postgres", "postgresql"):
        query = dict(address.query)
        if "sslmode" in query:  # libpq's name; the driver calls it ssl
            query["ssl"] = query.pop("sslmode")
        return address.set(drivername="postgresql+asyncpg", query=query)
    if backend != "sqlite":
        raise InvalidFieldError("database_url", f"{backend}://…", remedy)
    if not address.database or address.database == ":memory:" or address.query:
        raise InvalidFieldError(
            "database_url",
            "sqlite:// without a file" if not address.query else "sqlite:// with options",
            f"{remedy}; for a ledger in memory use InMemoryLedger",
        )
    return address.set(drivername="sqlite+aiosqlite")


def _require_file(address: URL) -> None:
    """Opening would make an empty database where a path is mistyped."""
    if not Path(address.database or "").is_file():
        raise PermanentError(
            Reason.NOT_FOUND,
            "there is no ledger at this path; check it, or let it be made by migrating",
            path=address.database,
        )


def _make_engine(address: URL, limit_seconds: float) -> AsyncEngine:
    if address.get_backend_name() == "sqlite":
        engine = create_async_engine(
            address,
            hide_parameters=True,  # bodies hold what users put into their environment
            pool_size=4,
            max_overflow=0,
            pool_timeout=limit_seconds,
            # Transactions are begun by us: the driver's own begin comes late and never takes the
            # write lock at once. Waiting for a lock ends before our own limit, inside the driver.
            connect_args={
                "isolation_level": None,
                "timeout": limit_seconds * 0.8,
                "async_creator_fn": _connect_sqlite,
            },
        )
        event.listen(engine.sync_engine, "connect", _on_sqlite_connect)
        event.listen(engine.sync_engine, "begin", _on_sqlite_begin)
        return engine
    return create_async_engine(
        address,
        hide_parameters=True,
        pool_size=5,
        max_overflow=5,
        pool_timeout=limit_seconds,
        connect_args={
            "timeout": limit_seconds,
            "command_timeout": limit_seconds,  # also cancels the statement on the server
            "server_settings": {"application_name": "springtide"},
        },
    )


async def _connect_sqlite(*arguments: Any, **options: Any) -> Any:
    """Open a connection; one that cannot be opened leaves no thread behind.

    The driver tells its thread to end then, but not to be quick about it: the thread would report
    to an event loop that may be closed by that time.
    """
    from springtide_shared.adapters.sqlite_driver import DirectConnection

    connection = DirectConnection.to(*arguments, **options)
    thread = connection._thread
    thread.daemon = True  # as the dialect does it: a process may end without closing
    try:
        return await connection
    except BaseException:
        while thread.is_alive():
            await asyncio.to_thread(thread.join, 0.05)
        raise


class _Driver(Protocol):
    """As much of a driver's connection as is used here."""

    def cursor(self) -> Any: ...


def _on_sqlite_connect(connection: _Driver, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA journal_size_limit=16777216")
    cursor.close()


def _on_sqlite_begin(connection: Connection) -> None:
    # A reader's single statement is its own transaction. A writer that began as a reader could
    # find its snapshot outdated, which no waiting cures.
    if connection.get_execution_options().get(_WRITES):
        connection.exec_driver_sql("BEGIN IMMEDIATE")


@asynccontextmanager
async def _translated(
    engine: AsyncEngine, operation: str, limit_seconds: float | None
) -> AsyncIterator[None]:
    """Turn the database's faults into ours, within a time limit (None: what is inside keeps one).

    Texts of the driver stay in the chain only where they hold no secret; ours name the operation
    and the address without its password. What is our own mistake (SQL, types) passes unchanged.
    """
    address = engine.url.render_as_string(hide_password=True)
    try:
        async with asyncio.timeout(limit_seconds):
            yield
    except (TimeoutError, PoolTimeoutError) as error:
        raise TransientError(
            Reason.STORE_UNAVAILABLE,
            "the ledger's database did not answer in time",
            operation=operation,
            database=address,
        ) from error
    except DBAPIError as error:
        translated = _fault(error, operation, address)
        if translated is None:
            raise
        raise translated from error
    except SQLAlchemyError:
        raise
    except OSError as error:  # refused, unreachable, no such host
        raise TransientError(
            Reason.STORE_UNAVAILABLE,
            f"the ledger's database cannot be reached ({error.strerror or type(error).__name__})",
            operation=operation,
            database=address,
        ) from error


def _fault(error: DBAPIError, operation: str, address: str) -> SpringtideError | None:
    """Our error for the driver's; None for a mistake of ours."""
    origin: Any = error.orig
    where: dict[str, Any] = {"operation": operation, "database": address}
    if isinstance(origin, sqlite3.Error):
        extended = getattr(origin, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        code = extended & 0xFF
        if extended in _TAKEN_SQLITE:
            return _taken(operation)
        if code in _DAMAGED_SQLITE:
            detail = f"the ledger's file is damaged or no database ({origin})"
            return PermanentError(Reason.INTERNAL, detail, **where)
        if code in _AWAY_SQLITE:
            detail = f"the ledger's database does not take the call ({origin})"
            return TransientError(Reason.STORE_UNAVAILABLE, detail, **where)
        return None
    state = getattr(origin, "sqlstate", None) or ""
    if state == _TAKEN_POSTGRESQL:
        return _taken(operation)
    if state.startswith(_REFUSED_POSTGRESQL):
        detail = f"the ledger's database refuses us: check user, password, database ({state})"
        return PermanentError(Reason.UNAUTHORISED, detail, **where)
    if state.startswith(_AWAY_POSTGRESQL) or error.connection_invalidated:
        detail = f"the ledger's database does not take the call ({state or 'connection lost'})"
        return TransientError(Reason.STORE_UNAVAILABLE, detail, **where)
    if not state and not isinstance(error, ProgrammingError):
        detail = f"the connection to the ledger's database failed ({type(origin).__name__})"
        return TransientError(Reason.STORE_UNAVAILABLE, detail, **where)
    return None


def _taken(operation: str) -> ConflictError:
    return ConflictError(
        Reason.DUPLICATE_ID, "a row with this key is there already", operation=operation
    )


class _Statements:
    """All writes, built once: the library caches their compiled form by object."""

    def __init__(self, *, is_sqlite: bool) -> None:
        put: Any = sqlite.insert if is_sqlite else postgresql.insert
        writer, jobs, chunks, tasks = schema.writer, schema.jobs, schema.chunks, schema.tasks
        self.raise_epoch = (
            update(writer)
            .where(writer.c.id == 1)
            .values(epoch=writer.c.epoch + 1, holder=bindparam("new_holder"))
        )
        self.read_epoch = select(writer.c.epoch).where(writer.c.id == 1)
        # Shared, so that commits go on side by side while a new epoch waits for them to end.
        self.share_epoch = self.read_epoch.with_for_update(read=True)
        self.insert_job = put(jobs).on_conflict_do_nothing(index_elements=["job_id"])
        self.insert_spec = insert(schema.job_specs)
        self.update_job = (
            update(jobs)
            .where(jobs.c.job_id == bindparam("of_job"), jobs.c.version == bindparam("old_version"))
            .values(
                state=bindparam("state"),
                is_final=bindparam("is_final"),
                version=bindparam("version"),
                body=bindparam("body"),
            )
        )
        chunk, task = put(chunks), put(tasks)
        self.put_chunk = chunk.on_conflict_do_update(
            index_elements=["job_id", "number"], set_={"body": chunk.excluded.body}
        )
        self.put_task = task.on_conflict_do_update(
            index_elements=["job_id", "task_index"], set_={"body": task.excluded.body}
        )
        self.drop_task = delete(tasks).where(
            tasks.c.job_id == bindparam("of_job"), tasks.c.task_index == bindparam("at")
        )
        self.put_message = insert(schema.outbox)
        self.drop_message = delete(schema.outbox).where(schema.outbox.c.id == bindparam("sent_id"))
        self.size = text(
            "SELECT (page_count - freelist_count) * page_size"
            " FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
            if is_sqlite
            else "SELECT "
            + " + ".join(f"pg_total_relation_size('{name}')" for name in schema.metadata.tables)
        )


_SELECT_JOB: Final = select(schema.jobs, schema.job_specs.c.spec).join(
    schema.job_specs, schema.jobs.c.job_id == schema.job_specs.c.job_id
)


def _job_row(row: Any) -> JobRow:
    return JobRow(
        job_id=row.job_id,
        tenant=row.tenant,
        state=JobState(row.state),
        created_at=row.created_at,
        version=row.version,
        spec=row.spec,
        body=row.body,
    )


def _chunk_values(row: ChunkRow) -> dict[str, Any]:
    return {"job_id": row.job_id, "number": row.number, "body": row.body}


def _task_values(row: TaskRow) -> dict[str, Any]:
    return {"job_id": row.job_id, "task_index": row.index, "body": row.body}


def _message_values(row: OutboxRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "type_name": row.type_name,
        "cluster": row.cluster,
        "body": row.body,
        "reply_to": row.to.encode(errors="surrogatepass"),
        "correlation_id": row.correlation_id.encode(errors="surrogatepass"),
    }


def _to_text(data: bytes) -> str:
    return data.decode(errors="surrogatepass")
