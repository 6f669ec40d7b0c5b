"""Why tasks wait and what clusters are asked for: the coordinator's pure builders, as tables."""

from __future__ import annotations

from typing import Any

import pytest

from springtide_coordinator import policy
from springtide_coordinator.model import Backlog, Book, Job, Rules
from springtide_shared.errors import Reason
from springtide_shared.ledger.records import JobBody, Phase, TaskRecord
from springtide_shared.messages import (
    AttemptState,
    Capacity,
    Credit,
    GroupCapacity,
    HeldTasks,
    Inventory,
    JobSpec,
    JobState,
    LiveAttempt,
    Pending,
    Shape,
    ShapeCredit,
    ShapePlaces,
    TaskTemplate,
)
from springtide_shared.units import GiB, MiB

SMALL = Shape(cpu_millis=1_000, memory_bytes=512 * MiB)
HUGE = Shape(cpu_millis=1_000_000, memory_bytes=GiB, scratch_bytes=3 * GiB)


def a_job(
    size: int = 10,
    *,
    shape: Shape = SMALL,
    state: JobState = JobState.RUNNING,
    job_id: str = "j",
    **fields: Any,
) -> Job:
    spec = JobSpec(
        id=job_id,
        name="n",
        size=size,
        template=TaskTemplate(command=["true"], shape=shape),
        **fields,
    )
    job = Job(
        job_id=job_id,
        tenant="t",
        state=state,
        created_at=0.0,
        version=1,
        spec=spec,
        packed_spec=b"",
        body=JobBody(size=size),
    )
    Book(Rules()).add(job)
    return job


def held(reason: Reason, count: int, since: float = 5.0, job_id: str = "j") -> HeldTasks:
    return HeldTasks(job_id=job_id, shape=SMALL.key, reason=reason, count=count, oldest_at=since)


def told(job: Job, *items: HeldTasks) -> list[tuple[str, int, float | None]]:
    return [(one.reason.value, one.count, one.since) for one in policy.waiting_of(job, items)]


def queue_again(job: Job, count: int, *, not_before: float = 0.0, level: int = 0) -> None:
    """So many tasks have had an attempt and wait for another."""
    for index in job.dispatch_fresh(count, cluster="east", now=1.0):
        record = job.tasks[index]
        record.not_before, record.level = not_before, 0
        job.queue_again(index, record, 1.0, raise_memory=level > 0)


# ---------------------------------------------------------------- why tasks wait


def test_never_started_tasks_wait_for_a_place() -> None:
    assert told(a_job()) == [("no-credit", 10, None)]


def test_nothing_waits_when_all_are_under_way_or_the_job_is_over() -> None:
    job = a_job()
    job.dispatch_fresh(10, cluster="east", now=1.0)
    assert told(job) == []
    for state in JobState:
        if state not in (JobState.ACCEPTED, JobState.RUNNING):
            assert told(a_job(state=state), held(Reason.NO_ROOM, 1)) == [], state


def test_the_gravest_cause_comes_first_and_no_task_is_told_twice() -> None:
    job = a_job(10, parallelism=6)
    job.dispatch_fresh(4, cluster="east", now=1.0)
    assert told(job, held(Reason.NO_ROOM, 3, 9.0), held(Reason.NO_ROOM, 1, 7.0)) == [
        ("no-room", 4, 7.0),
        ("limit-reached", 4, None),
        ("no-credit", 2, None),
    ]


def test_what_fits_nowhere_is_said_with_its_size() -> None:
    job = a_job(3, shape=HUGE)
    job.stuck = {HUGE.key: None}
    (waiting,) = policy.waiting_of(job, ())
    assert (waiting.reason, waiting.count) == (Reason.UNSCHEDULABLE, 3)
    assert waiting.detail == ("no node group can hold 1000 cores, 1Gi of memory, 3Gi of scratch")


def test_only_those_that_ask_for_too_much_are_stuck() -> None:
    job = a_job(5)
    queue_again(job, 2, level=1)
    raised = job.shape(1)
    stuck = policy.stuck_shapes(job, {(raised.key, ())})
    assert stuck == {raised.key: None}
    job.stuck = stuck
    assert told(job) == [("unschedulable", 2, None), ("no-credit", 3, None)]


