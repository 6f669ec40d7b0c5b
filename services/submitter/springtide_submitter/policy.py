"""The submitter's rules, pure: what a pod's end means, how fast pods are made, where room is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from springtide_shared.errors import Reason
from springtide_shared.messages.records import (
    EXIT_CANNOT_START,
    EXIT_OUTPUT_MISSING,
    EXIT_REFUSED_RECORD_EXISTS,
    EXIT_RUN_TIME,
    EXIT_STORE_UNAVAILABLE,
    Termination,
)
from springtide_shared.ports.cluster import NodeView, PodPhase, PodView
from springtide_shared.units import Resources
from springtide_submitter.model import Attempt, Intent, Stage

EXIT_ILLEGAL_INSTRUCTION: Final = 132
"""128 + SIGILL: the program needs a newer CPU level than the node has."""

_BY_EXIT_CODE: Final[dict[int, Reason]] = {
    EXIT_OUTPUT_MISSING: Reason.APPLICATION_ERROR,
    EXIT_STORE_UNAVAILABLE: Reason.STORE_UNAVAILABLE,
    EXIT_RUN_TIME: Reason.TIMEOUT,
    EXIT_CANNOT_START: Reason.INVALID_SPEC,
    EXIT_ILLEGAL_INSTRUCTION: Reason.CPU_MISMATCH,
}

_BY_CAUSE: Final[dict[str, Reason]] = {
    "OOMKilled": Reason.OUT_OF_MEMORY,
    "DeadlineExceeded": Reason.TIMEOUT,
    "ErrImagePull": Reason.IMAGE_PULL,
    "ImagePullBackOff": Reason.IMAGE_PULL,
    "ErrImageNeverPull": Reason.IMAGE_PULL,
    "InvalidImageName": Reason.IMAGE_PULL,
    "ImageInspectError": Reason.IMAGE_PULL,
    "Preempted": Reason.PREEMPTED,
    "Preempting": Reason.PREEMPTED,
    "NodeLost": Reason.NODE_LOST,
    "NodeShutdown": Reason.NODE_LOST,
    "Shutdown": Reason.NODE_LOST,
    "Terminated": Reason.NODE_LOST,  # graceful shutdown of the node
    "ContainerCannotRun": Reason.INVALID_SPEC,
    "StartError": Reason.INVALID_SPEC,
    "CreateContainerConfigError": Reason.INVALID_SPEC,
    "CreateContainerError": Reason.INVALID_SPEC,
}
"""Causes as the kubelet and the scheduler spell them."""

_REFUSED_BY_NODE: Final = ("NodeAffinity", "UnexpectedAdmissionError", "TopologyAffinityError")
"""The kubelet turned the pod away before it started; so do causes that begin with `OutOf`."""

_DENY_SUCCESS: Final = (Reason.OUT_OF_MEMORY, Reason.EVICTED, Reason.DISK_PRESSURE)
"""With one of these marks an exit code of 0 proves nothing: a part of the task was taken away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the end of a pod means. `reason` None: the completion record decides."""

    reason: Reason | None
    digest: str = ""
    record_attempt: int | None = None
    exit_code: int | None = None


def termination_of(message: str) -> Termination:
    """The agent's termination message; empty where there is none or it is something else."""
    if not message.startswith("{"):
        return Termination()
    try:
        return msgspec.json.decode(message, type=Termination)
    except msgspec.DecodeError:
        return Termination()


def classify(pod: PodView, intent: Intent = Intent.NONE) -> Verdict:
    """What the end of a terminated pod means.

    Success is two-sided: exit 0 (or a refusal that names an earlier record), without a mark of
    memory exhaustion or eviction, and the record's digest. It wins over our own wish to end the
    pod; our wish wins over every other cause.
    """
    code = pod.exit_code
    found = termination_of(pod.message)
    cause = _cause(pod)
    if cause not in _DENY_SUCCESS and code in (0, EXIT_REFUSED_RECORD_EXISTS):
        if found.digest and (code == 0 or found.record_attempt is not None):
            return Verdict(
                reason=Reason.COMPLETED,
                digest=found.digest,
                record_attempt=found.record_attempt,
                exit_code=code,
            )
        if code == 0 or found.record_attempt is not None:
            return Verdict(reason=None, record_attempt=found.record_attempt, exit_code=code)
    if intent is Intent.CANCEL:
        return Verdict(reason=Reason.CANCELLED, exit_code=code)
    if intent is Intent.MIGRATE:
        return Verdict(reason=Reason.MIGRATED, exit_code=code)
    if cause is not None:
        return Verdict(reason=cause, exit_code=code)
    if code is None:
        return Verdict(reason=Reason.LOST)
    if code == EXIT_REFUSED_RECORD_EXISTS:  # names no record: nothing to accept
        return Verdict(reason=Reason.INTERNAL, exit_code=code)
    return Verdict(reason=_BY_EXIT_CODE.get(code, Reason.APPLICATION_ERROR), exit_code=code)


def _cause(pod: PodView) -> Reason | None:
    """The cause that the cluster itself gives, if it gives one that decides."""
    if pod.reason == "Evicted":
        text = pod.message.lower()
        if "disk" in text or "ephemeral" in text or "storage" in text or "inode" in text:
            return Reason.DISK_PRESSURE
        return Reason.EVICTED
    if pod.started_at is None and (
        pod.reason.startswith("OutOf") or pod.reason in _REFUSED_BY_NODE
    ):
        return Reason.NEVER_STARTED
    return _BY_CAUSE.get(pod.reason)


