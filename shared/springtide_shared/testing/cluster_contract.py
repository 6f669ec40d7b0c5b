"""What every cluster must do, as cases that run on the local, the simulated and a real one.

A test module makes a `ClusterHarness` for its adapter and runs each of `CASES` on it. Times are
taken from the loop's clock, so that virtual time serves as well as real time. Where adapters may
differ (does a node object vanish with its machine, or stay behind not ready?) a case accepts
whatever the port allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from springtide_shared.errors import (
    ConflictError,
    NotFoundError,
    PermanentError,
    Reason,
    SpringtideError,
)
from springtide_shared.messages.shape import Shape
from springtide_shared.messages.task import AttemptKey, TaskTemplate
from springtide_shared.ports.cluster import (
    LABEL_SLOT,
    ClusterView,
    InstanceState,
    NodeControl,
    NodeGroups,
    NodeGroupView,
    NodeView,
    PodControl,
    PodPhase,
    PodSpec,
    PodView,
)
from springtide_shared.units import GiB, MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterHarness:
    """One empty cluster for one case: no nodes, no pods."""

    view: ClusterView
    pods: PodControl
    nodes: NodeControl
    groups: NodeGroups
    plain: str
    """Group of nodes with 2 cores and 2 GiB for pods, at most 3 of them, in stock."""
    scarce: str
    """Group that may grow, but whose type is out of stock."""
    finish: Callable[[PodView, int], Awaitable[None]]
    """Lets the program of a running pod end by itself with this exit code; until then it runs."""
    patience: float = 10.0
    """Seconds within which what must happen has happened; more than a boot or a pod's start."""


Case = Callable[[ClusterHarness], Awaitable[None]]
CASES: Final[dict[str, Case]] = {}
"""Every case by name."""


def case(function: Case) -> Case:
    """Register a case under its function's name."""
    CASES[function.__name__] = function
    return function


# ---- helpers of the cases ---------------------------------------------------------------------


def a_pod(
    index: int = 0, *, job: str = "job-1", cpu_millis: int = 500, slot: str = "", node: str = ""
) -> PodSpec:
    """A pod of half a core, unless told otherwise."""
    key = AttemptKey(job, index, 1)
    shape = Shape(cpu_millis=cpu_millis, memory_bytes=64 * MiB)
    return PodSpec(
        name=key.pod_name,
        attempt=key,
        tenant="alice",
        template=TaskTemplate(command=["program"], shape=shape),
        slot=slot,
        node=node,
    )


@contextmanager
def refused(kind: type[SpringtideError], reason: Reason | None = None) -> Iterator[None]:
    """What is inside must be refused with this kind of error (and reason)."""
    try:
        yield
    except kind as error:
        if reason is not None and error.reason is not reason:
            raise AssertionError(f"refused, but for {error.reason}") from error
    else:
        raise AssertionError(f"this must be refused with {kind.__name__}")


