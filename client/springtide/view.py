"""What people see: bars and tables. All of it goes to stderr or is replaced by `--json`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from springtide.errors import SpringtideClientError
from springtide_shared.errors import Reason
from springtide_shared.httpapi import CapacityInfo, JobInfo, JobProgress, TaskResult
from springtide_shared.ledger.views import TaskView
from springtide_shared.messages.job import TaskCounts, Waiting
from springtide_shared.units import format_bytes, format_duration

if TYPE_CHECKING:
    from springtide.client import Job

_NODES_EVERY_SECONDS: Final = 3.0
_LINE_EVERY_SECONDS: Final = 10.0
_MAX_ROWS: Final = 1_000


def counts_text(counts: TaskCounts) -> str:
    """`3 queued, 2 running, 5 done, 1 failed`: the states that there are."""
    named = (
        (counts.queued, "queued"),
        (counts.live, "running"),
        (counts.succeeded, "done"),
        (counts.failed, "failed"),
        (counts.cancelled, "cancelled"),
    )
    return ", ".join(f"{count} {name}" for count, name in named if count) or "no tasks"


def waiting_text(waiting: Waiting, now: float) -> str:
    """`unschedulable: no node group can hold 1000 cores, 1Gi of memory (2 tasks)`."""
    text = f"{waiting.reason.value}: {waiting.detail}" if waiting.detail else waiting.reason.value
    tasks = f"{waiting.count} task" + ("" if waiting.count == 1 else "s")
    if waiting.since is not None:
        tasks += f", the oldest for {format_duration(max(0.0, now - waiting.since))}"
    return f"{text} ({tasks})"


def trouble_text(waiting: Iterable[Waiting]) -> str:
    """The gravest cause that does not pass by itself, for a line with little room; else empty."""
    for one in waiting:
        if one.reason is Reason.UNSCHEDULABLE:
            return f"waiting: {one.reason.value}: {one.detail}"
    return ""


def settled(counts: TaskCounts) -> int:
    """Tasks to which nothing more happens."""
    return counts.succeeded + counts.failed + counts.cancelled


def nodes_text(capacity: CapacityInfo) -> str:
    """`3 nodes (1 cordoned), 71% requested`; empty if nothing is known."""
    nodes = [node for cluster in capacity.clusters for node in cluster.nodes or ()]
    if not any(cluster.nodes is not None for cluster in capacity.clusters):
        return ""
    cordoned = sum(node.cordoned for node in nodes)
    text = f"{len(nodes)} node" + ("" if len(nodes) == 1 else "s")
    text += f" ({cordoned} cordoned)" if cordoned else ""
    measured = [node for node in nodes if node.requested_ratio is not None]
    cpu = sum(node.cpu_millis for node in measured)
    if cpu:
        used = sum(node.cpu_millis * (node.requested_ratio or 0.0) for node in measured)
        text += f", {used / cpu:.0%} requested"
    return text


@contextmanager
def job_bar(console: Console, size: int, name: str) -> Iterator[Callable[[JobProgress, str], None]]:
    """A bar for one job; yields what takes its events. Without a terminal: a line now and then."""
    if not console.is_terminal:
        shown, shown_at = "", float("-inf")

        def line(event: JobProgress, nodes: str) -> None:
            nonlocal shown, shown_at
            if event.state.is_final or time.monotonic() - shown_at >= _LINE_EVERY_SECONDS:
                text = f"{event.state.value}: {counts_text(event.counts)}"
                for more in (trouble_text(event.waiting), nodes):
                    text += f"; {more}" if more else ""
                if text != shown:
                    console.print(text, markup=False, highlight=False)
                    shown, shown_at = text, time.monotonic()

        yield line
        return
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
        console=console,
        transient=False,
    )
    with progress:
        bar = progress.add_task(name, total=size, detail="")

        def show(event: JobProgress, nodes: str) -> None:
            parts = (counts_text(event.counts), trouble_text(event.waiting), nodes)
            detail = "; ".join(part for part in parts if part)
            progress.update(
                bar,
                completed=settled(event.counts),
                description=f"{name} {event.state.value}",
                detail=detail,
            )

        yield show


def follow_with_bar(job: Job, timeout: float | None = None, console: Console | None = None) -> None:
    """Show the job's progress until it is final.

    Raises:
        ExpiredError: `timeout` seconds passed.
    """
    info = job.status()
    console = console or Console(stderr=True)
    nodes, asked_at = "", float("-inf")
    with job_bar(console, info.size, info.name) as show:
        for event in job.client.follow(job.id, timeout):
            if time.monotonic() - asked_at >= _NODES_EVERY_SECONDS:
                asked_at = time.monotonic()
                try:
                    nodes = nodes_text(job.client.capacity())
                except SpringtideClientError:
                    nodes = ""  # the bar lives without it
            show(event, nodes)


def when(at: float | None) -> str:
    """A time for people, in this machine's zone."""
    if at is None:
        return ""
    return datetime.fromtimestamp(at, tz=UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def job_lines(info: JobInfo, now: float) -> str:
    """One job in a few lines."""
    end = info.ended_at if info.ended_at is not None else now
    lines = [
        f"{info.id}  {info.name}",
        f"  state    {info.state.value}",
        f"  tasks    {info.size}: {counts_text(info.counts)}",
        *(f"  waiting: {waiting_text(one, now)}" for one in info.waiting),
        f"  since    {when(info.created_at)} ({format_duration(max(0.0, end - info.created_at))})",
    ]
    if info.ended_at is not None:
        lines.append(f"  ended    {when(info.ended_at)}")
    return "\n".join(lines)


def jobs_table(jobs: Iterable[JobInfo]) -> Table:
    """Jobs, newest last."""
    table = _table("id", "name", "state", "tasks", "done", "failed", "since")
    for info in jobs:
        table.add_row(
            *_texts(
                info.id,
                info.name,
                info.state.value,
                info.size,
                info.counts.succeeded,
                info.counts.failed,
                when(info.created_at),
            )
        )
    return table


def tasks_table(tasks: Iterable[TaskView]) -> Table:
    """Tasks with what became of them; at most a thousand rows."""
    table = _table("task", "state", "attempt", "cluster", "node", "reason", "exit", "charged")
    for number, task in enumerate(tasks):
        if number == _MAX_ROWS:
            table.caption = f"only the first {_MAX_ROWS}; --json shows all"
            break
        state = task.attempt_state.value if task.attempt_state else task.state.value
        charged = ", ".join(f"{name} {count}" for name, count in task.charged.items())
        table.add_row(
            *_texts(
                task.index,
                state,
                task.attempt or "",
                task.cluster,
                task.node,
                task.reason.value if task.reason else "",
                "" if task.exit_code is None else task.exit_code,
                charged,
            )
        )
    return table


def results_table(results: Iterable[TaskResult]) -> Table:
    """Results; at most a thousand rows."""
    table = _table("task", "attempt", "exit", "ran", "outputs")
    for number, result in enumerate(results):
        if number == _MAX_ROWS:
            table.caption = f"only the first {_MAX_ROWS}; --json or --download has all"
            break
        ran = result.progress_seconds
        outputs = ", ".join(f"{one.path} ({format_bytes(one.size)})" for one in result.outputs)
        table.add_row(
            *_texts(
                result.index,
                result.attempt,
                "" if result.exit_code is None else result.exit_code,
                "" if ran is None else format_duration(ran),
                result.problem or outputs,
            )
        )
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        # An id that is cut in two cannot be copied.
        table.add_column(name, overflow="fold", no_wrap=name == "id")
    return table


def _texts(*cells: object) -> list[Text]:
    # As Text, so that a name like "[red]" is shown and not obeyed.
    return [Text(str(cell)) for cell in cells]
