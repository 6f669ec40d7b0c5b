"""What the coordinator decides: pure functions from what it sees and the time to what should be.

What an account of an attempt makes of its task, which tasks go where now, how many places each
cluster should have, why tasks wait, and which attempts must be given up for lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from enum import Enum
from itertools import islice
from typing import Final

import msgspec

from springtide_coordinator.model import Apportioned, Backlog, Candidate, Grant, Job, Rules
from springtide_shared.errors import Reason
from springtide_shared.ledger.attempts import ENDED, NO_EXIT, RUNNING, Facts
from springtide_shared.ledger.records import (
    CHARGES,
    FREE,
    MEMORY,
    MIGRATED,
    Phase,
    TaskRecord,
    charge_of,
    is_budgeted,
)
from springtide_shared.messages.attempts import AttemptState, Inventory
from springtide_shared.messages.cluster import (
    Capacity,
    Credit,
    HeldTasks,
    Pending,
    ShapeDemand,
)
from springtide_shared.messages.job import JobState, RetrySpec, Waiting
from springtide_shared.messages.shape import Shape
from springtide_shared.messages.slices import MAX_SLICE_TASKS, Range
from springtide_shared.units import format_bytes, format_cpu

MAX_ATTEMPTS: Final = 65_535
MAX_SLICE_BYTES: Final = 800 * 1024
"""Of a slice's items; what is left of the message's MiB is for its spec and ranges."""

LEAST_MEASURED: Final = 5
"""Ended tasks of a job before its run times are believed."""

_GOLDEN: Final = 0.6180339887498949


class Taken(Enum):
    """What became of an account."""

    NOTHING_NEW = "nothing-new"
    MERGED = "merged"
    SETTLED = "settled"
    QUEUED = "queued"
    STALE = "stale"
    """A success that came after a later attempt had begun to run: refused."""
    SUPERSEDES = "supersedes"
    """A success of an earlier attempt, accepted: the newer one must be ended."""


# ---------------------------------------------------------------- attempts


def take(job: Job, index: int, attempt: int, seen: Facts, now: float) -> Taken:
    """Merge an account of an attempt into its task and draw the consequences.

    Exactly one result is accepted per task: a success of attempt n, unless a later attempt has
    reported running before it came. A task without a row is settled and folded, or never started;
    the caller unfolds one that failed before it brings a success.
    """
    record = job.tasks.get(index)
    if record is None or attempt > record.attempt:
        return Taken.NOTHING_NEW
    if seen.stage == ENDED and seen.reason == Reason.COMPLETED:
        return _take_success(job, index, record, attempt, seen, now)
    if attempt < record.attempt or record.phase is not Phase.LIVE:
        return Taken.NOTHING_NEW
    merged = record.facts.merge(seen)
    if merged is record.facts:
        return Taken.NOTHING_NEW
    record.facts = merged
    job.dirty[index] = None
    if merged.has_run:
        record.floor = attempt
    known = merged.known
    if known is None or known.stage != ENDED:
        return Taken.MERGED
    return _take_end(job, index, record, known, now)


def _take_success(
    job: Job, index: int, record: TaskRecord, attempt: int, seen: Facts, now: float
) -> Taken:
    digest = bytes.fromhex(seen.digest)
    if record.phase is Phase.SUCCEEDED:
        is_same = (record.record_attempt, record.digest) == (seen.record_attempt, digest)
        return Taken.NOTHING_NEW if is_same else Taken.STALE
    if record.phase is Phase.CANCELLED or attempt < record.floor:
        return Taken.STALE
    newer_is_live = record.phase is Phase.LIVE and attempt < record.attempt
    if attempt == record.attempt:
        record.facts = record.facts.merge(seen)
    record.reason = Reason.COMPLETED.value
    record.exit_code = None if seen.exit_code == NO_EXIT else seen.exit_code
    record.digest = digest
    record.record_attempt = seen.record_attempt
    record.pin_node = record.migration_id = ""
    record.at = now
    job.settle(index, record, Phase.SUCCEEDED)
    return Taken.SUPERSEDES if newer_is_live else Taken.SETTLED


def _take_end(job: Job, index: int, record: TaskRecord, known: Facts, now: float) -> Taken:
    record.reason = known.reason
    record.exit_code = None if known.exit_code == NO_EXIT else known.exit_code
    record.pin_node = record.migration_id = ""
    record.at = now
    if job.state is JobState.CANCELLING or known.reason == Reason.CANCELLED:
        record.reason = Reason.CANCELLED.value
        job.settle(index, record, Phase.CANCELLED)
        return Taken.SETTLED
    charge = charge_of(known.reason)
    if charge >= 0:
        charged = list(record.charged)
        charged[charge] += 1
        record.charged = tuple(charged)
        job.body.charged[charge] += 1
    if not may_retry(record, charge, job.spec.retry, job.book.rules):
        job.settle(index, record, Phase.FAILED)
        return Taken.SETTLED
    if charge == MIGRATED:
        record.migration_id, record.pin_node = known.migration_id, known.pin_node
        record.not_before = 0.0
    else:
        times = record.charged[charge]
        record.not_before = now + pause_before(times, index, job.book.rules)
    job.queue_again(index, record, now, raise_memory=charge == MEMORY)
    return Taken.QUEUED


def may_retry(record: TaskRecord, charge: int, retry: RetrySpec, rules: Rules) -> bool:
    """Whether another attempt is paid for after an end charged under `charge` (-1: by nothing)."""
    if charge < 0 or record.attempt >= MAX_ATTEMPTS:
        return False
    if is_budgeted(charge):
        budget: int = getattr(retry, CHARGES[charge])
        return record.charged[charge] <= budget
    return record.charged[FREE] + record.charged[MIGRATED] <= rules.free_limit


def pause_before(times: int, index: int, rules: Rules) -> float:
    """Seconds before the next attempt after the `times`-th end of a class: doubling, up to a limit.

    Spread over its upper half by the task's index, so that a thousand tasks that failed together do
    not come back together.
    """
    ceiling = min(
        rules.retry_pause_most_seconds, rules.retry_pause_seconds * 2.0 ** min(times - 1, 30)
    )
    return ceiling * (0.5 + 0.5 * (index * _GOLDEN % 1.0))


# ---------------------------------------------------------------- dispatch


def rooms_of(
    parts: Iterable[Credit], live: Mapping[tuple[str, str], int]
) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
    """What the clusters offer.

    Returns:
        (cluster, shape key) → places beyond our own live attempts there; shape key → all places.
    """
    rooms: dict[tuple[str, str], int] = {}
    offered: dict[str, int] = {}
    for part in parts:
        for entry in part.shapes:
            key = (part.cluster, entry.shape)
            offered[entry.shape] = offered.get(entry.shape, 0) + entry.total
            if (room := entry.total - live.get(key, 0)) > 0:
                rooms[key] = room
    return rooms, offered


def totals_of(
    capacities: Iterable[Capacity], offered: Mapping[str, int], shapes: Mapping[str, Shape]
) -> tuple[int, int]:
    """What tenants' shares are shares of: all that the clusters may grow to, else have now.

    Returns:
        (cpu_millis, memory_bytes).
    """
    cpu = memory = 0
    for part in capacities:
        for group in part.groups:
            cpu += group.max_size * group.cpu_millis
            memory += group.max_size * group.memory_bytes
    if cpu and memory:
        return cpu, memory
    for key, places in offered.items():
        if (shape := shapes.get(key)) is not None:
            cpu += places * shape.cpu_millis
            memory += places * shape.memory_bytes
    return cpu, memory


def candidates_of(jobs: Iterable[Job], now: float) -> tuple[list[Candidate], dict[str, int]]:
    """What waits and may be dispatched now; retries whose pause is over become ready by this.

    Returns:
        The candidates; job id → how many more of its tasks may be live, where it has a limit.
    """
    candidates: list[Candidate] = []
    parallel: dict[str, int] = {}
    for job in jobs:
        if job.state not in (JobState.ACCEPTED, JobState.RUNNING) or not job.body.queued:
            continue
        job.promote(now)
        if job.spec.parallelism is not None:
            parallel[job.job_id] = job.parallel_room
        ready = {0: job.body.fresh}
        for (_, level), indices in job.ready.items():
            ready[level] = ready.get(level, 0) + len(indices)
        candidates += [
            Candidate(
                job_id=job.job_id,
                tenant=job.tenant,
                priority=job.spec.priority,
                created_at=job.created_at,
                level=level,
                shape=job.shape(level),
                count=count,
                clusters=tuple(job.spec.clusters),
            )
            for level, count in sorted(ready.items())
            if count
        ]
    return candidates, parallel


def plan_dispatch(
    candidates: Sequence[Candidate],
    rooms: Mapping[tuple[str, str], int],
    usage: Mapping[str, tuple[int, int]],
    totals: tuple[int, int],
    parallel: Mapping[str, int],
) -> list[Grant]:
    """Which tasks go where now.

    By priority; within one priority to the tenant with the least dominant share of what there is,
    again and again; within a tenant by age.

    Args:
        candidates: what waits.
        rooms: (cluster, shape key) → places that the cluster still offers us.
        usage: tenant → (cpu_millis, memory_bytes) of its live attempts.
        totals: what those are a share of.
        parallel: job id → how many more of its tasks may be live; absent: any number.
    """
    left = dict(rooms)
    parallel_left = dict(parallel)
    used = dict(usage)
    grants: dict[tuple[str, int, str], int] = {}
    waiting = {id(item): item.count for item in candidates}
    tiers: dict[tuple[int, str], dict[str, list[Candidate]]] = {}
    for item in sorted(
        candidates, key=lambda one: (-one.priority, one.created_at, one.job_id, one.level)
    ):
        tier = tiers.setdefault((-item.priority, item.shape.key), {})
        tier.setdefault(item.tenant, []).append(item)
    for priority_and_shape in sorted(tiers):
        tenants = tiers[priority_and_shape]
        shape = priority_and_shape[1]
        clusters = sorted(cluster for cluster, key in left if key == shape)
        order = [(_share(used.get(tenant), totals), tenant) for tenant in sorted(tenants)]
        heapq.heapify(order)
        while order:
            _, tenant = heapq.heappop(order)
            found = _first_fit(tenants[tenant], clusters, shape, left, waiting, parallel_left)
            if found is None:
                continue
            item, cluster = found
            room = sum(left[name, shape] for name in clusters)
            quantum = max(1, room // (4 * len(tenants)))
            count = min(
                waiting[id(item)],
                left[cluster, shape],
                parallel_left.get(item.job_id, item.count),
                quantum if order else left[cluster, shape],
            )
            waiting[id(item)] -= count
            left[cluster, shape] -= count
            if item.job_id in parallel_left:
                parallel_left[item.job_id] -= count
            key = (item.job_id, item.level, cluster)
            grants[key] = grants.get(key, 0) + count
            cpu, memory = used.get(tenant, (0, 0))
            used[tenant] = (
                cpu + count * item.shape.cpu_millis,
                memory + count * item.shape.memory_bytes,
            )
            heapq.heappush(order, (_share(used[tenant], totals), tenant))
    return [
        Grant(job_id=job_id, level=level, cluster=cluster, count=count)
        for (job_id, level, cluster), count in grants.items()
    ]


def _share(used: tuple[int, int] | None, totals: tuple[int, int]) -> float:
    if used is None:
        return 0.0
    return max(used[0] / max(1, totals[0]), used[1] / max(1, totals[1]))


def _first_fit(
    items: list[Candidate],
    clusters: Sequence[str],
    shape: str,
    left: Mapping[tuple[str, str], int],
    waiting: Mapping[int, int],
    parallel_left: Mapping[str, int],
) -> tuple[Candidate, str] | None:
    """The tenant's oldest candidate that finds room, and the cluster with the most of it."""
    while items:
        item = items[0]
        if waiting[id(item)] > 0 and parallel_left.get(item.job_id, 1) > 0:
            allowed = [
                cluster
                for cluster in clusters
                if left[cluster, shape] > 0 and (not item.clusters or cluster in item.clusters)
            ]
            if allowed:
                return item, max(allowed, key=lambda cluster: left[cluster, shape])
        # Room only shrinks within a round: what finds none now finds none later in it.
        del items[0]
    return None


