"""What the control plane itself costs: the CPU of every service, per task of a whole array.

Ten thousand tasks of half an hour in the median on two clusters, in virtual time: every service
with its usual settings, every message encoded and decoded, the ledger on SQLite. The figure is the
CPU of the whole process over all tasks, from the first wiring to the last machine's release; what
the simulation of clusters and clouds takes is in it as well, nothing is subtracted.
"""

from __future__ import annotations

import asyncio
import resource
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.registry import Figure, data_folder
from springtide_lab.simulated.invariants import assert_laws
from springtide_lab.simulated.run import RunResult, RunSpec, simulate
from springtide_lab.simulated.scenarios import two_clusters
from springtide_shared.adapters.sql_ledger import SqlLedger
from springtide_shared.runtime import logs
from springtide_shared.runtime.run import calm_collector
from springtide_shared.testing.virtual import VirtualLoop, run_virtual
from springtide_shared.testing.virtual_ledger import RealIoLedger

TASKS: Final = 10_000
SEED: Final = 1


async def _run(spec: RunSpec, folder: Path) -> RunResult:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    opened = SqlLedger.open(f"sqlite:///{folder / 'ledger.db'}", migrate=True)
    with loop.real_io():
        ledger = await opened.__aenter__()
    try:
        calm_collector()  # as every service's own process does
        return await simulate(spec, ledger=RealIoLedger(ledger))
    finally:
        with loop.real_io():
            await opened.__aexit__(None, None, None)


def control_plane() -> list[Figure]:
    """CPU and messages of the whole control plane per task, on 10,000 simulated tasks."""
    logs.setup("error")
    spec = replace(two_clusters(SEED, TASKS), is_traced=False)
    with TemporaryDirectory(dir=data_folder()) as folder:
        wall, cpu = time.perf_counter(), time.process_time()
        result = run_virtual(_run(spec, Path(folder)))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert_laws(result)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [
        Figure(
            name="control_plane_cpu_ms_per_task",
            value=round(1_000 * cpu / TASKS, 3),
            unit="ms",
            goal="<= 5",
        ),
        Figure(
            name="messages_per_task",
            value=round(result.broker.published.total() / TASKS, 2),
            unit="messages",
            goal="",
        ),
        Figure(
            name="simulated_tasks_per_wall_second",
            value=round(TASKS / wall, 1),
            unit="tasks/s",
            goal="",
        ),
        Figure(name="control_plane_peak_memory", value=round(peak, 1), unit="MiB", goal=""),
    ]
