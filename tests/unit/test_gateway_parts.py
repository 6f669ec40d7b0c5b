"""Tokens, settings, the desk and the shown names: the gateway's parts without HTTP."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide_gateway.config import GatewayConfig
from springtide_gateway.desk import Desk
from springtide_gateway.feeds import JobFeed
from springtide_gateway.policy import is_news, output_named, percent_encoded, status_of
from springtide_gateway.tokens import ensure_tokens, parse_tokens, read_tokens
from springtide_shared.adapters.clock import SeededIds
from springtide_shared.adapters.memory_bus import InMemoryBus, MemoryBroker
from springtide_shared.errors import (
    InvalidFieldError,
    NotFoundError,
    PermanentError,
    Reason,
    TransientError,
)
from springtide_shared.httpapi import JobProgress
from springtide_shared.messages.job import (
    JobAnswer,
    JobCancel,
    JobEvents,
    JobState,
    JobSubmit,
    TaskCounts,
    Waiting,
)
from springtide_shared.messages.records import CompletionRecord, StoredFile, task_prefix
from springtide_shared.ports.bus import Subscription
from springtide_shared.runtime import config
from springtide_shared.testing.virtual import VirtualClock, run_virtual

TOKEN = "abcdefghijklmnop0123"
OTHER = "zyxwvutsrqponmlk9876"


# ---------------------------------------------------------------- tokens


def test_a_fresh_token_file_is_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "home" / "token"
    table = ensure_tokens(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = file.read_text().strip()
    assert len(token) >= 32
    assert table.tenant_of(token) == "default"
    assert ensure_tokens(file) == table
    assert [one.name for one in file.parent.iterdir()] == ["token"]


def test_each_token_has_its_tenant_and_nothing_else_has_one() -> None:
    table = parse_tokens(f"# people\n\n{TOKEN} ann\n{OTHER}\n", "token")
    assert table.tenant_of(TOKEN) == "ann"
    assert table.tenant_of(OTHER) == "default"
    for wrong in ("", "ann", TOKEN[:-1], TOKEN + " ", TOKEN.upper(), "\udcff"):
        assert table.tenant_of(wrong) is None


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("short\n", "token: line 1"),
        (f"{TOKEN}\n{TOKEN} a b\n", "token: line 2"),
        (f"{TOKEN} ../x\n", "token: line 1"),
        ("# none\n", "token"),
    ],
)
def test_a_bad_token_file_names_the_line_and_never_the_token(text: str, where: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        parse_tokens(text, "token")
    assert caught.value.field == where
    assert "short" not in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_a_token_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o644)
    with pytest.raises(PermanentError, match="chmod 600"):
        read_tokens(file)


def test_a_token_file_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PermanentError, match="set token_file"):
        ensure_tokens(tmp_path / "file" / "token")


# ---------------------------------------------------------------- settings


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidFieldError, match="answer_limit_seconds"):
        config.load(
            GatewayConfig,
            prefix="SPRINGTIDE_GATEWAY",
            environ={
                "SPRINGTIDE_GATEWAY_TOKEN_FILE": "t",
                "SPRINGTIDE_GATEWAY_ANSWER_LIMIT_SECONDS": "2m",
            },
        )
    with pytest.raises(ValueError, match="port"):
        GatewayConfig(token_file=Path("t"), port=70_000)


# ---------------------------------------------------------------- statuses


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidFieldError("a", 1, "b"), 422),
        (InvalidFieldError("a", 1, "b", Reason.MALFORMED), 400),
        (InvalidFieldError("command", 1, "b", Reason.TOO_LARGE), 422),
        (PermanentError(Reason.TOO_LARGE), 413),
        (NotFoundError(Reason.NOT_FOUND), 404),
        (TransientError(Reason.INTERNAL), 503),
        (TransientError(Reason.LIMIT_REACHED), 429),
        (PermanentError(Reason.STALE), 500),
    ],
)
def test_a_fault_has_one_status(error: PermanentError, status: int) -> None:
    assert status_of(error) == status


# ---------------------------------------------------------------- what is served


@given(st.text(min_size=1).filter(lambda text: max(text) < "\ud800" or min(text) > "\udfff"))
def test_an_outputs_url_leads_back_to_its_path(path: str) -> None:
    from urllib.parse import unquote

    encoded = percent_encoded(path)
    assert unquote(encoded, errors="replace") == path.encode(errors="replace").decode()
    assert not set(encoded) & set(' ?#"<>%\\\r\n') - {"%"}


def test_a_record_cannot_lend_another_tasks_object() -> None:
    own = f"{task_prefix('job-1', 0)}attempts/00001/outputs/a"
    for key, is_served in ((own, True), (f"{task_prefix('job-2', 0)}a", False), ("a", False)):
        file = StoredFile(path="a", key=key, size=1, sha256="0" * 64)
        record = CompletionRecord(
            job_id="job-1",
            index=0,
            attempt=1,
            pod_uid="u",
            exit_code=0,
            started_at=0.0,
            ended_at=1.0,
            progress_seconds=1.0,
            outputs=[file],
        )
        assert (output_named(record, "a") is not None) is is_served


counts = st.builds(
    TaskCounts,
    queued=st.integers(0, 3),
    live=st.integers(0, 3),
    succeeded=st.integers(0, 3),
    failed=st.integers(0, 3),
    cancelled=st.integers(0, 3),
)
progress = st.builds(
    JobProgress,
    id=st.just("j"),
    state=st.sampled_from(JobState),
    counts=counts,
    at=st.floats(0, 10),
    waiting=st.lists(
        st.builds(Waiting, reason=st.sampled_from(Reason), count=st.integers(1, 3)), max_size=2
    ),
)


@given(st.lists(progress, max_size=10))
def test_what_a_stream_shows_never_goes_back(events: list[JobProgress]) -> None:
    shown: list[JobProgress] = []
    for event in events:
        if not shown or is_news(event, shown[-1]):
            shown.append(event)
    settled = [e.counts.succeeded + e.counts.failed + e.counts.cancelled for e in shown]
    assert settled == sorted(settled)
    assert not any(event.state.is_final for event in shown[:-1])
    assert not any(is_news(event, event) for event in events)


# ---------------------------------------------------------------- the desk, in virtual time


def a_desk(limit: float = 5.0, waiting: int = 10) -> tuple[Desk, InMemoryBus]:
    clock = VirtualClock(asyncio.get_running_loop())
    bus = InMemoryBus(MemoryBroker())
    return Desk(bus, SeededIds(clock, 1), limit=limit, max_waiting=waiting), bus


async def _take_one(bus: InMemoryBus, answer: JobAnswer | None) -> None:
    jobs = Subscription(queue="coordinator.jobs", types=(JobSubmit, JobCancel))
    async with bus.subscribe(jobs) as inbox:
        (delivery,) = await inbox.receive()
        await delivery.ack()
        if answer is not None:
            # One for somebody else first: it must not reach our caller.
            await bus.publish(answer, to=delivery.reply_to, correlation_id="another")
            await bus.publish(answer, to=delivery.reply_to, correlation_id=delivery.correlation_id)
            await bus.publish(answer, to=delivery.reply_to, correlation_id=delivery.correlation_id)


def test_the_desk_waits_no_longer_than_its_limit() -> None:
    async def main() -> float:
        desk, bus = a_desk(limit=5.0)
        reading = asyncio.create_task(desk.read_answers())
        silent = asyncio.create_task(_take_one(bus, None))
        await asyncio.sleep(0)
        with pytest.raises(TransientError, match="harmless") as caught:
            await desk.ask(JobCancel(id="job-1"), "ann")
        assert caught.value.reason is Reason.EXPIRED
        took = asyncio.get_running_loop().time()
        await silent
        reading.cancel()
        await asyncio.wait([reading])
        assert not desk.is_open
        return took

    assert run_virtual(main()) == pytest.approx(5.0)


def test_the_desk_gives_each_caller_the_answer_that_is_meant_for_it() -> None:
    async def main() -> None:
        desk, bus = a_desk()
        reading = asyncio.create_task(desk.read_answers())
        answer = JobAnswer(job_id="job-1", accepted=True)
        taking = asyncio.create_task(_take_one(bus, answer))
        await asyncio.sleep(0)
        assert await desk.ask(JobCancel(id="job-1"), "ann") == answer
        await taking
        reading.cancel()
        await asyncio.wait([reading])

    run_virtual(main())


def test_the_desk_refuses_when_nobody_could_answer() -> None:
    async def main() -> None:
        desk, _bus = a_desk(waiting=0)
        with pytest.raises(TransientError) as caught:
            await desk.ask(JobCancel(id="job-1"), "ann")
        assert caught.value.reason is Reason.BUS_UNAVAILABLE
        reading = asyncio.create_task(desk.read_answers())
        await asyncio.sleep(0)
        with pytest.raises(TransientError, match="too many"):
            await desk.ask(JobCancel(id="job-1"), "ann")
        reading.cancel()
        await asyncio.wait([reading])

    run_virtual(main())


def test_a_bus_without_a_coordinator_is_a_passing_fault() -> None:
    async def main() -> None:
        desk, _bus = a_desk()
        reading = asyncio.create_task(desk.read_answers())
        await asyncio.sleep(0)
        with pytest.raises(TransientError) as caught:
            await desk.ask(JobCancel(id="job-1"), "ann")
        assert caught.value.reason is Reason.CLUSTER_UNREACHABLE
        reading.cancel()
        await asyncio.wait([reading])

    run_virtual(main())


# ---------------------------------------------------------------- the feed


def an_event(tenant: str, queued: int) -> JobEvents:
    return JobEvents(
        job_id="job-1",
        tenant=tenant,
        state=JobState.RUNNING,
        counts=TaskCounts(queued=queued),
        at=1.0,
    )


def test_a_slow_listener_gets_the_newest_event_of_its_own_tenant() -> None:
    async def main() -> None:
        feed = JobFeed(1)
        with feed.listen("job-1", "ann") as listener:
            for queued in (3, 2, 1):
                feed.take(an_event("ann", queued))
            feed.take(an_event("bob", 9))
            event = await listener.next(1.0)
            assert event is not None
            assert event.counts.queued == 1
            assert await listener.next(1.0) is None
            with pytest.raises(TransientError), feed.listen("job-1", "ann"):
                pass
        feed.take(an_event("ann", 0))
        feed.close()
        with feed.listen("job-1", "ann") as late:
            assert late.is_closed

    run_virtual(main())
