"""The simulated cluster keeps the contract of every cluster, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from springtide_lab.simulated import (
    ClusterModel,
    GroupModel,
    LognormalWork,
    SimulatedCluster,
    SimulatedNodes,
)
from springtide_shared.adapters.memory_store import InMemoryStore
from springtide_shared.ports.cluster import PodView
from springtide_shared.testing.cluster_contract import CASES, ClusterHarness
from springtide_shared.testing.virtual import VirtualClock, run_virtual
from springtide_shared.units import GiB


def _group(name: str) -> GroupModel:
    return GroupModel(
        name=name,
        instance_type=name,
        cpu_millis=2_000,
        memory_bytes=2 * GiB,
        price_per_hour=1.0,
        boot_seconds=0.5,
        max_size=3,
    )


@pytest.mark.parametrize("name", sorted(CASES))
def test_simulated_cluster_keeps_the_contract(name: str) -> None:
    async def run() -> None:
        cluster = SimulatedCluster(
            "east",
            [_group("plain"), _group("scarce")],
            store=InMemoryStore(),
            work=LognormalWork(1e6, 0.0, 1),
            clock=VirtualClock(asyncio.get_running_loop()),
            seed=1,
            model=ClusterModel(
                bind_seconds=0.02, pod_start_seconds=0.05, stop_seconds=0.1, release_seconds=0.1
            ),
        )
        cluster.stock_out("scarce")

        async def finish(pod: PodView, exit_code: int) -> None:
            cluster.end_program(pod.uid, exit_code)

        async with cluster.running():
            await CASES[name](
                ClusterHarness(
                    view=cluster,
                    pods=cluster,
                    nodes=SimulatedNodes(cluster),
                    groups=cluster,
                    plain="plain",
                    scarce="scarce",
                    finish=finish,
                )
            )

    run_virtual(run())
