"""How long tasks live: Kaplan-Meier over ended and running (censored) tasks of one array.

Ended tasks alone are badly biased while the long ones still run; running ones count as "at least
this long". Pure: arrays in, probabilities out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

TAIL_SHARE: Final = 0.1
"""The tail begins where the curve has fallen to this."""
LEAST_TAIL_ENDS: Final = 5
"""With fewer ends beyond it, the tail's exponent is taken as 1."""
_EXPONENT_MIN: Final = 0.3
_EXPONENT_MAX: Final = 10.0


class Lives:
    """Survival of one array's tasks.

    The product-limit estimate up to the point where a tenth is left (or data end), beyond it a
    Pareto tail S(u) (t/u)^-a with Hill's estimate of `a` for censored excesses. Without any end
    nothing is known: tasks live for ever, which errs towards moving them (measured: cheap while
    saves take a minute).

    Args:
        ended: run times of tasks that completed, in seconds.
        running: run times so far of those that have not.
    """

    def __init__(self, ended: Sequence[float], running: Sequence[float]) -> None:
        ends: Floats = np.sort(np.asarray(ended, dtype=np.float64))
        ages: Floats = np.sort(np.asarray(running, dtype=np.float64))
        times, deaths = np.unique(ends, return_counts=True)
        # At risk just before a time: all whose run time, ended or so far, is not shorter.
        at_risk = (
            len(ends)
            - np.searchsorted(ends, times, side="left")
            + len(ages)
            - np.searchsorted(ages, times, side="left")
        )
        self._times: Floats = times
        self._curve: Floats = np.asarray(np.cumprod(1.0 - deaths / at_risk), dtype=np.float64)
        self._tail_from, self._tail_level, self._exponent = self._tail(ends, ages)

    def _tail(self, ends: Floats, ages: Floats) -> tuple[float, float, float]:
        if not len(self._times):
            return float("inf"), 1.0, 1.0
        low = np.flatnonzero(self._curve <= TAIL_SHARE)
        if len(low):
            first = int(low[0])
            start, level = float(self._times[first]), float(self._curve[first])
            if level <= 0.0:
                # The last ended task is not the longest there can ever be: half a task is left.
                before = float(self._curve[first - 1]) if first else 1.0
                level = 0.5 * before / float(np.count_nonzero(ends == self._times[first]))
        else:
            start, level = float(max(ends[-1], ages[-1] if len(ages) else 0.0)), self._curve[-1]
        start = max(start, 1e-9)
        beyond = ends[ends > start]
        exponent = 1.0
        if len(beyond) >= LEAST_TAIL_ENDS:
            censored = ages[ages > start]
            excess = float(np.log(beyond / start).sum() + np.log(censored / start).sum())
            exponent = len(beyond) / excess if excess > 0 else _EXPONENT_MAX
        return start, float(level), float(min(max(exponent, _EXPONENT_MIN), _EXPONENT_MAX))

    def survival(self, at: Floats) -> Floats:
        """Chance to live longer than `at` seconds; falls from 1, is never 0."""
        position = np.searchsorted(self._times, at, side="right")
        body = np.concatenate([[1.0], self._curve])[position]
        if self._tail_from == float("inf"):
            return np.asarray(body, dtype=np.float64)
        ratio = np.maximum(at / self._tail_from, 1.0)
        tail = self._tail_level * ratio ** (-self._exponent)
        return np.asarray(np.where(at >= self._tail_from, tail, np.maximum(body, self._tail_level)))

    def ends_within(self, age: float, grid: Floats, delay: float = 0.0) -> Floats:
        """Chance that a task of this age ends within each of `grid` seconds.

        `delay`: it stands still for so long first (the dead time of a move).
        """
        reach = np.maximum(grid - delay, 0.0)
        alive = self.survival(np.asarray([age], dtype=np.float64))[0]
        chance = 1.0 - self.survival(age + reach) / alive
        return np.where(grid < delay, 0.0, np.clip(chance, 0.0, 1.0))


UNKNOWN: Final = Lives((), ())
"""Nothing known: for ever."""
