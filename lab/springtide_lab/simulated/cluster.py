"""A simulated cluster: nodes that boot, pods that bind and run, agents that save and restore.

One owned task works through a heap of timed events, so a run is a function of its inputs and seed.
Records and manifests go to a real `ObjectStore`, so what the services read there is what an agent
would have written.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import random
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from springtide_lab.simulated.model import ClusterModel, GroupModel, TaskRun, WorkModel
from springtide_shared.errors import (
    ConflictError,
    NotFoundError,
    PermanentError,
    Reason,
    TransientError,
)
from springtide_shared.messages.records import (
    ANNOTATION_CHECKPOINT,
    EXIT_REFUSED_RECORD_EXISTS,
    EXIT_STORE_UNAVAILABLE,
    CheckpointOrder,
    CompletionRecord,
    Manifest,
    Termination,
    attempt_prefix,
    manifest_key,
    manifests_prefix,
    record_key,
    task_prefix,
)
from springtide_shared.messages.task import AttemptKey
from springtide_shared.ports.clock import Clock
from springtide_shared.ports.cluster import (
    LABEL_GROUP,
    LABEL_SLOT,
    Instance,
    InstanceState,
    NodeGroupView,
    NodeView,
    PodChanges,
    PodPhase,
    PodSpec,
    PodView,
)
from springtide_shared.ports.metrics import PodReading
from springtide_shared.ports.store import ObjectStore
from springtide_shared.runtime.service import Wake
from springtide_shared.testing.virtual import RESOLUTION
from springtide_shared.units import Resources

_GONE_KEPT: Final = 20_000
_IDLE_SECONDS: Final = 86_400.0
_EXIT_TERMINATED: Final = 143
_EXIT_KILLED: Final = 137

Action = Callable[[], Awaitable[None]]


@dataclass(slots=True, eq=False)
class _Machine:
    """One machine of a group, and the node it becomes."""

    instance_id: str
    group: GroupModel
    launched_at: float
    node: str = ""
    uid: str = ""
    ready_at: float | None = None
    cordoned: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    used: Resources = field(default_factory=Resources)
    pods: dict[str, _Pod] = field(default_factory=dict)
    terminating: bool = False
    lost: bool = False
    """The machine died; its node object stays, not ready, until somebody removes it."""


@dataclass(slots=True, eq=False)
class _Pod:
    """One pod and the agent in it."""

    name: str
    uid: str
    spec: PodSpec
    created_at: float
    requests: Resources
    annotations: dict[str, str]
    version: int = 0
    machine: _Machine | None = None
    phase: PodPhase = PodPhase.PENDING
    started_at: float | None = None
    ended_at: float | None = None
    deletion_at: float | None = None
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    run: TaskRun | None = None
    restored: float = 0.0
    """Progress in seconds that this attempt began with."""
    restored_key: str = ""
    working_since: float | None = None
    """None while it restores, saves or is frozen."""
    worked: float = 0.0
    """Progress made in this attempt up to `working_since`."""
    order: CheckpointOrder | None = None
    saves: int = 0
    edition: int = 0
    """Grows whenever a timed event of the pod is out of date."""
    store_tries_until: float | None = None

    def progress(self, now: float) -> float:
        """Run time of the program so far, restored progress included."""
        running = now - self.working_since if self.working_since is not None else 0.0
        return self.restored + self.worked + running


class SimulatedCluster:
    """ClusterView, PodControl, NodeControl, NodeGroups and PodStats in one; see the module."""

    def __init__(
        self,
        name: str,
        groups: Sequence[GroupModel],
        *,
        store: ObjectStore,
        work: WorkModel,
        clock: Clock,
        seed: int,
        model: ClusterModel | None = None,
    ) -> None:
        self.name = name
        self.model = model or ClusterModel()
        self._groups = {group.name: group for group in sorted(groups, key=lambda g: g.name)}
        self._sizes = dict.fromkeys(self._groups, 0)
        self._tokens: dict[str, None] = {}
        self._machines: dict[str, _Machine] = {}
        self._store = store
        self._work = work
        self._clock = clock
        self._dice = random.Random(f"{seed}/{name}")
        self._pods: OrderedDict[str, _Pod] = OrderedDict()
        """By name, the most recently changed last."""
        self._gone: deque[tuple[int, PodView]] = deque()
        self._forgotten = 0
        self._unbound: dict[str, _Pod] = {}
        self._version = 1
        self._waiters: list[asyncio.Future[None]] = []
        """Who waits for a change."""
        self._heap: list[tuple[float, int, Action]] = []
        self._events = 0
        self._alarm = Wake()
        self._node_views: list[NodeView] | None = None
        self._group_views: list[NodeGroupView] | None = None
        """What was last answered, until a machine changes."""
        self._open: list[_Machine] | None = None
        self._open_slots: dict[str, list[_Machine]] = {}
        """Machines that take pods, all and by their slot label, until a machine changes."""
        self._serial = 0
        self._outage_until = 0.0
        self._out_of_stock: dict[str, Reason] = {}
        self.creates = 0
        self.most_pods = 0
        self.pods_of_finished_tasks = 0
        self.machine_seconds = 0.0
        """Billed seconds of machines that have ended."""

    # ------------------------------------------------------------ life
    @asynccontextmanager
    async def running(self) -> AsyncIterator[SimulatedCluster]:
        """The cluster lives while this context is open."""
        engine = asyncio.get_running_loop().create_task(self._engine(), name=f"cluster/{self.name}")
        try:
            yield self
        finally:
            engine.cancel()
            with suppress(asyncio.CancelledError):
                await engine

    async def _engine(self) -> None:
        while True:
            now = self._clock.monotonic()
            due = self._heap[0][0] if self._heap else now + _IDLE_SECONDS
            if due > now + RESOLUTION:
                await self._alarm.wait(due - now)
                continue
            _, _, action = heapq.heappop(self._heap)
            await action()

    def _after(self, seconds: float, action: Action) -> None:
        self._events += 1
        heapq.heappush(
            self._heap, (self._clock.monotonic() + max(seconds, 0.0), self._events, action)
        )
        if self._heap[0][1] == self._events:
            self._alarm()

    # ------------------------------------------------------------ faults, for tests and scenarios
    def outage(self, seconds: float) -> None:
        """The API answers nobody for a while; nodes and pods go on."""
        self._outage_until = self._clock.monotonic() + seconds

    def stock_out(self, group: str, reason: Reason | None = Reason.CAPACITY) -> None:
        """The group gets no more machines, until called with None."""
        if reason is None:
            self._out_of_stock.pop(group, None)
        else:
            self._out_of_stock[group] = reason

    def end_program(self, uid: str, exit_code: int) -> None:
        """Let the program of a running pod end by itself now."""
        (pod,) = (pod for pod in self._pods.values() if pod.uid == uid)
        assert pod.run is not None, "it does not run yet"
        self._pause(pod)
        pod.run = TaskRun(pod.restored + pod.worked, exit_code)
        self._resume_later(pod, 0.0)

    async def lose_node(self, node: str) -> None:
        """The machine dies at once: programs end unsaved, the node object stays, not ready."""
        machine = self._by_node(node)
        if machine.lost:
            return
        machine.lost = True
        self._sizes[machine.group.name] -= 1  # the cloud took it back and sends no other
        self.machine_seconds += self._clock.now() - machine.launched_at
        machine.ready_at = None
        self._forget_views()
        for pod in list(machine.pods.values()):
            await self._materialise_periodic(pod)
            self._vanish(pod)

    def nodes_now(self) -> Sequence[str]:
        """Names of nodes that are ready, in order."""
        return sorted(m.node for m in self._machines.values() if m.ready_at is not None)

    def live_machines(self) -> int:
        """Machines that are billed now."""
        return len(self._machines)

    def live_pods(self) -> int:
        """Pods that exist now."""
        return len(self._pods)

    def _answer(self) -> None:
        if self._clock.monotonic() < self._outage_until:
            raise TransientError(Reason.CLUSTER_UNAVAILABLE, "the API server does not answer")

    # ------------------------------------------------------------ ClusterView
    async def identity(self) -> str:
        """Uid of the cluster."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:32]

    async def pods_since(self, version: int) -> PodChanges:
        """See the port."""
        self._answer()
        if version < self._forgotten or version == 0 or version > self._version:
            pods = [self._view(pod) for pod in self._pods.values()]
            return PodChanges(version=self._version, reset=True, pods=pods, gone=())
        changed = []
        for pod in reversed(self._pods.values()):
            if pod.version <= version:
                break
            changed.append(self._view(pod))
        changed.reverse()
        gone = []
        for at, view in reversed(self._gone):
            if at <= version:
                break
            gone.append(view)
        gone.reverse()
        return PodChanges(version=self._version, reset=False, pods=changed, gone=gone)

    async def wait_for_change(self, version: int, limit: float) -> None:
        """See the port."""
        if self._version > version:
            return
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        alarm = loop.call_later(limit, _resolve, waiter)
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            alarm.cancel()
            with suppress(ValueError):
                self._waiters.remove(waiter)

    async def nodes(self) -> Sequence[NodeView]:
        """See the port."""
        self._answer()
        if self._node_views is None:
            found = [self._node_view(m) for m in self._machines.values() if m.node]
            self._node_views = sorted(found, key=lambda node: node.name)
        return self._node_views

    async def pods_on(self, node: str) -> Sequence[PodView]:
        """See the port."""
        self._answer()
        machine = self._find_node(node)
        if machine is None:
            return ()
        return [self._view(pod) for pod in machine.pods.values() if not pod.phase.is_terminated]

    # ------------------------------------------------------------ PodControl
    async def create(self, spec: PodSpec) -> PodView:
        """See the port."""
        self._answer()
        known = self._pods.get(spec.name)
        if known is not None:
            if known.spec.attempt != spec.attempt:
                raise ConflictError(Reason.DUPLICATE_ID, "the pod's name is taken", pod=spec.name)
            return self._view(known)
        self.creates += 1
        self._serial += 1
        pod = _Pod(
            name=spec.name,
            uid=f"{self.name}-pod-{self._serial}",
            spec=spec,
            created_at=self._clock.now(),
            requests=spec.template.shape.resources,
            annotations=dict(spec.annotations),
        )
        self._pods[pod.name] = pod
        self.most_pods = max(self.most_pods, len(self._pods))
        self._unbound[pod.name] = pod
        self._touch(pod)
        self._after(self.model.bind_seconds, self._bind_round)
        return self._view(pod)

    async def delete(self, name: str, uid: str, grace: float) -> bool:
        """See the port."""
        self._answer()
        pod = self._pods.get(name)
        if pod is None or pod.uid != uid:
            return False
        if pod.phase.is_terminated or pod.machine is None:
            self._remove(pod)
        elif pod.deletion_at is None:
            pod.deletion_at = self._clock.now()
            self._touch(pod)
            frozen = pod.order is not None and pod.working_since is None
            delay = 0.0 if frozen else min(grace, self.model.stop_seconds)
            obeys = frozen or grace >= self.model.stop_seconds
            edition = pod.edition

            async def end() -> None:
                if pod.edition == edition or not pod.phase.is_terminated:
                    if obeys and not frozen:
                        await self._materialise_periodic(pod, at_end=True)
                    self._end(pod, _EXIT_TERMINATED if obeys else _EXIT_KILLED, "Error")
                if self._pods.get(pod.name) is pod:
                    self._remove(pod)

            self._after(delay, end)
        return True

    async def annotate(self, name: str, uid: str, annotations: Mapping[str, str]) -> bool:
        """See the port."""
        self._answer()
        pod = self._pods.get(name)
        if pod is None or pod.uid != uid:
            return False
        for key, value in annotations.items():
            if value:
                pod.annotations[key] = value
            else:
                pod.annotations.pop(key, None)
        self._touch(pod)
        if pod.phase is PodPhase.RUNNING:
            self._after(self.model.order_seconds, lambda: self._read_order(pod))
        return True

    # ------------------------------------------------------------ NodeControl
    async def cordon(self, node: str, *, cordoned: bool) -> None:
        """See the port."""
        self._answer()
        self._by_node(node).cordoned = cordoned
        self._machine_changed()
        if not cordoned:
            self._bind_soon()

    async def label(self, node: str, labels: Mapping[str, str]) -> None:
        """See the port."""
        self._answer()
        self._by_node(node).labels.update(labels)
        self._machine_changed()
        self._bind_soon()

    async def delete_node(self, node: str, uid: str) -> None:
        """`NodeControl.delete`; see `SimulatedNodes`."""
        self._answer()
        machine = self._by_node(node)
        if machine.uid != uid:
            raise NotFoundError(Reason.UNKNOWN_NODE, "no such node", node=node, uid=uid)
        if machine.lost:
            del self._machines[machine.instance_id]
            self._machine_changed()

    # ------------------------------------------------------------ NodeGroups
    async def groups(self) -> Sequence[NodeGroupView]:
        """See the port."""
        self._answer()
        if self._group_views is None:
            self._group_views = self._all_groups()
        return self._group_views

    def _all_groups(self) -> list[NodeGroupView]:
        return [
            NodeGroupView(
                name=group.name,
                instance_type=group.instance_type,
                allocatable=group.allocatable,
                price_per_hour=group.price_per_hour,
                size=self._sizes[group.name],
                max_size=group.max_size,
                boot_seconds=group.boot_seconds,
                instances=[
                    Instance(
                        instance_id=machine.instance_id,
                        state=self._instance_state(machine),
                        launched_at=machine.launched_at,
                    )
                    for machine in self._machines.values()
                    if machine.group is group and not machine.lost
                ],
            )
            for group in self._groups.values()
        ]

    async def set_size(self, group: str, size: int, token: str) -> None:
        """See the port."""
        self._answer()
        model = self._group(group)
        if token in self._tokens:
            return
        if size > model.max_size:
            raise PermanentError(
                Reason.QUOTA,
                "above the group's maximum",
                group=group,
                size=size,
                most=model.max_size,
            )
        missing = size - self._sizes[group]
        if missing < 0:
            raise PermanentError(
                Reason.INVALID_SPEC, "a wish is never lowered by size", group=group, size=size
            )
        if missing > 0 and (why := self._out_of_stock.get(group)) is not None:
            raise PermanentError(why, "no machine of this type is to be had", group=group)
        self._tokens[token] = None
        for _ in range(missing):
            self._launch(model)
        self._sizes[group] = size
        self._forget_views()

    async def terminate(self, group: str, instance_id: str) -> None:
        """See the port."""
        self._answer()
        model = self._group(group)
        machine = self._machines.get(instance_id)
        if machine is None or machine.group is not model or machine.terminating:
            return
        machine.terminating = True
        self._sizes[group] -= 1
        self._forget_views()

        async def gone() -> None:
            for pod in list(machine.pods.values()):
                await self._materialise_periodic(pod)
                self._vanish(pod)
            if self._machines.pop(instance_id, None) is not None and not machine.lost:
                self.machine_seconds += self._clock.now() - machine.launched_at
            self._machine_changed()

        self._after(self.model.release_seconds, gone)

    # ------------------------------------------------------------ PodStats
    async def read(self) -> Sequence[PodReading]:
        """Counters of running pods; a working program uses nine tenths of its request."""
        now = self._clock.now()
        return [
            PodReading(
                pod_uid=pod.uid,
                at=now,
                cpu_seconds=0.9
                * pod.requests.cpu_millis
                / 1000
                * (pod.progress(self._clock.monotonic()) - pod.restored),
                memory_bytes=pod.requests.memory_bytes // 2,
            )
            for pod in self._pods.values()
            if pod.phase is PodPhase.RUNNING
        ]

    # ------------------------------------------------------------ nodes
    def _group(self, name: str) -> GroupModel:
        group = self._groups.get(name)
        if group is None:
            raise NotFoundError(Reason.UNKNOWN_NODE, "no such node group", group=name)
        return group

    def _launch(self, group: GroupModel) -> None:
        self._serial += 1
        machine = _Machine(
            instance_id=f"{self.name}-i-{self._serial}", group=group, launched_at=self._clock.now()
        )
        self._machines[machine.instance_id] = machine
        spread = 1.0 + self.model.boot_jitter * self._dice.uniform(-1.0, 1.0)

        async def joined() -> None:
            if machine.instance_id not in self._machines or machine.terminating:
                return
            machine.node = machine.instance_id.replace("-i-", "-node-")
            machine.uid = f"{machine.node}-uid"
            machine.ready_at = self._clock.now()
            machine.labels[LABEL_GROUP] = group.name
            self._machine_changed()
            await self._bind_round()

        self._after(group.boot_seconds * spread, joined)

    def _instance_state(self, machine: _Machine) -> InstanceState:
        if machine.terminating:
            return InstanceState.TERMINATING
        return InstanceState.RUNNING if machine.node else InstanceState.BOOTING

    def _node_view(self, machine: _Machine) -> NodeView:
        return NodeView(
            name=machine.node,
            uid=machine.uid,
            provider_id=machine.instance_id,
            group=machine.group.name,
            slot=machine.labels.get(LABEL_SLOT, ""),
            ready=machine.ready_at is not None and not machine.terminating,
            cordoned=machine.cordoned,
            allocatable=machine.group.allocatable,
            created_at=machine.launched_at,
            ready_at=machine.ready_at,
        )

    def _find_node(self, node: str) -> _Machine | None:
        machine = self._machines.get(node.replace("-node-", "-i-"))
        return machine if machine is not None and machine.node == node else None

    def _by_node(self, node: str) -> _Machine:
        machine = self._find_node(node)
        if machine is None:
            raise NotFoundError(Reason.UNKNOWN_NODE, "no such node", node=node)
        return machine

    # ------------------------------------------------------------ pods
    def _bind_soon(self) -> None:
        """There is room, or a place opened: look at the pods that wait for one."""
        if self._unbound:
            self._after(self.model.bind_seconds, self._bind_round)

    async def _bind_round(self) -> None:
        for pod in list(self._unbound.values()):
            machine = self._node_for(pod)
            if machine is None:
                continue
            del self._unbound[pod.name]
            pod.machine = machine
            machine.used = machine.used + pod.requests
            machine.pods[pod.name] = pod
            self._touch(pod)
            self._after(self.model.pod_start_seconds, partial(self._start, pod))

    def _node_for(self, pod: _Pod) -> _Machine | None:
        """Affinity first; without one the fullest node that fits (MostAllocated)."""
        best: tuple[int, str] | None = None
        chosen = None
        for machine in self._candidates(pod.spec):
            room = machine.group.allocatable - machine.used
            if not pod.requests.fits(room):
                continue
            rank = (room.cpu_millis, machine.node)
            if best is None or rank < best:
                best, chosen = rank, machine
        return chosen

    def _candidates(self, spec: PodSpec) -> Sequence[_Machine]:
        """Machines that take pods and that the pod's affinity allows."""
        if self._open is None:
            self._open = [
                machine
                for machine in self._machines.values()
                if machine.ready_at is not None and not machine.cordoned and not machine.terminating
            ]
            self._open_slots = {}
            for machine in self._open:
                self._open_slots.setdefault(machine.labels.get(LABEL_SLOT, ""), []).append(machine)
        if spec.node:
            return [machine for machine in self._open if machine.node == spec.node]
        return self._open_slots.get(spec.slot, ()) if spec.slot else self._open

    async def _start(self, pod: _Pod) -> None:
        if pod.phase is not PodPhase.PENDING or pod.machine is None or pod.deletion_at is not None:
            return
        key = pod.spec.attempt
        pod.phase = PodPhase.RUNNING
        pod.started_at = self._clock.now()
        self._touch(pod)
        try:
            earlier = await self._earlier_record(key)
            manifest_name, manifest = await self._newest_manifest(key)
        except TransientError:
            self._try_store_again(pod, lambda: self._restart(pod))
            return
        if earlier is not None:
            number, digest = earlier
            self.pods_of_finished_tasks += 1
            pod.message = msgspec.json.encode(
                Termination(digest=digest, record_attempt=number)
            ).decode()
            self._end(pod, EXIT_REFUSED_RECORD_EXISTS, "Error")
            return
        pod.run = self._work.run(key.job_id, key.index, key.attempt)
        delay = 0.0
        if manifest is not None:
            pod.restored = manifest.progress_seconds
            pod.restored_key = manifest_name
            delay = self.model.restore_seconds
        self._resume_later(pod, delay)

    async def _restart(self, pod: _Pod) -> None:
        if pod.phase is not PodPhase.RUNNING:
            return  # it went, or was ended, while its agent waited for the store
        pod.phase = PodPhase.PENDING
        await self._start(pod)

    def _resume_later(self, pod: _Pod, delay: float) -> None:
        """Let the program work from `delay` on until its end."""
        assert pod.run is not None
        pod.edition += 1
        edition = pod.edition

        async def work() -> None:
            if pod.edition != edition or pod.phase is not PodPhase.RUNNING:
                return
            assert pod.run is not None
            pod.working_since = self._clock.monotonic()
            left = pod.run.seconds - pod.restored - pod.worked
            self._after(left, lambda: self._finish(pod, edition))

        self._after(delay, work)

    def _pause(self, pod: _Pod) -> None:
        if pod.working_since is not None:
            pod.worked += self._clock.monotonic() - pod.working_since
            pod.working_since = None
        pod.edition += 1

    async def _finish(self, pod: _Pod, edition: int) -> None:
        if pod.edition != edition or pod.phase is not PodPhase.RUNNING:
            return
        assert pod.run is not None
        assert pod.started_at is not None
        self._pause(pod)
        if pod.run.exit_code != 0:
            self._end(pod, pod.run.exit_code, "Error")
            return
        key = pod.spec.attempt
        record = CompletionRecord(
            job_id=key.job_id,
            index=key.index,
            attempt=key.attempt,
            pod_uid=pod.uid,
            exit_code=0,
            started_at=pod.started_at,
            ended_at=self._clock.now(),
            progress_seconds=pod.run.seconds,
            restored_from=pod.restored_key,
            restored_progress_seconds=pod.restored,
        )
        data = msgspec.json.encode(record)
        edition = pod.edition

        async def store() -> None:
            if pod.edition != edition or pod.phase is not PodPhase.RUNNING:
                return
            try:
                await self._store.put_if_absent(
                    record_key(key.job_id, key.index, key.attempt), data
                )
            except TransientError:
                self._try_store_again(pod, store)
                return
            digest = hashlib.sha256(data).hexdigest()
            pod.message = msgspec.json.encode(Termination(digest=digest)).decode()
            self._end(pod, 0, "Completed")

        await store()

    def _try_store_again(self, pod: _Pod, action: Action) -> None:
        now = self._clock.monotonic()
        if pod.store_tries_until is None:
            pod.store_tries_until = now + self.model.store_limit_seconds
        if now >= pod.store_tries_until:
            self._end(pod, EXIT_STORE_UNAVAILABLE, "Error")
        else:
            self._after(self.model.store_retry_seconds, action)

    def _end(self, pod: _Pod, exit_code: int, reason: str) -> None:
        self._pause(pod)
        pod.phase = PodPhase.SUCCEEDED if exit_code == 0 else PodPhase.FAILED
        pod.exit_code = exit_code
        pod.reason = reason
        pod.ended_at = self._clock.now()
        self._leave_node(pod)
        self._touch(pod)

    def _leave_node(self, pod: _Pod) -> None:
        if pod.machine is not None and pod.machine.pods.pop(pod.name, None) is not None:
            pod.machine.used = pod.machine.used - pod.requests
            self._bind_soon()

    def _vanish(self, pod: _Pod) -> None:
        """The pod goes without a terminal phase: its node is gone."""
        self._pause(pod)
        self._remove(pod)

    def _remove(self, pod: _Pod) -> None:
        self._unbound.pop(pod.name, None)
        self._leave_node(pod)
        pod.edition += 1
        view = self._view(pod)
        if not pod.phase.is_terminated:
            pod.phase = PodPhase.FAILED
        del self._pods[pod.name]
        self._bump()
        self._gone.append((self._version, view))
        while len(self._gone) > _GONE_KEPT:
            self._forgotten, _ = self._gone.popleft()

    # ------------------------------------------------------------ checkpoints
    async def _read_order(self, pod: _Pod) -> None:
        """The agent looks at its annotations."""
        if pod.phase is not PodPhase.RUNNING or pod.run is None:
            return
        text = pod.annotations.get(ANNOTATION_CHECKPOINT, "")
        if not text:
            if pod.order is not None:
                pod.order = None
                self._resume_later(pod, 0.0)
            return
        order = msgspec.json.decode(text, type=CheckpointOrder)
        if pod.order == order or pod.working_since is None:
            return
        self._pause(pod)
        pod.order = order
        edition = pod.edition
        save = pod.run.save_seconds
        save = self.model.save_seconds if save is None else save

        async def stored() -> None:
            if pod.edition != edition or pod.order is not order:
                return
            try:
                await self._save(pod, order.migration_id, save)
            except TransientError:
                await thaw()
                return
            self._after(order.valid_until - self._clock.now(), thaw)

        async def thaw() -> None:
            if pod.edition == edition and pod.order is order and pod.deletion_at is None:
                pod.order = None
                self._resume_later(pod, 0.0)

        self._after(save, stored)

    async def _save(self, pod: _Pod, migration_id: str, save_seconds: float) -> None:
        key = pod.spec.attempt
        pod.saves += 1
        manifest = Manifest(
            job_id=key.job_id,
            index=key.index,
            attempt=key.attempt,
            pod_uid=pod.uid,
            seq=pod.saves,
            created_at=self._clock.now(),
            progress_seconds=pod.progress(self._clock.monotonic()),
            save_seconds=save_seconds,
            migration_id=migration_id,
        )
        await self._store.put_if_absent(
            manifest_key(key.job_id, key.index, key.attempt, pod.saves),
            msgspec.json.encode(manifest),
        )

    async def _materialise_periodic(self, pod: _Pod, *, at_end: bool = False) -> None:
        """Write the newest periodic checkpoint of a pod that is about to die.

        Earlier ones would have been replaced by it unread, so they are never written.
        """
        spec = pod.spec.template.checkpoint
        if spec is None or pod.run is None or pod.phase is not PodPhase.RUNNING:
            return
        done = pod.progress(self._clock.monotonic()) - pod.restored
        if not at_end:
            if spec.every_seconds is None:
                return
            done = done // spec.every_seconds * spec.every_seconds
        if done <= 0:
            return
        self._pause(pod)
        pod.worked = done
        with suppress(TransientError):
            await self._save(pod, "", self.model.save_seconds)

    async def _earlier_record(self, key: AttemptKey) -> tuple[int, str] | None:
        if key.attempt == 1:
            return None
        prefix = f"{task_prefix(key.job_id, key.index)}attempts/"
        own = attempt_prefix(key.job_id, key.index, key.attempt)
        for info in await self._store.list(prefix):
            if info.key.endswith("/completion.json") and not info.key.startswith(own):
                data = await self._store.get(info.key)
                record = msgspec.json.decode(data, type=CompletionRecord)
                return record.attempt, hashlib.sha256(data).hexdigest()
        return None

    async def _newest_manifest(self, key: AttemptKey) -> tuple[str, Manifest | None]:
        if key.attempt == 1:
            return "", None
        names = await self._store.list(manifests_prefix(key.job_id, key.index))
        if not names:
            return "", None
        newest = names[-1].key
        return newest, msgspec.json.decode(await self._store.get(newest), type=Manifest)

    # ------------------------------------------------------------ views
    def _bump(self) -> None:
        self._version += 1
        if self._waiters:
            for waiter in self._waiters:
                _resolve(waiter)
            self._waiters.clear()

    def _machine_changed(self) -> None:
        """A machine or its node is another one now: nothing answered before holds."""
        self._forget_views()
        self._bump()

    def _forget_views(self) -> None:
        self._node_views = self._group_views = self._open = None

    def _touch(self, pod: _Pod) -> None:
        self._bump()
        pod.version = self._version
        if pod.name in self._pods:
            self._pods.move_to_end(pod.name)

    def _view(self, pod: _Pod) -> PodView:
        return PodView(
            name=pod.name,
            uid=pod.uid,
            attempt=pod.spec.attempt,
            phase=pod.phase,
            node=pod.machine.node if pod.machine is not None else "",
            slot=pod.spec.slot,
            requests=pod.requests,
            created_at=pod.created_at,
            started_at=pod.started_at,
            ended_at=pod.ended_at,
            deletion_at=pod.deletion_at,
            exit_code=pod.exit_code,
            reason=pod.reason,
            message=pod.message,
            annotations=dict(pod.annotations),
        )


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class SimulatedNodes:
    """`NodeControl`: its `delete` means something else than that of pods."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    async def cordon(self, node: str, *, cordoned: bool) -> None:
        """See the port."""
        await self._cluster.cordon(node, cordoned=cordoned)

    async def label(self, node: str, labels: Mapping[str, str]) -> None:
        """See the port."""
        await self._cluster.label(node, labels)

    async def delete(self, node: str, uid: str) -> None:
        """See the port."""
        await self._cluster.delete_node(node, uid)