def pick_tasks(job: Job, level: int, count: int) -> tuple[list[tuple[int, list[int]]], int]:
    """Which of a job's tasks to dispatch: those tried before first, then fresh ones.

    Returns:
        ([(attempt number before, indices)], how many fresh ones).
    """
    groups: list[tuple[int, list[int]]] = []
    for attempt, of_level in sorted(job.ready):
        if of_level != level or count <= 0:
            continue
        # Some of them, in the order they became ready: sorting all of many would cost each time.
        indices = sorted(islice(job.ready[attempt, of_level], count))
        groups.append((attempt, indices))
        count -= len(indices)
    fresh = min(count, job.body.fresh) if level == 0 else 0
    return groups, fresh


def cut_slices(indices: Sequence[int], items: Sequence[str] | None) -> list[list[int]]:
    """Indices in slices of at most 500 tasks whose items fit into one message."""
    slices: list[list[int]] = []
    current: list[int] = []
    size = 0
    for index in indices:
        weight = 0 if items is None else len(msgspec.json.encode(items[index])) + 1
        if current and (len(current) == MAX_SLICE_TASKS or size + weight > MAX_SLICE_BYTES):
            slices.append(current)
            current, size = [], 0
        current.append(index)
        size += weight
    if current:
        slices.append(current)
    return slices


