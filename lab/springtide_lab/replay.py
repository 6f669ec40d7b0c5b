"""Replay of a real run's measured times through the same services in virtual time.

What would the run have cost with the rescheduler off? The same services answer, on a simulated
cluster with the same node groups and with the delays and run times that the real run measured.
Switched on, the replay must come out near the real run, or its answer is worth nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from springtide_lab.local import LocalGroup
from springtide_lab.recorder import Recording
from springtide_lab.simulated.model import ClusterModel, GroupModel, MeasuredWork
from springtide_lab.simulated.run import RunResult, RunSpec, SimulatedClusterSpec, simulate
from springtide_lab.stack import StackConfig
from springtide_shared.errors import PermanentError, Reason
from springtide_shared.messages import JobSubmit
from springtide_shared.messages.records import CompletionRecord, Manifest
from springtide_shared.testing.virtual import run_virtual


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a real run measured. Seconds."""

    run_seconds: Mapping[int, float]
    """Run time of each task from nothing to its end, as the cluster saw it."""
    save_seconds: Mapping[int, float]
    """Cost of a forced checkpoint, of the tasks that had one."""
    pod_start_seconds: float
    """Median time from a pod's creation to its start."""
    restore_seconds: float
    """Median time that a moved attempt spent on other things than its work."""


def measure(
    recording: Recording,
    records: Mapping[int, CompletionRecord],
    manifests: Sequence[Manifest],
    pod_start_seconds: float,
) -> Measured:
    """Run times by task from a recording and the store.

    For a task that never moved it is its attempt's time in the cluster. For a moved one it is the
    program's own progress plus the usual time around a program (median over the others).
    """
    seen: dict[int, float] = {}
    for life in recording.attempts.values():
        if life.reason is Reason.COMPLETED and life.running_at and life.ended_at:
            seen[life.key.index] = life.ended_at - life.running_at
    others = [
        seen[index] - record.progress_seconds
        for index, record in records.items()
        if index in seen and not record.restored_from
    ]
    if not others:
        raise PermanentError(
            Reason.INVALID_SPEC, "no task succeeded without a move: there is nothing to replay"
        )
    around = statistics.median(others)
    run_seconds = {}
    restores = []
    for index, record in records.items():
        if record.restored_from:
            run_seconds[index] = record.progress_seconds + around
            if index in seen:
                own = record.progress_seconds - record.restored_progress_seconds
                restores.append(max(0.0, seen[index] - own - around))
        else:
            run_seconds[index] = seen.get(index, record.progress_seconds + around)
    return Measured(
        run_seconds=run_seconds,
        save_seconds={m.index: m.save_seconds for m in manifests if m.migration_id},
        pod_start_seconds=pod_start_seconds,
        restore_seconds=statistics.median(restores) if restores else 0.0,
    )


def replay(
    measured: Measured,
    job: JobSubmit,
    groups: Sequence[LocalGroup],
    config: StackConfig,
    *,
    cluster: str,
    poll_seconds: float,
    rescheduling: bool,
    seed: int = 1,
) -> RunResult:
    """Run the measured array in virtual time, with the rescheduler on or off."""
    saves = list(measured.save_seconds.values())
    spec = RunSpec(
        seed=seed,
        clusters=[
            SimulatedClusterSpec(
                name=cluster,
                groups=[
                    GroupModel(
                        name=group.name,
                        instance_type=group.instance_type,
                        cpu_millis=group.cpu_millis,
                        memory_bytes=group.memory_bytes,
                        price_per_hour=group.price_per_hour,
                        boot_seconds=group.boot_seconds,
                        max_size=group.max_size,
                        max_pods=group.max_pods,
                    )
                    for group in groups
                ],
                model=ClusterModel(
                    bind_seconds=0.0,
                    pod_start_seconds=measured.pod_start_seconds,
                    stop_seconds=0.1,
                    release_seconds=0.0,
                    order_seconds=poll_seconds / 2,
                    save_seconds=statistics.median(saves) if saves else 0.5,
                    restore_seconds=measured.restore_seconds,
                    boot_jitter=0.0,
                ),
            )
        ],
        jobs=[(0.0, job)],
        work=MeasuredWork(measured.run_seconds, measured.save_seconds),
        config=replace(config, rescheduling=rescheduling),
        limit_seconds=6 * 3600.0,
    )
    return run_virtual(simulate(spec))
