"""The slot book, the numbers of slices and the memory of cancels."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from springtide_shared.messages import AttemptKey, SliceCancel, Slot, SlotState
from springtide_submitter.model import (
    CancelDocument,
    CancelMemory,
    Sequences,
    cancel_text,
    document_key,
)
from springtide_submitter.slots import SlotBook

SHAPES = ("s1", "s2", "s3")
NAMES = ("a", "b", "c", "d")
NOW = 100.0


def slot(
    name: str,
    places: dict[str, int],
    state: SlotState = SlotState.READY,
    ready_at: float = 0.0,
) -> Slot:
    return Slot(
        slot=name, group="g", state=state, ready_at=ready_at, places=places, node=f"node-{name}"
    )


# ---------------------------------------------------------------- the slot book
def test_ready_slots_are_filled_first_then_the_one_that_is_due_first() -> None:
    book = SlotBook()
    book.replace(
        [
            slot("late", {"s1": 1}, SlotState.LAUNCHING, NOW + 20),
            slot("soon", {"s1": 1}, SlotState.LAUNCHING, NOW + 10),
            slot("never", {"s1": 1}, SlotState.LAUNCHING, NOW + 99),
            slot("here", {"s1": 1}),
        ]
    )
    assert book.free("s1", NOW + 60) == 3
    assert [book.take("s1", NOW + 30) for _ in range(4)] == ["here", "soon", "late", None]


def test_a_slot_with_more_than_its_pattern_offers_nothing() -> None:
    book = SlotBook()
    book.replace([slot("a", {"s1": 2, "s2": 2})])
    book.occupy("a", "s3")  # a migrated task that the pattern does not know yet
    assert book.free_at_all(NOW) == 0
    book.replace([slot("a", {"s1": 1, "s2": 1, "s3": 1})])
    assert book.free_at_all(NOW) == 2


def test_closed_slots_in_use_are_named_until_they_are_empty() -> None:
    book = SlotBook()
    book.replace([slot("a", {"s1": 2}), slot("b", {"s1": 1}), slot("c", {"s1": 1})])
    book.occupy("a", "s1")
    book.occupy("b", "s1")
    assert book.replace([slot("b", {"s1": 1}, SlotState.CORDONED)]) == ["a", "b"]
    assert not book.is_planned("a")
    assert book.is_planned("b")
    assert not book.is_open("b")
    book.vacate("a", "s1")
    assert book.replace([slot("b", {"s1": 1}, SlotState.CORDONED)]) == ["b"]
    with pytest.raises(ValueError, match="no s1 to give back"):
        book.vacate("a", "s1")


@dataclass(frozen=True)
class Place:
    slot: str
    shape: str


class TheSlotBook(RuleBasedStateMachine):
    """Whatever happens, free places are real: pattern minus taken minus reserved, never more."""

    @initialize()
    def begin(self) -> None:
        self.book = SlotBook()
        self.plan: dict[str, Slot] = {}
        self.used: list[Place] = []
        self.reserved: list[Place] = []

    @rule(
        plan=st.dictionaries(
            st.sampled_from(NAMES),
            st.tuples(
                st.dictionaries(st.sampled_from(SHAPES), st.integers(0, 3), max_size=3),
                st.sampled_from(list(SlotState)),
                st.sampled_from([NOW - 5, NOW + 30, NOW + 90]),
            ),
            max_size=4,
        )
    )
    def new_plan(self, plan: dict[str, tuple[dict[str, int], SlotState, float]]) -> None:
        self.plan = {name: slot(name, *parts) for name, parts in plan.items()}
        closed = self.book.replace(self.plan.values())
        in_use = {place.slot for place in self.used + self.reserved}
        for name in in_use:
            is_open = name in self.plan and self.plan[name].state is not SlotState.CORDONED
            assert (name in closed) == (not is_open)

    @rule(shape=st.sampled_from(SHAPES))
    def take(self, shape: str) -> None:
        before = self.free(shape)
        found = self.book.take(shape, NOW + 60)
        assert (found is not None) == (before > 0)
        if found is not None:
            self.used.append(Place(found, shape))
            here = sum(p == Place(found, shape) for p in self.used + self.reserved)
            assert here <= self.plan[found].places[shape]
            assert self.plan[found].state is not SlotState.CORDONED

    @rule(name=st.sampled_from(NAMES), shape=st.sampled_from(SHAPES))
    def adopt(self, name: str, shape: str) -> None:
        self.book.occupy(name, shape)
        self.used.append(Place(name, shape))

    @rule(name=st.sampled_from(NAMES), shape=st.sampled_from(SHAPES))
    def reserve(self, name: str, shape: str) -> None:
        self.book.reserve(name, shape)
        self.reserved.append(Place(name, shape))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def vacate(self, data: st.DataObject) -> None:
        place = self.used.pop(data.draw(st.integers(0, len(self.used) - 1)))
        self.book.vacate(place.slot, place.shape)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def unreserve(self, data: st.DataObject) -> None:
        place = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        self.book.unreserve(place.slot, place.shape)

    def free(self, shape: str) -> int:
        """The same by counting everything afresh."""
        total = 0
        for name, planned in self.plan.items():
            taken = {
                key: sum(p == Place(name, key) for p in self.used + self.reserved) for key in SHAPES
            }
            if planned.state is SlotState.CORDONED or any(
                count > planned.places.get(key, 0) for key, count in taken.items()
            ):
                continue
            if planned.state is SlotState.READY or planned.ready_at <= NOW + 60:
                total += planned.places.get(shape, 0) - taken[shape]
        return total

    @invariant()
    def credit_is_what_there_is(self) -> None:
        if hasattr(self, "book"):
            for shape in SHAPES:
                assert self.book.free(shape, NOW + 60) == self.free(shape)


TestTheSlotBook = TheSlotBook.TestCase
TestTheSlotBook.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# ---------------------------------------------------------------- numbers of slices
def test_slices_are_settled_from_below() -> None:
    numbers = Sequences(60.0)
    assert [numbers.note(1, seq, 0.0) for seq in (0, 1, 2)] == [True, True, True]
    numbers.settle(1, 2)
    numbers.settle(1, 0)
    assert numbers.settled_below(0.0) == 1
    numbers.settle(1, 1)
    assert numbers.settled_below(0.0) == 3


def test_a_missing_number_is_waited_for_then_given_up() -> None:
    numbers = Sequences(60.0)
    for seq in (0, 1, 3):
        numbers.note(1, seq, 10.0)
        numbers.settle(1, seq)
    assert numbers.settled_below(60.0) == 2
    assert numbers.settled_below(70.0) == 4
    assert not numbers.note(1, 2, 71.0)  # given up: it may be judged lost already


def test_a_number_that_comes_late_but_in_time_counts() -> None:
    numbers = Sequences(60.0)
    assert numbers.note(1, 5, 0.0)
    assert numbers.note(1, 4, 30.0)
    assert not numbers.note(1, 4, 31.0)
    numbers.settle(1, 5)
    assert numbers.settled_below(95.0) == 4  # 4 is not settled; what is below was given up
    numbers.settle(1, 4)
    assert numbers.settled_below(95.0) == 6


def test_nothing_is_settled_while_an_older_epoch_is_open() -> None:
    numbers = Sequences(0.0)
    assert numbers.note(1, 7, 0.0)
    assert numbers.note(2, 0, 0.0)
    assert not numbers.note(1, 8, 0.0)
    numbers.settle(2, 0)
    assert numbers.settled_below(0.0) == 0
    numbers.settle(1, 7)
    assert numbers.settled_below(0.0) == 1


@given(st.permutations(list(range(8))), st.data())
def test_in_any_order_each_counts_once_and_all_are_settled_in_the_end(
    order: list[int], data: st.DataObject
) -> None:
    numbers = Sequences(60.0)
    below = 0
    acked: list[int] = []
    for seq in order:
        assert numbers.note(1, seq, 0.0)
        assert not numbers.note(1, seq, 0.0)
        if data.draw(st.booleans()):
            numbers.settle(1, seq)
            acked.append(seq)
        now_below = numbers.settled_below(0.0)
        assert below <= now_below
        assert all(number in acked for number in range(now_below))
        below = now_below
    for seq in order:
        numbers.settle(1, seq)
    assert numbers.settled_below(0.0) == 8


# ---------------------------------------------------------------- cancels
def a_cancel(
    job: str, ranges: list[tuple[int, int]] | None = None, upto: int = 9, until: float = 100.0
) -> CancelDocument:
    return CancelDocument(job_id=job, ranges=ranges, attempts_upto=upto, expires_at=until)


def test_a_cancel_covers_its_ranges_and_attempts_until_it_expires() -> None:
    memory = CancelMemory(10)
    memory.add("k", a_cancel("job", [(2, 4)], upto=3))
    assert memory.covers(AttemptKey("job", 3, 3), 0.0)
    assert not memory.covers(AttemptKey("job", 4, 3), 0.0)
    assert not memory.covers(AttemptKey("job", 3, 4), 0.0)
    assert not memory.covers(AttemptKey("other", 3, 3), 0.0)
    assert not memory.covers(AttemptKey("job", 3, 3), 100.0)


def test_the_memory_is_bounded_and_drops_the_oldest() -> None:
    memory = CancelMemory(2)
    for number in range(4):
        memory.add(f"k{number}", a_cancel(f"job{number}"))
    assert memory.due(0.0) == ["k0", "k1"]
    for key in memory.due(200.0):
        memory.forget(key)
    assert len(memory) == 0
    assert not memory.covers(AttemptKey("job3", 0, 1), 0.0)


def test_equal_cancels_share_a_document() -> None:
    one = SliceCancel(cluster="a", epoch=1, job_id="job", ranges=[(0, 5)])
    two = SliceCancel(cluster="a", epoch=2, job_id="job", ranges=[(0, 5)])
    other = SliceCancel(cluster="a", epoch=1, job_id="job")
    keys = [document_key("cancel", cancel_text(item)) for item in (one, two, other)]
    assert keys[0] == keys[1] != keys[2]
