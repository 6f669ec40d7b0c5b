"""Pure decisions: which nodes to empty, and how a saga goes on after what happened.

The rule is the greedy one of the measured comparison: nodes in order of their used share; a node is
emptied if the life it is expected to have left costs more than the moves and the life they add to
the targets. Without purchases of smaller nodes, which is a wish to the scaler of a later version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from msgspec.structs import replace

from springtide_rescheduler.config import ReschedulerConfig
from springtide_rescheduler.lives import UNKNOWN, Floats
from springtide_rescheduler.model import (
    Answered,
    AttemptEnded,
    AttemptRuns,
    AttemptVanished,
    Cancelling,
    Choice,
    Closed,
    Command,
    Cordoning,
    Emptying,
    Ending,
    Event,
    Gathering,
    Gone,
    Left,
    ManifestVerified,
    Move,
    MoveCosts,
    Moved,
    MoveState,
    Moving,
    NodeAnswered,
    NodeClosed,
    NodeFilled,
    Past,
    Phase,
    Picture,
    Releasing,
    Reserved,
    Reserving,
    Restoring,
    Saving,
    Stayed,
    TaskKey,
    TaskMove,
    TimePassed,
    Undoing,
    VacateSaga,
    Why,
)
from springtide_shared.errors import Reason
from springtide_shared.messages.attempts import AttemptState, LiveAttempt
from springtide_shared.messages.cluster import CapacityNode
from springtide_shared.messages.migration import (
    Migrate,
    MigrateAction,
    MigrationStep,
    Vacate,
    VacateAction,
    VacateStep,
)
from springtide_shared.units import Resources

_GRID_POINTS: Final = 60
_HOUR: Final = 3_600.0


# ================================================================ which nodes to empty
@dataclass(slots=True)
class _Node:
    """One open node while a decision is made."""

    seen: CapacityNode
    price: float
    """Per second."""
    attempts: list[LiveAttempt]
    used: Resources
    room: Resources
    empty_by: Floats | None = None
    """Chance that it is empty by each point of the grid; None: see `_Decision.empty_by`."""
    is_target: bool = True
    receives: bool = False

    @property
    def name(self) -> str:
        return self.seen.node

    @property
    def used_share(self) -> float:
        return max(
            self.used.cpu_millis / max(1, self.seen.cpu_millis),
            self.used.memory_bytes / max(1, self.seen.memory_bytes),
        )


@dataclass(slots=True)
class _Decision:
    """The picture in the form that the rule works on."""

    picture: Picture
    now: float
    rules: ReschedulerConfig
    grid: Floats = field(init=False)
    step: float = field(init=False)
    nodes: dict[str, _Node] = field(init=False)
    expected: list[Resources] = field(init=False)
    """Shapes of tasks that are about to be placed somewhere."""
    in_sagas: dict[TaskKey, None] = field(init=False)

    def __post_init__(self) -> None:
        self.step = self.rules.horizon_seconds / _GRID_POINTS
        self.grid = np.asarray((np.arange(_GRID_POINTS) + 0.5) * self.step, dtype=np.float64)
        self.in_sagas = {move.task: None for saga in self.picture.sagas for move in saga.moves}
        self.expected = [
            Resources(cpu_millis=one.shape.cpu_millis, memory_bytes=one.shape.memory_bytes)
            for one in self.picture.demand
            if one.backlog > 0
        ] + [
            _size(attempt)
            for attempt in self.picture.attempts
            if not attempt.node and not attempt.slot
        ]
        self.nodes = self._open_nodes()

    def _open_nodes(self) -> dict[str, _Node]:
        picture = self.picture
        on_node: dict[str, list[LiveAttempt]] = defaultdict(list)
        in_slot: dict[str, list[LiveAttempt]] = defaultdict(list)
        for attempt in sorted(picture.attempts, key=lambda one: one.key):
            (on_node[attempt.node] if attempt.node else in_slot[attempt.slot]).append(attempt)
        coming: dict[str, Resources] = defaultdict(Resources)
        sources: dict[str, None] = {}
        for saga in picture.sagas:
            sources[saga.node] = None
            for move in saga.moves:
                if isinstance(move.state, Reserving | Reserved | Saving | Ending | Restoring):
                    size = Resources(cpu_millis=move.cpu_millis, memory_bytes=move.memory_bytes)
                    coming[move.target_node] += size
        is_priced = any(node.price_per_hour > 0 for node in picture.nodes)
        nodes: dict[str, _Node] = {}
        for seen in sorted(picture.nodes, key=lambda one: one.node):
            if seen.cordoned or seen.node in sources:
                continue
            attempts = on_node[seen.node] + (in_slot[seen.slot] if seen.slot else [])
            used = sum((_size(one) for one in attempts), Resources())
            used = self._with_foreign(seen, used) + coming.get(seen.node, Resources())
            nodes[seen.node] = _Node(
                seen=seen,
                # Without prices, cores stand for them: the order of nodes is the same.
                price=(seen.price_per_hour if is_priced else seen.cpu_millis / 1000) / _HOUR,
                attempts=attempts,
                used=used,
                room=Resources(cpu_millis=seen.cpu_millis, memory_bytes=seen.memory_bytes) - used,
                receives=seen.node in coming,
            )
        return nodes

    def _with_foreign(self, seen: CapacityNode, own: Resources) -> Resources:
        """What is requested on a node, foreign pods included where usage tells of them."""
        ratio = self.picture.requested_ratios.get(seen.node, 0.0)
        return replace_cpu(own, max(own.cpu_millis, round(ratio * seen.cpu_millis)))

    def past(self, attempt: LiveAttempt) -> Past:
        return self.picture.past.get((attempt.job_id, attempt.index), Past(0, 0.0))

    def age(self, attempt: LiveAttempt) -> float:
        """Run time of the task, what its earlier attempts saved included."""
        if attempt.started_at is None:
            return 0.0
        return max(0.0, self.now - attempt.started_at) + self.past(attempt).progress_seconds

    def ends_within(self, attempt: LiveAttempt, delay: float = 0.0) -> Floats:
        lives = self.picture.lives.get(attempt.job_id, UNKNOWN)
        return lives.ends_within(self.age(attempt), self.grid, delay)

    def costs(self, attempt: LiveAttempt) -> MoveCosts:
        return self.picture.costs.get(
            attempt.job_id,
            MoveCosts(
                save_seconds=self.rules.save_seconds, resume_seconds=self.rules.resume_seconds
            ),
        )

    def dead_seconds(self, attempt: LiveAttempt) -> float:
        """For how long a move computes nothing."""
        costs = self.costs(attempt)
        return costs.save_seconds + self.rules.stop_seconds + costs.resume_seconds

    def burn(self, attempt: LiveAttempt, node: _Node) -> float:
        """Price of one move: rooms held while nothing is computed, and the delay."""
        share = attempt.cpu_millis / max(1, node.seen.cpu_millis)
        weight = 1.0 + self.rules.delay_weight
        return share * node.price * self.dead_seconds(attempt) * weight

    def own_price(self, attempt: LiveAttempt) -> float:
        """Price per second of the smallest node that holds the task: it can move there again."""
        size = _size(attempt)
        is_priced = any(node.price_per_hour > 0 for node in self.picture.nodes)
        offers = [
            group.price_per_hour if is_priced else group.cpu_millis / 1000
            for group in self.picture.groups
            if size.fits(Resources(cpu_millis=group.cpu_millis, memory_bytes=group.memory_bytes))
        ] + [
            node.price * _HOUR
            for node in self.nodes.values()
            if size.fits(
                Resources(cpu_millis=node.seen.cpu_millis, memory_bytes=node.seen.memory_bytes)
            )
        ]
        return min(offers, default=0.0) / _HOUR

    def expects_tasks(self, node: _Node) -> bool:
        return any(size.fits(node.room) for size in self.expected)

    def empty_by(self, node: _Node) -> Floats:
        """Chance that a node is empty by each point of the grid; full ones are never asked."""
        if node.empty_by is None:
            chance = np.ones(_GRID_POINTS)
            for attempt in node.attempts:
                chance = chance * self.ends_within(attempt)
            if node.receives:
                chance = np.zeros(_GRID_POINTS)  # what comes was moved because it lives long
            node.empty_by = chance
        return node.empty_by

    def stay(self, node: _Node) -> float:
        """What leaving the node alone costs from the moment on at which it could be empty."""
        life = float((1.0 - self.empty_by(node)).sum() * self.step)
        save = max((self.costs(one).save_seconds for one in node.attempts), default=0.0)
        return node.price * (life - save - self.rules.stop_seconds)

    def why_not(self, node: _Node) -> Why | None:
        """The first reason for which the node is no source at all."""
        rules = self.rules
        if node.receives:
            return Why.RECEIVES
        if node.used_share >= rules.trigger_ratio:
            return Why.WELL_USED
        own = sum(one.cpu_millis for one in node.attempts)
        if node.used.cpu_millis - own > rules.foreign_ratio * node.seen.cpu_millis:
            return Why.FOREIGN
        used = self.picture.used_ratios.get(node.name)
        if used is not None and used > rules.busy_ratio * max(node.used_share, 0.05):
            return Why.BUSY
        if self.expects_tasks(node):
            return Why.EXPECTS_TASKS
        for attempt in node.attempts:
            if reason := self._immovable(attempt):
                return reason
        return None

    def _immovable(self, attempt: LiveAttempt) -> Why | None:
        rules = self.rules
        if (
            not attempt.checkpointable
            or attempt.state is not AttemptState.RUNNING
            or not attempt.node
            or not attempt.pod_uid
            or attempt.started_at is None
            or (attempt.job_id, attempt.index) in self.in_sagas
        ):
            return Why.NOT_MOVABLE
        if self.now - attempt.started_at < rules.least_age_seconds:
            return Why.TOO_FRESH
        past = self.past(attempt)
        if self.now < past.rest_until:
            return Why.RESTING
        return None


def choose(picture: Picture, now: float, rules: ReschedulerConfig) -> Choice:
    """The nodes to empty now, with targets for all their tasks, and why the others are left."""
    decision = _Decision(picture, now, rules)
    emptying: list[Emptying] = []
    left: list[Left] = []
    budget = picture.may_start
    candidates = [node for node in decision.nodes.values() if node.attempts]
    # Nodes that are used well are no sources, so what leaving them alone costs does not matter.
    candidates.sort(
        key=lambda one: (
            one.used_share,
            -decision.stay(one) if one.used_share < rules.trigger_ratio else 0.0,
            one.name,
        )
    )
    for node in candidates:
        why = decision.why_not(node)
        if why is None and len(node.attempts) > budget:
            why = Why.LIMIT
        if why is not None:
            left.append(Left(node.name, why))
            continue
        plan = _plan(decision, node)
        if isinstance(plan, Left):
            left.append(plan)
            continue
        emptying.append(plan)
        budget -= len(plan.moves)
    return Choice(tuple(emptying), tuple(left))


def _plan(decision: _Decision, node: _Node) -> Emptying | Left:
    """Targets for every task of a node; undone again if that does not pay."""
    rules = decision.rules
    stay = decision.stay(node)
    burn = sum(decision.burn(one, node) for one in node.attempts)
    least = rules.min_gain_seconds * node.price
    if stay - burn <= least:
        return Left(node.name, Why.NO_GAIN, stay - burn)
    kept: dict[str, tuple[Resources, Resources, Floats, bool]] = {}
    moves: list[Move] = []
    added = 0.0
    node.is_target = False
    gain = 0.0
    largest_first = sorted(
        node.attempts, key=lambda one: (-one.cpu_millis, -one.memory_bytes, one.key)
    )
    for attempt in largest_first:
        found = _target(decision, attempt, node)
        if found is None:
            break
        cost, target = found
        empty_by = decision.empty_by(target)
        kept.setdefault(target.name, (target.room, target.used, empty_by, target.receives))
        size = _size(attempt)
        target.room -= size
        target.used += size
        target.empty_by = empty_by * decision.ends_within(attempt, decision.dead_seconds(attempt))
        target.receives = True
        added += cost
        moves.append(Move(attempt=attempt, target_node=target.name))
    else:
        # Each move is charged half again: it may have to be repeated from the target.
        gain = stay - added - 1.5 * burn
        if gain > least:
            return Emptying(node=node.name, moves=tuple(moves), gain=gain)
    for name, (room, used, empty_by, receives) in kept.items():
        target = decision.nodes[name]
        target.room, target.used = room, used
        target.empty_by, target.receives = empty_by, receives
    node.is_target = True
    if len(moves) < len(node.attempts):
        return Left(node.name, Why.NO_ROOM)
    return Left(node.name, Why.NO_GAIN, gain)


def _target(decision: _Decision, attempt: LiveAttempt, source: _Node) -> tuple[float, _Node] | None:
    """The target whose life the task prolongs least, the tighter hole among equals."""
    size = _size(attempt)
    fitting = [
        node
        for node in decision.nodes.values()
        if node.is_target
        and node is not source
        and node.attempts
        and size.fits(node.room)
        and not decision.expects_tasks(node)
    ]
    if not fitting:
        return None
    alive = 1.0 - decision.ends_within(attempt, decision.dead_seconds(attempt))
    empty_by = np.stack([decision.empty_by(node) for node in fitting])
    added = decision.own_price(attempt) * (empty_by @ alive) * decision.step
    weight = decision.rules.fit_weight * source.price * decision.rules.horizon_seconds
    looseness = np.array(
        [
            (node.room.cpu_millis - size.cpu_millis) / max(1, node.seen.cpu_millis)
            for node in fitting
        ]
    )
    best = int(np.argmin(np.round(added + weight * looseness, 12)))
    return float(added[best]), fitting[best]


def replace_cpu(amount: Resources, cpu_millis: int) -> Resources:
    """The same amount with other CPU."""
    return Resources(cpu_millis, amount.memory_bytes, amount.scratch_bytes, amount.gpu, amount.pods)


def _size(attempt: LiveAttempt) -> Resources:
    return Resources(cpu_millis=attempt.cpu_millis, memory_bytes=attempt.memory_bytes)


def rest_seconds(moves: int, rules: ReschedulerConfig) -> float:
    """How long a task that was moved so often (failed moves count) is left alone."""
    return float(rules.rest_seconds * rules.rest_growth ** min(moves, 50))


# ================================================================ how a saga goes on
_OPEN: Final = (Reserving, Reserved, Saving)
"""States in which a move can still be taken back."""
_SETTLED: Final = (Moved, Stayed, Gone)
_NOT_THERE: Final = (Reason.UNKNOWN_ATTEMPT, Reason.STALE)
"""The submitter knows of no such running attempt: it has ended, and its event follows."""


def begin(
    emptying: Emptying,
    vacate_id: str,
    migration_ids: Sequence[str],
    cluster: str,
    now: float,
    rules: ReschedulerConfig,
) -> VacateSaga:
    """The saga of a node that was chosen, before anything was sent."""
    return VacateSaga(
        vacate_id=vacate_id,
        cluster=cluster,
        node=emptying.node,
        started_at=now,
        valid_until=now + rules.saga_limit_seconds,
        gain=emptying.gain,
        phase=Gathering(),
        moves=[
            TaskMove(
                migration_id=migration_id,
                job_id=move.attempt.job_id,
                index=move.attempt.index,
                attempt=move.attempt.attempt,
                pod_uid=move.attempt.pod_uid,
                cpu_millis=move.attempt.cpu_millis,
                memory_bytes=move.attempt.memory_bytes,
                target_node=move.target_node,
                state=Reserving(now + rules.reserve_limit_seconds),
            )
            for migration_id, move in zip(migration_ids, emptying.moves, strict=True)
        ],
    )


def step(
    saga: VacateSaga, event: Event, now: float, rules: ReschedulerConfig
) -> tuple[VacateSaga, tuple[Command, ...]]:
    """The saga after `event`, and the commands of the states that it entered.

    What the saga is past changes nothing, so events may come twice, late and in any order.
    """
    if saga.is_closed:
        return saga, ()
    changed = _note_on_node(saga, event, now, rules)
    moves = [replace(move, state=_next_state(move, event, now, rules)) for move in changed.moves]
    changed = _advance(replace(changed, moves=moves), now, rules)
    return changed, tuple(_entered(saga, changed))


def concerns(saga: VacateSaga, event: Event) -> bool:
    """Whether the event may change the saga; a cheap look before `step`."""
    match event:
        case AttemptEnded() | AttemptRuns():
            task = (event.job_id, event.index)
            return any(move.task == task for move in saga.moves)
        case Answered() | ManifestVerified() | AttemptVanished():
            return saga.move(event.migration_id) is not None
        case NodeAnswered() | NodeFilled():
            return event.vacate_id == saga.vacate_id
    return True


def standing(saga: VacateSaga, now: float) -> tuple[Command, ...]:
    """Every command whose answer is still awaited: sent again after a restart or a silence."""
    commands: list[Command | None] = [_phase_command(saga)]
    for move in saga.moves:
        match move.state:
            case Saving(is_asked=True) | Ending(is_told=True):
                continue
            case Ending(order_until=order_until) if now >= order_until:
                continue
        commands.append(_move_command(saga, move))
    return tuple(command for command in commands if command is not None)


def rearm(saga: VacateSaga, now: float, rules: ReschedulerConfig) -> VacateSaga:
    """The saga after its rescheduler was away: limits that ran out unwatched get a grace.

    Not that of a checkpoint order, at which the program thaws whoever watches.
    """
    soonest = now + rules.resume_grace_seconds

    def later(state: MoveState) -> MoveState:
        if isinstance(state, Reserving | Ending | Restoring | Cancelling) and state.until < soonest:
            return replace(state, until=soonest)
        return state

    phase = saga.phase
    if isinstance(phase, Cordoning | Releasing | Undoing) and phase.until < soonest:
        phase = replace(phase, until=soonest)
    moves = [replace(move, state=later(move.state)) for move in saga.moves]
    return replace(saga, phase=phase, moves=moves)


def _entered(before: VacateSaga, after: VacateSaga) -> list[Command]:
    found: list[Command | None] = []
    if type(before.phase) is not type(after.phase):
        found.append(_phase_command(after))
    found += [
        _move_command(after, new)
        for old, new in zip(before.moves, after.moves, strict=True)
        if type(old.state) is not type(new.state)
    ]
    return [command for command in found if command is not None]


def _move_command(saga: VacateSaga, move: TaskMove) -> Migrate | None:
    match move.state:
        case Reserving():
            action, until = MigrateAction.RESERVE, saga.valid_until
        case Saving(until=until):
            action = MigrateAction.CHECKPOINT
        case Ending(order_until=until):
            action = MigrateAction.END
        case Cancelling(until=until):
            action = MigrateAction.CANCEL
        case _:
            return None
    return Migrate(
        cluster=saga.cluster,
        migration_id=move.migration_id,
        action=action,
        job_id=move.job_id,
        index=move.index,
        attempt=move.attempt,
        pod_uid=move.pod_uid,
        source_node=saga.node,
        target_node=move.target_node,
        valid_until=until,
    )


def _phase_command(saga: VacateSaga) -> Vacate | None:
    match saga.phase:
        case Cordoning():
            action = VacateAction.CORDON
        case Undoing(is_open=False):
            action = VacateAction.UNCORDON
        case _:
            return None
    return Vacate(
        cluster=saga.cluster,
        vacate_id=saga.vacate_id,
        action=action,
        node=saga.node,
        valid_until=saga.valid_until,
    )


# ---------------------------------------------------------------- the node
def _note_on_node(
    saga: VacateSaga, event: Event, now: float, rules: ReschedulerConfig
) -> VacateSaga:
    """What an event says of the source node."""
    match event:
        case NodeAnswered(vacate_id=vacate_id, step=answer, reason=reason):
            if vacate_id == saga.vacate_id:
                return _after_answer(saga, answer, reason, now, rules)
        case NodeClosed(node=saga.node, is_gone=True):
            return _released(saga)
        case NodeFilled(vacate_id=saga.vacate_id) if isinstance(saga.phase, Gathering | Cordoning):
            return _undo(saga, Reason.NOT_EMPTY, now, rules)
        case TimePassed():
            match saga.phase:
                case Cordoning(until=until) if now >= until:
                    return _undo(saga, Reason.EXPIRED, now, rules)
                case Releasing(until=until) if now >= until:
                    return replace(saga, phase=Closed(Reason.EXPIRED, "releasing"))
                case Undoing(until=until, is_open=False) if now >= until:
                    # The scaler opens the node by itself at the cordon's limit.
                    return replace(saga, phase=replace(saga.phase, is_open=True))
    return saga


def _after_answer(
    saga: VacateSaga,
    answer: VacateStep,
    reason: Reason | None,
    now: float,
    rules: ReschedulerConfig,
) -> VacateSaga:
    match saga.phase, answer:
        case Cordoning(), VacateStep.CORDONED:
            until = now + rules.save_limit_seconds
            moves = [
                replace(move, state=Saving(until)) if isinstance(move.state, Reserved) else move
                for move in saga.moves
            ]
            return replace(saga, phase=Moving(), moves=moves)
        case Cordoning(), VacateStep.REFUSED:
            return _undo(saga, reason or Reason.INTERNAL, now, rules, is_open=True)
        case ((Moving() | Releasing()), VacateStep.REFUSED) if reason is Reason.UNKNOWN_NODE:
            return _released(saga)
        case ((Cordoning() | Moving() | Releasing()), VacateStep.UNCORDONED):
            # Opened by an operator, or by the scaler at the cordon's limit.
            return _undo(saga, reason or Reason.EXPIRED, now, rules, is_open=True)
        case Undoing(), (VacateStep.UNCORDONED | VacateStep.REFUSED):
            return replace(saga, phase=replace(saga.phase, is_open=True))
        case _, VacateStep.RELEASED:
            return _released(saga)
    return saga


def _released(saga: VacateSaga) -> VacateSaga:
    if isinstance(saga.phase, Undoing):
        return replace(saga, is_released=True, phase=replace(saga.phase, is_open=True))
    return replace(saga, is_released=True)


def _undo(
    saga: VacateSaga,
    reason: Reason,
    now: float,
    rules: ReschedulerConfig,
    *,
    is_open: bool | None = None,
    step_name: str = "",
) -> VacateSaga:
    """Take back every move that can be, and open the node if it was to be closed.

    A task whose end was ordered goes on moving: the order cannot be recalled for certain.
    """
    if is_open is None:
        is_open = isinstance(saga.phase, Gathering)
    name = step_name or type(saga.phase).__struct_config__.tag
    moves = [
        replace(move, state=_cancel(move.state, reason, now, rules))
        if isinstance(move.state, _OPEN)
        else move
        for move in saga.moves
    ]
    until = now + rules.undo_limit_seconds
    phase = Undoing(until, reason, str(name), is_open or saga.is_released)
    return replace(saga, phase=phase, moves=moves)


def _cancel(
    state: MoveState,
    reason: Reason,
    now: float,
    rules: ReschedulerConfig,
    *,
    is_gone: bool = False,
) -> Cancelling:
    name = str(type(state).__struct_config__.tag)
    return Cancelling(now + rules.undo_limit_seconds, reason, is_gone, name)


# ---------------------------------------------------------------- one move
def _next_state(move: TaskMove, event: Event, now: float, rules: ReschedulerConfig) -> MoveState:
    state = move.state
    match event:
        case Answered(migration_id=move.migration_id, step=answer, reason=reason):
            return _after_migration_answer(state, answer, reason, now, rules)
        case ManifestVerified(migration_id=move.migration_id):
            if isinstance(state, Saving) and now < state.until - rules.end_margin_seconds:
                return Ending(
                    now + rules.end_limit_seconds,
                    state.until,
                    event.key,
                    event.progress_seconds,
                    event.save_seconds,
                )
        case AttemptEnded() if _is_source(move, event):
            return _after_end(move, event, now, rules)
        case AttemptRuns(job_id=move.job_id, index=move.index, attempt=attempt, at=at):
            if attempt > move.attempt:
                return _after_next_runs(state, at, now, rules)
        case AttemptVanished(migration_id=move.migration_id):
            return _after_vanishing(state, now, rules)
        case NodeClosed(node=move.target_node, is_gone=is_gone) if isinstance(state, _OPEN):
            reason = Reason.NODE_LOST if is_gone else Reason.NODE_CORDONED
            return _cancel(state, reason, now, rules)
        case TimePassed():
            return _after_limit(state, now, rules)
    return state


def _is_source(move: TaskMove, event: AttemptEnded) -> bool:
    named = (event.job_id, event.index, event.attempt)
    if named != (move.job_id, move.index, move.attempt):
        return False
    return not event.pod_uid or event.pod_uid == move.pod_uid


def _after_migration_answer(
    state: MoveState,
    answer: MigrationStep,
    reason: Reason | None,
    now: float,
    rules: ReschedulerConfig,
) -> MoveState:
    why = reason or Reason.INTERNAL
    match state, answer:
        case Reserving(), MigrationStep.RESERVED:
            return Reserved()
        case ((Reserving() | Reserved() | Saving()), MigrationStep.REFUSED):
            return _cancel(state, why, now, rules, is_gone=why in _NOT_THERE)
        case Ending(), MigrationStep.REFUSED if why not in _NOT_THERE:
            return _cancel(state, why, now, rules)
        case Saving(), MigrationStep.REQUESTED:
            return replace(state, is_asked=True)
        case Ending(), MigrationStep.ENDING:
            return replace(state, is_told=True)
        case ((Ending() | Restoring()), MigrationStep.RESTORED):
            return _moved(state, now)
        case Cancelling(), MigrationStep.CANCELLED:
            # Not REFUSED: that may be a late answer to what went before, and a cancel never fails.
            return _settled(state)
    return state


def _after_end(
    move: TaskMove, event: AttemptEnded, now: float, rules: ReschedulerConfig
) -> MoveState:
    state = move.state
    is_ours = event.reason is Reason.MIGRATED and event.migration_id == move.migration_id
    match state:
        case Ending() if is_ours:
            return Restoring(
                now + rules.restore_limit_seconds,
                event.at,
                state.progress_seconds,
                state.save_seconds,
            )
        case Reserving() | Reserved() | Saving() | Ending():
            return _cancel(state, event.reason, now, rules, is_gone=True)
        case Cancelling(is_gone=False):
            return replace(state, is_gone=True, reason=event.reason)
        case Stayed():
            return Gone(event.reason, state.step)
    return state


def _after_next_runs(
    state: MoveState, at: float, now: float, rules: ReschedulerConfig
) -> MoveState:
    match state:
        case Ending() | Restoring():
            return _moved(state, at)
        case Reserving() | Reserved() | Saving():
            return _cancel(state, Reason.STALE, now, rules, is_gone=True)
        case Cancelling(is_gone=False):
            return replace(state, is_gone=True)
    return state


def _after_vanishing(state: MoveState, now: float, rules: ReschedulerConfig) -> MoveState:
    match state:
        case Ending():
            return Restoring(
                now + rules.restore_limit_seconds, now, state.progress_seconds, state.save_seconds
            )
        case Reserving() | Reserved() | Saving():
            return _cancel(state, Reason.LOST, now, rules, is_gone=True)
        case Cancelling(is_gone=False):
            return replace(state, is_gone=True)
    return state


def _after_limit(state: MoveState, now: float, rules: ReschedulerConfig) -> MoveState:
    match state:
        case Reserving(until=until) if now >= until:
            return _cancel(state, Reason.EXPIRED, now, rules)
        case Saving(until=until) if now >= until - rules.end_margin_seconds:
            return _cancel(state, Reason.CHECKPOINT_FAILED, now, rules)
        case Ending(until=until) if now >= until:
            return _cancel(state, Reason.EXPIRED, now, rules)
        case Restoring(until=until) if now >= until:
            return _cancel(state, Reason.EXPIRED, now, rules, is_gone=True)
        case Cancelling(until=until) if now >= until:
            return _settled(state)
    return state


def _moved(state: Ending | Restoring, at: float) -> Moved:
    resume = max(0.0, at - state.ended_at) if isinstance(state, Restoring) else 0.0
    return Moved(at, resume, state.progress_seconds, state.save_seconds)


def _settled(state: Cancelling) -> Stayed | Gone:
    return Gone(state.reason, state.step) if state.is_gone else Stayed(state.reason, state.step)


# ---------------------------------------------------------------- both together
def _is_left(state: MoveState) -> bool:
    """Whether the task is no longer on the source."""
    return isinstance(state, Moved | Gone) or (isinstance(state, Cancelling) and state.is_gone)


def _advance(saga: VacateSaga, now: float, rules: ReschedulerConfig) -> VacateSaga:
    """Let the node's phase follow its moves, as far as it goes."""
    while True:
        phase = _next_phase(saga, now, rules)
        if isinstance(phase, VacateSaga):
            saga = phase
            continue
        if phase is None:
            return saga
        saga = replace(saga, phase=phase)


