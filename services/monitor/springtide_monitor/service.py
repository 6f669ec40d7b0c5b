"""The shell: reads pods and counters, lets the policy say what they mean, tells it on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from springtide_monitor.config import MonitorConfig
from springtide_monitor.model import Track
from springtide_monitor.policy import figures, take_reading, usage_of_arrays, usage_of_nodes
from springtide_shared.errors import PermanentError, TransientError
from springtide_shared.messages.attempts import AttemptFigures, AttemptSummary
from springtide_shared.messages.cluster import Usage
from springtide_shared.ports.bus import MessageBus
from springtide_shared.ports.clock import Clock, Ids
from springtide_shared.ports.cluster import ClusterView, PodView
from springtide_shared.ports.metrics import MetricSink, PodStats
from springtide_shared.ports.state import Leases
from springtide_shared.runtime.lease import LeaseKeeper
from springtide_shared.runtime.service import Loop, Service, SnapshotWriter, Wake

MAX_WAITING_SUMMARIES = 100_000
"""Figures held while the broker is away; beyond it the oldest go, counted."""


class Monitor(Service):
    """Samples of all pods of one cluster, usage snapshots, summaries of ended attempts.

    It owns nothing in the cluster and keeps nothing across restarts: after one, attempts that are
    still running are summed from their counters' full value on.
    """

    name = "monitor"

    def __init__(
        self,
        *,
        cluster: str,
        bus: MessageBus,
        view: ClusterView,
        stats: PodStats,
        sink: MetricSink,
        leases: Leases,
        clock: Clock,
        ids: Ids,
        config: MonitorConfig,
    ) -> None:
        super().__init__(bus=bus, clock=clock, ids=ids)
        self.cluster = cluster
        self.config = config
        self._view = view
        self._stats = stats
        self._sink = sink
        self._lease = LeaseKeeper(
            leases, clock, f"monitor.{cluster}", ids.new(), config.lease_seconds
        )
        self._writer = SnapshotWriter(cluster, 0)
        self._version = 0
        self._tracks: dict[str, Track] = {}
        self._summed: dict[str, None] = {}
        """Uids of terminated pods whose figures are told, until the pod is gone."""
        self._waiting: deque[AttemptFigures] = deque()
        self._ended = Wake()
        self.summaries_dropped = 0

    async def start(self) -> None:
        """Become the one monitor of this cluster."""
        self._writer.epoch = await self._lease.wait()

    def loops(self) -> Sequence[tuple[str, Loop]]:
        """Watch, sample, publish."""
        config = self.config
        return [
            self.watcher("watch", self._await_change, self._watch),
            self.timer("sample", config.sample_seconds, self._sample, least=config.sample_seconds),
            self.timer("usage", config.usage_seconds, self._publish_usage),
            self.timer(
                "summaries",
                config.usage_seconds,
                self._publish_summaries,
                wake=self._ended,
                least=config.summary_seconds,
            ),
            self.timer("lease", config.lease_seconds / 3, self._lease.renew),
        ]

    async def finish(self) -> None:
        """Tell what is left, write out the samples, free the lease."""
        try:
            await self._publish_summaries()
        except TransientError as error:
            self.log.warning("summaries.left", count=len(self._waiting), error=str(error))
        await self._sink.aclose()
        await self._lease.release()

    async def _await_change(self) -> None:
        await asyncio.sleep(self.config.watch_least_seconds)  # changes come in bursts
        await self._view.wait_for_change(self._version, self.config.watch_seconds)

    async def _watch(self) -> None:
        changes = await self._view.pods_since(self._version)
        self._version = changes.version
        if changes.reset:
            there = {pod.uid for pod in changes.pods}
            for uid in [uid for uid in self._tracks if uid not in there]:
                self._end(self._tracks[uid].pod)
                del self._tracks[uid]
                self._summed.pop(uid, None)
        for pod in changes.gone:
            self._end(pod)
            self._tracks.pop(pod.uid, None)
            self._summed.pop(pod.uid, None)
        for pod in changes.pods:
            track = self._tracks.get(pod.uid)
            self._tracks[pod.uid] = (
                Track(pod=pod) if track is None else msgspec.structs.replace(track, pod=pod)
            )
            if pod.phase.is_terminated:
                self._end(pod)

    def _end(self, pod: PodView) -> None:
        track = self._tracks.get(pod.uid)
        if track is None or pod.uid in self._summed:
            return
        self._summed[pod.uid] = None
        summary = figures(track, pod)
        if summary is None:
            return
        if len(self._waiting) >= MAX_WAITING_SUMMARIES:
            self._waiting.popleft()
            self.summaries_dropped += 1
        self._waiting.append(summary)
        self._ended()

    async def _sample(self) -> None:
        samples = []
        for reading in await self._stats.read():
            track = self._tracks.get(reading.pod_uid)
            if track is None:
                continue
            track, sample = take_reading(track, reading, self.cluster, self.config.gap_seconds)
            self._tracks[reading.pod_uid] = track
            if sample is not None:
                samples.append(sample)
        if samples:
            self._sink.emit(samples)

    async def _publish_usage(self) -> None:
        now = self.clock.now()
        nodes = await self._view.nodes()
        pods = [track.pod for track in self._tracks.values()]
        fresh = self.config.fresh_seconds
        parts = self._writer.parts(
            Usage,
            now + self.config.valid_seconds,
            "nodes",
            usage_of_nodes(nodes, pods, self._tracks, now, fresh),
            arrays=usage_of_arrays(pods, self._tracks, now, fresh),
        )
        for part in parts:
            await self.bus.publish(part, cluster=self.cluster)

    async def _publish_summaries(self) -> None:
        while self._waiting:
            count = min(len(self._waiting), self.config.summaries_per_message)
            batch = [self._waiting[i] for i in range(count)]
            summary = AttemptSummary(cluster=self.cluster, summaries=batch)
            try:
                await self.bus.publish(summary, cluster=self.cluster)
            except PermanentError as error:
                # Nobody has declared a queue for them yet: that passes, like an outage.
                raise TransientError(error.reason, error.detail) from error
            for _ in range(count):
                self._waiting.popleft()
