"""The submitter's state and what it makes of each event; no asyncio, no clock, no I/O.

Events go in as method calls with `now`; what is to be done comes out in the queues at the top of
`Core`, which the service performs and confirms. Costs are proportional to what changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from springtide_shared.errors import Reason
from springtide_shared.messages.attempts import AttemptEvent, AttemptState, LiveAttempt
from springtide_shared.messages.cluster import HeldTasks, ShapeCredit, Slot
from springtide_shared.messages.migration import MigrationEvents, MigrationStep
from springtide_shared.messages.shape import Shape
from springtide_shared.messages.slices import SliceRun
from springtide_shared.messages.task import AttemptKey
from springtide_shared.ports.cluster import NodeView, PodChanges, PodPhase, PodSpec, PodView
from springtide_shared.units import Resources
from springtide_submitter.config import SubmitterConfig
from springtide_submitter.model import (
    ANNOTATION_CHECKPOINTABLE,
    ANNOTATION_GRACE,
    ANNOTATION_MIGRATION,
    PUBLISHED,
    Attempt,
    CancelDocument,
    CancelMemory,
    Deletion,
    Intent,
    Proof,
    Saga,
    Sequences,
    Stage,
    Ticket,
)
from springtide_submitter.policy import (
    Meter,
    Rate,
    base_stock,
    classify,
    is_withdrawable,
    place_unpinned,
    room_on,
)
from springtide_submitter.slots import SlotBook

_RELEASED_MOST = 20_000
"""Uids of removed pods that are remembered, in case the view still shows them."""
_REFUSED_SECONDS = 600.0
"""How long a pod may still turn up whose create had an unknown outcome."""


class Core:
    """All that one submitter knows of its cluster."""

    def __init__(self, cluster: str, config: SubmitterConfig) -> None:
        self.cluster = cluster
        self.config = config
        self.attempts: dict[AttemptKey, Attempt] = {}
        self.book = SlotBook()
        self.sequences = Sequences(config.gap_seconds)
        self.cancels = CancelMemory(config.cancel_memory_most)
        self.sagas: dict[str, Saga] = {}
        self.meter = Meter(
            pace=config.pace_pods_per_second,
            pace_least=config.pace_least,
            pace_most=config.pace_most,
            burst=config.burst,
            adapt_seconds=config.adapt_seconds,
            calm_latency=config.calm_latency,
        )
        self.is_listed = False
        """Whether all pods have been seen once."""
        self.plan_until = float("-inf")
        """Until when the newest plan is good."""
        # -- what is to be done; each bounded by the attempts in hand
        self.events: deque[AttemptEvent] = deque()
        """Transitions to publish."""
        self._ends_unsaid = 0
        self.news: deque[MigrationEvents] = deque()
        """Steps of migrations to publish."""
        self.deletes: deque[Deletion] = deque()
        """Pods to remove."""
        self.proofs: dict[AttemptKey, Proof] = {}
        """Completion records to look up."""
        self.is_proof_wanted = False
        """Whether one has been added since the service last looked."""
        self.settled: deque[Ticket] = deque()
        """Slices to ack."""
        self.closed_sagas: deque[Saga] = deque()
        """Sagas whose documents are to be deleted."""
        self.is_credit_changed = False
        """Whether the totals that the cluster offers have changed since they were published."""
        self._offered: dict[str, int] = {}
        # -- indices
        self._counts = dict.fromkeys(Stage, 0)
        self._live: dict[str, int] = {}
        self._held: dict[str, dict[AttemptKey, Attempt]] = {}
        self._creates: deque[Attempt] = deque()
        self._waiting: deque[tuple[float, Attempt]] = deque()
        self._pending: deque[tuple[float, Attempt]] = deque()
        self._pinned: deque[tuple[float, Attempt]] = deque()
        """(made at, attempt): pods that must start within a limit."""
        self._by_node: dict[str, dict[AttemptKey, Attempt]] = {}
        self._unbound: dict[AttemptKey, Attempt] = {}
        self._by_slot: dict[str, dict[AttemptKey, Attempt]] = {}
        self._released: dict[str, None] = {}
        self._refused: dict[AttemptKey, float] = {}
        self._foreign: dict[str, PodView] = {}
        self._binds = Rate()

    # ================================================================ slices
    def take_slice(self, run: SliceRun, now: float, *, is_redelivered: bool) -> Ticket:
        """Judge a slice; its ticket is settled once each task has a pod or a confirmed refusal."""
        ticket = Ticket(run.epoch, run.seq)
        is_stale = run.epoch < self.sequences.epoch
        is_first = self.sequences.note(run.epoch, run.seq, now)
        shape = run.template.shape
        shape_key, resources = shape.key, shape.resources
        for position, index in enumerate(run.indices()):
            key = AttemptKey(run.job_id, index, run.attempt)
            attempt = self.attempts.get(key)
            if attempt is not None:
                self._join(attempt, ticket)
                continue
            attempt = Attempt(
                key=key,
                shape=shape,
                shape_key=shape_key,
                resources=resources,
                stage=Stage.HELD,
                held_at=now,
                tenant=run.tenant,
                template=run.template,
                item=run.items[position] if run.items is not None else None,
                is_checkpointable=run.template.checkpoint is not None,
                grace_seconds=run.template.grace_seconds,
                slice_epoch=run.epoch,
                slice_seq=run.seq,
                pin=run.pin,
            )
            self._add(attempt)
            self._join(attempt, ticket)
            if is_stale:
                self._end(attempt, Reason.STALE, now)
            elif is_redelivered or not is_first:
                self._end(attempt, Reason.NEVER_STARTED, now)
            elif self.cancels.covers(key, now):
                self._end(attempt, Reason.CANCELLED, now)
            elif run.pin is None or not self._take_reservation(attempt, now):
                self._hold(attempt, now)
                self._waiting.append((now, attempt))
        if not ticket.open:
            self.settled.append(ticket)
        self.place(now)
        return ticket

    def hand_back(self, run: SliceRun, now: float) -> Ticket:
        """A fresh slice that can't be judged, since the cluster has not answered: refuse it all."""
        ticket = Ticket(run.epoch, run.seq)
        self.sequences.note(run.epoch, run.seq, now)
        for index in run.indices():
            attempt = self._refusable(AttemptKey(run.job_id, index, run.attempt), run, now)
            if attempt is not None:
                self._join(attempt, ticket)
                self._end(attempt, Reason.CLUSTER_UNAVAILABLE, now)
        if not ticket.open:
            self.settled.append(ticket)
        return ticket

    def acked(self, ticket: Ticket) -> None:
        """The slice is settled with the broker."""
        if ticket.is_acked:
            return
        ticket.is_acked = True
        self.sequences.settle(ticket.epoch, ticket.seq)
        for attempt in ticket.ended:
            self._release(attempt)
        ticket.ended.clear()

    def _refusable(self, key: AttemptKey, run: SliceRun, now: float) -> Attempt | None:
        if key in self.attempts:
            return None
        attempt = Attempt(
            key=key,
            shape=run.template.shape,
            shape_key=run.template.shape.key,
            resources=run.template.shape.resources,
            stage=Stage.HELD,
            held_at=now,
        )
        self._add(attempt)
        return attempt

    def _join(self, attempt: Attempt, ticket: Ticket) -> None:
        """Let `ticket` wait for the attempt, if there is anything to wait for."""
        awaited = attempt.stage.is_unmade or (
            attempt.stage is Stage.ENDED and not attempt.is_confirmed
        )
        self._leave_ticket(attempt)
        attempt.ticket = ticket
        if awaited:
            attempt.is_awaited = True
            ticket.open += 1
        elif attempt.stage is Stage.ENDED:
            ticket.ended.append(attempt)

    def _leave_ticket(self, attempt: Attempt) -> None:
        """The attempt has a pod, or its refusal is confirmed."""
        ticket = attempt.ticket
        if ticket is not None and attempt.is_awaited:
            attempt.is_awaited = False
            ticket.open -= 1
            if not ticket.open:
                self.settled.append(ticket)

    # ================================================================ cancels
    def cancel(self, key: str, document: CancelDocument, now: float) -> None:
        """Remember a cancel and end what it covers."""
        self.cancels.add(key, document)
        for attempt in list(self.attempts.values()):
            if attempt.key.job_id == document.job_id and document.covers(attempt.key):
                self._cancel(attempt, now)
        self.place(now)

    def _cancel(self, attempt: Attempt, now: float) -> None:
        if attempt.stage in (Stage.HELD, Stage.QUEUED):
            self._end(attempt, Reason.CANCELLED, now)
        elif attempt.stage is Stage.CREATING:
            attempt.intent = Intent.CANCEL  # acted upon when the create has been answered
        elif attempt.stage in (Stage.PENDING, Stage.RUNNING) and attempt.intent in (
            Intent.NONE,
            Intent.REPLACE,
        ):
            self._delete(attempt, Intent.CANCEL, attempt.grace_seconds)

    def _delete(self, attempt: Attempt, intent: Intent, grace: float) -> None:
        """End the attempt's pod for our own reason."""
        attempt.intent = intent
        self.deletes.append(
            Deletion(attempt.pod_name, attempt.pod_uid, grace, attempt.key, is_final=False)
        )

    # ================================================================ plan and places
    def take_plan(self, slots: Sequence[Slot], valid_until: float, now: float) -> None:
        """Take a whole new plan: fill what is free, withdraw what waits for a slot that is gone."""
        self.plan_until = valid_until
        for name in self.book.replace(slots):
            is_planned = self.book.is_planned(name)
            for attempt in list(self._by_slot.get(name, {}).values()):
                self._slot_closed(attempt, is_planned=is_planned)
        for saga in self.sagas.values():
            if not saga.slot and not saga.is_spent:
                self._book_reservation(saga)
        for attempt in list(self._by_slot.get("", {}).values()):
            if attempt.node:
                self._settle_in(attempt, self.book.slot_of(attempt.node))
        self.place(now)
        if self._totals(self._offers(now)) != self._offered:
            self.is_credit_changed = True

    def _slot_closed(self, attempt: Attempt, *, is_planned: bool) -> None:
        if attempt.stage is Stage.QUEUED:
            self._hold(attempt, attempt.held_at)
        elif attempt.stage is Stage.CREATING and attempt.intent is Intent.NONE:
            attempt.intent = Intent.REPLACE
        elif is_withdrawable(attempt, is_planned=is_planned):
            self._delete(attempt, Intent.REPLACE, 0.0)

    def has_plan(self, now: float) -> bool:
        """Whether there is a plan that has not expired."""
        return now < self.plan_until

    def place(self, now: float) -> None:
        """Give held attempts the places that are free now or due within the window."""
        if not self._held or not self.has_plan(now):
            return
        due_by = now + self.config.window_seconds
        for shape in list(self._held):
            held = self._held[shape]
            while held:
                slot = self.book.take(shape, due_by)
                if slot is None:
                    break
                attempt = next(iter(held.values()))
                self._queue(attempt)
                attempt.has_place = True
                self._into_slot(attempt, slot)

    def wants_rooms(self, now: float, since: float) -> bool:
        """Whether held attempts should go unpinned, so that the nodes' free room is needed.

        `since`: when this life began; the first plan is given some time to come.
        """
        return (
            bool(self._held)
            and not self.has_plan(now)
            and now - since >= self.config.unpinned_after_seconds
        )

    def place_unpinned(self, nodes: Iterable[NodeView], now: float) -> None:
        """Without a plan: send held attempts onto any free room, MostAllocated."""
        if self.has_plan(now):
            return  # one came while the nodes were read
        foreign: dict[str, list[Resources]] = {}
        for pod in self._foreign.values():
            foreign.setdefault(pod.node, []).append(pod.requests)
        rooms: dict[str, Resources] = {}
        for node in nodes:
            own = [one.resources for one in self._by_node.get(node.name, {}).values()]
            own += [
                saga.document.shape.resources
                for saga in self.sagas.values()
                if saga.document.target_node == node.name and not saga.is_spent
            ]
            room = room_on(node, foreign.get(node.name, ()), own)
            if room is not None:
                rooms[node.name] = room
        held = sorted(
            (one for of_shape in self._held.values() for one in of_shape.values()),
            key=lambda one: one.held_at,
        )
        unbound = [one.resources for one in self._unbound.values()]
        for attempt in place_unpinned(rooms, unbound, held, int(self.meter.pace_most)):
            self._queue(attempt)

    def _hold(self, attempt: Attempt, since: float) -> None:
        """Wait for a place; `since` counts towards the limit."""
        self._vacate(attempt)
        attempt.pin = None
        attempt.held_at = since
        attempt.why_held = Reason.NO_ROOM
        self._stage(attempt, Stage.HELD)
        self._unbound.pop(attempt.key, None)
        self._held.setdefault(attempt.shape_key, {})[attempt.key] = attempt

    def _unhold(self, attempt: Attempt) -> None:
        held = self._held.get(attempt.shape_key)
        if held is not None and held.pop(attempt.key, None) is not None and not held:
            del self._held[attempt.shape_key]

    def _queue(self, attempt: Attempt, *, is_first: bool = False) -> None:
        """It has a place: let the meter decide when its pod is made."""
        self._unhold(attempt)
        self._stage(attempt, Stage.QUEUED)
        self._unbound[attempt.key] = attempt
        if is_first:
            self._creates.appendleft(attempt)
        else:
            self._creates.append(attempt)

    def _into_slot(self, attempt: Attempt, slot: str) -> None:
        """Note the slot; the book has been told by the caller."""
        attempt.slot = slot
        attempt.shown = None
        self._by_slot.setdefault(slot, {})[attempt.key] = attempt

    def _settle_in(self, attempt: Attempt, slot: str) -> None:
        """An attempt without a place turned out to stand in `slot`."""
        if attempt.has_place or not slot:
            return
        self._drop(self._by_slot, "", attempt)
        self.book.occupy(slot, attempt.shape_key)
        attempt.has_place = True
        self._into_slot(attempt, slot)

    def _vacate(self, attempt: Attempt) -> None:
        """Give up the attempt's place and its room on its node."""
        if attempt.has_place:
            self.book.vacate(attempt.slot, attempt.shape_key)
            attempt.has_place = False
        self._drop(self._by_slot, attempt.slot, attempt)
        attempt.slot = ""
        if attempt.node:
            self._drop(self._by_node, attempt.node, attempt)
        attempt.shown = None

    @staticmethod
    def _drop(index: dict[str, dict[AttemptKey, Attempt]], name: str, attempt: Attempt) -> None:
        group = index.get(name)
        if group is not None and group.pop(attempt.key, None) is not None and not group:
            del index[name]

    # ================================================================ creates
    def next_create(self, now: float, monotonic: float) -> Attempt | float | None:
        """The next attempt to make a pod for; seconds to wait for a token; None: nothing to do."""
        while self._creates and self._creates[0].stage is not Stage.QUEUED:
            self._creates.popleft()
        if not self._creates:
            return None
        unmade = self._counts[Stage.CREATING]
        if self._pods() >= self.config.max_pods:
            return self.config.tick_seconds
        waiting = self._counts[Stage.PENDING] + unmade
        open_places = waiting + self._counts[Stage.QUEUED]
        if not self.has_plan(now):
            # Unpinned pods hold no place that is theirs alone: let only a few wait at once.
            open_places = 0
        if waiting >= base_stock(
            open_places, self._binds.at_time(monotonic), self.config.loop_seconds
        ):
            return self.config.tick_seconds
        wait = self.meter.wait_before(monotonic)
        if wait > 0:
            return wait
        attempt = self._creates.popleft()
        self._stage(attempt, Stage.CREATING)
        return attempt

    def _pods(self) -> int:
        return (
            self._counts[Stage.CREATING]
            + self._counts[Stage.PENDING]
            + self._counts[Stage.RUNNING]
            + self._counts[Stage.PROVING]
        )

    @property
    def backlog(self) -> int:
        """Attempts that wait for the meter."""
        return self._counts[Stage.QUEUED]

    def spec(self, attempt: Attempt) -> PodSpec:
        """The pod of an attempt, with what the next life of the submitter must know of it."""
        if attempt.template is None:
            raise ValueError(f"{attempt.key} was adopted: its template is not known")
        annotations = {ANNOTATION_GRACE: f"{attempt.grace_seconds:g}"}
        if attempt.is_checkpointable:
            annotations[ANNOTATION_CHECKPOINTABLE] = "1"
        if attempt.pin is not None:
            annotations[ANNOTATION_MIGRATION] = attempt.pin.migration_id
        return PodSpec(
            name=attempt.key.pod_name,
            attempt=attempt.key,
            tenant=attempt.tenant,
            template=attempt.template,
            item=attempt.item,
            slot="" if attempt.pin is not None else attempt.slot,
            node=attempt.pin.node if attempt.pin is not None else "",
            slice_seq=attempt.slice_seq,
            slice_epoch=attempt.slice_epoch,
            annotations=annotations,
        )

    def created(self, attempt: Attempt, pod: PodView, now: float, monotonic: float) -> None:
        """The cluster has the pod."""
        if attempt.stage is Stage.CREATING:
            if pod.uid in self._released or pod.deletion_at is not None:
                # The name is still held by a pod of an earlier try: not before it is gone.
                self._again(attempt, Reason.CLUSTER_UNAVAILABLE, now)
                return
            self._has_pod(attempt, pod, now)
        if attempt.pod_uid == pod.uid and attempt.view is None:
            self._observe(attempt, pod, now, monotonic, is_seen=False)
        self.place(now)

    def create_failed(
        self, attempt: Attempt, reason: Reason, now: float, *, is_permanent: bool
    ) -> None:
        """The cluster refused the pod for good, or did not take it now."""
        if attempt.stage is not Stage.CREATING:
            return  # the view has shown the pod meanwhile
        if is_permanent:
            self._end(attempt, reason, now)
        else:
            attempt.tries += 1
            self._again(attempt, reason, now)
        self.place(now)

    def _again(self, attempt: Attempt, reason: Reason, now: float) -> None:
        if attempt.intent is Intent.CANCEL or self.cancels.covers(attempt.key, now):
            self._end(attempt, Reason.CANCELLED, now)
        elif now - attempt.held_at >= self.config.hold_seconds:
            self._end(attempt, Reason.CLUSTER_UNAVAILABLE, now)
        elif attempt.intent is Intent.REPLACE:
            attempt.intent = Intent.NONE
            self._hold(attempt, attempt.held_at)
        else:
            attempt.why_held = reason
            self._queue(attempt)

    def _has_pod(self, attempt: Attempt, pod: PodView, now: float) -> None:
        """The attempt's pod exists: first word of it, from the create or from the view."""
        attempt.pod_uid, attempt.pod_name = pod.uid, pod.name
        attempt.created_at = now
        attempt.is_gone = False
        self._unhold(attempt)
        self._stage(attempt, Stage.PENDING)
        self._unbound[attempt.key] = attempt
        if pod.slot and pod.slot != attempt.slot:
            # Made for another slot than the one it was given since, or in an earlier life.
            self._vacate(attempt)
            self.book.occupy(pod.slot, attempt.shape_key)
            attempt.has_place = True
            self._into_slot(attempt, pod.slot)
        elif not attempt.slot:
            self._into_slot(attempt, "")
        self._leave_ticket(attempt)
        (self._pending if attempt.pin is None else self._pinned).append((now, attempt))
        self._say(attempt, AttemptState.PENDING, now)
        if attempt.intent is Intent.CANCEL or self.cancels.covers(attempt.key, now):
            self._delete(attempt, Intent.CANCEL, attempt.grace_seconds)
        elif attempt.intent is Intent.REPLACE:
            self._delete(attempt, Intent.REPLACE, 0.0)

    # ================================================================ pods
    def observe(self, changes: PodChanges, now: float, monotonic: float) -> None:
        """What became of pods since the last look."""
        vanished: list[Attempt] = []
        if changes.reset:
            present = {pod.uid for pod in changes.pods}
            vanished = [
                one
                for one in self.attempts.values()
                if one.pod_uid
                and not one.is_gone
                and one.pod_uid not in present
                and (one.view is not None or now - one.created_at >= self.config.lag_seconds)
            ]
            self._foreign.clear()
            self._released = {uid: None for uid in self._released if uid in present}
        for pod in changes.pods:
            self._see(pod, now, monotonic)
        for pod in changes.gone:
            self._pod_gone(pod, now)
        for attempt in vanished:
            self._gone(attempt, now)
        if not self.is_listed:
            self.is_listed = True
            self._end_lost_sagas(now)
        self.place(now)

    def _see(self, pod: PodView, now: float, monotonic: float) -> None:
        key = pod.attempt
        if key is None:
            if pod.node and not pod.phase.is_terminated:
                self._foreign[pod.uid] = pod
            else:
                self._foreign.pop(pod.uid, None)
            return
        if pod.uid in self._released:
            return  # its end is settled; the view lags behind
        attempt = self.attempts.get(key)
        if attempt is None:
            if key in self._refused:
                # Its create had seemed to fail and the task was handed back.
                self._remove(pod, key)
                return
            attempt = self._adopt(pod, now)
        elif attempt.pod_uid != pod.uid:
            if not attempt.stage.is_unmade:
                if attempt.stage is Stage.ENDED and not attempt.pod_uid:
                    self._remove(pod, key)
                return  # another pod of that name: not the one this attempt is about
            self._has_pod(attempt, pod, now)
        self._observe(attempt, pod, now, monotonic, is_seen=True)

    def _remove(self, pod: PodView, key: AttemptKey) -> None:
        self._note_released(pod.uid)
        self.deletes.append(Deletion(pod.name, pod.uid, 0.0, key, is_final=True))

    def _adopt(self, pod: PodView, now: float) -> Attempt:
        """A pod of ours from an earlier life."""
        assert pod.attempt is not None
        shape = Shape(
            cpu_millis=pod.requests.cpu_millis,
            memory_bytes=pod.requests.memory_bytes,
            scratch_bytes=pod.requests.scratch_bytes,
        )
        notes = pod.annotations
        try:
            grace = float(notes.get(ANNOTATION_GRACE, "30"))
        except ValueError:
            grace = 30.0
        attempt = Attempt(
            key=pod.attempt,
            shape=shape,
            shape_key=shape.key,
            resources=shape.resources,
            stage=Stage.HELD,
            held_at=now,
            is_checkpointable=bool(notes.get(ANNOTATION_CHECKPOINTABLE)),
            grace_seconds=grace,
        )
        for saga in self.sagas.values():
            if saga.document.is_ending and saga.document.pod_uid == pod.uid:
                attempt.intent, attempt.saga_id = Intent.MIGRATE, saga.document.migration_id
        mine = self.sagas.get(notes.get(ANNOTATION_MIGRATION, ""))
        self._add(attempt)
        if mine is not None:
            self._spend(mine)
            attempt.saga_id = mine.document.migration_id
        self._has_pod(attempt, pod, now)
        if attempt.intent is Intent.MIGRATE:
            self._delete(attempt, Intent.MIGRATE, self.config.migrate_grace_seconds)
        return attempt

    def _observe(
        self, attempt: Attempt, pod: PodView, now: float, monotonic: float, *, is_seen: bool
    ) -> None:
        if is_seen:
            attempt.view = pod
        if attempt.stage in (Stage.PROVING, Stage.ENDED):
            return
        if pod.node and not attempt.node:
            self._bound(attempt, pod.node)
        if pod.phase is PodPhase.RUNNING and attempt.stage is not Stage.RUNNING:
            attempt.started_at = pod.started_at if pod.started_at is not None else now
            self._stage(attempt, Stage.RUNNING)
            self._binds.count(monotonic)
            self._say(attempt, AttemptState.RUNNING, attempt.started_at)
            self._restored(attempt, now)
        elif pod.phase.is_terminated:
            self._terminated(attempt, pod, now)

    def _bound(self, attempt: Attempt, node: str) -> None:
        attempt.node = node
        attempt.shown = None
        self._unbound.pop(attempt.key, None)
        self._by_node.setdefault(node, {})[attempt.key] = attempt
        self._settle_in(attempt, self.book.slot_of(node))

    def _terminated(self, attempt: Attempt, pod: PodView, now: float) -> None:
        if pod.started_at is not None:
            attempt.started_at = pod.started_at
        if attempt.intent is Intent.REPLACE and not attempt.has_started:
            return  # never ran: its being gone lets the next try begin
        verdict = classify(pod, attempt.intent)
        at = pod.ended_at if pod.ended_at is not None else now
        if verdict.reason is not None:
            self._end(
                attempt,
                verdict.reason,
                at,
                exit_code=verdict.exit_code,
                digest=verdict.digest,
                record_attempt=verdict.record_attempt,
            )
            return
        self._prove(
            attempt,
            now,
            record_attempt=verdict.record_attempt or attempt.key.attempt,
            exit_code=verdict.exit_code,
            fallback=self._own_reason(attempt) or Reason.STORE_UNAVAILABLE,
        )
        self._say(attempt, AttemptState.FINISHING, at)

    @staticmethod
    def _own_reason(attempt: Attempt) -> Reason | None:
        """What an end means that we asked for ourselves."""
        return {Intent.CANCEL: Reason.CANCELLED, Intent.MIGRATE: Reason.MIGRATED}.get(
            attempt.intent
        )

    def _pod_gone(self, pod: PodView, now: float) -> None:
        self._foreign.pop(pod.uid, None)
        self._released.pop(pod.uid, None)
        if pod.attempt is None:
            return
        attempt = self.attempts.get(pod.attempt)
        if attempt is None or attempt.pod_uid != pod.uid or attempt.is_gone:
            return
        if pod.phase.is_terminated and attempt.stage in (Stage.PENDING, Stage.RUNNING):
            self._observe(attempt, pod, now, now, is_seen=True)
        elif pod.started_at is not None:
            attempt.started_at = pod.started_at
        self._gone(attempt, now)

    def deleted_already(self, deletion: Deletion, now: float) -> None:
        """The cluster says that no such pod exists."""
        attempt = self.attempts.get(deletion.key)
        if attempt is not None and attempt.pod_uid == deletion.uid and not attempt.is_gone:
            self._gone(attempt, now)
            self.place(now)

    def _gone(self, attempt: Attempt, now: float) -> None:
        """The attempt's pod has left the cluster."""
        attempt.is_gone = True
        if attempt.stage in (Stage.PROVING, Stage.ENDED):
            return
        if not attempt.has_started and attempt.intent in (Intent.NONE, Intent.REPLACE):
            self._make_again(attempt, now)
        elif attempt.intent is Intent.CANCEL:
            self._end(attempt, Reason.CANCELLED, now)
        elif attempt.intent is Intent.REPLACE:
            # It had started in the moment of its withdrawal: our doing, so free of charge.
            self._end(attempt, Reason.CLUSTER_UNAVAILABLE, now)
        else:
            self._prove(
                attempt,
                now,
                record_attempt=attempt.key.attempt,
                exit_code=None,
                fallback=self._own_reason(attempt),
            )

    def _make_again(self, attempt: Attempt, now: float) -> None:
        """Nothing of it ran: place it anew under the same attempt, if we know how to make it."""
        if attempt.template is None:
            self._end(attempt, Reason.NEVER_STARTED, now)
            return
        self._note_released(attempt.pod_uid)
        self._vacate(attempt)
        attempt.pod_uid = attempt.pod_name = attempt.node = ""
        attempt.view = None
        attempt.intent = Intent.NONE
        self._hold(attempt, now)
        self._waiting.append((now, attempt))

    # ================================================================ proofs
    def _prove(
        self,
        attempt: Attempt,
        now: float,
        *,
        record_attempt: int,
        exit_code: int | None,
        fallback: Reason | None,
    ) -> None:
        self.is_proof_wanted = True
        self.proofs[attempt.key] = Proof(
            key=attempt.key,
            pod_uid=attempt.pod_uid,
            record_attempt=record_attempt,
            node=attempt.node,
            since=now,
            fallback=fallback,
            exit_code=exit_code,
        )
        self._vacate(attempt)
        self._unbound.pop(attempt.key, None)
        self._stage(attempt, Stage.PROVING)

    def proved(self, proof: Proof, digest: str, now: float) -> None:
        """The completion record exists and is this pod's (or the named earlier attempt's)."""
        attempt = self._proving(proof)
        if attempt is not None:
            own = proof.record_attempt == proof.key.attempt
            self._end(
                attempt,
                Reason.COMPLETED,
                now,
                exit_code=proof.exit_code if proof.exit_code is not None else 0,
                digest=digest,
                record_attempt=None if own else proof.record_attempt,
            )
            self.place(now)

    def unproved(self, proof: Proof, reason: Reason, now: float) -> None:
        """There is no such record: `reason` says what the end means then."""
        attempt = self._proving(proof)
        if attempt is not None:
            self._end(attempt, reason, now, exit_code=proof.exit_code)
            self.place(now)

    def proof_delayed(self, proof: Proof, now: float) -> None:
        """The store does not answer: say so once, give up after the limit."""
        attempt = self._proving(proof)
        if attempt is None:
            return
        if now - proof.since >= self.config.finishing_limit_seconds:
            self.unproved(proof, Reason.STORE_UNAVAILABLE, now)
        elif not proof.is_delayed:
            proof.is_delayed = True
            self._say(attempt, AttemptState.FINISHING, now, Reason.STORE_UNAVAILABLE)

    def _proving(self, proof: Proof) -> Attempt | None:
        attempt = self.attempts.get(proof.key)
        if attempt is None or attempt.stage is not Stage.PROVING:
            self.proofs.pop(proof.key, None)
            return None
        return attempt

    # ================================================================ ends
    def _end(
        self,
        attempt: Attempt,
        reason: Reason,
        at: float,
        *,
        exit_code: int | None = None,
        digest: str = "",
        record_attempt: int | None = None,
    ) -> None:
        """The attempt's end is known: free its place, say so, keep it until that is confirmed."""
        self._unhold(attempt)
        self._vacate(attempt)
        self._unbound.pop(attempt.key, None)
        self.proofs.pop(attempt.key, None)
        if attempt.tries and not attempt.pod_uid:
            self._refused[attempt.key] = at + _REFUSED_SECONDS
        saga = self.sagas.get(attempt.saga_id)
        is_migrated = reason is Reason.MIGRATED
        event = AttemptEvent(
            job_id=attempt.key.job_id,
            index=attempt.key.index,
            attempt=attempt.key.attempt,
            state=AttemptState.ENDED,
            at=at,
            pod_uid=attempt.pod_uid,
            node=attempt.node,
            reason=reason,
            exit_code=exit_code,
            digest=digest,
            record_attempt=record_attempt,
            migration_id=attempt.saga_id if is_migrated else "",
            pin_node=saga.document.target_node if saga is not None and is_migrated else "",
        )
        attempt.ended = event
        self._stage(attempt, Stage.ENDED)
        self.events.append(event)
        self._ends_unsaid += 1
        if saga is not None and not is_migrated:
            # The task ended by itself, or the migrated one did not get as far as running.
            self.close_saga(saga)

    def confirmed(self, events: Iterable[AttemptEvent]) -> None:
        """The bus has taken responsibility for these transitions."""
        for event in events:
            if event.state is not AttemptState.ENDED:
                continue
            self._ends_unsaid -= 1
            attempt = self.attempts.get(event.key)
            if attempt is None or attempt.ended is not event:
                continue
            attempt.is_confirmed = True
            self._leave_ticket(attempt)
            self._release(attempt)

    def _release(self, attempt: Attempt) -> None:
        """Forget an ended attempt and remove its pod: confirmed and its slice acked, not before."""
        ticket = attempt.ticket
        if not attempt.is_confirmed or self.attempts.get(attempt.key) is not attempt:
            return
        if ticket is not None and not ticket.is_acked:
            ticket.ended.append(attempt)
            return
        if attempt.pod_uid and not attempt.is_gone:
            self._note_released(attempt.pod_uid)
            self.deletes.append(
                Deletion(attempt.pod_name, attempt.pod_uid, 0.0, attempt.key, is_final=True)
            )
        del self.attempts[attempt.key]
        self._counts[Stage.ENDED] -= 1

    def _note_released(self, uid: str) -> None:
        self._released[uid] = None
        while len(self._released) > _RELEASED_MOST:
            del self._released[next(iter(self._released))]

    # ================================================================ migrations
    def room_for(
        self, shape: Shape, node: NodeView, foreign: Sequence[PodView], now: float
    ) -> Reason | None:
        """Why `node` can't take one more attempt of `shape`; None: it can.

        Real room decides, not the pattern: a node may have room for a shape that the plan did not
        have in mind.
        """
        slot = self.book.slot_of(node.name) or node.slot
        if node.cordoned or (self.book.is_planned(slot) and not self.book.is_open(slot)):
            return Reason.NODE_CORDONED
        own = [one.resources for one in self._by_node.get(node.name, {}).values()]
        own += [
            one.resources
            for one in self._unbound.values()
            if (slot and one.slot == slot) or (one.pin is not None and one.pin.node == node.name)
        ]
        own += [
            saga.document.shape.resources
            for saga in self.sagas.values()
            if saga.document.target_node == node.name
            and not saga.is_spent
            and now < saga.document.valid_until
        ]
        room = room_on(node, [pod.requests for pod in foreign if pod.attempt is None], own)
        return None if room is not None and shape.resources.fits(room) else Reason.NO_ROOM

    def add_saga(self, saga: Saga) -> None:
        """Hold a migration's place: taken out of the credit at once."""
        self.sagas[saga.document.migration_id] = saga
        self._book_reservation(saga)
        self.is_credit_changed = True

    def end_by_saga(self, attempt: Attempt, saga: Saga) -> None:
        """The checkpoint is verified and the wish is durable: end the source's pod."""
        attempt.saga_id = saga.document.migration_id
        self._delete(attempt, Intent.MIGRATE, self.config.migrate_grace_seconds)

    def close_saga(self, saga: Saga) -> None:
        """Give the place back and let the document go."""
        if self.sagas.pop(saga.document.migration_id, None) is None:
            return
        self._unbook_reservation(saga)
        self.closed_sagas.append(saga)
        self.is_credit_changed = True

    def _book_reservation(self, saga: Saga) -> None:
        slot = self.book.slot_of(saga.document.target_node)
        if slot:
            self.book.reserve(slot, saga.document.shape.key)
            saga.slot = slot

    def _unbook_reservation(self, saga: Saga) -> None:
        if saga.slot:
            self.book.unreserve(saga.slot, saga.document.shape.key)
            saga.slot = ""

    def _spend(self, saga: Saga) -> None:
        """Attempt n+1 takes the reserved place."""
        self._unbook_reservation(saga)
        saga.is_spent = True

    def _take_reservation(self, attempt: Attempt, now: float) -> bool:
        """Send a migrated task to its reserved place; False: it is like any other task."""
        pin = attempt.pin
        saga = self.sagas.get(pin.migration_id) if pin is not None else None
        if pin is None or saga is None or saga.is_spent:
            return False
        document = saga.document
        slot = self.book.slot_of(pin.node)
        if document.target_node != pin.node or now >= document.valid_until:
            return False
        if slot and not self.book.is_open(slot):
            return False
        self._spend(saga)
        attempt.saga_id = document.migration_id
        if slot:
            self.book.occupy(slot, attempt.shape_key)
            attempt.has_place = True
            self._into_slot(attempt, slot)
        self._queue(attempt, is_first=True)
        self._waiting.append((attempt.held_at, attempt))
        return True

    def _restored(self, attempt: Attempt, now: float) -> None:
        """Attempt n+1 runs: its migration is done."""
        saga = self.sagas.get(attempt.saga_id)
        if saga is None or saga.source == attempt.key:
            return
        self.news.append(
            MigrationEvents(
                cluster=self.cluster,
                migration_id=saga.document.migration_id,
                step=MigrationStep.RESTORED,
                at=now,
            )
        )
        self.close_saga(saga)

    def _end_lost_sagas(self, now: float) -> None:
        """Sources that we had begun to end, and whose pods went while no submitter looked."""
        for saga in list(self.sagas.values()):
            if not saga.document.is_ending or saga.is_spent or saga.source in self.attempts:
                continue
            document = saga.document
            attempt = Attempt(
                key=saga.source,
                shape=document.shape,
                shape_key=document.shape.key,
                resources=document.shape.resources,
                stage=Stage.RUNNING,
                held_at=now,
                pod_uid=document.pod_uid,
                started_at=now,
                intent=Intent.MIGRATE,
                saga_id=document.migration_id,
            )
            self._add(attempt)
            self._gone(attempt, now)

    # ================================================================ time
    def tick(self, now: float) -> None:
        """What time alone brings about."""
        hold = self.config.hold_seconds
        while self._waiting and now - self._waiting[0][0] >= hold:
            since, attempt = self._waiting.popleft()
            if attempt.stage in (Stage.HELD, Stage.QUEUED) and attempt.held_at == since:
                self._end(attempt, Reason.CLUSTER_UNAVAILABLE, now)
        for made, limit in (
            (self._pending, self.config.pending_limit_seconds),
            (self._pinned, self.config.pin_limit_seconds),
        ):
            while made and now - made[0][0] >= limit:
                created_at, attempt = made.popleft()
                if attempt.created_at == created_at and is_withdrawable(attempt, is_planned=False):
                    self._delete(attempt, Intent.REPLACE, 0.0)
        for saga in list(self.sagas.values()):
            if now >= saga.document.valid_until and not saga.is_spent:
                self._saga_expired(saga)
        while self._refused:
            key, until = next(iter(self._refused.items()))
            if now < until:
                break
            del self._refused[key]
        self.place(now)

    def _saga_expired(self, saga: Saga) -> None:
        """The place is given back; a source that is being ended still needs the document."""
        self._unbook_reservation(saga)
        source = self.attempts.get(saga.source)
        if not (saga.document.is_ending and source is not None and source.ended is None):
            self.close_saga(saga)

    @property
    def is_held(self) -> bool:
        """Whether attempts wait for a place, of which any may come due at any time."""
        return bool(self._held)

    @property
    def is_end_unsaid(self) -> bool:
        """Whether an end waits to be published: it frees a place."""
        return self._ends_unsaid > 0

    def next_due(self) -> float:
        """When time alone brings something about at the earliest, besides places for what is held;
        infinite if nothing here depends on it. To be asked after `tick`."""
        due = [saga.document.valid_until for saga in self.sagas.values() if not saga.is_spent]
        for begun, limit in (
            (self._waiting, self.config.hold_seconds),
            (self._pending, self.config.pending_limit_seconds),
            (self._pinned, self.config.pin_limit_seconds),
        ):
            if begun:
                due.append(begun[0][0] + limit)
        due += islice(self._refused.values(), 1)
        return min(due, default=float("inf"))

    # ================================================================ snapshots
    def credit(self, now: float) -> list[ShapeCredit]:
        """Totals per shape: what is here, and the free places nobody here waits for."""
        found = self._offers(now)
        self._offered = self._totals(found)
        self.is_credit_changed = False
        return found

    @staticmethod
    def _totals(offers: Iterable[ShapeCredit]) -> dict[str, int]:
        return {offer.shape: offer.total for offer in offers}

    def _offers(self, now: float) -> list[ShapeCredit]:
        due_by = now + self.config.credit_horizon_seconds
        is_planned = self.has_plan(now)
        found = []
        for shape in sorted({*self.book.shapes, *self._live}):
            held = len(self._held.get(shape, ()))
            free = max(0, self.book.free(shape, due_by) - held) if is_planned else 0
            found.append(ShapeCredit(shape=shape, live=self._live.get(shape, 0), free=free))
        return found

    def pending(self) -> list[HeldTasks]:
        """Attempts without a pod, by job, shape and cause."""
        groups: dict[tuple[str, str, Reason], tuple[int, float]] = {}
        waiting = [one for of_shape in self._held.values() for one in of_shape.values()]
        waiting += [one for one in self._creates if one.stage is Stage.QUEUED]
        for attempt in waiting:
            group = (attempt.key.job_id, attempt.shape_key, attempt.why_held)
            count, oldest = groups.get(group, (0, attempt.held_at))
            groups[group] = (count + 1, min(oldest, attempt.held_at))
        return [
            HeldTasks(job_id=job_id, shape=shape, reason=reason, count=count, oldest_at=oldest)
            for (job_id, shape, reason), (count, oldest) in sorted(groups.items())
        ]

    def inventory(self) -> list[LiveAttempt]:
        """Every attempt whose end has not been said and confirmed."""
        return [self._line(one) for one in self.attempts.values() if not one.is_confirmed]

    def _line(self, attempt: Attempt) -> LiveAttempt:
        line = attempt.shown
        if line is None:
            line = attempt.shown = LiveAttempt(
                job_id=attempt.key.job_id,
                index=attempt.key.index,
                attempt=attempt.key.attempt,
                state=PUBLISHED[attempt.stage],
                shape=attempt.shape_key,
                cpu_millis=attempt.shape.cpu_millis,
                memory_bytes=attempt.shape.memory_bytes,
                pod_uid=attempt.pod_uid,
                node=attempt.node,
                slot=attempt.slot,
                started_at=attempt.started_at,
                checkpointable=attempt.is_checkpointable,
            )
        return line

    # ================================================================ book-keeping
    def _add(self, attempt: Attempt) -> None:
        self.attempts[attempt.key] = attempt
        self._counts[attempt.stage] += 1
        self._live[attempt.shape_key] = self._live.get(attempt.shape_key, 0) + 1

    def _stage(self, attempt: Attempt, stage: Stage) -> None:
        if attempt.stage is stage:
            return
        self._counts[attempt.stage] -= 1
        self._counts[stage] += 1
        attempt.stage = stage
        attempt.shown = None
        if stage is Stage.ENDED:
            left = self._live[attempt.shape_key] - 1
            if left:
                self._live[attempt.shape_key] = left
            else:
                del self._live[attempt.shape_key]

    def _say(
        self, attempt: Attempt, state: AttemptState, at: float, reason: Reason | None = None
    ) -> None:
        self.events.append(
            AttemptEvent(
                job_id=attempt.key.job_id,
                index=attempt.key.index,
                attempt=attempt.key.attempt,
                state=state,
                at=at,
                pod_uid=attempt.pod_uid,
                node=attempt.node,
                reason=reason,
            )
        )
