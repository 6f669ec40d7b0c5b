"""The scaler's decisions: what a plan may and must do, and which machine is which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_scaler.model import (
    PlanDecision,
    PlanGroup,
    PlanNode,
    ReleaseRecord,
    ReleaseStep,
    SlotRecord,
    VacateRecord,
    VacateTurn,
)
from springtide_scaler.policy import (
    Rules,
    backed_off,
    due_for_release,
    due_orphans,
    idle_clocks,
    is_overdue,
    is_settled,
    is_urgent,
    match_machines,
    most_places,
    plan,
    vacate_turn,
)
from springtide_shared.errors import Reason
from springtide_shared.messages.cluster import ShapeDemand, SlotState
from springtide_shared.messages.shape import Shape
from springtide_shared.ports.cluster import Instance, InstanceState, NodeGroupView, NodeView
from springtide_shared.units import GiB, Resources

NOW = 1_000.0
RULES = Rules(worth_factor=0.0, max_launch=10_000)


def shape(cores: float = 1, gib: float = 1) -> Shape:
    return Shape(cpu_millis=int(cores * 1000), memory_bytes=int(gib * GiB))


def room(cores: float, gib: float, pods: int = 110) -> Resources:
    return Resources(cpu_millis=int(cores * 1000), memory_bytes=int(gib * GiB), pods=pods)


def wants(
    count: int,
    of: Shape | None = None,
    *,
    running: int = 0,
    expected_seconds: float | None = None,
    backlog: int | None = None,
) -> ShapeDemand:
    return ShapeDemand(
        shape=of or shape(),
        wanted=count,
        running=running,
        backlog=max(0, count - running) if backlog is None else backlog,
        expected_seconds=expected_seconds,
    )


def group(
    name: str = "g",
    *,
    cores: float = 4,
    gib: float = 16,
    price: float = 1.0,
    boot: float = 60.0,
    room_for: int = 1_000,
    blocked_until: float | None = None,
) -> PlanGroup:
    return PlanGroup(
        name=name,
        allocatable=room(cores, gib),
        price_per_hour=price,
        boot_seconds=boot,
        room=room_for,
        blocked_until=blocked_until,
    )


def node(
    slot: str = "a",
    *,
    cores: float = 4,
    gib: float = 16,
    state: SlotState = SlotState.READY,
    runs: Mapping[Shape, int] | None = None,
    foreign: Resources | None = None,
    before: Mapping[Shape, int] | None = None,
) -> PlanNode:
    runs = runs or {}
    occupied = foreign or Resources()
    for item, count in runs.items():
        occupied += item.resources * count
    return PlanNode(
        slot=slot,
        group="g",
        state=state,
        allocatable=room(cores, gib),
        running={item.key: count for item, count in runs.items()},
        occupied=occupied,
        before={item.key: count for item, count in (before or {}).items()},
    )


def bought(decision: PlanDecision) -> dict[str, int]:
    counts: dict[str, int] = {}
    for purchase in decision.purchases:
        counts[purchase.group] = counts.get(purchase.group, 0) + purchase.count
    return counts


def places(decision: PlanDecision, slot: str) -> dict[str, int]:
    (pattern,) = (item for item in decision.patterns if item.slot == slot)
    return {key: count for key, count in pattern.places.items() if count}


# ---- examples ---------------------------------------------------------------------------------
def test_existing_room_is_used_before_anything_is_bought() -> None:
    decision = plan([wants(4)], [node()], [group()], NOW, RULES)
    assert places(decision, "a") == {shape().key: 4}
    assert decision.purchases == ()


def test_a_slot_keeps_a_place_for_everything_that_runs_though_nothing_is_wanted() -> None:
    decision = plan([wants(0)], [node(runs={shape(): 3})], [group()], NOW, RULES)
    assert places(decision, "a")[shape().key] >= 3
    assert decision.patterns[0].is_needed


def test_a_shape_that_left_the_demand_keeps_its_running_places() -> None:
    other = shape(2, 2)
    decision = plan([wants(0)], [node(runs={other: 1})], [], NOW, RULES)
    assert places(decision, "a")[other.key] == 1


def test_work_on_cordoned_nodes_counts_but_their_room_does_not() -> None:
    closed = node("a", state=SlotState.CORDONED, runs={shape(): 2})
    decision = plan([wants(4, running=2)], [closed], [group(cores=1)], NOW, RULES)
    assert places(decision, "a") == {shape().key: 2}
    assert bought(decision) == {"g": 2}


def test_launching_machines_count_so_that_nothing_is_bought_twice() -> None:
    booting = node("a", state=SlotState.LAUNCHING)
    decision = plan([wants(4)], [booting], [group()], NOW, RULES)
    assert decision.purchases == ()
    assert places(decision, "a") == {shape().key: 4}


def test_the_fullest_node_gets_the_work_so_that_others_run_empty() -> None:
    nodes = [node("a"), node("b", runs={shape(): 2})]
    decision = plan([wants(4, running=2)], nodes, [group()], NOW, RULES)
    assert places(decision, "b") == {shape().key: 4}
    assert [item.is_needed for item in decision.patterns] == [False, True]


def test_free_room_of_a_ready_node_in_use_is_offered_to_all_wanted_shapes_together() -> None:
    big = shape(2, 2)
    busy = node("a", cores=6, runs={shape(): 1, big: 1})
    decision = plan([wants(1, running=1), wants(1, big, running=1)], [busy], [], NOW, RULES)
    assert places(decision, "a") == {big.key: 2, shape().key: 2}


def test_an_unneeded_empty_node_offers_nothing() -> None:
    decision = plan([wants(0)], [node("a")], [], NOW, RULES)
    assert places(decision, "a") == {}
    assert not decision.patterns[0].is_needed


def test_what_was_promised_on_a_slot_stays_there_while_it_is_wanted() -> None:
    small, big = shape(1, 1), shape(3, 3)
    nodes = [node("a", before={small: 4}), node("b", before={big: 1})]
    decision = plan([wants(2, small), wants(1, big)], nodes, [], NOW, RULES)
    assert places(decision, "b")[big.key] == 1
    assert places(decision, "a")[small.key] >= 2


def test_expired_demand_holds_purchases_and_frees_empty_nodes() -> None:
    nodes = [node("a", runs={shape(): 1}), node("b")]
    decision = plan([wants(50)], nodes, [group()], NOW, RULES, hold="demand-expired")
    assert decision.purchases == ()
    assert [item.is_needed for item in decision.patterns] == [True, False]
    assert decision.decisions == ("hold: demand-expired",)


def test_the_cheapest_place_wins_not_the_cheapest_node() -> None:
    small = group("small", cores=2, price=0.6)
    large = group("large", cores=8, price=2.0)
    assert bought(plan([wants(16)], [], [small, large], NOW, RULES)) == {"large": 2}


def test_the_rest_goes_to_the_smallest_cheapest_node_that_holds_it() -> None:
    small = group("small", cores=2, price=0.6)
    large = group("large", cores=8, price=2.0)
    assert bought(plan([wants(9)], [], [small, large], NOW, RULES)) == {"large": 1, "small": 1}


def test_one_node_for_the_rest_beats_several_small_ones() -> None:
    single = group("single", cores=1, price=0.40)
    quad = group("quad", cores=4, price=1.0)
    assert bought(plan([wants(3)], [], [single, quad], NOW, RULES)) == {"quad": 1}


def test_memory_decides_where_it_is_the_bottleneck() -> None:
    lean = group("lean", cores=16, gib=16, price=1.0)
    fat = group("fat", cores=16, gib=128, price=2.0)
    assert bought(plan([wants(16, shape(1, 8))], [], [lean, fat], NOW, RULES)) == {"fat": 1}


def test_a_group_that_is_backed_off_is_left_out_and_demand_moves_on() -> None:
    cheap = group("cheap", price=0.5, blocked_until=NOW + 1)
    dear = group("dear", price=2.0)
    assert bought(plan([wants(4)], [], [cheap, dear], NOW, RULES)) == {"dear": 1}
    assert bought(plan([wants(4)], [], [cheap, dear], NOW + 1, RULES)) == {"cheap": 1}


def test_what_no_group_holds_is_said_and_does_not_stop_the_rest() -> None:
    decision = plan([wants(1, shape(64)), wants(4)], [], [group()], NOW, RULES)
    assert bought(decision) == {"g": 1}
    assert decision.unmet[shape(64).key] == 1
    assert any(line.startswith("unschedulable: ") for line in decision.decisions)


def test_maximum_and_stock_out_are_told_apart() -> None:
    full = plan([wants(4)], [], [group(room_for=0)], NOW, RULES)
    assert full.decisions[0].startswith("limit-reached: ")
    out = plan([wants(4)], [], [group(blocked_until=NOW + 9)], NOW, RULES)
    assert out.decisions[0].startswith("capacity: ")


def test_launches_of_one_round_are_limited() -> None:
    rules = replace(RULES, max_launch=3)
    assert bought(plan([wants(100)], [], [group(cores=1)], NOW, rules)) == {"g": 3}


def test_short_work_buys_few_places_and_buys_no_more_in_later_rounds() -> None:
    rules = replace(RULES, worth_factor=3.0, release_seconds=40.0)
    # 1,000 tasks of 30 s are 30,000 s of work; a place must have 3 x (60 + 40) s: 100 places.
    demand = [wants(1_000, expected_seconds=30.0)]
    first = plan(demand, [], [group(cores=4)], NOW, rules)
    assert bought(first) == {"g": 25}
    nodes = [node(f"n{i:02}", state=SlotState.LAUNCHING) for i in range(25)]
    assert plan(demand, nodes, [group(cores=4)], NOW, rules).purchases == ()


def test_work_too_short_for_any_node_still_gets_one_place() -> None:
    rules = replace(RULES, worth_factor=3.0, release_seconds=40.0)
    demand = [wants(3, expected_seconds=1.0)]
    decision = plan(demand, [], [group(cores=4)], NOW, rules)
    assert bought(decision) == {"g": 1}
    assert sum(decision.purchases[0].places.values()) == 1


def test_tasks_never_wait_for_good_behind_what_runs_longer_than_thought() -> None:
    rules = replace(RULES, worth_factor=3.0, release_seconds=90.0)
    short = wants(1_004, running=4, expected_seconds=0.1)
    full = node("full", runs={shape(): 4})
    slow = group(cores=4, boot=130.0)
    first = plan([short], [full], [slow], NOW, rules)
    assert bought(first) == {"g": 1}, "one more, though all the work is not worth a boot"
    booting = node("new", state=SlotState.LAUNCHING)
    assert bought(plan([short], [full, booting], [slow], NOW, rules)) == {}, "and then no more"
    cordoned = replace(full, state=SlotState.CORDONED)
    assert bought(plan([short], [cordoned], [slow], NOW, rules)) == {"g": 1}


@settings(deadline=None)
@given(
    waiting=st.integers(1, 1_000),
    runs=st.lists(st.integers(1, 4), max_size=4),
    seconds=st.floats(0.0, 1e4),
    boot=st.floats(0.0, 1e3),
    closed=st.booleans(),
)
def test_while_tasks_wait_there_is_a_free_or_booting_place_or_one_is_bought(
    waiting: int, runs: list[int], seconds: float, boot: float, closed: bool
) -> None:
    rules = replace(RULES, worth_factor=3.0, release_seconds=90.0)
    state = SlotState.CORDONED if closed else SlotState.READY
    nodes = [node(f"n{i}", runs={shape(): count}, state=state) for i, count in enumerate(runs)]
    demand = wants(sum(runs) + waiting, running=sum(runs), expected_seconds=seconds)
    free = 0 if closed else sum(4 - count for count in runs)
    decision = plan([demand], nodes, [group(boot=boot)], NOW, rules)
    assert free > 0 or decision.purchases


def test_work_of_unknown_length_is_bought_in_full() -> None:
    rules = replace(RULES, worth_factor=3.0)
    assert bought(plan([wants(40)], [], [group(cores=4)], NOW, rules)) == {"g": 10}


def test_other_peoples_pods_take_room() -> None:
    taken = node("a", foreign=room(3, 1, pods=1))
    decision = plan([wants(4)], [taken], [], NOW, RULES)
    assert places(decision, "a") == {shape().key: 1}


# ---- laws -------------------------------------------------------------------------------------
SHAPES = [shape(1, 1), shape(1, 4), shape(2, 2), shape(3, 1), shape(4, 30), shape(8, 8)]
shapes_wanted = st.lists(
    st.builds(wants, st.integers(0, 40), st.sampled_from(SHAPES)),
    max_size=4,
    unique_by=lambda item: item.shape.key,
)
group_lists = st.lists(
    st.builds(
        group,
        st.sampled_from(["g1", "g2", "g3", "g4"]),
        cores=st.sampled_from([1, 2, 4, 8, 16]),
        gib=st.sampled_from([2, 8, 32, 64]),
        price=st.sampled_from([0.0, 0.05, 0.1, 0.4, 1.0, 3.0]),
        room_for=st.integers(0, 8),
        blocked_until=st.sampled_from([None, NOW - 1, NOW + 1]),
    ),
    max_size=4,
    unique_by=lambda item: item.name,
)


@st.composite
def node_lists(draw: st.DrawFn) -> list[PlanNode]:
    """Nodes whose running attempts fit, as real ones do."""
    nodes = []
    for number in range(draw(st.integers(0, 5))):
        cores, gib = draw(st.sampled_from([(2, 8), (4, 16), (8, 8)]))
        left, runs = room(cores, gib), {}
        for item in SHAPES:
            most = item.resources.times_in(left)
            runs[item] = draw(st.integers(0, min(2, most)))
            left -= item.resources * runs[item]
        nodes.append(
            node(
                f"n{number}",
                cores=cores,
                gib=gib,
                state=draw(st.sampled_from(list(SlotState))),
                runs={item: count for item, count in runs.items() if count},
                before=draw(st.dictionaries(st.sampled_from(SHAPES), st.integers(0, 4))),
            )
        )
    return nodes


def by_key() -> dict[str, Resources]:
    return {item.key: item.resources for item in SHAPES}


def total(pattern: Mapping[str, int]) -> Resources:
    result = Resources()
    for key, count in pattern.items():
        result += by_key()[key] * count
    return result


@settings(deadline=None)
@given(demand=shapes_wanted, nodes=node_lists(), groups=group_lists)
def test_no_node_is_oversold_and_nothing_that_runs_loses_its_place(
    demand: list[ShapeDemand], nodes: list[PlanNode], groups: list[PlanGroup]
) -> None:
    decision = plan(demand, nodes, groups, NOW, RULES)
    assert [item.slot for item in decision.patterns] == [item.slot for item in nodes]
    for item, pattern in zip(nodes, decision.patterns, strict=True):
        assert total(pattern.places).fits(item.allocatable)
        for key, count in item.running.items():
            assert pattern.places[key] >= count
        if item.state is SlotState.CORDONED:
            assert pattern.places == item.running
    allocatable = {item.name: item.allocatable for item in groups}
    for purchase in decision.purchases:
        assert purchase.count > 0
        assert purchase.places
        assert total(purchase.places).fits(allocatable[purchase.group])


@settings(deadline=None)
@given(demand=shapes_wanted, nodes=node_lists(), groups=group_lists, most=st.integers(1, 6))
def test_no_group_grows_past_its_maximum_or_while_backed_off_or_past_the_round(
    demand: list[ShapeDemand], nodes: list[PlanNode], groups: list[PlanGroup], most: int
) -> None:
    counts = bought(plan(demand, nodes, groups, NOW, replace(RULES, max_launch=most)))
    assert sum(counts.values()) <= most
    for item in groups:
        assert counts.get(item.name, 0) <= item.room
        if item.blocked_until is not None and item.blocked_until > NOW:
            assert item.name not in counts


@settings(deadline=None)
@given(demand=shapes_wanted, nodes=node_lists(), groups=group_lists)
def test_wanted_places_are_there_or_bought_or_told_as_unmet(
    demand: list[ShapeDemand], nodes: list[PlanNode], groups: list[PlanGroup]
) -> None:
    decision = plan(demand, nodes, groups, NOW, RULES)
    for item in demand:
        key = item.shape.key
        there = sum(pattern.places.get(key, 0) for pattern in decision.patterns)
        new = sum(p.places.get(key, 0) * p.count for p in decision.purchases)
        assert there + new + decision.unmet[key] >= item.wanted
        if decision.unmet[key]:
            left = {g.name: g.room - bought(decision).get(g.name, 0) for g in groups}
            for g in groups:  # nothing that could have held it is left
                can = item.shape.resources.times_in(g.allocatable) > 0
                is_open = g.blocked_until is None or g.blocked_until <= NOW
                assert not (can and is_open and left[g.name] > 0)


@settings(deadline=None)
@given(demand=shapes_wanted, groups=group_lists)
def test_a_plan_costs_no_more_than_a_node_of_its_own_for_each_task(
    demand: list[ShapeDemand], groups: list[PlanGroup]
) -> None:
    groups = [replace(item, room=10_000, blocked_until=None) for item in groups]
    decision = plan(demand, [], groups, NOW, RULES)
    prices = {item.name: item.price_per_hour for item in groups}
    cost = sum(prices[purchase.group] * purchase.count for purchase in decision.purchases)
    alone = 0.0
    for item in demand:
        able = [g.price_per_hour for g in groups if item.shape.resources.fits(g.allocatable)]
        alone += item.wanted * min(able, default=0.0)
    assert cost <= alone + 1e-6


@settings(deadline=None)
@given(demand=shapes_wanted, nodes=node_lists(), groups=group_lists)
def test_the_order_of_what_is_given_does_not_matter(
    demand: list[ShapeDemand], nodes: list[PlanNode], groups: list[PlanGroup]
) -> None:
    there = plan(demand, nodes, groups, NOW, RULES)
    back = plan(demand[::-1], nodes[::-1], groups[::-1], NOW, RULES)
    assert there.purchases == back.purchases
    assert there.patterns == back.patterns[::-1]


@settings(deadline=None)
@given(demand=shapes_wanted, groups=group_lists)
def test_once_bought_nothing_more_is_bought(
    demand: list[ShapeDemand], groups: list[PlanGroup]
) -> None:
    """The pattern of a purchase is kept when it comes back as a launching slot."""
    first = plan(demand, [], groups, NOW, RULES)
    shapes_by_key = {item.key: item for item in SHAPES}
    allocatable = {item.name: item.allocatable for item in groups}
    launching: list[PlanNode] = []
    for purchase in first.purchases:
        for _ in range(purchase.count):
            launching.append(
                replace(
                    node(
                        f"n{len(launching):03}",
                        state=SlotState.LAUNCHING,
                        before={shapes_by_key[k]: n for k, n in purchase.places.items()},
                    ),
                    allocatable=allocatable[purchase.group],
                )
            )
    left = [replace(g, room=g.room - bought(first).get(g.name, 0)) for g in groups]
    second = plan(demand, launching, left, NOW, RULES)
    assert second.purchases == ()
    assert second.unmet == first.unmet


# ---- release, back-off, matching --------------------------------------------------------------
def test_idle_clocks_begin_again_after_work() -> None:
    clocks = idle_clocks({}, ["a", "b"], 10.0)
    clocks = idle_clocks(clocks, ["a"], 20.0)
    clocks = idle_clocks(clocks, ["a", "b"], 30.0)
    assert clocks == {"a": 10.0, "b": 30.0}


def test_release_waits_for_the_idle_time_but_not_for_vacated_machines() -> None:
    idle = {"a": 0.0, "b": 50.0, "v": 59.0}
    assert due_for_release(idle, ["v"], 0, 60.0, RULES) == [("v", "vacated"), ("a", "idle")]


def test_no_more_machines_are_on_their_way_out_than_can_be_remembered() -> None:
    idle = {"a": 1.0, "b": 0.0, "c": 2.0}
    rules = replace(RULES, max_releasing=7)
    assert due_for_release(idle, [], 5, 100.0, rules) == [("b", "idle"), ("a", "idle")]
    assert due_for_release(idle, [], 8, 100.0, rules) == []


def test_a_fresh_read_is_trusted_only_some_time_after_the_announcement() -> None:
    assert not is_settled(None, 100.0, RULES)
    assert not is_settled(99.0, 100.0, RULES)
    assert is_settled(98.0, 100.0, RULES)


def test_backoff_doubles_up_to_its_limit_and_heeds_a_named_pause() -> None:
    backoff = None
    pauses = []
    for _ in range(6):
        backoff = backed_off(backoff, Reason.CAPACITY, 0.0, RULES)
        pauses.append(backoff.until)
    assert pauses == [60.0, 120.0, 240.0, 480.0, 900.0, 900.0]
    assert backed_off(None, Reason.QUOTA, 0.0, RULES, pause=100.0).until == 100.0


def machine(name: str, at: float = 0.0, state: InstanceState = InstanceState.RUNNING) -> Instance:
    return Instance(instance_id=name, state=state, launched_at=at)


def group_view(*machines: Instance, size: int | None = None, name: str = "g") -> NodeGroupView:
    return NodeGroupView(
        name=name,
        instance_type="t",
        allocatable=room(4, 16),
        price_per_hour=1.0,
        size=len(machines) if size is None else size,
        max_size=10,
        boot_seconds=60.0,
        instances=machines,
    )


def joined(name: str, slot: str = "") -> NodeView:
    return NodeView(
        name=f"node-{name}",
        uid=f"uid-{name}",
        provider_id=name,
        group="g",
        slot=slot,
        ready=True,
        allocatable=room(4, 16),
        created_at=0.0,
        ready_at=1.0,
    )


def order(slot: str, at: float = 0.0) -> SlotRecord:
    return SlotRecord(slot=slot, group="g", ordered_at=at)


def matched(
    records: Sequence[SlotRecord],
    nodes: Sequence[NodeView],
    view: NodeGroupView,
    *,
    releasing: Mapping[str, ReleaseRecord] | None = None,
    now: float = NOW,
) -> tuple[dict[str, str], list[str], list[str]]:
    """({slot: instance id or ""}, lost slots, orphaned nodes)."""
    fresh = iter(f"fresh-{number}" for number in range(100))
    result = match_machines(
        records, nodes, [view], releasing or {}, now, RULES, lambda: next(fresh)
    )
    return (
        {r.slot: r.instance.instance_id if r.instance else "" for r in result.slots},
        [record.slot for record in result.lost],
        [item.name for item in result.orphans],
    )


@pytest.mark.parametrize(
    ("record", "overdue"),
    [
        (order("a", NOW - 599), False),
        (order("a", NOW - 600), True),
        (replace(order("a", 0.0), instance=machine("i", NOW - 599)), False),
        (replace(order("a", 0.0), instance=machine("i", NOW - 600)), True),
        (replace(order("a", 0.0), instance=machine("i", NOW - 600), node=joined("i")), False),
    ],
    ids=["ordered", "never delivered", "boots", "never joined", "joined"],
)
def test_what_takes_longer_than_the_join_limit_is_overdue(
    record: SlotRecord, overdue: bool
) -> None:
    rules = replace(RULES, join_limit_seconds=600.0)
    assert is_overdue(record, group_view(), 0.0, NOW, rules) is overdue
    slow = replace(group_view(), boot_seconds=300.0)
    assert not is_overdue(record, slow, 0.0, NOW, rules), "three boots at least"


def test_a_new_life_gives_machines_their_full_time() -> None:
    record = replace(order("a", 0.0), instance=machine("i", 0.0))
    rules = replace(RULES, join_limit_seconds=600.0)
    assert not is_overdue(record, group_view(), NOW - 10, NOW, rules)


def test_an_orphan_is_removed_when_it_has_been_one_without_a_break() -> None:
    rules = replace(RULES, orphan_seconds=30.0)
    a, b = joined("a"), joined("b")
    since, due = due_orphans({}, [a, b], 100.0, rules)
    assert due == []
    since, due = due_orphans(since, [b], 120.0, rules)
    since, due = due_orphans(since, [a, b], 130.0, rules)
    assert due == [b]
    assert since == {a.uid: 130.0, b.uid: 100.0}


def leaving(node: NodeView) -> ReleaseRecord:
    return ReleaseRecord(
        instance_id=node.provider_id,
        group="g",
        slot="s",
        node=node.name,
        node_uid=node.uid,
        step=ReleaseStep.CORDON,
        reason="vacated",
    )


CLOSED = replace(joined("a"), cordoned=True)


@pytest.mark.parametrize(
    ("node", "releases", "until", "turn"),
    [
        (CLOSED, [], 20.0, VacateTurn.KEEP),
        (joined("a"), [], 20.0, VacateTurn.CLOSE),
        (CLOSED, [], 10.0, VacateTurn.EXPIRED),
        (joined("a"), [], 10.0, VacateTurn.EXPIRED),
        (CLOSED, [leaving(CLOSED)], 10.0, VacateTurn.KEEP),
        (joined("a"), [leaving(CLOSED)], 20.0, VacateTurn.KEEP),
        (None, [], 20.0, VacateTurn.NODE_GONE),
        (None, [leaving(CLOSED)], 10.0, VacateTurn.KEEP),
        (replace(CLOSED, uid="another"), [], 20.0, VacateTurn.NODE_GONE),
    ],
    ids=[
        "closed",
        "opened by somebody",
        "expired",
        "expired and open",
        "leaves",
        "leaves and open",
        "gone",
        "gone by a release",
        "another of that name",
    ],
)
def test_a_vacated_node_is_kept_closed_until_it_leaves_or_the_wish_expires(
    node: NodeView | None, releases: list[ReleaseRecord], until: float, turn: VacateTurn
) -> None:
    record = VacateRecord(
        vacate_id="v", node="a", node_uid=CLOSED.uid, valid_until=until, was_cordoned=False
    )
    by_id = {item.instance_id: item for item in releases}
    assert vacate_turn(record, node, by_id, 10.0) is turn


def test_orders_meet_machines_in_order_of_launch() -> None:
    view = group_view(machine("late", 9.0), machine("early", 8.0), size=3)
    slots, lost, _ = matched([order("s1", 1.0), order("s2", 2.0), order("s3", 3.0)], [], view)
    assert slots == {"s1": "early", "s2": "late", "s3": ""}
    assert lost == []


def test_a_new_life_takes_slots_from_labels_and_makes_the_rest() -> None:
    view = group_view(machine("a"), machine("b"), size=3)
    slots, _, _ = matched([], [joined("a", "old-slot")], view)
    assert slots == {"old-slot": "a", "fresh-0": "b", "fresh-1": ""}


def test_an_order_outlives_lagging_answers_but_not_for_ever() -> None:
    view = group_view(size=0)
    assert matched([order("s1", NOW - 1)], [], view)[0] == {"s1": ""}
    assert matched([order("s1", NOW - 60)], [], view)[0] == {}


def test_a_vanished_machine_is_lost_unless_it_is_being_released() -> None:
    record = replace(order("s1"), instance=machine("a"), node=joined("a", "s1"))
    assert matched([record], [joined("a", "s1")], group_view())[1:] == (["s1"], ["node-a"])
    release = ReleaseRecord(
        instance_id="a", group="g", slot="s1", step=ReleaseStep.TERMINATE, reason="idle"
    )
    assert matched([record], [joined("a", "s1")], group_view(), releasing={"a": release})[1:] == (
        [],
        [],
    )


@pytest.mark.parametrize("size", [0, 3])
def test_most_places_counts_all_groups_at_their_maximum(size: int) -> None:
    machines = [machine(f"m{number}") for number in range(size)]
    assert most_places(shape(), [group_view(*machines), group_view(name="h")]) == 80
    assert most_places(shape(64), [group_view(*machines)]) == 0


def test_only_a_demand_that_asks_for_more_brings_a_round_forward() -> None:
    before = [wants(5, running=2)]
    assert not is_urgent(before, "", before, "")
    assert not is_urgent(before, "", [wants(5, running=4)], ""), "backlog that runs now"
    assert not is_urgent(before, "", [wants(3)], ""), "less keeps until the next round"
    assert not is_urgent(before, "", [], "")
    assert is_urgent(before, "", [wants(6, running=2)], "")
    assert is_urgent(before, "", [*before, wants(0, shape(2))], ""), "a shape that is new"
    assert is_urgent(before, "demand-expired", before, ""), "may be bought for again"
