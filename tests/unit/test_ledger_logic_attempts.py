"""Attempts are a lattice: order and repetition of the news about them make no difference."""

from __future__ import annotations

from functools import reduce

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from springtide_shared.errors import Reason
from springtide_shared.ledger.attempts import (
    ENDED,
    RANK,
    RUNNING,
    STAGE,
    Attempt,
    Facts,
    facts_of,
)
from springtide_shared.messages import AttemptEvent, AttemptState

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""
ENDS = sorted(reason for reason in Reason)

events = st.builds(
    AttemptEvent,
    job_id=st.just("j"),
    index=st.just(0),
    attempt=st.just(1),
    state=st.sampled_from(AttemptState),
    at=st.floats(0, 10),
    pod_uid=st.sampled_from(["", "u1", "u2"]),
    node=st.sampled_from(["", "n1", "n2"]),
    reason=st.none() | st.sampled_from(ENDS),
    exit_code=st.none() | st.integers(-9, 255),
    digest=st.sampled_from(["", "a" * 64, "b" * 64, "no digest"]),
    migration_id=st.sampled_from(["", "m1"]),
    pin_node=st.sampled_from(["", "n3"]),
)
news = st.lists(events.map(facts_of), max_size=8)


def merged(facts: list[Facts], start: Attempt | None = None) -> Attempt:
    return reduce(Attempt.merge, facts, start or Attempt())


@PATIENT
@given(news, st.randoms(use_true_random=False))
def test_any_order_and_any_repetition_ends_the_same(facts: list[Facts], random: object) -> None:
    shuffled = facts + facts[: len(facts) // 2]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert merged(shuffled).known == merged(facts).known


@PATIENT
@given(news, news)
def test_what_is_known_never_goes_back(before: list[Facts], after: list[Facts]) -> None:
    first = merged(before)
    second = merged(after, first)
    if first.known is None:
        return
    assert second.known is not None
    is_other_pod = second.has_run and not first.has_run
    assert is_other_pod or second.known >= first.known


@PATIENT
@given(news)
def test_merging_what_is_known_changes_nothing(facts: list[Facts]) -> None:
    attempt = merged(facts)
    for one in facts:
        assert attempt.merge(one) is attempt


def event(state: AttemptState, reason: Reason | None = None, uid: str = "u1") -> Facts:
    return facts_of(
        AttemptEvent(
            job_id="j",
            index=0,
            attempt=1,
            state=state,
            at=0,
            pod_uid=uid,
            reason=reason,
            digest="c" * 64 if reason is Reason.COMPLETED else "",
        )
    )


def test_success_outranks_every_other_end_and_never_started_none() -> None:
    success = event(AttemptState.ENDED, Reason.COMPLETED)
    nothing = event(AttemptState.ENDED, Reason.NEVER_STARTED)
    for reason in ENDS:
        other = event(AttemptState.ENDED, reason)
        if reason is not Reason.COMPLETED:
            assert merged([success, other]).known == success
        if reason is not Reason.NEVER_STARTED:
            known = merged([other, nothing]).known
            assert known is not None
            assert known.reason == reason


def test_an_unstarted_pod_of_the_same_name_says_nothing_of_the_one_that_runs() -> None:
    running = event(AttemptState.RUNNING, uid="u2")
    stillborn = event(AttemptState.ENDED, Reason.NEVER_STARTED, uid="u1")
    for order in ([running, stillborn], [stillborn, running]):
        known = merged(order).known
        assert known is not None
        assert known.stage == RUNNING
    lost = event(AttemptState.ENDED, Reason.LOST, uid="")
    known = merged([running, lost]).known
    assert known is not None
    assert known.stage == ENDED, "a verdict without a pod is about whichever there was"


def test_stages_and_ranks_are_in_the_order_of_the_design() -> None:
    assert [STAGE[state] for state in AttemptState] == [0, 1, 2, 3, 4]
    assert min(RANK.values()) == RANK[Reason.NEVER_STARTED]
    assert max(RANK.values()) == RANK[Reason.COMPLETED]


@pytest.mark.parametrize("bad", ["", "x" * 64, "ab" * 31, "  " + "ab" * 31])
def test_a_success_needs_a_whole_digest(bad: str) -> None:
    facts = facts_of(
        AttemptEvent(
            job_id="j",
            index=0,
            attempt=1,
            state=AttemptState.ENDED,
            at=0,
            reason=Reason.COMPLETED,
            digest=bad,
        )
    )
    assert (facts.reason, facts.digest) == (Reason.INTERNAL, "")
