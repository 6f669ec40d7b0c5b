"""aiosqlite without a change of threads for each small step of a transaction.

The driver hands every call to its thread: some fifteen round trips for one commit of the ledger,
which cost more than the statements. Only what may wait for a lock or the disk needs the thread: to
begin, to commit, and reads outside a transaction. Once the write lock is held, statements find
their few pages in memory, and run at once.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from typing import Any, Final

import aiosqlite

_CHUNK: Final = 64
_MANY: Final = 1_000
"""A statement for more rows than this goes by the thread all the same, in milliseconds."""


class DirectConnection(aiosqlite.Connection):
    """See the module. As with the driver's own, one call at a time."""

    @classmethod
    def to(cls, database: str, **options: Any) -> DirectConnection:
        """As `aiosqlite.connect`."""
        options["check_same_thread"] = False  # calls never overlap, see `_execute`
        return cls(lambda: sqlite3.connect(database, **options), _CHUNK)

    def __init__(self, connector: Callable[[], sqlite3.Connection], chunk: int) -> None:
        super().__init__(connector, chunk)
        self._in_thread = 0
        """Calls that the thread may still be busy with."""

    async def _execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._in_thread and self._running and self._connection and self._is_quick(fn, args):
            return fn(*args, **kwargs)
        self._in_thread += 1
        try:
            result = await super()._execute(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        except asyncio.CancelledError:
            raise  # it goes on in the thread, and all that follows must queue behind it
        except BaseException:
            self._in_thread -= 1
            raise
        self._in_thread -= 1
        return result

    def _is_quick(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Whether it waits neither for a lock nor for the disk."""
        owner, name = getattr(fn, "__self__", None), getattr(fn, "__name__", "")
        if isinstance(owner, sqlite3.Connection):
            return name == "cursor"
        if not isinstance(owner, sqlite3.Cursor):
            return False
        if name == "executemany" and not (isinstance(args[1], list) and len(args[1]) <= _MANY):
            return False
        return name == "close" or owner.connection.in_transaction
