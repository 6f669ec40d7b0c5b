"""The desk: sends a command on a tenant's behalf and waits for the coordinator's answer."""

from __future__ import annotations

import asyncio
from typing import Protocol

from springtide_shared.errors import PermanentError, Reason, TransientError
from springtide_shared.messages.job import JobAnswer, JobCancel, JobSubmit
from springtide_shared.ports.bus import MessageBus
from springtide_shared.ports.clock import Ids


class TenantBus(MessageBus, Protocol):
    """A bus whose user is believed when it names the tenant that it publishes for."""

    def as_user(self, user: str) -> MessageBus:
        """A handle that publishes for that tenant."""
        ...


class Desk:
    """Matches answers to those who wait for them, by correlation id; bounded."""

    def __init__(self, bus: TenantBus, ids: Ids, *, limit: float, max_waiting: int) -> None:
        self._bus = bus
        self._ids = ids
        self._limit = limit
        self._max_waiting = max_waiting
        self._address = ""
        self._waiting: dict[str, asyncio.Future[JobAnswer]] = {}

    @property
    def is_open(self) -> bool:
        """Whether answers can reach us now."""
        return bool(self._address)

    async def read_answers(self) -> None:
        """Take in answers until cancelled.

        Raises:
            TransientError: the inbox was lost. Those who wait are told that their answer may be.
        """
        try:
            async with self._bus.answers() as (address, inbox):
                self._address = address
                while True:
                    for delivery in await inbox.receive(limit=100):
                        message = delivery.message
                        await delivery.ack()
                        waiting = self._waiting.get(delivery.correlation_id)
                        if isinstance(message, JobAnswer) and waiting and not waiting.done():
                            waiting.set_result(message)
        finally:
            self._address = ""
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(_no_answer(0.0))

    async def ask(self, command: JobSubmit | JobCancel, tenant: str) -> JobAnswer:
        """Publish and wait for the answer.

        Raises:
            TransientError: no answer within the limit (the command may have been taken; the same
                one again is harmless), the bus is away, or no coordinator has ever consumed.
            PermanentError: it is too large.
        """
        if not self._address:
            raise TransientError(
                Reason.BUS_UNAVAILABLE, "no connection to the broker; try again", retry_after=2.0
            )
        if len(self._waiting) >= self._max_waiting:
            raise TransientError(
                Reason.BUS_UNAVAILABLE, "too many commands wait for an answer", retry_after=5.0
            )
        correlation = self._ids.new()
        answer: asyncio.Future[JobAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[correlation] = answer
        try:
            async with asyncio.timeout(self._limit):
                await self._bus.as_user(tenant).publish(
                    command,
                    message_id=self._ids.new(),
                    correlation_id=correlation,
                    reply_to=self._address,
                )
                return await answer
        except TimeoutError:
            raise _no_answer(self._limit) from None
        except PermanentError as error:
            if error.reason is Reason.TOO_LARGE:
                raise
            # The broker refuses us or has no coordinator: not the caller's fault, and it may pass.
            raise TransientError(
                Reason.CLUSTER_UNREACHABLE, "nobody takes commands now", retry_after=10.0
            ) from error
        finally:
            del self._waiting[correlation]
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen: asyncio need not complain of one that nobody awaited


def _no_answer(limit: float) -> TransientError:
    waited = f" within {limit:g} s" if limit else ""
    return TransientError(
        Reason.EXPIRED,
        f"the coordinator did not answer{waited}; the command may have been taken:"
        " sending it again with the same id is harmless",
        retry_after=5.0,
    )
