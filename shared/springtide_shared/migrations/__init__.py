"""The ledger's schema, step by step; `adapters/sql_ledger.py` runs the steps.

`REVISIONS` names all steps in order, so that a service can tell at its start, without loading the
migration library, whether the database is older or newer than itself.
"""

from __future__ import annotations

from typing import Final

REVISIONS: Final[tuple[str, ...]] = ("0001",)
"""Every revision in `versions/`, oldest first; the last is what this build works on."""
