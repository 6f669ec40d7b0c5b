"""Straight to a real broker: `--amqp`, the example program, and the gateway's tenants."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from springtide import amqp
from springtide.errors import (
    DuplicateIdError,
    ExpiredError,
    JobFileError,
    RefusedError,
    UnauthorisedError,
    UnreachableError,
)
from springtide.jobfile import job_of
from springtide_gateway.desk import Desk
from springtide_shared.adapters.clock import SystemClock, SystemIds
from springtide_shared.adapters.rabbit_bus import RabbitBus, RabbitSettings
from springtide_shared.errors import Reason
from springtide_shared.messages.job import JobAnswer, JobCancel, JobSubmit
from springtide_shared.ports.bus import Subscription

EXAMPLE = Path(__file__).parents[2] / "examples" / "publish_job.py"
JOBS = Subscription(queue="coordinator.jobs", types=(JobSubmit, JobCancel))

pytestmark = pytest.mark.real("rabbitmq")


class Coordinator:
    """Answers by script: `refused` by reason, `silent` never, all others accepted."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    async def run(self, bus: RabbitBus) -> None:
        async with bus.subscribe(JOBS) as inbox:
            while True:
                for delivery in await inbox.receive():
                    message: Any = delivery.message
                    self.seen.append((delivery.tenant, message))
                    reasons = {"refused": Reason.QUOTA, "taken": Reason.DUPLICATE_ID}
                    reason = reasons.get(message.id)
                    if message.id != "silent":
                        await bus.publish(
                            JobAnswer(
                                job_id=message.id,
                                accepted=reason is None,
                                reason=reason,
                                detail="because" if reason else "",
                            ),
                            to=delivery.reply_to,
                            correlation_id=delivery.correlation_id,
                        )
                    await delivery.ack()


@asynccontextmanager
async def coordinating(url: str) -> AsyncIterator[Coordinator]:
    coordinator = Coordinator()
    user = urlsplit(url).username or ""
    settings = RabbitSettings(url=url, trusted_publishers=(user,))
    async with RabbitBus.connect(settings) as bus:
        await bus.declare(JOBS)
        task = asyncio.create_task(coordinator.run(bus))
        try:
            yield coordinator
        finally:
            task.cancel()
            await asyncio.wait([task])


def against(url: str, check: Callable[[Coordinator], Awaitable[None]]) -> None:
    async def main() -> None:
        async with coordinating(url) as coordinator:
            await check(coordinator)

    asyncio.run(main())


def a_job(**fields: Any) -> dict[str, Any]:
    return {"name": "n", "command": ["true"], **fields}


def test_a_job_goes_straight_to_the_broker_and_the_answer_comes_back(rabbitmq_url: str) -> None:
    async def check(coordinator: Coordinator) -> None:
        accepted = await asyncio.to_thread(amqp.submit, job_of(a_job(id="j")), rabbitmq_url)
        assert accepted == "j"
        made = await asyncio.to_thread(amqp.submit, job_of(a_job()), rabbitmq_url)
        assert len(made) == 26
        # The tenant is the broker's user, whom the broker has checked.
        assert {tenant for tenant, _ in coordinator.seen} == {urlsplit(rabbitmq_url).username}
        with pytest.raises(RefusedError, match="because") as caught:
            await asyncio.to_thread(amqp.submit, job_of(a_job(id="refused")), rabbitmq_url)
        assert caught.value.reason == "quota"
        with pytest.raises(DuplicateIdError):
            await asyncio.to_thread(amqp.submit, job_of(a_job(id="taken")), rabbitmq_url)
        with pytest.raises(JobFileError):
            await asyncio.to_thread(amqp.submit, job_of(a_job(oops=1)), rabbitmq_url)
        with pytest.raises(ExpiredError, match="may have been taken"):
            await asyncio.to_thread(amqp.submit, job_of(a_job(id="silent")), rabbitmq_url, 0.5)

    against(rabbitmq_url, check)


def test_a_broker_without_a_coordinator_says_so(rabbitmq_url: str) -> None:
    with pytest.raises(UnreachableError, match="no coordinator"):
        amqp.submit(job_of(a_job()), rabbitmq_url)


def test_a_wrong_password_is_told_and_never_shown(rabbitmq_url: str) -> None:
    parts = urlsplit(rabbitmq_url)
    host = f"{parts.hostname}:{parts.port}"
    wrong = urlunsplit(parts._replace(netloc=f"{parts.username}:swordfish@{host}"))
    with pytest.raises(UnauthorisedError) as caught:
        amqp.check(wrong)
    assert "swordfish" not in str(caught.value) + caught.value.remedy
    amqp.check(rabbitmq_url)


def test_the_example_program_needs_nothing_of_ours(rabbitmq_url: str) -> None:
    def example(job_id: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(EXAMPLE), rabbitmq_url, job_id],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert "springtide_shared" not in EXAMPLE.read_text()
    nobody = example("j")
    assert (nobody.returncode, nobody.stdout) == (2, "")
    assert "harmless" in nobody.stderr

    async def check(coordinator: Coordinator) -> None:
        taken = await asyncio.to_thread(example, "j")
        assert (taken.returncode, taken.stderr) == (0, "")
        assert json.loads(taken.stdout) == {"job_id": "j", "accepted": True}
        refused = await asyncio.to_thread(example, "refused")
        assert refused.returncode == 1
        assert json.loads(refused.stdout)["reason"] == "quota"
        tenant, job = coordinator.seen[0]
        assert tenant == urlsplit(rabbitmq_url).username
        assert job.array.size == 3

    against(rabbitmq_url, check)


def test_the_gateway_is_believed_about_its_tenants(rabbitmq_url: str) -> None:
    async def check(coordinator: Coordinator) -> None:
        ids = SystemIds(SystemClock())
        async with RabbitBus.connect(RabbitSettings(url=rabbitmq_url)) as bus:
            desk = Desk(bus, ids, limit=10.0, max_waiting=10)
            reading = asyncio.create_task(desk.read_answers())
            async with asyncio.timeout(10):
                while True:
                    if desk.is_open:
                        break
                    await asyncio.sleep(0.01)
            ann, bob = await asyncio.gather(
                desk.ask(JobCancel(id="a"), "ann"), desk.ask(JobCancel(id="b"), "bob")
            )
            assert (ann.job_id, bob.job_id) == ("a", "b")
            reading.cancel()
            await asyncio.wait([reading])
        seen = sorted((tenant, message.id) for tenant, message in coordinator.seen)
        assert seen == [("ann", "a"), ("bob", "b")]

    against(rabbitmq_url, check)
