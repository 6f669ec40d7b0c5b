"""Which cluster a service of its own process serves: a URL whose scheme picks the adapters.

Adapters for another kind of cluster join with `register_cluster` and change nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from springtide_shared.errors import InvalidFieldError, Reason
from springtide_shared.ports.clock import Clock
from springtide_shared.ports.cluster import ClusterView, NodeControl, NodeGroups, PodControl
from springtide_shared.ports.metrics import PodStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAdapters:
    """One cluster and its cloud, as the services of its set see them.

    Each part connects when it is first used, so that no service needs rights or keys for what it
    never touches.
    """

    view: ClusterView
    pods: PodControl
    nodes: NodeControl
    groups: NodeGroups
    stats: PodStats


ClusterOpener = Callable[[str, Clock], AbstractAsyncContextManager[ClusterAdapters]]
"""Opens the cluster behind a URL."""

_CLUSTERS: Final[dict[str, ClusterOpener]] = {}


def register_cluster(scheme: str, opener: ClusterOpener) -> None:
    """Let `cluster_url` name clusters of this scheme."""
    _CLUSTERS[scheme] = opener


def cluster_opener(url: str) -> ClusterOpener:
    """The opener for a cluster's URL.

    Raises:
        InvalidFieldError: no URL, or a kind of cluster that this build has no adapter for.
    """
    opener = _CLUSTERS.get(urlsplit(url).scheme)
    if opener is None:
        known = ", ".join(f"{name}://…" for name in sorted(_CLUSTERS)) or "none in this version"
        raise InvalidFieldError(
            "cluster_url",
            url or "(absent)",
            f"clusters that a process of its own can reach: {known};"
            " the local cluster lives inside `springtide up`",
            Reason.NOT_SUPPORTED,
        )
    return opener
