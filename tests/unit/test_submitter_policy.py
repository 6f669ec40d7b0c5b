"""What a pod's end means, how the meter breathes, where unpinned tasks go."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide_shared.errors import RETRY_CLASS, Reason
from springtide_shared.messages import AttemptKey, Shape
from springtide_shared.messages.records import Termination
from springtide_shared.ports.cluster import NodeView, PodPhase, PodView
from springtide_shared.units import GiB, Resources
from springtide_submitter.model import Attempt, Intent, Stage
from springtide_submitter.policy import (
    Meter,
    Rate,
    base_stock,
    classify,
    place_unpinned,
    room_on,
    termination_of,
)


def a_pod(exit_code: int | None = None, reason: str = "", **changes: Any) -> PodView:
    fields: dict[str, Any] = {
        "name": "p",
        "uid": "u",
        "attempt": AttemptKey("job", 0, 1),
        "phase": PodPhase.SUCCEEDED if exit_code == 0 else PodPhase.FAILED,
        "node": "n",
        "requests": Resources(cpu_millis=1000),
        "created_at": 0.0,
        "started_at": 1.0,
        "ended_at": 2.0,
        "exit_code": exit_code,
        "reason": reason,
    }
    return PodView(**{**fields, **changes})


def said(**fields: Any) -> str:
    return msgspec.json.encode(Termination(**fields)).decode()


PROOF = None
"""The completion record decides."""

TABLE: list[tuple[str, PodView, Reason | None]] = [
    ("success", a_pod(0, message=said(digest="d")), Reason.COMPLETED),
    ("container's own word", a_pod(0, "Completed", message=said(digest="d")), Reason.COMPLETED),
    ("no digest", a_pod(0), PROOF),
    ("message is no JSON", a_pod(0, message="done, thanks"), PROOF),
    ("message is broken JSON", a_pod(0, message='{"digest":'), PROOF),
    (
        "exit 0 but a child was killed",
        a_pod(0, "OOMKilled", message=said(digest="d")),
        Reason.OUT_OF_MEMORY,
    ),
    (
        "exit 0 but evicted",
        a_pod(0, "Evicted", message="The node was low on resource: memory"),
        Reason.EVICTED,
    ),
    (
        "exit 0 but the disk was full",
        a_pod(0, "Evicted", message="The node was low on resource: ephemeral-storage."),
        Reason.DISK_PRESSURE,
    ),
    ("disk pressure", a_pod(137, "Evicted", message="DiskPressure"), Reason.DISK_PRESSURE),
    ("evicted", a_pod(143, "Evicted"), Reason.EVICTED),
    ("program fails", a_pod(1), Reason.APPLICATION_ERROR),
    ("killed by a signal", a_pod(139, "Error"), Reason.APPLICATION_ERROR),
    ("memory", a_pod(137, "OOMKilled"), Reason.OUT_OF_MEMORY),
    ("illegal instruction", a_pod(132, "Error"), Reason.CPU_MISMATCH),
    ("record exists", a_pod(213, message=said(digest="d", record_attempt=1)), Reason.COMPLETED),
    ("record exists, digest unknown", a_pod(213, message=said(record_attempt=1)), PROOF),
    ("record exists, but which?", a_pod(213), Reason.INTERNAL),
    ("output missing", a_pod(214), Reason.APPLICATION_ERROR),
    ("outputs not stored", a_pod(215), Reason.STORE_UNAVAILABLE),
    ("run time", a_pod(216), Reason.TIMEOUT),
    ("cannot start", a_pod(217), Reason.INVALID_SPEC),
    ("deadline", a_pod(None, "DeadlineExceeded"), Reason.TIMEOUT),
    ("image", a_pod(None, "ImagePullBackOff", started_at=None), Reason.IMAGE_PULL),
    ("image name", a_pod(None, "InvalidImageName", started_at=None), Reason.IMAGE_PULL),
    ("preempted", a_pod(143, "Preempted"), Reason.PREEMPTED),
    ("node lost", a_pod(None, "NodeLost"), Reason.NODE_LOST),
    ("node shut down", a_pod(137, "NodeShutdown"), Reason.NODE_LOST),
    ("bad command", a_pod(128, "StartError"), Reason.INVALID_SPEC),
    ("turned away by the node", a_pod(None, "OutOfcpu", started_at=None), Reason.NEVER_STARTED),
    ("affinity at the node", a_pod(None, "NodeAffinity", started_at=None), Reason.NEVER_STARTED),
    ("nothing known", a_pod(None), Reason.LOST),
]


@pytest.mark.parametrize(
    ("pod", "reason"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_what_an_end_means(pod: PodView, reason: Reason | None) -> None:
    assert classify(pod).reason is reason


@pytest.mark.parametrize("pod", [row[1] for row in TABLE], ids=[row[0] for row in TABLE])
@pytest.mark.parametrize(
    ("intent", "own"), [(Intent.CANCEL, Reason.CANCELLED), (Intent.MIGRATE, Reason.MIGRATED)]
)
def test_our_own_wish_explains_every_end_but_a_success(
    pod: PodView, intent: Intent, own: Reason
) -> None:
    plain = classify(pod)
    wished = classify(pod, intent)
    if plain.reason is None or plain.reason is Reason.COMPLETED:
        assert wished == plain
    else:
        assert wished.reason is own


def test_a_success_carries_its_proof() -> None:
    own = classify(a_pod(0, message=said(digest="d")))
    assert (own.digest, own.record_attempt, own.exit_code) == ("d", None, 0)
    earlier = classify(a_pod(213, message=said(digest="e", record_attempt=2)))
    assert (earlier.digest, earlier.record_attempt, earlier.exit_code) == ("e", 2, 213)


@given(
    code=st.none() | st.integers(-64, 300),
    reason=st.sampled_from(["", "Error", "Completed", "OOMKilled", "Evicted", "Terminated", "New"]),
    message=st.text(max_size=30) | st.builds(said, digest=st.sampled_from(["", "d"])),
    intent=st.sampled_from(list(Intent)),
)
def test_success_always_has_a_digest_and_no_mark(
    code: int | None, reason: str, message: str, intent: Intent
) -> None:
    verdict = classify(a_pod(code, reason, message=message), intent)
    if verdict.reason is Reason.COMPLETED:
        assert code in (0, 213)
        assert verdict.digest
        assert reason not in ("OOMKilled", "Evicted")
    elif verdict.reason is not None:
        assert verdict.reason in RETRY_CLASS or verdict.reason is Reason.INTERNAL


def test_a_termination_message_that_is_not_ours_says_nothing() -> None:
    assert termination_of('{"digest": 5}') == Termination()
    assert termination_of("") == Termination()
    assert termination_of(said(detail="x")).detail == "x"


# ---------------------------------------------------------------- the meter
def a_meter(**changes: float) -> Meter:
    fields: dict[str, float] = {
        "pace": 10.0,
        "pace_least": 1.0,
        "pace_most": 100.0,
        "burst": 2.0,
        "adapt_seconds": 0.5,
    }
    return Meter(**{**fields, **changes})


def taken_within(meter: Meter, start: float, seconds: float) -> int:
    """Creates allowed to someone who asks as soon as the meter says it is worth it."""
    now, count = start, 0
    while now < start + seconds:
        wait = meter.wait_before(now)
        if wait == 0:
            count += 1
        else:
            now += wait
    return count


def test_the_pace_bounds_creates_after_the_burst() -> None:
    meter = a_meter()
    assert taken_within(meter, 0.0, 10.0) == pytest.approx(20 + 100, abs=1)
    assert taken_within(meter, 10.0, 10.0) == pytest.approx(100, abs=1)


def test_a_pause_fills_no_more_than_the_burst() -> None:
    meter = a_meter()
    taken_within(meter, 0.0, 5.0)
    assert taken_within(meter, 10_000.0, 1e-9) == 20


def test_too_many_requests_cut_the_pace_once_an_episode() -> None:
    meter = a_meter()
    for _ in range(5):
        meter.throttled(1.0, 10.0)
    assert meter.pace == pytest.approx(7.0)
    assert meter.wait_before(5.0) == pytest.approx(6.0)
    assert meter.wait_before(11.0) == 0.0
    meter.throttled(12.0, None)
    assert meter.pace == pytest.approx(4.9)


def test_latency_slows_the_pace_and_good_times_raise_it_only_if_it_was_the_limit() -> None:
    meter = a_meter()
    meter.observe(0.01, 1.0)
    assert meter.pace == 10.0  # untested: not raised
    meter.observe(0.2, 2.0)  # 20 times the best: halved at most
    assert meter.pace == 5.0
    taken_within(meter, 2.0, 1.0)
    meter.observe(0.01, 3.5)
    assert meter.pace == pytest.approx(5.0 + math.sqrt(5.0))


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["ask", "answer", "refuse"]), st.floats(0, 30), st.floats(0, 5)),
        max_size=60,
    )
)
def test_the_pace_keeps_its_bounds_and_waits_end(steps: list[tuple[str, float, float]]) -> None:
    meter = a_meter()
    now = 0.0
    for step, gap, amount in steps:
        now += gap
        if step == "ask":
            wait = meter.wait_before(now)
            assert 0 <= wait <= 1000
            if wait > 0:
                assert meter.wait_before(now + wait + 1e-6) <= 1.0 / meter.pace + 1e-5
        elif step == "answer":
            meter.observe(amount, now)
        else:
            meter.throttled(now, amount or None)
        assert 1.0 <= meter.pace <= 100.0


def test_the_window_follows_littles_law() -> None:
    # 3 h tasks on 6,000 places: 0.56 starts/s; the window is some 6 … 14 pods, not thousands
    assert 6 <= base_stock(0, 0.56, 2.0) <= 14
    assert base_stock(0, 0.0, 2.0) == 4
    assert base_stock(500, 0.0, 2.0) == 504


def test_the_rate_of_starts_is_measured_and_forgotten() -> None:
    rate = Rate()
    for second in range(300):
        rate.count(second / 2)
    assert rate.at_time(150.0) == pytest.approx(2.0, rel=0.05)
    assert rate.at_time(450.0) < 0.001


# ---------------------------------------------------------------- unpinned
def held(index: int, cpu_millis: int) -> Attempt:
    shape = Shape(cpu_millis=cpu_millis, memory_bytes=GiB)
    return Attempt(
        key=AttemptKey("job", index, 1),
        shape=shape,
        shape_key=shape.key,
        resources=shape.resources,
        stage=Stage.HELD,
        held_at=0.0,
    )


def room(cpu_millis: int) -> Resources:
    return Resources(cpu_millis=cpu_millis, memory_bytes=64 * GiB, pods=100)


def test_unpinned_tasks_never_ask_for_more_than_there_is() -> None:
    waiting = [held(n, 3000) for n in range(3)] + [held(n, 1000) for n in range(3, 9)]
    chosen = place_unpinned(
        {"a": room(4000), "b": room(3500)}, [Resources(cpu_millis=500)], waiting, 100
    )
    # the unbound pod takes 500 of b, the tightest; then 3000 + 3000, and 1000 in what is left of a
    assert [attempt.key.index for attempt in chosen] == [0, 1, 3]
    assert [a.key.index for a in place_unpinned({"a": room(9000)}, [], waiting, 2)] == [0, 1]


@given(
    rooms=st.lists(st.integers(0, 9000), max_size=5),
    sizes=st.lists(st.sampled_from([500, 1000, 3000]), max_size=30),
)
def test_what_is_chosen_fits_together(rooms: list[int], sizes: list[int]) -> None:
    waiting = [held(number, size) for number, size in enumerate(sizes)]
    chosen = place_unpinned({str(n): room(c) for n, c in enumerate(rooms)}, [], waiting, 1000)
    assert sum(attempt.resources.cpu_millis for attempt in chosen) <= sum(rooms)


def test_room_counts_everybody_and_closed_nodes_have_none() -> None:
    fields: dict[str, Any] = {
        "name": "n",
        "uid": "u",
        "provider_id": "p",
        "group": "g",
        "ready": True,
        "allocatable": room(4000),
        "created_at": 0.0,
    }
    taken = Resources(cpu_millis=1000, pods=1)
    assert room_on(NodeView(**fields), [taken], [taken]) == Resources(
        cpu_millis=2000, memory_bytes=64 * GiB, pods=98
    )
    assert room_on(NodeView(**{**fields, "cordoned": True}), [], []) is None
    assert room_on(NodeView(**{**fields, "ready": False}), [], []) is None


def test_a_hiccup_of_milliseconds_does_not_slow_the_pace() -> None:
    meter = a_meter(calm_latency=0.02)
    for step in range(20):
        meter.observe(0.001 if step % 2 else 0.08, float(step))
    assert meter.pace == 10.0
    for step in range(20, 24):
        meter.observe(1.0, float(step))
    assert meter.pace < 10.0
