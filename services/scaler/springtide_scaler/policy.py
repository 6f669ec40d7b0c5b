"""Decisions of the scaler, pure: the plan, what to release, which order became which machine.

The planner is first-fit decreasing behind the interface of `plan`. It answers with patterns (places
per shape for each node), never with counts of nodes, so that the submitter knows what goes where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from springtide_scaler.model import (
    Backoff,
    Machines,
    PlanDecision,
    PlanGroup,
    PlanNode,
    Purchase,
    ReleaseRecord,
    ReleaseStep,
    SlotPattern,
    SlotRecord,
    VacateRecord,
    VacateTurn,
)
from springtide_shared.errors import Reason
from springtide_shared.messages.cluster import ShapeDemand, SlotState
from springtide_shared.messages.shape import Shape
from springtide_shared.ports.cluster import Instance, InstanceState, NodeGroupView, NodeView
from springtide_shared.units import Resources, format_bytes, format_cpu

_NO_PRICE: Final = 1e-9
"""Stands for a price of 0, so that prices can be compared by ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Settings of the policies; see `ScalerConfig`. Times in seconds."""

    worth_factor: float = 3.0
    release_seconds: float = 90.0
    """From the last task's end to the machine's, paid for nothing."""
    max_launch: int = 100
    max_releasing: int = 500
    idle_seconds: float = 60.0
    settle_seconds: float = 2.0
    join_limit_seconds: float = 600.0
    order_grace_seconds: float = 15.0
    orphan_seconds: float = 30.0
    backoff_seconds: float = 60.0
    max_backoff_seconds: float = 900.0


# ---- the plan ---------------------------------------------------------------------------------
def plan(
    demand: Sequence[ShapeDemand],
    nodes: Sequence[PlanNode],
    groups: Sequence[PlanGroup],
    now: float,
    rules: Rules,
    *,
    hold: str = "",
) -> PlanDecision:
    """Places per shape for every slot, and what to buy.

    Existing nodes come first: a slot keeps a place for everything that runs there, then takes
    wanted work, fullest node first, so that others run empty. Then nodes are bought for what is
    left. Last, rooms of ready nodes in use are offered to all wanted shapes at price 0.

    Args:
        hold: why nothing may be bought and no wish counts (the demand has expired); what runs
            keeps its place, and its shapes are offered the free room.
    """
    shapes = {item.shape.key: item.shape for item in demand}
    order = _largest_first(
        shapes, [*(n.allocatable for n in nodes), *(g.allocatable for g in groups)]
    )
    running: dict[str, int] = dict.fromkeys(order, 0)
    for node in nodes:
        for key, count in node.running.items():
            if key in running:
                running[key] += count
    wanted = {item.shape.key: 0 if hold else max(0, item.wanted) for item in demand}
    unmet = {key: max(0, wanted[key] - running[key]) for key in order}

    rooms = {node.slot: node.allocatable - node.occupied for node in nodes}
    places = {node.slot: dict(node.running) for node in nodes}
    needed = {node.slot: bool(node.running) for node in nodes}
    open_nodes = sorted((n for n in nodes if n.state is not SlotState.CORDONED), key=_fullest_first)
    # First what the last plan promised, since the submitter may have assigned tasks to it.
    claims = [
        (key, node, node.before.get(key, 0) - node.running.get(key, 0))
        for node in open_nodes
        for key in order
    ]
    claims += [(key, node, unmet[key]) for key in order for node in open_nodes]
    for key, node, claim in claims:
        if claim > 0 and unmet[key] > 0:
            resources = shapes[key].resources
            count = min(claim, unmet[key], resources.times_in(rooms[node.slot]))
            if count > 0:
                _place(places[node.slot], rooms, node.slot, key, resources, count)
                unmet[key] -= count
                needed[node.slot] = True

    decisions: list[str] = [f"hold: {hold}"] if hold else []
    purchases: tuple[Purchase, ...] = ()
    if not hold and any(unmet.values()):
        limits = {
            item.shape.key: _worth(
                item,
                existing=wanted[item.shape.key] - unmet[item.shape.key],
                running=running[item.shape.key],
            )
            for item in demand
        }
        usable = [g for g in groups if g.room > 0 and not _is_blocked(g, now)]
        purchases, unmet = _buy(shapes, order, unmet, limits, usable, rules)
        decisions += _say_purchases(purchases)
        decisions += _say_unmet(shapes, unmet, groups, now)

    offered = [key for key in order if wanted[key] > 0 or running[key] > 0]
    for node in open_nodes:
        if node.state is SlotState.READY and needed[node.slot]:
            _offer(places[node.slot], rooms, node.slot, offered, shapes)

    return PlanDecision(
        patterns=tuple(
            SlotPattern(
                slot=node.slot,
                places={key: places[node.slot][key] for key in sorted(places[node.slot])},
                is_needed=needed[node.slot],
            )
            for node in nodes
        ),
        purchases=purchases,
        unmet=unmet,
        decisions=tuple(decisions),
    )


def is_urgent(
    before: Sequence[ShapeDemand], hold_before: str, now: Sequence[ShapeDemand], hold: str
) -> bool:
    """Whether a changed demand is worth a round of its own: more is wanted, or may be bought again.

    That less is wanted, or that backlog runs now, keeps until the next round: nodes are released
    only after a while anyway.
    """
    wanted = {item.shape.key: item.wanted for item in before}
    return hold != hold_before or any(item.wanted > wanted.get(item.shape.key, -1) for item in now)


def most_places(shape: Shape, groups: Sequence[NodeGroupView]) -> int:
    """How many tasks of a shape fit if every group is grown to its maximum."""
    return sum(
        max(group.size, group.max_size) * shape.resources.times_in(group.allocatable)
        for group in groups
    )


def _largest_first(shapes: Mapping[str, Shape], rooms: Sequence[Resources]) -> list[str]:
    """Shape keys by their dominant share of the largest room, falling."""
    cpu = max([1, *(room.cpu_millis for room in rooms)])
    memory = max([1, *(room.memory_bytes for room in rooms)])
    scratch = max([1, *(room.scratch_bytes for room in rooms)])

    def share(shape: Shape) -> float:
        return max(
            shape.cpu_millis / cpu, shape.memory_bytes / memory, shape.scratch_bytes / scratch
        )

    return sorted(shapes, key=lambda key: (-share(shapes[key]), key))


def _fullest_first(node: PlanNode) -> tuple[bool, float, str]:
    """Ready before launching; then by share of CPU or memory in use, falling; then the oldest."""
    used = max(
        node.occupied.cpu_millis / max(1, node.allocatable.cpu_millis),
        node.occupied.memory_bytes / max(1, node.allocatable.memory_bytes),
    )
    return node.state is not SlotState.READY, -used, node.slot


def _place(
    pattern: dict[str, int],
    rooms: dict[str, Resources],
    slot: str,
    key: str,
    resources: Resources,
    count: int,
) -> None:
    pattern[key] = pattern.get(key, 0) + count
    rooms[slot] -= resources * count


def _offer(
    pattern: dict[str, int],
    rooms: dict[str, Resources],
    slot: str,
    order: Sequence[str],
    shapes: Mapping[str, Shape],
) -> None:
    """Hand out what room is left, one place of each shape in turn, so that all fit together."""
    left = list(order)
    while left:
        left = [key for key in left if shapes[key].resources.times_in(rooms[slot]) > 0]
        if len(left) == 1:
            resources = shapes[left[0]].resources
            _place(pattern, rooms, slot, left[0], resources, resources.times_in(rooms[slot]))
            return
        for key in left:
            if shapes[key].resources.times_in(rooms[slot]) > 0:
                _place(pattern, rooms, slot, key, shapes[key].resources, 1)


def _is_blocked(group: PlanGroup, now: float) -> bool:
    return group.blocked_until is not None and now < group.blocked_until


@dataclass(frozen=True, slots=True)
class _Worth:
    """How many places of a shape the work can pay for."""

    work_seconds: float | None
    """None: unknown, every place is bought."""
    existing: int
    """Places that exist or boot already."""
    running: int
    """Of those, the ones that are taken."""

    def more(self, group: PlanGroup, rules: Rules) -> int | None:
        """Places that may be added on nodes of `group`; None: any number."""
        if self.work_seconds is None:
            return None
        least = rules.worth_factor * (group.boot_seconds + rules.release_seconds)
        if least <= 0:
            return None
        # Work that is too short to pay for any node must run all the same, also if what runs now
        # lasts longer than thought: one place, unless one is free or booting.
        least_more = 0 if self.existing > self.running else 1
        return max(int(self.work_seconds // least) - self.existing, least_more)


def _worth(item: ShapeDemand, *, existing: int, running: int) -> _Worth:
    """All work of a shape: the backlog in full, what runs by half."""
    if item.expected_seconds is None:
        return _Worth(None, existing, running)
    backlog = max(item.backlog, item.wanted - item.running)
    return _Worth((backlog + item.running / 2) * item.expected_seconds, existing, running)


@dataclass(frozen=True, slots=True)
class _Choice:
    group: PlanGroup
    places: dict[str, int]

    @property
    def price(self) -> float:
        return max(self.group.price_per_hour, _NO_PRICE)


def _buy(
    shapes: Mapping[str, Shape],
    order: Sequence[str],
    unmet: Mapping[str, int],
    limits: Mapping[str, _Worth],
    groups: Sequence[PlanGroup],
    rules: Rules,
) -> tuple[tuple[Purchase, ...], dict[str, int]]:
    """Greedy by price per value, with an eye on the rest that fits one node."""
    market = _Market(shapes, order, limits, tuple(groups), rules)
    state = _Basket(
        dict(unmet), dict.fromkeys(order, 0), {g.name: g.room for g in groups}, rules.max_launch
    )
    purchases: list[Purchase] = []
    while (found := market.best(state)) is not None:
        choice, count = found
        state.take(choice, count)
        purchases.append(Purchase(group=choice.group.name, count=count, places=choice.places))
    return tuple(purchases), state.unmet


@dataclass(slots=True)
class _Basket:
    """What is still wanted, what was bought, and how much more may be."""

    unmet: dict[str, int]
    bought: dict[str, int]
    rooms: dict[str, int]
    budget: int

    def copy(self) -> _Basket:
        return _Basket(dict(self.unmet), dict(self.bought), dict(self.rooms), self.budget)

    def take(self, choice: _Choice, count: int) -> None:
        self.rooms[choice.group.name] -= count
        self.budget -= count
        for key, number in choice.places.items():
            self.unmet[key] -= number * count
            self.bought[key] += number * count


@dataclass(frozen=True, slots=True)
class _Market:
    """What the groups could hold of what is wanted."""

    shapes: Mapping[str, Shape]
    order: Sequence[str]
    limits: Mapping[str, _Worth]
    groups: tuple[PlanGroup, ...]
    rules: Rules

    def best(self, basket: _Basket) -> tuple[_Choice, int] | None:
        """The next purchase: a choice, and how often in a row."""
        choices = self._choices(basket)
        if not choices:
            return None
        # One node that holds all the rest, if that is no dearer than going on piece by piece.
        rest = self._rest(choices, basket)
        whole = [
            choice
            for choice in choices
            if all(choice.places.get(key, 0) >= count for key, count in rest.items())
        ]
        if whole:
            single = min(whole, key=lambda choice: (choice.price, choice.group.name))
            if single.price <= self._cost_piecewise(basket):
                return single, 1
        choice = self._by_value(choices, basket)
        repeats = [self._may(choice.group, key, basket) // n for key, n in choice.places.items()]
        return choice, max(1, min([*repeats, basket.rooms[choice.group.name], basket.budget]))

    def _cost_piecewise(self, basket: _Basket) -> float:
        trial, cost = basket.copy(), 0.0
        while choices := self._choices(trial):
            choice = self._by_value(choices, trial)
            trial.take(choice, 1)
            cost += choice.price
        return cost

    def _choices(self, basket: _Basket) -> list[_Choice]:
        """One node of each group that has room, filled first-fit decreasing."""
        choices = []
        for group in self.groups if basket.budget > 0 else ():
            if basket.rooms[group.name] <= 0:
                continue
            room, pattern = group.allocatable, dict[str, int]()
            for key in self.order:
                resources = self.shapes[key].resources
                count = min(self._may(group, key, basket), resources.times_in(room))
                if count > 0:
                    pattern[key] = count
                    room -= resources * count
            if pattern:
                choices.append(_Choice(group, pattern))
        return choices

    def _may(self, group: PlanGroup, key: str, basket: _Basket) -> int:
        """Places of a shape that are wanted and worth buying on nodes of a group."""
        more = self.limits[key].more(group, self.rules)
        unmet = basket.unmet[key]
        return unmet if more is None else max(0, min(unmet, more - basket.bought[key]))

    def _rest(self, choices: Sequence[_Choice], basket: _Basket) -> dict[str, int]:
        """All that is wanted and that some node on offer could hold."""
        return {
            key: max(self._may(choice.group, key, basket) for choice in choices)
            for key in self.order
            if any(key in choice.places for choice in choices)
        }

    def _by_value(self, choices: Sequence[_Choice], basket: _Basket) -> _Choice:
        """Lowest price per value; a place's value is its cheapest share of a full node.

        Left out are nodes that cost more than one node of its own for each task on them; the
        cheapest node for the largest shape always remains.
        """
        share: dict[str, float] = {}
        alone: dict[str, float] = {}
        for choice in choices:
            for key in self.order:
                times = self.shapes[key].resources.times_in(choice.group.allocatable)
                if times > 0 and self._may(choice.group, key, basket) > 0:
                    share[key] = min(share.get(key, choice.price), choice.price / times)
                    alone[key] = min(alone.get(key, choice.price), choice.price)
        sound = [
            choice
            for choice in choices
            if choice.price <= sum(alone[key] * n for key, n in choice.places.items()) * (1 + 1e-9)
        ]

        def price_per_value(choice: _Choice) -> tuple[float, float, str]:
            value = sum(share[key] * count for key, count in choice.places.items())
            # Rounded, so that equal ratios tie in spite of the last digit of a float.
            return round(choice.price / value, 9), choice.price, choice.group.name

        return min(sound, key=price_per_value)


def _say_purchases(purchases: Sequence[Purchase]) -> list[str]:
    return [
        f"buy: {item.count} x {item.group} with {sum(item.places.values())} places each"
        for item in purchases
    ]


def _say_unmet(
    shapes: Mapping[str, Shape], unmet: Mapping[str, int], groups: Sequence[PlanGroup], now: float
) -> list[str]:
    said = []
    for key in sorted(key for key, count in unmet.items() if count):
        shape = shapes[key]
        what = (
            f"{unmet[key]} places of {format_cpu(shape.cpu_millis)} cores,"
            f" {format_bytes(shape.memory_bytes)}"
        )
        able = [group for group in groups if shape.resources.times_in(group.allocatable) > 0]
        if not able:
            said.append(f"{Reason.UNSCHEDULABLE}: no group holds {what}")
        elif all(group.room <= 0 for group in able):
            said.append(f"{Reason.LIMIT_REACHED}: all groups are at their maximum, for {what}")
        elif all(group.room <= 0 or _is_blocked(group, now) for group in able):
            said.append(f"{Reason.CAPACITY}: all groups are backed off, for {what}")
        else:
            said.append(f"hold: too little work, or too many launches in one round, for {what}")
    return said


# ---- release ----------------------------------------------------------------------------------
def idle_clocks(before: Mapping[str, float], idle: Sequence[str], now: float) -> dict[str, float]:
    """Since when each idle machine has been idle without a break; by instance id."""
    return {instance_id: before.get(instance_id, now) for instance_id in idle}


def due_for_release(
    idle_since: Mapping[str, float],
    vacated: Sequence[str],
    in_flight: int,
    now: float,
    rules: Rules,
) -> list[tuple[str, str]]:
    """(Instance id, reason) of machines to release now, those idle the longest first.

    `vacated`: empty machines that somebody wishes to be gone; they need not wait. `in_flight`:
    releases that are under way already.
    """
    due = [(instance_id, "vacated") for instance_id in vacated]
    due += [
        (instance_id, "idle")
        for instance_id, since in sorted(idle_since.items(), key=lambda item: (item[1], item[0]))
        if now - since >= rules.idle_seconds and instance_id not in vacated
    ]
    return due[: max(0, rules.max_releasing - in_flight)]


def is_settled(announced_at: float | None, now: float, rules: Rules) -> bool:
    """Whether a plan without the node has been out long enough for a fresh read to be trusted."""
    return announced_at is not None and now - announced_at >= rules.settle_seconds


def release_of(
    record: SlotRecord, group: NodeGroupView, step: ReleaseStep, reason: str
) -> ReleaseRecord:
    """What must be known of a machine until it is gone.

    Raises:
        ValueError: the slot has no machine yet.
    """
    if record.instance is None:
        raise ValueError(f"slot {record.slot} has no machine")
    node = record.node
    return ReleaseRecord(
        instance_id=record.instance.instance_id,
        group=record.group,
        slot=record.slot,
        node=node.name if node else "",
        node_uid=node.uid if node else "",
        step=step,
        reason=reason,
        was_cordoned=node.cordoned if node else False,
        price_per_hour=group.price_per_hour,
        cpu_millis=group.allocatable.cpu_millis,
        memory_bytes=group.allocatable.memory_bytes,
    )


# ---- groups that fail -------------------------------------------------------------------------
def backed_off(
    before: Backoff | None, reason: Reason, now: float, rules: Rules, pause: float | None = None
) -> Backoff:
    """A group's pause after another failure; `pause`: as the other side named it."""
    failures = before.failures + 1 if before is not None else 1
    grown = min(rules.max_backoff_seconds, rules.backoff_seconds * 2.0 ** min(failures - 1, 20))
    return Backoff(until=now + max(grown, pause or 0.0), reason=reason, failures=failures)


