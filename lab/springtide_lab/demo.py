"""The main job on a laptop: a real long-tailed array through every part of springtide.

`run_demo` runs it, then checks it from the outside: lost and doubled tasks are counted from the
object store and from a witness file that springtide never reads; results of moved tasks are
compared with a plain loop; the cost without rescheduling comes from a replay in virtual time.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from springtide_lab.embedded import CLUSTER, Embedded, EmbeddedConfig, embedded
from springtide_lab.local import LocalGroup
from springtide_lab.plots import plot_run
from springtide_lab.recorder import Recording
from springtide_lab.replay import measure, replay
from springtide_lab.stack import StackConfig
from springtide_shared.adapters.directory_store import DirectoryStore
from springtide_shared.errors import PermanentError, Reason, TransientError
from springtide_shared.messages import JobState, JobSubmit, TaskCounts, parse_job
from springtide_shared.messages.records import CompletionRecord, Manifest
from springtide_shared.units import GiB

TIME_FACTOR: Final = 180.0
"""Every time constant of policy is divided by this one number (`springtide_shared.runtime.config`):
three hours, what a task of the trade runs, become one minute."""
SLOTS: Final = 24
"""Cores given out to nodes in all, whatever the machine has; the summary states the ratio."""
GROUPS: Final = (
    LocalGroup(
        name="large",
        instance_type="local.4",
        cpu_millis=4000,
        memory_bytes=4 * GiB,
        price_per_hour=0.16,
        boot_seconds=4.0,
        max_size=4,
    ),
    LocalGroup(
        name="small",
        instance_type="local.2",
        cpu_millis=2000,
        memory_bytes=2 * GiB,
        price_per_hour=0.09,
        boot_seconds=3.0,
        max_size=4,
    ),
)
PLAIN_SAMPLE: Final = 10
"""Tasks that never moved and are compared with the plain loop all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What `springtide demo` can be told."""

    out: Path = Path("out/demo")
    tasks: int = 200
    seed: int = 1
    scale: float = 1.0
    """Multiplies the computing of every task."""
    limit_seconds: float = 900.0
    """The demonstration fails after this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoView:
    """One moment of the demonstration, for a live view."""

    phase: str
    """`running`, `releasing`, `comparing`, `replaying`, `done`."""
    seconds: float
    counts: TaskCounts | None = None
    nodes: Mapping[str, int] = field(default_factory=dict)
    """Joined nodes by group."""
    pods: int = 0
    moves: int = 0
    detail: str = ""


class DemoSummary(msgspec.Struct, frozen=True, kw_only=True):
    """`out/demo/summary.json`. Times in seconds."""

    tasks: int
    succeeded: int
    failed: int
    lost: int
    """Tasks without a completion record in the store, or without an end in the witness file."""
    doubled: int
    """Tasks with two completion records, or that ran to their end twice by the witness."""
    attempts: int
    migrations: int
    nodes_vacated: int
    """Nodes that gave their last task away and were released before that task's end."""
    restored_progress_min: float
    recomputed_conformers_max: int
    peak_nodes: int
    final_nodes: int
    node_seconds_paid: float
    node_seconds_without_rescheduling: float
    node_seconds_replayed: float
    """The same replay with the rescheduler on: how far the replay can be trusted."""
    replay_error: float
    bitwise_equal: bool
    compared: int
    oversubscription: float
    time_factor: float
    wall_seconds: float
    run_seconds: float
    """Of them until the last node was released."""


Submit = Callable[[str, Path, dict[str, Any]], Awaitable[str]]
"""Submits a job body to the gateway at (url, token file); returns the job's id."""


def example_folder() -> Path:
    """`examples/conformers` of the checkout.

    Raises:
        PermanentError: the lab was installed without the examples.
    """
    for folder in (Path.cwd(), Path(__file__).resolve().parents[2]):
        candidate = folder / "examples" / "conformers"
        if (candidate / "conformers.py").is_file():
            return candidate
    raise PermanentError(
        Reason.INVALID_SPEC,
        "examples/conformers is not here; run the demo in a clone of the repository",
    )


def demo_job(config: DemoConfig, witness: Path) -> dict[str, Any]:
    """The array: shares of molecules, long-tailed by nature."""
    folder = example_folder()
    if importlib.util.find_spec("rdkit") is None:
        raise PermanentError(
            Reason.INVALID_SPEC, "the example needs RDKit, which is not installed; run `make setup`"
        )
    spec = importlib.util.spec_from_file_location("make_shares", folder / "make_shares.py")
    assert spec is not None
    assert spec.loader is not None
    shares = importlib.util.module_from_spec(spec)
    sys.modules["make_shares"] = shares
    spec.loader.exec_module(shares)
    items = shares.make_items(config.tasks, config.seed, config.scale)
    return {
        "id": f"demo-{config.seed}-{os.getpid()}",
        "name": "conformers",
        "application": "conformers",
        "command": [sys.executable, str(folder / "conformers.py")],
        "env": {
            "CONFORMERS_WITNESS": str(witness.resolve()),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        },
        "array": {"items": [json.dumps(item) for item in items]},
        "resources": {"cpu": 1, "memory": "512Mi"},
        "outputs": ["result.json"],
        "checkpoint": {"path": ".", "ask": "none", "saved": "atomic", "every": 10},
    }


