"""Settings of the submitter."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide_shared.runtime.config import load, scaled
from springtide_submitter.config import ProcessConfig, SubmitterConfig


def test_settings_come_from_the_environment_and_reach_the_service() -> None:
    config = load(
        ProcessConfig,
        prefix="SPRINGTIDE_SUBMITTER",
        environ={
            "SPRINGTIDE_SUBMITTER_HOLD_SECONDS": "90s",
            "SPRINGTIDE_SUBMITTER_CLUSTER": "east",
            "SPRINGTIDE_SUBMITTER_STATE_DIR": "state",
        },
    )
    assert (config.cluster, config.state_dir) == ("east", Path("state"))
    assert config.policy() == SubmitterConfig(hold_seconds=90.0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hold_seconds": 0.0}, "hold_seconds"),
        ({"create_concurrency": -1}, "create_concurrency"),
        ({"pace_least": 9.0, "pace_most": 8.0}, "pace_least"),
        ({"credit_least_seconds": 9.0}, "credit_least_seconds"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SubmitterConfig(**changes)  # type: ignore[arg-type]


def test_a_demonstration_scales_every_time_constant_and_no_amount() -> None:
    fast = scaled(SubmitterConfig(), 10.0)
    assert (fast.hold_seconds, fast.window_seconds) == (6.0, 3.0)
    assert (fast.pace_most, fast.create_concurrency) == (200.0, 8)
