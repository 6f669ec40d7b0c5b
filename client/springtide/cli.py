"""The `springtide` command. Heavy libraries are imported where a command needs them."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer

from springtide import errors
from springtide.errors import EXIT_CODES, SpringtideClientError, UsageError

F = TypeVar("F", bound=Callable[..., Any])

_EPILOG: Final = "\b\nExit codes:\n" + "\n".join(
    f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()
)

app = typer.Typer(
    name="springtide",
    help="Submit huge arrays of long tasks, follow them, fetch their results.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

UrlOption = Annotated[
    str, typer.Option("--url", help="Address of springtide (SPRINGTIDE_URL; else the one of `up`).")
]
TokenOption = Annotated[
    Path | None,
    typer.Option("--token-file", help="File with the token (SPRINGTIDE_TOKEN_FILE)."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout, faults as JSON on stderr.")
]
TimeoutOption = Annotated[
    str, typer.Option("--timeout", help='How long to wait at most, for instance "90m".')
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.")]

_after_dashes: list[str] | None = None
"""What stood behind `--` on the command line; None: there was no `--`."""


def main() -> None:
    """Entry point of the command."""
    global _after_dashes
    arguments = sys.argv[1:]
    _after_dashes = None
    # Cut off here, since behind the parser `FILE -- cmd` and `-- FILE cmd` would look the same.
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, _after_dashes = arguments[:cut], arguments[cut + 1 :]
    app(args=arguments, prog_name="springtide")


def command(function: F) -> F:
    """Turns faults into a message on stderr and the documented exit code."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        as_json = bool(kwargs.get("as_json"))
        try:
            if _after_dashes is not None and function.__name__ != "submit":
                raise UsageError("only `submit` takes a command behind `--`")
            return function(*args, **kwargs)
        except SpringtideClientError as error:
            _tell(error, as_json)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt:
            _tell(_InterruptedError("interrupted"), as_json)
            raise typer.Exit(errors.INTERRUPTED) from None
        except BrokenPipeError:
            # Whoever read our output has gone; flushing at exit must not complain of it again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(errors.OK) from None

    return run  # type: ignore[return-value]


class _InterruptedError(SpringtideClientError):
    exit_code = errors.INTERRUPTED
    default_reason = "interrupted"


def _tell(error: SpringtideClientError, as_json: bool) -> None:
    if as_json:
        import msgspec

        print(msgspec.json.encode(error.as_dict()).decode(), file=sys.stderr)
        return
    print(f"springtide: {error}", file=sys.stderr)
    if error.remedy and error.remedy not in str(error):
        print(f"  {error.remedy}", file=sys.stderr)


