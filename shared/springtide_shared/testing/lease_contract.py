"""What every `Leases` must do, as cases that run on each adapter with a clock set by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from springtide_shared.errors import InvalidFieldError
from springtide_shared.ports.state import Lease, Leases
from springtide_shared.testing.expecting import refused


class SetClock:
    """A `Clock` that stands still until it is moved."""

    def __init__(self, now: float = 1_790_000_000.0) -> None:
        self.at = now

    def now(self) -> float:
        """Seconds since 1970, as set."""
        return self.at

    def monotonic(self) -> float:
        """The same."""
        return self.at


Case = Callable[[Leases, SetClock], Awaitable[None]]
CASES: Final[dict[str, Case]] = {}
"""Every case by name."""


def case(function: Case) -> Case:
    """Register a case under its function's name."""
    CASES[function.__name__] = function
    return function


async def taken(leases: Leases, holder: str, ttl: float = 10.0, name: str = "scaler.east") -> Lease:
    """The lease, which must be free or the holder's own."""
    lease = await leases.acquire(name, holder, ttl)
    assert lease is not None
    assert (lease.name, lease.holder) == (name, holder)
    return lease


@case
async def one_holder_at_a_time(leases: Leases, clock: SetClock) -> None:
    lease = await taken(leases, "a")
    assert lease.token >= 1
    assert lease.expires_at == clock.now() + 10
    assert await leases.acquire("scaler.east", "b", 10.0) is None
    other = await taken(leases, "b", name="scaler.west")
    assert other.holder == "b"


@case
async def a_renewal_keeps_the_token_and_moves_the_end(leases: Leases, clock: SetClock) -> None:
    first = await taken(leases, "a")
    clock.at += 9
    second = await taken(leases, "a")
    assert second.token == first.token
    assert second.expires_at == clock.now() + 10
    clock.at += 9
    assert await leases.acquire("scaler.east", "b", 10.0) is None


@case
async def an_expired_lease_is_free_under_a_higher_token(leases: Leases, clock: SetClock) -> None:
    first = await taken(leases, "a")
    clock.at += 9.99
    assert await leases.acquire("scaler.east", "b", 10.0) is None
    clock.at += 0.02
    second = await taken(leases, "b")
    assert second.token > first.token
    assert await leases.acquire("scaler.east", "a", 10.0) is None


@case
async def coming_late_to_ones_own_lease_costs_a_new_token(leases: Leases, clock: SetClock) -> None:
    first = await taken(leases, "a")
    clock.at += 10
    assert (await taken(leases, "a")).token > first.token


@case
async def a_released_lease_is_free_at_once(leases: Leases, _clock: SetClock) -> None:
    first = await taken(leases, "a")
    await leases.release(first)
    await leases.release(first)
    second = await taken(leases, "b")
    assert second.token > first.token
    await leases.release(second)
    assert (await taken(leases, "a")).token > second.token


@case
async def nobody_releases_anothers_lease(leases: Leases, clock: SetClock) -> None:
    first = await taken(leases, "a")
    clock.at += 11
    second = await taken(leases, "b")
    await leases.release(first)
    assert await leases.acquire("scaler.east", "c", 10.0) is None
    clock.at += 11
    third = await taken(leases, "b")
    await leases.release(second)  # the same holder's, from before it expired
    assert await leases.acquire("scaler.east", "c", 10.0) is None
    assert third.token > second.token > first.token


@case
async def of_racing_holders_one_gets_it(leases: Leases, clock: SetClock) -> None:
    last = 0
    for _ in range(3):
        got = await asyncio.gather(*(leases.acquire("x", f"h{i}", 5.0) for i in range(8)))
        winners = [lease for lease in got if lease is not None]
        assert len(winners) == 1
        assert winners[0].token > last
        last = winners[0].token
        clock.at += 6


@case
async def bad_requests_are_refused(leases: Leases, _clock: SetClock) -> None:
    for name in ("", "../x", "A", "a/b", "x" * 129):
        assert (await refused(InvalidFieldError, leases.acquire(name, "a", 5.0))).field == "name"
    assert (await refused(InvalidFieldError, leases.acquire("x", "", 5.0))).field == "holder"
    for ttl in (0.0, -1.0, float("inf"), float("nan")):
        assert (await refused(InvalidFieldError, leases.acquire("x", "a", ttl))).field == "ttl"
