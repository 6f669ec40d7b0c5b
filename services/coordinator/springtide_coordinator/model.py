"""The coordinator's memory: active jobs and those of their tasks that need more than a count.

It mirrors the ledger. Every change goes through the few moves below, which keep counts, queues and
sums in step; each is O(1) per task, whatever the size of the array. What is changed is noted in
`dirty` for the next commit.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from springtide_shared.ledger.attempts import Attempt
from springtide_shared.ledger.records import JobBody, Phase, TaskRecord
from springtide_shared.messages.job import JobSpec, JobState
from springtide_shared.messages.shape import Shape
from springtide_shared.messages.task import TaskTemplate
from springtide_shared.ports.ledger import CHUNK_TASKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the coordinator's decisions depend on besides what it sees. Times in seconds."""

    retry_pause_seconds: float = 1.0
    retry_pause_most_seconds: float = 60.0
    free_limit: int = 1_000
    """Most re-runs of one task that no budget pays for: something is wrong beyond it."""
    memory_factor: float = 1.5
    """Each attempt after an out-of-memory end asks for this much more."""
    memory_raises: int = 3
    """After so many raises it asks for no more."""
    lost_after_seconds: float = 60.0
    fold_rows: int = 256
    """A chunk is written anew when so many of its tasks have settled since, or all have."""


class Book:
    """All active jobs, and what their live attempts add up to."""

    def __init__(self, rules: Rules, largest: Mapping[str, int] | None = None) -> None:
        self.rules = rules
        self.largest: Mapping[str, int] = {} if largest is None else largest
        """Cluster → memory of its largest node in bytes, as far as it has said."""
        self.jobs: dict[str, Job] = {}
        self.live: dict[tuple[str, str], int] = {}
        """(cluster, shape key) → live attempts."""
        self.shapes: dict[str, Shape] = {}
        """Every shape that a job of the book has asked for."""
        self.usage: dict[str, tuple[int, int]] = {}
        """Tenant → requested (cpu_millis, memory_bytes) of its live attempts."""

    def add(self, job: Job) -> None:
        """Take in a job that has no live attempts yet, or whose records follow by `Job.load`."""
        self.jobs[job.job_id] = job
        job.book = self

    def count(self, job: Job, record: TaskRecord, by: int) -> None:
        """A live attempt more or less."""
        shape = job.shape(record.level)
        key = (record.cluster, shape.key)
        if left := self.live.get(key, 0) + by:
            self.live[key] = left
        else:
            del self.live[key]
        cpu, memory = self.usage.get(job.tenant, (0, 0))
        cpu, memory = cpu + by * shape.cpu_millis, memory + by * shape.memory_bytes
        if cpu or memory:
            self.usage[job.tenant] = (cpu, memory)
        else:
            del self.usage[job.tenant]


