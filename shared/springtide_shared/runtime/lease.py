"""Holding a lease while serving: one per service and cluster, its token is the producer's epoch."""

from __future__ import annotations

import asyncio

from springtide_shared.errors import PermanentError, Reason, TransientError
from springtide_shared.ports.clock import Clock
from springtide_shared.ports.state import Lease, Leases


class LeaseKeeper:
    """Waits for a lease, renews it, and says loudly when it is lost."""

    def __init__(self, leases: Leases, clock: Clock, name: str, holder: str, ttl: float) -> None:
        self._leases = leases
        self._clock = clock
        self._name = name
        self._holder = holder
        self._lease: Lease | None = None
        self.ttl = ttl

    async def wait(self) -> int:
        """Until the lease is ours; returns its token."""
        while True:
            lease = None
            try:
                lease = await self._leases.acquire(self._name, self._holder, self.ttl)
            except TransientError:
                pass  # the keeper of leases is away: the next round asks again
            if lease is not None:
                self._lease = lease
                return lease.token
            await asyncio.sleep(self.ttl / 4)

    @property
    def token(self) -> int:
        """The fencing token.

        Raises:
            PermanentError: no lease is held (reason `stale`).
        """
        if self._lease is None:
            raise PermanentError(Reason.STALE, "no lease is held", lease=self._name)
        return self._lease.token

    def check(self) -> int:
        """The fencing token, for use right before an effect.

        Raises:
            PermanentError: no lease is held, or it has run out: another holder may have it.
        """
        if self._lease is not None and self._clock.now() >= self._lease.expires_at:
            raise PermanentError(Reason.STALE, "the lease ran out unrenewed", lease=self._name)
        return self.token

    async def renew(self) -> None:
        """Renew; call it about every third of `ttl`.

        Raises:
            PermanentError: another holder has it, or ours ran out while its keeper was away. The
                service must end: it may no longer be the only one.
        """
        try:
            lease = await self._leases.acquire(self._name, self._holder, self.ttl)
        except TransientError:
            if self._lease is not None and self._clock.now() < self._lease.expires_at:
                return
            raise PermanentError(
                Reason.STALE, "the lease ran out unrenewed", lease=self._name
            ) from None
        if lease is None or (self._lease is not None and lease.token != self._lease.token):
            raise PermanentError(Reason.STALE, "another holder has the lease", lease=self._name)
        self._lease = lease

    async def release(self) -> None:
        """Give it back at an orderly end."""
        if self._lease is not None:
            await self._leases.release(self._lease)
            self._lease = None