def _next_phase(
    saga: VacateSaga, now: float, rules: ReschedulerConfig
) -> Phase | VacateSaga | None:
    states = [move.state for move in saga.moves]
    is_settled = all(isinstance(state, _SETTLED) for state in states)
    if isinstance(saga.phase, Gathering | Cordoning | Moving):
        for state in states:
            if isinstance(state, Stayed) or (isinstance(state, Cancelling) and not state.is_gone):
                return _undo(saga, state.reason, now, rules, step_name=state.step)
    match saga.phase:
        case Gathering():
            here = [state for state in states if not _is_left(state)]
            if here and all(isinstance(state, Reserved) for state in here):
                return Cordoning(now + rules.cordon_limit_seconds)
            if is_settled:  # all have ended by themselves: the scaler finds an empty node
                return Closed(_first_reason(states), "gathering")
        case Moving():
            if all(_is_left(state) for state in states):
                return Releasing(now + rules.release_limit_seconds)
        case Releasing():
            if saga.is_released and is_settled:
                return Closed(None, "released")
        case Undoing(is_open=True, reason=reason, step=name) if is_settled:
            return Closed(reason, name)
    return None


def _first_reason(states: Sequence[MoveState]) -> Reason:
    return next((state.reason for state in states if isinstance(state, Gone)), Reason.LOST)


