"""A cluster that does only what a test tells it: pods wait until the test binds, runs or ends them.

`ClusterView` and `PodControl` in one object, without any behaviour in time. For a cluster that
schedules and runs by itself, use the simulated one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from springtide_shared.errors import ConflictError, Reason, SpringtideError, TransientError
from springtide_shared.messages.records import Termination
from springtide_shared.messages.task import AttemptKey
from springtide_shared.ports.clock import Clock
from springtide_shared.ports.cluster import NodeView, PodChanges, PodPhase, PodSpec, PodView
from springtide_shared.units import Resources


class ScriptedCluster:
    """Pods and nodes by name, a log of changes, and faults on request.

    Args:
        clock: for the times on pods.
        ends_on_delete: whether a deleted pod goes at once; else the test calls `remove`.
    """

    def __init__(self, clock: Clock, *, ends_on_delete: bool = True) -> None:
        self.ends_on_delete = ends_on_delete
        self.pods: dict[str, PodView] = {}
        self.created: list[PodSpec] = []
        """Every pod made, in order."""
        self.deleted: list[tuple[str, str, float]] = []
        """(name, uid, grace) of every delete that met its pod."""
        self.create_faults: deque[SpringtideError] = deque()
        """Raised by the next creates, one each, before any effect."""
        self.late_faults: deque[SpringtideError] = deque()
        """The same, but the pod is made all the same."""
        self.is_down = False
        """While set, no call is answered."""
        self.create_seconds = 0.0
        """How long a create takes."""
        self._clock = clock
        self._nodes: dict[str, NodeView] = {}
        self._log: list[tuple[int, PodView, bool]] = []
        self._version = 0
        self._uids = 0
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ for the test
    def add_node(self, name: str, allocatable: Resources, *, slot: str = "") -> NodeView:
        """A Ready node."""
        node = NodeView(
            name=name,
            uid=f"node-uid-{name}",
            provider_id=name,
            group="group",
            slot=slot,
            ready=True,
            allocatable=allocatable,
            created_at=self._clock.now(),
            ready_at=self._clock.now(),
        )
        self._nodes[name] = node
        return node

    def cordon(self, name: str) -> None:
        """Close a node."""
        self._nodes[name] = replace(self._nodes[name], cordoned=True)

    def lose_node(self, name: str, *, stays: bool = False) -> None:
        """The node's pods vanish without a word; `stays`: its object is left, not ready."""
        if stays:
            self._nodes[name] = replace(self._nodes[name], ready=False)
        else:
            del self._nodes[name]
        for pod in [one for one in self.pods.values() if one.node == name]:
            self.remove(pod.name)

    def pod_of(self, key: AttemptKey) -> PodView:
        """The pod of an attempt."""
        return self.pods[key.pod_name]

    def bind(self, name: str, node: str) -> None:
        """The scheduler has found a node."""
        self._put(replace(self.pods[name], node=node))

    def run(self, name: str, node: str) -> PodView:
        """The pod runs."""
        pod = replace(
            self.pods[name], node=node, phase=PodPhase.RUNNING, started_at=self._clock.now()
        )
        self._put(pod)
        return pod

    def end(
        self,
        name: str,
        *,
        exit_code: int | None = 0,
        digest: str = "",
        reason: str = "",
        message: str = "",
    ) -> PodView:
        """The pod's containers end; `digest` goes into the termination message."""
        if digest:
            message = msgspec.json.encode(Termination(digest=digest)).decode()
        pod = replace(
            self.pods[name],
            phase=PodPhase.SUCCEEDED if exit_code == 0 else PodPhase.FAILED,
            exit_code=exit_code,
            ended_at=self._clock.now(),
            reason=reason,
            message=message,
        )
        self._put(pod)
        return pod

    def remove(self, name: str) -> None:
        """The pod leaves the cluster."""
        pod = self.pods.pop(name)
        self._note(pod, gone=True)

    def foreign(self, name: str, node: str, requests: Resources) -> None:
        """A pod of somebody else's."""
        self._uids += 1
        self._put(
            PodView(
                name=name,
                uid=f"uid-{self._uids}",
                attempt=None,
                phase=PodPhase.RUNNING,
                node=node,
                requests=requests,
                created_at=self._clock.now(),
            )
        )

    def compact(self) -> None:
        """Forget the log: every reader must list afresh."""
        self._log.clear()
        self._version += 1_000

    # ------------------------------------------------------------ ClusterView
    async def identity(self) -> str:
        """See `ClusterView.identity`."""
        self._answer()
        return "scripted"

    async def pods_since(self, version: int) -> PodChanges:
        """See `ClusterView.pods_since`."""
        self._answer()
        oldest = self._version - len(self._log)
        if version <= 0 or version < oldest:
            return PodChanges(
                version=self._version, reset=True, pods=list(self.pods.values()), gone=[]
            )
        newest: dict[str, tuple[PodView, bool]] = {}
        for number, pod, gone in self._log[max(0, version - oldest) :]:
            if number > version:
                newest.pop(pod.uid, None)
                newest[pod.uid] = (pod, gone)
        return PodChanges(
            version=self._version,
            reset=False,
            pods=[pod for pod, gone in newest.values() if not gone],
            gone=[pod for pod, gone in newest.values() if gone],
        )

    async def wait_for_change(self, version: int, limit: float) -> None:
        """See `ClusterView.wait_for_change`."""
        if self._version > version:
            return
        self._changed.clear()
        try:
            async with asyncio.timeout(limit):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def nodes(self) -> Sequence[NodeView]:
        """See `ClusterView.nodes`."""
        self._answer()
        return [self._nodes[name] for name in sorted(self._nodes)]

    async def pods_on(self, node: str) -> Sequence[PodView]:
        """See `ClusterView.pods_on`."""
        self._answer()
        return [
            pod for pod in self.pods.values() if pod.node == node and not pod.phase.is_terminated
        ]

    # ------------------------------------------------------------ PodControl
    async def create(self, spec: PodSpec) -> PodView:
        """See `PodControl.create`."""
        if self.create_seconds:
            await asyncio.sleep(self.create_seconds)
        self._answer()
        if self.create_faults:
            raise self.create_faults.popleft()
        found = self.pods.get(spec.name)
        if found is not None:
            if found.attempt != spec.attempt:
                raise ConflictError(Reason.DUPLICATE_ID, "the name is taken", pod=spec.name)
            return found
        self._uids += 1
        pod = PodView(
            name=spec.name,
            uid=f"uid-{self._uids}",
            attempt=spec.attempt,
            phase=PodPhase.PENDING,
            slot=spec.slot,
            requests=spec.template.shape.resources,
            created_at=self._clock.now(),
            annotations=dict(spec.annotations),
        )
        self.created.append(spec)
        self._put(pod)
        if self.late_faults:
            raise self.late_faults.popleft()
        return pod

    async def delete(self, name: str, uid: str, grace: float) -> bool:
        """See `PodControl.delete`."""
        self._answer()
        pod = self.pods.get(name)
        if pod is None or pod.uid != uid:
            return False
        self.deleted.append((name, uid, grace))
        if self.ends_on_delete or pod.phase.is_terminated:
            self.remove(name)
        elif pod.deletion_at is None:
            self._put(replace(pod, deletion_at=self._clock.now()))
        return True

    async def annotate(self, name: str, uid: str, annotations: Mapping[str, str]) -> bool:
        """See `PodControl.annotate`."""
        self._answer()
        pod = self.pods.get(name)
        if pod is None or pod.uid != uid:
            return False
        merged = {**pod.annotations, **annotations}
        self._put(replace(pod, annotations={key: text for key, text in merged.items() if text}))
        return True

    # ------------------------------------------------------------ inside
    def _answer(self) -> None:
        if self.is_down:
            raise TransientError(Reason.CLUSTER_UNAVAILABLE, "the cluster does not answer")

    def _put(self, pod: PodView) -> None:
        self.pods[pod.name] = pod
        self._note(pod, gone=False)

    def _note(self, pod: PodView, *, gone: bool) -> None:
        self._version += 1
        self._log.append((self._version, pod, gone))
        self._changed.set()
