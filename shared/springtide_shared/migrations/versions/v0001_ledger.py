"""Jobs, chunks, tasks, outbox and the writer's epoch."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Sorted by byte, whatever the database's own collation: pages follow one another by key order.
KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Make the tables, and the one row that holds the epoch."""
    writer = op.create_table(
        "writer",
        sa.Column("id", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
    )
    op.bulk_insert(writer, [{"id": 1, "epoch": 0, "holder": ""}])
    op.create_table(
        "jobs",
        sa.Column("job_id", KEY, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("is_final", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("jobs_by_finality", "jobs", ["is_final", "job_id"])
    op.create_index("jobs_by_tenant", "jobs", ["tenant", "job_id"])
    op.create_table(
        "job_specs",
        sa.Column("job_id", KEY, primary_key=True),
        sa.Column("spec", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "chunks",
        sa.Column("job_id", KEY, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "tasks",
        sa.Column("job_id", KEY, primary_key=True),
        sa.Column("task_index", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "outbox",
        sa.Column("id", KEY, primary_key=True),
        sa.Column("type_name", sa.Text, nullable=False),
        sa.Column("cluster", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("reply_to", sa.LargeBinary, nullable=False),
        sa.Column("correlation_id", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    """Drop everything."""
    for table in ("outbox", "tasks", "chunks", "job_specs", "jobs", "writer"):
        op.drop_table(table)
