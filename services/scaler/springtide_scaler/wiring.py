"""Opens the adapters of a scaler that runs as a process of its own.

Which cluster and cloud it serves is a URL; its scheme picks the adapters from a small registry.
Adapters for another cloud join with `register_cluster` and change nothing here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

import structlog

from springtide_scaler.config import ProcessConfig
from springtide_scaler.service import Scaler
from springtide_shared.adapters.clock import SystemClock, SystemIds
from springtide_shared.adapters.directory_state import DirectoryLeases, DirectoryState
from springtide_shared.adapters.rabbit_bus import RabbitBus, RabbitSettings
from springtide_shared.errors import InvalidFieldError, Reason
from springtide_shared.ports.clock import Clock
from springtide_shared.ports.cluster import ClusterView, NodeControl, NodeGroups
from springtide_shared.runtime.health import health_listener
from springtide_shared.runtime.run import serve_all, stop_on_signals


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAdapters:
    """One cluster and its cloud as the scaler sees them."""

    view: ClusterView
    nodes: NodeControl
    groups: NodeGroups


ClusterOpener = Callable[[str, Clock], AbstractAsyncContextManager[ClusterAdapters]]
"""Opens the cluster behind a URL."""

_CLUSTERS: dict[str, ClusterOpener] = {}


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


async def run(config: ProcessConfig) -> None:
    """Serve until a signal asks to end.

    Raises:
        InvalidFieldError: an address is missing, or the kind of cluster is not known.
        SpringtideError: the broker or the cluster cannot be used, or another scaler has taken the
            cluster over (reason `stale`).
    """
    opener = cluster_opener(config.cluster_url)
    for name in ("cluster", "amqp_url", "state_dir"):
        if not getattr(config, name):
            raise InvalidFieldError(
                name, "(absent)", f"set SPRINGTIDE_SCALER_{name.upper()} or the file's {name}"
            )
    assert config.state_dir is not None
    clock = SystemClock()
    ids = SystemIds(clock)
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        settings = RabbitSettings(url=config.amqp_url, name=f"springtide-scaler-{config.cluster}")
        bus = await stack.enter_async_context(RabbitBus.connect(settings, clock=clock, ids=ids))
        adapters = await stack.enter_async_context(opener(config.cluster_url, clock))
        scaler = Scaler(
            cluster=config.cluster,
            bus=bus,
            view=adapters.view,
            nodes=adapters.nodes,
            groups=adapters.groups,
            state=DirectoryState(config.state_dir / "documents"),
            leases=DirectoryLeases(config.state_dir / "leases", clock),
            clock=clock,
            ids=ids,
            config=config.policy(),
        )
        port = await stack.enter_async_context(
            health_listener(
                config.health_host, config.health_port, lambda: {scaler.name: scaler.health()}
            )
        )
        structlog.get_logger(service=scaler.name).info("health.listening", port=port)
        with stop_on_signals(stop):
            await serve_all([scaler], stop)