def _emit(value: object) -> None:
    """One JSON document on stdout."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def _emit_list(name: str, values: Iterable[object]) -> None:
    """`{"<name>": […]}` on stdout, an entry a line, however long it gets."""
    import msgspec

    entries = iter(values)
    # The first one before any output: a fault then leaves stdout empty.
    first = list(itertools.islice(entries, 1))
    sys.stdout.write(f'{{"{name}": [')
    for number, value in enumerate(itertools.chain(first, entries)):
        sys.stdout.write(("," if number else "") + "\n" + msgspec.json.encode(value).decode())
    sys.stdout.write("\n]}\n")
    sys.stdout.flush()


def _seconds(text: str) -> float | None:
    from springtide_shared.units import parse_duration

    if not text:
        return None
    try:
        return parse_duration(float(text) if text.replace(".", "", 1).isdigit() else text)
    except ValueError as error:
        raise UsageError(f"--timeout: {error}") from error


def _print(renderable: object) -> None:
    from rich.console import Console

    # Into a file or a pipe lines may be long: nobody wants a table folded for a screen there.
    Console(width=None if sys.stdout.isatty() else 240).print(renderable)


# ---------------------------------------------------------------- jobs


@app.command()
@command
def submit(
    file: Annotated[Path | None, typer.Argument(help="Job file, YAML or JSON.")] = None,
    name: Annotated[str, typer.Option(help="Name of the job.")] = "",
    size: Annotated[int | None, typer.Option(help="Tasks in the array.")] = None,
    cpu: Annotated[str, typer.Option(help='Cores of a task: 2, 0.5, "500m".')] = "",
    memory: Annotated[str, typer.Option(help='Memory of a task: "2Gi".')] = "",
    job_id: Annotated[str, typer.Option("--id", help="Id of the job; made if absent.")] = "",
    output: Annotated[
        list[str] | None, typer.Option(help="Path that a success leaves; may be repeated.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Set any field; may be repeated."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job has ended.")] = False,
    timeout: TimeoutOption = "",
    amqp: Annotated[
        str, typer.Option("--amqp", metavar="URL", help="Publish straight to this broker.")
    ] = "",
    url: UrlOption = "",
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a job: `submit FILE`, or `submit --name x --size 10 -- program arguments…`."""
    from springtide.jobfile import JobFile, parse_set, read_job_file

    if file is None and not _after_dashes:
        raise UsageError("name a job file, or give a command behind `--`")
    if amqp and wait:
        raise UsageError("--amqp only publishes: wait with `springtide watch JOB`")
    job = read_job_file(file) if file is not None else JobFile({})
    if job_id:
        job.set("id", job_id, "--id")
    if name:
        job.set("name", name, "--name")
    if size is not None:
        job.set("array", {"size": size}, "--size")
    if cpu:
        job.set("resources.cpu", cpu, "--cpu")
    if memory:
        job.set("resources.memory", memory, "--memory")
    if output:
        job.set("outputs", list(output), "--output")
    for text in set_ or ():
        path, value = parse_set(text)
        job.set(path, value, "--set")
    if _after_dashes:
        job.set("command", list(_after_dashes), "--")
        if "name" not in job.content:
            job.set("name", Path(_after_dashes[0]).name or "job", "--")
    limit = _seconds(timeout)
    if amqp:
        from springtide import amqp as broker

        accepted = broker.submit(job, amqp)
        _say_submitted(accepted, created=None, as_json=as_json)
        return
    from springtide.client import prepared

    prepared(job)  # a wrong job is told even where no springtide can be reached
    with _client(url, token_file) as client:
        submitted = client.submit(job)
        if not wait:
            _say_submitted(submitted.id, created=submitted.created, as_json=as_json)
            return
        # With --json stderr is for one JSON object, the fault's.
        _note(submitted.id, as_json)
        _wait(client.job(submitted.id), limit, as_json)


def _client(url: str, token_file: Path | None) -> Any:
    from springtide.client import Client

    return Client(url, token_file)


def _note(text: str, as_json: bool) -> None:
    if not as_json:
        print(text, file=sys.stderr)


def _say_submitted(job_id: str, *, created: bool | None, as_json: bool) -> None:
    if as_json:
        _emit({"id": job_id, "created": created})
        return
    print(job_id)
    if created is False:
        print("it was there already; nothing was changed", file=sys.stderr)


def _wait(job: Any, limit: float | None, as_json: bool) -> None:
    """Wait, say how it ended, and exit with 1 unless it succeeded."""
    from springtide.client import failed
    from springtide_shared.messages.job import JobState

    info = job.wait(limit, progress=not as_json)
    if as_json:
        _emit(info)
    if info.state is not JobState.SUCCEEDED:
        raise failed(info)
    if not as_json:
        print(f"{info.id} succeeded: {info.size} tasks")


