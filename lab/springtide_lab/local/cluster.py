"""The local cluster: one object that is cluster, kubelet and cloud on this machine.

It implements `ClusterView`, `PodControl`, `NodeControl` and `NodeGroups`. Nodes are shares of this
machine's cores, times a stated oversubscription; a pod is the agent's wrapper as a real process in
a session and a directory of its own. Its state is in memory and ends with it: pods that a dead
life left behind are ended at the next start, never adopted, since nobody saw how they went on.

Below `root`: `identity` (the cluster's uid), `lock` (one life at a time) and `pods/<uid>/` with
`pod.json`, `annotations.json`, `termination`, `process.json`, `agent.log`, `work/` and `log/`.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import msgspec
import structlog

from springtide_lab.local.model import (
    LocalGroup,
    check_wish,
    choose_node,
    requests_on,
)
from springtide_lab.local.processes import (
    ProcessRecord,
    ProcessTable,
    end_orphans,
    ended,
    kill_pod,
    record_of,
    resident_bytes,
    start,
)
from springtide_shared.errors import (
    ConflictError,
    InvalidFieldError,
    NotFoundError,
    PermanentError,
    Reason,
    TransientError,
)
from springtide_shared.messages.pod import PodDocument
from springtide_shared.ports.clock import Clock, Ids
from springtide_shared.ports.cluster import (
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
from springtide_shared.units import exit_code_of

_GONE_KEPT: Final = 10_000
"""Pods that left and are still told to whoever asks; who lags further behind is reset."""
_TERMINATION_BYTES: Final = 4_096
"""As much as a kubelet takes from a termination message."""
_ORPHAN_LIMIT_SECONDS: Final = 10.0
_REAP_LIMIT_SECONDS: Final = 10.0


@dataclass(slots=True)
class _Machine:
    """One machine of a group, from its launch until all its processes are gone."""

    group: LocalGroup
    instance_id: str
    launched_at: float
    state: InstanceState = InstanceState.BOOTING

    def view(self) -> Instance:
        return Instance(
            instance_id=self.instance_id, state=self.state, launched_at=self.launched_at
        )


@dataclass(slots=True)
class _Pod:
    """One pod. `version`: of its last change."""

    spec: PodSpec
    view: PodView
    directory: Path
    version: int = 0
    process: subprocess.Popen[bytes] | None = None
    record: ProcessRecord | None = None
    """Of the process, while there is one."""
    task: asyncio.Task[None] | None = None
    """Runs the process; set once the pod is bound."""
    verdict: tuple[str, str] = ("", "")
    """Reason and message of an end that the cluster itself brings about."""
    kill_timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _Group:
    """A node group: its rules, its wish, and the requests it has already served."""

    rules: LocalGroup
    size: int = 0
    tokens: dict[str, None] = field(default_factory=dict)


class LocalCluster:
    """See the module. Use it as an async context manager; leaving it ends every pod.

    Args:
        name: the cluster's name in messages; heads its nodes' names.
        root: directory for everything that it writes; one living cluster each.
        groups: what nodes there can be.
        store_url: told to the agents (`file:///…`).
        oversubscription: how many times this machine's cores are given out to nodes.
        cores: overrides the number of cores that this process may run on.
        agent_command: the wrapper; `exec --pod FILE` is appended.
        poll_seconds, time_scale: told to the agents.
        memory_poll_seconds: how often the memory of pods is compared with their requests; the
            agent itself is not charged. 0: never.
    """

    def __init__(
        self,
        *,
        name: str,
        root: Path,
        groups: Sequence[LocalGroup],
        store_url: str,
        clock: Clock,
        ids: Ids,
        oversubscription: float = 1.0,
        cores: int | None = None,
        agent_command: Sequence[str] = (sys.executable, "-m", "springtide_agent"),
        poll_seconds: float = 0.25,
        time_scale: float = 1.0,
        memory_poll_seconds: float = 1.0,
    ) -> None:
        if len({group.name for group in groups}) != len(groups):
            raise InvalidFieldError("groups", [group.name for group in groups], "name each once")
        if not 0 < oversubscription <= 1000:
            raise InvalidFieldError("oversubscription", oversubscription, "give 0 < n <= 1000")
        self.name = name
        self.cores = cores if cores is not None else _usable_cores()
        self.oversubscription = oversubscription
        self._root = root.resolve()
        self._store_url = store_url
        self._clock = clock
        self._ids = ids
        self._agent_command = tuple(agent_command)
        self._poll_seconds = poll_seconds
        self._time_scale = time_scale
        self._memory_poll_seconds = memory_poll_seconds
        self._log: structlog.stdlib.BoundLogger = structlog.get_logger(cluster=name)
        self._groups = {
            group.name: _Group(group) for group in sorted(groups, key=lambda item: item.name)
        }
        self._machines: dict[str, _Machine] = {}
        self._nodes: dict[str, NodeView] = {}
        self._pods: dict[str, _Pod] = {}
        """By uid, in order of creation."""
        self._uid_by_name: dict[str, str] = {}
        # Versions begin above those of any earlier life, so that what it handed out resets.
        self._version = max(1, int(clock.now() * 1000))
        self._floor = self._version
        self._gone: list[tuple[int, PodView]] = []
        self._changed = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._background: list[asyncio.Task[None]] = []
        self._is_open = False
        self._lock: IO[bytes] | None = None
        self._identity = ""

    # ---------------------------------------------------------------- life
    async def __aenter__(self) -> Self:
        pods = self._root / "pods"
        pods.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self._root / "lock")
        try:
            orphans = await asyncio.to_thread(_clear, pods)
            if orphans:
                self._log.warning("orphans.ended", processes=orphans)
            self._identity = self._load_identity()
        except BaseException:
            self._lock.close()
            raise
        await self._tasks.__aenter__()
        self._is_open = True
        if self._memory_poll_seconds > 0:
            self._own(self._watch_memory(), "memory-watch")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_open = False
        for task in self._background:
            task.cancel()
        for pod in list(self._pods.values()):
            self._kill(pod)
        try:
            if isinstance(error, asyncio.CancelledError):
                await self._tasks.__aexit__(kind, error, traceback)
            else:  # a fault of our user is not ours: it passes as it is
                await self._tasks.__aexit__(None, None, None)
        finally:
            await asyncio.to_thread(_clear, self._root / "pods")
            if self._lock is not None:
                self._lock.close()

    def pod_processes(self) -> list[tuple[str, int]]:
        """(Pod uid, number of its first process, which leads its group) of all running pods."""
        return [
            (uid, pod.process.pid) for uid, pod in self._pods.items() if pod.process is not None
        ]

    # ---------------------------------------------------------------- ClusterView
    async def identity(self) -> str:
        """See `ClusterView.identity`."""
        return self._identity

    async def pods_since(self, version: int) -> PodChanges:
        """See `ClusterView.pods_since`."""
        if not self._floor <= version <= self._version:
            return PodChanges(
                version=self._version,
                reset=True,
                pods=[pod.view for pod in self._pods.values()],
                gone=[],
            )
        return PodChanges(
            version=self._version,
            reset=False,
            pods=[pod.view for pod in self._pods.values() if pod.version > version],
            gone=[view for at, view in self._gone if at > version],
        )

    async def wait_for_change(self, version: int, limit: float) -> None:
        """See `ClusterView.wait_for_change`; nodes' changes wake too."""
        if version == self._version:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    await self._changed.wait()

    async def nodes(self) -> Sequence[NodeView]:
        """See `ClusterView.nodes`."""
        return [self._nodes[name] for name in sorted(self._nodes)]

    async def pods_on(self, node: str) -> Sequence[PodView]:
        """See `ClusterView.pods_on`."""
        return [
            pod.view
            for pod in self._pods.values()
            if pod.view.node == node and not pod.view.phase.is_terminated
        ]

    # ---------------------------------------------------------------- PodControl
    async def create(self, spec: PodSpec) -> PodView:
        """See `PodControl.create`."""
        if not self._is_open:
            raise TransientError(Reason.CLUSTER_UNAVAILABLE, "the local cluster is closed")
        uid = self._uid_by_name.get(spec.name)
        if uid is not None:
            pod = self._pods[uid]
            if pod.spec.attempt != spec.attempt:
                raise ConflictError(
                    Reason.STALE, "the pod's name belongs to another attempt", pod=spec.name
                )
            return pod.view
        if not spec.template.command:
            raise PermanentError(Reason.INVALID_SPEC, "a pod needs a command", pod=spec.name)
        uid = self._ids.new().lower()
        directory = self._root / "pods" / uid
        try:
            self._write_directory(directory, uid, spec)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise TransientError(
                Reason.CLUSTER_UNAVAILABLE, f"the pod's directory: {error.strerror}", pod=spec.name
            ) from error
        pod = _Pod(
            spec=spec,
            directory=directory,
            view=PodView(
                name=spec.name,
                uid=uid,
                attempt=spec.attempt,
                phase=PodPhase.PENDING,
                slot=spec.slot,
                requests=spec.template.shape.resources,
                created_at=self._clock.now(),
                annotations=dict(spec.annotations),
            ),
        )
        self._pods[uid] = pod
        self._uid_by_name[spec.name] = uid
        self._touch(pod)
        self._bind()
        return pod.view

    async def delete(self, name: str, uid: str, grace: float) -> bool:
        """See `PodControl.delete`. The agent gets SIGTERM, after `grace` the whole pod SIGKILL."""
        pod = self._found(name, uid)
        if pod is None:
            return False
        if pod.view.phase.is_terminated or pod.task is None:
            self._remove(pod)
            return True
        if pod.view.deletion_at is None:
            self._touch(pod, deletion_at=self._clock.now())
        loop = asyncio.get_running_loop()
        due = loop.time() + max(0.0, grace)
        if pod.kill_timer is None or due < pod.kill_timer.when():  # a second wish may only hasten
            if pod.kill_timer is not None:
                pod.kill_timer.cancel()
            pod.kill_timer = loop.call_at(due, self._kill, pod)
        if grace > 0 and pod.process is not None:
            with suppress(ProcessLookupError):
                pod.process.send_signal(signal.SIGTERM)
        return True

    async def annotate(self, name: str, uid: str, annotations: Mapping[str, str]) -> bool:
        """See `PodControl.annotate`."""
        pod = self._found(name, uid)
        if pod is None:
            return False
        merged = {**pod.view.annotations, **annotations}
        merged = {key: value for key, value in merged.items() if value}
        if merged != pod.view.annotations:
            try:
                _replace(pod.directory / "annotations.json", msgspec.json.encode(merged))
            except OSError as error:
                raise TransientError(
                    Reason.CLUSTER_UNAVAILABLE, f"annotations: {error.strerror}", pod=name
                ) from error
            self._touch(pod, annotations=merged)
        return True

    # ---------------------------------------------------------------- NodeControl
    # It shares the name `delete` with PodControl, so it is a part of its own.
    @property
    def node_control(self) -> LocalNodeControl:
        """The cluster's `NodeControl`."""
        return LocalNodeControl(self)

    # ---------------------------------------------------------------- NodeGroups
    async def groups(self) -> Sequence[NodeGroupView]:
        """See `NodeGroups.groups`."""
        return [
            NodeGroupView(
                name=name,
                instance_type=group.rules.instance_type,
                allocatable=group.rules.allocatable,
                price_per_hour=group.rules.price_per_hour,
                size=group.size,
                max_size=group.rules.max_size,
                boot_seconds=group.rules.boot_seconds,
                instances=[
                    machine.view()
                    for machine in self._machines.values()
                    if machine.group.name == name
                ],
            )
            for name, group in self._groups.items()
        ]

    async def set_size(self, group: str, size: int, token: str) -> None:
        """See `NodeGroups.set_size`; all of the wish is launched or none of it."""
        if not self._is_open:
            raise TransientError(Reason.CLUSTER_UNAVAILABLE, "the local cluster is closed")
        found = self._groups.get(group)
        if found is not None and token in found.tokens:
            return
        in_use = sum(machine.group.cpu_millis for machine in self._machines.values())
        wish = check_wish(
            found.rules if found else None,
            group,
            found.size if found else 0,
            size,
            in_use,
            int(self.cores * 1000 * self.oversubscription),
        )
        assert found is not None  # check_wish refuses an unknown group
        found.tokens[token] = None
        found.size = wish.size
        for _ in range(wish.launches):
            machine = _Machine(
                group=found.rules,
                instance_id=f"{self.name}-{group}-{self._ids.new()[-8:].lower()}",
                launched_at=self._clock.now(),
            )
            self._machines[machine.instance_id] = machine
            self._own(self._boot(machine), f"boot:{machine.instance_id}")

    async def terminate(self, group: str, instance_id: str) -> None:
        """See `NodeGroups.terminate`. Its pods fail as `NodeLost`; its node stays, not ready."""
        found = self._groups.get(group)
        if found is None:
            raise NotFoundError(Reason.NOT_FOUND, "no such node group", group=group)
        machine = self._machines.get(instance_id)
        if (
            machine is None
            or machine.group.name != group
            or machine.state is InstanceState.TERMINATING
        ):
            return
        found.size -= 1
        machine.state = InstanceState.TERMINATING
        for node in self._nodes.values():
            if node.provider_id == instance_id:
                self._nodes[node.name] = replace(node, ready=False)
        self._wake()
        self._tasks.create_task(self._switch_off(machine), name=f"terminate:{instance_id}")

    # ---------------------------------------------------------------- machines and nodes
    async def _boot(self, machine: _Machine) -> None:
        await asyncio.sleep(machine.group.boot_seconds)
        if machine.state is not InstanceState.BOOTING:
            return
        machine.state = InstanceState.RUNNING
        now = self._clock.now()
        self._nodes[machine.instance_id] = NodeView(
            name=machine.instance_id,
            uid=self._ids.new().lower(),
            provider_id=machine.instance_id,
            group=machine.group.name,
            ready=True,
            allocatable=machine.group.allocatable,
            created_at=now,
            ready_at=now,
        )
        self._wake()
        self._bind()

    async def _switch_off(self, machine: _Machine) -> None:
        await self._lose_pods(machine.instance_id)
        del self._machines[machine.instance_id]
        self._wake()

    async def _lose_pods(self, node: str) -> None:
        """End all pods of a node as a loss of the node does, and wait for their processes."""
        lost = [pod for pod in self._pods.values() if pod.view.node == node]
        for pod in lost:
            if not pod.view.phase.is_terminated:
                pod.verdict = ("NodeLost", f"node {node} is gone")
                self._kill(pod)
        tasks = [pod.task for pod in lost if pod.task is not None and not pod.task.done()]
        if tasks:
            await asyncio.wait(tasks)

    def change_node(self, name: str, **changes: Any) -> None:
        """Set marks of a node; for `LocalNodeControl`.

        Raises:
            NotFoundError: no such node.
        """
        node = self._nodes.get(name)
        if node is None:
            raise NotFoundError(Reason.UNKNOWN_NODE, "no such node", node=name)
        changed = replace(node, **changes)
        if changed != node:
            self._nodes[name] = changed
            self._wake()
            self._bind()

    async def remove_node(self, name: str, uid: str) -> None:
        """Remove a node object; what still runs on it is lost. For `LocalNodeControl`."""
        node = self._nodes.get(name)
        if node is None or node.uid != uid:
            raise NotFoundError(Reason.UNKNOWN_NODE, "no such node", node=name, uid=uid)
        del self._nodes[name]
        self._wake()
        await self._lose_pods(name)

    # ---------------------------------------------------------------- pods
    def _bind(self) -> None:
        """The scheduler's step: give each waiting pod a node, oldest first, and start it."""
        if not self._is_open:
            return
        waiting = [
            pod
            for pod in self._pods.values()
            if pod.task is None and not pod.view.phase.is_terminated
        ]
        if not waiting:
            return
        nodes = [self._nodes[name] for name in sorted(self._nodes)]
        used = requests_on([pod.view for pod in self._pods.values()])
        for pod in waiting:
            requests = pod.view.requests
            node, why = choose_node(requests, pod.spec.slot, pod.spec.node, nodes, used)
            if node:
                used[node] = used[node] + requests if node in used else requests
                self._touch(pod, node=node, reason="", message="")
                pod.task = self._tasks.create_task(self._run(pod), name=f"pod:{pod.view.name}")
            elif (pod.view.reason, pod.view.message) != ("Unschedulable", why):
                self._touch(pod, reason="Unschedulable", message=why)

    async def _run(self, pod: _Pod) -> None:
        """The kubelet's part: start the pod's process, wait for its end, tell it."""
        exit_code: int | None = None
        reason, message = "Error", ""
        if pod.view.deletion_at is None and not pod.verdict[0]:
            try:
                exit_code = await self._process(pod)
                message = _read_termination(pod.directory / "termination")
            except OSError as error:
                exit_code, reason = 128, "StartError"
                message = f"{self._agent_command[0]}: {error.strerror}"
        if pod.verdict[0]:
            reason, message = pod.verdict
            if reason == "NodeLost":
                exit_code = None  # nobody is left to tell it
        elif exit_code == 0:
            reason = "Completed"
        if pod.kill_timer is not None:
            pod.kill_timer.cancel()
        self._touch(
            pod,
            phase=PodPhase.SUCCEEDED if reason == "Completed" else PodPhase.FAILED,
            exit_code=exit_code,
            reason=reason,
            message=message,
            ended_at=self._clock.now(),
        )
        if pod.view.deletion_at is not None:
            self._remove(pod)
        self._bind()

    async def _process(self, pod: _Pod) -> int:
        """Run the pod's process to its end, with all that it started; returns its exit code."""
        uid, directory = pod.view.uid, pod.directory
        command = [*self._agent_command, "exec", "--pod", str(directory / "pod.json")]
        process = start(command, uid, directory, directory / "agent.log")
        pod.process, pod.record = process, record_of(uid, process.pid)
        try:
            _replace(directory / "process.json", msgspec.json.encode(pod.record))
            self._touch(pod, phase=PodPhase.RUNNING, started_at=self._clock.now())
            await ended(process)
        finally:
            left = kill_pod(pod.record)  # before the leader is reaped: its number is ours
            pod.process = pod.record = None
            if left:
                self._log.info("pod.stragglers_ended", pod=pod.view.name, processes=left)
            process.wait(_REAP_LIMIT_SECONDS)
        return exit_code_of(process.returncode)

    def _kill(self, pod: _Pod) -> None:
        """SIGKILL to all of a pod; its task sees the end."""
        if pod.record is not None:
            kill_pod(pod.record)
        elif pod.task is not None and not pod.task.done() and not pod.verdict[0]:
            pod.verdict = ("Error", "ended before its process began")

    def _remove(self, pod: _Pod) -> None:
        """The pod leaves the cluster, its directory with it."""
        self._touch(pod)
        del self._pods[pod.view.uid]
        del self._uid_by_name[pod.view.name]
        self._gone.append((self._version, pod.view))
        if len(self._gone) > _GONE_KEPT:
            self._floor = self._gone[0][0]
            del self._gone[0]
        if self._is_open:
            self._tasks.create_task(
                asyncio.to_thread(shutil.rmtree, pod.directory, ignore_errors=True),
                name=f"clear:{pod.view.name}",
            )
        self._bind()

    def _found(self, name: str, uid: str) -> _Pod | None:
        return self._pods[uid] if self._uid_by_name.get(name) == uid else None

    async def _watch_memory(self) -> None:
        """End pods that use more memory than they requested, as the kernel would in a cgroup.

        By looking again and again, since a limit of the address space would end programs that only
        reserve memory. What is allocated and used up between two looks is not caught.
        """
        while True:
            await asyncio.sleep(self._memory_poll_seconds)
            records = [pod.record for pod in self._pods.values() if pod.record is not None]
            if not records:
                continue
            leaders = {record.pod_uid: record.pid for record in records}
            table = ProcessTable.take(since=min(record.started_at for record in records))
            for uid, processes in table.of_pods(leaders).items():
                pod = self._pods.get(uid)
                charged = [item for item in processes if item.pid != leaders[uid]]
                used = resident_bytes(charged)
                if pod is None or used <= pod.view.requests.memory_bytes:
                    continue
                pod.verdict = (
                    "OOMKilled",
                    f"used {used} bytes of {pod.view.requests.memory_bytes} requested",
                )
                self._kill(pod)

    # ---------------------------------------------------------------- helpers
    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start something that a close may cancel."""
        task = self._tasks.create_task(work, name=name)
        self._background = [item for item in self._background if not item.done()] + [task]

    def _touch(self, pod: _Pod, **changes: Any) -> None:
        if changes:
            pod.view = replace(pod.view, **changes)
        self._wake()
        pod.version = self._version

    def _wake(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _write_directory(self, directory: Path, uid: str, spec: PodSpec) -> None:
        work, log = directory / "work", directory / "log"
        work.mkdir(parents=True)
        log.mkdir()
        document = PodDocument(
            pod_uid=uid,
            attempt=spec.attempt,
            tenant=spec.tenant,
            template=spec.template,
            item=spec.item,
            store_url=self._store_url,
            work_dir=str(work.absolute()),
            log_dir=str(log.absolute()),
            annotations_file=str((directory / "annotations.json").absolute()),
            termination_file=str((directory / "termination").absolute()),
            poll_seconds=self._poll_seconds,
            time_scale=self._time_scale,
        )
        (directory / "pod.json").write_bytes(msgspec.json.encode(document))
        _replace(directory / "annotations.json", msgspec.json.encode(dict(spec.annotations)))

    def _load_identity(self) -> str:
        file = self._root / "identity"
        with suppress(FileNotFoundError):
            return file.read_text(encoding="ascii")
        identity = f"local-{self._ids.new().lower()}"
        _replace(file, identity.encode("ascii"))
        return identity


class LocalNodeControl:
    """`NodeControl` of a local cluster."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    async def cordon(self, node: str, *, cordoned: bool) -> None:
        """See `NodeControl.cordon`."""
        self._cluster.change_node(node, cordoned=cordoned)

    async def label(self, node: str, labels: Mapping[str, str]) -> None:
        """See `NodeControl.label`; only the slot's label has a meaning here."""
        slot = {"slot": labels[LABEL_SLOT]} if LABEL_SLOT in labels else {}
        self._cluster.change_node(node, **slot)

    async def delete(self, node: str, uid: str) -> None:
        """See `NodeControl.delete`."""
        await self._cluster.remove_node(node, uid)


def _usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _replace(file: Path, data: bytes) -> None:
    """Whole or not at all, for a reader at any moment."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_bytes(data)
    partial.replace(file)


def _read_termination(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return stream.read(_TERMINATION_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _locked(file: Path) -> IO[bytes]:
    """Hold the lock of one cluster's directory.

    Raises:
        ConflictError: another living cluster has it.
    """
    stream = file.open("ab")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        stream.close()
        raise ConflictError(
            Reason.STALE,
            "a local cluster runs in this directory already; end it or name another directory",
            directory=str(file.parent),
        ) from error
    return stream


def _clear(pods: Path) -> int:
    """End what an earlier life left running and remove its directories; returns its processes."""
    directories = sorted(item for item in pods.iterdir() if item.is_dir())
    records = []
    for directory in directories:
        with suppress(OSError, msgspec.DecodeError):
            content = (directory / "process.json").read_bytes()
            records.append(msgspec.json.decode(content, type=ProcessRecord))
    ended_count = (
        end_orphans(records, [item.name for item in directories], _ORPHAN_LIMIT_SECONDS)
        if directories
        else 0
    )
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    return ended_count
