"""One AMQP connection that is made anew when it is gone, by whoever needs it next.

There is no reconnecting task in the background: nothing happens to a connection that nobody uses,
and everyone who waits for one has a limit of his own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import aio_pika
from aio_pika.abc import AbstractConnection
from aio_pika.exceptions import (
    CONNECTION_EXCEPTIONS,
    AMQPError,
    AuthenticationError,
    ChannelClosed,
    ChannelPreconditionFailed,
    ConnectionClosed,
    IncompatibleProtocolError,
    ProbableAuthenticationError,
)
from aiormq.exceptions import ChannelAccessRefused, ConnectionNotAllowed
from yarl import URL

from springtide_shared.errors import PermanentError, Reason, SpringtideError, TransientError
from springtide_shared.ports.clock import Ids

FIRST_PAUSE_SECONDS: Final = 0.2
LONGEST_PAUSE_SECONDS: Final = 10.0


class RabbitLink:
    """A connection with growing, jittered pauses between failed tries."""

    def __init__(self, url: URL, name: str, ids: Ids, connect_limit: float) -> None:
        self._url = url.update_query(name=name)
        self._ids = ids
        self._connect_limit = connect_limit
        self._lock = asyncio.Lock()
        self._connection: AbstractConnection | None = None
        self._failures = 0
        self._next_try_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a connection stands now."""
        # The library calls a connection closed only once somebody has closed it; one whose
        # transport died stays "open" for ever.
        transport = None if self._connection is None else self._connection.transport
        return transport is not None and not transport.connection.is_closed

    async def connection(self) -> AbstractConnection:
        """The connection, made first if there is none; waits out the pause after a failure.

        Raises:
            TransientError: it could not be made.
            PermanentError: the broker refuses this user, password or virtual host.
        """
        if self._connection is not None and self.is_open:
            return self._connection
        async with self._lock:
            if self._connection is not None and self.is_open:
                return self._connection
            await self.close()
            loop = asyncio.get_running_loop()
            await asyncio.sleep(max(0.0, self._next_try_at - loop.time()))
            try:
                with translated("connecting"):
                    self._connection = await aio_pika.connect(
                        str(self._url), timeout=self._connect_limit
                    )
            except SpringtideError:
                pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**self._failures)
                self._failures = min(self._failures + 1, 16)
                self._next_try_at = loop.time() + self._ids.uniform(pause / 2, pause)
                raise
            self._failures = 0
            return self._connection

    async def close(self) -> None:
        """End the connection, if there is one; a broker that does not answer is left alone."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            async with asyncio.timeout(self._connect_limit):
                await connection.close()
        except (TimeoutError, *CONNECTION_EXCEPTIONS):
            pass  # gone already: that is what was wanted


@contextmanager
def translated(what: str) -> Iterator[None]:
    """The client library's faults as springtide's; no text of ours holds the URL or a password."""
    try:
        yield
    except (AuthenticationError, ProbableAuthenticationError, ChannelAccessRefused) as error:
        raise PermanentError(
            Reason.UNAUTHORISED, f"{what}: the broker refuses this user: {error}"
        ) from error
    except ConnectionNotAllowed as error:
        raise PermanentError(Reason.INVALID_SPEC, f"{what}: {error}") from error
    except ChannelPreconditionFailed as error:
        raise PermanentError(
            Reason.INVALID_SPEC,
            f"{what}: it exists with other arguments; drain and delete it: {error}",
        ) from error
    except IncompatibleProtocolError as error:
        raise PermanentError(Reason.INVALID_SPEC, f"{what}: this is no AMQP broker") from error
    except TimeoutError as error:
        raise TransientError(
            Reason.BUS_UNAVAILABLE, f"{what}: no answer from the broker within the limit"
        ) from error
    except (ConnectionClosed, ChannelClosed, AMQPError, ConnectionError, OSError) as error:
        raise TransientError(Reason.BUS_UNAVAILABLE, f"{what}: {_short(error)}") from error
    except RuntimeError as error:
        # aiormq and asyncio raise plain RuntimeErrors for transports that are closing.
        raise TransientError(Reason.BUS_UNAVAILABLE, f"{what}: {_short(error)}") from error


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
