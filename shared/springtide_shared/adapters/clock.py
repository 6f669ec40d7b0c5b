"""Clock and Ids on the system, and seeded Ids for repeatable runs."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from typing import Final

from springtide_shared.ports.clock import Clock

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


class SystemClock:
    """The machine's clocks; `monotonic` is the running event loop's."""

    def now(self) -> float:
        """Seconds since 1970 UTC."""
        return time.time()

    def monotonic(self) -> float:
        """The event loop's time inside one, the process's elsewhere."""
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return time.monotonic()


def _encode(value: int, digits: int) -> str:
    text = ""
    for _ in range(digits):
        value, rest = divmod(value, 32)
        text = _ALPHABET[rest] + text
    return text


class SystemIds:
    """ULIDs: 48 bits of milliseconds, 80 random bits, in Crockford's base 32."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._random = random.SystemRandom()

    def new(self) -> str:
        """A fresh ULID."""
        return _encode(int(self._clock.now() * 1000), 10) + _encode(secrets.randbits(80), 16)

    def uniform(self, low: float, high: float) -> float:
        """A random number for jitter."""
        return self._random.uniform(low, high)


class SeededIds:
    """ULIDs that a seed decides."""

    def __init__(self, clock: Clock, seed: int | str) -> None:
        self._clock = clock
        self._random = random.Random(seed)

    def new(self) -> str:
        """The next ULID of this seed."""
        head = _encode(int(self._clock.now() * 1000), 10)
        return head + _encode(self._random.getrandbits(80), 16)

    def uniform(self, low: float, high: float) -> float:
        """The next number of this seed."""
        return self._random.uniform(low, high)
