"""Pictures of a run: nodes and utilisation over time, moves marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from springtide_lab.recorder import Recording
from springtide_shared.messages import MigrationStep


def plot_run(
    recording: Recording,
    path: Path,
    *,
    title: str,
    task_cpu_millis: int,
    without: Recording | None = None,
) -> None:
    """Write one PNG: nodes by group over time, the ratio of their CPU that tasks request, moves.

    `without`: the same run with the rescheduler off, drawn as a dashed line.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    begin = min(life.launched_at for life in recording.nodes.values() if life.launched_at)
    end = max(life.released_at or begin for life in recording.nodes.values())
    times = [begin + (end - begin) * i / 600 for i in range(601)]
    figure, (top, middle) = plt.subplots(
        2, 1, figsize=(10, 6.5), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    groups = sorted({life.group for life in recording.nodes.values()})
    stacks = [_nodes(recording, times, group) for group in groups]
    seconds = [t - begin for t in times]
    top.stackplot(
        seconds,
        stacks,
        labels=[f"nodes: {group}" for group in groups],
        alpha=0.7,
        colors=["#4477aa", "#88ccee", "#aa4499", "#ddcc77"][: len(groups)],
    )
    if without is not None and without.nodes:
        start = min(life.launched_at for life in without.nodes.values() if life.launched_at)
        last = max(life.released_at or start for life in without.nodes.values())
        moments = [start + (last - start) * i / 600 for i in range(601)]
        top.plot(
            [t - start for t in moments],
            [without.nodes_at(t) for t in moments],
            color="#222222",
            linestyle="--",
            label="without rescheduling (replayed)",
        )
    _mark_moves(recording, top, begin)
    top.set_ylabel("nodes")
    top.set_title(title)
    top.legend(loc="upper right", fontsize=9)
    requested = recording.running_cpu_millis(times, task_cpu_millis)
    allocatable = [
        sum(
            life.cpu_millis
            for life in recording.nodes.values()
            if life.joined_at is not None
            and life.joined_at <= t
            and (life.released_at is None or t < life.released_at)
        )
        for t in times
    ]
    ratio = [
        min(1.0, r / a) if a else float("nan") for r, a in zip(requested, allocatable, strict=True)
    ]
    middle.plot(seconds, ratio, color="#117733", label="requested ratio")
    middle.fill_between(seconds, ratio, alpha=0.2, color="#117733")
    _mark_moves(recording, middle, begin, label=False)
    middle.set_ylim(0, 1.05)
    middle.set_ylabel("requested CPU / allocatable")
    middle.set_xlabel("seconds since the first node was wished for")
    for axis in (top, middle):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _nodes(recording: Recording, times: Sequence[float], group: str) -> list[int]:
    return [
        sum(
            life.group == group
            and life.joined_at is not None
            and life.joined_at <= t
            and (life.released_at is None or t < life.released_at)
            for life in recording.nodes.values()
        )
        for t in times
    ]


def _mark_moves(recording: Recording, axis: object, begin: float, *, label: bool = True) -> None:
    moments = sorted(
        at
        for steps in recording.migrations.values()
        for at, step in steps
        if step is MigrationStep.RESTORED
    )
    for number, at in enumerate(moments):
        axis.axvline(  # type: ignore[attr-defined]
            at - begin,
            color="#cc6677",
            linewidth=1,
            alpha=0.8,
            label="task moved" if label and number == 0 else None,
        )
