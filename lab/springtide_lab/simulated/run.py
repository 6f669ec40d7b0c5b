"""One simulated run: all services in virtual time on simulated clusters, with faults and checks."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import msgspec

from springtide_lab.recorder import Recorder, Recording
from springtide_lab.simulated.cluster import SimulatedCluster, SimulatedNodes
from springtide_lab.simulated.model import ClusterModel, GroupModel, WorkModel
from springtide_lab.stack import ClusterParts, Shared, StackConfig, seat_services
from springtide_lab.supervisor import Supervisor
from springtide_monitor.adapters.sinks import InMemorySink
from springtide_shared.adapters.clock import SeededIds
from springtide_shared.adapters.memory_bus import Faults, InMemoryBus, Item, MemoryBroker
from springtide_shared.adapters.memory_ledger import InMemoryLedger
from springtide_shared.adapters.memory_state import InMemoryLeases, InMemoryState
from springtide_shared.adapters.memory_store import InMemoryStore
from springtide_shared.errors import TransientError
from springtide_shared.ledger.reading import job_view, task_views
from springtide_shared.ledger.views import JobView, TaskView
from springtide_shared.messages import JobSubmit, Kind, encode
from springtide_shared.messages.records import CompletionRecord, Manifest
from springtide_shared.ports.ledger import Ledger
from springtide_shared.ports.state import Document
from springtide_shared.testing.virtual import VirtualClock


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedClusterSpec:
    """One cluster of a run."""

    name: str
    groups: Sequence[GroupModel]
    model: ClusterModel = field(default_factory=ClusterModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """Faults of a run, each drawn from its seed. Seconds are virtual."""

    messages: Faults | None = None
    crash_every_seconds: float | None = None
    """Mean time between two crashes of some service."""
    crash_pause_seconds: float = 5.0
    crash_only: Sequence[str] = ()
    """Seats that crash; empty: any."""
    lose_node_every_seconds: float | None = None
    api_outage_every_seconds: float | None = None
    api_outage_seconds: float = 60.0
    store_outage_every_seconds: float | None = None
    store_outage_seconds: float = 60.0
    until_seconds: float = float("inf")
    """No more faults after this: what must be lost or stuck for ever shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run, a function of this value and nothing else."""

    seed: int
    clusters: Sequence[SimulatedClusterSpec]
    jobs: Sequence[tuple[float, JobSubmit]]
    """(virtual second, job)."""
    work: WorkModel
    config: StackConfig = field(default_factory=StackConfig)
    chaos: Chaos = field(default_factory=Chaos)
    codec: bool = True
    is_traced: bool = True
    """Whether the digest is taken; a run that is measured does without."""
    limit_seconds: float = 30 * 86400.0
    """Virtual seconds by which every job must be final."""
    drained_seconds: float = 3600.0
    """Virtual seconds after the last job by which every node must be gone."""


class LatentState(InMemoryState):
    """Service documents whose keeper takes its time: races show that an instant one hides."""

    SECONDS = 0.08

    async def load(self, key: str) -> Document | None:
        """Load, late."""
        await asyncio.sleep(self.SECONDS)
        return await super().load(key)

    async def save(self, key: str, body: bytes, expected: int) -> int:
        """Save, late, and answer later still."""
        await asyncio.sleep(self.SECONDS)
        version = await super().save(key, body, expected)
        await asyncio.sleep(self.SECONDS)
        return version

    async def delete(self, key: str, expected: int) -> None:
        """Delete, late."""
        await asyncio.sleep(self.SECONDS)
        await super().delete(key, expected)


class TracingBroker(MemoryBroker):
    """Keeps one digest over everything that was ever published, in order and with its time.

    With the codec on, the digest is taken of the very bytes that are sent.
    """

    def __init__(
        self,
        clock: VirtualClock,
        *,
        codec: bool,
        faults: Sequence[Faults],
        is_traced: bool = True,
    ) -> None:
        super().__init__(codec=codec, faults=faults)
        self._clock = clock
        self._is_traced = is_traced
        self._digest = hashlib.sha256()
        self.trace: list[str] | None = None
        """Set to a list to keep the text as well, for finding where two runs part."""

    def send_item(
        self, item: Item, topic: str, kind: Kind, *, cluster: str = "", to: str = ""
    ) -> None:
        """Trace, then send."""
        if self._is_traced:
            line = f"{self._clock.now():.6f} {item.type_name} {cluster} ".encode()
            line += item.body if item.message is None else encode(item.message)
            self._digest.update(line)
            if self.trace is not None:
                self.trace.append(line.decode())
        super().send_item(item, topic, kind, cluster=cluster, to=to)

    @property
    def digest(self) -> str:
        """Digest of the run so far; empty if it is not traced."""
        return self._digest.hexdigest() if self._is_traced else ""


@dataclass(slots=True)
class RunResult:
    """What a run left, for checks, tables and plots."""

    spec: RunSpec
    jobs: dict[str, JobView]
    tasks: dict[str, list[TaskView]]
    records: dict[tuple[str, int], list[CompletionRecord]]
    """Completion records in the object store by (job, index)."""
    manifests: dict[str, Manifest]
    """Manifests that a migration asked for, by its id."""
    recording: Recording
    broker: MemoryBroker
    digest: str
    virtual_seconds: float
    """Until every job was final."""
    drained_seconds: float
    """Until every machine was gone as well."""
    machines_left: dict[str, int]
    pods_left: dict[str, int]
    most_pods: dict[str, int]
    crashes: Counter[str]
    failures: Counter[str]
    node_seconds: float


async def simulate(
    spec: RunSpec,
    *,
    ledger: Ledger | None = None,
    on_start: Callable[[Mapping[str, SimulatedCluster]], None] | None = None,
    trace: list[str] | None = None,
) -> RunResult:
    """Run `spec` on the running virtual loop until all jobs are final and all machines gone.

    Args:
        ledger: another ledger than the one in memory.
        on_start: called with the clusters, to plan faults of a test's own.
        trace: gets every published message as text, also of a run that fails.

    Raises:
        TimeoutError: a job is not final by `limit_seconds`, or a machine is left after
            `drained_seconds`; names what is left.
    """
    loop = asyncio.get_running_loop()
    clock = VirtualClock(loop)
    faults = (spec.chaos.messages,) if spec.chaos.messages is not None else ()
    broker = TracingBroker(
        clock, codec=spec.codec, faults=faults, is_traced=spec.is_traced or trace is not None
    )
    broker.trace = trace
    store = InMemoryStore()
    book: Ledger = InMemoryLedger() if ledger is None else ledger
    lives: Counter[str] = Counter()

    def ids_for(name: str) -> SeededIds:
        lives[name] += 1
        return SeededIds(clock, f"{spec.seed}/{name}/{lives[name]}")

    bus = InMemoryBus(broker)
    shared = Shared(
        bus=bus,
        ledger=book,
        store=store,
        leases=InMemoryLeases(clock),
        clock=clock,
        ids_for=ids_for,
    )
    supervisor = Supervisor(ids_for("supervisor"))
    recorder = Recorder(bus=bus, clock=clock, ids=ids_for("recorder"))
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        clusters = await _open_clusters(spec, store, clock, stack)
        parts = [
            ClusterParts(
                name=name,
                view=cluster,
                pods=cluster,
                nodes=SimulatedNodes(cluster),
                groups=cluster,
                stats=cluster,
                sink=InMemorySink(1_000),
                state=LatentState(),
            )
            for name, cluster in clusters.items()
        ]
        seat_services(supervisor, shared, parts, spec.config)
        if on_start is not None:
            on_start(clusters)
        async with asyncio.TaskGroup() as group:
            group.create_task(recorder.serve(stop), name="recorder")
            group.create_task(supervisor.serve(stop), name="supervisor")
            await asyncio.sleep(1.0)
            began = loop.time()
            chaos = [
                group.create_task(task, name=f"chaos/{i}")
                for i, task in enumerate(_chaos(spec, supervisor, clusters, store))
            ]
            try:
                await _submit(spec, bus)
                finished = await _all_final(spec, book, loop, began)
                for task in chaos:
                    task.cancel()
                drained = await _all_gone(spec, clusters, loop)
            finally:
                for task in chaos:
                    task.cancel()
                stop.set()
    return RunResult(
        spec=spec,
        jobs=await _job_views(spec, book),
        tasks={job.id: await _all_tasks(book, job.id) for _, job in spec.jobs},
        records=await _records(store),
        manifests=await _manifests(store),
        recording=recorder.recording,
        broker=broker,
        digest=broker.digest,
        virtual_seconds=finished,
        drained_seconds=drained,
        machines_left={name: cluster.live_machines() for name, cluster in clusters.items()},
        pods_left={name: cluster.live_pods() for name, cluster in clusters.items()},
        most_pods={name: cluster.most_pods for name, cluster in clusters.items()},
        crashes=Counter({seat.name: seat.crashes for seat in supervisor.seats.values()}),
        failures=supervisor.failures,
        node_seconds=sum(cluster.machine_seconds for cluster in clusters.values()),
    )


async def _open_clusters(
    spec: RunSpec, store: InMemoryStore, clock: VirtualClock, stack: AsyncExitStack
) -> dict[str, SimulatedCluster]:
    return {
        item.name: await stack.enter_async_context(
            SimulatedCluster(
                item.name,
                item.groups,
                store=store,
                work=spec.work,
                clock=clock,
                seed=spec.seed,
                model=item.model,
            ).running()
        )
        for item in spec.clusters
    }


async def _submit(spec: RunSpec, bus: InMemoryBus) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    for at, job in sorted(spec.jobs, key=lambda pair: (pair[0], pair[1].id)):
        await asyncio.sleep(max(0.0, began + at - loop.time()))
        while True:
            try:
                await bus.publish(job)
                break
            except TransientError:
                await asyncio.sleep(5.0)  # a publisher that was not confirmed publishes again


async def _all_final(
    spec: RunSpec, ledger: Ledger, loop: asyncio.AbstractEventLoop, began: float
) -> float:
    step = max(1.0, min(30.0, spec.limit_seconds / 1000))
    while True:
        await asyncio.sleep(step)
        rows = [await ledger.job(job.id) for _, job in spec.jobs]
        open_jobs = [
            job.id
            for (_, job), row in zip(spec.jobs, rows, strict=True)
            if row is None or not row.state.is_final
        ]
        if not open_jobs:
            return loop.time() - began
        if loop.time() - began > spec.limit_seconds:
            views = await _job_views(spec, ledger)
            states = "; ".join(
                f"{name}: {view.state} {view.counts}" for name, view in views.items()
            )
            raise TimeoutError(f"jobs are not final after {spec.limit_seconds:.0f} s: {states}")


async def _all_gone(
    spec: RunSpec, clusters: Mapping[str, SimulatedCluster], loop: asyncio.AbstractEventLoop
) -> float:
    began = loop.time()
    while any(cluster.live_machines() for cluster in clusters.values()):
        if loop.time() - began > spec.drained_seconds:
            left = {name: cluster.nodes_now() for name, cluster in clusters.items()}
            raise TimeoutError(f"machines are left {spec.drained_seconds:.0f} s later: {left}")
        await asyncio.sleep(1.0)
    drained = loop.time() - began
    # Figures of the last attempts and events of the last nodes are still on their way.
    await asyncio.sleep(120.0)
    return drained


def _chaos(
    spec: RunSpec,
    supervisor: Supervisor,
    clusters: Mapping[str, SimulatedCluster],
    store: InMemoryStore,
) -> list[Coroutine[None, None, None]]:
    chaos = spec.chaos
    dice = random.Random(f"{spec.seed}/chaos")
    tasks: list[Coroutine[None, None, None]] = []

    async def again(mean: float, strike: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + chaos.until_seconds
        while loop.time() < end:
            await asyncio.sleep(dice.expovariate(1.0 / mean))
            result = strike()
            if asyncio.iscoroutine(result):
                await result

    def lose_node() -> object:
        name = dice.choice(sorted(clusters))
        nodes = clusters[name].nodes_now()
        return clusters[name].lose_node(dice.choice(nodes)) if nodes else None

    def api_outage() -> None:
        clusters[dice.choice(sorted(clusters))].outage(chaos.api_outage_seconds)

    def store_outage() -> None:
        now = asyncio.get_running_loop().time()
        store.faults.outage(now, now + chaos.store_outage_seconds)

    def crash() -> object:
        name = dice.choice(list(chaos.crash_only) or list(supervisor.seats))
        return supervisor.crash(name, chaos.crash_pause_seconds)

    for mean, strike in (
        (chaos.crash_every_seconds, crash),
        (chaos.lose_node_every_seconds, lose_node),
        (chaos.api_outage_every_seconds, api_outage),
        (chaos.store_outage_every_seconds, store_outage),
    ):
        if mean is not None:
            tasks.append(again(mean, strike))
    return tasks


async def _job_views(spec: RunSpec, ledger: Ledger) -> dict[str, JobView]:
    views = {}
    for _, job in spec.jobs:
        view = await job_view(ledger, job.id)
        if view is not None:
            views[job.id] = view
    return views


async def _all_tasks(ledger: Ledger, job_id: str) -> list[TaskView]:
    tasks: list[TaskView] = []
    while True:
        page = await task_views(ledger, job_id, first=len(tasks), limit=10_000)
        if not page:
            return tasks
        tasks += page


async def _objects(store: InMemoryStore, suffix: str) -> AsyncIterator[bytes]:
    after = ""
    while page := await store.list("jobs/", limit=1_000, after=after):
        for info in page:
            if suffix in info.key:
                yield await store.get(info.key)
        after = page[-1].key


async def _records(store: InMemoryStore) -> dict[tuple[str, int], list[CompletionRecord]]:
    records: dict[tuple[str, int], list[CompletionRecord]] = {}
    async for data in _objects(store, "/completion.json"):
        record = msgspec.json.decode(data, type=CompletionRecord)
        records.setdefault((record.job_id, record.index), []).append(record)
    return records


async def _manifests(store: InMemoryStore) -> dict[str, Manifest]:
    manifests = {}
    async for data in _objects(store, "/checkpoints/manifests/"):
        manifest = msgspec.json.decode(data, type=Manifest)
        if manifest.migration_id:
            manifests[manifest.migration_id] = manifest
    return manifests
