"""The shell of the scaler: observe, decide, perform; again every few seconds and when woken.

A round reads cluster and cloud, brings slots and machines together, takes every release one step
further, buys what the plan lacks, and says plan and capacity. Nothing is decided from an event:
demand and commands only bring the next round forward.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, assert_never

import msgspec

from springtide_scaler.config import ScalerConfig
from springtide_scaler.model import (
    Backoff,
    Cordon,
    DeleteNode,
    Effect,
    Grow,
    Machines,
    Mark,
    Memory,
    Observation,
    PlanDecision,
    PlanGroup,
    PlanNode,
    ReleaseRecord,
    ReleaseStep,
    SlotRecord,
    Terminate,
    VacateRecord,
    VacateTurn,
)
from springtide_scaler.policy import (
    backed_off,
    due_for_release,
    due_orphans,
    idle_clocks,
    is_overdue,
    is_settled,
    is_urgent,
    match_machines,
    most_places,
    plan,
    ready_at,
    release_of,
    vacate_turn,
)
from springtide_shared.errors import (
    ConflictError,
    NotFoundError,
    PermanentError,
    Reason,
    SpringtideError,
    TransientError,
)
from springtide_shared.messages.base import Message
from springtide_shared.messages.cluster import (
    Capacity,
    CapacityNode,
    Demand,
    GroupCapacity,
    NodeEvent,
    NodeEvents,
    NodeState,
    Plan,
    ShapeDemand,
    ShapePlaces,
    Slot,
    SlotState,
)
from springtide_shared.messages.migration import Vacate, VacateAction, VacateEvents, VacateStep
from springtide_shared.messages.shape import Shape
from springtide_shared.ports.bus import Delivery, MessageBus, Subscription
from springtide_shared.ports.clock import Clock, Ids
from springtide_shared.ports.cluster import (
    LABEL_SLOT,
    ClusterView,
    InstanceState,
    NodeControl,
    NodeGroups,
    NodeGroupView,
    NodeView,
    PodView,
    instances_by_id,
)
from springtide_shared.ports.state import Leases, ServiceState
from springtide_shared.runtime.lease import LeaseKeeper
from springtide_shared.runtime.service import Loop, Service, SnapshotWriter, Wake
from springtide_shared.runtime.snapshots import SnapshotShelf
from springtide_shared.units import Resources

_UNTOLD_KEPT: Final = 5_000
"""Facts that no queue takes yet; older ones are dropped, since capacity says all nodes again."""
_PAST_VACATES_KEPT: Final = 1_000
_VACATES_KEPT: Final = 500
_DECISIONS_SHOWN: Final = 20
_EVENTS_PER_MESSAGE: Final = 500
"""After a restart all nodes are told again; a body holds some thousand."""
_NODES_PER_PART: Final = 4_000


@dataclass(frozen=True, slots=True)
class _Live:
    """A live pod as far as room is concerned."""

    place: tuple[str, str]
    """("node", its name) once bound, else ("slot", what its affinity demands)."""
    shape: str
    """Empty for other people's pods."""
    requests: Resources


class _Loads:
    """What live pods take, kept up to date by each change, so that a quiet round costs nothing."""

    def __init__(self) -> None:
        self._pods: dict[str, _Live] = {}
        self._places: dict[tuple[str, str], dict[tuple[str, Resources], int]] = {}
        self.edition = 0
        """Grows with each change."""
        self._changed: dict[tuple[str, str], int] = {}
        """Place with pods → edition of its last change."""

    def clear(self) -> None:
        """Forget all."""
        self._pods.clear()
        self._places.clear()
        self.edition += 1
        self._changed = {}

    def drop(self, uid: str) -> None:
        """A pod has ended or left."""
        pod = self._pods.pop(uid, None)
        if pod is not None:
            self._change(pod, -1)

    def put(self, uid: str, pod: _Live) -> None:
        """A pod lives, there."""
        before = self._pods.get(uid)
        if before == pod:
            return
        if before is not None:
            self._change(before, -1)
        self._pods[uid] = pod
        self._change(pod, 1)

    def _change(self, pod: _Live, count: int) -> None:
        self.edition += 1
        self._changed[pod.place] = self.edition
        kinds = self._places.setdefault(pod.place, {})
        kind = (pod.shape, pod.requests)
        kinds[kind] = kinds.get(kind, 0) + count
        if not kinds[kind]:
            del kinds[kind]
        if not kinds:
            del self._places[pod.place], self._changed[pod.place]

    def editions_of(self, record: SlotRecord) -> tuple[int, ...]:
        """When its slot and node last changed; equal ones mean an equal answer of `of`."""
        return tuple(self._changed.get(place, 0) for place in _places_of(record))

    def is_empty(self, record: SlotRecord) -> bool:
        """Whether no live pod is in a slot or bound for it."""
        places = self._places
        if ("slot", record.slot) in places:
            return False
        return record.node is None or ("node", record.node.name) not in places

    def of(self, record: SlotRecord) -> tuple[dict[str, int], Resources]:
        """Live attempts by shape, and requests of all live pods, in a slot or bound for it."""
        running: dict[str, int] = {}
        occupied = Resources()
        for place in _places_of(record):
            for (shape, requests), count in self._places.get(place, {}).items():
                occupied += requests * count
                if shape:
                    running[shape] = running.get(shape, 0) + count
        return running, occupied


