"""The coordinator's decisions: laws that hold whatever the book looks like."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from springtide_coordinator import policy
from springtide_coordinator.config import CoordinatorConfig
from springtide_coordinator.model import Backlog, Book, Candidate, Job, Rules
from springtide_coordinator.policy import Taken
from springtide_shared.errors import Reason
from springtide_shared.ledger.attempts import facts_of
from springtide_shared.ledger.chunks import fold
from springtide_shared.ledger.records import (
    JobBody,
    Phase,
    TaskRecord,
    pack_body,
    pack_task,
    unpack_body,
    unpack_task,
)
from springtide_shared.messages import (
    AttemptEvent,
    AttemptState,
    JobSpec,
    JobState,
    RetrySpec,
    Shape,
    TaskTemplate,
)

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""
CLUSTERS = ("east", "north", "west")
SHAPES = tuple(Shape(cpu_millis=1000 * n, memory_bytes=n) for n in (1, 2, 4))
RULES = Rules(free_limit=5, retry_pause_seconds=1.0, retry_pause_most_seconds=8.0, fold_rows=4)


def a_job(size: int, **fields: object) -> Job:
    spec = JobSpec(
        id="j",
        name="n",
        size=size,
        template=TaskTemplate(command=["true"], shape=SHAPES[0]),
        retry=RetrySpec(application=1, memory=1, infrastructure=2, preemption=2),
    )
    return Job(
        job_id="j",
        tenant="t",
        state=JobState.RUNNING,
        created_at=0.0,
        version=1,
        spec=spec,
        packed_spec=b"",
        body=JobBody(size=size),
    )


# ---------------------------------------------------------------- dispatch

candidates = st.lists(
    st.builds(
        Candidate,
        job_id=st.sampled_from(["a", "b", "c", "d"]),
        tenant=st.sampled_from(["x", "y", "z"]),
        priority=st.integers(-2, 2),
        created_at=st.integers(0, 5).map(float),
        level=st.integers(0, 1),
        shape=st.sampled_from(SHAPES),
        count=st.integers(1, 50),
        clusters=st.lists(st.sampled_from(CLUSTERS), max_size=2, unique=True).map(tuple),
    ),
    max_size=8,
    unique_by=lambda one: (one.job_id, one.level),
)
rooms = st.dictionaries(
    st.tuples(st.sampled_from(CLUSTERS), st.sampled_from([shape.key for shape in SHAPES])),
    st.integers(1, 60),
)


@PATIENT
@given(candidates, rooms, st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 20)))
def test_dispatch_keeps_every_limit_and_leaves_no_room_unused(
    waiting: list[Candidate], room: dict[tuple[str, str], int], parallel: dict[str, int]
) -> None:
    grants = policy.plan_dispatch(waiting, room, {}, (10_000, 10_000), parallel)
    by_key = {(one.job_id, one.level): one for one in waiting}
    used: Counter[tuple[str, str]] = Counter()
    given_to: Counter[tuple[str, int]] = Counter()
    of_job: Counter[str] = Counter()
    for grant in grants:
        item = by_key[grant.job_id, grant.level]
        assert grant.count > 0
        assert not item.clusters or grant.cluster in item.clusters
        used[grant.cluster, item.shape.key] += grant.count
        given_to[grant.job_id, grant.level] += grant.count
        of_job[grant.job_id] += grant.count
    assert all(count <= room[key] for key, count in used.items())
    assert all(count <= by_key[key].count for key, count in given_to.items())
    assert all(of_job[job] <= limit for job, limit in parallel.items())
    for item in waiting:
        if of_job[item.job_id] < parallel.get(item.job_id, 10**9):
            wanted = item.count - given_to[item.job_id, item.level]
            free = sum(
                count - used[cluster, shape]
                for (cluster, shape), count in room.items()
                if shape == item.shape.key and (not item.clusters or cluster in item.clusters)
            )
            assert not (wanted and free), "a task waits although there is a place for it"


def candidate(job: str, tenant: str, count: int, **fields: object) -> Candidate:
    values: dict[str, object] = {"priority": 0, "created_at": 0.0, "level": 0, "shape": SHAPES[0]}
    return Candidate(job_id=job, tenant=tenant, count=count, **(values | fields))  # type: ignore[arg-type]


def test_the_tenant_with_less_catches_up_first() -> None:
    waiting = [candidate("a", "x", 100), candidate("b", "y", 100)]
    room = {("east", SHAPES[0].key): 60}
    grants = policy.plan_dispatch(waiting, room, {"x": (40_000, 40)}, (100_000, 100), {})
    assert {one.job_id: one.count for one in grants} == {"b": 50, "a": 10}


def test_priority_goes_before_fairness_and_age() -> None:
    waiting = [
        candidate("old", "x", 10),
        candidate("urgent", "y", 10, priority=5, created_at=9.0),
    ]
    room = {("east", SHAPES[0].key): 12}
    grants = policy.plan_dispatch(waiting, room, {"y": (90_000, 90)}, (100_000, 100), {})
    assert {one.job_id: one.count for one in grants} == {"urgent": 10, "old": 2}


# ---------------------------------------------------------------- slices


@given(
    st.lists(st.integers(0, 5_000), unique=True, max_size=1_500).map(sorted),
    st.none() | st.integers(0, 16_000),
)
@settings(PATIENT, max_examples=30)
def test_slices_hold_every_task_once_and_fit_into_messages(
    indices: list[int], item_size: int | None
) -> None:
    items = None if item_size is None else ["x" * item_size] * 5_001
    slices = policy.cut_slices(indices, items)
    assert [index for one in slices for index in one] == indices
    for one in slices:
        assert 1 <= len(one) <= 500
        if item_size is not None:
            assert len(one) == 1 or len(one) * (item_size + 3) <= policy.MAX_SLICE_BYTES
        ranges = policy.ranges_of(one)
        assert [i for first, end in ranges for i in range(first, end)] == one
        assert all(a[1] < b[0] for a, b in pairwise(ranges))


# ---------------------------------------------------------------- demand

capacities = st.dictionaries(
    st.sampled_from(CLUSTERS),
    st.dictionaries(st.sampled_from([shape.key for shape in SHAPES]), st.integers(0, 100)),
)


@PATIENT
@given(
    st.lists(
        st.builds(
            Backlog,
            shape=st.sampled_from([shape.key for shape in SHAPES]),
            clusters=st.sampled_from([(), ("east",), ("east", "west")]),
            count=st.integers(1, 1_000),
        ),
        max_size=5,
    ),
    capacities,
    st.dictionaries(
        st.tuples(st.sampled_from(CLUSTERS), st.sampled_from([shape.key for shape in SHAPES])),
        st.integers(1, 50),
    ),
)
def test_no_two_clusters_are_asked_for_the_same_task(
    backlogs: list[Backlog],
    capacity: dict[str, dict[str, int]],
    live: dict[tuple[str, str], int],
) -> None:
    for backlog in backlogs:
        result = policy.apportion([backlog], CLUSTERS, capacity, live)
        total = sum(result.shares.values())
        stuck = (backlog.shape, backlog.clusters) in result.unschedulable
        assert total == backlog.count
        allowed = backlog.clusters or CLUSTERS
        assert all(cluster in allowed for cluster, _ in result.shares)
        said = [capacity.get(name, {}).get(backlog.shape) for name in allowed]
        assert stuck == all(most == 0 for most in said)
        if any(said) and all(most is not None for most in said):
            told = dict(zip(allowed, said, strict=True))
            assert all(told[name] for name, _ in result.shares), "no part for who has no place"
    both = policy.apportion(backlogs, CLUSTERS, capacity, live)
    assert sum(both.shares.values()) == sum(one.count for one in backlogs)


@PATIENT
@given(st.integers(0, 10_000), st.dictionaries(st.sampled_from("abcde"), st.floats(0, 1e6)))
def test_a_split_gives_out_everything_in_proportion(count: int, weights: dict[str, float]) -> None:
    shares = policy.split(count, weights)
    total = sum(weights.values())
    if total <= 0:
        assert shares == {}
        return
    assert sum(shares.values()) == count
    for name, share in shares.items():
        assert abs(share - count * weights[name] / total) <= 1


def test_a_full_cluster_gets_no_more_than_its_part() -> None:
    key = SHAPES[0].key
    result = policy.apportion(
        [Backlog(shape=key, clusters=(), count=10)],
        ("east", "west"),
        {"east": {key: 20}, "west": {key: 30}},
        {("east", key): 20},
    )
    assert result.shares == {("west", key): 10}


# ---------------------------------------------------------------- inventory


def test_only_two_absences_far_enough_apart_condemn() -> None:
    rules = Rules(lost_after_seconds=60)
    ours = [(("j", 0, 1), 1, 5), (("j", 1, 1), 1, 9), (("j", 2, 1), 0, 99), (("j", 3, 1), 2, 1)]
    present = {("j", 4, 1): None}
    absent, lost = policy.judge(ours, present, (1, 9), {}, 100.0, rules)
    assert list(absent) == [("j", 0, 1), ("j", 2, 1)], "of slices that it speaks for"
    assert lost == []
    absent, lost = policy.judge(ours, {("j", 0, 1): None}, (1, 9), absent, 150.0, rules)
    assert list(absent) == [("j", 2, 1)]
    absent, lost = policy.judge(ours, {}, (1, 9), absent, 170.0, rules)
    assert lost == [("j", 2, 1)], "the one that was seen in between begins anew"


# ---------------------------------------------------------------- pauses


@PATIENT
@given(st.integers(1, 1_000), st.integers(0, 999_999))
def test_pauses_grow_up_to_their_limit(times: int, index: int) -> None:
    pause = policy.pause_before(times, index, RULES)
    assert 0.5 <= pause <= RULES.retry_pause_most_seconds
    assert policy.pause_before(times + 2, index, RULES) >= pause


@pytest.mark.parametrize(
    "fields",
    [
        {"demand_seconds": 0},
        {"memory_factor": 0.5},
        {"retry_pause_seconds": 9, "retry_pause_most_seconds": 1},
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields)).split("_")[0]):
        CoordinatorConfig(**fields)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the book as a machine

SIZE = 3


class TasksLive(RuleBasedStateMachine):
    """Random news about random attempts, restarts and folds between; the laws hold throughout."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.book = Book(RULES)
        self.job = a_job(SIZE)
        self.book.add(self.job)
        self.chunk: bytes | None = None
        self.accepted: dict[int, tuple[int, bytes]] = {}
        self.seen_running: dict[int, int] = {}
        self.dispatch_fresh(SIZE - 1, "east")

    @rule(count=st.integers(1, 4), cluster=st.sampled_from(CLUSTERS))
    @precondition(lambda self: self.job.body.fresh and self.job.state is JobState.RUNNING)
    def dispatch_fresh(self, count: int, cluster: str) -> None:
        count = min(count, self.job.body.fresh)
        indices = self.job.dispatch_fresh(count, cluster=cluster, now=self.now)
        self.job.stamp(indices, 1, 1)

    @rule(cluster=st.sampled_from(CLUSTERS))
    @precondition(lambda self: self.job.state is JobState.RUNNING)
    def dispatch_again(self, cluster: str) -> None:
        self.now += RULES.retry_pause_most_seconds / 2
        self.job.promote(self.now)
        for level in sorted(self.job.levels):
            groups, _ = policy.pick_tasks(self.job, level, SIZE)
            for attempt, indices in groups:
                assert all(self.job.tasks[index].attempt == attempt for index in indices)
                assert all(self.job.tasks[index].not_before <= self.now for index in indices)
                self.job.dispatch_again(indices, cluster=cluster, now=self.now)
        for index in list(self.job.pinned):
            record = self.job.tasks[index]
            assert record.pin_node
            self.job.dispatch_again([index], cluster=record.cluster, now=self.now)

    def pick(self, number: int) -> int:
        """One of the tasks that were dispatched, live ones first: most is to be said of them."""
        tasks = self.job.tasks
        live = sorted(index for index, one in tasks.items() if one.phase is Phase.LIVE)
        choice = live or sorted(tasks) or [0]
        return choice[number % len(choice)]

    @rule(number=st.integers(0, 5), back=st.integers(0, 1))
    def runs(self, number: int, back: int) -> None:
        self.news(self.pick(number), back, AttemptState.RUNNING, None, 1.0)

    @rule(number=st.integers(0, 5), back=st.integers(0, 2))
    def succeeds(self, number: int, back: int) -> None:
        self.news(self.pick(number), back, AttemptState.ENDED, Reason.COMPLETED, 1.0)

    @rule(index=st.integers(0, SIZE - 1), back=st.integers(0, 2))
    def succeeds_whoever_it_is(self, index: int, back: int) -> None:
        self.news(index, back, AttemptState.ENDED, Reason.COMPLETED, 1.0)

    @rule(
        number=st.integers(0, 5),
        reason=st.sampled_from(
            [Reason.TIMEOUT, Reason.CANCELLED, Reason.MIGRATED, Reason.OUT_OF_MEMORY]
        ),
    )
    def fails(self, number: int, reason: Reason) -> None:
        self.news(self.pick(number), 0, AttemptState.ENDED, reason, 1.0)

    @rule(
        number=st.integers(0, 5),
        reason=st.sampled_from(
            [
                Reason.APPLICATION_ERROR,
                Reason.PREEMPTED,
                Reason.NODE_LOST,
                Reason.NEVER_STARTED,
            ]
        ),
        cluster=st.sampled_from(CLUSTERS),
        runs_again=st.booleans(),
    )
    def fails_and_goes_on(
        self, number: int, reason: Reason, cluster: str, runs_again: bool
    ) -> None:
        index = self.pick(number)
        self.news(index, 0, AttemptState.ENDED, reason, 1.0)
        if self.job.state is JobState.RUNNING:
            self.now += RULES.retry_pause_most_seconds
            self.dispatch_again(cluster)
            if runs_again:
                self.news(index, 0, AttemptState.RUNNING, None, 1.0)

    @rule(
        number=st.integers(0, 5),
        back=st.integers(0, 1),
        state=st.sampled_from(
            [AttemptState.DISPATCHED, AttemptState.PENDING, AttemptState.FINISHING]
        ),
    )
    def is_on_its_way(self, number: int, back: int, state: AttemptState) -> None:
        self.news(self.pick(number), back, state, None, 0.0)

    def news(
        self, index: int, back: int, state: AttemptState, reason: Reason | None, pause: float
    ) -> None:
        self.now += pause
        record = self.job.tasks.get(index)
        attempt = max(1, (record.attempt if record else 1) - back)
        event = AttemptEvent(
            job_id="j",
            index=index,
            attempt=attempt,
            state=state,
            at=self.now,
            pod_uid=f"u{attempt}",
            reason=reason,
            digest=hashlib.sha256(f"{index}/{attempt}".encode()).hexdigest(),
            pin_node="n" if reason is Reason.MIGRATED else "",
            migration_id="m" if reason is Reason.MIGRATED else "",
        )
        was_live = record is not None and record.phase is Phase.LIVE
        taken = policy.take(self.job, index, attempt, facts_of(event), self.now)
        if record is None or index >= self.job.body.next_index:
            assert taken is Taken.NOTHING_NEW
            return
        runs = state in (AttemptState.RUNNING, AttemptState.FINISHING)
        if runs and was_live and attempt == record.attempt:
            self.seen_running[index] = attempt
        is_success = reason is Reason.COMPLETED
        if is_success and attempt < self.seen_running.get(index, 0):
            assert taken in (Taken.STALE, Taken.NOTHING_NEW)
        if is_success and taken in (Taken.SETTLED, Taken.SUPERSEDES):
            assert index not in self.accepted, "one result per task"
            assert attempt >= self.seen_running.get(index, 0), "a later attempt was running"
            self.accepted[index] = (attempt, bytes.fromhex(event.digest))
        again = policy.take(self.job, index, attempt, facts_of(event), self.now)
        is_refused = taken is Taken.STALE
        assert again is (Taken.STALE if is_refused else Taken.NOTHING_NEW), "repeats change nothing"

    @rule()
    def cancel(self) -> None:
        if self.job.state is JobState.RUNNING and self.now > 60:
            self.job.state = JobState.CANCELLING
            self.job.cancel_fresh()
            for index in list(self.job.queued_indices()):
                self.job.settle(index, self.job.tasks[index], Phase.CANCELLED)

    @rule()
    def commit_and_fold(self) -> None:
        self.job.conclude(self.now)
        for number in self.job.chunks_due():
            self.chunk, codes = fold(number, self.chunk, self.job.to_fold(number))
            self.job.folded_in(number, codes)
        self.job.dirty.clear()
        self.job.dirty_chunks.clear()

    @rule()
    def restart(self) -> None:
        """Nothing is known after it but what the rows say."""
        self.commit_and_fold()
        old = self.job
        rows = {index: pack_task(record) for index, record in old.tasks.items()}
        codes = {number: bytes(table) for number, table in old.codes.items()}
        self.book = Book(RULES)
        self.job = a_job(SIZE)
        self.job.state = old.state
        self.job.body = unpack_body(pack_body(old.body))
        self.book.add(self.job)
        for number, table in codes.items():
            self.job.load_codes(number, table)
        for index, body in rows.items():
            self.job.load(index, unpack_task(body), self.now)

    @invariant()
    def every_task_is_counted_once(self) -> None:
        job, body = self.job, self.job.body
        phases: Counter[Phase] = Counter()
        for index in range(SIZE):
            record = job.tasks.get(index)
            if record is not None:
                assert index < body.next_index
                phases[record.phase] += 1
            elif body.cancelled_from is not None and index >= body.cancelled_from:
                phases[Phase.CANCELLED] += 1
            else:
                phase = job.folded_phase(index)
                assert phase is not Phase.QUEUED or index >= body.next_index
                phases[phase] += 1
        assert phases[Phase.LIVE] == body.live
        assert phases[Phase.SUCCEEDED] == body.succeeded == len(self.accepted)
        assert phases[Phase.FAILED] == body.failed
        assert phases[Phase.CANCELLED] == body.cancelled
        assert phases[Phase.QUEUED] == body.queued

    @invariant()
    def sums_and_queues_agree_with_the_records(self) -> None:
        job = self.job
        live: Counter[tuple[str, str]] = Counter()
        for record in job.tasks.values():
            if record.phase is Phase.LIVE:
                live[record.cluster, job.shape(record.level).key] += 1
        assert dict(live) == self.book.live
        cpu = sum(self.book.shapes[shape].cpu_millis * n for (_, shape), n in live.items())
        assert self.book.usage.get("t", (0, 0))[0] == cpu
        queued = sorted(job.queued_indices())
        assert queued == sorted(
            index for index, record in job.tasks.items() if record.phase is Phase.QUEUED
        )
        assert job.queued_again == len(queued)

    @invariant()
    def no_budget_is_overdrawn(self) -> None:
        retry = self.job.spec.retry
        for record in self.job.tasks.values():
            self._check_budget(record, retry)

    def _check_budget(self, record: TaskRecord, retry: RetrySpec) -> None:
        limits = (retry.application, retry.memory, retry.infrastructure, retry.preemption)
        for count, limit in zip(record.charged, limits, strict=False):
            assert count <= limit + 1
            if record.phase in (Phase.QUEUED, Phase.LIVE):
                assert count <= limit


TestTasksLive = TasksLive.TestCase
TestTasksLive.settings = settings(PATIENT, max_examples=150, stateful_step_count=50)
