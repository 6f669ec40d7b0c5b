"""Ready-made runs: two clusters, one or more arrays, with or without everything going wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from springtide_lab.simulated.model import ClusterModel, GroupModel, LognormalWork
from springtide_lab.simulated.run import Chaos, RunSpec, SimulatedClusterSpec
from springtide_lab.stack import StackConfig
from springtide_shared.adapters.memory_bus import Faults
from springtide_shared.messages import JobSubmit, parse_job
from springtide_shared.units import GiB

LARGE: Final = GroupModel(
    name="large",
    instance_type="c.32",
    cpu_millis=32_000,
    memory_bytes=128 * GiB,
    price_per_hour=1.28,
    boot_seconds=130.0,
    max_size=60,
)
SMALL: Final = GroupModel(
    name="small",
    instance_type="c.8",
    cpu_millis=8_000,
    memory_bytes=32 * GiB,
    price_per_hour=0.36,
    boot_seconds=90.0,
    max_size=80,
)

EVERYTHING: Final = Chaos(
    messages=Faults(
        seed=0,
        unconfirmed=0.01,
        lost=0.02,
        doubled=0.03,
        delayed=0.03,
        delay_seconds=20.0,
        reordered=0.02,
    ),
    crash_every_seconds=300.0,
    crash_pause_seconds=20.0,
    lose_node_every_seconds=1200.0,
    api_outage_every_seconds=2400.0,
    api_outage_seconds=90.0,
    store_outage_every_seconds=2400.0,
    store_outage_seconds=90.0,
    until_seconds=4 * 3600.0,
)
"""About one crash of some service in five minutes, and every other fault now and then."""


def an_array(job_id: str, tasks: int, *, cpu: int = 4, application: int = 3) -> JobSubmit:
    """An array of checkpointing tasks."""
    job, _ = parse_job(
        {
            "id": job_id,
            "name": job_id,
            "command": ["program"],
            "array": {"size": tasks},
            "resources": {"cpu": cpu, "memory": f"{2 * cpu}Gi"},
            "checkpoint": {"every": "15m", "saved": "atomic"},
            "retry": {"application": application, "infrastructure": 100, "preemption": 100},
        }
    )
    return job


def two_clusters(
    seed: int,
    tasks: int,
    *,
    chaos: bool = False,
    rescheduling: bool = True,
    median_seconds: float = 1200.0,
    sigma: float = 0.9,
    failing_share: float = 0.02,
) -> RunSpec:
    """One array over two clusters of two node types each; lognormal run times."""
    faults = Chaos()
    if chaos and EVERYTHING.messages is not None:
        faults = replace(EVERYTHING, messages=replace(EVERYTHING.messages, seed=seed))
    return RunSpec(
        seed=seed,
        clusters=[
            SimulatedClusterSpec(name="east", groups=(LARGE, SMALL)),
            SimulatedClusterSpec(
                name="west", groups=(LARGE, SMALL), model=ClusterModel(pod_start_seconds=5.0)
            ),
        ],
        jobs=[(0.0, an_array("array", tasks))],
        work=LognormalWork(median_seconds, sigma, seed, failing_share),
        config=StackConfig(rescheduling=rescheduling),
        chaos=faults,
        limit_seconds=20_000.0 + median_seconds * math.exp(4.5 * sigma),
    )
