"""ClusterView, PodControl, NodeControl, NodeGroups: one cluster and its cloud for services.

The local, the simulated and the Kubernetes cluster pass one contract suite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from springtide_shared.errors import Reason
from springtide_shared.messages.task import AttemptKey, TaskTemplate
from springtide_shared.units import Resources

LABEL_SLOT = "springtide.io/slot"
LABEL_GROUP = "springtide.io/group"


class PodPhase(StrEnum):
    """As the kubelet reports it."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def is_terminated(self) -> bool:
        """Whether its containers have ended for good."""
        return self in (PodPhase.SUCCEEDED, PodPhase.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """One pod as last seen. Times in seconds since 1970.

    `reason` is the raw cause on the pod or its container, as Kubernetes spells it (`OOMKilled`,
    `Evicted`, `DeadlineExceeded`, `Error`, `Unschedulable` …).
    """

    name: str
    uid: str
    attempt: AttemptKey | None
    """None: not ours, never touched."""
    phase: PodPhase
    node: str = ""
    slot: str = ""
    """The slot its affinity demands; empty: any node."""
    requests: Resources
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    deletion_at: float | None = None
    """Since when it is being deleted."""
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    """Termination message of the agent (JSON `Termination`) or the cause for people."""
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node as last seen."""

    name: str
    uid: str
    provider_id: str
    """Instance id in its node group."""
    group: str
    slot: str = ""
    ready: bool
    cordoned: bool = False
    allocatable: Resources
    created_at: float
    ready_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodChanges:
    """What became of pods since a version. `reset`: `pods` is the whole set, forget the rest."""

    version: int
    reset: bool
    pods: Sequence[PodView]
    gone: Sequence[PodView]
    """Pods that left the cluster, as last seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSpec:
    """A pod to create for one attempt."""

    name: str
    attempt: AttemptKey
    tenant: str
    template: TaskTemplate
    item: str | None = None
    slot: str = ""
    """Required node affinity to this slot; empty: any node."""
    node: str = ""
    """Required node affinity to this node (a migrated task's pin); empty: by slot."""
    slice_seq: int = 0
    slice_epoch: int = 0
    annotations: Mapping[str, str] = field(default_factory=dict)


class ClusterView(Protocol):
    """What is in the cluster. Reads may lag behind writes; they never go back."""

    async def identity(self) -> str:
        """Uid of the cluster: two clusters never share one."""
        ...

    async def pods_since(self, version: int) -> PodChanges:
        """Changes behind `version` (0: everything, with `reset`).

        Each pod appears at most once, with its newest view. Raises `TransientError` while the API
        does not answer.
        """
        ...

    async def wait_for_change(self, version: int, limit: float) -> None:
        """Return when something may have changed behind `version`, or after `limit` seconds."""
        ...

    async def nodes(self) -> Sequence[NodeView]:
        """All nodes, in name order, freshly read."""
        ...

    async def pods_on(self, node: str) -> Sequence[PodView]:
        """Pods bound to a node that have not terminated, anyone's; a fresh (quorum) read."""
        ...


class PodControl(Protocol):
    """Creates, deletes and annotates pods."""

    async def create(self, spec: PodSpec) -> PodView:
        """Create, idempotent by name for the same attempt: an existing one is returned.

        Raises:
            ConflictError: the name belongs to a foreign attempt.
            TransientError: throttled, unavailable, quota (`reason` tells; `retry_after`).
            PermanentError: `admission-denied` or `invalid-spec`: this pod can never be made.
        """
        ...

    async def delete(self, name: str, uid: str, grace: float) -> bool:
        """Ask the pod to end within `grace` seconds, then remove it; 0: at once.

        A terminated pod is removed at once. Returns False if no pod of that name *and* uid exists.
        """
        ...

    async def annotate(self, name: str, uid: str, annotations: Mapping[str, str]) -> bool:
        """Set annotations (empty value: remove); False if no pod of that name and uid exists."""
        ...


class NodeControl(Protocol):
    """Changes nodes' marks. All are idempotent and raise `NotFoundError` for an unknown node."""

    async def cordon(self, node: str, *, cordoned: bool) -> None:
        """Close (or open) the node for new pods."""
        ...

    async def label(self, node: str, labels: Mapping[str, str]) -> None:
        """Set labels, the slot's among them."""
        ...

    async def delete(self, node: str, uid: str) -> None:
        """Remove the node object after its machine is gone."""
        ...


class InstanceState(StrEnum):
    """State of a machine in its group."""

    BOOTING = "booting"
    RUNNING = "running"
    TERMINATING = "terminating"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One machine of a node group. `launched_at`: billing begins."""

    instance_id: str
    state: InstanceState
    launched_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroupView:
    """One node group. `size`: the wish last accepted; `instances`: what there is."""

    name: str
    instance_type: str
    allocatable: Resources
    """What pods may take on one node of it."""
    price_per_hour: float
    size: int
    max_size: int
    boot_seconds: float
    """Usual time from wish to ready."""
    instances: Sequence[Instance] = ()


class NodeGroups(Protocol):
    """The cloud's side of a cluster: equal machines that are resized as one.

    All calls raise `TransientError` (throttled, unavailable), `PermanentError(capacity)` when the
    type is out of stock, `PermanentError(quota)` at a limit of the account, and `NotFoundError` for
    an unknown group.
    """

    async def groups(self) -> Sequence[NodeGroupView]:
        """All groups that this cluster may use, in name order."""
        ...

    async def set_size(self, group: str, size: int, token: str) -> None:
        """Wish for `size` machines, never fewer than before; the same token twice is harmless."""
        ...

    async def terminate(self, group: str, instance_id: str) -> None:
        """End *that* machine and lower the wish by one; nothing happens if it is gone already."""
        ...


def instances_by_id(groups: Sequence[NodeGroupView]) -> dict[str, tuple[NodeGroupView, Instance]]:
    """All machines of all groups by id."""
    return {item.instance_id: (group, item) for group in groups for item in group.instances}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a pod can't be placed right now."""

    reason: Reason
    detail: str = ""
