"""A gateway on loopback with a coordinator by script, for tests of the gateway and its clients.

The bus, the ledger and the store are the in-memory ones; rows of the ledger are packed as the
coordinator packs them. HTTP is real.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from springtide_gateway.config import GatewayConfig
from springtide_gateway.service import Gateway
from springtide_shared.adapters.clock import SystemClock, SystemIds
from springtide_shared.adapters.memory_bus import InMemoryBus, MemoryBroker
from springtide_shared.adapters.memory_ledger import InMemoryLedger
from springtide_shared.adapters.memory_store import InMemoryStore
from springtide_shared.errors import Reason
from springtide_shared.ledger.records import (
    JobBody,
    Phase,
    TaskRecord,
    pack_body,
    pack_spec,
    pack_task,
    unpack_body,
    unpack_spec,
)
from springtide_shared.messages.job import (
    JobAnswer,
    JobCancel,
    JobEvents,
    JobState,
    JobSubmit,
    Waiting,
    normalise,
)
from springtide_shared.messages.records import (
    CompletionRecord,
    StoredFile,
    log_key,
    output_key,
    record_key,
)
from springtide_shared.ports.bus import Delivery, Subscription
from springtide_shared.ports.ledger import Changes, JobRow, TaskRow

JOBS: Final = Subscription(queue="coordinator.jobs", types=(JobSubmit, JobCancel))


@dataclass(slots=True, kw_only=True)
class Rig:
    """The gateway and everything around it."""

    gateway: Gateway
    broker: MemoryBroker
    bus: InMemoryBus
    ledger: InMemoryLedger
    store: InMemoryStore
    clock: SystemClock
    token_file: Path
    is_silent: bool = False
    """The coordinator takes commands and never answers."""
    is_mute: bool = False
    """Broadcasts are lost."""
    refusals: dict[str, JobAnswer] = field(default_factory=dict)
    """Answers to give for job ids instead of the right one."""
    seen: list[tuple[str, JobSubmit | JobCancel]] = field(default_factory=list)
    """Tenant and command, in order."""
    epoch: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set it to end the gateway in order."""

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.gateway.url

    def token(self, tenant: str) -> str:
        """The token of a tenant, as in the token file."""
        for line in self.token_file.read_text().splitlines():
            token, _, owner = line.partition(" ")
            if (owner or "default") == tenant:
                return token
        raise KeyError(tenant)

    # ------------------------------------------------------------ the coordinator's part
    async def coordinate(self) -> None:
        """Answer commands until cancelled."""
        self.epoch = await self.ledger.begin_epoch("rig")
        async with self.bus.subscribe(JOBS) as inbox:
            while True:
                for delivery in await inbox.receive(limit=10):
                    await self._take(delivery)

    async def _take(self, delivery: Delivery) -> None:
        command = delivery.message
        assert isinstance(command, JobSubmit | JobCancel)
        self.seen.append((delivery.tenant, command))
        if self.is_silent:
            await delivery.ack()
            return
        answer = self.refusals.get(command.id)
        if answer is None and isinstance(command, JobSubmit):
            answer = await self._submitted(command, delivery.tenant)
        elif answer is None:
            answer = await self._cancelled(command.id)
        if delivery.reply_to:
            await self.bus.publish(
                answer, to=delivery.reply_to, correlation_id=delivery.correlation_id
            )
        await delivery.ack()

    async def _submitted(self, job: JobSubmit, tenant: str) -> JobAnswer:
        spec = pack_spec(normalise(job))
        row = await self.ledger.job(job.id)
        if row is not None:
            if row.tenant == tenant and row.spec == spec:
                return JobAnswer(job_id=job.id, accepted=True)
            return JobAnswer(
                job_id=job.id,
                accepted=False,
                reason=Reason.DUPLICATE_ID,
                field="id",
                detail="another job has this id",
            )
        body = JobBody(size=normalise(job).size)
        await self._commit(
            JobRow(
                job_id=job.id,
                tenant=tenant,
                state=JobState.ACCEPTED,
                created_at=self.clock.now(),
                version=1,
                spec=spec,
                body=pack_body(body),
            )
        )
        return JobAnswer(job_id=job.id, accepted=True)

    async def _cancelled(self, job_id: str) -> JobAnswer:
        row = await self.ledger.job(job_id)
        if row is not None and not row.state.is_final:
            body = unpack_body(row.body)
            body.cancelled = body.size - body.succeeded - body.failed
            body.cancelled_from = body.next_index
            body.live = 0
            await self._update(row, body, JobState.CANCELLED)
        return JobAnswer(job_id=job_id, accepted=True)

    async def _commit(self, job: JobRow, *tasks: TaskRow) -> None:
        await self.ledger.commit(Changes(epoch=self.epoch, jobs=[job], tasks=tasks))

    async def _update(self, row: JobRow, body: JobBody, state: JobState, *tasks: TaskRow) -> None:
        if state.is_final:
            body.ended_at = self.clock.now()
        changed = msgspec.structs.replace(
            row, version=row.version + 1, state=state, body=pack_body(body)
        )
        await self._commit(changed, *tasks)

    # ------------------------------------------------------------ what a run would leave
    async def succeed(
        self,
        job_id: str,
        index: int,
        outputs: Mapping[str, bytes] | None = None,
        *,
        attempt: int = 1,
        stdout: bytes = b"",
        stderr: bytes = b"",
    ) -> CompletionRecord:
        """Let a task succeed: outputs, logs and completion record in the store, then the ledger."""
        files = []
        for path, data in (outputs or {}).items():
            key = output_key(job_id, index, attempt, path)
            await self.store.put(key, data)
            digest = hashlib.sha256(data).hexdigest()
            files.append(StoredFile(path=path, key=key, size=len(data), sha256=digest))
        record = CompletionRecord(
            job_id=job_id,
            index=index,
            attempt=attempt,
            pod_uid=f"uid-{index}-{attempt}",
            exit_code=0,
            started_at=self.clock.now() - 2.0,
            ended_at=self.clock.now(),
            progress_seconds=2.0,
            outputs=files,
        )
        body = msgspec.json.encode(record)
        await self.store.put(record_key(job_id, index, attempt), body)
        await self.store.put(log_key(job_id, index, attempt, "stdout"), stdout)
        await self.store.put(log_key(job_id, index, attempt, "stderr"), stderr)
        await self.set_task(
            job_id,
            index,
            TaskRecord(
                phase=Phase.SUCCEEDED,
                attempt=attempt,
                floor=attempt,
                reason=Reason.COMPLETED.value,
                exit_code=0,
                digest=hashlib.sha256(body).digest(),
                record_attempt=attempt,
            ),
        )
        return record

    async def fail(self, job_id: str, index: int, exit_code: int = 1) -> None:
        """Let a task fail for good."""
        await self.set_task(
            job_id,
            index,
            TaskRecord(
                phase=Phase.FAILED,
                attempt=1,
                floor=1,
                reason=Reason.APPLICATION_ERROR.value,
                exit_code=exit_code,
            ),
        )

    async def set_task(self, job_id: str, index: int, record: TaskRecord) -> None:
        """Write a task that was queued; the job's counts and state follow, its event is sent."""
        row = await self.ledger.job(job_id)
        assert row is not None
        body = unpack_body(row.body)
        body.next_index = max(body.next_index, index + 1)
        body.succeeded += record.phase is Phase.SUCCEEDED
        body.failed += record.phase is Phase.FAILED
        body.live += record.phase is Phase.LIVE
        state = JobState.RUNNING
        if body.succeeded + body.failed + body.cancelled == body.size:
            state = JobState.FAILED if body.failed else JobState.SUCCEEDED
        task = TaskRow(job_id=job_id, index=index, body=pack_task(record))
        await self._update(row, body, state, task)
        await self.announce(job_id)

    async def wait_for(self, job_id: str, *causes: Waiting) -> None:
        """Write down why the job's tasks wait; its event is sent."""
        row = await self.ledger.job(job_id)
        assert row is not None
        body = unpack_body(row.body)
        body.waiting = list(causes)
        await self._update(row, body, row.state)
        await self.announce(job_id)

    async def announce(self, job_id: str) -> None:
        """Broadcast the job's state."""
        if self.is_mute:
            return
        row = await self.ledger.job(job_id)
        assert row is not None
        await self.bus.publish(
            JobEvents(
                job_id=job_id,
                tenant=row.tenant,
                state=row.state,
                counts=unpack_body(row.body).counts(),
                waiting=unpack_body(row.body).waiting,
                at=self.clock.now(),
            )
        )

    async def size_of(self, job_id: str) -> int:
        """Tasks in the array."""
        row = await self.ledger.job(job_id)
        assert row is not None
        return unpack_spec(row.spec).size


