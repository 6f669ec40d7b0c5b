"""The reading side of snapshots: the newest whole edition per producer, until it expires."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from springtide_shared.messages.base import Snapshot

S = TypeVar("S", bound=Snapshot)


@dataclass(frozen=True, slots=True)
class Edition(Generic[S]):
    """All parts of one snapshot, in order."""

    parts: tuple[S, ...]

    @property
    def cluster(self) -> str:
        """Whose it is."""
        return self.parts[0].cluster

    @property
    def epoch(self) -> int:
        """Life of the producer."""
        return self.parts[0].epoch

    @property
    def seq(self) -> int:
        """Number within that life."""
        return self.parts[0].seq

    @property
    def valid_until(self) -> float:
        """Use by."""
        return self.parts[0].valid_until


class SnapshotShelf(Generic[S]):
    """Keeps the newest whole edition per cluster; parts may come in any order, twice or never."""

    def __init__(self) -> None:
        self._whole: dict[str, Edition[S]] = {}
        self._gathering: dict[str, dict[int, S]] = {}

    def take(self, message: S) -> Edition[S] | None:
        """Add one part; returns the edition if this part made a newer one whole."""
        newest = self._whole.get(message.cluster)
        order = (message.epoch, message.seq)
        if newest is not None and order <= (newest.epoch, newest.seq):
            return None
        gathered = self._gathering.setdefault(message.cluster, {})
        if gathered:
            other = next(iter(gathered.values()))
            if (other.epoch, other.seq) > order:
                return None
            if (other.epoch, other.seq) < order:
                gathered.clear()
        gathered[message.part] = message
        if len(gathered) < message.parts:
            return None
        edition = Edition(tuple(gathered[number] for number in sorted(gathered)))
        self._whole[message.cluster] = edition
        del self._gathering[message.cluster]
        return edition

    def fresh(self, cluster: str, now: float) -> Edition[S] | None:
        """The newest whole edition that has not expired."""
        edition = self._whole.get(cluster)
        return edition if edition is not None and now < edition.valid_until else None

    def all_fresh(self, now: float) -> Sequence[Edition[S]]:
        """Fresh editions of all clusters, in order of their names."""
        return [
            edition
            for cluster in sorted(self._whole)
            if (edition := self.fresh(cluster, now)) is not None
        ]

    def fresh_parts(self, now: float) -> Sequence[S]:
        """All parts of `all_fresh`, in order."""
        return [part for edition in self.all_fresh(now) for part in edition.parts]
