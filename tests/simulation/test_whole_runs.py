"""All services, two clusters, virtual time: what must hold whatever goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from springtide_lab.simulated.invariants import assert_laws
from springtide_lab.simulated.run import Chaos, RunResult, RunSpec, simulate
from springtide_lab.simulated.scenarios import EVERYTHING, an_array, two_clusters
from springtide_shared.messages import JobState
from springtide_shared.testing.virtual import run_virtual

MUST_BE_LOOKED_AT = (
    "job-is-final",
    "counts-sum-to-size",
    "counts-equal-base-rows",
    "final-means-nothing-open",
    "result-has-its-record",
    "no-task-computed-to-its-end-twice",
    "no-machine-leaked",
    "no-pod-left",
    "paid-equals-node-lives",
    "every-message-settled",
)


def run(spec: RunSpec) -> RunResult:
    result = run_virtual(simulate(spec))
    laws = assert_laws(result)
    for name in MUST_BE_LOOKED_AT:
        assert laws[name].examined > 0, f"{name} was never examined"
    return result


@pytest.mark.slow
def test_ten_thousand_tasks_up_to_hours_long_on_two_clusters() -> None:
    result = run(two_clusters(seed=1, tasks=10_000, sigma=0.6))
    assert result.jobs["array"].state is JobState.SUCCEEDED
    assert result.virtual_seconds > 2 * 3600
    assert min(result.most_pods.values()) > 100, "both clusters took their share"
    assert len(result.recording.moved()) > 0, "the tail was packed"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 6])
def test_everything_goes_wrong_and_nothing_is_lost(seed: int) -> None:
    result = run(two_clusters(seed, 200, chaos=True))
    assert result.jobs["array"].state is JobState.SUCCEEDED
    assert sum(result.crashes.values()) > 10


@pytest.mark.parametrize(
    "name",
    [
        "coordinator",
        "submitter.east",
        "scaler.east",
        "rescheduler.east",
        "monitor.east",
    ],
)
def test_a_service_that_crashes_every_minute_loses_nothing(name: str) -> None:
    spec = two_clusters(seed=11, tasks=60)
    spec = replace(
        spec,
        chaos=Chaos(
            crash_every_seconds=60.0,
            crash_pause_seconds=2.0,
            crash_only=(name,),
            until_seconds=2 * 3600.0,
        ),
    )
    result = run(spec)
    assert result.crashes[name] > 20
    assert result.jobs["array"].state is JobState.SUCCEEDED


def test_messages_are_lost_doubled_late_and_out_of_order_and_nothing_is_lost() -> None:
    spec = two_clusters(seed=5, tasks=100)
    assert EVERYTHING.messages is not None
    faults = replace(EVERYTHING.messages, unconfirmed=0.1, lost=0.2, doubled=0.2, delayed=0.2)
    result = run(replace(spec, chaos=Chaos(messages=faults)))
    assert result.jobs["array"].state is JobState.SUCCEEDED


def test_packing_the_tail_costs_less() -> None:
    spec = two_clusters(seed=3, tasks=300, sigma=1.2, failing_share=0.0)
    packed = run(spec)
    left = run(replace(spec, config=replace(spec.config, rescheduling=False)))
    assert len(packed.recording.moved()) > 10
    assert not left.recording.moved()
    assert packed.node_seconds < 0.8 * left.node_seconds


def test_two_arrays_share_and_both_end() -> None:
    spec = two_clusters(seed=8, tasks=150)
    spec = replace(spec, jobs=[*spec.jobs, (600.0, an_array("second", 100, cpu=2))])
    result = run(spec)
    assert {view.state for view in result.jobs.values()} == {JobState.SUCCEEDED}


def digest(seed: int, hash_seed: str) -> str:
    """Of all messages of a run in a process of its own."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "springtide_lab.simulated",
            "--chaos",
            *f"--tasks 60 --seed {seed}".split(),
        ],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[0]


@pytest.mark.slow
def test_a_run_is_a_function_of_its_seed() -> None:
    first = digest(7, "1")
    assert first.startswith("digest ")
    assert digest(7, "2") == first, "the order of a set or of a hash reached a decision"
    assert digest(8, "1") != first
