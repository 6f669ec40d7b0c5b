"""The ledger's tables, as the last migration leaves them (a test compares the two)."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
)

metadata: Final = MetaData()

# Sorted by byte, whatever the database's own collation: pages follow one another by key order.
_KEY: Final = Text().with_variant(Text(collation="C"), "postgresql")

writer: Final = Table(
    "writer",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("epoch", BigInteger, nullable=False),
    Column("holder", Text, nullable=False),
)
"""One row: whose commits count."""

jobs: Final = Table(
    "jobs",
    metadata,
    Column("job_id", _KEY, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("is_final", Boolean, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("jobs_by_finality", "is_final", "job_id"),
    Index("jobs_by_tenant", "tenant", "job_id"),
)

job_specs: Final = Table(
    "job_specs",
    metadata,
    Column("job_id", _KEY, primary_key=True),
    Column("spec", LargeBinary, nullable=False),
)
"""Apart from `jobs`: SQLite writes a row anew as a whole, and a spec of a MiB never changes."""

chunks: Final = Table(
    "chunks",
    metadata,
    Column("job_id", _KEY, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("body", LargeBinary, nullable=False),
)

tasks: Final = Table(
    "tasks",
    metadata,
    Column("job_id", _KEY, primary_key=True),
    Column("task_index", Integer, primary_key=True, autoincrement=False),
    Column("body", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)
"""Small rows in key order: one tree, no second one for the key."""

outbox: Final = Table(
    "outbox",
    metadata,
    Column("id", _KEY, primary_key=True),
    Column("type_name", Text, nullable=False),
    Column("cluster", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("reply_to", LargeBinary, nullable=False),
    Column("correlation_id", LargeBinary, nullable=False),
)
"""Addresses and correlation ids are bytes: publishers choose them, and PostgreSQL's text holds no
NUL."""
