"""Time and identity as ports, so that the same services run in virtual time and repeatably.

Sleeping is not here: services sleep on the event loop, whose clock the virtual loop replaces.
"""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """What time it is. The only source of time for a service."""

    def now(self) -> float:
        """Seconds since 1970 UTC; may step."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back; the event loop's own clock."""
        ...


class Ids(Protocol):
    """Fresh identifiers and jitter, seeded in tests."""

    def new(self) -> str:
        """A fresh id: 26 characters, letters and digits, sortable by time of making."""
        ...

    def uniform(self, low: float, high: float) -> float:
        """A random number for jitter."""
        ...
