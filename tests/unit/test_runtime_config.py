"""What one factor speeds up, and what it leaves alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from springtide_agent.config import AgentConfig
from springtide_monitor.config import MonitorConfig
from springtide_rescheduler.config import ReschedulerConfig
from springtide_scaler.config import ScalerConfig
from springtide_shared.runtime.config import NOT_SCALED, scaled
from springtide_submitter.config import SubmitterConfig


@pytest.mark.parametrize(
    "config",
    [AgentConfig(), MonitorConfig(), ReschedulerConfig(), ScalerConfig(), SubmitterConfig()],
    ids=lambda config: type(config).__name__,
)
def test_guards_against_stalls_keep_their_length_and_all_other_times_shrink(config: Any) -> None:
    fast = scaled(config, 10.0)
    kept = {
        item.name
        for item in dataclasses.fields(config)
        if item.name.endswith("_seconds")
        and getattr(config, item.name)
        and getattr(fast, item.name) == getattr(config, item.name)
    }
    guards = {item.name for item in dataclasses.fields(config)} & NOT_SCALED
    assert kept == guards
    assert guards, "every one of these holds a lease or waits for a store"
