"""The shell: hears what happened, lets the policy decide, remembers, then sends.

Every change of a saga is stored before its commands leave; whatever is lost in between is sent
again, because the commands follow from the stored states alone (`policy.standing`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Final

import msgspec

from springtide_rescheduler import policy
from springtide_rescheduler.config import ReschedulerConfig
from springtide_rescheduler.lives import Lives
from springtide_rescheduler.model import (
    Answered,
    AttemptEnded,
    AttemptRuns,
    AttemptVanished,
    Choice,
    Command,
    Cordoning,
    Ending,
    Event,
    Gathering,
    Gone,
    ManifestVerified,
    MoveCosts,
    Moved,
    NodeAnswered,
    NodeClosed,
    NodeFilled,
    Past,
    Picture,
    Reserved,
    Reserving,
    Restoring,
    Saving,
    Stayed,
    TaskKey,
    TaskMove,
    TimePassed,
    VacateSaga,
)
from springtide_shared.errors import (
    ConflictError,
    NotFoundError,
    PermanentError,
    Reason,
    TransientError,
)
from springtide_shared.messages.attempts import (
    AttemptEvent,
    AttemptEvents,
    AttemptState,
    Inventory,
    LiveAttempt,
)
from springtide_shared.messages.base import Message
from springtide_shared.messages.cluster import Capacity, Demand, NodeEvents, NodeState, Usage
from springtide_shared.messages.migration import MigrationEvents, VacateEvents
from springtide_shared.messages.records import Manifest, manifests_prefix
from springtide_shared.messages.task import AttemptKey
from springtide_shared.ports.bus import Delivery, MessageBus, Subscription
from springtide_shared.ports.clock import Clock, Ids
from springtide_shared.ports.state import Leases, ServiceState
from springtide_shared.ports.store import ObjectStore
from springtide_shared.runtime.lease import LeaseKeeper
from springtide_shared.runtime.service import Loop, Service, Wake
from springtide_shared.runtime.snapshots import SnapshotShelf

_SAGAS: Final = "rescheduler.vacate."
_HISTORY: Final = "rescheduler.history"
_NEWEST_MANIFESTS: Final = 3
_PAGE: Final = 1_000
_LOOK_GROWTH: Final = 1.5
_MOST_OVER: Final = 20_000
_MOST_CLOSED: Final = 100
_SMOOTH: Final = 0.3
"""Weight of the newest measurement of a job's save and resume times."""


class _History(msgspec.Struct, frozen=True, kw_only=True):
    """What outlives a restart of tasks that were moved, besides the sagas under way."""

    tasks: list[tuple[str, int, Past]] = []
    closed: list[str] = []
    """Ids of the last sagas that are in it: a saga that closes twice counts once."""


class _Stored(msgspec.Struct):
    """A saga in hand and the version of its document."""

    saga: VacateSaga
    version: int
    sent_at: float = float("-inf")
    """When its commands last left."""


class _Look(msgspec.Struct):
    """When to look for one migration's manifest again."""

    at: float
    pause: float


