"""The submitter's core under any order of events: its books agree, nothing is lost or left over."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from springtide_shared.errors import Reason
from springtide_shared.messages import (
    AttemptKey,
    AttemptState,
    Pin,
    Shape,
    SliceRun,
    Slot,
    SlotState,
    TaskTemplate,
)
from springtide_shared.ports.cluster import PodChanges, PodPhase, PodSpec, PodView
from springtide_shared.units import GiB
from springtide_submitter.config import SubmitterConfig
from springtide_submitter.core import Core
from springtide_submitter.model import (
    Attempt,
    CancelDocument,
    Saga,
    SagaDocument,
    Stage,
    Ticket,
)

SHAPES = [Shape(cpu_millis=1000, memory_bytes=GiB), Shape(cpu_millis=2000, memory_bytes=GiB)]
NAMES = ("a", "b", "c")


class TheCore(RuleBasedStateMachine):
    """A cluster, a bus and a coordinator that do whatever they may do, in any order."""

    @initialize()
    def begin(self) -> None:
        self.now = 1000.0
        self.seq = 0
        self.number = 0
        self.uids = 0
        self.version = 1
        self.core = Core("east", SubmitterConfig(pace_pods_per_second=100.0))
        self.pods: dict[str, PodView] = {}
        self.gone: list[PodView] = []
        self.creating: list[tuple[Attempt, PodSpec]] = []
        self.tickets: list[Ticket] = []
        self.given: dict[AttemptKey, None] = {}
        self.started: Counter[AttemptKey] = Counter()
        self.ended: dict[AttemptKey, Reason | None] = {}
        self.newest: dict[AttemptKey, Ticket] = {}
        """The last ticket that named each task."""
        self.core.observe(PodChanges(version=1, reset=True, pods=[], gone=[]), self.now, self.now)

    # -------------------------------------------------------- the coordinator
    @rule(
        count=st.integers(1, 4),
        shape=st.sampled_from(SHAPES),
        pin=st.booleans(),
        again=st.integers(0, 9),
    )
    def slice(self, count: int, shape: Shape, pin: bool, again: int) -> None:
        first = self.number
        self.number += count
        wanted = next(iter(self.core.sagas), "none") if pin else None
        run = SliceRun(
            cluster="east",
            epoch=1,
            seq=self.seq,
            job_id=f"job{first % 3}",
            tenant="t",
            template=TaskTemplate(command=["x"], shape=shape),
            ranges=[(first, first + count)],
            attempt=1,
            pin=Pin(migration_id=wanted, node="node-b") if wanted else None,
        )
        self.seq += 1
        for redelivered in (again == 0, *([False] if again == 1 else [])):  # 1: doubled
            ticket = self.core.take_slice(run, self.now, is_redelivered=redelivered)
            self.tickets.append(ticket)
            for index in run.indices():
                key = AttemptKey(run.job_id, index, 1)
                self.given[key] = None
                self.newest[key] = ticket

    @rule(job=st.integers(0, 2))
    def cancel(self, job: int) -> None:
        document = CancelDocument(
            job_id=f"job{job}", ranges=None, attempts_upto=1, expires_at=self.now + 30
        )
        self.core.cancel(f"cancel-{job}", document, self.now)

    @rule()
    def ack(self) -> None:
        while self.core.settled:
            ticket = self.core.settled.popleft()
            assert ticket.open == 0
            self.core.acked(ticket)

    @rule()
    def confirm(self) -> None:
        batch = list(self.core.events)
        self.core.events.clear()
        for event in batch:
            if event.state is AttemptState.ENDED:
                before = self.ended.get(event.key)
                # an end is final; only a doubled slice may add the weakest of all
                assert before is None or event.reason is Reason.NEVER_STARTED
                self.ended[event.key] = before or event.reason
            elif event.state is AttemptState.RUNNING:
                self.started[event.key] += 1
        self.core.confirmed(batch)

    # -------------------------------------------------------- the scaler
    @rule(
        places=st.dictionaries(
            st.sampled_from(NAMES),
            st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from(list(SlotState))),
        ),
        lasts=st.sampled_from([20.0, 1000.0]),
    )
    def plan(self, places: dict[str, tuple[int, int, SlotState]], lasts: float) -> None:
        slots = [
            Slot(
                slot=name,
                group="g",
                state=state,
                ready_at=self.now + 10,
                places={SHAPES[0].key: ones, SHAPES[1].key: twos},
                node=f"node-{name}" if state is not SlotState.LAUNCHING else "",
            )
            for name, (ones, twos, state) in places.items()
        ]
        self.core.take_plan(slots, self.now + lasts, self.now)

    # -------------------------------------------------------- the cluster
    @rule()
    def create(self) -> None:
        found = self.core.next_create(self.now, self.now)
        if isinstance(found, Attempt):
            assert found.key not in self.ended
            self.creating.append((found, self.core.spec(found)))

    @precondition(lambda self: self.creating)
    @rule(how=st.sampled_from(["made", "made", "made", "lost answer", "busy", "refused"]))
    def answer(self, how: str) -> None:
        attempt, spec = self.creating.pop(0)
        if how in ("made", "lost answer"):
            pod = self.pods.get(spec.name)
            if pod is None:
                self.uids += 1
                pod = PodView(
                    name=spec.name,
                    uid=f"uid-{self.uids}",
                    attempt=spec.attempt,
                    phase=PodPhase.PENDING,
                    slot=spec.slot,
                    requests=spec.template.shape.resources,
                    created_at=self.now,
                )
                self.pods[spec.name] = pod
            if how == "made":
                self.core.created(attempt, pod, self.now, self.now)
                return
        reason = Reason.ADMISSION_DENIED if how == "refused" else Reason.CLUSTER_UNAVAILABLE
        self.core.create_failed(attempt, reason, self.now, is_permanent=how == "refused")

    @precondition(lambda self: self.pods)
    @rule(
        data=st.data(),
        what=st.sampled_from(["run", "succeed", "fail", "unproved", "vanish"]),
    )
    def move(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.pods)))
        pod = self.pods[name]
        if what == "vanish":
            self.gone.append(self.pods.pop(name))
        elif what == "run" and pod.phase is PodPhase.PENDING:
            node = f"node-{pod.slot or 'b'}"
            self.pods[name] = replace(pod, phase=PodPhase.RUNNING, node=node, started_at=self.now)
        elif pod.phase is PodPhase.RUNNING:
            self.pods[name] = replace(
                pod,
                phase=PodPhase.FAILED if what == "fail" else PodPhase.SUCCEEDED,
                exit_code=1 if what == "fail" else 0,
                ended_at=self.now,
                message='{"digest":"d"}' if what == "succeed" else "",
            )

    @rule(is_full=st.booleans())
    def look(self, is_full: bool) -> None:
        gone = [] if is_full else self.gone
        self.gone = []
        self.version += 1
        changes = PodChanges(
            version=self.version, reset=is_full, pods=list(self.pods.values()), gone=gone
        )
        self.core.observe(changes, self.now, self.now)

    @rule()
    def delete(self) -> None:
        while self.core.deletes:
            deletion = self.core.deletes.popleft()
            pod = self.pods.get(deletion.name)
            if deletion.is_final and pod is not None and pod.phase.is_terminated:
                # A terminated pod is the outbox of its end.
                assert deletion.key in self.ended
                assert self.newest[deletion.key].is_acked
            if pod is not None and pod.uid == deletion.uid:
                self.gone.append(self.pods.pop(deletion.name))
            elif not deletion.is_final:
                self.core.deleted_already(deletion, self.now)

    @rule(is_there=st.booleans(), is_down=st.booleans())
    def prove(self, is_there: bool, is_down: bool) -> None:
        for proof in list(self.core.proofs.values()):
            if is_down:
                self.core.proof_delayed(proof, self.now)
            elif is_there:
                self.core.proved(proof, "d", self.now)
            else:
                self.core.unproved(proof, proof.fallback or Reason.LOST, self.now)

    @rule()
    def things_go_well(self) -> None:
        """A plan with room comes, pods are made and run: the deeper states are reached often."""
        self.plan(dict.fromkeys(NAMES, (3, 2, SlotState.READY)), 1000.0)
        while self.core.backlog:
            before = len(self.creating)
            self.create()
            if len(self.creating) == before:
                break
        while self.creating:
            self.answer("made")
        for name, pod in list(self.pods.items()):
            if pod.phase is PodPhase.PENDING:
                node = f"node-{pod.slot or 'b'}"
                self.pods[name] = replace(
                    pod, phase=PodPhase.RUNNING, node=node, started_at=self.now
                )
        self.look(is_full=False)

    # -------------------------------------------------------- the rescheduler
    @rule(data=st.data(), ends=st.booleans())
    def migrate(self, data: st.DataObject, ends: bool) -> None:
        running = [
            one
            for one in self.core.attempts.values()
            if one.stage is Stage.RUNNING and one.intent == "none"
        ]
        if not running:
            return
        attempt = data.draw(st.sampled_from(running))
        saga = Saga(
            SagaDocument(
                migration_id=f"M-{attempt.key}-{self.now}-{len(self.core.sagas)}",
                job_id=attempt.key.job_id,
                index=attempt.key.index,
                attempt=attempt.key.attempt,
                pod_uid=attempt.pod_uid,
                shape=attempt.shape,
                target_node="node-b",
                valid_until=self.now + 40,
                is_ending=ends,
            ),
            version=1,
        )
        self.core.add_saga(saga)
        if ends:
            self.core.end_by_saga(attempt, saga)

    # -------------------------------------------------------- time
    @rule(seconds=st.sampled_from([1.0, 15.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.core.tick(self.now)

    # -------------------------------------------------------- the laws
    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "core"):
            return
        core = self.core
        live: Counter[str] = Counter()
        stages: Counter[Stage] = Counter()
        used: Counter[tuple[str, str]] = Counter()
        for attempt in core.attempts.values():
            stages[attempt.stage] += 1
            if attempt.stage is not Stage.ENDED:
                live[attempt.shape_key] += 1
            if attempt.has_place:
                used[attempt.slot, attempt.shape_key] += 1
                assert attempt.stage not in (Stage.HELD, Stage.PROVING, Stage.ENDED)
            if attempt.stage is Stage.HELD:
                assert attempt.key in core._held[attempt.shape_key]
            if attempt.stage is Stage.PROVING:
                assert attempt.key in core.proofs
        assert {k: n for k, n in core._counts.items() if n} == dict(stages)
        assert core._live == dict(live)
        assert sum(len(held) for held in core._held.values()) == stages[Stage.HELD]
        booked = Counter(
            {
                (name, shape): count
                for name, entry in core.book._entries.items()
                for shape, count in entry.used.items()
            }
        )
        assert booked == used
        for entry in core.book._entries.values():
            plan = entry.plan
            for shape, free in entry.free().items():
                assert plan is not None
                assert 0 < free <= plan.places[shape] - entry.taken(shape)
        reserved = Counter(
            (saga.slot, saga.document.shape.key) for saga in core.sagas.values() if saga.slot
        )
        assert reserved == Counter(
            {
                (name, shape): count
                for name, entry in core.book._entries.items()
                for shape, count in entry.reserved.items()
            }
        )
        assert all(not saga.is_spent for saga in core.sagas.values() if saga.slot)

    @invariant()
    def every_task_is_somewhere(self) -> None:
        if hasattr(self, "core"):
            for key in self.given:
                assert key in self.core.attempts or key in self.ended
            assert all(count == 1 for count in self.started.values())

    def teardown(self) -> None:
        """Once the world behaves, everything comes to an end and nothing is left over."""
        if not hasattr(self, "core"):
            return
        self.core.take_plan([], self.now + 10_000, self.now)
        for _ in range(8):
            self.create()
            while self.creating:
                self.answer("busy")
            for name, pod in list(self.pods.items()):
                if pod.phase is PodPhase.PENDING:
                    self.gone.append(self.pods.pop(name))
                elif pod.phase is PodPhase.RUNNING:
                    self.pods[name] = replace(
                        pod, phase=PodPhase.FAILED, exit_code=1, ended_at=self.now
                    )
            self.look(False)
            self.prove(False, False)
            self.delete()
            self.look(False)
            self.confirm()
            self.ack()
            self.wait(61.0)
        core = self.core
        assert all(ticket.is_acked for ticket in self.tickets)
        assert not core.attempts
        assert not core.sagas
        assert not self.pods
        assert not core._unbound
        assert not core._by_node
        assert not core._by_slot
        assert not core._held
        assert not core.book._entries
        assert core.pending() == []
        assert core.credit(self.now) == []


TestTheCore = TheCore.TestCase
TestTheCore.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_an_adopted_attempt_cannot_be_made_again() -> None:
    core = Core("east", SubmitterConfig())
    shape = SHAPES[0]
    pod = PodView(
        name="p",
        uid="u",
        attempt=AttemptKey("job", 0, 1),
        phase=PodPhase.PENDING,
        slot="gone",
        requests=shape.resources,
        created_at=0.0,
    )
    core.observe(PodChanges(version=1, reset=True, pods=[pod], gone=[]), 0.0, 0.0)
    attempt = core.attempts[AttemptKey("job", 0, 1)]
    with pytest.raises(ValueError, match="adopted"):
        core.spec(attempt)
    core.take_plan([], 100.0, 1.0)
    assert [deletion.uid for deletion in core.deletes] == ["u"]
    core.observe(PodChanges(version=2, reset=False, pods=[], gone=[pod]), 2.0, 2.0)
    assert core.events[-1].reason is Reason.NEVER_STARTED