async def eventually(
    harness: ClusterHarness, what: str, check: Callable[[], Awaitable[bool]]
) -> None:
    """Until `check` holds; fails after the harness's patience."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + harness.patience
    while not await check():
        assert loop.time() < deadline, f"not within {harness.patience} s: {what}"
        await asyncio.sleep(harness.patience / 400)


async def a_while(harness: ClusterHarness) -> None:
    """Long enough for something that must not happen to show itself."""
    await asyncio.sleep(harness.patience / 25)


async def pods_by_uid(harness: ClusterHarness) -> dict[str, PodView]:
    """All pods, read anew."""
    changes = await harness.view.pods_since(0)
    assert changes.reset, "version 0 asks for everything"
    return {pod.uid: pod for pod in changes.pods}


async def pod_in(harness: ClusterHarness, pod: PodView, *phases: PodPhase) -> PodView:
    """The pod once it is in one of the phases."""

    async def check() -> bool:
        found = (await pods_by_uid(harness)).get(pod.uid)
        return found is not None and found.phase in phases

    await eventually(harness, f"pod {pod.name} in {phases}", check)
    return (await pods_by_uid(harness))[pod.uid]


async def running(harness: ClusterHarness, spec: PodSpec) -> PodView:
    """A new pod that runs."""
    return await pod_in(harness, await harness.pods.create(spec), PodPhase.RUNNING)


async def gone(harness: ClusterHarness, pod: PodView) -> None:
    """Until the pod has left the cluster."""

    async def check() -> bool:
        return pod.uid not in await pods_by_uid(harness)

    await eventually(harness, f"pod {pod.name} gone", check)


async def group_view(harness: ClusterHarness, name: str) -> NodeGroupView:
    """One group, read anew."""
    (found,) = (group for group in await harness.groups.groups() if group.name == name)
    return found


async def with_nodes(harness: ClusterHarness, count: int) -> list[NodeView]:
    """`count` ready nodes of the plain group."""
    await harness.groups.set_size(harness.plain, count, f"grow-to-{count}")

    async def check() -> bool:
        return sum(node.ready for node in await harness.view.nodes()) == count

    await eventually(harness, f"{count} nodes ready", check)
    return [node for node in await harness.view.nodes() if node.ready]


# ---- nodes and groups -------------------------------------------------------------------------


@case
async def the_identity_of_a_cluster_does_not_change(harness: ClusterHarness) -> None:
    first = await harness.view.identity()
    assert first
    assert await harness.view.identity() == first


@case
async def a_group_grows_to_the_wish_and_machines_become_nodes(harness: ClusterHarness) -> None:
    names = [group.name for group in await harness.groups.groups()]
    assert names == sorted(names)
    assert {harness.plain, harness.scarce} <= set(names)
    assert list(await harness.view.nodes()) == []
    nodes = await with_nodes(harness, 2)
    group = await group_view(harness, harness.plain)
    assert group.size == 2
    assert [item.state for item in group.instances] == [InstanceState.RUNNING] * 2
    assert {node.provider_id for node in nodes} == {item.instance_id for item in group.instances}
    assert [node.name for node in nodes] == sorted(node.name for node in nodes)
    for node in nodes:
        assert node.group == harness.plain
        assert node.allocatable == group.allocatable
        assert not node.cordoned
        assert node.slot == ""
        assert node.ready_at is not None
        assert node.ready_at >= node.created_at


@case
async def the_same_wish_twice_buys_once(harness: ClusterHarness) -> None:
    await harness.groups.set_size(harness.plain, 1, "wish-1")
    await harness.groups.set_size(harness.plain, 1, "wish-1")
    await harness.groups.set_size(harness.plain, 1, "wish-2")
    await a_while(harness)
    group = await group_view(harness, harness.plain)
    assert group.size == 1
    assert len(group.instances) == 1


@case
async def a_repeated_token_does_not_buy_again_after_a_release(harness: ClusterHarness) -> None:
    (node,) = await with_nodes(harness, 1)
    await harness.groups.terminate(harness.plain, node.provider_id)
    await harness.groups.set_size(harness.plain, 1, "grow-to-1")
    await a_while(harness)
    assert (await group_view(harness, harness.plain)).size == 0


@case
async def a_wish_is_never_lowered_by_size(harness: ClusterHarness) -> None:
    await harness.groups.set_size(harness.plain, 2, "two")
    with refused(PermanentError):
        await harness.groups.set_size(harness.plain, 1, "one")
    assert (await group_view(harness, harness.plain)).size == 2


@case
async def a_wish_above_the_maximum_is_refused_whole(harness: ClusterHarness) -> None:
    with refused(PermanentError, Reason.QUOTA):
        await harness.groups.set_size(harness.plain, 4, "four")
    group = await group_view(harness, harness.plain)
    assert (group.size, len(group.instances)) == (0, 0)


@case
async def a_stock_out_says_so_and_leaves_the_other_groups_alone(harness: ClusterHarness) -> None:
    with refused(PermanentError, Reason.CAPACITY):
        await harness.groups.set_size(harness.scarce, 1, "scarce")
    assert (await group_view(harness, harness.scarce)).size == 0
    await with_nodes(harness, 1)


@case
async def an_unknown_group_is_not_found(harness: ClusterHarness) -> None:
    with refused(NotFoundError):
        await harness.groups.set_size("no-such-group", 1, "x")
    with refused(NotFoundError):
        await harness.groups.terminate("no-such-group", "i-1")


@case
async def terminate_ends_that_machine_only_and_lowers_the_wish(harness: ClusterHarness) -> None:
    first, second = await with_nodes(harness, 2)
    kept = await running(harness, a_pod(1, node=second.name))
    lost = await running(harness, a_pod(2, node=first.name))
    await harness.groups.terminate(harness.plain, first.provider_id)
    assert (await group_view(harness, harness.plain)).size == 1

    async def machine_is_gone() -> bool:
        group = await group_view(harness, harness.plain)
        return [item.instance_id for item in group.instances] == [second.provider_id]

    await eventually(harness, "the machine gone", machine_is_gone)

    async def pod_is_lost() -> bool:
        found = (await pods_by_uid(harness)).get(lost.uid)
        return found is None or (found.phase is PodPhase.FAILED and found.reason == "NodeLost")

    await eventually(harness, "its pod gone, or failed as NodeLost", pod_is_lost)
    assert not any(node.ready for node in await harness.view.nodes() if node.name == first.name)
    assert (await pods_by_uid(harness))[kept.uid].phase is PodPhase.RUNNING
    await a_while(harness)
    assert len((await group_view(harness, harness.plain)).instances) == 1, "nothing replaces it"


@case
async def terminating_what_is_gone_does_nothing(harness: ClusterHarness) -> None:
    first, second = await with_nodes(harness, 2)
    for _ in range(3):
        await harness.groups.terminate(harness.plain, first.provider_id)
        await a_while(harness)
    await harness.groups.terminate(harness.plain, "no-such-machine")
    group = await group_view(harness, harness.plain)
    assert group.size == 1
    assert [item.instance_id for item in group.instances] == [second.provider_id]


@case
async def a_machine_can_be_ended_while_it_boots(harness: ClusterHarness) -> None:
    await harness.groups.set_size(harness.plain, 1, "one")
    (machine,) = (await group_view(harness, harness.plain)).instances
    await harness.groups.terminate(harness.plain, machine.instance_id)
    assert (await group_view(harness, harness.plain)).size == 0

    async def machine_is_gone() -> bool:
        return not (await group_view(harness, harness.plain)).instances

    await eventually(harness, "the machine gone", machine_is_gone)
    await a_while(harness)
    assert not any(node.ready for node in await harness.view.nodes())


@case
async def a_node_object_is_deleted_by_uid_after_its_machine(harness: ClusterHarness) -> None:
    (node,) = await with_nodes(harness, 1)
    await harness.groups.terminate(harness.plain, node.provider_id)

    async def machine_is_gone() -> bool:
        return not (await group_view(harness, harness.plain)).instances

    await eventually(harness, "the machine gone", machine_is_gone)
    try:
        await harness.nodes.delete(node.name, node.uid)
    except NotFoundError:
        pass  # this cluster removed it together with the machine
    assert list(await harness.view.nodes()) == []
    with refused(NotFoundError):
        await harness.nodes.delete(node.name, node.uid)


@case
async def marks_are_idempotent_and_need_a_node(harness: ClusterHarness) -> None:
    (node,) = await with_nodes(harness, 1)
    for _ in range(2):
        await harness.nodes.cordon(node.name, cordoned=True)
        await harness.nodes.label(node.name, {LABEL_SLOT: "slot-1"})
    (marked,) = await harness.view.nodes()
    assert marked.cordoned
    assert marked.slot == "slot-1"
    assert marked.uid == node.uid
    await harness.nodes.cordon(node.name, cordoned=False)
    assert not (await harness.view.nodes())[0].cordoned
    with refused(NotFoundError):
        await harness.nodes.cordon("no-such-node", cordoned=True)
    with refused(NotFoundError):
        await harness.nodes.label("no-such-node", {LABEL_SLOT: "slot-1"})
    with refused(NotFoundError):
        await harness.nodes.delete(node.name, "another-uid")
    assert len(await harness.view.nodes()) == 1


# ---- pods: identity ---------------------------------------------------------------------------


@case
async def a_pod_is_created_once_per_attempt(harness: ClusterHarness) -> None:
    first = await harness.pods.create(a_pod())
    again = await harness.pods.create(a_pod())
    assert again.uid == first.uid
    assert first.attempt == AttemptKey("job-1", 0, 1)
    assert list(await pods_by_uid(harness)) == [first.uid]


@case
async def a_terminated_pod_still_holds_its_name(harness: ClusterHarness) -> None:
    await with_nodes(harness, 1)
    pod = await running(harness, a_pod())
    await harness.finish(pod, 0)
    await pod_in(harness, pod, PodPhase.SUCCEEDED)
    again = await harness.pods.create(a_pod())
    assert (again.uid, again.phase) == (pod.uid, PodPhase.SUCCEEDED)


@case
async def a_name_taken_by_another_attempt_is_a_conflict(harness: ClusterHarness) -> None:
    mine, other = a_pod(1), a_pod(2)
    await harness.pods.create(mine)
    thief = PodSpec(
        name=mine.name, attempt=other.attempt, tenant=other.tenant, template=other.template
    )
    with refused(ConflictError):
        await harness.pods.create(thief)


@case
async def delete_and_annotate_are_fenced_by_uid(harness: ClusterHarness) -> None:
    await with_nodes(harness, 1)
    old = await running(harness, a_pod())
    assert await harness.pods.delete(old.name, old.uid, 0.0)
    await gone(harness, old)
    new = await running(harness, a_pod())
    assert new.uid != old.uid
    assert not await harness.pods.delete(old.name, old.uid, 0.0)
    assert not await harness.pods.annotate(old.name, old.uid, {"a": "1"})
    assert not await harness.pods.delete("no-such-pod", new.uid, 0.0)
    await a_while(harness)
    kept = (await pods_by_uid(harness))[new.uid]
    assert kept.phase is PodPhase.RUNNING
    assert "a" not in kept.annotations


@case
async def annotations_are_merged_and_an_empty_value_removes(harness: ClusterHarness) -> None:
    pod = await harness.pods.create(a_pod())
    assert await harness.pods.annotate(pod.name, pod.uid, {"a": "1", "b": "2"})
    assert await harness.pods.annotate(pod.name, pod.uid, {"a": "", "c": "3"})
    found = (await pods_by_uid(harness))[pod.uid]
    assert {"b": "2", "c": "3"}.items() <= found.annotations.items()
    assert "a" not in found.annotations


# ---- pods: life -------------------------------------------------------------------------------


@case
async def a_pod_runs_and_succeeds(harness: ClusterHarness) -> None:
    (node,) = await with_nodes(harness, 1)
    pod = await running(harness, a_pod())
    assert pod.node == node.name
    assert pod.started_at is not None
    assert pod.requests.cpu_millis == 500
    assert (pod.exit_code, pod.ended_at) == (None, None)
    await harness.finish(pod, 0)
    ended = await pod_in(harness, pod, PodPhase.SUCCEEDED, PodPhase.FAILED)
    assert (ended.phase, ended.exit_code) == (PodPhase.SUCCEEDED, 0)
    assert ended.ended_at is not None
    assert pod.started_at <= ended.ended_at
    assert (ended.uid, ended.node) == (pod.uid, pod.node)


@case
async def a_pod_fails_with_its_exit_code(harness: ClusterHarness) -> None:
    await with_nodes(harness, 1)
    pod = await running(harness, a_pod())
    await harness.finish(pod, 3)
    ended = await pod_in(harness, pod, PodPhase.SUCCEEDED, PodPhase.FAILED)
    assert (ended.phase, ended.exit_code) == (PodPhase.FAILED, 3)


@case
async def terminated_pods_stay_until_deleted_and_leave_room(harness: ClusterHarness) -> None:
    (node,) = await with_nodes(harness, 1)
    pod = await running(harness, a_pod(1, cpu_millis=2_000))
    assert [item.uid for item in await harness.view.pods_on(node.name)] == [pod.uid]
    await harness.finish(pod, 0)
    await pod_in(harness, pod, PodPhase.SUCCEEDED)
    assert list(await harness.view.pods_on(node.name)) == []
    await running(harness, a_pod(2, cpu_millis=2_000))
    assert pod.uid in await pods_by_uid(harness)
    assert await harness.pods.delete(pod.name, pod.uid, 30.0)
    await gone(harness, pod)


@case
async def a_deleted_pod_is_gone_as_last_seen(harness: ClusterHarness) -> None:
    await with_nodes(harness, 1)
    pod = await running(harness, a_pod())
    version = (await harness.view.pods_since(0)).version
    assert await harness.pods.delete(pod.name, pod.uid, 0.0)
    await gone(harness, pod)
    changes = await harness.view.pods_since(version)
    assert not changes.reset
    assert [item.uid for item in changes.gone] == [pod.uid]
    assert pod.uid not in [item.uid for item in changes.pods]
    last = changes.gone[0]
    assert last.phase.is_terminated or last.deletion_at is not None
    assert not await harness.pods.delete(pod.name, pod.uid, 0.0)


@case
async def deleting_a_pod_that_never_ran_removes_it(harness: ClusterHarness) -> None:
    pod = await harness.pods.create(a_pod())
    assert pod.phase is PodPhase.PENDING
    assert await harness.pods.delete(pod.name, pod.uid, 30.0)
    await gone(harness, pod)


# ---- pods: placement --------------------------------------------------------------------------


@case
async def without_a_node_a_pod_waits(harness: ClusterHarness) -> None:
    pod = await harness.pods.create(a_pod())
    await a_while(harness)
    waiting = (await pods_by_uid(harness))[pod.uid]
    assert (waiting.phase, waiting.node) == (PodPhase.PENDING, "")
    await with_nodes(harness, 1)
    await pod_in(harness, pod, PodPhase.RUNNING)


@case
async def a_node_takes_no_more_than_it_holds(harness: ClusterHarness) -> None:
    (node,) = await with_nodes(harness, 1)
    pods = [await harness.pods.create(a_pod(i, cpu_millis=800)) for i in range(3)]

    async def two_run() -> bool:
        found = await pods_by_uid(harness)
        return sum(pod.phase is PodPhase.RUNNING for pod in found.values()) == 2

    await eventually(harness, "two of three pods run", two_run)
    await a_while(harness)
    assert await two_run()
    found = await pods_by_uid(harness)
    (first, *_) = [pod for pod in found.values() if pod.phase is PodPhase.RUNNING]
    assert len(await harness.view.pods_on(node.name)) == 2
    await harness.finish(first, 0)
    (waiting,) = [pod for pod in pods if found[pod.uid].phase is PodPhase.PENDING]
    await pod_in(harness, waiting, PodPhase.RUNNING)


@case
async def memory_counts_too(harness: ClusterHarness) -> None:
    await with_nodes(harness, 1)
    spec = a_pod()
    shape = Shape(cpu_millis=100, memory_bytes=3 * GiB)
    pod = await harness.pods.create(
        PodSpec(
            name=spec.name,
            attempt=spec.attempt,
            tenant=spec.tenant,
            template=TaskTemplate(command=["program"], shape=shape),
        )
    )
    await a_while(harness)
    assert (await pods_by_uid(harness))[pod.uid].phase is PodPhase.PENDING


@case
async def a_pod_with_a_slot_waits_for_that_slot(harness: ClusterHarness) -> None:
    first, second = await with_nodes(harness, 2)
    await harness.nodes.label(first.name, {LABEL_SLOT: "slot-1"})
    pod = await harness.pods.create(a_pod(slot="slot-2"))
    await a_while(harness)
    assert (await pods_by_uid(harness))[pod.uid].phase is PodPhase.PENDING
    await harness.nodes.label(second.name, {LABEL_SLOT: "slot-2"})
    bound = await pod_in(harness, pod, PodPhase.RUNNING)
    assert (bound.node, bound.slot) == (second.name, "slot-2")


@case
async def a_pod_with_a_node_goes_there_only(harness: ClusterHarness) -> None:
    first, second = await with_nodes(harness, 2)
    await running(harness, a_pod(1, node=first.name, cpu_millis=2_000))
    pod = await harness.pods.create(a_pod(2, node=first.name))
    await a_while(harness)
    assert (await pods_by_uid(harness))[pod.uid].phase is PodPhase.PENDING
    other = await running(harness, a_pod(3, node=second.name))
    assert other.node == second.name


@case
async def a_cordoned_node_keeps_its_pods_and_takes_none(harness: ClusterHarness) -> None:
    (node,) = await with_nodes(harness, 1)
    old = await running(harness, a_pod(1))
    await harness.nodes.cordon(node.name, cordoned=True)
    pinned = await harness.pods.create(a_pod(2, node=node.name))
    free = await harness.pods.create(a_pod(3))
    await a_while(harness)
    found = await pods_by_uid(harness)
    assert found[old.uid].phase is PodPhase.RUNNING
    assert [found[pod.uid].phase for pod in (pinned, free)] == [PodPhase.PENDING] * 2
    assert [pod.uid for pod in await harness.view.pods_on(node.name)] == [old.uid]
    await harness.nodes.cordon(node.name, cordoned=False)
    await pod_in(harness, pinned, PodPhase.RUNNING)
    await pod_in(harness, free, PodPhase.RUNNING)


@case
async def pods_on_lists_the_live_pods_of_one_node(harness: ClusterHarness) -> None:
    first, second = await with_nodes(harness, 2)
    here = await running(harness, a_pod(1, node=first.name))
    await running(harness, a_pod(2, node=second.name))
    assert [pod.uid for pod in await harness.view.pods_on(first.name)] == [here.uid]
    assert list(await harness.view.pods_on("no-such-node")) == []


# ---- watching ---------------------------------------------------------------------------------


@case
async def changes_since_a_version_name_each_pod_once(harness: ClusterHarness) -> None:
    await with_nodes(harness, 1)
    old = await running(harness, a_pod(1))
    before = await harness.view.pods_since(0)
    assert [pod.uid for pod in before.pods] == [old.uid]
    assert list(before.gone) == []
    new = await running(harness, a_pod(2))
    assert await harness.pods.annotate(new.name, new.uid, {"a": "1"})
    changes = await harness.view.pods_since(before.version)
    assert not changes.reset
    assert [pod.uid for pod in changes.pods] == [new.uid]
    assert changes.version > before.version
    assert changes.pods[0].phase is PodPhase.RUNNING
    nothing = await harness.view.pods_since(changes.version)
    assert (nothing.reset, list(nothing.pods), list(nothing.gone)) == (False, [], [])


@case
async def a_version_from_nowhere_resets(harness: ClusterHarness) -> None:
    pod = await harness.pods.create(a_pod())
    current = (await harness.view.pods_since(0)).version
    changes = await harness.view.pods_since(current + 1_000_000_000)
    assert changes.reset
    assert [item.uid for item in changes.pods] == [pod.uid]


@case
async def waiting_ends_with_a_change_or_the_limit(harness: ClusterHarness) -> None:
    loop = asyncio.get_running_loop()
    version = (await harness.view.pods_since(0)).version
    began = loop.time()
    await harness.view.wait_for_change(version, harness.patience / 25)
    assert loop.time() - began <= harness.patience / 2
    await harness.pods.create(a_pod())
    began = loop.time()
    await harness.view.wait_for_change(version, harness.patience * 10)
    assert loop.time() - began <= harness.patience, "a change that is there already ends the wait"
    version = (await harness.view.pods_since(0)).version
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(
            harness.view.wait_for_change(version, harness.patience * 10), name="waiting"
        )
        await asyncio.sleep(0)
        await harness.pods.create(a_pod(1))
        began = loop.time()
        await waiting
    assert loop.time() - began <= harness.patience