def join_limit(group: NodeGroupView, rules: Rules) -> float:
    """Seconds that a machine of a group may take to become a node."""
    return max(rules.join_limit_seconds, 3 * group.boot_seconds)


# ---- what takes too long ----------------------------------------------------------------------
def is_overdue(
    record: SlotRecord, group: NodeGroupView, began: float, now: float, rules: Rules
) -> bool:
    """Whether an order was never delivered, or a machine never became a node.

    Args:
        began: start of the scaler's life: it has seen no machine wait for longer than since then.
    """
    if record.has_joined:
        return False
    since = record.ordered_at
    if record.instance is not None:
        since = max(record.instance.launched_at, began)
    return now - since >= join_limit(group, rules)


def due_orphans(
    before: Mapping[str, float], orphans: Sequence[NodeView], now: float, rules: Rules
) -> tuple[dict[str, float], list[NodeView]]:
    """Since when each node object has had no machine, by uid; and those to be removed now."""
    since = {node.uid: before.get(node.uid, now) for node in orphans}
    return since, [node for node in orphans if now - since[node.uid] >= rules.orphan_seconds]


def vacate_turn(
    record: VacateRecord,
    node: NodeView | None,
    releases: Mapping[str, ReleaseRecord],
    now: float,
) -> VacateTurn:
    """What is to be done about a node that is kept closed on somebody's wish.

    Args:
        node: the node of that name, if there is one.
        releases: machines on their way out, by instance id.
    """
    if node is None or node.uid != record.node_uid:
        is_leaving = any(item.node_uid == record.node_uid for item in releases.values())
        return VacateTurn.KEEP if is_leaving else VacateTurn.NODE_GONE
    if node.provider_id in releases:
        return VacateTurn.KEEP  # its release tells how it ends
    if now >= record.valid_until:
        return VacateTurn.EXPIRED
    return VacateTurn.KEEP if node.cordoned else VacateTurn.CLOSE