def ranges_of(indices: Iterable[int]) -> list[Range]:
    """Ascending indices as ranges, each from its first to just before its second."""
    ranges: list[Range] = []
    first = end = -1
    for index in indices:
        if index != end:
            if end >= 0:
                ranges.append((first, end))
            first = index
        end = index + 1
    if end >= 0:
        ranges.append((first, end))
    return ranges


# ---------------------------------------------------------------- demand


def backlogs_of(jobs: Iterable[Job]) -> list[Backlog]:
    """What has no place, by shape and the clusters it may use; limits of the jobs applied."""
    waiting: dict[tuple[str, tuple[str, ...]], int] = {}
    for job in jobs:
        if job.state not in (JobState.ACCEPTED, JobState.RUNNING) or not job.body.queued:
            continue
        room = job.parallel_room
        for level, count in job.queued_by_level():
            key = (job.shape(level).key, tuple(job.spec.clusters))
            counted = min(count, room)
            room -= counted
            waiting[key] = waiting.get(key, 0) + counted
    return [
        Backlog(shape=shape, clusters=clusters, count=count)
        for (shape, clusters), count in waiting.items()
    ]


def most_places(capacities: Iterable[Capacity]) -> dict[str, dict[str, int]]:
    """Cluster → shape key → most places it could ever have, as far as clusters have said."""
    found: dict[str, dict[str, int]] = {}
    for part in capacities:
        found.setdefault(part.cluster, {}).update(
            (entry.shape, entry.most) for entry in part.shapes
        )
    return found