# ================================================================ memory
_UNTOUCHED: Final = ("reserving", "reserved")
"""Steps before anything was asked of the task itself."""


def remembered(
    saga: VacateSaga, past: Mapping[TaskKey, Past], now: float, rules: ReschedulerConfig
) -> dict[TaskKey, Past]:
    """What is known of tasks after a saga closed.

    A move that failed counts like one that was made: each makes the next try rarer. Beyond the
    limit those whose rest ends first are forgotten.
    """
    known = dict(past)
    for move in saga.moves:
        before = known.pop(move.task, Past(0, 0.0))
        state = move.state
        if isinstance(state, Moved):
            moves = before.moves + 1
            rest = state.at + rest_seconds(moves, rules)
            known[move.task] = Past(moves, rest, state.progress_seconds)
        elif isinstance(state, Stayed | Gone) and state.step in _UNTOUCHED:
            if isinstance(state, Stayed):
                rest = now + rules.retry_seconds
                known[move.task] = Past(before.moves, rest, before.progress_seconds)
            elif state.reason is not Reason.COMPLETED:
                known[move.task] = before
        elif not (isinstance(state, Gone) and state.reason is Reason.COMPLETED):
            moves = before.moves + 1
            rest = now + rest_seconds(moves, rules)
            known[move.task] = Past(moves, rest, before.progress_seconds)
    newest = sorted(known, key=lambda task: (known[task].rest_until, task))[-rules.most_history :]
    return {task: known[task] for task in newest}