@app.command()
@command
def watch(
    job: JobArgument,
    timeout: TimeoutOption = "",
    url: UrlOption = "",
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Follow a job until it has ended."""
    limit = _seconds(timeout)
    with _client(url, token_file) as client:
        _wait(client.job(job), limit, as_json)


@app.command()
@command
def status(
    job: Annotated[str, typer.Argument(metavar="[JOB]", help="Without it: all your jobs.")] = "",
    tasks: Annotated[bool, typer.Option("--tasks", help="Show the job's tasks.")] = False,
    state: Annotated[
        list[str] | None,
        typer.Option(help="Only tasks in this state (queued, live, succeeded, failed, cancelled)."),
    ] = None,
    url: UrlOption = "",
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a job, its tasks, or all jobs."""
    from springtide import view

    if (tasks or state) and not job:
        raise UsageError("--tasks and --state need a JOB")
    with _client(url, token_file) as client:
        if not job:
            jobs = client.jobs()
            _emit({"jobs": jobs}) if as_json else _print(view.jobs_table(jobs))
            return
        if tasks or state:
            found = client.job(job).tasks(states=_states(state or []))
            _emit_list("tasks", found) if as_json else _print(view.tasks_table(found))
            return
        info = client.job(job).status()
        _emit(info) if as_json else print(view.job_lines(info, time.time()))


def _states(given: list[str]) -> list[str]:
    from springtide_shared.ledger.views import TaskState

    known = [one.value for one in TaskState]
    for one in given:
        if one not in known:
            raise UsageError(f"--state {one}: the states are {', '.join(known)}")
    return given


@app.command()
@command
def logs(
    job: JobArgument,
    index: Annotated[int, typer.Argument(help="Index of the task.", min=0)] = 0,
    stderr: Annotated[bool, typer.Option("--stderr", help="Standard error instead.")] = False,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Of this attempt, not the one that counts.")
    ] = None,
    url: UrlOption = "",
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what a task wrote."""
    stream = "stderr" if stderr else "stdout"
    with _client(url, token_file) as client:
        pieces = client.job(job).log_pieces(index, stream, attempt)
        if as_json:
            text = b"".join(pieces).decode(errors="replace")
            _emit({"job": job, "index": index, "stream": stream, "text": text})
            return
        for piece in pieces:
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


@app.command()
@command
def results(
    job: JobArgument,
    download: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Fetch all outputs to DIR/<task>/<path>.")
    ] = None,
    url: UrlOption = "",
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the results of the tasks that have succeeded, or download their outputs."""
    from springtide import view

    with _client(url, token_file) as client:
        handle = client.job(job)
        if download is None:
            found = handle.results()
            _emit_list("results", found) if as_json else _print(view.results_table(found))
            return
        fetched = 0

        def on_file(_target: Path, is_new: bool) -> None:
            nonlocal fetched
            fetched += is_new

        files = handle.download(download, on_file)
        if as_json:
            _emit({"files": [str(one) for one in files], "downloaded": fetched})
        else:
            there = len(files) - fetched
            print(f"{fetched} files downloaded to {download}, {there} were there already")


@app.command()
@command
def cancel(
    job: JobArgument,
    url: UrlOption = "",
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel a job; its running tasks are ended."""
    with _client(url, token_file) as client:
        answer = client.job(job).cancel()
    if as_json:
        _emit(answer)
    elif answer.state.is_final:
        print(f"{job} had ended already: {answer.state.value}")
    else:
        print(f"{job} is being cancelled")


# ---------------------------------------------------------------- this machine


@app.command()
@command
def up(
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 picks a free one.")] = 8470,
    oversubscribe: Annotated[
        float, typer.Option(min=0.1, max=64.0, help="How many times this machine's cores to offer.")
    ] = 1.0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log everything.")] = False,
) -> None:
    """Run springtide on this machine, in the foreground, until Ctrl-C."""
    from springtide import local

    local.up(port=port, oversubscription=oversubscribe, verbose=verbose)


@app.command()
@command
def demo(
    out: Annotated[Path, typer.Option(help="Where the summary and the picture go.")] = Path(
        "out/demo"
    ),
    tasks: Annotated[int, typer.Option(min=1, max=100_000, help="Tasks in the array.")] = 200,
    seed: Annotated[int, typer.Option(help="Decides which molecules.")] = 1,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log everything.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a real scientific array through every part of springtide and check the outcome."""
    from springtide import local

    if local.demo(out=out, tasks=tasks, seed=seed, verbose=verbose, as_json=as_json):
        return
    raise _DemoFailedError("the demonstration did not keep its promises; see the table")


class _DemoFailedError(SpringtideClientError):
    exit_code = errors.JOB_FAILED
    default_reason = "demo-failed"


@app.command()
@command
def doctor(
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Of `springtide up`.")] = 8470,
    amqp: Annotated[
        str, typer.Option(metavar="URL", help="Broker to look at (SPRINGTIDE_AMQP_URL).")
    ] = "",
    url: UrlOption = "",
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look for what would keep springtide from working here."""
    from springtide import connection
    from springtide.doctor import Verdict, Wanted, examine

    wanted = Wanted(
        home=connection.home(),
        url=url,
        token_file=token_file,
        amqp_url=amqp or os.environ.get("SPRINGTIDE_AMQP_URL", ""),
        port=port,
    )
    findings = []
    for finding in examine(wanted):
        findings.append(finding)
        if not as_json:
            print(f"{finding.verdict.value:<5}{finding.check}: {finding.detail}")
            if finding.remedy:
                print(f"     -> {finding.remedy}")
    is_well = all(finding.verdict is not Verdict.FAIL for finding in findings)
    if as_json:
        _emit({"ok": is_well, "checks": findings})
    if not is_well:
        raise typer.Exit(errors.JOB_FAILED)


if __name__ == "__main__":
    main()