def test_a_pause_before_a_retry_is_no_cause_worth_telling() -> None:
    job = a_job(5)
    queue_again(job, 2, not_before=60.0)
    assert told(job) == [("no-credit", 3, None)]


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ({}, {}, True),
        ({"j": [held(Reason.NO_ROOM, 1)]}, {"j": [held(Reason.NO_ROOM, 9)]}, True),
        ({"j": [held(Reason.NO_ROOM, 1)]}, {}, False),
        ({"j": [held(Reason.NO_ROOM, 1)]}, {"k": [held(Reason.NO_ROOM, 1)]}, False),
        ({"j": [held(Reason.NO_ROOM, 1)]}, {"j": [held(Reason.QUOTA, 1)]}, False),
    ],
    ids=["none", "more", "no longer", "another job", "another reason"],
)
def test_only_other_jobs_or_reasons_are_news(
    before: dict[str, list[HeldTasks]], after: dict[str, list[HeldTasks]], same: bool
) -> None:
    assert policy.same_causes(before, after) is same


def test_held_tasks_of_no_job_in_particular_are_left_out() -> None:
    part = Pending(
        cluster="east",
        epoch=1,
        seq=1,
        valid_until=9.0,
        held=[held(Reason.NO_ROOM, 2, job_id=""), held(Reason.NO_ROOM, 1)],
    )
    assert policy.held_by_job([part]) == {"j": [held(Reason.NO_ROOM, 1)]}


# ---------------------------------------------------------------- what is offered and wanted


def a_credit(cluster: str, live: int, free: int) -> Credit:
    shapes = [ShapeCredit(shape=SMALL.key, live=live, free=free)]
    return Credit(cluster=cluster, epoch=1, seq=1, valid_until=9.0, shapes=shapes)


def a_capacity(cluster: str, most: dict[Shape, int], size: int = 0) -> Capacity:
    group = GroupCapacity(
        group="g",
        instance_type="i",
        cpu_millis=4_000,
        memory_bytes=GiB,
        price_per_hour=1.0,
        size=0,
        max_size=size,
        boot_seconds=1.0,
    )
    return Capacity(
        cluster=cluster,
        epoch=1,
        seq=1,
        valid_until=9.0,
        groups=[group],
        shapes=[ShapePlaces(shape=shape.key, most=count) for shape, count in most.items()],
    )


def test_room_is_what_clusters_have_beyond_our_own() -> None:
    parts = [a_credit("east", 3, 2), a_credit("west", 1, 0)]
    live = {("east", SMALL.key): 4, ("west", SMALL.key): 2}
    assert policy.rooms_of(parts, live) == ({("east", SMALL.key): 1}, {SMALL.key: 6})


def test_shares_are_of_what_clusters_may_grow_to_else_of_what_they_offer() -> None:
    shapes = {SMALL.key: SMALL}
    grown = policy.totals_of([a_capacity("east", {}, size=2)], {SMALL.key: 5}, shapes)
    assert grown == (8_000, 2 * GiB)
    assert policy.totals_of([], {SMALL.key: 5, "unknown": 9}, shapes) == (5_000, 5 * 512 * MiB)


def test_candidates_are_queued_tasks_whose_pause_is_over() -> None:
    job = a_job(6, parallelism=4)
    queue_again(job, 2, not_before=60.0)
    over = a_job(job_id="over", state=JobState.CANCELLING)
    found, parallel = policy.candidates_of([job, over], 30.0)
    assert [(one.job_id, one.count) for one in found] == [("j", 4)]
    assert parallel == {"j": 4}
    found, _ = policy.candidates_of([job], 60.0)
    assert [(one.level, one.count) for one in found] == [(0, 6)]


def test_backlogs_keep_to_the_limits_of_their_jobs() -> None:
    jobs = [a_job(6, parallelism=4), a_job(3, job_id="k"), a_job(2, job_id="l", clusters=["east"])]
    assert policy.backlogs_of(jobs) == [
        Backlog(shape=SMALL.key, clusters=(), count=7),
        Backlog(shape=SMALL.key, clusters=("east",), count=2),
    ]


def test_demand_says_totals_of_one_cluster_only() -> None:
    shapes = {SMALL.key: SMALL, HUGE.key: HUGE}
    shares = {("east", SMALL.key): 5, ("west", SMALL.key): 1}
    live = {("east", HUGE.key): 2, ("east", SMALL.key): 1}

    def demand(*backlogs: Backlog) -> dict[str, tuple[int, int, int]]:
        return {
            item.shape.key: (item.wanted, item.running, item.backlog)
            for item in policy.demand_of("east", backlogs, shares, live, shapes, {})
        }

    assert demand() == {SMALL.key: (6, 1, 5), HUGE.key: (2, 2, 0)}
    live.clear()
    elsewhere = Backlog(shape=HUGE.key, clusters=("west",), count=1)
    assert demand(elsewhere) == {SMALL.key: (5, 0, 5)}
    anywhere = Backlog(shape=HUGE.key, clusters=(), count=1)
    assert demand(anywhere) == {SMALL.key: (5, 0, 5), HUGE.key: (0, 0, 0)}, "so that it is known of"


