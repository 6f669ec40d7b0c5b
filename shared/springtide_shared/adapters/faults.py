"""Faults on request for the in-memory adapters: the same interruptions that real keepers have."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from springtide_shared.errors import Reason, TransientError


class Faults:
    """Makes calls of one in-memory adapter fail as a real one would, and counts them.

    A call may fail before its effect (refused connection) or after it (the answer was lost): a
    caller that survives only the first kind is not idempotent.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._next: list[tuple[frozenset[str], bool]] = []
        self._outages: list[tuple[float, float]] = []
        self.is_down = False
        """While set, every call fails before its effect."""
        self.calls: Counter[str] = Counter()
        """How often each operation was called, failed calls included."""

    def fail_next(self, count: int = 1, *operations: str, after_effect: bool = False) -> None:
        """Let the next `count` calls (of these operations; none named: of any) fail once each."""
        self._next += [(frozenset(operations), after_effect)] * count

    def outage(self, start: float, end: float) -> None:
        """Let every call fail from `start` until `end`, in seconds of the event loop's clock."""
        self._outages.append((start, end))

    @contextmanager
    def call(self, operation: str) -> Iterator[None]:
        """Wrap one call.

        Raises:
            TransientError: `store-unavailable`, before or after the wrapped effect.
        """
        self.calls[operation] += 1
        if self.is_down or (self._outages and self._is_out()):
            raise self._error(operation)
        after_effect = False
        for position, (operations, late) in enumerate(self._next):
            if not operations or operation in operations:
                del self._next[position]
                if not late:
                    raise self._error(operation)
                after_effect = True
                break
        yield
        if after_effect:
            raise self._error(operation)

    def _is_out(self) -> bool:
        now = asyncio.get_running_loop().time()
        return any(start <= now < end for start, end in self._outages)

    def _error(self, operation: str) -> TransientError:
        return TransientError(
            Reason.STORE_UNAVAILABLE, f"the {self._what} does not answer", operation=operation
        )
