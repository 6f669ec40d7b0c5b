"""The slot book: which places the plan has, which are taken, which are held for a migration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from springtide_shared.messages.cluster import Slot, SlotState


@dataclass(slots=True)
class _Entry:
    """One slot. `plan` None: not in the newest plan (any more), but something is still in it."""

    plan: Slot | None = None
    used: dict[str, int] = field(default_factory=dict)
    reserved: dict[str, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.used and not self.reserved

    def taken(self, shape: str) -> int:
        return self.used.get(shape, 0) + self.reserved.get(shape, 0)

    def free(self) -> dict[str, int]:
        """Free places by shape.

        A pattern is only feasible as a whole: once any shape has more in the slot than the pattern
        says, no other may rely on its own part, so the slot offers nothing until the next plan
        speaks of what is there.
        """
        plan = self.plan
        if plan is None or plan.state is SlotState.CORDONED:
            return {}
        for counts in (self.used, self.reserved):
            for shape in counts:
                if self.taken(shape) > plan.places.get(shape, 0):
                    return {}
        return {
            shape: places - self.taken(shape)
            for shape, places in plan.places.items()
            if places > self.taken(shape)
        }


class SlotBook:
    """Places per slot and shape. All amounts are of attempts; shapes go by their keys.

    A place is taken from the moment an attempt is assigned to it until its pod has ended.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._slot_of_node: dict[str, str] = {}
        self._ready: dict[str, dict[str, int]] = {}
        """Shape → slot → free places, in slots that are Ready."""
        self._launching: dict[str, dict[str, int]] = {}
        self.shapes: tuple[str, ...] = ()
        """Shapes of the newest plan, sorted."""

    # ------------------------------------------------------------ the plan
    def replace(self, slots: Iterable[Slot]) -> list[str]:
        """Take a whole plan; returns the slots in use that take no new pod any more."""
        planned = {slot.slot: slot for slot in slots}
        changed: dict[str, Slot | None] = {}
        for name, entry in self._entries.items():
            if name not in planned and entry.plan is not None:
                changed[name] = entry.plan
                entry.plan = None
        for name, slot in planned.items():
            entry = self._entries.setdefault(name, _Entry())
            if entry.plan != slot:
                changed[name] = entry.plan
                entry.plan = slot
        self._slot_of_node = {slot.node: name for name, slot in planned.items() if slot.node}
        self.shapes = tuple(sorted({key for slot in planned.values() for key in slot.places}))
        for name, before in changed.items():
            for shape in before.places if before is not None else ():
                self._unindex(name, shape)
            self._index(name)
        closed = [name for name in self._entries if not self.is_open(name)]
        for name in closed:
            if self._entries[name].plan is None and self._entries[name].is_empty:
                del self._entries[name]
        return [name for name in closed if name in self._entries]

    def is_open(self, slot: str) -> bool:
        """Whether the slot is planned and takes new pods."""
        entry = self._entries.get(slot)
        return (
            entry is not None
            and entry.plan is not None
            and entry.plan.state is not SlotState.CORDONED
        )

    def is_planned(self, slot: str) -> bool:
        """Whether the newest plan has the slot at all."""
        entry = self._entries.get(slot)
        return entry is not None and entry.plan is not None

    def slot_of(self, node: str) -> str:
        """The slot that a node fills; empty if the plan names none."""
        return self._slot_of_node.get(node, "")

    # ------------------------------------------------------------ places
    def take(self, shape: str, due_by: float) -> str | None:
        """Take a free place for `shape`: in a Ready slot, else in one that is ready by `due_by`."""
        if ready := self._ready.get(shape):
            slot = next(iter(ready))
        else:
            due = [
                (self._ready_at(name), name)
                for name in self._launching.get(shape, ())
                if self._ready_at(name) <= due_by
            ]
            if not due:
                return None
            slot = min(due)[1]
        self.occupy(slot, shape)
        return slot

    def occupy(self, slot: str, shape: str) -> None:
        """Count one attempt of `shape` in `slot`, whether a place was free or not."""
        self._add(slot, shape, 1, is_reserved=False)

    def vacate(self, slot: str, shape: str) -> None:
        """One attempt of `shape` has left `slot`."""
        self._add(slot, shape, -1, is_reserved=False)

    def reserve(self, slot: str, shape: str) -> None:
        """Hold one place of `shape` in `slot` for a migration."""
        self._add(slot, shape, 1, is_reserved=True)

    def unreserve(self, slot: str, shape: str) -> None:
        """Give a held place back."""
        self._add(slot, shape, -1, is_reserved=True)

    def free(self, shape: str, due_by: float) -> int:
        """Unreserved free places of `shape` in Ready slots and in those ready by `due_by`."""
        return sum(self._ready.get(shape, {}).values()) + sum(
            free
            for name, free in self._launching.get(shape, {}).items()
            if self._ready_at(name) <= due_by
        )

    def free_at_all(self, due_by: float) -> int:
        """The same for all shapes together."""
        return sum(self.free(shape, due_by) for shape in self.shapes)

    def _ready_at(self, slot: str) -> float:
        plan = self._entries[slot].plan
        return float("inf") if plan is None else plan.ready_at

    def _add(self, slot: str, shape: str, change: int, *, is_reserved: bool) -> None:
        entry = self._entries.setdefault(slot, _Entry())
        counts = entry.reserved if is_reserved else entry.used
        count = counts.get(shape, 0) + change
        if count < 0:
            raise ValueError(f"slot {slot} has no {shape} to give back")
        if count:
            counts[shape] = count
        else:
            counts.pop(shape, None)
        if entry.plan is None and entry.is_empty:
            del self._entries[slot]
        self._index(slot)

    def _index(self, slot: str) -> None:
        """Note the slot's free places where `take` and `free` look."""
        entry = self._entries.get(slot)
        if entry is None or entry.plan is None:
            return
        free = entry.free()
        index = self._ready if entry.plan.state is SlotState.READY else self._launching
        for shape in entry.plan.places:
            count = free.get(shape, 0)
            if count:
                index.setdefault(shape, {})[slot] = count
            else:
                self._unindex(slot, shape)

    def _unindex(self, slot: str, shape: str) -> None:
        for index in (self._ready, self._launching):
            of_shape = index.get(shape)
            if of_shape is not None and of_shape.pop(slot, None) is not None and not of_shape:
                del index[shape]