def fitting(capacities: Iterable[Capacity]) -> dict[str, bool]:
    """Shape key → whether any group of the cluster can hold it."""
    return {entry.shape: entry.most > 0 for part in capacities for entry in part.shapes}


def ends_task(record: TaskRecord | None, attempt: int) -> bool:
    """Whether an ended attempt was its task's last, as far as is known; without a row it was."""
    return record is None or (record.attempt == attempt and record.phase is not Phase.QUEUED)


def run_seconds(job: Job, elapsed: float | None) -> float | None:
    """Mean run time of a job's tasks in seconds; None: too few have ended, or it cannot be told.

    All time that its attempts have run, those still running included, over the tasks that have
    ended: right for a constant rate of ends. The mean of the ended ones alone would miss the tail,
    which is what still runs.

    Args:
        elapsed: how long its running attempts have run up to now, in seconds together; None: some
            cluster has not said lately.
    """
    if elapsed is None or job.body.measured < LEAST_MEASURED:
        return None
    return (job.body.wall_seconds + elapsed) / job.body.measured


def expected_runs(jobs: Iterable[Job], elapsed: Callable[[Job], float | None]) -> dict[str, float]:
    """Shape key → mean run time of the tasks that wait with it; only where all of it is known.

    Work of unknown length is bought for in full, so one job that is unknown makes its shape so.
    """
    sums: dict[str, tuple[float, int]] = {}
    unknown: dict[str, None] = {}
    for job in jobs:
        if job.state not in (JobState.ACCEPTED, JobState.RUNNING) or not job.body.queued:
            continue
        seconds = run_seconds(job, elapsed(job))
        for level, count in job.queued_by_level():
            key = job.shape(level).key
            if seconds is None:
                unknown[key] = None
            else:
                total, tasks = sums.get(key, (0.0, 0))
                sums[key] = (total + seconds * count, tasks + count)
    return {key: total / n for key, (total, n) in sums.items() if key not in unknown}


