"""ServiceState and Leases: the little that a per-cluster service remembers across its deaths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Document:
    """One versioned document; versions grow from 1."""

    key: str
    version: int
    body: bytes


class ServiceState(Protocol):
    """Small versioned documents: sagas, cancel memory, reservations (ConfigMaps, a directory).

    Keys: 1 … 128 characters of `a-z 0-9 . _ -`. Bodies up to 256 KiB. All calls raise
    `TransientError` while the keeper does not answer.
    """

    async def load(self, key: str) -> Document | None:
        """The newest version, or None."""
        ...

    async def save(self, key: str, body: bytes, expected: int) -> int:
        """Write on top of version `expected` (0: there must be none); returns the new version.

        Raises:
            ConflictError: somebody else wrote since.
        """
        ...

    async def delete(self, key: str, expected: int) -> None:
        """Remove version `expected`; nothing happens if the key is absent.

        Raises:
            ConflictError: somebody else wrote since.
        """
        ...

    async def list(self, prefix: str) -> Sequence[Document]:
        """All documents whose keys begin with `prefix`, in key order."""
        ...


@dataclass(frozen=True, slots=True)
class Lease:
    """A timed right to act. `token` only grows, and goes with every effect."""

    name: str
    holder: str
    token: int
    expires_at: float


class Leases(Protocol):
    """At most one holder of a name at a time, as far as clocks agree; tokens fence the rest."""

    async def acquire(self, name: str, holder: str, ttl: float) -> Lease | None:
        """Take or renew; None while another holder's lease runs."""
        ...

    async def release(self, lease: Lease) -> None:
        """Give it back early; nothing happens if it is no longer ours."""
        ...
