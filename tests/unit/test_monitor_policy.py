"""What the monitor makes of raw counters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide_monitor.model import Track
from springtide_monitor.policy import figures, take_reading, usage_of_arrays, usage_of_nodes
from springtide_shared.messages.task import AttemptKey
from springtide_shared.ports.cluster import NodeView, PodPhase, PodView
from springtide_shared.ports.metrics import PodReading
from springtide_shared.units import GiB, Resources

POD = PodView(
    name="st-a-0-1",
    uid="u1",
    attempt=AttemptKey("a", 0, 1),
    phase=PodPhase.RUNNING,
    node="n1",
    requests=Resources(cpu_millis=2000, memory_bytes=GiB, pods=1),
    created_at=990.0,
    started_at=1000.0,
)
NODE = NodeView(
    name="n1",
    uid="nu1",
    provider_id="i1",
    group="g",
    ready=True,
    allocatable=Resources(cpu_millis=8000, memory_bytes=8 * GiB, pods=10),
    created_at=0.0,
)


def reading(at: float, cpu: float, memory: int = 100) -> PodReading:
    return PodReading(pod_uid="u1", at=at, cpu_seconds=cpu, memory_bytes=memory)


def test_first_reading_counts_what_was_used_before_it_and_claims_no_rate() -> None:
    track, sample = take_reading(Track(pod=POD), reading(1010, 7.0), "east", 120)
    assert sample is None
    assert track.cpu_seconds == 7.0
    assert track.cores is None


def test_rate_is_use_over_interval() -> None:
    track, _ = take_reading(Track(pod=POD), reading(1010, 7.0), "east", 120)
    track, sample = take_reading(track, reading(1020, 22.0), "east", 120)
    assert sample is not None
    assert (sample.cpu_cores, sample.interval_seconds) == (1.5, 10)
    assert track.cpu_seconds == 22.0


def test_counter_reset_counts_the_new_counter_and_never_goes_negative() -> None:
    track, _ = take_reading(Track(pod=POD), reading(1010, 50.0), "east", 120)
    track, sample = take_reading(track, reading(1020, 5.0), "east", 120)
    assert sample is not None
    assert sample.cpu_cores == 0.5
    assert track.cpu_seconds == 55.0


def test_repeated_reading_changes_nothing() -> None:
    track, _ = take_reading(Track(pod=POD), reading(1010, 7.0), "east", 120)
    assert take_reading(track, reading(1010, 9.0), "east", 120) == (track, None)
    assert take_reading(track, reading(1005, 9.0), "east", 120) == (track, None)


def test_gap_counts_use_but_claims_no_rate() -> None:
    track, _ = take_reading(Track(pod=POD), reading(1010, 7.0), "east", 120)
    track, sample = take_reading(track, reading(2000, 100.0), "east", 120)
    assert sample is None
    assert track.cores is None
    assert track.cpu_seconds == 100.0


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(-10, 1e6), st.integers(-5, 2**40)), max_size=30)
)
def test_totals_only_grow_whatever_comes(rows: list[tuple[float, float, int]]) -> None:
    track = Track(pod=POD)
    for at, cpu, memory in rows:
        after, sample = take_reading(track, reading(at, cpu, memory), "east", 120)
        assert after.cpu_seconds >= track.cpu_seconds
        assert after.peak_memory_bytes >= track.peak_memory_bytes
        if sample is not None:
            assert sample.cpu_cores >= 0
            assert 0 < sample.interval_seconds <= 120
        track = after


def test_figures_of_an_unseen_pod_say_that_nothing_was_seen() -> None:
    ended = replace(POD, phase=PodPhase.SUCCEEDED, ended_at=1000.5, exit_code=0)
    summary = figures(Track(pod=POD), ended)
    assert summary is not None
    assert (summary.samples, summary.cpu_seconds, summary.wall_seconds) == (0, 0.0, 0.5)


def test_efficiency_is_cpu_over_requested_cores_times_wall() -> None:
    track, _ = take_reading(Track(pod=POD), reading(1010, 10.0), "east", 120)
    ended = replace(POD, phase=PodPhase.SUCCEEDED, ended_at=1010.0, exit_code=0)
    summary = figures(track, ended)
    assert summary is not None
    assert summary.efficiency == pytest.approx(0.5)
    assert summary.peak_memory_bytes == 100


def test_foreign_and_never_started_pods_have_no_figures() -> None:
    assert figures(Track(pod=POD), replace(POD, attempt=None, ended_at=1001.0)) is None
    assert figures(Track(pod=POD), replace(POD, started_at=None)) is None


def test_node_with_one_unknown_pod_has_no_used_ratio() -> None:
    other = replace(POD, name="x", uid="u2")
    track, _ = take_reading(Track(pod=POD), reading(1010, 7.0), "east", 120)
    track, _ = take_reading(track, reading(1020, 17.0), "east", 120)
    tracks = {"u1": track}
    (both,) = usage_of_nodes([NODE], [POD, other], tracks, 1025.0, 60)
    assert both.requested_ratio == 0.5
    assert both.used_ratio is None
    (known,) = usage_of_nodes([NODE], [POD], tracks, 1025.0, 60)
    assert known.used_ratio == pytest.approx(1 / 8)
    (stale,) = usage_of_nodes([NODE], [POD], tracks, 2000.0, 60)
    assert stale.used_ratio is None
    (empty,) = usage_of_nodes([NODE], [], {}, 1025.0, 60)
    assert (empty.used_ratio, empty.requested_ratio) == (0.0, 0.0)


def test_array_usage_is_given_only_whole() -> None:
    track, _ = take_reading(Track(pod=POD), reading(1010, 7.0), "east", 120)
    track, _ = take_reading(track, reading(1020, 17.0), "east", 120)
    pending = replace(POD, uid="u3", phase=PodPhase.PENDING)
    (row,) = usage_of_arrays([POD, pending], {"u1": track}, 1025.0, 60)
    assert (row.pods, row.requested_cpu_millis, row.used_cpu_millis) == (1, 2000, 1000)
    (row,) = usage_of_arrays([POD, replace(POD, uid="u2")], {"u1": track}, 1025.0, 60)
    assert row.used_cpu_millis is None
