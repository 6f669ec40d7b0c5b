"""Pure decisions of the agent: when to checkpoint, what to keep, what a file set means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from springtide_agent.config import AgentConfig
from springtide_shared.messages.records import CheckpointOrder
from springtide_shared.messages.task import CheckpointSpec


@dataclass(frozen=True, slots=True, order=True)
class SeenFile:
    """One file as a look at the directory shows it; equal looks mean that nothing was written."""

    path: str
    size: int
    mtime_ns: int
    inode: int


def interval_seconds(
    spec: CheckpointSpec, save_seconds: float | None, config: AgentConfig
) -> float:
    """Time between two checkpoints: as the job says, else Young's sqrt(2 C / lambda), clipped.

    Args:
        save_seconds: the measured cost of the last save; None: none yet, the job's estimate.
        config: unscaled constants; the caller divides the result of the rule by its time scale.
    """
    if spec.every_seconds is not None:
        return spec.every_seconds
    cost = spec.expected_save_seconds if save_seconds is None else save_seconds
    young = math.sqrt(2.0 * max(cost, 0.0) * config.mtbf_seconds)
    return min(max(young, config.least_interval_seconds), config.most_interval_seconds)


def order_holds(order: CheckpointOrder, current: CheckpointOrder | None, now: float) -> bool:
    """Whether `order` still stands: neither withdrawn, replaced nor past its use-by time."""
    return (
        current is not None
        and current.migration_id == order.migration_id
        and now < current.valid_until
    )


def progress_seconds(
    restored: float, run_seconds: float, newest_mtime: float | None, now: float
) -> float:
    """Run time behind the files: nothing computed after their newest write is in them.

    Args:
        restored: progress of the manifest that this attempt began with.
        run_seconds: how long the program has run in this attempt, frozen time excluded.
        newest_mtime: of the files, seconds since 1970; None: there are none.
    """
    if newest_mtime is None:
        return restored
    return restored + max(0.0, run_seconds - max(0.0, now - newest_mtime))


def superseded(keys: Sequence[str], newest: str, broken: frozenset[str], keep: int) -> list[str]:
    """Manifests to delete, oldest first, once `newest` is verified.

    Keeps `newest` and the `keep - 1` before it that are not known to be broken. A manifest behind
    `newest` belongs to a later attempt: then this agent is out of date and deletes nothing.
    """
    if not keys or max(keys) != newest:
        return []
    sound = [key for key in sorted(keys, reverse=True) if key not in broken]
    kept = frozenset(sound[: max(2, keep)])
    return [key for key in sorted(keys) if key not in kept]


def pause_seconds(failures: int, least: float, most: float) -> float:
    """Ceiling of the pause after so many failures in a row; the caller adds jitter downwards."""
    return float(min(most, least * 2.0 ** min(failures - 1, 30)))
