"""Every benchmark by name. A new one is a function that returns figures, and one line here."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypedDict

DATA_VARIABLE: Final = "SPRINGTIDE_BENCH_DATA"


class Figure(TypedDict):
    """One measured number. `goal` is empty or a comparison with a number (`<= 200`)."""

    name: str
    value: float
    unit: str
    goal: str


Benchmark = Callable[[], Sequence[Figure]]

BENCHMARKS: Final[dict[str, str]] = {
    "ledger": "benchmarks.ledger:ledger",
    "bus": "benchmarks.bus:bus",
    "intake_1m": "benchmarks.intake:intake_1m",
    "ledger_bytes_per_task": "benchmarks.intake:ledger_bytes_per_task",
    "neighbour_dispatch": "benchmarks.intake:neighbour_dispatch",
    "control_plane": "benchmarks.control_plane:control_plane",
}
"""Name to `module:function`; loaded only when it is run, for each is measured on its own."""


def load(name: str) -> Benchmark:
    """The benchmark of that name."""
    module, _, function = BENCHMARKS[name].partition(":")
    found: Benchmark = getattr(importlib.import_module(module), function)
    return found


def is_met(figure: Figure) -> bool | None:
    """Whether the figure keeps its goal; None: it has none."""
    sign, _, number = figure["goal"].partition(" ")
    if not number:
        return None
    limit = float(number.replace(",", ""))
    return figure["value"] <= limit if sign == "<=" else figure["value"] >= limit


def data_folder() -> Path | None:
    """Where databases are to be put, so that a chosen disk is measured; None: a temporary one."""
    named = os.environ.get(DATA_VARIABLE)
    return Path(named) if named else None
