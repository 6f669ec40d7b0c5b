"""The local cluster's pods as what they are: real processes, with all that these may do."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from springtide_lab.local import LocalCluster, LocalGroup
from springtide_lab.local.processes import MARK, ProcessRecord, ProcessTable
from springtide_shared.adapters.clock import SystemClock, SystemIds
from springtide_shared.adapters.directory_store import DirectoryStore
from springtide_shared.errors import ConflictError, InvalidFieldError, PermanentError, Reason
from springtide_shared.messages.pod import PodDocument
from springtide_shared.messages.records import Termination, record_key
from springtide_shared.messages.shape import Shape
from springtide_shared.messages.task import AttemptKey, TaskTemplate
from springtide_shared.ports.cluster import PodPhase, PodSpec, PodView
from springtide_shared.units import GiB, MiB

STAND_IN = """\
# Stands in for the agent: runs the pod's command, passes SIGTERM on, ends with the command's code.
import json, signal, subprocess, sys
document = json.load(open(sys.argv[3]))
program = subprocess.Popen(document["template"]["command"], cwd=document["work_dir"])
signal.signal(signal.SIGTERM, lambda *_: program.terminate())
code = program.wait()
sys.exit(128 - code if code < 0 else code)
"""


def make_cluster(
    tmp_path: Path, *, max_size: int = 4, cpu_millis: int = 4_000, **changes: Any
) -> LocalCluster:
    script = tmp_path / "agent.py"
    script.write_text(STAND_IN)
    clock = SystemClock()
    settings: dict[str, Any] = {
        "oversubscription": 8.0,
        "cores": 2,
        "agent_command": (sys.executable, "-I", "-S", str(script)),
        "memory_poll_seconds": 0.1,
        **changes,
    }
    return LocalCluster(
        name="here",
        root=tmp_path / "cluster",
        groups=[
            LocalGroup(
                name="g",
                instance_type="t",
                cpu_millis=cpu_millis,
                memory_bytes=8 * GiB,
                price_per_hour=1.0,
                boot_seconds=0.0,
                max_size=max_size,
            )
        ],
        store_url=f"file://{tmp_path}/store",
        clock=clock,
        ids=SystemIds(clock),
        **settings,
    )


def a_pod(*command: str, index: int = 0, memory_bytes: int = 64 * MiB, **changes: Any) -> PodSpec:
    key = AttemptKey("job-1", index, 1)
    shape = Shape(cpu_millis=100, memory_bytes=memory_bytes)
    template = TaskTemplate(command=list(command), shape=shape, **changes)
    return PodSpec(name=key.pod_name, attempt=key, tenant="alice", template=template)


async def until(check: Callable[[], Awaitable[bool]], limit: float = 10.0) -> None:
    deadline = time.monotonic() + limit
    while not await check():
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.02)


async def grown(cluster: LocalCluster, size: int = 1) -> None:
    await cluster.set_size("g", size, f"size-{size}")

    async def ready() -> bool:
        return len(await cluster.nodes()) == size

    await until(ready)


async def pod_in(cluster: LocalCluster, pod: PodView, *phases: PodPhase) -> PodView:
    found: dict[str, PodView] = {}

    async def check() -> bool:
        found.update({item.uid: item for item in (await cluster.pods_since(0)).pods})
        return found[pod.uid].phase in phases

    await until(check)
    return found[pod.uid]


async def ended(cluster: LocalCluster, spec: PodSpec) -> PodView:
    """The pod of `spec` after its end."""
    pod = await cluster.create(spec)
    return await pod_in(cluster, pod, PodPhase.SUCCEEDED, PodPhase.FAILED)


async def gone(cluster: LocalCluster, pod: PodView, version: int) -> PodView:
    """The pod as last seen before it left."""
    last: list[PodView] = []

    async def check() -> bool:
        changes = await cluster.pods_since(version)
        last[:] = [item for item in changes.gone if item.uid == pod.uid]
        return bool(last)

    await until(check)
    return last[0]


def alive(uid: str) -> list[int]:
    """Processes of a pod, wherever they went."""
    return [process.pid for found, process in ProcessTable.take().marked() if found == uid]


def wait_for(file: Path, limit: float = 10.0) -> str:
    deadline = time.monotonic() + limit
    while not (file.exists() and file.read_text().strip()):
        assert time.monotonic() < deadline, f"{file.name} did not appear"
        time.sleep(0.02)
    return file.read_text().strip()


def run(
    tmp_path: Path, test: Callable[[LocalCluster], Awaitable[None]], **changes: Any
) -> LocalCluster:
    async def body() -> LocalCluster:
        async with make_cluster(tmp_path, **changes) as cluster:
            await grown(cluster)
            await test(cluster)
        return cluster

    return asyncio.run(body())


# ---- what a pod is given ----------------------------------------------------------------------
def test_the_agent_gets_its_document_and_nothing_of_the_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPRINGTIDE_GATEWAY_TOKEN", "secret")
    monkeypatch.setenv("SPRINGTIDE_AGENT_LEVEL", "debug")

    async def test(cluster: LocalCluster) -> None:
        command = ("sh", "-c", "env > env.txt; cat ../pod.json > pod.txt; pwd > where.txt")
        pod = await ended(cluster, a_pod(*command))
        directory = tmp_path / "cluster" / "pods" / pod.uid
        document = msgspec.json.decode((directory / "work/pod.txt").read_bytes(), type=PodDocument)
        assert document.pod_uid == pod.uid
        assert document.attempt == pod.attempt
        assert document.store_url == f"file://{tmp_path}/store"
        assert (directory / "work/where.txt").read_text().strip() == document.work_dir
        for path in (document.work_dir, document.log_dir, document.annotations_file):
            assert Path(path).is_absolute()
            assert Path(path).exists()
        env = (directory / "work/env.txt").read_text()
        assert f"{MARK}={pod.uid}" in env
        assert "SPRINGTIDE_AGENT_LEVEL=debug" in env
        assert "secret" not in env

    run(tmp_path, test)


def test_annotations_are_replaced_whole(tmp_path: Path) -> None:
    """A reader that never stops finds a whole document at each look."""

    async def test(cluster: LocalCluster) -> None:
        pod = await cluster.create(a_pod("sleep", "60"))
        file = tmp_path / "cluster" / "pods" / pod.uid / "annotations.json"
        for number in range(50):
            await cluster.annotate(pod.name, pod.uid, {"n": str(number), "pad": "x" * number * 100})
            assert json.loads(file.read_bytes())["n"] == str(number)
        assert [item.name for item in file.parent.glob(".annotations*")] == []

    run(tmp_path, test)


def test_the_termination_message_comes_with_the_end(tmp_path: Path) -> None:
    async def test(cluster: LocalCluster) -> None:
        pod = await ended(cluster, a_pod("sh", "-c", "printf hello > ../termination; exit 5"))
        assert (pod.exit_code, pod.reason, pod.message) == (5, "Error", "hello")
        long = await ended(cluster, a_pod("sh", "-c", "yes > ../termination & sleep 0.2", index=1))
        assert len(long.message) == 4096

    run(tmp_path, test)


def test_an_agent_that_cannot_start_fails_its_pod_only(tmp_path: Path) -> None:
    async def test(cluster: LocalCluster) -> None:
        pod = await ended(cluster, a_pod("true"))
        assert (pod.phase, pod.reason, pod.exit_code) == (PodPhase.FAILED, "StartError", 128)
        assert "No such file" in pod.message
        assert (await ended(cluster, a_pod("true", index=1))).reason == "StartError"

    run(tmp_path, test, agent_command=("/no/such/agent",))


def test_a_pod_without_a_command_is_refused(tmp_path: Path) -> None:
    async def test(cluster: LocalCluster) -> None:
        with pytest.raises(PermanentError) as refused:
            await cluster.create(a_pod())
        assert refused.value.reason is Reason.INVALID_SPEC

    run(tmp_path, test)


def test_the_real_agent_runs_a_task_to_its_record(tmp_path: Path) -> None:
    async def test(cluster: LocalCluster) -> None:
        pod = await ended(cluster, a_pod("sh", "-c", "echo out; exit 0"))
        assert (pod.phase, pod.exit_code) == (PodPhase.SUCCEEDED, 0), pod.message
        record = await DirectoryStore(tmp_path / "store").get(record_key("job-1", 0, 1))
        assert json.loads(record)["pod_uid"] == pod.uid
        told = msgspec.json.decode(pod.message, type=Termination)
        assert told.digest == hashlib.sha256(record).hexdigest()
        failed = await ended(cluster, a_pod("sh", "-c", "exit 9", index=1))
        assert (failed.phase, failed.exit_code) == (PodPhase.FAILED, 9)

    run(tmp_path, test, agent_command=(sys.executable, "-m", "springtide_agent"))


# ---- the end of a pod -------------------------------------------------------------------------
def test_a_polite_program_ends_within_its_grace_with_its_own_code(tmp_path: Path) -> None:
    async def test(cluster: LocalCluster) -> None:
        script = "trap 'exit 7' TERM; touch ready; while :; do sleep 0.05; done"
        pod = await cluster.create(a_pod("sh", "-c", script))
        await pod_in(cluster, pod, PodPhase.RUNNING)
        directory = tmp_path / "cluster" / "pods" / pod.uid
        await until(lambda: _exists(directory / "work" / "ready"))
        version = (await cluster.pods_since(0)).version
        began = time.monotonic()
        assert await cluster.delete(pod.name, pod.uid, 30.0)
        last = await gone(cluster, pod, version)
        assert time.monotonic() - began < 10
        assert (last.phase, last.exit_code) == (PodPhase.FAILED, 7)
        assert last.deletion_at is not None
        await until(lambda: _is_gone(directory))

    run(tmp_path, test)


def test_a_stubborn_program_is_killed_with_its_whole_family(tmp_path: Path) -> None:
    async def test(cluster: LocalCluster) -> None:
        script = "trap '' TERM; sleep 301 & setsid sleep 302 & touch ready; wait; sleep 303"
        pod = await cluster.create(a_pod("sh", "-c", script))
        directory = tmp_path / "cluster" / "pods" / pod.uid
        await until(lambda: _exists(directory / "work" / "ready"))
        assert len(alive(pod.uid)) >= 3
        version = (await cluster.pods_since(0)).version
        began = time.monotonic()
        assert await cluster.delete(pod.name, pod.uid, 0.5)
        last = await gone(cluster, pod, version)
        assert 0.4 < time.monotonic() - began < 8
        assert last.exit_code == 137
        assert alive(pod.uid) == []

    run(tmp_path, test)


def test_a_second_delete_may_only_shorten_the_grace(tmp_path: Path) -> None:
    async def test(cluster: LocalCluster) -> None:
        pod = await cluster.create(a_pod("sh", "-c", "trap '' TERM; sleep 301; sleep 301"))
        await pod_in(cluster, pod, PodPhase.RUNNING)
        version = (await cluster.pods_since(0)).version
        assert await cluster.delete(pod.name, pod.uid, 300.0)
        assert await cluster.delete(pod.name, pod.uid, 600.0)
        assert await cluster.delete(pod.name, pod.uid, 0.1)
        await gone(cluster, pod, version)

    run(tmp_path, test)


def test_what_a_program_leaves_behind_ends_with_its_pod(tmp_path: Path) -> None:
    """Also what left its session and lost its parent, as daemons do."""

    async def test(cluster: LocalCluster) -> None:
        script = "(setsid sh -c 'echo $$ > daemon; exec sleep 301' &) ; sleep 0.3; exit 0"
        pod = await ended(cluster, a_pod("sh", "-c", script))
        assert pod.exit_code == 0
        wait_for(tmp_path / "cluster" / "pods" / pod.uid / "work" / "daemon")
        assert alive(pod.uid) == []

    run(tmp_path, test)


def test_a_program_that_uses_too_much_memory_is_killed_and_its_neighbour_lives(
    tmp_path: Path,
) -> None:
    hog = "import time; x = bytearray(200 << 20); x[::4096] = b'1' * len(x[::4096]); time.sleep(60)"

    async def test(cluster: LocalCluster) -> None:
        calm = await cluster.create(a_pod("sleep", "60", index=1))
        pod = await ended(cluster, a_pod(sys.executable, "-I", "-S", "-c", hog))
        assert (pod.phase, pod.reason, pod.exit_code) == (PodPhase.FAILED, "OOMKilled", 137)
        assert "requested" in pod.message
        assert alive(pod.uid) == []
        assert (await pod_in(cluster, calm, PodPhase.RUNNING)).uid == calm.uid

    run(tmp_path, test)


def test_pods_of_a_terminated_machine_fail_as_node_lost(tmp_path: Path) -> None:
    async def test(cluster: LocalCluster) -> None:
        pod = await cluster.create(a_pod("sleep", "60"))
        await pod_in(cluster, pod, PodPhase.RUNNING)
        ((uid, pid),) = cluster.pod_processes()
        assert uid == pod.uid
        assert os.getpgid(pid) == pid
        (node,) = await cluster.nodes()
        await cluster.terminate("g", node.provider_id)
        lost = await pod_in(cluster, pod, PodPhase.FAILED)
        assert (lost.reason, lost.exit_code) == ("NodeLost", None)
        assert alive(pod.uid) == []
        assert cluster.pod_processes() == []

    run(tmp_path, test)


def test_leaving_the_cluster_leaves_nothing(tmp_path: Path) -> None:
    uids: list[str] = []

    async def test(cluster: LocalCluster) -> None:
        for index in range(3):
            pod = await cluster.create(a_pod("sh", "-c", "setsid sleep 301 & wait", index=index))
            uids.append(pod.uid)
            await pod_in(cluster, pod, PodPhase.RUNNING)
        await cluster.set_size("g", 2, "more")  # and a machine that still boots

    run(tmp_path, test)
    assert [pid for uid in uids for pid in alive(uid)] == []
    assert list((tmp_path / "cluster" / "pods").iterdir()) == []


def test_a_failure_around_the_cluster_leaves_nothing_either(tmp_path: Path) -> None:
    uids: list[str] = []

    async def test(cluster: LocalCluster) -> None:
        pod = await cluster.create(a_pod("sleep", "301"))
        uids.append(pod.uid)
        await pod_in(cluster, pod, PodPhase.RUNNING)
        raise RuntimeError("something else went wrong")

    with pytest.raises(RuntimeError, match="something else"):
        run(tmp_path, test)
    assert alive(uids[0]) == []


# ---- the machine's limits ---------------------------------------------------------------------
def test_nodes_never_add_up_to_more_than_cores_times_oversubscription(tmp_path: Path) -> None:
    async def body() -> None:
        cluster = make_cluster(tmp_path, cores=2, oversubscription=1.5, cpu_millis=1_000)
        async with cluster:
            await cluster.set_size("g", 3, "three")
            with pytest.raises(PermanentError) as refused:
                await cluster.set_size("g", 4, "four")
            assert refused.value.reason is Reason.CAPACITY
            await grown(cluster, 3)
            node = (await cluster.nodes())[0]
            await cluster.terminate("g", node.provider_id)

            async def fits_again() -> bool:
                return len((await cluster.groups())[0].instances) == 2

            await until(fits_again)
            await cluster.set_size("g", 3, "three again")

    asyncio.run(body())


@pytest.mark.parametrize("oversubscription", [0, -1, float("nan"), 1e9])
def test_an_absurd_oversubscription_is_refused(tmp_path: Path, oversubscription: float) -> None:
    with pytest.raises(InvalidFieldError, match="oversubscription"):
        make_cluster(tmp_path, oversubscription=oversubscription)


def test_two_clusters_do_not_share_a_directory(tmp_path: Path) -> None:
    async def test(cluster: LocalCluster) -> None:
        pod = await cluster.create(a_pod("sleep", "60"))
        await pod_in(cluster, pod, PodPhase.RUNNING)
        with pytest.raises(ConflictError):
            async with make_cluster(tmp_path):
                pass
        assert alive(pod.uid), "the refused one touched nothing"

    run(tmp_path, test)


def test_the_identity_outlives_the_cluster(tmp_path: Path) -> None:
    seen: list[str] = []

    async def test(cluster: LocalCluster) -> None:
        seen.append(await cluster.identity())

    run(tmp_path, test)
    run(tmp_path, test)
    assert seen[0] == seen[1]


# ---- the death of the host --------------------------------------------------------------------
HOST = """\
import asyncio, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_local_cluster_processes as t
async def main():
    async with t.make_cluster(Path({tmp!r})) as cluster:
        await t.grown(cluster)
        script = "echo $$ > plain; (setsid sh -c 'echo $$ > daemon; exec sleep 305' &); sleep 304"
        pod = await cluster.create(t.a_pod("sh", "-c", script))
        await t.pod_in(cluster, pod, t.PodPhase.RUNNING)
        print(pod.uid, flush=True)
        await asyncio.sleep(300)
