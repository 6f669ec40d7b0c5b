"""The coordinator: takes jobs in, sends slices out, and holds the truth of every task between.

The shell around `policy`: deliveries and timers come in, decisions are made on the book, and the
`keeper` commits them with the messages they promise. Only then is anything acknowledged or sent.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

import msgspec

from springtide_coordinator import policy
from springtide_coordinator.config import CoordinatorConfig
from springtide_coordinator.keeper import Change, Keeper, Outgoing, SupersededError
from springtide_coordinator.model import Apportioned, Grant, Job
from springtide_shared.errors import (
    InvalidFieldError,
    PermanentError,
    Reason,
    SpringtideError,
    TransientError,
)
from springtide_shared.ledger.attempts import ENDED, STAGE, Facts, facts_of
from springtide_shared.ledger.chunks import Chunk
from springtide_shared.ledger.records import JobBody, Phase, pack_spec
from springtide_shared.messages import (
    AttemptEvent,
    AttemptEvents,
    AttemptState,
    AttemptSummary,
    Capacity,
    Credit,
    Demand,
    HeldTasks,
    Inventory,
    JobAnswer,
    JobCancel,
    JobEvents,
    JobState,
    JobSubmit,
    LiveAttempt,
    Message,
    NodeEvents,
    Pending,
    Pin,
    SliceCancel,
    SliceRun,
    Waiting,
    decode,
    parse_job,
)
from springtide_shared.messages.records import CompletionRecord, record_key
from springtide_shared.ports.bus import Delivery, MessageBus, Subscription, Undecodable
from springtide_shared.ports.clock import Clock, Ids
from springtide_shared.ports.ledger import CHUNK_TASKS, Ledger
from springtide_shared.ports.store import ObjectStore
from springtide_shared.runtime.service import Loop, Service, SnapshotWriter, Wake
from springtide_shared.runtime.snapshots import Edition, SnapshotShelf

JOBS_QUEUE: Final = "coordinator.jobs"
ATTEMPTS_QUEUE: Final = "coordinator.attempts"
NODES_QUEUE: Final = "coordinator.nodes"
DEFAULT_TENANT: Final = "default"

_COMMIT_TASKS: Final = 500
"""About as many tasks change with one commit; then others get their turn."""
_DEMAND_PERIODS: Final = 3
_QUIET_PERIODS: Final = 3
"""Rounds of reconciling without any commit before one is made to show that it can be."""
_MOST_TURNS: Final = 10_000
"""Most changes of state that wait to be told; beyond it the oldest are dropped."""
_LOOKUPS: Final = 500
"""Most completion records looked up for one inventory; the others wait for the next."""

AttemptId = tuple[str, int, int]


def durable_subscriptions() -> tuple[Subscription, ...]:
    """The queues that must outlive the coordinator; a deploy step declares them beforehand.

    Then jobs and facts are kept from the first one on, also while no coordinator has ever run.
    """
    return (
        Subscription(
            queue=JOBS_QUEUE,
            types=(JobSubmit, JobCancel),
            single_active=True,
            raw=True,
            on_undecodable=_answer_undecodable,
        ),
        Subscription(
            queue=ATTEMPTS_QUEUE, types=(AttemptEvents, AttemptSummary), single_active=True
        ),
        Subscription(queue=NODES_QUEUE, types=(NodeEvents,)),
    )


class Coordinator(Service):
    """See the module. `store`: looked into before an attempt is given up for lost."""

    name = "coordinator"

    def __init__(
        self,
        *,
        bus: MessageBus,
        ledger: Ledger,
        clock: Clock,
        ids: Ids,
        config: CoordinatorConfig,
        store: ObjectStore | None = None,
    ) -> None:
        super().__init__(bus=bus, clock=clock, ids=ids)
        self.config = config
        self._ledger = ledger
        self._store = store
        self._rules = config.rules
        self._keeper = Keeper(ledger, clock, self._rules, config.holder)
        self._credits: SnapshotShelf[Credit] = SnapshotShelf()
        self._capacities: SnapshotShelf[Capacity] = SnapshotShelf()
        self._inventories: SnapshotShelf[Inventory] = SnapshotShelf()
        self._pendings: SnapshotShelf[Pending] = SnapshotShelf()
        self._held: dict[str, tuple[float, dict[str, list[HeldTasks]]]] = {}
        """Cluster → until when its word holds, and what it holds back, by job."""
        self._writers: dict[str, SnapshotWriter] = {}
        self._clusters: dict[str, None] = dict.fromkeys(config.clusters)
        self._runs: dict[str, tuple[float, dict[str, tuple[int, float]]]] = {}
        """Cluster → until when its inventory holds, and what runs there by job."""
        self._absent: dict[str, dict[AttemptId, float]] = {}
        self._orphans: dict[str, dict[AttemptId, None]] = {}
        self._news: dict[str, None] = {}
        self._turns: deque[JobEvents] = deque(maxlen=_MOST_TURNS)
        self._wake_dispatch = Wake()
        self._wake_outbox = Wake()
        self._wake_demand = Wake()
        self._wake_news = Wake()
        self._wake_waiting = Wake()

    # ------------------------------------------------------------ life
    async def start(self) -> None:
        """Become the writer, read the ledger, and find what was promised and not yet sent."""
        await self._keeper.begin()
        self.log.info(
            "coordinator.recovered",
            epoch=self._keeper.epoch,
            jobs=len(self._keeper.book.jobs),
            unsent=len(self._keeper.unsent),
        )

    async def serve(self, stop: asyncio.Event, *, drain: float = 10.0) -> None:
        """See `Service.serve`.

        Raises:
            PermanentError: another coordinator has taken over (reason `stale`).
        """
        try:
            await super().serve(stop, drain=drain)
        except SupersededError as error:
            raise _stale(error) from error
        except BaseExceptionGroup as group:
            if (superseded := group.subgroup(SupersededError)) is not None:
                raise _stale(superseded) from group
            raise

    def loops(self) -> Sequence[tuple[str, Loop]]:
        """What the coordinator does."""
        config = self.config
        jobs, attempts, nodes = durable_subscriptions()
        return [
            self.consumer(jobs, self._on_jobs, batch=50),
            self.consumer(
                attempts, self._on_attempts, batch=50, least=config.attempts_least_seconds
            ),
            self.consumer(nodes, self._on_nodes),
            self.consumer(
                Subscription(
                    queue="coordinator.snapshots",
                    types=(Credit, Capacity, Inventory, Pending),
                    durable=False,
                    max_length=5_000,
                ),
                self._on_snapshots,
            ),
            self.timer(
                "dispatch",
                config.dispatch_seconds,
                self._dispatch,
                wake=self._wake_dispatch,
                least=config.dispatch_least_seconds,
            ),
            self.timer("outbox", config.reconcile_seconds, self._send, wake=self._wake_outbox),
            self.timer(
                "demand",
                config.demand_seconds,
                self._publish_demand,
                wake=self._wake_demand,
                least=config.demand_least_seconds,
            ),
            self.timer(
                "job-events",
                max(30.0, config.job_events_seconds),
                self._publish_news,
                wake=self._wake_news,
                least=config.job_events_seconds,
            ),
            self.timer(
                "waiting",
                config.demand_seconds,
                self._note_waiting,
                wake=self._wake_waiting,
                least=config.job_events_seconds,
            ),
            self.timer("reconcile", config.reconcile_seconds, self._reconcile),
        ]

    async def finish(self) -> None:
        """Send what is promised and tidy up, if the broker and the ledger still answer."""
        try:
            await self._send()
            async with self._keeper.change() as change:
                await self._keeper.commit(change)
        except TransientError as error:
            self.log.info("outbox.left", unsent=len(self._keeper.unsent), error=str(error))

    def peek(self, job_id: str) -> Job | None:
        """A job as the coordinator sees it now, for tests and figures; not to be changed."""
        return self._keeper.book.jobs.get(job_id)

    # ------------------------------------------------------------ commits
    async def _commit(self, change: Change) -> None:
        """Make it durable; then wake what follows from it and tell whoever listens."""
        for job in change.jobs.values():
            job.body.waiting = self._waiting_of(job)
        await self._keeper.commit(change)
        if change.outgoing:
            self._wake_outbox()
        for job_id in change.jobs:
            self._news[job_id] = None
        if change.jobs:
            self._wake_news()
        for job in change.turned.values():
            self.log.info("job.turned", job=job.job_id, state=job.state.value)
            if not job.is_tombstone:
                self._turns.append(self._job_events(job))
                self._wake_outbox()  # not here: a slow broker must not hold up the book

    async def _tell(self, message: Message, cluster: str = "") -> None:
        """Publish what may be lost: the next one says the same or better."""
        try:
            await self.bus.publish(message, cluster=cluster)
        except (TransientError, PermanentError) as error:
            self.log.warning("message.dropped", topic=message.topic, error=str(error))

    # ------------------------------------------------------------ intake
    async def _on_jobs(self, deliveries: Sequence[Delivery]) -> None:
        refused: list[tuple[Delivery, PermanentError]] = []
        async with self._keeper.change() as change:
            for delivery in deliveries:
                try:
                    if delivery.type is JobSubmit:
                        answer = await self._submit(change, delivery)
                    else:
                        answer = await self._cancel(change, delivery)
                except PermanentError as error:
                    refused.append((delivery, error))
                    answer = _refusal(delivery.body, error)
                    self.log.info("job.refused", job=answer.job_id, reason=error.reason.value)
                if delivery.reply_to:
                    change.send(
                        answer,
                        to=delivery.reply_to,
                        correlation_id=delivery.correlation_id or delivery.message_id,
                    )
                await asyncio.sleep(0)
            await self._commit(change)
        for delivery, refusal in refused:
            await delivery.dead_letter(refusal.reason, refusal.detail)
        for delivery in deliveries:
            await delivery.ack()  # of no effect on those just parked
        self._wake_dispatch()
        self._wake_demand()

    async def _submit(self, change: Change, delivery: Delivery) -> JobAnswer:
        _, spec = parse_job(delivery.body)
        tenant = delivery.tenant or DEFAULT_TENANT
        job = await self._keeper.find(spec.id)
        now = self.clock.now()
        if job is None:
            packed = pack_spec(spec)
            job = Job(
                job_id=spec.id,
                tenant=tenant,
                state=JobState.ACCEPTED,
                created_at=now,
                version=0,
                spec=spec,
                packed_spec=packed,
                body=JobBody(size=spec.size),
            )
            self._keeper.book.add(job)
            change.turn(job)
            return JobAnswer(job_id=spec.id, accepted=True)
        if job.tenant != tenant or not (job.is_tombstone or job.spec == spec):
            raise InvalidFieldError(
                "id",
                spec.id,
                "a different job has this id; make a fresh one for each job",
                Reason.DUPLICATE_ID,
            )
        if job.is_tombstone:
            job.bring_spec(spec, pack_spec(spec))
            job.cancel_fresh()
            job.body.ended_at = job.final_at = now
            self._keeper.book.add(job)
            change.turn(job)
        if job.state is JobState.CANCELLED:
            return JobAnswer(
                job_id=spec.id, accepted=True, reason=Reason.CANCELLED, detail="it was cancelled"
            )
        return JobAnswer(job_id=spec.id, accepted=True)

    async def _cancel(self, change: Change, delivery: Delivery) -> JobAnswer:
        message = decode(JobCancel, delivery.body)
        tenant = delivery.tenant or DEFAULT_TENANT
        job = await self._keeper.find(message.id)
        if job is None:
            now = self.clock.now()
            job = Job(
                job_id=message.id,
                tenant=tenant,
                state=JobState.CANCELLED,
                created_at=now,
                version=0,
                spec=None,
                packed_spec=b"",
                body=JobBody(size=0, ended_at=now),
            )
            job.final_at = now
            self._keeper.book.add(job)
            change.turn(job)
        elif job.tenant != tenant:
            raise InvalidFieldError("id", message.id, "name a job of your own", Reason.UNKNOWN_JOB)
        elif job.state in (JobState.ACCEPTED, JobState.RUNNING):
            job.state = JobState.CANCELLING
            job.cancel_fresh()
            change.turn(job)
            self._send_cancels(change, job)
        return JobAnswer(job_id=message.id, accepted=True)

    def _send_cancels(self, change: Change, job: Job) -> None:
        job.cancel_sent_at = self.clock.monotonic()
        for cluster in sorted(job.live):
            change.send(
                SliceCancel(cluster=cluster, epoch=self._keeper.epoch, job_id=job.job_id),
                cluster=cluster,
            )

    # ------------------------------------------------------------ attempts
    async def _on_attempts(self, deliveries: Sequence[Delivery]) -> None:
        """In portions, each one commit, so that others get their turn at the book in between."""
        left = list(deliveries)
        while left:
            handled: list[Delivery] = []
            size = 0
            async with self._keeper.change() as change:
                while left and size < _COMMIT_TASKS:
                    delivery = left.pop(0)
                    handled.append(delivery)
                    message = delivery.message
                    if isinstance(message, AttemptEvents):
                        size += len(message.events)
                        self._clusters.setdefault(message.cluster)
                        await self._take_events(change, message.cluster, message.events)
                    elif isinstance(message, AttemptSummary):
                        size += len(message.summaries)
                        self._take_summaries(change, message, is_repeated=delivery.redelivered)
                    await asyncio.sleep(0)
                self._dispatch_pinned(change)
                # Freed places are filled in the same commit.
                given = self._fill(change, self._plan(), _COMMIT_TASKS)
                await self._commit(change)
            if given:
                self._wake_demand.after(self.config.demand_seconds / 2)
            for delivery in handled:
                await delivery.ack()
            self._wake_dispatch()

    async def _take_events(
        self, change: Change, cluster: str, events: Sequence[AttemptEvent]
    ) -> None:
        book = self._keeper.book
        now = self.clock.now()
        superseded: dict[tuple[str, str, int], list[int]] = {}
        for event in events:
            job = book.jobs.get(event.job_id)
            if job is None or job.state.is_final or event.index >= job.body.next_index:
                continue
            seen = facts_of(event)
            if event.index not in job.tasks:
                await self._unfold_failed(job, event.index, seen)
            record = job.tasks.get(event.index)
            if (
                record is not None
                and event.attempt == record.attempt
                and record.cluster not in ("", cluster)
            ):
                continue  # of a cluster that was never given this attempt
            newer = "" if record is None else record.cluster
            taken = policy.take(job, event.index, event.attempt, seen, now)
            if taken is policy.Taken.NOTHING_NEW:
                continue
            change.touch(job)
            if taken is policy.Taken.STALE:
                job.body.stale += 1
                self.log.warning(
                    "success.refused",
                    job=event.job_id,
                    index=event.index,
                    attempt=event.attempt,
                    reason=Reason.STALE.value,
                )
            elif taken is policy.Taken.SUPERSEDES and record is not None:
                key = (newer, event.job_id, record.attempt)
                superseded.setdefault(key, []).append(event.index)
        for (where, job_id, attempt), indices in superseded.items():
            self._end_attempts(change, where, job_id, attempt, indices)

    def _end_attempts(
        self, change: Change, cluster: str, job_id: str, upto: int, indices: Sequence[int]
    ) -> None:
        """Have a cluster end those tasks' attempts up to a number: nobody waits for them."""
        change.send(
            SliceCancel(
                cluster=cluster,
                epoch=self._keeper.epoch,
                job_id=job_id,
                ranges=policy.ranges_of(sorted(indices)),
                attempts_upto=upto,
            ),
            cluster=cluster,
        )

    async def _unfold_failed(self, job: Job, index: int, seen: Facts) -> None:
        """A late success of a task that was given up and folded: give it back its row."""
        is_success = seen.stage == ENDED and seen.reason == Reason.COMPLETED
        if not is_success or job.folded_phase(index) is not Phase.FAILED:
            return
        number = index // CHUNK_TASKS
        for row in await self._ledger.chunks(job.job_id, number, number):
            record = Chunk.unpack(number, row.body).get(index)
            if record is not None:
                job.unfold(index, record)

    def _take_summaries(
        self, change: Change, message: AttemptSummary, *, is_repeated: bool
    ) -> None:
        book = self._keeper.book
        for figures in message.summaries:
            job = book.jobs.get(figures.job_id)
            if job is None or job.is_tombstone or figures.index >= job.body.next_index:
                continue
            record = job.tasks.get(figures.index)
            if record is None:
                # Folded: which attempts are in the sum is forgotten; only a first delivery counts.
                if is_repeated:
                    continue
            else:
                if figures.attempt <= record.summed:
                    continue
                record.summed = figures.attempt
                if figures.attempt == record.attempt:
                    record.cpu_seconds = figures.cpu_seconds
                job.dirty[figures.index] = None
            job.body.cpu_seconds += figures.cpu_seconds
            job.body.wall_seconds += figures.wall_seconds
            job.body.summaries += 1
            job.body.measured += policy.ends_task(record, figures.attempt)
            change.touch(job)

    async def _on_nodes(self, deliveries: Sequence[Delivery]) -> None:
        """Nodes are the scaler's; here their coming and going only wakes what depends on them."""
        for delivery in deliveries:
            if isinstance(message := delivery.message, NodeEvents):
                self._clusters.setdefault(message.cluster)
            await delivery.ack()
        self._wake_demand()

    # ------------------------------------------------------------ dispatch
    async def _dispatch(self) -> None:
        """Dispatch until nothing fits, one commit at a time; each plan sees who came meanwhile."""
        await self._drain_cancelled()
        while grants := self._plan():
            async with self._keeper.change() as change:
                given = self._fill(change, grants, _COMMIT_TASKS)
                await self._commit(change)
            # What was backlog runs now: the total, which nodes are bought for, is the same.
            self._wake_demand.after(self.config.demand_seconds / 2)
            if not given:  # the book has moved on since the plan was made
                return
            await asyncio.sleep(0)

    def _is_queued(self) -> bool:
        """Whether any task waits for a place."""
        return any(
            job.body.queued and job.state in (JobState.ACCEPTED, JobState.RUNNING)
            for job in self._keeper.book.jobs.values()
        )

    def _plan(self) -> list[Grant]:
        if not self._is_queued():
            return []
        book = self._keeper.book
        now = self.clock.now()
        rooms, offered = policy.rooms_of(self._credits.fresh_parts(now), book.live)
        if not rooms:
            return []
        candidates, parallel = policy.candidates_of(book.jobs.values(), now)
        totals = policy.totals_of(self._capacities.fresh_parts(now), offered, book.shapes)
        return policy.plan_dispatch(candidates, rooms, book.usage, totals, parallel)

    def _fill(self, change: Change, grants: Sequence[Grant], most: int) -> int:
        """Turn up to `most` tasks of the grants into slices; returns how many."""
        given = 0
        for grant in grants:
            given += self._give(change, grant, most - given)
            if given >= most:
                break
        return given

    def _give(self, change: Change, grant: Grant, most: int) -> int:
        """Turn up to `most` tasks of a grant into slices; returns how many.

        The book may have moved on since it was planned.
        """
        job = self._keeper.book.jobs.get(grant.job_id)
        if job is None or job.state not in (JobState.ACCEPTED, JobState.RUNNING):
            return 0
        count = min(grant.count, job.parallel_room, most)
        groups, fresh = policy.pick_tasks(job, grant.level, count)
        now = self.clock.now()
        for attempt, indices in groups:
            job.dispatch_again(indices, cluster=grant.cluster, now=now)
            self._slice(change, job, indices, attempt + 1, grant.cluster, grant.level)
        if fresh:
            indices = job.dispatch_fresh(fresh, cluster=grant.cluster, now=now)
            self._slice(change, job, indices, 1, grant.cluster, grant.level)
        given = fresh + sum(len(indices) for _, indices in groups)
        if given:
            self._set_running(change, job)
        return given

    def _dispatch_pinned(self, change: Change) -> None:
        """Migrated tasks go on at once, where their place is kept; it is theirs without credit."""
        now = self.clock.now()
        for job in list(change.jobs.values()):
            if job.state is not JobState.RUNNING:
                continue
            for index in sorted(job.pinned):
                record = job.tasks[index]
                pin = Pin(migration_id=record.migration_id, node=record.pin_node)
                job.dispatch_again([index], cluster=record.cluster, now=now)
                self._slice(change, job, [index], record.attempt, record.cluster, record.level, pin)

    def _set_running(self, change: Change, job: Job) -> None:
        if job.state is JobState.ACCEPTED:
            job.state = JobState.RUNNING
            change.turn(job)
        else:
            change.touch(job)

    def _slice(
        self,
        change: Change,
        job: Job,
        indices: Sequence[int],
        attempt: int,
        cluster: str,
        level: int,
        pin: Pin | None = None,
    ) -> None:
        items = job.spec.items
        for part in policy.cut_slices(indices, items):
            seq = self._keeper.next_slice(cluster)
            job.stamp(part, self._keeper.epoch, seq)
            change.send(
                SliceRun(
                    cluster=cluster,
                    epoch=self._keeper.epoch,
                    seq=seq,
                    job_id=job.job_id,
                    tenant=job.tenant,
                    template=job.template(level),
                    ranges=policy.ranges_of(part),
                    attempt=attempt,
                    items=None if items is None else [items[index] for index in part],
                    pin=pin,
                ),
                cluster=cluster,
            )

    async def _drain_cancelled(self) -> None:
        """Settle the queued tasks of cancelled jobs, some thousands at a time."""
        cancelled = [
            job_id
            for job_id, job in self._keeper.book.jobs.items()
            if job.state is JobState.CANCELLING and job.levels
        ]
        for job_id in cancelled:
            while True:
                async with self._keeper.change() as change:
                    job = self._keeper.book.jobs.get(job_id)
                    if job is None or job.state is not JobState.CANCELLING or not job.levels:
                        break
                    for index in list(islice(job.queued_indices(), _COMMIT_TASKS)):
                        record = job.tasks[index]
                        record.reason = Reason.CANCELLED.value
                        job.settle(index, record, Phase.CANCELLED)
                    change.touch(job)
                    await self._commit(change)
                await asyncio.sleep(0)

    # ------------------------------------------------------------ outbox
    async def _send(self) -> None:
        """Send what is promised, oldest first; one that fails for now holds up those behind it."""
        keeper = self._keeper
        while self._turns:
            await self._tell(self._turns.popleft())
        while keeper.unsent:
            outgoing = next(iter(keeper.unsent.values()))
            row = outgoing.row
            try:
                await self.bus.publish(
                    outgoing.message,
                    cluster=row.cluster,
                    to=row.to,
                    message_id=row.id,
                    correlation_id=row.correlation_id,
                )
            except PermanentError as error:
                await self._undeliverable(outgoing, error)
            keeper.unsent.pop(row.id, None)
            keeper.sent[row.id] = None

    async def _undeliverable(self, outgoing: Outgoing, error: PermanentError) -> None:
        """Nobody takes it. A slice's tasks go back to the queue; a cancel is repeated in time."""
        message = outgoing.message
        self.log.warning(
            "message.undeliverable",
            topic=message.topic,
            cluster=outgoing.row.cluster,
            error=str(error),
        )
        if not isinstance(message, SliceRun):
            return
        async with self._keeper.change() as change:
            job = self._keeper.book.jobs.get(message.job_id)
            if job is None:
                return
            events = [
                AttemptEvent(
                    job_id=message.job_id,
                    index=index,
                    attempt=message.attempt,
                    state=AttemptState.ENDED,
                    at=self.clock.now(),
                    reason=Reason.CLUSTER_UNREACHABLE,
                )
                for index in message.indices()
            ]
            await self._take_events(change, message.cluster, events)
            self._keeper.sent[outgoing.row.id] = None
            await self._commit(change)

    # ------------------------------------------------------------ snapshots
    async def _on_snapshots(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            message = delivery.message
            if isinstance(message, Credit):
                self._meet(message.cluster)
                if self._credits.take(message) is not None and self._is_queued():
                    self._wake_dispatch()
            elif isinstance(message, Pending):
                self._meet(message.cluster)
                if (pending := self._pendings.take(message)) is not None:
                    self._take_pending(pending)
            elif isinstance(message, Capacity):
                self._meet(message.cluster)
                known = self._capacities.fresh(message.cluster, self.clock.now())
                capacity = self._capacities.take(message)
                if capacity is not None:
                    before = {} if known is None else policy.fitting(known.parts)
                    if policy.fitting(capacity.parts) != before:
                        self._wake_demand()  # there it is found out that a job is stuck
                    self._keeper.largest[message.cluster] = max(
                        (group.memory_bytes for part in capacity.parts for group in part.groups),
                        default=0,
                    )
            elif isinstance(message, Inventory):
                self._meet(message.cluster)
                edition = self._inventories.take(message)
                if edition is not None:
                    running = policy.running_by_job(edition.parts)
                    self._runs[edition.cluster] = (edition.valid_until, running)
                    try:
                        await self._judge(edition)
                    except TransientError as error:
                        self.log.warning("inventory.unused", error=str(error))
            await delivery.ack()

    def _meet(self, cluster: str) -> None:
        if cluster not in self._clusters:
            self._clusters[cluster] = None
            self._wake_demand()

    async def _judge(self, edition: Edition[Inventory]) -> None:
        """Find what is gone without a word, what runs without need, and whose news are late."""
        cluster = edition.cluster
        present: dict[AttemptId, LiveAttempt] = {}
        for part in edition.parts:
            for live in part.attempts:
                present[live.job_id, live.index, live.attempt] = live
            await asyncio.sleep(0)
        newest = edition.parts[0]
        ours = (
            ((job.job_id, index, record.attempt), record.epoch, record.seq)
            for job in self._keeper.book.jobs.values()
            for index, record in job.live.get(cluster, {}).items()
        )
        absent, lost = policy.judge(
            ours,
            present,
            (newest.slice_epoch, newest.settled_below),
            self._absent.get(cluster, {}),
            self.clock.monotonic(),
            self._rules,
        )
        self._absent[cluster] = absent
        events = await self._verdicts(lost[:_LOOKUPS])
        orphans = await self._note_orphans(cluster, present, events)
        if not events and not orphans:
            return
        async with self._keeper.change() as change:
            await self._take_events(change, cluster, events)
            self._dispatch_pinned(change)
            for (job_id, attempt), indices in orphans.items():
                self._end_attempts(change, cluster, job_id, attempt, indices)
            await self._commit(change)
        self._wake_dispatch()

    async def _note_orphans(
        self, cluster: str, present: dict[AttemptId, LiveAttempt], events: list[AttemptEvent]
    ) -> dict[tuple[str, int], list[int]]:
        """Attempts that no task waits for, seen twice in a row (their ends may be on the way).

        Adds to `events` what the inventory knows better than we do.
        """
        before = self._orphans.get(cluster, {})
        now: dict[AttemptId, None] = {}
        found: dict[tuple[str, int], list[int]] = {}
        ended: dict[str, bool] = {}
        for key, live in present.items():
            job_id, index, attempt = key
            job = self._keeper.book.jobs.get(job_id)
            if job is None:
                if job_id not in ended:
                    row = await self._ledger.job(job_id)
                    ended[job_id] = row is not None and row.state.is_final
                if not ended[job_id]:
                    continue  # of no job that this ledger knows: not ours to end
            elif index >= job.body.next_index:
                continue
            else:
                record = job.tasks.get(index)
                if record is not None and attempt > record.attempt:
                    continue  # of a later life than this ledger remembers: not ours to judge
                if record is not None and attempt == record.attempt and record.phase is Phase.LIVE:
                    if policy.is_further(STAGE[live.state], record):
                        events.append(_event_of(live, self.clock.now()))
                    continue
            now[key] = None
            if key in before:
                found.setdefault((job_id, attempt), []).append(index)
        self._orphans[cluster] = now
        return found

    async def _verdicts(self, lost: Sequence[AttemptId]) -> list[AttemptEvent]:
        """What to make of attempts that are gone: a success if their record says so, else lost."""
        events: list[AttemptEvent] = []
        for job_id, index, attempt in lost:
            job = self._keeper.book.jobs.get(job_id)
            record = None if job is None else job.tasks.get(index)
            if record is None or record.attempt != attempt or record.phase is not Phase.LIVE:
                continue
            known = record.facts.known
            pod_uid = "" if known is None else known.pod_uid
            node = "" if known is None else known.node
            digest = await self._look_up(job_id, index, attempt, pod_uid)
            gone = Reason.NODE_LOST if node else Reason.LOST
            reason = Reason.COMPLETED if digest else gone
            self.log.warning(
                "attempt.given_up", job=job_id, index=index, attempt=attempt, reason=reason.value
            )
            events.append(
                AttemptEvent(
                    job_id=job_id,
                    index=index,
                    attempt=attempt,
                    state=AttemptState.ENDED,
                    at=self.clock.now(),
                    pod_uid=pod_uid,
                    node=node,
                    reason=reason,
                    exit_code=0 if digest else None,
                    digest=digest,
                )
            )
        return events

    async def _look_up(self, job_id: str, index: int, attempt: int, pod_uid: str) -> str:
        """Digest of an attempt's completion record; empty if there is no valid one."""
        if self._store is None:
            return ""
        key = record_key(job_id, index, attempt)
        if await self._store.head(key) is None:
            return ""
        body = await self._store.get(key)
        try:
            found = msgspec.json.decode(body, type=CompletionRecord)
        except msgspec.DecodeError:
            return ""
        is_it = (
            (found.job_id, found.index, found.attempt) == (job_id, index, attempt)
            and found.exit_code == 0
            and pod_uid in ("", found.pod_uid)
        )
        return hashlib.sha256(body).hexdigest() if is_it else ""

    # ------------------------------------------------------------ demand
    async def _publish_demand(self) -> None:
        now = self.clock.now()
        book = self._keeper.book
        backlogs = policy.backlogs_of(book.jobs.values())
        # A cluster that a job names wants demand although nothing was heard of it: that starts it.
        named = {name: None for backlog in backlogs for name in backlog.clusters}
        clusters = sorted(self._clusters | named)
        capacity = policy.most_places(self._capacities.fresh_parts(now))
        shares = policy.apportion(backlogs, clusters, capacity, book.live)
        self._note_stuck(shares)
        expected = policy.expected_runs(book.jobs.values(), self._elapsed)
        for cluster in clusters:
            entries = policy.demand_of(
                cluster, backlogs, shares.shares, book.live, book.shapes, expected
            )
            writer = self._writers.get(cluster)
            if writer is None:
                writer = self._writers[cluster] = SnapshotWriter(cluster, self._keeper.epoch)
            valid_until = now + _DEMAND_PERIODS * self.config.demand_seconds
            for part in writer.parts(Demand, valid_until, "shapes", entries):
                await self._tell(part, cluster)

    def _elapsed(self, job: Job) -> float | None:
        """How long a job's running attempts have run; None: a cluster has not said lately."""
        now = self.clock.now()
        elapsed = 0.0
        for cluster in job.live:
            valid_until, running = self._runs.get(cluster, (0.0, {}))
            if now >= valid_until:
                return None
            count, began = running.get(job.job_id, (0, 0.0))
            elapsed += max(0.0, count * now - began)
        return elapsed

    def _note_stuck(self, shares: Apportioned) -> None:
        """Remember of each job which of its shapes none of its clusters can hold."""
        for job in self._keeper.book.jobs.values():
            if job.stuck or shares.unschedulable:
                stuck = policy.stuck_shapes(job, shares.unschedulable)
                if stuck != job.stuck:
                    job.stuck = stuck
                    self._wake_waiting()
                    if stuck:
                        self.log.warning("job.unschedulable", job=job.job_id)

    # ------------------------------------------------------------ why tasks wait
    def _take_pending(self, edition: Edition[Pending]) -> None:
        held = policy.held_by_job(edition.parts)
        _, before = self._held.get(edition.cluster, (0.0, {}))
        self._held[edition.cluster] = (edition.valid_until, held)
        if not policy.same_causes(before, held):
            self._wake_waiting()

    def _waiting_of(self, job: Job) -> list[Waiting]:
        now = self.clock.now()
        held = [
            item
            for valid_until, by_job in self._held.values()
            if now < valid_until
            for item in by_job.get(job.job_id, ())
        ]
        return policy.waiting_of(job, held)

    async def _note_waiting(self) -> None:
        """Write down why tasks wait, of jobs for which that has changed without anything else."""
        jobs = self._keeper.book.jobs
        others = [job_id for job_id, job in jobs.items() if self._waits_otherwise(job)]
        for start in range(0, len(others), _COMMIT_TASKS):
            async with self._keeper.change() as change:
                for job_id in others[start : start + _COMMIT_TASKS]:
                    job = self._keeper.book.jobs.get(job_id)
                    if job is not None and self._waits_otherwise(job):
                        change.touch(job)
                if change.jobs:
                    await self._commit(change)
            await asyncio.sleep(0)

    def _waits_otherwise(self, job: Job) -> bool:
        return not job.state.is_final and self._waiting_of(job) != job.body.waiting

    # ------------------------------------------------------------ progress, reconcile
    def _job_events(self, job: Job) -> JobEvents:
        return JobEvents(
            job_id=job.job_id,
            tenant=job.tenant,
            state=job.state,
            counts=job.body.counts(),
            at=self.clock.now(),
            reason=Reason.UNSCHEDULABLE if job.stuck else None,
            waiting=job.body.waiting,
        )

    async def _publish_news(self) -> None:
        news, self._news = self._news, {}
        for job_id in news:
            job = self._keeper.book.jobs.get(job_id)
            if job is not None and not job.state.is_final:
                await self._tell(self._job_events(job))

    async def _reconcile(self) -> None:
        """Repeat cancels that are due, forget jobs that ended long ago, tidy the outbox.

        After some quiet periods the commit is made even if it is empty: it shows whether we still
        are the only writer.
        """
        now = self.clock.monotonic()
        async with self._keeper.change() as change:
            book = self._keeper.book
            for job in list(book.jobs.values()):
                if job.state is JobState.CANCELLING and job.live:
                    due = job.cancel_sent_at
                    if due is None or now - due >= self.config.cancel_repeat_seconds:
                        self._send_cancels(change, job)
                elif (
                    job.final_at is not None
                    and self.clock.now() - job.final_at >= self.config.linger_seconds
                ):
                    del book.jobs[job.job_id]
            quiet = now - self._keeper.committed_at
            if change.outgoing or quiet >= _QUIET_PERIODS * self.config.reconcile_seconds:
                await self._commit(change)
        if self._keeper.unsent:
            self._wake_outbox()


def _stale(error: BaseException) -> PermanentError:
    return PermanentError(Reason.STALE, f"another coordinator has taken over ({error})")


def _event_of(live: LiveAttempt, now: float) -> AttemptEvent:
    return AttemptEvent(
        job_id=live.job_id,
        index=live.index,
        attempt=live.attempt,
        state=live.state,
        at=now,
        pod_uid=live.pod_uid,
        node=live.node,
    )


def _refusal(body: bytes, error: PermanentError) -> JobAnswer:
    """The answer to a job that is refused; its id as far as the body shows one."""
    job_id = ""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raw = None
    if isinstance(raw, dict) and isinstance(raw.get("id"), str):
        job_id = raw["id"][:64]
    return JobAnswer(
        job_id=job_id,
        accepted=False,
        reason=error.reason,
        field=error.field if isinstance(error, InvalidFieldError) else "",
        detail=error.detail,
    )


def _answer_undecodable(found: Undecodable) -> JobAnswer:
    error = found.error
    return JobAnswer(
        job_id="",
        accepted=False,
        reason=error.reason if isinstance(error, SpringtideError) else Reason.MALFORMED,
        field=error.field if isinstance(error, InvalidFieldError) else "",
        detail=error.detail,
    )
