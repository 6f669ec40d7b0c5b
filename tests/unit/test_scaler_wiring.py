"""A scaler as a process: what it refuses before it opens anything."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from springtide_scaler.config import ProcessConfig, ScalerConfig
from springtide_scaler.wiring import run
from springtide_shared.errors import InvalidFieldError
from springtide_shared.runtime.config import load, scaled


def test_a_cluster_that_is_not_named_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match=r"cluster_url.*absent"):
        asyncio.run(run(ProcessConfig()))


def test_settings_come_from_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "scaler.yaml"
    file.write_text("idle_seconds: 5m\ncluster: east\n")
    config = load(
        ProcessConfig,
        prefix="SPRINGTIDE_SCALER",
        file=file,
        environ={"SPRINGTIDE_SCALER_MAX_LAUNCH_PER_ROUND": "7"},
    )
    assert (config.cluster, config.policy()) == (
        "east",
        ScalerConfig(idle_seconds=300.0, max_launch_per_round=7),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("round_seconds", 0),
        ("lease_seconds", -1),
        ("worth_factor", -1),
        ("max_launch_per_round", 0),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidFieldError, match=name):
        load(ScalerConfig, prefix="X", environ={}, overrides={name: value})


def test_the_lease_is_not_sped_up_with_the_policy() -> None:
    fast = scaled(ScalerConfig(), 60)
    assert fast.idle_seconds == 1.0
    assert fast.lease_seconds == ScalerConfig().lease_seconds
