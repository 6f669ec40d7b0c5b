"""The agent's pure decisions."""

from __future__ import annotations

import math
import signal

from hypothesis import given
from hypothesis import strategies as st

from springtide_agent.config import AgentConfig
from springtide_agent.files import is_safe_path
from springtide_agent.policy import (
    interval_seconds,
    order_holds,
    pause_seconds,
    progress_seconds,
    superseded,
)
from springtide_shared.messages.records import CheckpointOrder, manifest_key
from springtide_shared.messages.task import CheckpointSpec
from springtide_shared.units import exit_code_of

CONFIG = AgentConfig()


def test_young_s_interval_is_between_the_clips() -> None:
    assert interval_seconds(CheckpointSpec(), 60.0, CONFIG) == math.sqrt(2 * 60 * 86_400)
    assert interval_seconds(CheckpointSpec(), 0.0, CONFIG) == 300.0
    assert interval_seconds(CheckpointSpec(), 1e6, CONFIG) == 43_200.0


def test_the_job_s_own_interval_wins() -> None:
    assert interval_seconds(CheckpointSpec(every_seconds=7.0), 60.0, CONFIG) == 7.0


def test_before_the_first_save_the_job_s_estimate_counts() -> None:
    spec = CheckpointSpec(expected_save_seconds=60.0)
    assert interval_seconds(spec, None, CONFIG) == interval_seconds(spec, 60.0, CONFIG)


def test_signals_become_exit_codes_as_shells_say_them() -> None:
    assert exit_code_of(-signal.SIGKILL) == 137
    assert exit_code_of(3) == 3


def test_an_order_stands_until_withdrawn_replaced_or_expired() -> None:
    order = CheckpointOrder(migration_id="m", valid_until=10.0)
    assert order_holds(order, order, 9.0)
    assert not order_holds(order, None, 9.0)
    assert not order_holds(order, CheckpointOrder(migration_id="n", valid_until=10.0), 9.0)
    assert not order_holds(order, order, 10.0)
    longer = CheckpointOrder(migration_id="m", valid_until=20.0)
    assert order_holds(order, longer, 15.0), "renewed"


@given(
    restored=st.floats(0, 1e6),
    run=st.floats(0, 1e6),
    age=st.floats(-10, 1e7),
)
def test_progress_is_never_less_than_restored_nor_more_than_was_run(
    restored: float, run: float, age: float
) -> None:
    got = progress_seconds(restored, run, 1e9 - age, 1e9)
    assert restored <= got <= restored + run


def test_progress_counts_only_what_is_in_the_files() -> None:
    assert progress_seconds(100.0, 50.0, 990.0, 1000.0) == 140.0
    assert progress_seconds(100.0, 50.0, 900.0, 1000.0) == 100.0, "only the restored files"
    assert progress_seconds(100.0, 50.0, None, 1000.0) == 100.0


KEYS = st.sets(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1).map(
    lambda pairs: sorted(manifest_key("j", 0, attempt, seq) for attempt, seq in pairs)
)


@given(keys=KEYS, data=st.data(), keep=st.integers(0, 5))
def test_pruning_keeps_the_newest_and_a_sound_one_before(
    keys: list[str], data: st.DataObject, keep: int
) -> None:
    newest = keys[-1]
    older = keys[:-1]
    broken = frozenset(data.draw(st.sets(st.sampled_from(older)) if older else st.just(set())))
    doomed = superseded(keys, newest, broken, keep)
    left = [key for key in keys if key not in doomed]
    assert newest in left
    assert not broken & frozenset(left)
    sound = [key for key in keys if key not in broken]
    assert left == sound[-max(2, keep) :]
    assert doomed == sorted(doomed)


@given(keys=KEYS, data=st.data())
def test_an_agent_that_is_out_of_date_deletes_nothing(keys: list[str], data: st.DataObject) -> None:
    mine = data.draw(st.sampled_from(keys))
    if mine != keys[-1]:
        assert superseded(keys, mine, frozenset(), 2) == []


@given(failures=st.integers(1, 10_000))
def test_pauses_grow_to_their_limit(failures: int) -> None:
    pause = pause_seconds(failures, 1.0, 60.0)
    assert 1.0 <= pause <= 60.0
    assert pause <= pause_seconds(failures + 1, 1.0, 60.0)


def test_paths_that_leave_their_directory_are_not_safe() -> None:
    assert is_safe_path("a/b.txt")
    assert is_safe_path(".hidden")
    for path in ("", "/etc/passwd", "../a", "a/../../b", "a\0b"):
        assert not is_safe_path(path), path