def test_what_fits_nowhere_is_asked_for_all_the_same_so_that_clusters_go_on_saying_so() -> None:
    stuck = Backlog(shape=HUGE.key, clusters=(), count=4)
    most = {"east": {HUGE.key: 0}, "west": {HUGE.key: 0}}
    found = policy.apportion([stuck], ("east", "west"), most, {})
    assert found.shares == {("east", HUGE.key): 2, ("west", HUGE.key): 2}
    assert list(found.unschedulable) == [(HUGE.key, ())]
    found = policy.apportion([stuck], ("east", "west"), {**most, "west": {HUGE.key: 1}}, {})
    assert found.shares == {("west", HUGE.key): 4}
    assert not found.unschedulable


# ---------------------------------------------------------------- how long tasks run


def measured(job: Job, ended: int, wall_seconds: float) -> Job:
    job.body.measured, job.body.wall_seconds = ended, wall_seconds
    return job


@pytest.mark.parametrize(
    ("ended", "wall", "elapsed", "expected"),
    [
        (4, 40.0, 0.0, None),
        (5, 50.0, 0.0, 10.0),
        (5, 50.0, 5_000.0, 1_010.0),
        (5, 50.0, None, None),
    ],
    ids=["too few", "none runs any more", "the tail runs", "a cluster is silent"],
)
def test_run_times_count_what_still_runs(
    ended: int, wall: float, elapsed: float | None, expected: float | None
) -> None:
    assert policy.run_seconds(measured(a_job(), ended, wall), elapsed) == expected


def test_a_shape_has_the_mean_of_the_tasks_that_wait_with_it() -> None:
    jobs = [measured(a_job(30), 10, 100.0), measured(a_job(10, job_id="k"), 10, 500.0)]
    assert policy.expected_runs(jobs, lambda _job: 0.0) == {SMALL.key: (30 * 10 + 10 * 50) / 40}
    jobs.append(a_job(1, job_id="l"))
    assert policy.expected_runs(jobs, lambda _job: 0.0) == {}, "one that nobody knows of"
    jobs[-1].state = JobState.CANCELLING
    assert policy.expected_runs(jobs, lambda _job: 0.0).keys() == {SMALL.key}


@pytest.mark.parametrize(
    ("record", "ends"),
    [
        (None, True),
        (TaskRecord(phase=Phase.SUCCEEDED, attempt=2), True),
        (TaskRecord(phase=Phase.LIVE, attempt=2), True),
        (TaskRecord(phase=Phase.QUEUED, attempt=2), False),
        (TaskRecord(phase=Phase.LIVE, attempt=3), False),
        (TaskRecord(phase=Phase.SUCCEEDED, attempt=3), False),
    ],
    ids=["folded", "settled", "its end is on the way", "to be tried again", "moved on", "redone"],
)
def test_only_the_last_attempt_ends_a_task(record: TaskRecord | None, ends: bool) -> None:
    assert policy.ends_task(record, 2) is ends


def test_what_runs_is_counted_by_job() -> None:
    lives = [
        LiveAttempt(
            job_id=job_id,
            index=index,
            attempt=1,
            state=state,
            shape=SMALL.key,
            cpu_millis=1,
            memory_bytes=1,
            started_at=began,
        )
        for index, (job_id, state, began) in enumerate(
            [
                ("j", AttemptState.RUNNING, 10.0),
                ("j", AttemptState.RUNNING, 30.0),
                ("j", AttemptState.FINISHING, 1.0),
                ("k", AttemptState.PENDING, None),
            ]
        )
    ]
    inventory = Inventory(
        cluster="east",
        epoch=1,
        seq=1,
        valid_until=9.0,
        settled_below=0,
        slice_epoch=1,
        attempts=lives,
    )
    assert policy.running_by_job([inventory]) == {"j": (2, 40.0)}


def test_what_clusters_can_hold_at_most_is_kept_apart() -> None:
    parts = [a_capacity("east", {SMALL: 9, HUGE: 0}), a_capacity("west", {})]
    assert policy.most_places(parts) == {"east": {SMALL.key: 9, HUGE.key: 0}, "west": {}}
    assert policy.fitting(parts) == {SMALL.key: True, HUGE.key: False}


def test_a_settled_task_waits_for_nothing() -> None:
    job = a_job(2)
    for index in job.dispatch_fresh(2, cluster="east", now=1.0):
        job.settle(index, job.tasks[index], Phase.SUCCEEDED)
    assert told(job) == []