@asynccontextmanager
async def rig(
    folder: Path, *, tenants: tuple[str, ...] = (), **settings: Any
) -> AsyncIterator[Rig]:
    """A running gateway with its scripted coordinator.

    Args:
        folder: for the token file.
        tenants: a token is made for each; none: the gateway makes the default one.
        settings: fields of `GatewayConfig`.
    """
    clock = SystemClock()
    ids = SystemIds(clock)
    token_file = folder / "token"
    if tenants:
        token_file.touch(mode=0o600)
        token_file.write_text("".join(f"{ids.new()}{ids.new()} {name}\n" for name in tenants))
    broker = MemoryBroker()
    broker.declare(JOBS)
    bus = InMemoryBus(broker)
    ledger = InMemoryLedger()
    store = InMemoryStore()
    gateway = Gateway(
        bus=bus,
        ledger=ledger,
        store=store,
        clock=clock,
        ids=ids,
        config=GatewayConfig(token_file=token_file, port=0, **settings),
    )
    made = Rig(
        gateway=gateway,
        broker=broker,
        bus=bus,
        ledger=ledger,
        store=store,
        clock=clock,
        token_file=token_file,
    )
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(gateway.serve(made.stop), name="gateway")
        coordinating = group.create_task(made.coordinate(), name="coordinator")
        try:
            async with asyncio.timeout(10.0):
                while True:
                    if gateway.health().is_ready or serving.done():
                        break
                    await asyncio.sleep(0.01)
            yield made
        finally:
            made.stop.set()
            coordinating.cancel()
