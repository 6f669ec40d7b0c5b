"""The local cluster keeps the contract of every cluster, with real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from springtide_lab.local import LocalCluster, LocalGroup
from springtide_shared.adapters.clock import SystemClock, SystemIds
from springtide_shared.ports.cluster import PodView
from springtide_shared.testing.cluster_contract import CASES, ClusterHarness
from springtide_shared.units import GiB

STAND_IN = """\
# Stands in for the agent: ends with the code that appears in the pod's directory.
pod=$3
while [ ! -f "${pod%/*}/exit" ]; do sleep 0.02; done
exit "$(cat "${pod%/*}/exit")"
"""


def _group(name: str, cpu_millis: int) -> LocalGroup:
    return LocalGroup(
        name=name,
        instance_type=name,
        cpu_millis=cpu_millis,
        memory_bytes=2 * GiB,
        price_per_hour=1.0,
        boot_seconds=0.05,
        max_size=3,
    )


@pytest.mark.parametrize("name", sorted(CASES))
def test_local_cluster_keeps_the_contract(name: str, tmp_path: Path) -> None:
    script = tmp_path / "agent.sh"
    script.write_text(STAND_IN)
    root = tmp_path / "cluster"

    async def finish(pod: PodView, exit_code: int) -> None:
        partial = root / "pods" / pod.uid / "exit.partial"
        partial.write_text(str(exit_code))
        partial.rename(partial.with_name("exit"))

    async def run() -> None:
        clock = SystemClock()
        cluster = LocalCluster(
            name="here",
            root=root,
            groups=[
                _group("plain", 2_000),
                _group("scarce", 64_000),
            ],
            store_url=f"file://{tmp_path}/store",
            clock=clock,
            ids=SystemIds(clock),
            cores=2,
            oversubscription=3.0,
            agent_command=("/bin/sh", str(script)),
        )
        async with cluster:
            harness = ClusterHarness(
                view=cluster,
                pods=cluster,
                nodes=cluster.node_control,
                groups=cluster,
                plain="plain",
                scarce="scarce",
                finish=finish,
            )
            await CASES[name](harness)

    asyncio.run(run())
    assert list((root / "pods").iterdir()) == []
