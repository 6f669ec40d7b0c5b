"""Listens to the bus and keeps what plots, tables and checks need of a run."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from springtide_shared.errors import Reason
from springtide_shared.messages import (
    AttemptEvents,
    AttemptKey,
    AttemptState,
    AttemptSummary,
    JobEvents,
    MigrationEvents,
    MigrationStep,
    NodeEvents,
    NodeState,
)
from springtide_shared.ports.bus import Delivery, MessageBus, Subscription
from springtide_shared.ports.clock import Clock, Ids
from springtide_shared.runtime.service import Loop, Service


@dataclass(slots=True)
class NodeLife:
    """One machine from the wish to its end. Times in seconds since 1970."""

    node: str
    slot: str
    group: str
    cluster: str
    cpu_millis: int = 0
    price_per_hour: float = 0.0
    launched_at: float | None = None
    joined_at: float | None = None
    released_at: float | None = None
    release_reason: str = ""
    cordons: list[float] = field(default_factory=list)

    def paid_seconds(self, until: float) -> float:
        """Billed time up to `until`."""
        begin = self.launched_at if self.launched_at is not None else self.joined_at
        if begin is None:
            return 0.0
        return max(0.0, min(self.released_at or until, until) - begin)


@dataclass(slots=True)
class AttemptLife:
    """One attempt as its events told it."""

    key: AttemptKey
    cluster: str
    node: str = ""
    pending_at: float | None = None
    running_at: float | None = None
    ended_at: float | None = None
    reason: Reason | None = None
    cpu_seconds: float | None = None


@dataclass(slots=True)
class Recording:
    """What one run left."""

    nodes: dict[tuple[str, str], NodeLife] = field(default_factory=dict)
    """By cluster and machine."""
    attempts: dict[AttemptKey, AttemptLife] = field(default_factory=dict)
    migrations: dict[str, list[tuple[float, MigrationStep]]] = field(default_factory=dict)
    jobs: dict[str, JobEvents] = field(default_factory=dict)

    def node_seconds_paid(self, until: float) -> float:
        """Sum over all machines, from launch to release."""
        return sum(life.paid_seconds(until) for life in self.nodes.values())

    def nodes_at(self, at: float) -> int:
        """Machines that had joined and were not released at `at`."""
        return sum(
            life.joined_at is not None
            and life.joined_at <= at
            and (life.released_at is None or at < life.released_at)
            for life in self.nodes.values()
        )

    def peak_nodes(self) -> int:
        """Most nodes at once."""
        return max(
            (self.nodes_at(t) for life in self.nodes.values() if (t := life.joined_at)), default=0
        )

    def running_cpu_millis(self, times: Sequence[float], cpu_millis: int) -> list[int]:
        """CPU of running attempts at each of `times`, one attempt taking `cpu_millis`."""
        begins = sorted(a.running_at for a in self.attempts.values() if a.running_at is not None)
        ends = sorted(
            a.ended_at
            for a in self.attempts.values()
            if a.ended_at is not None and a.running_at is not None
        )
        return [
            cpu_millis * (bisect.bisect_right(begins, t) - bisect.bisect_right(ends, t))
            for t in times
        ]

    def moved(self) -> list[AttemptKey]:
        """Attempts that ended by migration, in order of time."""
        ended = [a for a in self.attempts.values() if a.reason is Reason.MIGRATED]
        return [a.key for a in sorted(ended, key=lambda a: (a.ended_at or 0.0, a.key))]


class Recorder(Service):
    """Fills a `Recording` from the bus; private queues, so it takes nothing away from anybody."""

    name = "recorder"

    def __init__(
        self, *, bus: MessageBus, clock: Clock, ids: Ids, recording: Recording | None = None
    ) -> None:
        super().__init__(bus=bus, clock=clock, ids=ids)
        self.recording = recording or Recording()

    def loops(self) -> Sequence[tuple[str, Loop]]:
        """One private queue for all topics."""
        subscription = Subscription(
            queue=f"recorder.{self.ids.new()}",
            types=(AttemptEvents, NodeEvents, MigrationEvents, JobEvents, AttemptSummary),
            durable=False,
            prefetch=1_000,
            max_length=1_000_000,
        )
        return [self.consumer(subscription, self._record, batch=500)]

    async def _record(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            match delivery.message:
                case AttemptEvents() as message:
                    self._attempts(message)
                case NodeEvents() as message:
                    self._nodes(message)
                case MigrationEvents() as message:
                    steps = self.recording.migrations.setdefault(message.migration_id, [])
                    if message.step not in (step for _, step in steps):
                        steps.append((message.at, message.step))
                case JobEvents() as message:
                    self.recording.jobs[message.job_id] = message
                case AttemptSummary() as message:
                    for figures in message.summaries:
                        key = AttemptKey(figures.job_id, figures.index, figures.attempt)
                        if (life := self.recording.attempts.get(key)) is not None:
                            life.cpu_seconds = figures.cpu_seconds
            await delivery.ack()

    def _attempts(self, message: AttemptEvents) -> None:
        for event in message.events:
            life = self.recording.attempts.get(event.key)
            if life is None:
                life = AttemptLife(event.key, message.cluster)
                self.recording.attempts[event.key] = life
            life.node = event.node or life.node
            if event.state is AttemptState.PENDING and life.pending_at is None:
                life.pending_at = event.at
            if event.state is AttemptState.RUNNING and life.running_at is None:
                life.running_at = event.at
            if event.state is AttemptState.ENDED and life.ended_at is None:
                life.ended_at = event.at
                life.reason = event.reason

    def _nodes(self, message: NodeEvents) -> None:
        for event in message.events:
            key = (message.cluster, event.instance or event.node)
            life = self.recording.nodes.get(key)
            if life is None:
                life = NodeLife(event.node, event.slot, event.group, message.cluster)
                self.recording.nodes[key] = life
            life.node = event.node or life.node
            life.cpu_millis = event.cpu_millis or life.cpu_millis
            life.price_per_hour = event.price_per_hour or life.price_per_hour
            match event.state:
                case NodeState.LAUNCHED:
                    life.launched_at = life.launched_at or event.at
                case NodeState.JOINED:
                    life.joined_at = life.joined_at or event.at
                case NodeState.CORDONED:
                    life.cordons.append(event.at)
                case NodeState.RELEASED | NodeState.LOST:
                    if life.released_at is None:
                        life.released_at = event.at
                        life.release_reason = event.reason or event.state.value
                case _:
                    pass
