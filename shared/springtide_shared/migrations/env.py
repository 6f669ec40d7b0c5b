"""Entry point of the migration library: runs the steps on the connection that it is handed.

The caller's transaction spans all steps, so that a schema is never left half-way.
"""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