# ---- which order became which machine ---------------------------------------------------------
def match_machines(
    records: Sequence[SlotRecord],
    nodes: Sequence[NodeView],
    groups: Sequence[NodeGroupView],
    releasing: Mapping[str, ReleaseRecord],
    now: float,
    rules: Rules,
    fresh_slot: Callable[[], str],
) -> Machines:
    """Bring slots, machines and nodes together.

    A node's slot label decides; machines without one go to their group's oldest open orders; what
    is found without an order (a new life of the scaler) gets a fresh slot. Orders that the cloud
    no longer owes are forgotten once its answers cannot lag any more.
    """
    node_of = {node.provider_id: node for node in nodes if node.provider_id}
    found: list[SlotRecord] = []
    lost: list[SlotRecord] = []
    orphans: list[NodeView] = []
    for group in groups:
        mine = [record for record in records if record.group == group.name]
        alive = {
            item.instance_id: item
            for item in sorted(group.instances, key=lambda i: (i.launched_at, i.instance_id))
            if item.state is not InstanceState.TERMINATING
        }
        known = {r.instance.instance_id: r for r in mine if r.instance is not None}
        lost += [
            record
            for instance_id, record in known.items()
            if instance_id not in alive and instance_id not in releasing
        ]
        open_orders = sorted(
            (record for record in mine if record.instance is None),
            key=lambda record: (record.ordered_at, record.slot),
        )
        for instance_id, instance in alive.items():
            record = known.get(instance_id)
            node = node_of.get(instance_id)
            if record is None:
                record = _claim(open_orders, node, group.name, now, fresh_slot)
            slot = node.slot if node is not None and node.slot else record.slot
            found.append(replace(record, slot=slot, instance=instance, node=node))
        owed = max(0, group.size - len(alive))
        found += [
            record
            for position, record in enumerate(open_orders)
            if position < owed or now - record.ordered_at < rules.order_grace_seconds
        ]
        found += [
            SlotRecord(slot=fresh_slot(), group=group.name, ordered_at=now)
            for _ in range(owed - len(open_orders))
        ]
        machines = {item.instance_id for item in group.instances}
        orphans += [
            node
            for node in nodes
            if node.group == group.name
            and node.provider_id not in machines
            and node.provider_id not in releasing
        ]
    return Machines(slots=tuple(found), lost=tuple(lost), orphans=tuple(orphans))


def _claim(
    open_orders: list[SlotRecord],
    node: NodeView | None,
    group: str,
    now: float,
    fresh_slot: Callable[[], str],
) -> SlotRecord:
    """The order that a machine fulfils; a labelled node brings its slot along."""
    if node is not None and node.slot:
        same = [record for record in open_orders if record.slot == node.slot]
        if not same:
            return SlotRecord(slot=node.slot, group=group, ordered_at=now)
        open_orders.remove(same[0])
        return same[0]
    if open_orders:
        return open_orders.pop(0)
    return SlotRecord(slot=fresh_slot(), group=group, ordered_at=now)


def ready_at(record: SlotRecord, group: NodeGroupView) -> float:
    """When a slot is, or is expected to be, ready."""
    if record.node is not None and record.node.ready_at is not None:
        return record.node.ready_at
    instance: Instance | None = record.instance
    begun = instance.launched_at if instance is not None else record.ordered_at
    return begun + group.boot_seconds
