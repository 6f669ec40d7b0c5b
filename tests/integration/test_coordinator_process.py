"""The coordinator as a process of its own, on a real broker and a database file."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from springtide_coordinator.service import durable_subscriptions
from springtide_shared.adapters.rabbit_bus import RabbitBus, RabbitSettings
from springtide_shared.adapters.sql_ledger import SqlLedger
from springtide_shared.errors import Reason
from springtide_shared.ledger.reading import job_view
from springtide_shared.messages import (
    Credit,
    JobAnswer,
    JobState,
    ShapeCredit,
    SliceCancel,
    SliceRun,
    parse_job,
)
from springtide_shared.ports.bus import Subscription

pytestmark = pytest.mark.real("rabbitmq")

JOB = {"id": "first", "name": "n", "command": ["true"], "array": {"size": 5}}
LIMIT_SECONDS = 60.0


async def start(folder: Path, amqp_url: str) -> asyncio.subprocess.Process:
    """A coordinator process; its log goes to `coordinator.log`."""
    with (folder / "coordinator.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "springtide_coordinator",
            env={
                **os.environ,
                "SPRINGTIDE_COORDINATOR_AMQP_URL": amqp_url,
                "SPRINGTIDE_COORDINATOR_DATABASE_URL": f"sqlite:///{folder / 'ledger.db'}",
                "SPRINGTIDE_COORDINATOR_MIGRATE": "true",
                "SPRINGTIDE_COORDINATOR_RECONCILE_SECONDS": "0.5",
                "SPRINGTIDE_COORDINATOR_STORE_DIR": str(folder / "store"),
            },
            stdout=log,
            stderr=log,
        )


async def ask(bus: RabbitBus, body: dict[str, Any]) -> JobAnswer:
    async with bus.answers() as (address, inbox):
        await bus.publish_body("job.submit.v1", msgspec.json.encode(body), reply_to=address)
        deliveries = await inbox.receive(timeout=LIMIT_SECONDS)
        assert deliveries, "no answer came"
        await deliveries[0].ack()
        answer = deliveries[0].message
        assert isinstance(answer, JobAnswer)
        return answer


def test_it_serves_survives_a_kill_and_yields_to_another(rabbitmq: Any, tmp_path: Path) -> None:
    if rabbitmq.vhost is None:
        pytest.skip("needs a virtual host of its own")

    async def main() -> None:
        slices = Subscription(
            queue="submitter.east.slice", types=(SliceRun, SliceCancel), cluster="east"
        )
        settings = RabbitSettings(url=rabbitmq.url, identify=True)
        processes: list[asyncio.subprocess.Process] = []
        try:
            async with RabbitBus.connect(settings) as bus:
                # Declared beforehand: the job may come before any coordinator has run.
                await bus.declare(*durable_subscriptions(), slices)
                asking = asyncio.create_task(ask(bus, JOB))
                processes.append(await start(tmp_path, rabbitmq.url))
                assert (await asking).accepted
                refused = await ask(bus, {**JOB, "id": "second", "steps": []})
                assert (refused.reason, refused.field) == (Reason.NOT_SUPPORTED, "steps")

                processes[0].send_signal(signal.SIGKILL)
                await processes[0].wait()
                processes.append(await start(tmp_path, rabbitmq.url))
                assert (await ask(bus, JOB)).accepted, "the same answer, also from the next life"

                shape = parse_job(msgspec.json.encode(JOB))[1].template.shape
                async with bus.subscribe(slices) as inbox:
                    deliveries = []
                    for seq in range(1, 60):  # a snapshot may come before its consumer is up
                        offer = ShapeCredit(shape=shape.key, live=0, free=10)
                        await bus.publish(
                            Credit(
                                cluster="east", epoch=1, seq=seq, valid_until=4e9, shapes=[offer]
                            ),
                            cluster="east",
                        )
                        deliveries = list(await inbox.receive(timeout=1.0))
                        if deliveries:
                            break
                    assert deliveries, "no slice came"
                    run = deliveries[0].message
                    assert isinstance(run, SliceRun)
                    assert (run.indices(), run.epoch) == ([0, 1, 2, 3, 4], 2)
                    await deliveries[0].ack()

                processes.append(await start(tmp_path, rabbitmq.url))
                async with asyncio.timeout(LIMIT_SECONDS):
                    assert await processes[1].wait() == 1, "the older one ends itself"
                    assert (await ask(bus, JOB)).accepted
                    processes[2].send_signal(signal.SIGTERM)
                    assert await processes[2].wait() == 0
                parked = await bus.dead_letters("coordinator.jobs")
                assert [one.reason for one in parked] == [Reason.NOT_SUPPORTED.value]
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        async with SqlLedger.open(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            view = await job_view(ledger, "first")
        assert view is not None
        assert (view.state, view.counts.live) == (JobState.RUNNING, 5)
        assert view.tenant not in ("", "default"), "the broker said who published it"

    asyncio.run(main())
    log = (tmp_path / "coordinator.log").read_text(encoding="utf-8")
    assert "another coordinator has taken over" in log