# ---------------------------------------------------------------- the meter
def base_stock(open_places: int, rate: float, loop_seconds: float) -> int:
    """How many pods may pend at once (Little's law with a margin for its scatter).

    Args:
        open_places: places that no running pod fills.
        rate: pods that start per second, measured.
        loop_seconds: time from the decision to the sight of its effect.
    """
    mean = rate * loop_seconds
    return open_places + math.ceil(mean + 3.0 * math.sqrt(mean)) + 4


@dataclass(slots=True, kw_only=True)
class Meter:
    """Tokens for creates at an adaptive pace in pods per second. Times are monotonic seconds.

    The pace follows the latency of creates by a gradient: it falls while calls take more than five
    times the best, grows by its square root while it was the limit, and is cut by 0.7 at a 429.
    """

    pace: float
    pace_least: float
    pace_most: float
    burst: float
    adapt_seconds: float
    calm_latency: float = 0.0
    """A best below this counts as this, in seconds: against a millisecond a hiccup is a crisis."""
    tokens: float = field(init=False)
    updated_at: float | None = field(init=False, default=None)
    blocked_until: float = field(init=False, default=-math.inf)
    _adapted_at: float = field(init=False, default=-math.inf)
    _best: float | None = field(init=False, default=None)
    _total: float = field(init=False, default=0.0)
    _calls: int = field(init=False, default=0)
    _was_limit: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.tokens = max(1.0, self.pace * self.burst)

    def wait_before(self, now: float) -> float:
        """Seconds until a create is allowed; 0 takes its token."""
        if now < self.blocked_until:
            return self.blocked_until - now
        if self.updated_at is not None:
            gained = (now - self.updated_at) * self.pace
            self.tokens = min(self.tokens + gained, max(1.0, self.pace * self.burst))
        self.updated_at = now
        if self.tokens >= 1.0:
            self.tokens -= 1.0
            return 0.0
        self._was_limit = True
        # A hair more than the exact time, so that rounding never asks for a wait of nothing.
        return (1.0 - self.tokens) / self.pace + 1e-6

    def observe(self, latency: float, now: float) -> None:
        """A create took `latency` seconds and was answered."""
        self._total += latency
        self._calls += 1
        self._best = latency if self._best is None else min(self._best, latency)
        if now - self._adapted_at < self.adapt_seconds:
            return
        mean, best = self._total / self._calls, max(self._best, self.calm_latency)
        gradient = 1.0 if mean <= 0 else min(1.0, max(0.5, 5.0 * best / mean))
        pace = self.pace * gradient
        if gradient == 1.0 and self._was_limit:
            pace += math.sqrt(self.pace)
        self._set_pace(pace)
        # The best ages by 1 % a step, so that a cluster that became slower for good is believed.
        self._best *= 1.01
        self._adapted_at, self._total, self._calls, self._was_limit = now, 0.0, 0, False

    def throttled(self, now: float, retry_after: float | None) -> None:
        """The cluster said "too many" (or did not answer): slower, and not before `retry_after`."""
        if now >= self.blocked_until:  # one cut per episode, however many calls were under way
            self._set_pace(self.pace * 0.7)
        pause = retry_after if retry_after is not None else 1.0 / self.pace
        self.blocked_until = max(self.blocked_until, now + pause)
        self.tokens = min(self.tokens, 1.0)

    def _set_pace(self, pace: float) -> None:
        self.pace = min(self.pace_most, max(self.pace_least, pace))


@dataclass(slots=True)
class Rate:
    """Events per second, forgotten with a time constant of 30 s."""

    value: float = 0.0
    at: float | None = None

    def count(self, now: float) -> None:
        """One event."""
        self.value = self.at_time(now) + 1.0 / 30.0
        self.at = now

    def at_time(self, now: float) -> float:
        """The rate as it stands at `now`."""
        return 0.0 if self.at is None else self.value * math.exp(-(now - self.at) / 30.0)


# ---------------------------------------------------------------- room on nodes
def room_on(
    node: NodeView, foreign: Sequence[Resources], own: Sequence[Resources]
) -> Resources | None:
    """What is left on a node; None if it takes no pods."""
    if not node.ready or node.cordoned:
        return None
    room = node.allocatable
    for taken in foreign:
        room = room - taken
    for taken in own:
        room = room - taken
    return room


def place_unpinned(
    rooms: Mapping[str, Resources],
    unbound: Sequence[Resources],
    held: Sequence[Attempt],
    most: int,
) -> list[Attempt]:
    """Which held attempts fit onto free room, tightest node first (MostAllocated).

    Args:
        rooms: free resources by node; pods that are bound are taken off already.
        unbound: requests of our pods that are on the way to some node.
        held: attempts without a place, oldest first.
        most: no more than this many.
    """
    left = dict(rooms)
    for request in unbound:
        _put(left, request)
    chosen: list[Attempt] = []
    full: dict[str, bool] = {}
    for attempt in held:
        if len(chosen) >= most:
            break
        if attempt.shape_key in full:
            continue
        if _put(left, attempt.resources):
            chosen.append(attempt)
        else:
            full[attempt.shape_key] = True
    return chosen


def _put(rooms: dict[str, Resources], request: Resources) -> bool:
    best = ""
    for name, room in rooms.items():
        if request.fits(room) and (not best or room.cpu_millis < rooms[best].cpu_millis):
            best = name
    if best:
        rooms[best] = rooms[best] - request
    return bool(best)


def is_withdrawable(attempt: Attempt, *, is_planned: bool) -> bool:
    """Whether a pod that has not started should be taken back because its slot closed.

    A cordoned node still starts what is bound to it; a node that is gone starts nothing.
    """
    return (
        attempt.stage is Stage.PENDING
        and attempt.intent is Intent.NONE
        and not attempt.has_started
        and (not is_planned or not attempt.node)
        and (attempt.view is None or attempt.view.phase is PodPhase.PENDING)
    )
