"""Survival curves of arrays from ended and running tasks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide_rescheduler.lives import UNKNOWN, Lives

TIMES = st.lists(st.floats(0.0, 1e6), max_size=60)
GRID = np.linspace(1.0, 7_200.0, 50)


def test_hand_computed_curve_with_censored_tasks() -> None:
    # Ends at 1, 3, 5; one task is 2 old, one 4: product over ends of (1 - d/n).
    lives = Lives([1.0, 3.0, 5.0], [2.0, 4.0])
    curve = lives.survival(np.array([0.5, 1.0, 2.9, 3.0, 4.9]))
    assert curve == pytest.approx([1.0, 4 / 5, 4 / 5, 4 / 5 * 2 / 3, 4 / 5 * 2 / 3])


def test_running_tasks_lift_the_curve_that_ended_ones_alone_would_give() -> None:
    ended = [10.0, 20.0, 30.0]
    biased, fair = Lives(ended, []), Lives(ended, [1_000.0] * 7)
    at = np.array([40.0])
    assert fair.survival(at)[0] > 0.6 > biased.survival(at)[0]


def test_nothing_known_means_for_ever() -> None:
    assert (UNKNOWN.ends_within(100.0, GRID) == 0.0).all()


def test_the_tail_s_exponent_is_found() -> None:
    rng = np.random.default_rng(1)
    sample = 100.0 * rng.pareto(1.8, 20_000) + 100.0
    lives = Lives(sample[:15_000].tolist(), [])
    far = np.array([2_000.0, 20_000.0])
    assert lives.survival(far) == pytest.approx((far / 100.0) ** -1.8, rel=0.25)


def test_long_lived_tasks_of_a_heavy_tail_are_expected_to_live_on() -> None:
    rng = np.random.default_rng(2)
    sample = 600.0 * rng.weibull(0.5, 5_000)
    lives = Lives(sample.tolist(), [])
    within = [float(lives.ends_within(age, np.array([600.0]))[0]) for age in (1.0, 1e3, 1e4)]
    assert within[0] > within[1] > within[2]


@given(ended=TIMES, running=TIMES, age=st.floats(0.0, 1e6), delay=st.floats(0.0, 1e4))
def test_probabilities_rise_with_time_and_wait_for_the_dead_time(
    ended: list[float], running: list[float], age: float, delay: float
) -> None:
    lives = Lives(ended, running)
    chance = lives.ends_within(age, GRID, delay)
    assert ((chance >= 0.0) & (chance <= 1.0)).all()
    assert (np.diff(chance) >= -1e-9).all()
    assert (chance[delay > GRID] == 0.0).all()
    curve = lives.survival(np.linspace(0.0, 2e6, 200))
    assert (curve > 0.0).all()
    assert (np.diff(curve) <= 1e-9).all()
