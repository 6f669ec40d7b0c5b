"""ServiceState and Leases in memory: for virtual time and for tests."""

from __future__ import annotations

from collections.abc import Sequence

from springtide_shared.adapters.documents import changed_since, check_document, check_prefix
from springtide_shared.adapters.faults import Faults
from springtide_shared.adapters.leasing import LeaseRecord, granted, released
from springtide_shared.ports.clock import Clock
from springtide_shared.ports.state import Document, Lease


class InMemoryState:
    """Keeps documents in a dictionary; outlives the service that is restarted around it.

    Args:
        faults: lets calls fail on request (tests, simulation).
    """

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults("service state")
        self._documents: dict[str, Document] = {}
        self._floor = 0
        """Highest version of any deleted document: a key that comes back starts above it, so that
        a writer who knew the deleted one is refused."""

    async def load(self, key: str) -> Document | None:
        """See `ServiceState.load`."""
        check_document(key)
        with self.faults.call("load"):
            return self._documents.get(key)

    async def save(self, key: str, body: bytes, expected: int) -> int:
        """See `ServiceState.save`."""
        check_document(key, body, expected)
        with self.faults.call("save"):
            found = self._version(key)
            if found != expected:
                raise changed_since(key, expected, found)
            version = (found or self._floor) + 1
            self._documents[key] = Document(key, version, bytes(body))
            return version

    async def delete(self, key: str, expected: int) -> None:
        """See `ServiceState.delete`."""
        check_document(key, expected=expected)
        with self.faults.call("delete"):
            found = self._version(key)
            if found == 0:
                return
            if found != expected:
                raise changed_since(key, expected, found)
            del self._documents[key]
            self._floor = max(self._floor, found)

    async def list(self, prefix: str) -> Sequence[Document]:
        """See `ServiceState.list`."""
        check_prefix(prefix)
        with self.faults.call("list"):
            return [self._documents[k] for k in sorted(self._documents) if k.startswith(prefix)]

    def _version(self, key: str) -> int:
        document = self._documents.get(key)
        return 0 if document is None else document.version


class InMemoryLeases:
    """Leases among the services of one process.

    Args:
        clock: its `now` decides what has expired.
        faults: lets calls fail on request (tests, simulation).
    """

    def __init__(self, clock: Clock, faults: Faults | None = None) -> None:
        self.faults = faults or Faults("lease keeper")
        self._clock = clock
        self._records: dict[str, LeaseRecord] = {}

    async def acquire(self, name: str, holder: str, ttl: float) -> Lease | None:
        """See `Leases.acquire`."""
        with self.faults.call("acquire"):
            record = granted(self._records.get(name), name, holder, ttl, self._clock.now())
            if record is None:
                return None
            self._records[name] = record
            return record.lease(name)

    async def release(self, lease: Lease) -> None:
        """See `Leases.release`."""
        with self.faults.call("release"):
            record = released(self._records.get(lease.name), lease)
            if record is not None:
                self._records[lease.name] = record
