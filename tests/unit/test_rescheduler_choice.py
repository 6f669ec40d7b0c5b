"""Which nodes are emptied: properties of the greedy rule."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_rescheduler.config import ReschedulerConfig
from springtide_rescheduler.lives import Lives
from springtide_rescheduler.model import Choice, Moved, Past, Picture, VacateSaga, Why
from springtide_rescheduler.policy import begin, choose, remembered, rest_seconds
from springtide_shared.errors import InvalidFieldError
from springtide_shared.messages.attempts import AttemptState, LiveAttempt
from springtide_shared.messages.cluster import CapacityNode, GroupCapacity, ShapeDemand
from springtide_shared.messages.shape import Shape
from springtide_shared.runtime.config import load
from springtide_shared.units import GiB

NOW = 1_000_000.0
RULES = ReschedulerConfig()
GROUPS = [
    GroupCapacity(
        group=f"g{cores}",
        instance_type=f"t{cores}",
        cpu_millis=cores * 1000,
        memory_bytes=cores * 4 * GiB,
        price_per_hour=cores * 0.04,
        size=1,
        max_size=100,
        boot_seconds=90.0,
    )
    for cores in (8, 16, 24)
]


def node(name: str, cores: int = 24, **changes: object) -> CapacityNode:
    fields: dict[str, object] = {
        "node": name,
        "slot": f"slot-{name}",
        "group": f"g{cores}",
        "cpu_millis": cores * 1000,
        "memory_bytes": cores * 4 * GiB,
        "price_per_hour": cores * 0.04,
    }
    return CapacityNode(**(fields | changes))  # type: ignore[arg-type]


def task(index: int, on: str, cores: int = 8, **changes: object) -> LiveAttempt:
    fields: dict[str, object] = {
        "job_id": "j",
        "index": index,
        "attempt": 1,
        "state": AttemptState.RUNNING,
        "shape": "s",
        "cpu_millis": cores * 1000,
        "memory_bytes": cores * GiB,
        "pod_uid": f"u{index}",
        "node": on,
        "started_at": NOW - 3_600.0,
        "checkpointable": True,
    }
    return LiveAttempt(**(fields | changes))  # type: ignore[arg-type]


def sparse(count: int) -> Picture:
    """One 8-core task left on each of `count` nodes of 24 cores."""
    return Picture(
        nodes=[node(f"n{i:03d}") for i in range(count)],
        groups=GROUPS,
        attempts=[task(i, f"n{i:03d}") for i in range(count)],
        demand=[],
        may_start=1_000,
    )


def targets(choice: Choice) -> Counter[str]:
    return Counter(move.target_node for one in choice.emptying for move in one.moves)


def why(choice: Choice, name: str) -> Why:
    (found,) = [left.why for left in choice.left if left.node == name]
    return found


def test_a_sparse_tail_is_packed_onto_a_third_of_its_nodes() -> None:
    choice = choose(sparse(30), NOW, RULES)
    assert len(choice.emptying) == 20
    assert set(targets(choice).values()) == {2}


def test_nothing_moves_while_the_backlog_will_fill_the_holes() -> None:
    shape = Shape(cpu_millis=8_000, memory_bytes=8 * GiB)
    demand = [ShapeDemand(shape=shape, wanted=99, running=30, backlog=5)]
    choice = choose(replace(sparse(30), demand=demand), NOW, RULES)
    assert not choice.emptying
    assert {left.why for left in choice.left} == {Why.EXPECTS_TASKS}


def test_a_backlog_that_fits_nowhere_stops_nothing() -> None:
    shape = Shape(cpu_millis=20_000, memory_bytes=8 * GiB)
    demand = [ShapeDemand(shape=shape, wanted=99, running=30, backlog=5)]
    assert choose(replace(sparse(30), demand=demand), NOW, RULES).emptying


def test_a_task_without_a_checkpoint_keeps_its_node_whole() -> None:
    picture = sparse(3)
    attempts = [*picture.attempts, task(50, "n000", 4, checkpointable=False)]
    choice = choose(replace(picture, attempts=attempts), NOW, RULES)
    assert "n000" not in [one.node for one in choice.emptying]
    lone = replace(picture, attempts=attempts, nodes=picture.nodes[:1])
    assert why(choose(lone, NOW, RULES), "n000") is Why.NOT_MOVABLE


@pytest.mark.parametrize(
    "changes",
    [
        {"state": AttemptState.FINISHING},
        {"state": AttemptState.PENDING, "started_at": None},
        {"pod_uid": ""},
    ],
)
def test_only_running_tasks_move(changes: dict[str, object]) -> None:
    picture = sparse(2)
    attempts = [task(i, f"n{i:03d}", **changes) for i in range(2)]
    assert not choose(replace(picture, attempts=attempts), NOW, RULES).emptying


def test_tasks_that_will_end_soon_are_left() -> None:
    lives = Lives([3_610.0 + i for i in range(100)], [3_600.0] * 30)
    choice = choose(replace(sparse(30), lives={"j": lives}), NOW, RULES)
    assert not choice.emptying
    assert {left.why for left in choice.left} == {Why.NO_GAIN}


def test_slow_saves_make_moves_rare() -> None:
    slow = replace(RULES, save_seconds=3_600.0, resume_seconds=3_600.0)
    assert not choose(sparse(30), NOW, slow).emptying


def test_a_fresh_task_is_left() -> None:
    picture = replace(
        sparse(2), attempts=[task(i, f"n{i:03d}", started_at=NOW - 5) for i in (0, 1)]
    )
    choice = choose(picture, NOW, RULES)
    assert why(choice, "n000") is Why.TOO_FRESH


def test_busy_and_foreign_pods_only_ever_veto() -> None:
    picture = sparse(2)
    assert choose(picture, NOW, RULES).emptying, "missing usage reads as nothing"
    idle = replace(picture, used_ratios={"n000": 0.0, "n001": 0.0})
    assert choose(idle, NOW, RULES).emptying == choose(picture, NOW, RULES).emptying
    busy = replace(picture, used_ratios={"n000": 0.95, "n001": 0.95})
    assert not choose(busy, NOW, RULES).emptying
    full = choose(replace(picture, requested_ratios={"n001": 0.8}), NOW, RULES)
    assert not full.emptying, "foreign pods hold the room on n001, and n001 itself"
    assert why(full, "n001") is Why.FOREIGN


def test_a_bad_setting_names_field_and_remedy() -> None:
    with pytest.raises(InvalidFieldError, match="trigger_ratio"):
        load(ReschedulerConfig, prefix="X", environ={"X_TRIGGER_RATIO": "2"})


# ---------------------------------------------------------------- properties
@st.composite
def pictures(draw: st.DrawFn) -> Picture:
    rng = random.Random(draw(st.integers(0, 2**32)))
    nodes, attempts = [], []
    index = 0
    for number in range(draw(st.integers(1, 12))):
        cores = rng.choice([8, 16, 24])
        name = f"n{number:02d}"
        nodes.append(node(name, cores, cordoned=rng.random() < 0.15))
        room = cores
        while room > 0 and rng.random() < 0.7:
            size = rng.choice([1, 2, 4, 8, 12, 16])
            if size > room:
                break
            room -= size
            attempts.append(
                task(
                    index,
                    name,
                    size,
                    started_at=NOW - rng.uniform(0, 20_000),
                    checkpointable=rng.random() < 0.95,
                    job_id=rng.choice(["j", "k"]),
                )
            )
            index += 1
    ended = [rng.weibullvariate(3_600, 0.6) for _ in range(rng.choice([0, 5, 200]))]
    demand = []
    if rng.random() < 0.3:
        size = rng.choice([1, 8, 20])
        shape = Shape(cpu_millis=size * 1000, memory_bytes=size * GiB)
        demand = [ShapeDemand(shape=shape, wanted=9, running=1, backlog=rng.choice([0, 3]))]
    return Picture(
        nodes=nodes,
        groups=GROUPS,
        attempts=attempts,
        demand=demand,
        lives={"j": Lives(ended, [100.0] * 5)},
        requested_ratios={n.node: rng.uniform(0, 1) for n in nodes if rng.random() < 0.2},
        used_ratios={n.node: rng.uniform(0, 1) for n in nodes if rng.random() < 0.2},
        may_start=rng.choice([0, 2, 100]),
    )


def sagas_of(choice: Choice) -> list[VacateSaga]:
    return [
        begin(one, f"v{n}", [f"m{n}-{k}" for k in range(len(one.moves))], "c", NOW, RULES)
        for n, one in enumerate(choice.emptying)
    ]


@settings(max_examples=150, deadline=None)
@given(picture=pictures(), seed=st.integers(0, 99))
def test_laws_of_every_choice(picture: Picture, seed: int) -> None:
    choice = choose(picture, NOW, RULES)
    nodes = {one.node: one for one in picture.nodes}
    sources = [one.node for one in choice.emptying]
    into = targets(choice)

    assert len(set(sources)) == len(sources)
    assert not set(sources) & set(into), "a receiver is never a source in the same tick"
    for name in into:
        assert not nodes[name].cordoned
    for name in sources:
        assert not nodes[name].cordoned
    assert sum(into.values()) <= picture.may_start

    for emptying in choice.emptying:
        there = [one for one in picture.attempts if one.node == emptying.node]
        assert sorted(move.attempt.key for move in emptying.moves) == sorted(a.key for a in there)
        assert all(one.checkpointable for one in there)
        assert emptying.gain > RULES.min_gain_seconds * nodes[emptying.node].price_per_hour / 3600

    for name in into:  # no room is sold twice
        came = [m.attempt for one in choice.emptying for m in one.moves if m.target_node == name]
        there = [one for one in picture.attempts if one.node == name]
        for part in ("cpu_millis", "memory_bytes"):
            total = sum(getattr(one, part) for one in (*came, *there))
            assert total <= getattr(nodes[name], part)
        ratio = picture.requested_ratios.get(name)
        if ratio is not None:
            cpu = sum(one.cpu_millis for one in came)
            assert cpu <= nodes[name].cpu_millis * (1 - ratio) + 1

    shuffled = random.Random(seed)
    again = replace(
        picture,
        nodes=shuffled.sample(list(picture.nodes), len(picture.nodes)),
        attempts=shuffled.sample(list(picture.attempts), len(picture.attempts)),
    )
    assert choose(again, NOW, RULES) == choice, "the order of what is seen decides nothing"


@settings(max_examples=80, deadline=None)
@given(picture=pictures())
def test_what_is_on_its_way_is_neither_moved_again_nor_built_upon(picture: Picture) -> None:
    picture = replace(picture, may_start=100)
    first = choose(picture, NOW, RULES)
    sagas = sagas_of(first)
    second = choose(replace(picture, sagas=sagas), NOW, RULES)
    moving = {move.task for saga in sagas for move in saga.moves}
    receiving = {move.target_node for saga in sagas for move in saga.moves}
    emptied = {saga.node for saga in sagas}
    for one in second.emptying:
        assert one.node not in receiving | emptied
        assert not {(m.attempt.job_id, m.attempt.index) for m in one.moves} & moving
    assert not set(targets(second)) & emptied
    nodes = {one.node: one for one in picture.nodes}
    total = targets(first) + targets(second)
    for name in total:
        came = [
            move.attempt.cpu_millis
            for choice in (first, second)
            for one in choice.emptying
            for move in one.moves
            if move.target_node == name
        ]
        there = [one.cpu_millis for one in picture.attempts if one.node == name]
        assert sum(came) + sum(there) <= nodes[name].cpu_millis


@settings(max_examples=80, deadline=None)
@given(picture=pictures())
def test_no_ping_pong(picture: Picture) -> None:
    """Let every move happen at once; then no moved task moves before its rest is over."""
    picture = replace(picture, may_start=100)
    choice = choose(picture, NOW, RULES)
    past: dict[tuple[str, int], Past] = {}
    where: dict[tuple[str, int], str] = {}
    for saga in sagas_of(choice):
        moved = [
            _as_moved(move.target_node, where, move.task, saga_move=move) for move in saga.moves
        ]
        past = remembered(_with_moves(saga, moved), past, NOW, RULES)
    attempts = [
        _moved_to(one, where[one.job_id, one.index]) if (one.job_id, one.index) in where else one
        for one in picture.attempts
    ]
    later = NOW + 61.0
    again = choose(replace(picture, attempts=attempts, past=past, demand=[]), later, RULES)
    for emptying in again.emptying:
        for move in emptying.moves:
            assert (move.attempt.job_id, move.attempt.index) not in where


def _as_moved(target, where, task_key, *, saga_move):  # type: ignore[no-untyped-def]
    from msgspec.structs import replace as struct_replace

    where[task_key] = target
    return struct_replace(saga_move, state=Moved(NOW, 30.0, 100.0, 10.0))


def _with_moves(saga, moves):  # type: ignore[no-untyped-def]
    from msgspec.structs import replace as struct_replace

    return struct_replace(saga, moves=moves)


def _moved_to(attempt: LiveAttempt, node_name: str) -> LiveAttempt:
    from msgspec.structs import replace as struct_replace

    return struct_replace(attempt, node=node_name, attempt=2, started_at=NOW)


def test_each_move_makes_the_next_rarer() -> None:
    rests = [rest_seconds(k, RULES) for k in range(5)]
    assert rests == sorted(rests)
    assert rests[2] == pytest.approx(1_800 * 1.25**2)
    picture = replace(sparse(3), past={("j", 0): Past(2, NOW + 1.0)})
    assert why(choose(picture, NOW, RULES), "n000") is Why.RESTING
    assert not any(left.why is Why.RESTING for left in choose(picture, NOW + 1.0, RULES).left)


def test_the_oldest_memories_go_first() -> None:
    rules = replace(RULES, most_history=2)
    (saga,) = sagas_of(choose(replace(sparse(2)), NOW, RULES))
    past = {("old", n): Past(1, NOW - 100 + n) for n in range(5)}
    moved = _with_moves(
        saga, [_as_moved("n", {}, move.task, saga_move=move) for move in saga.moves]
    )
    kept = remembered(moved, past, NOW, rules)
    assert sorted(kept) == [("j", saga.moves[0].index), ("old", 4)]
