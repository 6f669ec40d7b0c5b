"""Simulated runs say a lot and make many objects; tests listen to errors only."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
import structlog

from springtide_shared.runtime.run import calm_collector


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Errors only, for the time of one test."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def calm() -> Iterator[None]:
    """The collector as services have it in their own processes, for the time of one test."""
    before = gc.get_threshold()
    calm_collector()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)
