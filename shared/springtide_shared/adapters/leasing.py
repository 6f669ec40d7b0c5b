"""The rule of leases, pure: who may take one, and with which token."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from springtide_shared.errors import InvalidFieldError
from springtide_shared.ports.state import Lease

_NAME: Final = re.compile(r"[a-z0-9._-]{1,128}", re.ASCII)


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of one lease; it stays after release and expiry, for its token's sake."""

    holder: str
    """Empty: released."""
    token: int
    expires_at: float

    def lease(self, name: str) -> Lease:
        """As the port shows it."""
        return Lease(name, self.holder, self.token, self.expires_at)


def granted(
    record: LeaseRecord | None, name: str, holder: str, ttl: float, now: float
) -> LeaseRecord | None:
    """The record after `holder` asked at `now`; None while another holder's lease runs.

    A renewal in time keeps its token. After expiry the same holder gets a higher one as well: what
    it began under the old one may have been judged lost meanwhile.

    Raises:
        InvalidFieldError: a name, a holder or a time that no keeper takes.
    """
    if not _NAME.fullmatch(name):
        raise InvalidFieldError("name", name, "use 1 … 128 characters of a-z 0-9 . _ -")
    if not holder:
        raise InvalidFieldError("holder", holder, "name the holder, one name per process life")
    if not 0 < ttl < float("inf"):
        raise InvalidFieldError("ttl", ttl, "give more than 0 seconds")
    if record is None:
        return LeaseRecord(holder=holder, token=1, expires_at=now + ttl)
    runs = bool(record.holder) and now < record.expires_at
    if runs and record.holder != holder:
        return None
    return LeaseRecord(holder=holder, token=record.token + (0 if runs else 1), expires_at=now + ttl)


def released(record: LeaseRecord | None, lease: Lease) -> LeaseRecord | None:
    """The record after `lease` was given back; None if it is no longer its holder's."""
    if record is None or (record.holder, record.token) != (lease.holder, lease.token):
        return None
    return LeaseRecord(holder="", token=record.token, expires_at=0.0)
