"""Ids for jobs: ULIDs, sortable by the time of making."""

from __future__ import annotations

from springtide_shared.adapters.clock import SystemClock, SystemIds


def new_id() -> str:
    """A fresh id: 26 letters and digits."""
    return SystemIds(SystemClock()).new()