async def run_demo(
    config: DemoConfig, submit: Submit, show: Callable[[DemoView], None]
) -> DemoSummary:
    """Run, check and sum up; writes `summary.json`, `run.png` and `witness.jsonl` below `out`.

    Raises:
        TimeoutError: not done within `limit_seconds`.
    """
    began = time.monotonic()
    out = config.out.resolve()  # pods run in directories of their own
    home = out / "home"
    witness = out / "witness.jsonl"
    await asyncio.to_thread(_clear, out)
    body = demo_job(config, witness)
    cores = os.cpu_count() or 1
    stack = demo_stack()
    settings = EmbeddedConfig(
        home=home,
        port=0,
        oversubscription=max(1.0, SLOTS / cores),
        groups=GROUPS,
        time_factor=TIME_FACTOR,
        poll_seconds=0.5,
        stack=stack,
    )
    async with asyncio.timeout(config.limit_seconds), embedded(settings) as running:
        job_id = await submit(running.url, running.token_file, body)
        state = await _watch(running, job_id, show, began)
        recording = running.recording
        store = running.store
    run_seconds = time.monotonic() - began
    records = await _records(store)
    manifests = await _manifests(store)
    moved = sorted({key.index for key in recording.moved()})
    show(DemoView(phase="comparing", seconds=time.monotonic() - began, moves=len(moved)))
    compared = _to_compare(moved, config.tasks)
    kept = {index: await _result(store, records.get(index, ())) for index in compared}
    equal = await asyncio.to_thread(_compare, body, kept, out)
    show(DemoView(phase="replaying", seconds=time.monotonic() - began, moves=len(moved)))
    job, _ = parse_job(body)
    measured = measure(
        recording,
        {index: found[-1] for index, found in records.items()},
        list(manifests.values()),
        _pod_start(recording),
    )
    scaled = stack.scaled(TIME_FACTOR)
    with_it, without = await asyncio.to_thread(_replays, measured, job, scaled)
    paid = recording.node_seconds_paid(time.time())
    replayed = with_it.recording.node_seconds_paid(float("inf"))
    ends = _witness_ends(witness)
    counts = _final_counts(recording, job_id)
    summary = DemoSummary(
        tasks=config.tasks,
        succeeded=counts.succeeded,
        failed=counts.failed,
        lost=sum(not records.get(i) or not ends.get(i) for i in range(config.tasks)),
        doubled=sum(len(records.get(i, ())) > 1 or ends.get(i, 0) > 1 for i in range(config.tasks)),
        attempts=len(recording.attempts),
        migrations=len(recording.moved()),
        nodes_vacated=_vacated(recording),
        restored_progress_min=round(
            min((m.progress_seconds for m in manifests.values()), default=0.0), 3
        ),
        recomputed_conformers_max=_recomputed(witness),
        peak_nodes=recording.peak_nodes(),
        final_nodes=recording.nodes_at(time.time()),
        node_seconds_paid=round(paid, 1),
        node_seconds_without_rescheduling=round(
            without.recording.node_seconds_paid(float("inf")), 1
        ),
        node_seconds_replayed=round(replayed, 1),
        replay_error=round(abs(replayed - paid) / paid, 4) if paid else 0.0,
        bitwise_equal=equal,
        compared=len(compared),
        oversubscription=settings.oversubscription,
        time_factor=TIME_FACTOR,
        wall_seconds=round(time.monotonic() - began, 1),
        run_seconds=round(run_seconds, 1),
    )
    plot_run(
        recording,
        out / "run.png",
        title=f"{config.tasks} conformer tasks, {summary.migrations} moves: "
        f"{summary.node_seconds_paid:.0f} node-seconds paid, "
        f"{summary.node_seconds_without_rescheduling:.0f} without rescheduling",
        task_cpu_millis=1000,
        without=without.recording,
    )
    (out / "summary.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
    )
    show(DemoView(phase="done", seconds=summary.wall_seconds, detail=str(state)))
    return summary


def demo_stack() -> StackConfig:
    """Settings of the demonstration before scaling: the product's defaults."""
    return StackConfig()


def _clear(out: Path) -> None:
    """Remove what an earlier demonstration left, and nothing else."""
    import shutil

    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "home", ignore_errors=True)
    shutil.rmtree(out / "plain", ignore_errors=True)
    for name in ("witness.jsonl", "summary.json", "run.png"):
        (out / name).unlink(missing_ok=True)


async def _watch(
    running: Embedded, job_id: str, show: Callable[[DemoView], None], began: float
) -> JobState:
    """Show the run until its job is final and every node is gone."""
    while True:
        await asyncio.sleep(0.5)
        event = running.recording.jobs.get(job_id)
        nodes = await running.cluster.nodes()
        by_group: dict[str, int] = {}
        for node in nodes:
            by_group[node.group] = by_group.get(node.group, 0) + 1
        final = event is not None and event.state.is_final
        show(
            DemoView(
                phase="releasing" if final else "running",
                seconds=time.monotonic() - began,
                counts=event.counts if event else None,
                nodes=by_group,
                pods=len(running.cluster.pod_processes()),
                moves=len(running.recording.moved()),
            )
        )
        groups = await running.cluster.groups()
        if final and not nodes and not any(group.instances for group in groups):
            assert event is not None
            return event.state