class Job:
    """One job with its tasks. `tasks` holds those that have a row of their own."""

    def __init__(
        self,
        *,
        job_id: str,
        tenant: str,
        state: JobState,
        created_at: float,
        version: int,
        spec: JobSpec | None,
        packed_spec: bytes,
        body: JobBody,
    ) -> None:
        self.book: Book
        self.job_id = job_id
        self.tenant = tenant
        self.state = state
        self.created_at = created_at
        self.version = version
        """Of the row in the ledger; 0: not there yet."""
        self.packed_spec = packed_spec
        self.body = body
        self._spec = spec
        self.tasks: dict[int, TaskRecord] = {}
        self.live: dict[str, dict[int, TaskRecord]] = {}
        """Cluster → index → record of each live attempt."""
        self.ready: dict[tuple[int, int], dict[int, None]] = {}
        """(attempt number before, memory level) → indices that may be dispatched now."""
        self.waiting: dict[int, None] = {}
        """Queued until their `not_before`."""
        self._alarms: list[tuple[float, int]] = []
        self.pinned: dict[int, None] = {}
        """Queued with a place kept for them."""
        self.levels: dict[int, int] = {}
        """Memory level → queued tasks that were tried before."""
        self.settled: dict[int, dict[int, None]] = {}
        """Chunk number → indices that are settled and not folded in yet."""
        self.codes: dict[int, bytearray] = {}
        """Chunk number → what is folded into it."""
        self.folded: dict[int, int] = {}
        """Chunk number → how many are folded into it."""
        self.dirty: dict[int, None] = {}
        self.dirty_chunks: dict[int, None] = {}
        self.final_at: float | None = None
        self.cancel_sent_at: float | None = None
        self.stuck: dict[str, None] = {}
        """Keys of its shapes that no cluster it may use can ever hold."""
        self._templates: dict[int, TaskTemplate] = {}

    # ------------------------------------------------------------ what it is
    @property
    def spec(self) -> JobSpec:
        """The job. Not for tombstones, which have none."""
        assert self._spec is not None, "a tombstone has no spec"
        return self._spec

    @property
    def is_tombstone(self) -> bool:
        """Whether only its cancel has come."""
        return self._spec is None

    def bring_spec(self, spec: JobSpec, packed: bytes) -> None:
        """The job comes after its tombstone; the row's own spec can change no more."""
        self._spec = spec
        self.body.late_spec = packed
        self.body.size = spec.size

    def template(self, level: int) -> TaskTemplate:
        """What its tasks need, with memory raised `level` times."""
        template = self._templates.get(level)
        if template is None:
            template = self.spec.template
            if level:
                rules = self.book.rules
                shape = template.shape
                raised = int(shape.memory_bytes * rules.memory_factor**level)
                template = msgspec.structs.replace(
                    template, shape=msgspec.structs.replace(shape, memory_bytes=raised)
                )
            self._templates[level] = template
            self.book.shapes.setdefault(template.shape.key, template.shape)
        return template

    def shape(self, level: int) -> Shape:
        """The shape that goes with `template`."""
        return self.template(level).shape

    @property
    def parallel_room(self) -> int:
        """How many more may be live under `limits.parallelism`."""
        limit = self.spec.parallelism
        return self.body.size if limit is None else max(0, limit - self.body.live)

    @property
    def queued_again(self) -> int:
        """Queued tasks that were tried before."""
        return sum(self.levels.values())

    def queued_by_level(self) -> list[tuple[int, int]]:
        """(Memory level, queued tasks) in order of levels, never-started ones included."""
        levels = dict(self.levels)
        if fresh := self.body.fresh:
            levels[0] = levels.get(0, 0) + fresh
        return sorted(levels.items())

    def chunk_size(self, number: int) -> int:
        """Tasks of a chunk: 4,096, fewer in the last one."""
        return min(self.body.size - number * CHUNK_TASKS, CHUNK_TASKS)

    def folded_phase(self, index: int) -> Phase:
        """Of a task that has no row: what its chunk says; queued if it says nothing."""
        codes = self.codes.get(index // CHUNK_TASKS)
        return Phase.QUEUED if codes is None else Phase(codes[index % CHUNK_TASKS])

    # ------------------------------------------------------------ recovery
    def load(self, index: int, record: TaskRecord, now: float) -> None:
        """Take in a row of the ledger."""
        self.tasks[index] = record
        if record.phase is Phase.LIVE:
            self._enter_live(index, record)
        elif record.phase is Phase.QUEUED:
            self._enter_queue(index, record, now)
        else:
            self.settled.setdefault(index // CHUNK_TASKS, {})[index] = None

    def load_codes(self, number: int, codes: bytes) -> None:
        """Take in what is folded into a chunk."""
        self.codes[number] = bytearray(codes)
        self.folded[number] = len(codes) - codes.count(0)

    # ------------------------------------------------------------ moves of tasks
    def dispatch_fresh(self, count: int, *, cluster: str, now: float) -> list[int]:
        """The next `count` never-started tasks go live; `stamp` then names their slices."""
        first = self.body.next_index
        assert count <= self.body.fresh, "only tasks that there are can be dispatched"
        indices = list(range(first, first + count))
        for index in indices:
            record = TaskRecord(phase=Phase.LIVE, attempt=1, cluster=cluster, at=now)
            self.tasks[index] = record
            self._enter_live(index, record)
            self.dirty[index] = None
        self.body.next_index += count
        self.body.live += count
        return indices

    def dispatch_again(self, indices: Iterable[int], *, cluster: str, now: float) -> None:
        """Queued tasks go live under their next attempt number."""
        for index in indices:
            record = self.tasks[index]
            self._leave_queue(index, record)
            record.phase = Phase.LIVE
            record.attempt += 1
            record.cluster = cluster
            record.facts = Attempt()
            record.not_before = 0.0
            record.at = now
            self._enter_live(index, record)
            self.body.live += 1
            self.dirty[index] = None

    def stamp(self, indices: Iterable[int], epoch: int, seq: int) -> None:
        """Note which slice carries these live attempts."""
        for index in indices:
            record = self.tasks[index]
            record.epoch, record.seq = epoch, seq

    def queue_again(
        self, index: int, record: TaskRecord, now: float, *, raise_memory: bool = False
    ) -> None:
        """A live task's attempt has ended and another is due (`record` says when and where)."""
        self._leave_live(index, record)
        self.body.live -= 1
        record.phase = Phase.QUEUED
        if raise_memory:
            record.level += self._may_raise(record.level)
        self._enter_queue(index, record, now)
        self.dirty[index] = None

    def _may_raise(self, level: int) -> bool:
        """Whether more memory may be asked for: not more than the largest node that may run it."""
        if level >= self.book.rules.memory_raises:
            return False
        largest = [
            most
            for cluster, most in self.book.largest.items()
            if not self.spec.clusters or cluster in self.spec.clusters
        ]
        return not largest or self.shape(level + 1).memory_bytes <= max(largest)

    def settle(self, index: int, record: TaskRecord, phase: Phase) -> None:
        """The task is done: from the queue, from a live attempt, or from another verdict."""
        body = self.body
        if record.phase is Phase.LIVE:
            self._leave_live(index, record)
            body.live -= 1
        elif record.phase is Phase.QUEUED:
            self._leave_queue(index, record)
        elif record.phase is Phase.FAILED:
            body.failed -= 1
        if phase is Phase.SUCCEEDED:
            body.succeeded += 1
        elif phase is Phase.FAILED:
            body.failed += 1
        else:
            body.cancelled += 1
        record.phase = phase
        number = index // CHUNK_TASKS
        self.settled.setdefault(number, {})[index] = None
        self.dirty_chunks[number] = None
        self.dirty[index] = None

    def unfold(self, index: int, record: TaskRecord) -> None:
        """Give a folded task a row of its own again: something became of it."""
        number = index // CHUNK_TASKS
        if self.codes[number][index % CHUNK_TASKS]:
            self.codes[number][index % CHUNK_TASKS] = 0
            self.folded[number] -= 1
        self.tasks[index] = record
        self.settled.setdefault(number, {})[index] = None
        self.dirty[index] = None

    def promote(self, now: float) -> None:
        """Queued tasks whose pause is over become ready."""
        while self._alarms and self._alarms[0][0] <= now:
            _, index = heapq.heappop(self._alarms)
            record = self.tasks.get(index)
            # An alarm may be of an earlier pause, or of a task that a late success has settled.
            if index in self.waiting and record is not None and record.not_before <= now:
                del self.waiting[index]
                self.ready.setdefault((record.attempt, record.level), {})[index] = None

    def next_alarm(self) -> float | None:
        """When the next pause ends, at the earliest."""
        return self._alarms[0][0] if self._alarms else None

    def cancel_fresh(self) -> None:
        """All tasks that never started are cancelled, in one stroke."""
        if self.body.cancelled_from is None:
            self.body.cancelled += self.body.size - self.body.next_index
            self.body.cancelled_from = self.body.next_index

    def queued_indices(self) -> Iterator[int]:
        """Queued tasks that were tried before, in no particular but always the same order."""
        for group in self.ready.values():
            yield from group
        yield from self.waiting
        yield from self.pinned

    # ------------------------------------------------------------ state and folding
    def conclude(self, now: float) -> bool:
        """Set the final state if nothing is left to do; whether that happened now."""
        body = self.body
        if self.state.is_final or body.queued or body.live:
            return False
        if self.state is JobState.CANCELLING:
            self.state = JobState.CANCELLED
        elif body.failed or body.cancelled:
            self.state = JobState.FAILED
        else:
            self.state = JobState.SUCCEEDED
        body.waiting = []
        body.ended_at = now
        self.final_at = now
        return True

    def chunks_due(self) -> list[int]:
        """Chunks worth writing anew: many tasks settled since, all of them, or the job ended."""
        if self.state.is_final:
            return sorted(number for number, rows in self.settled.items() if rows)
        rows = self.book.rules.fold_rows
        return [
            number
            for number in sorted(self.dirty_chunks)
            if (there := len(self.settled.get(number, ()))) >= rows
            or (there and there + self.folded.get(number, 0) >= self.chunk_size(number))
        ]

    def to_fold(self, number: int) -> list[tuple[int, TaskRecord]]:
        """Settled tasks of a chunk that still have rows."""
        return [(index, self.tasks[index]) for index in self.settled.get(number, ())]

    def folded_in(self, number: int, codes: bytes) -> list[int]:
        """Forget the rows that are in the chunk now; returns their indices."""
        indices = list(self.settled.pop(number, ()))
        for index in indices:
            del self.tasks[index]
            self.dirty.pop(index, None)
        self.load_codes(number, codes)
        return indices

    # ------------------------------------------------------------ bookkeeping
    def _enter_live(self, index: int, record: TaskRecord) -> None:
        self.live.setdefault(record.cluster, {})[index] = record
        self.book.count(self, record, 1)

    def _leave_live(self, index: int, record: TaskRecord) -> None:
        there = self.live[record.cluster]
        del there[index]
        if not there:
            del self.live[record.cluster]
        self.book.count(self, record, -1)

    def _enter_queue(self, index: int, record: TaskRecord, now: float) -> None:
        self.levels[record.level] = self.levels.get(record.level, 0) + 1
        if record.pin_node:
            self.pinned[index] = None
        elif record.not_before > now:
            self.waiting[index] = None
            heapq.heappush(self._alarms, (record.not_before, index))
        else:
            self.ready.setdefault((record.attempt, record.level), {})[index] = None

    def _leave_queue(self, index: int, record: TaskRecord) -> None:
        left = self.levels[record.level] - 1
        if left:
            self.levels[record.level] = left
        else:
            del self.levels[record.level]
        if index in self.pinned:
            del self.pinned[index]
        elif index in self.waiting:
            del self.waiting[index]
        else:
            key = (record.attempt, record.level)
            group = self.ready[key]
            del group[index]
            if not group:
                del self.ready[key]


# ---------------------------------------------------------------- decisions as values


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Tasks of one job and shape that could be dispatched now."""

    job_id: str
    tenant: str
    priority: int
    created_at: float
    level: int
    shape: Shape
    count: int
    clusters: tuple[str, ...] = ()
    """Where they may run; empty: anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """So many tasks of a candidate go to a cluster."""

    job_id: str
    level: int
    cluster: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Tasks of one shape that have no place and may use the same clusters."""

    shape: str
    clusters: tuple[str, ...]
    count: int


@dataclass(slots=True)
class Apportioned:
    """Backlog per (cluster, shape), and shapes that no cluster they may use can ever hold."""

    shares: dict[tuple[str, str], int] = field(default_factory=dict)
    unschedulable: dict[tuple[str, tuple[str, ...]], None] = field(default_factory=dict)
    """(shape, clusters) pairs, in order."""