class Rescheduler(Service):
    """Empties nodes of one cluster.

    `counts` tells what it did: `moved`, `released`, `failed:<step>:<reason>` per move,
    `left:<why>` per node and cycle.
    """

    name = "rescheduler"

    def __init__(
        self,
        *,
        cluster: str,
        bus: MessageBus,
        state: ServiceState,
        store: ObjectStore,
        leases: Leases,
        clock: Clock,
        ids: Ids,
        config: ReschedulerConfig,
    ) -> None:
        super().__init__(bus=bus, clock=clock, ids=ids)
        self.cluster = cluster
        self.config = config
        self.log = self.log.bind(cluster=cluster)
        self.counts: Counter[str] = Counter()
        self._state = state
        self._store = store
        self._lease = LeaseKeeper(
            leases, clock, f"rescheduler.{cluster}", ids.new(), config.lease_seconds
        )
        self._turn = asyncio.Lock()
        """One change of sagas at a time: each reads, stores and only then takes effect."""
        self._sagas: dict[str, _Stored] = {}
        self._doubtful: dict[str, VacateSaga] = {}
        """New sagas of which it is not certain that they were stored."""
        self._past: dict[TaskKey, Past] = {}
        self._past_version = 0
        self._closed: list[str] = []
        self._inventory: SnapshotShelf[Inventory] = SnapshotShelf()
        self._capacity: SnapshotShelf[Capacity] = SnapshotShelf()
        self._demand: SnapshotShelf[Demand] = SnapshotShelf()
        self._usage: SnapshotShelf[Usage] = SnapshotShelf()
        self._since: OrderedDict[AttemptKey, float] = OrderedDict()
        """Since when an attempt runs, by its event or by inventory."""
        self._over: OrderedDict[AttemptKey, None] = OrderedDict()
        """Attempts heard to have ended: an inventory may be older than that news."""
        self._ended: OrderedDict[str, deque[float]] = OrderedDict()
        """Run times of tasks that completed, by job, the jobs seen last at the end."""
        self._costs: OrderedDict[str, MoveCosts] = OrderedDict()
        self._missing: dict[str, float] = {}
        """Since when inventories no longer name a migration's source."""
        self._looks: dict[str, _Look] = {}
        self._begun: deque[float] = deque()
        """When the last moves began, for the limit per window."""
        self._look_now = Wake()

    # ------------------------------------------------------------ life
    async def start(self) -> None:
        """Become the one rescheduler of this cluster; go on with the sagas that are stored."""
        await self._lease.wait()
        while True:
            try:
                await self._recover()
                return
            except TransientError as error:
                self.log.warning("state.away", error=str(error))
                await asyncio.sleep(self.config.tick_seconds)

    async def _recover(self) -> None:
        now = self.clock.now()
        self._sagas.clear()
        for document in await self._state.list(_SAGAS):
            try:
                saga = msgspec.json.decode(document.body, type=VacateSaga)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.log.error("saga.garbled", key=document.key, error=str(error))
                continue
            saga = policy.rearm(saga, now, self.config)
            self._sagas[saga.vacate_id] = _Stored(saga, document.version)
            self.log.info("saga.resumed", vacate_id=saga.vacate_id, node=saga.node)
        history = await self._state.load(_HISTORY)
        if history is not None:
            self._past_version = history.version
            try:
                known = msgspec.json.decode(history.body, type=_History)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.log.error("history.garbled", error=str(error))
                known = _History()
            self._past = {(job, index): past for job, index, past in known.tasks}
            self._closed = known.closed

    def loops(self) -> Sequence[tuple[str, Loop]]:
        """Snapshots, events, decisions, limits, manifests, lease."""
        config = self.config
        return [
            self.consumer(
                Subscription(
                    queue=f"rescheduler.{self.cluster}.snapshots",
                    types=(Inventory, Capacity, Demand, Usage),
                    cluster=self.cluster,
                    durable=False,
                ),
                self._on_snapshots,
            ),
            self.consumer(
                Subscription(
                    queue=f"rescheduler.{self.cluster}.events",
                    types=(AttemptEvents, MigrationEvents, VacateEvents, NodeEvents),
                    cluster=self.cluster,
                    single_active=True,
                ),
                self._on_events,
            ),
            self.timer("decide", config.cycle_seconds, self._decide),
            self.timer("tick", config.tick_seconds, self._tick),
            self.timer(
                "manifests",
                config.look_most_seconds,
                self._look_for_manifests,
                wake=self._look_now,
                least=config.look_first_seconds / 2,
            ),
            self.timer("lease", config.lease_seconds / 3, self._lease.renew),
        ]

    async def finish(self) -> None:
        """Sagas stay stored; who has the lease next goes on with them."""
        await self._lease.release()

    # ------------------------------------------------------------ what is heard
    async def _on_snapshots(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            match delivery.message:
                case Inventory() as message:
                    if self._inventory.take(message) is not None:
                        self._note_inventory()
                case Capacity() as message:
                    self._capacity.take(message)
                case Demand() as message:
                    self._demand.take(message)
                case Usage() as message:
                    self._usage.take(message)
            await delivery.ack()

    def _live(self) -> list[LiveAttempt] | None:
        edition = self._inventory.fresh(self.cluster, self.clock.now())
        if edition is None:
            return None
        return [
            attempt
            for part in edition.parts
            for attempt in part.attempts
            if attempt.state is not AttemptState.ENDED and attempt.key not in self._over
        ]

    def _note_inventory(self) -> None:
        """Starts that were not heard of, and sources that are no longer there."""
        now = self.clock.now()
        live = self._live()
        if live is None:
            return
        for attempt in live:
            if attempt.started_at is not None:
                self._note_start(attempt.key, attempt.started_at)
        edition = self._inventory.fresh(self.cluster, now)
        assert edition is not None
        # Those that have ended count as there: their events tell the rest.
        there = {
            (attempt.key, attempt.pod_uid) for part in edition.parts for attempt in part.attempts
        }
        missing: dict[str, float] = {}
        for stored in self._sagas.values():
            for move in stored.saga.moves:
                key = AttemptKey(move.job_id, move.index, move.attempt)
                if (key, move.pod_uid) not in there and not isinstance(
                    move.state, Moved | Restoring | Stayed | Gone
                ):
                    missing[move.migration_id] = self._missing.get(move.migration_id, now)
        self._missing = missing

    def _note_start(self, key: AttemptKey, at: float) -> None:
        self._since.setdefault(key, at)
        while len(self._since) > self.config.most_jobs * self.config.most_lives:
            self._since.popitem(last=False)

    async def _on_events(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            for event in self._events_of(delivery.message):
                await self._apply_to_all(event)
            await delivery.ack()

    def _events_of(self, message: Message) -> list[Event]:
        match message:
            case AttemptEvents(events=events):
                return [found for event in events if (found := self._attempt_event(event))]
            case MigrationEvents(migration_id=migration_id, step=step, reason=reason):
                return [Answered(migration_id, step, reason)]
            case VacateEvents(vacate_id=vacate_id, step=step, reason=reason):
                return [NodeAnswered(vacate_id, step, reason)]
            case NodeEvents(events=events):
                return [
                    NodeClosed(event.node, event.state in (NodeState.RELEASED, NodeState.LOST))
                    for event in events
                    if event.state
                    in (
                        NodeState.RELEASED,
                        NodeState.LOST,
                        NodeState.INTERRUPTED,
                        NodeState.CORDONED,
                    )
                ]
        return []

    def _attempt_event(self, event: AttemptEvent) -> Event | None:
        if event.state is AttemptState.RUNNING:
            self._note_start(event.key, event.at)
            return AttemptRuns(event.job_id, event.index, event.attempt, event.at)
        if event.state is not AttemptState.ENDED or event.reason is None:
            return None
        self._note_end(event)
        return AttemptEnded(
            event.job_id,
            event.index,
            event.attempt,
            event.pod_uid,
            event.reason,
            event.at,
            event.migration_id,
        )

    def _note_end(self, event: AttemptEvent) -> None:
        """Learn the run time of a task that completed."""
        self._over[event.key] = None
        while len(self._over) > _MOST_OVER:
            self._over.popitem(last=False)
        since = self._since.pop(event.key, None)
        if event.reason is not Reason.COMPLETED or since is None:
            return
        task = (event.job_id, event.index)
        past = self._past.get(task, Past(0, 0.0))
        lives = self._ended.setdefault(event.job_id, deque(maxlen=self.config.most_lives))
        lives.append(max(0.0, event.at - since) + past.progress_seconds)
        self._ended.move_to_end(event.job_id)
        while len(self._ended) > self.config.most_jobs:
            self._ended.popitem(last=False)

    # ------------------------------------------------------------ sagas
    async def _apply_to_all(self, event: Event) -> None:
        for vacate_id in sorted(self._sagas):
            stored = self._sagas.get(vacate_id)
            if stored is not None and policy.concerns(stored.saga, event):
                await self._apply(vacate_id, event)

    async def _apply(self, vacate_id: str, event: Event) -> None:
        """One event on one saga: decide, store, then send."""
        async with self._turn:
            stored = self._sagas.get(vacate_id)
            if stored is None:
                return
            before = stored.saga
            after, commands = policy.step(before, event, self.clock.now(), self.config)
            if after == before:
                return
            await self._save(stored, after)
            self._tell(before, after)
            if after.is_closed:
                await self._close(stored)
                return
            await self._send(stored, commands)
            if any(isinstance(move.state, Saving) for move in after.moves):
                self._look_now()

    async def _save(self, stored: _Stored, saga: VacateSaga) -> None:
        """Write the saga; in memory it changes only when that is certain.

        Raises:
            ConflictError: the document holds something else (a write of ours whose answer was
                lost); it is taken over, and whoever called decides again on it.
        """
        key = _SAGAS + saga.vacate_id.lower()
        try:
            stored.version = await self._state.save(key, msgspec.json.encode(saga), stored.version)
        except ConflictError:
            document = await self._state.load(key)
            if document is None:
                raise PermanentError(
                    Reason.STALE, "a saga under way was deleted", key=key
                ) from None
            stored.saga = msgspec.json.decode(document.body, type=VacateSaga)
            stored.version = document.version
            stored.sent_at = float("-inf")
            raise
        stored.saga = saga

    async def _send(self, stored: _Stored, commands: Sequence[Command]) -> None:
        """Publish; what does not get through is sent again by the tick."""
        stored.sent_at = self.clock.now()
        for command in commands:
            try:
                await self.bus.publish(command, cluster=self.cluster)
            except (TransientError, PermanentError) as error:
                stored.sent_at = float("-inf")
                self.log.warning("command.unsent", command=type(command).__name__, error=str(error))

    async def _close(self, stored: _Stored) -> None:
        """Remember its moves, then forget it; a fault or crash in between lets it be repeated."""
        saga = stored.saga
        if saga.vacate_id not in self._closed:
            past = policy.remembered(saga, self._past, self.clock.now(), self.config)
            closed = [*self._closed, saga.vacate_id][-_MOST_CLOSED:]
            tasks = [(job, index, one) for (job, index), one in past.items()]
            body = msgspec.json.encode(_History(tasks=tasks, closed=closed))
            self._past_version = await self._write_history(body)
            self._past, self._closed = past, closed
        await self._state.delete(_SAGAS + saga.vacate_id.lower(), stored.version)
        del self._sagas[saga.vacate_id]
        for move in saga.moves:
            self._missing.pop(move.migration_id, None)
            self._looks.pop(move.migration_id, None)

    async def _write_history(self, body: bytes) -> int:
        try:
            return await self._state.save(_HISTORY, body, self._past_version)
        except ConflictError:
            # Only we write it (the lease says so): an earlier write of ours whose answer was lost.
            document = await self._state.load(_HISTORY)
            self._past_version = document.version if document is not None else 0
            return await self._state.save(_HISTORY, body, self._past_version)

    def _tell(self, before: VacateSaga, after: VacateSaga) -> None:
        """Log and count what changed."""
        for old, new in zip(before.moves, after.moves, strict=True):
            if type(old.state) is type(new.state):
                continue
            named = {
                "migration_id": new.migration_id,
                "job_id": new.job_id,
                "index": new.index,
                "attempt": new.attempt,
            }
            state = new.state
            if isinstance(state, Moved):
                self.counts["moved"] += 1
                self._learn_costs(new.job_id, state)
                self.log.info("move.done", **named, target=new.target_node)
            elif isinstance(state, Stayed | Gone):
                self.counts[f"failed:{state.step}:{state.reason}"] += 1
                self.log.info(
                    "move.failed",
                    **named,
                    step=state.step,
                    reason=str(state.reason),
                    is_gone=isinstance(state, Gone),
                )
        if after.is_closed and not before.is_closed:
            assert not isinstance(after.phase, Gathering)
            reason = getattr(after.phase, "reason", None)
            self.counts["released" if reason is None else f"kept:{reason}"] += 1
            self.log.info(
                "saga.closed",
                vacate_id=after.vacate_id,
                node=after.node,
                reason=str(reason) if reason is not None else "released",
                seconds=round(self.clock.now() - after.started_at, 3),
            )

    def _learn_costs(self, job_id: str, moved: Moved) -> None:
        known = self._costs.get(job_id)
        save, resume = moved.save_seconds, moved.resume_seconds
        if known is not None:
            save = known.save_seconds + _SMOOTH * (save - known.save_seconds)
            resume = known.resume_seconds + _SMOOTH * (resume - known.resume_seconds)
        self._costs[job_id] = MoveCosts(save_seconds=save, resume_seconds=resume)
        self._costs.move_to_end(job_id)
        while len(self._costs) > self.config.most_jobs:
            self._costs.popitem(last=False)

    # ------------------------------------------------------------ time
    async def _tick(self) -> None:
        """Limits, commands without answers, attempts that vanished."""
        now = self.clock.now()
        vanished = [
            migration_id
            for migration_id, since in sorted(self._missing.items())
            if now - since >= self.config.vanish_seconds
        ]
        for migration_id in vanished:
            del self._missing[migration_id]
            await self._apply_to_all(AttemptVanished(migration_id))
        await self._apply_to_all(TimePassed())
        await self._check_sources()
        await self._settle_doubts()
        async with self._turn:
            for vacate_id in sorted(self._sagas):
                stored = self._sagas[vacate_id]
                if stored.saga.is_closed:  # stored as closed, but a fault kept it from ending
                    await self._close(stored)
                elif now - stored.sent_at >= self.config.resend_seconds:
                    await self._send(stored, policy.standing(stored.saga, now))

    async def _settle_doubts(self) -> None:
        """New sagas whose write got no answer: they exist if they are stored."""
        async with self._turn:  # a write that is still under way is in no doubt yet
            for vacate_id in list(self._doubtful):
                document = await self._state.load(_SAGAS + vacate_id.lower())
                saga = self._doubtful.pop(vacate_id)
                if document is not None:
                    self._sagas[vacate_id] = _Stored(saga, document.version)

    async def _check_sources(self) -> None:
        """A source that took other attempts in the meantime can't be emptied."""
        filling = [
            vacate_id
            for vacate_id in sorted(self._sagas)
            if isinstance(self._sagas[vacate_id].saga.phase, Gathering | Cordoning)
        ]
        live = self._live() if filling else None
        if live is None:
            return
        for vacate_id in filling:
            stored = self._sagas.get(vacate_id)
            if stored is None:
                continue
            saga = stored.saga
            ours = {(move.job_id, move.index) for move in saga.moves}
            if any(
                attempt.node == saga.node and (attempt.job_id, attempt.index) not in ours
                for attempt in live
            ):
                await self._apply(vacate_id, NodeFilled(vacate_id))

    # ------------------------------------------------------------ manifests
    async def _look_for_manifests(self) -> None:
        """Look for each manifest that is awaited, with pauses that grow."""
        now = self.clock.now()
        saving = [
            move
            for vacate_id in sorted(self._sagas)
            for move in self._sagas[vacate_id].saga.moves
            if isinstance(move.state, Saving)
        ]
        for move in saving:
            first = self.config.look_first_seconds
            look = self._looks.setdefault(move.migration_id, _Look(now, first))
            if now < look.at:
                continue
            try:
                found = await self._manifest(move)
            except TransientError as error:
                self.log.warning("store.away", error=str(error))
                found = None
            look.pause = min(look.pause * _LOOK_GROWTH, self.config.look_most_seconds)
            look.at = self.clock.now() + look.pause
            if found is not None:
                await self._apply_to_all(found)
        if saving:
            self._look_now.after(self.config.look_first_seconds)

    async def _manifest(self, move: TaskMove) -> ManifestVerified | None:
        """The manifest that this migration asked for, if all that it names is in the store."""
        prefix = manifests_prefix(move.job_id, move.index)
        keys: list[str] = []
        while True:
            page = await self._store.list(prefix, limit=_PAGE, after=keys[-1] if keys else "")
            keys += [info.key for info in page]
            if len(page) < _PAGE:
                break
        for key in reversed(keys[-_NEWEST_MANIFESTS:]):
            try:
                manifest = msgspec.json.decode(await self._store.get(key), type=Manifest)
            except (NotFoundError, msgspec.DecodeError, UnicodeDecodeError):
                continue
            named = (manifest.migration_id, manifest.pod_uid, manifest.attempt)
            if named != (move.migration_id, move.pod_uid, move.attempt):
                continue
            for file in manifest.files:
                info = await self._store.head(file.key)
                if info is None or info.size != file.size:
                    self.log.warning("manifest.damaged", key=key, part=file.key)
                    return None
            return ManifestVerified(
                move.migration_id, key, manifest.progress_seconds, manifest.save_seconds
            )
        return None

    # ------------------------------------------------------------ decisions
    async def _decide(self) -> None:
        now = self.clock.now()
        picture = self._picture(now)
        if picture is None:
            self.counts["held"] += 1
            return
        choice = policy.choose(picture, now, self.config)
        self._tell_choice(choice)
        for emptying in choice.emptying:
            saga = policy.begin(
                emptying,
                self.ids.new(),
                [self.ids.new() for _ in emptying.moves],
                self.cluster,
                now,
                self.config,
            )
            async with self._turn:
                stored = _Stored(saga, 0)
                self._doubtful[saga.vacate_id] = saga
                await self._save(stored, saga)
                del self._doubtful[saga.vacate_id]
                self._sagas[saga.vacate_id] = stored
                self._begun.extend([now] * len(saga.moves))
                await self._send(stored, policy.standing(saga, now))

    def _picture(self, now: float) -> Picture | None:
        """All that a decision reads; None while something is missing or out of date."""
        capacity = self._capacity.fresh(self.cluster, now)
        demand = self._demand.fresh(self.cluster, now)
        attempts = self._live()
        if capacity is None or demand is None or attempts is None:
            return None
        usage = self._usage.fresh(self.cluster, now)
        measured = [one for part in usage.parts for one in part.nodes] if usage else []
        jobs = sorted({attempt.job_id for attempt in attempts})
        sagas = [self._sagas[vacate_id].saga for vacate_id in sorted(self._sagas)]
        sagas += self._doubtful.values()
        return Picture(
            nodes=[node for part in capacity.parts for node in part.nodes],
            groups=[group for part in capacity.parts for group in part.groups],
            attempts=attempts,
            demand=[shape for part in demand.parts for shape in part.shapes],
            sagas=sagas,
            requested_ratios={one.node: one.requested_ratio for one in measured},
            used_ratios={
                one.node: one.used_ratio for one in measured if one.used_ratio is not None
            },
            lives={job: self._lives(job, attempts, now) for job in jobs},
            costs=dict(self._costs),
            past=self._past,
            may_start=self._may_start(sagas, now),
        )

    def _lives(self, job_id: str, attempts: Sequence[LiveAttempt], now: float) -> Lives:
        ages = [
            max(0.0, now - attempt.started_at)
            + self._past.get((job_id, attempt.index), Past(0, 0.0)).progress_seconds
            for attempt in attempts
            if attempt.job_id == job_id and attempt.started_at is not None
        ]
        return Lives(list(self._ended.get(job_id, ())), ages)

    def _may_start(self, sagas: Sequence[VacateSaga], now: float) -> int:
        config = self.config
        while self._begun and now - self._begun[0] >= config.window_seconds:
            self._begun.popleft()
        in_flight = sum(
            isinstance(move.state, Reserving | Reserved | Saving | Ending | Restoring)
            for saga in sagas
            for move in saga.moves
        )
        return max(
            0,
            min(
                config.most_in_flight - in_flight,
                config.most_moves_per_window - len(self._begun),
            ),
        )

    def _tell_choice(self, choice: Choice) -> None:
        for emptying in choice.emptying:
            self.counts["chosen"] += len(emptying.moves)
            for move in emptying.moves:
                self.log.info(
                    "move.chosen",
                    node=emptying.node,
                    attempt=str(move.attempt.key),
                    target=move.target_node,
                    gain=round(emptying.gain, 6),
                )
        for left in choice.left:
            self.counts[f"left:{left.why}"] += 1
            self.log.debug("move.refused", node=left.node, reason=str(left.why), gain=left.gain)
