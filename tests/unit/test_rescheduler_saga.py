"""Laws of the saga under any sequence of events, in any order and number."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_rescheduler.config import ReschedulerConfig
from springtide_rescheduler.model import (
    Answered,
    AttemptEnded,
    AttemptRuns,
    AttemptVanished,
    Cancelling,
    Emptying,
    Ending,
    Event,
    Gathering,
    Gone,
    ManifestVerified,
    Move,
    Moved,
    NodeAnswered,
    NodeClosed,
    NodeFilled,
    Restoring,
    Saving,
    Stayed,
    TimePassed,
    Undoing,
    VacateSaga,
)
from springtide_rescheduler.policy import begin, concerns, rearm, standing, step
from springtide_shared.errors import Reason
from springtide_shared.messages.attempts import AttemptState, LiveAttempt
from springtide_shared.messages.migration import (
    Migrate,
    MigrateAction,
    MigrationStep,
    Vacate,
    VacateAction,
    VacateStep,
)

RULES = ReschedulerConfig()
START = 1_000.0
IDS = ("m0", "m1", "m2")


def fresh() -> VacateSaga:
    attempts = [
        LiveAttempt(
            job_id="j",
            index=number,
            attempt=3,
            state=AttemptState.RUNNING,
            shape="s",
            cpu_millis=1,
            memory_bytes=1,
            pod_uid=f"u{number}",
            node="src",
            checkpointable=True,
        )
        for number in range(3)
    ]
    moves = tuple(Move(attempt=one, target_node=f"t{one.index % 2}") for one in attempts)
    emptying = Emptying(node="src", moves=moves, gain=1.0)
    return begin(emptying, "v", IDS, "c", START, RULES)


MIGRATION = st.sampled_from([*IDS, "other"])
REASON = st.sampled_from(
    [Reason.COMPLETED, Reason.MIGRATED, Reason.NO_ROOM, Reason.STALE, Reason.NODE_LOST]
)
NUMBER = st.integers(0, 3)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Answered, MIGRATION, st.sampled_from(MigrationStep), REASON),
    st.builds(NodeAnswered, st.sampled_from(["v", "w"]), st.sampled_from(VacateStep), REASON),
    st.builds(ManifestVerified, MIGRATION, st.just("key"), st.just(50.0), st.just(5.0)),
    st.builds(
        AttemptEnded,
        st.just("j"),
        NUMBER,
        st.integers(2, 4),
        st.sampled_from(["", "u0", "u1", "u2"]),
        REASON,
        st.just(START),
        MIGRATION,
    ),
    st.builds(AttemptRuns, st.just("j"), NUMBER, st.integers(2, 4), st.just(START)),
    st.builds(AttemptVanished, MIGRATION),
    st.builds(NodeClosed, st.sampled_from(["src", "t0", "t1"]), st.booleans()),
    st.builds(NodeFilled, st.sampled_from(["v", "w"])),
    st.just(TimePassed()),
)
HAPPY: list[Event] = [
    *(Answered(one, MigrationStep.RESERVED) for one in IDS),
    NodeAnswered("v", VacateStep.CORDONED),
    *(Answered(one, MigrationStep.REQUESTED) for one in IDS),
    *(ManifestVerified(one, "key", 50.0, 5.0) for one in IDS),
    *(AttemptEnded("j", n, 3, f"u{n}", Reason.MIGRATED, START, one) for n, one in enumerate(IDS)),
    *(Answered(one, MigrationStep.RESTORED) for one in IDS),
    NodeAnswered("v", VacateStep.RELEASED),
]
STORY = st.lists(st.tuples(EVENTS, st.floats(0.0, 400.0)), max_size=25)


def test_the_happy_path_closes_with_all_moved() -> None:
    saga, sent = fresh(), list(standing(fresh(), START))
    for event in HAPPY:
        saga, commands = step(saga, event, START, RULES)
        sent += commands
    assert saga.is_closed
    assert all(isinstance(move.state, Moved) for move in saga.moves)
    actions = [one.action for one in sent]
    assert actions == [
        *[MigrateAction.RESERVE] * 3,
        VacateAction.CORDON,
        *[MigrateAction.CHECKPOINT] * 3,
        *[MigrateAction.END] * 3,
    ]


@settings(max_examples=300)
@given(prefix=st.integers(0, len(HAPPY)), story=STORY)
def test_laws_under_any_events(prefix: int, story: list[tuple[Event, float]]) -> None:
    saga, now = fresh(), START
    verified: set[str] = set()
    events = [(event, 0.0) for event in HAPPY[:prefix]] + story
    for event, pause in events:
        now += pause
        before = saga
        saga, commands = step(before, event, now, RULES)
        if isinstance(event, ManifestVerified):
            verified.add(event.migration_id)

        if not concerns(before, event):
            assert saga == before, "what does not concern it changes nothing"
        again, repeated = step(saga, event, now, RULES)
        assert (again, repeated) == (saga, ()), "twice is once"
        stored = msgspec.json.decode(msgspec.json.encode(saga), type=VacateSaga)
        assert stored == saga, "what is stored is all there is"

        for command in commands:
            assert command in standing(saga, now), "what was sent can be sent again"
            if isinstance(command, Migrate) and command.action is MigrateAction.END:
                assert command.migration_id in verified, "never ended without a verified manifest"
                assert now < command.valid_until, "the program has not thawed yet"
            if isinstance(command, Migrate) and command.action is MigrateAction.CHECKPOINT:
                assert not isinstance(saga.phase, Gathering), "never frozen before the cordon"
        for old, new in zip(before.moves, saga.moves, strict=True):
            if isinstance(old.state, Moved | Gone):
                assert new.state == old.state, "settled is settled"
            if isinstance(new.state, Ending | Restoring):
                assert isinstance(old.state, Saving | Ending | Restoring)
        stays = any(
            isinstance(move.state, Stayed)
            or (isinstance(move.state, Cancelling) and not move.state.is_gone)
            for move in saga.moves
        )
        if stays:
            assert isinstance(saga.phase, Undoing) or saga.is_closed
            assert not any(isinstance(move.state, Saving) for move in saga.moves)


@settings(max_examples=200)
@given(prefix=st.integers(0, len(HAPPY)), story=STORY, is_away=st.booleans())
def test_time_alone_ends_every_saga(
    prefix: int, story: list[tuple[Event, float]], is_away: bool
) -> None:
    saga, now = fresh(), START
    for event, pause in [(event, 0.0) for event in HAPPY[:prefix]] + story:
        now += pause
        saga, _ = step(saga, event, now, RULES)
    if is_away:
        now += 5_000.0
        saga = rearm(saga, now, RULES)
    for _ in range(20):
        now += RULES.saga_limit_seconds
        saga, _ = step(saga, TimePassed(), now, RULES)
    assert saga.is_closed


@given(prefix=st.integers(0, len(HAPPY)))
def test_an_end_that_is_too_late_is_not_sent_again(prefix: int) -> None:
    saga = fresh()
    for event in HAPPY[:prefix]:
        saga, _ = step(saga, event, START, RULES)
    late = START + RULES.save_limit_seconds + 1.0
    actions = [one.action for one in standing(saga, late) if isinstance(one, Migrate)]
    assert MigrateAction.END not in actions


def test_a_cordon_that_was_asked_for_is_always_asked_back() -> None:
    saga = fresh()
    for event in HAPPY[:3]:
        saga, _ = step(saga, event, START, RULES)
    failed = Answered("m1", MigrationStep.REFUSED, Reason.NO_ROOM)
    saga, commands = step(saga, failed, START, RULES)
    assert [one.action for one in commands if isinstance(one, Vacate)] == [VacateAction.UNCORDON]
    cancelled = [one for one in commands if isinstance(one, Migrate)]
    assert {one.action for one in cancelled} == {MigrateAction.CANCEL}
    assert [one.migration_id for one in cancelled] == list(IDS)
