"""`up` and `demo`: the whole of springtide on this machine, from the lab."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from springtide import connection
from springtide.errors import ExpiredError, LocalError, SpringtideClientError
from springtide_shared.errors import InvalidFieldError, SpringtideError

if TYPE_CHECKING:
    from springtide_lab.demo import DemoSummary, DemoView

_MISSING = "is not installed; this command needs the lab"
_REMEDY = 'run `make setup` in a clone, or pip install "springtide[lab]"'


def up(*, port: int, oversubscription: float, verbose: bool) -> None:
    """Serve until a signal asks to end.

    Raises:
        LocalError: the lab is not installed, the port is taken, or the home is in use.
    """
    try:
        from springtide_lab.embedded import EmbeddedConfig, run_up
    except ImportError as error:
        raise LocalError(f"{error.name} {_MISSING}", remedy=_REMEDY) from error
    from springtide_shared.runtime import logs
    from springtide_shared.runtime.run import stop_on_signals

    logs.setup("info" if verbose else "warning")
    home = connection.home()
    config = EmbeddedConfig(home=home, port=port, oversubscription=oversubscription)

    async def serve() -> None:
        stop = asyncio.Event()
        with stop_on_signals(stop):
            async with asyncio.TaskGroup() as group:
                running = group.create_task(run_up(config, stop), name="up")
                told = group.create_task(_tell_when_ready(home), name="ready")
                await asyncio.wait([running])
                told.cancel()

    try:
        asyncio.run(serve())
    except BaseExceptionGroup as group:
        raise _first_of(group) from group
    except SpringtideError as error:
        raise _local(error) from error


async def _tell_when_ready(home: Path) -> None:
    while True:
        left = connection.read_endpoint(home)
        if left is not None and left.get("pid") == os.getpid():
            print(f"springtide is up at {left['url']} (Ctrl-C ends it)", file=sys.stderr)
            return
        await asyncio.sleep(0.1)


def _local(error: SpringtideError) -> LocalError:
    remedy = ""
    if isinstance(error, InvalidFieldError):
        remedy = "use `springtide up --port 0`" if error.field == "port" else error.remedy
    return LocalError(error.detail or str(error), reason=error.reason.value, remedy=remedy)


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The fault that matters of those that ended together."""
    for error in group.exceptions:
        found = _first_of(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, SpringtideError):
            return _local(found)
        if isinstance(found, SpringtideClientError):
            return found
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


def demo(*, out: Path, tasks: int, seed: int, verbose: bool, as_json: bool) -> bool:
    """Run the demonstration, show it, and say whether it kept its promises.

    Raises:
        LocalError: the lab or the example's library is not installed.
        ExpiredError: it was not done within its limit.
    """
    try:
        from springtide_lab.demo import DemoConfig, run_demo
    except ImportError as error:
        raise LocalError(f"{error.name} {_MISSING}", remedy=_REMEDY) from error
    from springtide_shared.runtime import logs

    logs.setup("info" if verbose else "error")
    config = DemoConfig(out=out, tasks=tasks, seed=seed)
    view = _DemoBar(tasks, quiet=as_json)
    try:
        with view:
            summary = asyncio.run(run_demo(config, _submit, view.show))
    except TimeoutError as error:
        raise ExpiredError(
            f"the demonstration was not done within {config.limit_seconds:g} s",
            remedy="is the machine busy? try again, or with fewer --tasks",
        ) from error
    except BaseExceptionGroup as group:
        raise _first_of(group) from group
    except SpringtideError as error:
        raise _local(error) from error
    if as_json:
        import msgspec

        print(msgspec.json.encode(summary).decode())
    else:
        _show_summary(summary, out)
    return kept(summary)


def kept(summary: DemoSummary) -> bool:
    """Whether nothing was lost, doubled or changed, and the nodes are gone."""
    return (
        summary.succeeded == summary.tasks
        and summary.lost == 0
        and summary.doubled == 0
        and summary.bitwise_equal
        and summary.final_nodes == 0
    )


async def _submit(url: str, token_file: Path, body: dict[str, Any]) -> str:
    from springtide.aio import AsyncClient
    from springtide.jobfile import job_of

    endpoint = connection.Endpoint(url, connection.read_token(token_file))
    async with AsyncClient(endpoint=endpoint) as client:
        return (await client.submit(job_of(body))).id


class _DemoBar:
    """A live view on stderr: tasks, nodes by group, pods, moves."""

    def __init__(self, tasks: int, *, quiet: bool) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, quiet=quiet)
        self._tasks = tasks
        self._progress: Any = None
        self._bar: Any = None
        self._last = ("", float("-inf"))

    def __enter__(self) -> _DemoBar:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        if self._console.is_terminal and not self._console.quiet:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[detail]}", markup=False),
                console=self._console,
            )
            self._progress.start()
            self._bar = self._progress.add_task("starting", total=self._tasks, detail="")
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, moment: DemoView) -> None:
        """One moment of the run."""
        from springtide.view import settled

        nodes = ", ".join(f"{count} {group}" for group, count in sorted(moment.nodes.items()))
        done = settled(moment.counts) if moment.counts else 0
        detail = f"{moment.seconds:4.0f} s"
        if moment.phase in ("running", "releasing"):
            detail += f"  nodes: {nodes or 'none'}  pods: {moment.pods}"
        if moment.moves:
            detail += f"  moved: {moment.moves}"
        if self._progress is not None:
            changes = {"completed": done} if moment.counts else {}
            self._progress.update(self._bar, description=moment.phase, detail=detail, **changes)
            return
        phase, at = self._last
        if moment.phase != phase or time.monotonic() - at >= 5.0:
            self._last = (moment.phase, time.monotonic())
            counts = f"  {done}/{self._tasks}" if moment.counts else ""
            self._console.print(f"{moment.phase}{counts}  {detail}", markup=False, highlight=False)


def _show_summary(summary: DemoSummary, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    saved = 0.0
    if summary.node_seconds_without_rescheduling:
        saved = 1 - summary.node_seconds_paid / summary.node_seconds_without_rescheduling
    for name, value in (
        ("tasks", f"{summary.tasks}: {summary.succeeded} succeeded, {summary.failed} failed"),
        ("lost, doubled", f"{summary.lost}, {summary.doubled}"),
        ("attempts", summary.attempts),
        ("moved", f"{summary.migrations}, {summary.nodes_vacated} nodes emptied before their time"),
        ("recomputed", f"at most {summary.recomputed_conformers_max} conformers a move"),
        ("results", "equal to the bit" if summary.bitwise_equal else "NOT EQUAL"),
        ("compared", f"{summary.compared} tasks with a plain loop"),
        ("nodes", f"{summary.peak_nodes} at most, {summary.final_nodes} at the end"),
        ("node-seconds", f"{summary.node_seconds_paid:.0f} paid"),
        ("", f"{summary.node_seconds_without_rescheduling:.0f} without moving ({saved:.0%} saved)"),
        ("time", f"{summary.wall_seconds:.0f} s, {summary.run_seconds:.0f} s of them the run"),
        ("picture", out / "run.png"),
    ):
        table.add_row(name, str(value))
    Console().print(table)
