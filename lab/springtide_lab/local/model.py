"""Rules of the local cluster, pure: what a group may grow to, and which node takes a pod."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from springtide_shared.errors import InvalidFieldError, NotFoundError, PermanentError, Reason
from springtide_shared.ports.cluster import NodeView, PodView
from springtide_shared.units import GiB, Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGroup:
    """One kind of node. The figures are what a node of it offers to pods.

    Prices in currency units per hour. `boot_seconds` from the wish to a ready node, real time.
    `scratch_bytes` is declared, not enforced: all pods share the disk.
    """

    name: str
    instance_type: str
    cpu_millis: int
    memory_bytes: int
    price_per_hour: float
    boot_seconds: float
    max_size: int
    scratch_bytes: int = 16 * GiB
    max_pods: int = 110

    def __post_init__(self) -> None:
        if not self.name or not all(c.isascii() and (c.isalnum() or c == "-") for c in self.name):
            raise InvalidFieldError("name", self.name, "use ASCII letters, digits and dashes")
        for field, value, least in (
            ("cpu_millis", self.cpu_millis, 1),
            ("memory_bytes", self.memory_bytes, 1),
            ("price_per_hour", self.price_per_hour, 0),
            ("boot_seconds", self.boot_seconds, 0),
            ("max_size", self.max_size, 0),
            ("max_pods", self.max_pods, 1),
        ):
            if not value >= least:  # also refuses NaN
                raise InvalidFieldError(f"{self.name}.{field}", value, f"give at least {least}")

    @property
    def allocatable(self) -> Resources:
        """What pods may take on one node."""
        return Resources(
            cpu_millis=self.cpu_millis,
            memory_bytes=self.memory_bytes,
            scratch_bytes=self.scratch_bytes,
            pods=self.max_pods,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The size a group is wished to have, and how it comes about."""

    group: LocalGroup
    size_before: int
    size: int

    @property
    def launches(self) -> int:
        """Machines to launch."""
        return self.size - self.size_before


def check_wish(
    group: LocalGroup | None, name: str, size_before: int, size: int, cpu_in_use: int, cpu_most: int
) -> Wish:
    """Whether a group may be given `size` machines.

    `cpu_in_use` and `cpu_most` are thousandths of a core: what all machines of the cluster have
    now, and the machine's cores times the oversubscription.

    Raises:
        NotFoundError: no such group.
        PermanentError: `invalid-spec` for a lower size, `quota` above the group's maximum,
            `capacity` when the cores of this machine are given out. Nothing is launched then.
    """
    if group is None:
        raise NotFoundError(Reason.NOT_FOUND, "no such node group", group=name)
    if size < size_before:
        raise PermanentError(
            Reason.INVALID_SPEC,
            "a size is never lowered; terminate the machine that shall go",
            group=name,
            size=size,
            size_before=size_before,
        )
    if size > group.max_size:
        raise PermanentError(
            Reason.QUOTA, "above the group's maximum", group=name, size=size, most=group.max_size
        )
    wish = Wish(group=group, size_before=size_before, size=size)
    if cpu_in_use + wish.launches * group.cpu_millis > cpu_most and wish.launches:
        raise PermanentError(
            Reason.CAPACITY,
            "the cores of this machine, times the oversubscription, are given out",
            group=name,
            cpu_millis_in_use=cpu_in_use,
            cpu_millis_most=cpu_most,
        )
    return wish


def choose_node(
    requests: Resources,
    slot: str,
    node: str,
    nodes: Sequence[NodeView],
    used: Mapping[str, Resources],
) -> tuple[str, str]:
    """(name of the node that takes a pod, ""), or ("", why none does).

    `slot` and `node` are required affinities where not empty; `used` is what live pods request, by
    node. Among the nodes that fit, the fullest one wins, so that others run empty.
    """
    refusals = {"not ready": 0, "cordoned": 0, "another slot or node": 0, "no room": 0}
    best: tuple[int, str] | None = None
    for item in nodes:
        if (slot and item.slot != slot) or (node and item.name != node):
            refusals["another slot or node"] += 1
        elif not item.ready:
            refusals["not ready"] += 1
        elif item.cordoned:
            refusals["cordoned"] += 1
        else:
            room = item.allocatable - used.get(item.name, Resources())
            if not requests.fits(room):
                refusals["no room"] += 1
            elif best is None or (room.cpu_millis, item.name) < best:
                best = (room.cpu_millis, item.name)
    if best is not None:
        return best[1], ""
    causes = ", ".join(f"{count} {cause}" for cause, count in refusals.items() if count)
    return "", f"0/{len(nodes)} nodes take it: {causes or 'there is none'}"


def requests_on(pods: Sequence[PodView]) -> dict[str, Resources]:
    """What live pods request, by node."""
    used: dict[str, Resources] = {}
    for pod in pods:
        if pod.node and not pod.phase.is_terminated:
            used[pod.node] = used.get(pod.node, Resources()) + pod.requests
    return used