asyncio.run(main())
"""


def test_orphans_of_a_dead_host_are_ended_and_never_adopted(tmp_path: Path) -> None:
    code = HOST.format(tests=str(Path(__file__).parent), tmp=str(tmp_path))
    host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        uid = host.stdout.readline().strip()
        work = tmp_path / "cluster" / "pods" / uid / "work"
        wait_for(work / "plain")
        wait_for(work / "daemon")
    finally:
        host.send_signal(signal.SIGKILL)
        host.wait()
        assert host.stdout is not None
        host.stdout.close()
    assert len(alive(uid)) >= 3, "they outlive their host"

    async def test(cluster: LocalCluster) -> None:
        changes = await cluster.pods_since(0)
        assert list(changes.pods) == []

    run(tmp_path, test)
    assert alive(uid) == []
    assert not work.exists()


def test_a_number_that_belongs_to_another_process_by_now_is_left_alone(tmp_path: Path) -> None:
    bystander = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        directory = tmp_path / "cluster" / "pods" / "01old"
        directory.mkdir(parents=True)
        record = ProcessRecord(pod_uid="01old", pid=bystander.pid, started_at=time.time() - 3600)
        (directory / "process.json").write_bytes(msgspec.json.encode(record))

        async def test(cluster: LocalCluster) -> None:
            assert bystander.poll() is None

        run(tmp_path, test)
        assert bystander.poll() is None
        assert not directory.exists()
    finally:
        bystander.kill()
        bystander.wait()


def test_a_garbled_record_does_not_stop_the_start(tmp_path: Path) -> None:
    directory = tmp_path / "cluster" / "pods" / "01old"
    directory.mkdir(parents=True)
    (directory / "process.json").write_bytes(b"{ half")
    run(tmp_path, _nothing)
    assert not directory.exists()


def test_many_short_pods_all_end_as_they_should(tmp_path: Path) -> None:
    async def test(cluster: LocalCluster) -> None:
        specs: Sequence[PodSpec] = [
            a_pod("sh", "-c", f"exit {index % 4}", index=index, memory_bytes=MiB)
            for index in range(40)
        ]
        pods = [await cluster.create(spec) for spec in specs]
        for index, pod in enumerate(pods):
            last = await pod_in(cluster, pod, PodPhase.SUCCEEDED, PodPhase.FAILED)
            assert last.exit_code == index % 4
            assert await cluster.delete(pod.name, pod.uid, 0.0)
        assert list((await cluster.pods_since(0)).pods) == []

    run(tmp_path, test)


def test_without_the_kernels_help_ends_are_seen_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: int) -> int:
        raise OSError("not on this system")

    monkeypatch.setattr(os, "pidfd_open", missing)

    async def test(cluster: LocalCluster) -> None:
        assert (await ended(cluster, a_pod("sh", "-c", "exit 4"))).exit_code == 4
        pod = await cluster.create(a_pod("sleep", "60", index=1))
        await pod_in(cluster, pod, PodPhase.RUNNING)
        version = (await cluster.pods_since(0)).version
        assert await cluster.delete(pod.name, pod.uid, 0.0)
        assert (await gone(cluster, pod, version)).exit_code == 137

    run(tmp_path, test)


async def _nothing(_: LocalCluster) -> None:
    return None


async def _exists(path: Path) -> bool:
    return path.exists()


async def _is_gone(path: Path) -> bool:
    return not path.exists()