def running_by_job(parts: Iterable[Inventory]) -> dict[str, tuple[int, float]]:
    """Job id → (running attempts, sum of the times at which they began)."""
    found: dict[str, tuple[int, float]] = {}
    for part in parts:
        for live in part.attempts:
            if live.state is AttemptState.RUNNING and live.started_at is not None:
                count, began = found.get(live.job_id, (0, 0.0))
                found[live.job_id] = (count + 1, began + live.started_at)
    return found


def demand_of(
    cluster: str,
    backlogs: Iterable[Backlog],
    shares: Mapping[tuple[str, str], int],
    live: Mapping[tuple[str, str], int],
    shapes: Mapping[str, Shape],
    expected: Mapping[str, float],
) -> list[ShapeDemand]:
    """All places that one cluster should have, in order of shape keys.

    A shape that may run there and has no share of this cluster is listed too: only of what is
    listed the cluster says how many it could hold.

    Args:
        expected: shape key → run time of a waiting task in seconds, where known.
    """
    wanted = {shape: None for where, shape in (*live, *shares) if where == cluster}
    for item in backlogs:
        if not item.clusters or cluster in item.clusters:
            wanted.setdefault(item.shape)
    entries = []
    for shape in sorted(wanted):
        running = live.get((cluster, shape), 0)
        backlog = shares.get((cluster, shape), 0)
        entries.append(
            ShapeDemand(
                shape=shapes[shape],
                wanted=running + backlog,
                running=running,
                backlog=backlog,
                expected_seconds=expected.get(shape),
            )
        )
    return entries


def stuck_shapes(
    job: Job, unschedulable: Container[tuple[str, tuple[str, ...]]]
) -> dict[str, None]:
    """Shapes in which a job's queued tasks ask for more than any cluster they may use can hold."""
    if job.state not in (JobState.ACCEPTED, JobState.RUNNING) or not job.body.queued:
        return {}
    clusters = tuple(job.spec.clusters)
    keys = [job.shape(level).key for level, _ in job.queued_by_level()]
    return {key: None for key in keys if (key, clusters) in unschedulable}


def apportion(
    backlogs: Sequence[Backlog],
    clusters: Sequence[str],
    capacity: Mapping[str, Mapping[str, int]],
    live: Mapping[tuple[str, str], int],
) -> Apportioned:
    """Split what waits over the clusters that may take it, so that no two buy for the same task.

    In proportion to how much each could still grow for the shape; in equal parts while nobody has
    said. Whole tasks, largest remainders first, names break ties.

    Args:
        backlogs: what waits.
        clusters: all that are known, in order.
        capacity: cluster → shape key → most places it could ever have; fresh ones only.
        live: (cluster, shape key) → our live attempts.
    """
    result = Apportioned()
    for backlog in backlogs:
        allowed = [name for name in clusters if not backlog.clusters or name in backlog.clusters]
        heard = [name for name in allowed if name in capacity]
        shape = backlog.shape
        known = {name: capacity[name][shape] for name in heard if shape in capacity[name]}
        if allowed and len(known) == len(allowed) and not any(known.values()):
            result.unschedulable[shape, backlog.clusters] = None
        weights = {
            name: float(max(0, most - live.get((name, shape), 0))) for name, most in known.items()
        }
        if not any(weights.values()):
            weights = {name: float(most) for name, most in known.items()}
        # A cluster that has not been asked for this shape yet is as good as the others' average.
        usual = sum(weights.values()) / len(weights) if any(weights.values()) else 1.0
        for name in heard or allowed:
            weights.setdefault(name, usual)
        if not any(weights.values()):
            # Nowhere to go: it is asked for all the same, so that the clusters go on saying so.
            weights = dict.fromkeys(weights, 1.0)
        for name, share in split(backlog.count, weights).items():
            if share:
                key = (name, shape)
                result.shares[key] = result.shares.get(key, 0) + share
    return result


def split(count: int, weights: Mapping[str, float]) -> dict[str, int]:
    """`count` whole things in proportion to `weights`; nothing if all of them are 0."""
    total = sum(weights.values())
    if total <= 0:
        return {}
    exact = {name: count * weight / total for name, weight in weights.items()}
    shares = {name: int(value) for name, value in exact.items()}
    rest = count - sum(shares.values())
    for name in sorted(weights, key=lambda one: (shares[one] - exact[one], one))[:rest]:
        shares[name] += 1
    return shares