def _places_of(record: SlotRecord) -> list[tuple[str, str]]:
    places = [("slot", record.slot)]
    return [("node", record.node.name), *places] if record.node is not None else places


class Scaler(Service):
    """Turns demand into nodes and empty nodes into savings, for one cluster; owns its nodes."""

    name = "scaler"

    def __init__(
        self,
        *,
        cluster: str,
        bus: MessageBus,
        view: ClusterView,
        nodes: NodeControl,
        groups: NodeGroups,
        state: ServiceState,
        leases: Leases,
        clock: Clock,
        ids: Ids,
        config: ScalerConfig,
    ) -> None:
        super().__init__(bus=bus, clock=clock, ids=ids)
        self._cluster = cluster
        self._view = view
        self._nodes = nodes
        self._groups = groups
        self._state = state
        self._config = config
        self._rules = config.rules
        self._key = f"scaler.{cluster}"
        self._lease = LeaseKeeper(leases, clock, self._key, ids.new(), config.lease_seconds)
        self._wake = Wake()
        self._alarm: asyncio.TimerHandle | None = None
        """Brings the next round forward while something is under way."""
        self._busy = asyncio.Lock()
        """A round and a command never interleave."""
        self._demand = SnapshotShelf[Demand]()
        self._shapes: Mapping[str, Shape] = {}
        """Of the last demand, expired or not."""
        self._memory = Memory()
        self._memory_version = 0
        self._began = 0.0
        self._epoch = 0
        self._orders = 0
        self._writer = SnapshotWriter(cluster, 0)
        self._loads = _Loads()
        self._pods_version = 0
        self._slots: tuple[SlotRecord, ...] = ()
        self._noted: tuple[SlotRecord, ...] | None = None
        """The slots whose machines and nodes have been told of."""
        self._patterns: dict[str, Mapping[str, int]] = {}
        self._idle_since: dict[str, float] = {}
        self._orphan_since: dict[str, float] = {}
        self._backoffs: dict[str, Backoff] = {}
        self._decision: PlanDecision | None = None
        self._decided_on: tuple[object, ...] | None = None
        self._matched: tuple[Observation, Machines] | None = None
        """What the last round saw and made of it, if time alone does not change that."""
        self._plan_slots: dict[str, tuple[tuple[object, ...], PlanNode]] = {}
        """Slot → what its part of the plan's input was made from, and that part."""
        self._announced: dict[str, float] = {}
        """Instance id → when a plan without it was published."""
        self._told: set[tuple[str, NodeState]] = set()
        """(Instance id, state): only ever asked for membership."""
        self._events: list[NodeEvent] = []
        self._untold: deque[Message] = deque(maxlen=_UNTOLD_KEPT)
        self._past_vacates: dict[str, VacateEvents] = {}
        self._published_at: float | None = None
        self._slots_said: list[Slot] = []
        self._capacity_said_at = float("-inf")
        self._capacity_said: (
            tuple[list[GroupCapacity], list[CapacityNode], list[ShapePlaces], list[str]] | None
        ) = None
        self._published_on: tuple[object, ...] = (None,) * 4
        self._has_observed = False

    # ---------------------------------------------------------------- life
    async def start(self) -> None:
        """Become the only one, then remember releases and vacates that are under way."""
        self._epoch = await self._lease.wait()
        self._writer = SnapshotWriter(self._cluster, self._epoch)
        document = await self._state.load(self._key)
        if document is not None:
            try:
                self._memory = msgspec.json.decode(document.body, type=Memory)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise PermanentError(
                    Reason.MALFORMED,
                    "what the last life wrote down cannot be read; look at the document, and"
                    " delete it to begin afresh (nodes cordoned for release then stay cordoned)",
                    document=self._key,
                    fault=str(error),
                ) from error
            self._memory_version = document.version
        self._began = self.clock.now()

    def loops(self) -> Sequence[tuple[str, Loop]]:
        """Demand, vacate commands, the lease and the rounds."""
        config = self._config
        return (
            self.timer("lease", config.lease_seconds / 3, self._lease.renew),
            self.consumer(
                Subscription(
                    queue=f"{self._key}.demand",
                    types=(Demand,),
                    cluster=self._cluster,
                    durable=False,
                ),
                self._on_demand,
            ),
            self.consumer(
                Subscription(
                    queue=f"{self._key}.vacate",
                    types=(Vacate,),
                    cluster=self._cluster,
                    single_active=True,
                ),
                self._on_vacates,
                batch=1,
            ),
            self.timer(
                "round",
                config.round_seconds,
                self._round,
                wake=self._wake,
                least=min(config.least_round_seconds, config.round_seconds),
            ),
        )

    async def finish(self) -> None:
        """Let the next life begin at once."""
        if self._alarm is not None:
            self._alarm.cancel()
        await self._lease.release()

    def not_ready(self) -> Sequence[str]:
        """Until the first round has read cluster and cloud."""
        return () if self._has_observed else ("nothing-observed",)

    # ---------------------------------------------------------------- the bus
    async def _on_demand(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            message = delivery.message
            assert isinstance(message, Demand)
            before = self._wanted(self.clock.now())
            edition = self._demand.take(message)
            if edition is not None:
                self._shapes = {
                    item.shape.key: item.shape for part in edition.parts for item in part.shapes
                }
                if is_urgent(*before, *self._wanted(self.clock.now())):
                    self._wake()
            await delivery.ack()

    async def _on_vacates(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            message = delivery.message
            assert isinstance(message, Vacate)
            async with self._busy:
                if message.action is VacateAction.CORDON:
                    answer = await self._cordon_wished(message)
                else:
                    answer = await self._uncordon_wished(message)
                await self._tell(answer)
            await delivery.ack()
            self._wake()

    async def _cordon_wished(self, wish: Vacate) -> VacateEvents:
        """Close the node and remember why, first the memory and then the effect."""
        if (past := self._past_vacates.get(wish.vacate_id)) is not None:
            return past
        if self.clock.now() >= wish.valid_until:
            return self._answer(wish.vacate_id, wish.node, VacateStep.REFUSED, Reason.EXPIRED)
        found = {node.name: node for node in await self._view.nodes()}
        groups = {group.name for group in await self._groups.groups()}
        node = found.get(wish.node)
        if node is None or node.group not in groups:
            return self._answer(wish.vacate_id, wish.node, VacateStep.REFUSED, Reason.UNKNOWN_NODE)
        before = self._memory.vacates.get(node.name)
        if before is None and len(self._memory.vacates) >= _VACATES_KEPT:
            return self._answer(wish.vacate_id, wish.node, VacateStep.REFUSED, Reason.LIMIT_REACHED)
        release = self._memory.releases.get(node.provider_id)
        was_cordoned = node.cordoned
        if before is not None:
            was_cordoned = before.was_cordoned
        elif release is not None:
            was_cordoned = release.was_cordoned
        record = VacateRecord(
            vacate_id=wish.vacate_id,
            node=node.name,
            node_uid=node.uid,
            valid_until=wish.valid_until,
            was_cordoned=was_cordoned,
        )
        await self._remember(vacates={**self._memory.vacates, node.name: record})
        if not node.cordoned:
            await self._perform(Cordon(node.name, cordoned=True))
            self._note(node, NodeState.CORDONED, "vacate")
        return self._answer(wish.vacate_id, wish.node, VacateStep.CORDONED)

    async def _uncordon_wished(self, wish: Vacate) -> VacateEvents:
        if (past := self._past_vacates.get(wish.vacate_id)) is not None:
            return past
        record = self._memory.vacates.get(wish.node)
        if record is None:
            return self._answer(wish.vacate_id, wish.node, VacateStep.UNCORDONED)
        if record.vacate_id != wish.vacate_id:
            return self._answer(wish.vacate_id, wish.node, VacateStep.REFUSED, Reason.STALE)
        if any(
            release.node_uid == record.node_uid and release.step is ReleaseStep.TERMINATE
            for release in self._memory.releases.values()
        ):
            # Too late: it was found empty and is being ended; "released" follows.
            return self._answer(wish.vacate_id, wish.node, VacateStep.REFUSED, Reason.STALE)
        nodes = {node.name: node for node in await self._view.nodes()}
        await self._end_vacate(record, nodes.get(wish.node), "vacate-withdrawn")
        return self._answer(wish.vacate_id, wish.node, VacateStep.UNCORDONED)

    async def _end_vacate(self, record: VacateRecord, node: NodeView | None, reason: str) -> None:
        """Open the node again, first the effect and then the memory; a release goes with it."""
        release = None
        if node is not None and node.uid == record.node_uid:
            release = self._memory.releases.get(node.provider_id)
            is_final = release is not None and release.step is ReleaseStep.TERMINATE
            if node.cordoned and not record.was_cordoned and not is_final:
                await self._perform(Cordon(node.name, cordoned=False))
                self._note(node, NodeState.UNCORDONED, reason)
        vacates = {k: v for k, v in self._memory.vacates.items() if k != record.node}
        releases = self._memory.releases
        if release is not None and release.step is ReleaseStep.CORDON:
            releases = {k: v for k, v in releases.items() if k != release.instance_id}
            self._announced.pop(release.instance_id, None)
        await self._remember(vacates=vacates, releases=releases)

    def _answer(
        self, vacate_id: str, node: str, step: VacateStep, reason: Reason | None = None
    ) -> VacateEvents:
        return VacateEvents(
            cluster=self._cluster,
            vacate_id=vacate_id,
            node=node,
            step=step,
            reason=reason,
            at=self.clock.now(),
        )

    # ---------------------------------------------------------------- one round
    async def _round(self) -> None:
        async with self._busy:
            await self._tell_untold()
            await self._read_pods()
            seen = Observation(nodes=await self._view.nodes(), groups=await self._groups.groups())
            self._has_observed = True
            machines = self._match(seen)
            self._slots = machines.slots
            await self._mark_joined()
            self._note_lives(seen)
            await self._sweep(machines, seen)
            await self._expire_vacates(seen)
            await self._advance_releases(seen)
            decision = await self._decide(seen)
            await self._begin_releases(seen, decision)
            await self._publish(seen, decision)
            await self._tell_events()
            self._set_alarm()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        memory = self._memory
        if memory.releases or memory.vacates or not all(r.has_joined for r in self._slots):
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(self._config.busy_round_seconds, self._wake)

    async def _read_pods(self) -> None:
        changes = await self._view.pods_since(self._pods_version)
        if changes.reset:
            self._loads.clear()
        for pod in changes.gone:
            self._loads.drop(pod.uid)
        for pod in changes.pods:
            live = None if pod.phase.is_terminated else _live(pod)
            if live is None:
                self._loads.drop(pod.uid)
            else:
                self._loads.put(pod.uid, live)
        self._pods_version = changes.version

    def _match(self, seen: Observation) -> Machines:
        releases = self._memory.releases
        if self._matched is not None:
            basis, known = self._matched
            if basis == seen and known.slots is self._slots and not known.lost:
                return known
        machines = match_machines(
            self._slots,
            seen.nodes,
            seen.groups,
            releases,
            self.clock.now(),
            self._rules,
            self._new_slot,
        )
        # Open orders age, and a release that ends makes an orphan of what it leaves.
        is_lasting = not releases and all(r.instance is not None for r in machines.slots)
        self._matched = (seen, machines) if is_lasting else None
        return machines

    def _new_slot(self) -> str:
        """Short and unique within a cluster's life; a label value in every case."""
        self._orders += 1
        return f"{self._epoch}-{self._orders}-{self.ids.new()[-6:].lower()}"

    async def _mark_joined(self) -> None:
        """Label nodes with their slots: only then do pods with that affinity go there."""
        for record in self._slots:
            node = record.node
            if node is not None and node.slot != record.slot:
                await self._try(Mark(node.name, record.slot))

    def _note_lives(self, seen: Observation) -> None:
        """Tell of machines and nodes that this life has not told of yet; repetition is harmless."""
        if self._noted is self._slots:
            return
        self._noted = self._slots
        groups = {group.name: group for group in seen.groups}
        for record in self._slots:
            if record.instance is None:
                continue
            group = groups[record.group]
            launched = record.instance.launched_at
            instance_id = record.instance.instance_id
            self._note_life(record, group, instance_id, NodeState.LAUNCHED, launched)
            if record.node is not None and record.has_joined:
                self._note_life(
                    record, group, record.node.name, NodeState.JOINED, ready_at(record, group)
                )

    def _note_life(
        self, record: SlotRecord, group: NodeGroupView, name: str, state: NodeState, at: float
    ) -> None:
        assert record.instance is not None
        mark = (record.instance.instance_id, state)
        if mark in self._told:
            return
        self._told.add(mark)
        self._events.append(
            NodeEvent(
                node=name,
                slot=record.slot,
                group=record.group,
                state=state,
                at=at,
                instance=record.instance.instance_id,
                price_per_hour=group.price_per_hour,
                cpu_millis=group.allocatable.cpu_millis,
                memory_bytes=group.allocatable.memory_bytes,
            )
        )

    def _note(self, node: NodeView, state: NodeState, reason: str) -> None:
        self._events.append(
            NodeEvent(
                node=node.name,
                slot=node.slot,
                group=node.group,
                state=state,
                at=self.clock.now(),
                instance=node.provider_id,
                cpu_millis=node.allocatable.cpu_millis,
                memory_bytes=node.allocatable.memory_bytes,
                reason=reason,
            )
        )

    # ---------------------------------------------------------------- what went wrong
    async def _sweep(self, machines: Machines, seen: Observation) -> None:
        """Machines that never join, machines that vanished, node objects without a machine."""
        now = self.clock.now()
        groups = {group.name: group for group in seen.groups}
        for record in machines.lost:
            assert record.instance is not None
            name = record.node.name if record.node else record.instance.instance_id
            self.log.warning("node.lost", node=name, group=record.group)
            self._events.append(
                NodeEvent(
                    node=name,
                    slot=record.slot,
                    group=record.group,
                    state=NodeState.LOST,
                    at=now,
                    instance=record.instance.instance_id,
                    reason="machine-gone",
                )
            )
        releases = dict(self._memory.releases)
        for record in self._slots:
            group = groups[record.group]
            if not is_overdue(record, group, self._began, now, self._rules):
                continue
            if record.instance is None:
                self._block(group.name, Reason.CAPACITY, once=True)
            elif record.instance.instance_id not in releases:
                self.log.warning("machine.never_joined", instance=record.instance.instance_id)
                self._block(group.name, Reason.EXPIRED)
                releases[record.instance.instance_id] = release_of(
                    record, group, ReleaseStep.TERMINATE, "join-limit"
                )
        if releases != self._memory.releases:
            await self._remember(releases=releases)
        self._orphan_since, due = due_orphans(
            self._orphan_since, machines.orphans, now, self._rules
        )
        for node in due:
            if await self._try(DeleteNode(node.name, node.uid)):
                self._note(node, NodeState.LOST, "machine-gone")

    async def _expire_vacates(self, seen: Observation) -> None:
        now = self.clock.now()
        nodes = {node.name: node for node in seen.nodes}
        for record in list(self._memory.vacates.values()):
            node = nodes.get(record.node)
            match vacate_turn(record, node, self._memory.releases, now):
                case VacateTurn.KEEP:
                    pass
                case VacateTurn.CLOSE:
                    await self._try(Cordon(record.node, cordoned=True))
                case VacateTurn.EXPIRED:
                    await self._end_vacate(record, node, "vacate-expired")
                    await self._tell_vacate(record, VacateStep.UNCORDONED, Reason.EXPIRED)
                case VacateTurn.NODE_GONE:
                    await self._end_vacate(record, None, "node-gone")
                    await self._tell_vacate(record, VacateStep.REFUSED, Reason.UNKNOWN_NODE)

    async def _tell_vacate(self, record: VacateRecord, step: VacateStep, reason: Reason) -> None:
        await self._tell(self._answer(record.vacate_id, record.node, step, reason))

    # ---------------------------------------------------------------- release
    async def _begin_releases(self, seen: Observation, decision: PlanDecision) -> None:
        """Write down and cordon what is empty and due; later rounds take it from there."""
        now = self.clock.now()
        needed = {pattern.slot for pattern in decision.patterns if pattern.is_needed}
        idle: dict[str, SlotRecord] = {}
        vacated: list[str] = []
        for record in self._slots:
            if record.instance is None or not record.has_joined:
                continue
            if not self._loads.is_empty(record):
                continue
            assert record.node is not None
            instance_id = record.instance.instance_id
            if instance_id in self._memory.releases:
                continue
            if record.node.name in self._memory.vacates:
                vacated.append(instance_id)
                idle[instance_id] = record
            elif record.slot not in needed:
                idle[instance_id] = record
        self._idle_since = idle_clocks(self._idle_since, list(idle), now)
        due = due_for_release(
            self._idle_since, vacated, len(self._memory.releases), now, self._rules
        )
        if not due:
            return
        groups = {group.name: group for group in seen.groups}
        begun = {
            instance_id: release_of(
                idle[instance_id], groups[idle[instance_id].group], ReleaseStep.CORDON, reason
            )
            for instance_id, reason in due
        }
        await self._remember(releases={**self._memory.releases, **begun})
        for release in begun.values():
            await self._close(release)

    async def _close(self, release: ReleaseRecord) -> None:
        if not release.was_cordoned and await self._try(Cordon(release.node, cordoned=True)):
            self._note_release(release, NodeState.CORDONED, release.reason)

    async def _advance_releases(self, seen: Observation) -> None:
        machines = instances_by_id(seen.groups)
        nodes = {node.provider_id: node for node in seen.nodes}
        for release in list(self._memory.releases.values()):
            node = nodes.get(release.instance_id)
            is_gone = release.instance_id not in machines
            if release.step is ReleaseStep.CORDON and not is_gone:
                await self._check_empty(release, node)
            elif not is_gone:
                _, machine = machines[release.instance_id]
                if machine.state is not InstanceState.TERMINATING:
                    await self._try(Terminate(release.group, release.instance_id))
            elif node is not None:
                if await self._try(DeleteNode(node.name, node.uid)):
                    await self._end_release(release)
            else:
                await self._end_release(release)

    async def _check_empty(self, release: ReleaseRecord, node: NodeView | None) -> None:
        """The fresh read: is the cordoned node still empty, now that nothing can come any more?"""
        if node is not None and not node.cordoned:
            self._announced.pop(release.instance_id, None)
            if release.was_cordoned:
                await self._forget_release(release)  # whoever had closed it wants it back
            else:
                await self._close(release)  # the last life ended before the effect
            return
        if not is_settled(self._announced.get(release.instance_id), self.clock.now(), self._rules):
            return
        is_vacated = release.node in self._memory.vacates
        if not await self._view.pods_on(release.node):
            final = msgspec.structs.replace(release, step=ReleaseStep.TERMINATE)
            await self._remember(releases={**self._memory.releases, release.instance_id: final})
            await self._try(Terminate(release.group, release.instance_id))
            return
        self.log.info("release.called_off", node=release.node, reason=Reason.NOT_EMPTY)
        if not is_vacated and not release.was_cordoned:
            if not await self._try(Cordon(release.node, cordoned=False)):
                return
            self._note_release(release, NodeState.UNCORDONED, Reason.NOT_EMPTY)
        self._announced.pop(release.instance_id, None)
        self._idle_since.pop(release.instance_id, None)  # this round still sees it empty
        await self._forget_release(release)

    async def _end_release(self, release: ReleaseRecord) -> None:
        """Tell that the machine is gone, then forget it; a death in between tells it twice."""
        event = self._note_release(release, NodeState.RELEASED, release.reason)
        vacate = self._memory.vacates.get(release.node)
        try:
            await self._tell_events()
            if vacate is not None:
                answer = self._answer(vacate.vacate_id, release.node, VacateStep.RELEASED)
                await self._tell(answer)
                self._past_vacates[vacate.vacate_id] = answer
                if len(self._past_vacates) > _PAST_VACATES_KEPT:
                    del self._past_vacates[next(iter(self._past_vacates))]
        except TransientError:
            if event in self._events:
                self._events.remove(event)  # the next round comes here again
            raise
        self.log.info("node.released", node=release.node, reason=release.reason)
        self._announced.pop(release.instance_id, None)
        for state in NodeState:
            self._told.discard((release.instance_id, state))
        await self._forget_release(release, vacated=vacate is not None)

    async def _forget_release(self, release: ReleaseRecord, *, vacated: bool = False) -> None:
        releases = {k: v for k, v in self._memory.releases.items() if k != release.instance_id}
        vacates = self._memory.vacates
        if vacated:
            vacates = {k: v for k, v in vacates.items() if k != release.node}
        await self._remember(releases=releases, vacates=vacates)

    def _note_release(self, release: ReleaseRecord, state: NodeState, reason: str) -> NodeEvent:
        event = NodeEvent(
            node=release.node or release.instance_id,
            slot=release.slot,
            group=release.group,
            state=state,
            at=self.clock.now(),
            instance=release.instance_id,
            price_per_hour=release.price_per_hour,
            cpu_millis=release.cpu_millis,
            memory_bytes=release.memory_bytes,
            reason=reason,
        )
        self._events.append(event)
        return event

    # ---------------------------------------------------------------- growth
    async def _decide(self, seen: Observation) -> PlanDecision:
        """Plan and buy, unless everything is as it was when there was nothing to buy."""
        basis = self._basis(seen)
        if self._decision is not None and basis == self._decided_on:
            return self._decision
        decision = await self._grow(seen)
        # What was bought or refused changes the basis; an open wish is looked at in each round.
        is_final = not decision.purchases
        self._decided_on = basis if is_final else None
        self._decision = decision
        return decision

    def _basis(self, seen: Observation) -> tuple[object, ...]:
        """All that the plan depends on."""
        now = self.clock.now()
        wanted, hold = self._wanted(now)
        return (
            wanted,
            hold,
            self._loads.edition,
            self._slots,  # the very same ones in most rounds, and then compared at once
            self._memory,
            [
                record.slot
                for record in self._slots
                if record.instance is None and self._is_overdue(record, seen)
            ],
            [
                (group.name, group.size, group.max_size, group.price_per_hour)
                for group in seen.groups
            ],
            [group for group in sorted(self._backoffs) if now < self._backoffs[group].until],
        )

    def _is_overdue(self, record: SlotRecord, seen: Observation) -> bool:
        """Whether an order was accepted and never delivered: it must not stand in others' way."""
        if record.instance is not None:
            return False
        (group,) = (group for group in seen.groups if group.name == record.group)
        return is_overdue(record, group, self._began, self.clock.now(), self._rules)

    async def _grow(self, seen: Observation) -> PlanDecision:
        """Plan and buy; when a group refuses, plan again without it, at once."""
        sizes = {
            group.name: max(group.size, sum(r.group == group.name for r in self._slots))
            for group in seen.groups
        }
        decisions: list[str] = []
        for _ in range(len(seen.groups) + 1):
            decision = self._plan(seen, sizes)
            orders: dict[str, list[Mapping[str, int]]] = {}
            for purchase in decision.purchases:
                orders.setdefault(purchase.group, []).extend([purchase.places] * purchase.count)
            was_refused = False
            for group, patterns in orders.items():
                bought = await self._buy(group, sizes[group], patterns)
                sizes[group] += bought
                if bought < len(patterns):
                    was_refused = True
                    reason = self._backoffs[group].reason
                    decisions.append(f"{reason}: {group} gave {bought} of {len(patterns)}")
            decisions += decision.decisions
            if not was_refused:
                break
        if decision.purchases:
            # What was just ordered is a slot from now on, and part of the plan that is published.
            decision = self._plan(seen, sizes)
        return replace(decision, decisions=tuple(decisions[-_DECISIONS_SHOWN:]))

    def _plan(self, seen: Observation, sizes: Mapping[str, int]) -> PlanDecision:
        now = self.clock.now()
        demand, hold = self._wanted(now)
        groups = [
            PlanGroup(
                name=group.name,
                allocatable=group.allocatable,
                price_per_hour=group.price_per_hour,
                boot_seconds=group.boot_seconds,
                room=max(0, group.max_size - sizes[group.name]),
                blocked_until=self._blocked_until(group.name),
            )
            for group in seen.groups
        ]
        return plan(demand, self._plan_nodes(seen), groups, now, self._rules, hold=hold)

    def _wanted(self, now: float) -> tuple[list[ShapeDemand], str]:
        """The demand and, if it may not be acted upon, why."""
        edition = self._demand.fresh(self._cluster, now)
        if edition is not None:
            return [item for part in edition.parts for item in part.shapes], ""
        known = [
            ShapeDemand(shape=shape, wanted=0, running=0, backlog=0)
            for shape in self._shapes.values()
        ]
        return known, "demand-expired" if self._shapes else "no-demand-yet"

    def _plan_nodes(self, seen: Observation) -> list[PlanNode]:
        """The plan's view of every slot; made anew only for those where something changed."""
        groups = {group.name: group for group in seen.groups}
        known, self._plan_slots = self._plan_slots, {}
        nodes = []
        for record in self._slots:
            group = groups[record.group]
            if self._is_overdue(record, seen):
                continue
            state = self._slot_state(record)
            before = self._patterns.get(record.slot, {})
            basis = (self._loads.editions_of(record), state, before, record.node, group.allocatable)
            found = known.get(record.slot)
            if found is None or found[0] != basis:
                found = basis, self._plan_node(record, state, before, group)
            self._plan_slots[record.slot] = found
            nodes.append(found[1])
        return nodes

    def _plan_node(
        self,
        record: SlotRecord,
        state: SlotState,
        before: Mapping[str, int],
        group: NodeGroupView,
    ) -> PlanNode:
        running, occupied = self._loads.of(record)
        return PlanNode(
            slot=record.slot,
            group=record.group,
            state=state,
            allocatable=record.node.allocatable if record.node else group.allocatable,
            running=running,
            occupied=occupied,
            before=before,
        )

    def _slot_state(self, record: SlotRecord) -> SlotState:
        node = record.node
        leaves = (
            record.instance is not None and record.instance.instance_id in self._memory.releases
        )
        if leaves or (node is not None and (node.cordoned or node.name in self._memory.vacates)):
            return SlotState.CORDONED
        if node is None or not record.has_joined or node.slot != record.slot:
            return SlotState.LAUNCHING
        return SlotState.READY if node.ready else SlotState.CORDONED

    async def _buy(self, group: str, size: int, patterns: Sequence[Mapping[str, int]]) -> int:
        """Order a machine for each pattern; a refused order is halved until taken, or nothing."""
        now = self.clock.now()
        wish = count = len(patterns)
        while wish > 0:
            try:
                await self._perform(Grow(group, size + wish))
            except PermanentError as error:
                if error.reason not in (Reason.CAPACITY, Reason.QUOTA):
                    raise
                self.log.info("group.refused", group=group, count=wish, reason=error.reason)
                self._block(group, error.reason, once=wish != count)
                wish //= 2
            except (TransientError, NotFoundError) as error:
                pause = error.retry_after if isinstance(error, TransientError) else None
                self.log.warning("group.failed", group=group, error=str(error))
                self._block(group, error.reason, pause=pause)
                return 0  # if it was taken all the same, the next round sees it
            else:
                break
        for pattern in patterns[:wish]:
            slot = self._new_slot()
            self._slots += (SlotRecord(slot=slot, group=group, ordered_at=now),)
            self._patterns[slot] = pattern
        if wish == count:
            self._backoffs.pop(group, None)
        if wish:
            self.log.info("group.grown", group=group, size_before=size, size_after=size + wish)
        return wish

    def _block(
        self, group: str, reason: Reason, *, pause: float | None = None, once: bool = False
    ) -> None:
        """Back a group off; `once`: not again while it is."""
        now = self.clock.now()
        before = self._backoffs.get(group)
        if once and before is not None and now < before.until:
            return
        self._backoffs[group] = backed_off(before, reason, now, self._rules, pause)

    def _blocked_until(self, group: str) -> float | None:
        backoff = self._backoffs.get(group)
        return backoff.until if backoff is not None else None

    # ---------------------------------------------------------------- effects
    async def _perform(self, effect: Effect) -> None:
        """The only place where cluster and cloud are changed; each time the lease is checked."""
        token = self._lease.check()
        if token != self._epoch:
            raise PermanentError(Reason.STALE, "the lease is of another life", lease=self._key)
        match effect:
            case Grow(group, size):
                self._orders += 1
                await self._groups.set_size(
                    group, size, f"{self._cluster}-{self._epoch}-{self._orders}"
                )
            case Cordon(node, cordoned):
                await self._nodes.cordon(node, cordoned=cordoned)
            case Mark(node, slot):
                await self._nodes.label(node, {LABEL_SLOT: slot})
            case Terminate(group, instance_id):
                await self._groups.terminate(group, instance_id)
            case DeleteNode(node, uid):
                await self._nodes.delete(node, uid)
            case _:
                assert_never(effect)

    async def _try(self, effect: Effect) -> bool:
        """Perform; a fault of this one thing leaves the others alone, and the next round retries.

        Returns whether the effect holds; what is not there any more counts as done for a removal.
        """
        try:
            await self._perform(effect)
        except NotFoundError:
            return isinstance(effect, DeleteNode | Terminate)
        except (TransientError, ConflictError) as error:
            self.log.warning("effect.failed", effect=repr(effect), error=str(error))
            return False
        return True

    async def _remember(
        self,
        *,
        releases: Mapping[str, ReleaseRecord] | None = None,
        vacates: Mapping[str, VacateRecord] | None = None,
    ) -> None:
        """Write down before acting. The lease makes us the only writer, so ours is the truth."""
        memory = Memory(
            releases=dict(self._memory.releases if releases is None else releases),
            vacates=dict(self._memory.vacates if vacates is None else vacates),
        )
        if memory == self._memory:
            return
        self._lease.check()
        body = msgspec.json.encode(memory)
        try:
            self._memory_version = await self._state.save(self._key, body, self._memory_version)
        except ConflictError:
            # An earlier save was kept although its answer was lost.
            document = await self._state.load(self._key)
            version = document.version if document is not None else 0
            self._memory_version = await self._state.save(self._key, body, version)
        self._memory = memory

    # ---------------------------------------------------------------- telling
    async def _publish(self, seen: Observation, decision: PlanDecision) -> None:
        """Say plan and capacity, when something changed or the period is over."""
        now = self.clock.now()
        is_due = (
            self._published_at is None
            or now - self._published_at >= self._config.publish_seconds - 1e-6
        )
        basis = (decision, self._memory, self._slots, seen.groups)
        is_same = all(a is b for a, b in zip(basis, self._published_on, strict=True))
        if not is_due and is_same:
            return
        if is_same:
            slots = self._slots_said
        else:
            self._patterns = {p.slot: p.places for p in decision.patterns}
            slots = self._slot_news(seen)
        if self._capacity_said is not None and all(
            a is b for a, b in zip(basis[1:], self._published_on[1:], strict=True)
        ):
            node_news = self._capacity_said[1]  # of which the plan changes nothing
        else:
            node_news = self._node_news(seen)
        group_news = [self._group_capacity(group, now) for group in seen.groups]
        if is_due or slots != self._slots_said:
            until = now + 3 * self._config.publish_seconds
            for plan_part in self._writer.parts(Plan, until, "slots", slots, per_part=500):
                await self.bus.publish(plan_part, cluster=self._cluster)
            self._published_at, self._slots_said = now, slots
        places = [
            ShapePlaces(shape=key, most=most_places(self._shapes[key], seen.groups))
            for key in sorted(self._shapes)
        ]
        capacity = (group_news, node_news, places, list(decision.decisions))
        is_late = now - self._capacity_said_at >= self._config.capacity_seconds - 1e-6
        if is_late or capacity != self._capacity_said:
            for capacity_part in self._writer.parts(
                Capacity,
                now + 3 * self._config.capacity_seconds,
                "nodes",
                node_news,
                per_part=_NODES_PER_PART,
                groups=group_news,
                shapes=places,
                decisions=capacity[-1],
            ):
                await self.bus.publish(capacity_part, cluster=self._cluster)
            self._capacity_said_at, self._capacity_said = now, capacity
        self._published_on = basis
        for release in self._memory.releases.values():
            self._announced.setdefault(release.instance_id, now)

    def _slot_news(self, seen: Observation) -> list[Slot]:
        groups = {group.name: group for group in seen.groups}
        leaving = {release.slot for release in self._memory.releases.values()}
        return [
            self._slot(record, groups[record.group])
            for record in self._slots
            if record.slot in self._patterns and record.slot not in leaving
        ]

    def _node_news(self, seen: Observation) -> list[CapacityNode]:
        groups = {group.name: group for group in seen.groups}
        return [
            self._capacity_node(record, record.node, groups[record.group])
            for record in sorted(self._slots, key=lambda r: r.node.name if r.node else "")
            if record.node is not None
        ]

    def _slot(self, record: SlotRecord, group: NodeGroupView) -> Slot:
        return Slot(
            slot=record.slot,
            group=record.group,
            state=self._slot_state(record),
            ready_at=ready_at(record, group),
            places={key: n for key, n in self._patterns[record.slot].items() if n > 0},
            node=record.node.name if record.node else "",
            price_per_hour=group.price_per_hour,
        )

    def _group_capacity(self, group: NodeGroupView, now: float) -> GroupCapacity:
        backoff = self._backoffs.get(group.name)
        is_blocked = backoff is not None and now < backoff.until
        return GroupCapacity(
            group=group.name,
            instance_type=group.instance_type,
            cpu_millis=group.allocatable.cpu_millis,
            memory_bytes=group.allocatable.memory_bytes,
            price_per_hour=group.price_per_hour,
            size=group.size,
            max_size=group.max_size,
            boot_seconds=group.boot_seconds,
            unavailable_reason=backoff.reason if backoff is not None and is_blocked else None,
            unavailable_until=backoff.until if backoff is not None and is_blocked else None,
        )

    def _capacity_node(
        self, record: SlotRecord, node: NodeView, group: NodeGroupView
    ) -> CapacityNode:
        return CapacityNode(
            node=node.name,
            slot=record.slot,
            group=record.group,
            cpu_millis=node.allocatable.cpu_millis,
            memory_bytes=node.allocatable.memory_bytes,
            price_per_hour=group.price_per_hour,
            cordoned=self._slot_state(record) is SlotState.CORDONED,
        )

    async def _tell_events(self) -> None:
        """Publish the steps of nodes' lives; what could not be said is said in the next round."""
        while self._events:
            events = self._events[:_EVENTS_PER_MESSAGE]
            await self._tell(NodeEvents(cluster=self._cluster, events=events))
            del self._events[: len(events)]

    async def _tell(self, message: Message) -> None:
        """Publish a fact; while no consumer has declared its queue, it is kept for later."""
        try:
            await self.bus.publish(message, cluster=self._cluster)
        except PermanentError as error:
            if error.reason is not Reason.CLUSTER_UNREACHABLE:
                raise
            self._untold.append(message)

    async def _tell_untold(self) -> None:
        for _ in range(len(self._untold)):
            message = self._untold[0]
            try:
                await self.bus.publish(message, cluster=self._cluster)
            except SpringtideError as error:
                self.log.debug("fact.kept", topic=message.topic, error=str(error))
                return
            self._untold.popleft()


def _live(pod: PodView) -> _Live | None:
    """None: it takes no room anywhere yet."""
    if not pod.node and not pod.slot:
        return None
    requests = pod.requests
    shape = ""
    if pod.attempt is not None:
        shape = Shape(
            cpu_millis=requests.cpu_millis,
            memory_bytes=requests.memory_bytes,
            scratch_bytes=requests.scratch_bytes,
        ).key
    place = ("node", pod.node) if pod.node else ("slot", pod.slot)
    return _Live(place=place, shape=shape, requests=requests)