def _pod_start(recording: Recording) -> float:
    """Usual seconds from a pod's creation to its start: the lower quartile, free of queueing."""
    waits = sorted(
        life.running_at - life.pending_at
        for life in recording.attempts.values()
        if life.running_at is not None and life.pending_at is not None
    )
    return max(0.0, waits[len(waits) // 4]) if waits else 0.0


async def _records(store: DirectoryStore) -> dict[int, list[CompletionRecord]]:
    found: dict[int, list[CompletionRecord]] = {}
    for key in await _keys(store, "/completion.json"):
        record = msgspec.json.decode(await store.get(key), type=CompletionRecord)
        found.setdefault(record.index, []).append(record)
    return found


async def _manifests(store: DirectoryStore) -> dict[str, Manifest]:
    found = {}
    for key in await _keys(store, "/checkpoints/manifests/"):
        manifest = msgspec.json.decode(await store.get(key), type=Manifest)
        if manifest.migration_id:
            found[manifest.migration_id] = manifest
    return found


async def _keys(store: DirectoryStore, part: str) -> list[str]:
    keys: list[str] = []
    after = ""
    while page := await store.list("jobs/", limit=1_000, after=after):
        keys += [info.key for info in page if part in info.key]
        after = page[-1].key
    return keys


def _to_compare(moved: Sequence[int], tasks: int) -> list[int]:
    """All moved tasks and ten others, spread over the array."""
    others = [index for index in range(tasks) if index not in moved]
    step = max(1, len(others) // PLAIN_SAMPLE)
    return sorted({*moved, *others[::step][:PLAIN_SAMPLE]})


async def _result(store: DirectoryStore, records: Sequence[CompletionRecord]) -> bytes | None:
    """The stored result of a task, if its bytes are those that its record names."""
    if not records or not records[-1].outputs:
        return None
    output = records[-1].outputs[0]
    data = await store.get(output.key)
    return data if hashlib.sha256(data).hexdigest() == output.sha256 else None


def _compare(body: Mapping[str, Any], kept: Mapping[int, bytes | None], out: Path) -> bool:
    """Whether a plain loop, without springtide, writes the very same bytes."""

    def same(index: int) -> bool:
        folder = out / "plain" / f"{index:07d}"
        folder.mkdir(parents=True)
        env = {
            "PATH": os.environ.get("PATH", ""),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "SPRINGTIDE_ITEM": body["array"]["items"][index],
            "SPRINGTIDE_OUTPUT_DIR": str(folder.resolve()),
        }
        done = subprocess.run(
            body["command"], env=env, capture_output=True, timeout=600, check=False
        )
        plain = folder / "result.json"
        return done.returncode == 0 and plain.read_bytes() == kept[index]

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return all(list(pool.map(same, sorted(kept))))


def _replays(measured: Any, job: JobSubmit, config: StackConfig) -> tuple[Any, Any]:
    both = [
        replay(
            measured,
            job,
            GROUPS,
            config,
            cluster=CLUSTER,
            poll_seconds=0.5,
            rescheduling=rescheduling,
        )
        for rescheduling in (True, False)
    ]
    return both[0], both[1]


def _witness(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def _witness_ends(path: Path) -> dict[int, int]:
    ends: dict[int, int] = {}
    for line in _witness(path):
        if line["event"] == "end":
            ends[int(line["index"])] = ends.get(int(line["index"]), 0) + 1
    return ends


def _recomputed(path: Path) -> int:
    """Most conformers that one move computed again, the one in progress at the move included.

    A resume that begins at `done` after an attempt that had `most` on disk repeats `most - done`
    whole conformers, and the one that was under way.
    """
    most: dict[int, int] = {}
    worst = 0
    for line in _witness(path):
        index = int(line["index"])
        if line["event"] == "checkpoint":
            most[index] = max(most.get(index, 0), int(line["done"]))
        elif line["event"] == "resume":
            worst = max(worst, most.get(index, 0) - int(line["done"]) + 1)
    return worst


def _vacated(recording: Recording) -> int:
    """Nodes released before the end of a task that had left them by a move."""
    ended: dict[int, float] = {}
    for life in recording.attempts.values():
        if life.ended_at is not None and life.reason is Reason.COMPLETED:
            ended[life.key.index] = life.ended_at
    released = {life.node: life.released_at for life in recording.nodes.values()}
    vacated = set()
    for key in recording.moved():
        node = recording.attempts[key].node
        gone = released.get(node)
        if gone is not None and gone < ended.get(key.index, 0.0):
            vacated.add(node)
    return len(vacated)


def _final_counts(recording: Recording, job_id: str) -> TaskCounts:
    event = recording.jobs.get(job_id)
    if event is None:
        raise TransientError(Reason.UNKNOWN_JOB, "the job was never heard of", job_id=job_id)
    return event.counts
