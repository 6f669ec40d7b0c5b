"""The submitter's shell: deliveries and changes go to the core, what it wants done is performed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from springtide_shared.errors import (
    ConflictError,
    NotFoundError,
    PermanentError,
    Reason,
    SpringtideError,
    TransientError,
)
from springtide_shared.messages.attempts import AttemptEvent, AttemptEvents, Inventory
from springtide_shared.messages.base import Message
from springtide_shared.messages.cluster import Credit, HeldTasks, Pending, Plan
from springtide_shared.messages.migration import (
    Migrate,
    MigrateAction,
    MigrationEvents,
    MigrationStep,
)
from springtide_shared.messages.records import (
    ANNOTATION_CHECKPOINT,
    CheckpointOrder,
    CompletionRecord,
    record_key,
)
from springtide_shared.messages.slices import SliceCancel, SliceRun
from springtide_shared.messages.task import AttemptKey
from springtide_shared.ports.bus import Delivery, MessageBus, Subscription
from springtide_shared.ports.clock import Clock, Ids
from springtide_shared.ports.cluster import ClusterView, PodControl
from springtide_shared.ports.state import Leases, ServiceState
from springtide_shared.ports.store import ObjectStore
from springtide_shared.runtime.lease import LeaseKeeper
from springtide_shared.runtime.service import Loop, Service, SnapshotWriter, Wake, backoff
from springtide_shared.runtime.snapshots import SnapshotShelf
from springtide_submitter.config import SubmitterConfig
from springtide_submitter.core import Core
from springtide_submitter.model import (
    Attempt,
    CancelDocument,
    Deletion,
    DispatchDocument,
    Intent,
    Proof,
    Saga,
    SagaDocument,
    Stage,
    Ticket,
    cancel_text,
    document_key,
)

_DISPATCH = "dispatch"
_PER_PART = 500
"""Entries in one part of a snapshot; a part of 500 attempts has about 150 KiB."""
_ANSWERS_MOST = 4_096
"""Answers to `migrate` that are remembered for doubled commands."""
_IDLE_SECONDS = 15.0
"""Between looks of loops that are woken whenever there is something for them; also the longest
pause after repeated failures."""
_SPARE_SECONDS = 600.0
"""The same for a worker beside another that looks often enough."""


class Submitter(Service):
    """Meters pods into one cluster and says what became of them; see the package's README."""

    name = "submitter"

    def __init__(
        self,
        *,
        cluster: str,
        bus: MessageBus,
        view: ClusterView,
        pods: PodControl,
        state: ServiceState,
        store: ObjectStore,
        leases: Leases,
        clock: Clock,
        ids: Ids,
        config: SubmitterConfig,
    ) -> None:
        super().__init__(bus=bus, clock=clock, ids=ids)
        self.cluster = cluster
        self.config = config
        self.core = Core(cluster, config)
        self.log = self.log.bind(cluster=cluster)
        self._view = view
        self._pods = pods
        self._state = state
        self._store = store
        self._keeper = LeaseKeeper(
            leases, clock, f"submitter.{cluster}", f"submitter-{ids.new()}", config.lease_seconds
        )
        self._snapshots = SnapshotWriter(cluster, 0)
        self._plans: SnapshotShelf[Plan] = SnapshotShelf()
        self._deliveries: dict[Ticket, Delivery] = {}
        self._early: list[tuple[float, Delivery]] = []
        """Slices that came before the first list of pods."""
        self._answers: dict[tuple[str, MigrateAction], MigrationEvents] = {}
        self._dispatch_version = 0
        self._dispatch_saved: DispatchDocument | None = None
        self._version = 0
        self._listed_at = float("-inf")
        self._rooms_at = float("-inf")
        self._began_at = 0.0
        self._is_pacing = False
        self._held_said: list[HeldTasks] | None = None
        self._held_said_at = float("-inf")
        self._wake_tick = Wake()
        self._wake_events = Wake()
        self._wake_news = Wake()
        self._wake_proofs = Wake()
        self._wake_credit = Wake()
        self._wake_creates = [Wake() for _ in range(config.create_concurrency)]
        self._wake_deletes = [Wake() for _ in range(config.create_concurrency)]

    # ================================================================ life
    async def start(self) -> None:
        """Take the lease, read what the last life left, and list the pods if that is possible."""
        self._snapshots = SnapshotWriter(self.cluster, await self._keeper.wait())
        self._began_at = self.clock.now()
        await self._patiently(self._recall)
        failures = 0
        while self.clock.now() - self._began_at < self.config.first_list_seconds:
            try:
                await self._look()
                return
            except TransientError as error:
                failures += 1
                self.log.warning("first_list.failed", error=str(error))
                await self._keeper.renew()
                await asyncio.sleep(backoff(failures, self.ids, base=0.5, most=5.0))

    async def _patiently(self, action: Callable[[], Awaitable[None]]) -> None:
        """Until it succeeds: nothing can be decided without it. The lease is kept meanwhile."""
        failures = 0
        while True:
            try:
                return await action()
            except TransientError as error:
                failures += 1
                self.log.warning("start.waits", error=str(error))
                await asyncio.sleep(
                    backoff(failures, self.ids, most=max(0.1, self.config.lease_seconds / 4))
                )
                await self._keeper.renew()

    async def _recall(self) -> None:
        """Cancels, migrations and settled slices of earlier lives."""
        core = self.core
        for document in await self._state.list("cancel-"):
            core.cancels.add(document.key, msgspec.json.decode(document.body, type=CancelDocument))
        for document in await self._state.list("saga-"):
            saga = msgspec.json.decode(document.body, type=SagaDocument)
            core.add_saga(Saga(saga, document.version))
        if (document_ := await self._state.load(_DISPATCH)) is not None:
            dispatch = msgspec.json.decode(document_.body, type=DispatchDocument)
            core.sequences.epoch = dispatch.epoch
            core.sequences.floor = dispatch.settled_below
            self._dispatch_version = document_.version
            self._dispatch_saved = dispatch

    def loops(self) -> Sequence[tuple[str, Loop]]:
        """See `Service.loops`."""
        config, cluster = self.config, self.cluster
        numbers = range(config.create_concurrency)
        return [
            self.consumer(
                Subscription(
                    queue=f"submitter.{cluster}.slices",
                    types=(SliceRun, SliceCancel),
                    cluster=cluster,
                    prefetch=config.prefetch,
                    single_active=True,
                ),
                self._on_slices,
            ),
            self.consumer(
                Subscription(
                    queue=f"submitter.{cluster}.migrate",
                    types=(Migrate,),
                    cluster=cluster,
                    single_active=True,
                ),
                self._on_migrate,
                batch=20,
            ),
            self.consumer(
                Subscription(
                    queue=f"submitter.{cluster}.plan",
                    types=(Plan,),
                    cluster=cluster,
                    durable=False,
                ),
                self._on_plan,
            ),
            ("watch", self._watch_loop),
            *[self._worker(f"create-{n}", n, self._create, self._wake_creates[n]) for n in numbers],
            *[self._worker(f"delete-{n}", n, self._delete, self._wake_deletes[n]) for n in numbers],
            self.timer(
                "events",
                _IDLE_SECONDS,
                self._publish_events,
                wake=self._wake_events,
                least=config.events_least_seconds,
            ),
            self.timer("news", _IDLE_SECONDS, self._publish_news, wake=self._wake_news),
            self.timer(
                "prove",
                _IDLE_SECONDS,
                self._prove,
                wake=self._wake_proofs,
                longest_backoff=config.watch_wait_seconds,
            ),
            # Nothing that begins between two looks comes due before the next one.
            self.timer(
                "tick",
                max(
                    config.tick_seconds,
                    min(config.hold_seconds, config.pin_limit_seconds, _IDLE_SECONDS * 4) / 4,
                ),
                self._tick,
                wake=self._wake_tick,
            ),
            self.timer(
                "credit",
                config.credit_seconds,
                self._publish_credit,
                wake=self._wake_credit,
                least=config.credit_least_seconds,
            ),
            self.timer("inventory", config.inventory_seconds, self._publish_inventory),
            self.timer("forget", config.cancel_memory_seconds / 24, self._forget_cancels),
            self.timer("lease", config.lease_seconds / 3, self._keeper.renew),
        ]

    def _worker(
        self, name: str, number: int, action: Callable[[], Awaitable[None]], wake: Wake
    ) -> tuple[str, Loop]:
        """One of several that do the same: all are woken for work, one looks by itself as well."""
        idle = _SPARE_SECONDS if number else _IDLE_SECONDS
        return self.timer(name, idle, action, wake=wake, longest_backoff=_IDLE_SECONDS)

    def not_ready(self) -> Sequence[str]:
        """See `Service.not_ready`."""
        return () if self.core.is_listed else ("the pods have not been listed yet",)

    async def finish(self) -> None:
        """Say what is still unsaid, and let another submitter take over at once."""
        for action in (self._publish_events, self._keeper.release):
            try:
                await action()
            except TransientError as error:
                self.log.warning("finish.cut", error=str(error))

    # ================================================================ performing
    async def _perform(self) -> None:
        """Settle what the core has settled and wake whoever has something to do."""
        core = self.core
        while core.settled:
            ticket = core.settled.popleft()
            delivery = self._deliveries.pop(ticket, None)
            if delivery is not None:
                try:
                    await delivery.ack()
                except TransientError as error:
                    # The connection is gone, so the slice comes again; it is known by then.
                    self.log.warning("ack.failed", error=str(error), slice_seq=ticket.seq)
            core.acked(ticket)
        if core.events:
            if core.is_end_unsaid:
                self._wake_events()
            else:
                self._wake_events.after(self.config.events_patience_seconds)
        if core.is_held or self._early:
            self._wake_tick.after(self.config.tick_seconds)
        if core.news or core.closed_sagas:
            self._wake_news()
        if core.is_proof_wanted:
            core.is_proof_wanted = False
            self._wake_proofs()
        if core.is_credit_changed:
            self._wake_credit()
        if not self._is_pacing:  # else who waits for the next token wakes the others
            for wake in self._wake_creates[: core.backlog]:
                wake()
        for wake in self._wake_deletes[: len(core.deletes)]:
            wake()

    async def _create(self) -> None:
        """One of the workers that make pods, as the meter lets them."""
        core = self.core
        while not self._stopping:
            found = core.next_create(self.clock.now(), self.clock.monotonic())
            if found is None:
                return
            if isinstance(found, float):
                if self._is_pacing:
                    return  # one of us waits for the next token already and wakes the others
                self._is_pacing = True
                try:
                    await asyncio.sleep(found)
                finally:
                    self._is_pacing = False
                continue
            for wake in self._wake_creates[: core.backlog]:
                wake()
            await self._create_one(found)
            await self._perform()

    async def _create_one(self, attempt: Attempt) -> None:
        core = self.core
        began = self.clock.monotonic()
        try:
            async with asyncio.timeout(self.config.create_limit_seconds):
                pod = await self._pods.create(core.spec(attempt))
        except (TransientError, TimeoutError) as error:
            retry_after = error.retry_after if isinstance(error, TransientError) else None
            reason = (
                error.reason if isinstance(error, TransientError) else Reason.CLUSTER_UNAVAILABLE
            )
            core.meter.throttled(self.clock.monotonic(), retry_after)
            self.log.warning("pod.not_created", attempt=str(attempt.key), reason=str(reason))
            core.create_failed(attempt, reason, self.clock.now(), is_permanent=False)
        except (PermanentError, ConflictError, NotFoundError) as error:
            self.log.error("pod.refused", attempt=str(attempt.key), error=str(error))
            core.create_failed(attempt, error.reason, self.clock.now(), is_permanent=True)
        else:
            now = self.clock.monotonic()
            core.meter.observe(now - began, now)
            core.created(attempt, pod, self.clock.now(), now)

    async def _delete(self) -> None:
        """One of the workers that remove pods."""
        core = self.core
        while core.deletes and not self._stopping:
            deletion = core.deletes.popleft()
            try:
                async with asyncio.timeout(self.config.create_limit_seconds):
                    there = await self._pods.delete(
                        deletion.name, deletion.uid, deletion.grace_seconds
                    )
            except (TransientError, TimeoutError) as error:
                core.deletes.append(deletion)
                raise _as_transient(error) from error
            if not there and not deletion.is_final:
                self._deleted_already(deletion)
            await self._perform()

    def _deleted_already(self, deletion: Deletion) -> None:
        self.core.deleted_already(deletion, self.clock.now())

    # ================================================================ the cluster
    async def _watch_loop(self) -> None:
        """Read what became of pods, again and again."""
        me = self._me("watch")
        me.stall_limit = max(60.0, 10 * self.config.watch_wait_seconds)
        failures = 0
        while not self._is_ending():
            me.beat = self.clock.monotonic()
            try:
                me.idle = True
                if self.core.is_listed:
                    await asyncio.sleep(self.config.watch_least_seconds)
                    await self._view.wait_for_change(self._version, self.config.watch_wait_seconds)
                me.idle = False
                await self._look()
                failures = 0
            except TransientError as error:
                failures += 1
                self.log.warning("watch.failed", error=str(error))
                me.idle = True
                pause = backoff(failures, self.ids, base=0.5, most=self.config.watch_wait_seconds)
                await asyncio.sleep(pause)

    async def _look(self) -> None:
        """Take in the changes; at times everything afresh, since watches lose events."""
        now = self.clock.now()
        is_full = now - self._listed_at >= self.config.relist_seconds
        changes = await self._view.pods_since(0 if is_full else self._version)
        if changes.reset:
            self._listed_at = now
        self._version = changes.version
        self.core.observe(changes, self.clock.now(), self.clock.monotonic())
        while self._early:
            _, delivery = self._early.pop(0)
            self._judge(delivery, is_redelivered=True)
        await self._perform()

    async def _tick(self) -> None:
        """What time alone brings about."""
        now = self.clock.now()
        self.core.tick(now)
        if not self.core.is_listed:
            self._hand_back_early(now)
        elif (
            self.core.wants_rooms(now, self._began_at)
            and now - self._rooms_at >= self.config.rooms_seconds
        ):
            self._rooms_at = now
            self.core.place_unpinned(await self._view.nodes(), self.clock.now())
        await self._perform()
        self._wake_tick.after(
            max(self.config.tick_seconds, self.core.next_due() - self.clock.now())
        )

    def _hand_back_early(self, now: float) -> None:
        """The cluster does not answer: give fresh slices back; of others, pods may exist."""
        kept: list[tuple[float, Delivery]] = []
        for came_at, delivery in self._early:
            run = delivery.message
            if delivery.redelivered or now - came_at < self.config.hold_seconds:
                kept.append((came_at, delivery))
            elif isinstance(run, SliceRun):
                self._deliveries[self.core.hand_back(run, now)] = delivery
        self._early = kept

    # ================================================================ slices
    async def _on_slices(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            message = delivery.message
            if isinstance(message, SliceCancel):
                await self._on_cancel(delivery, message)
            elif self.core.is_listed:
                self._judge(delivery, is_redelivered=delivery.redelivered)
            else:
                self._early.append((self.clock.now(), delivery))
            await asyncio.sleep(0)  # a slice is up to 500 tasks: let heartbeats through
        await self._perform()

    def _judge(self, delivery: Delivery, *, is_redelivered: bool) -> None:
        run = delivery.message
        assert isinstance(run, SliceRun)
        ticket = self.core.take_slice(run, self.clock.now(), is_redelivered=is_redelivered)
        self._deliveries[ticket] = delivery

    async def _on_cancel(self, delivery: Delivery, cancel: SliceCancel) -> None:
        """Durable, then effect; what fails comes again and holds up no slice behind it."""
        now = self.clock.now()
        key = document_key("cancel", cancel_text(cancel))
        document = CancelDocument(
            job_id=cancel.job_id,
            ranges=cancel.ranges,
            attempts_upto=cancel.attempts_upto,
            expires_at=now + self.config.cancel_memory_seconds,
        )
        try:
            await self._save(key, msgspec.json.encode(document))
        except (TransientError, ConflictError) as error:
            await delivery.retry(backoff(delivery.attempt, self.ids), error.reason, str(error))
            return
        self.core.cancel(key, document, self.clock.now())
        await delivery.ack()

    async def _save(self, key: str, body: bytes) -> int:
        """Write over whatever version there is: this process is the only writer."""
        found = await self._state.load(key)
        return await self._state.save(key, body, found.version if found is not None else 0)

    async def _forget(self, key: str) -> None:
        found = await self._state.load(key)
        if found is not None:
            await self._state.delete(key, found.version)

    async def _forget_cancels(self) -> None:
        for key in self.core.cancels.due(self.clock.now()):
            await self._forget(key)
            self.core.cancels.forget(key)

    # ================================================================ plan
    async def _on_plan(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            message = delivery.message
            if isinstance(message, Plan) and (edition := self._plans.take(message)) is not None:
                now = self.clock.now()
                if now < edition.valid_until:
                    slots = [slot for part in edition.parts for slot in part.slots]
                    self.core.take_plan(slots, edition.valid_until, now)
            await delivery.ack()
        await self._perform()

    # ================================================================ publishing
    async def _publish_events(self) -> None:
        core = self.core
        while core.events:
            count = min(len(core.events), self.config.events_most)
            batch = [core.events[n] for n in range(count)]
            await self._publish(AttemptEvents(cluster=self.cluster, events=batch))
            self._confirm(batch)
            await self._perform()

    def _confirm(self, batch: Sequence[AttemptEvent]) -> None:
        for _ in batch:
            self.core.events.popleft()
        self.core.confirmed(batch)

    async def _publish(self, message: Message) -> None:
        """Publish a fact. That nobody has declared a queue for it yet passes, like an outage."""
        try:
            await self.bus.publish(message, cluster=self.cluster)
        except PermanentError as error:
            raise TransientError(error.reason, error.detail) from error

    async def _publish_news(self) -> None:
        core = self.core
        while core.closed_sagas:
            migration_id = core.closed_sagas[0].document.migration_id
            if migration_id not in core.sagas:  # else it was asked for again meanwhile
                await self._forget(document_key("saga", migration_id))
            core.closed_sagas.popleft()
        while core.news:
            await self._publish(core.news[0])
            core.news.popleft()

    async def _publish_credit(self) -> None:
        config = self.config
        now = self.clock.now()
        valid_until = now + config.credit_seconds * config.snapshot_periods
        if not self.core.is_listed:
            return  # nothing is offered before it is known what is there
        for part in self._snapshots.parts(
            Credit, valid_until, "shapes", self.core.credit(now), per_part=_PER_PART
        ):
            await self.bus.publish(part, cluster=self.cluster)
        held = self.core.pending()
        if held == self._held_said and now - self._held_said_at < config.pending_seconds:
            return
        valid_until = now + config.pending_seconds * config.snapshot_periods
        for part in self._snapshots.parts(Pending, valid_until, "held", held, per_part=_PER_PART):
            await self.bus.publish(part, cluster=self.cluster)
        self._held_said, self._held_said_at = held, now

    async def _publish_inventory(self) -> None:
        """All live attempts. What it says of settled slices is made durable first."""
        if not self.core.is_listed:
            return
        now = self.clock.now()
        sequences = self.core.sequences
        settled_below = sequences.settled_below(now)
        lines = self.core.inventory()
        document = DispatchDocument(epoch=sequences.epoch, settled_below=settled_below)
        if document != self._dispatch_saved:
            self._dispatch_version = await self._save(_DISPATCH, msgspec.json.encode(document))
            self._dispatch_saved = document
        for part in self._snapshots.parts(
            Inventory,
            now + self.config.inventory_seconds * self.config.snapshot_periods,
            "attempts",
            lines,
            per_part=_PER_PART,
            settled_below=settled_below,
            slice_epoch=document.epoch,
        ):
            await self.bus.publish(part, cluster=self.cluster)

    # ================================================================ proofs
    async def _prove(self) -> None:
        """Look up completion records of attempts whose end does not prove itself."""
        for proof in list(self.core.proofs.values()):
            await self._prove_one(proof)
            await self._perform()
        if self.core.proofs:
            self._wake_proofs.after(self.config.watch_wait_seconds)

    async def _prove_one(self, proof: Proof) -> None:
        core, key = self.core, proof.key
        try:
            body = await self._store.get(record_key(key.job_id, key.index, proof.record_attempt))
            record = msgspec.json.decode(body, type=CompletionRecord)
        except TransientError:
            core.proof_delayed(proof, self.clock.now())
        except (NotFoundError, msgspec.DecodeError):
            await self._disprove(proof)
        else:
            own = proof.record_attempt == key.attempt
            if (record.job_id, record.index) == (key.job_id, key.index) and (
                not own or record.pod_uid == proof.pod_uid
            ):
                core.proved(proof, hashlib.sha256(body).hexdigest(), self.clock.now())
            else:
                await self._disprove(proof)

    async def _disprove(self, proof: Proof) -> None:
        """No record: the end means what its cause says; for a vanished pod its node decides."""
        reason = proof.fallback
        if reason is None:
            alive = [node.name for node in await self._view.nodes() if node.ready]
            reason = Reason.LOST if proof.node in alive else Reason.NODE_LOST
        self.core.unproved(proof, reason, self.clock.now())

    # ================================================================ migrations
    async def _on_migrate(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            command = delivery.message
            assert isinstance(command, Migrate)
            answer = self._answers.get((command.migration_id, command.action))
            try:
                if not self.core.is_listed:
                    raise TransientError(Reason.CLUSTER_UNAVAILABLE, "the pods are not listed yet")
                if answer is None:
                    answer = await self._migrate(command)
                    self._remember(command, answer)
                await self._publish(answer)
            except (TransientError, ConflictError) as error:
                await delivery.retry(backoff(delivery.attempt, self.ids), error.reason, str(error))
                continue
            await delivery.ack()
        await self._perform()

    def _remember(self, command: Migrate, answer: MigrationEvents) -> None:
        self._answers[command.migration_id, command.action] = answer
        while len(self._answers) > _ANSWERS_MOST:
            del self._answers[next(iter(self._answers))]

    async def _migrate(self, command: Migrate) -> MigrationEvents:
        if command.action is MigrateAction.CANCEL:
            return await self._cancel_migration(command)
        if (command.migration_id, MigrateAction.CANCEL) in self._answers:
            return self._refuse(command, Reason.STALE, "the migration was cancelled")
        if self.clock.now() >= command.valid_until:
            return self._refuse(command, Reason.EXPIRED, "valid_until has passed")
        attempt = self._source(command)
        if isinstance(attempt, MigrationEvents):
            return attempt
        if command.action is MigrateAction.RESERVE:
            return await self._reserve(command, attempt)
        if command.action is MigrateAction.CHECKPOINT:
            return await self._order_checkpoint(command, attempt)
        return await self._end_source(command, attempt)

    def _source(self, command: Migrate) -> Attempt | MigrationEvents:
        """The running attempt that the command speaks of, or why there is none."""
        key = AttemptKey(command.job_id, command.index, command.attempt)
        attempt = self.core.attempts.get(key)
        if attempt is None:
            return self._refuse(command, Reason.UNKNOWN_ATTEMPT, f"{key} is not in this cluster")
        if attempt.pod_uid != command.pod_uid:
            return self._refuse(command, Reason.STALE, f"the pod of {key} is {attempt.pod_uid}")
        if attempt.stage is not Stage.RUNNING:
            return self._refuse(command, Reason.STALE, f"{key} is {attempt.stage}")
        if attempt.intent is not Intent.NONE and attempt.saga_id != command.migration_id:
            return self._refuse(command, Reason.STALE, f"{key} is being ended ({attempt.intent})")
        return attempt

    async def _reserve(self, command: Migrate, attempt: Attempt) -> MigrationEvents:
        core = self.core
        nodes = {node.name: node for node in await self._view.nodes()}
        node = nodes.get(command.target_node)
        if node is None:
            return self._refuse(command, Reason.UNKNOWN_NODE, f"no node {command.target_node}")
        if command.migration_id in core.sagas:
            return self._answer(command, MigrationStep.RESERVED)
        foreign = await self._view.pods_on(node.name)
        reason = core.room_for(attempt.shape, node, foreign, self.clock.now())
        if reason is not None:
            return self._refuse(command, reason, f"{node.name} takes no {attempt.shape_key}")
        document = SagaDocument(
            migration_id=command.migration_id,
            job_id=command.job_id,
            index=command.index,
            attempt=command.attempt,
            pod_uid=command.pod_uid,
            shape=attempt.shape,
            target_node=node.name,
            valid_until=command.valid_until,
        )
        saga = Saga(document, 0)
        core.add_saga(saga)  # before the write: nobody else may take the place meanwhile
        try:
            await self._save_saga(saga, document)
        except SpringtideError:
            core.close_saga(saga)
            raise
        return self._answer(command, MigrationStep.RESERVED)

    async def _order_checkpoint(self, command: Migrate, attempt: Attempt) -> MigrationEvents:
        order = CheckpointOrder(migration_id=command.migration_id, valid_until=command.valid_until)
        if not await self._annotate(attempt, msgspec.json.encode(order).decode()):
            return self._refuse(command, Reason.UNKNOWN_ATTEMPT, "the pod is gone")
        return self._answer(command, MigrationStep.REQUESTED)

    async def _end_source(self, command: Migrate, attempt: Attempt) -> MigrationEvents:
        core = self.core
        saga = core.sagas.get(command.migration_id)
        if attempt.intent is Intent.MIGRATE:
            return self._answer(command, MigrationStep.ENDING)
        if saga is None:
            # Ending it would cost the task its place: nothing is kept for attempt n+1.
            return self._refuse(command, Reason.EXPIRED, "the reservation is gone")
        document = msgspec.structs.replace(
            saga.document,
            is_ending=True,
            valid_until=max(saga.document.valid_until, command.valid_until),
        )
        await self._save_saga(saga, document)
        if attempt.stage is not Stage.RUNNING or attempt.intent is not Intent.NONE:
            return self._refuse(command, Reason.STALE, f"{attempt.key} ended meanwhile")
        core.end_by_saga(attempt, saga)
        return self._answer(command, MigrationStep.ENDING)

    async def _cancel_migration(self, command: Migrate) -> MigrationEvents:
        core = self.core
        attempt = core.attempts.get(AttemptKey(command.job_id, command.index, command.attempt))
        if attempt is not None and attempt.pod_uid == command.pod_uid:
            await self._annotate(attempt, "")
        saga = core.sagas.get(command.migration_id)
        if saga is not None:
            core.close_saga(saga)
        return self._answer(command, MigrationStep.CANCELLED)

    async def _annotate(self, attempt: Attempt, value: str) -> bool:
        try:
            async with asyncio.timeout(self.config.create_limit_seconds):
                return await self._pods.annotate(
                    attempt.pod_name, attempt.pod_uid, {ANNOTATION_CHECKPOINT: value}
                )
        except TimeoutError as error:
            raise _as_transient(error) from error

    async def _save_saga(self, saga: Saga, document: SagaDocument) -> None:
        key = document_key("saga", document.migration_id)
        saga.version = await self._save(key, msgspec.json.encode(document))
        saga.document = document

    def _answer(self, command: Migrate, step: MigrationStep) -> MigrationEvents:
        return MigrationEvents(
            cluster=self.cluster,
            migration_id=command.migration_id,
            step=step,
            at=self.clock.now(),
        )

    def _refuse(self, command: Migrate, reason: Reason, detail: str) -> MigrationEvents:
        self.log.info(
            "migration.refused",
            migration_id=command.migration_id,
            action=str(command.action),
            reason=str(reason),
            detail=detail,
        )
        return MigrationEvents(
            cluster=self.cluster,
            migration_id=command.migration_id,
            step=MigrationStep.REFUSED,
            reason=reason,
            detail=detail,
            at=self.clock.now(),
        )


def _as_transient(error: TransientError | TimeoutError) -> TransientError:
    if isinstance(error, TransientError):
        return error
    return TransientError(Reason.CLUSTER_UNAVAILABLE, "the cluster did not answer within the limit")