# ---------------------------------------------------------------- why tasks wait


def waiting_of(job: Job, held: Sequence[HeldTasks]) -> list[Waiting]:
    """Why tasks of a job do not run yet, gravest cause first.

    Tasks that pause before their next attempt are left out: that ends by itself, and soon.

    Args:
        held: what clusters say of this job's attempts that they hold back.
    """
    if job.state not in (JobState.ACCEPTED, JobState.RUNNING):
        return []
    found: list[Waiting] = []
    left = job.body.queued
    for level, count in job.queued_by_level() if job.stuck else ():
        shape = job.shape(level)
        if shape.key in job.stuck:
            left -= count
            detail = f"no node group can hold {say_shape(shape)}"
            found.append(Waiting(reason=Reason.UNSCHEDULABLE, count=count, detail=detail))
    causes: dict[Reason, tuple[int, float]] = {}
    for item in held:
        count, since = causes.get(item.reason, (0, item.oldest_at))
        causes[item.reason] = count + item.count, min(since, item.oldest_at)
    found += [
        Waiting(reason=reason, count=count, since=since, detail="held by its cluster")
        for reason, (count, since) in sorted(causes.items())
    ]
    left -= min(left, len(job.waiting))
    room = min(left, job.parallel_room)
    if left > room:
        detail = "limits.parallelism of the job is reached"
        found.append(Waiting(reason=Reason.LIMIT_REACHED, count=left - room, detail=detail))
    if room:
        detail = "no cluster offers a place yet"
        found.append(Waiting(reason=Reason.NO_CREDIT, count=room, detail=detail))
    return found


def say_shape(shape: Shape) -> str:
    """A shape for people."""
    text = f"{format_cpu(shape.cpu_millis)} cores, {format_bytes(shape.memory_bytes)} of memory"
    scratch = shape.scratch_bytes
    return f"{text}, {format_bytes(scratch)} of scratch" if scratch else text


def held_by_job(parts: Iterable[Pending]) -> dict[str, list[HeldTasks]]:
    """What a cluster holds back, by job; what is said of no job in particular is left out."""
    found: dict[str, list[HeldTasks]] = {}
    for part in parts:
        for item in part.held:
            if item.job_id:
                found.setdefault(item.job_id, []).append(item)
    return found


def same_causes(
    before: Mapping[str, Sequence[HeldTasks]], after: Mapping[str, Sequence[HeldTasks]]
) -> bool:
    """Whether the same jobs are held back for the same reasons, be it more or fewer of them."""
    return before.keys() == after.keys() and all(
        {item.reason for item in before[job_id]} == {item.reason for item in items}
        for job_id, items in after.items()
    )


# ---------------------------------------------------------------- inventory


def judge(
    ours: Iterable[tuple[tuple[str, int, int], int, int]],
    present: Container[tuple[str, int, int]],
    settled: tuple[int, int],
    absent_since: Mapping[tuple[str, int, int], float],
    now: float,
    rules: Rules,
) -> tuple[dict[tuple[str, int, int], float], list[tuple[str, int, int]]]:
    """Which of a cluster's attempts are gone without a word.

    One is given up if two whole inventories in a row, far enough apart, do not have it.

    Args:
        ours: (job id, index, attempt) with the epoch and number of its slice.
        present: the attempts in the inventory.
        settled: its `slice_epoch` and `settled_below`; it says nothing of later slices.
        absent_since: what this function returned for the inventory before.
        now: monotonic seconds.
        rules: how long is far enough.

    Returns:
        Since when each is absent, and which are to be given up.
    """
    absent: dict[tuple[str, int, int], float] = {}
    lost: list[tuple[str, int, int]] = []
    for key, epoch, seq in ours:
        if (epoch, seq) >= settled or key in present:
            continue
        since = absent_since.get(key)
        absent[key] = now if since is None else since
        if since is not None and now - since >= rules.lost_after_seconds:
            lost.append(key)
    return absent, lost


def is_further(seen_stage: int, record: TaskRecord) -> bool:
    """Whether an inventory knows more of a live attempt than we do: its events are late."""
    return seen_stage > record.facts.stage and seen_stage >= RUNNING
