"""One attempt as a lattice: what is known of it only ever grows, whatever order the news comes in.

`Attempt.merge` is a join: commutative, associative, idempotent. So events that come late, doubled
or out of order end the same, and a redelivered batch changes nothing.
"""

from __future__ import annotations

from typing import Final

import msgspec

from springtide_shared.errors import Reason
from springtide_shared.messages.attempts import AttemptEvent, AttemptState

STAGES: Final[tuple[AttemptState, ...]] = (
    AttemptState.DISPATCHED,
    AttemptState.PENDING,
    AttemptState.RUNNING,
    AttemptState.FINISHING,
    AttemptState.ENDED,
)
"""From first to last; `Facts.stage` is the position here."""
STAGE: Final[dict[AttemptState, int]] = {state: i for i, state in enumerate(STAGES)}
PENDING: Final = STAGE[AttemptState.PENDING]
RUNNING: Final = STAGE[AttemptState.RUNNING]
ENDED: Final = STAGE[AttemptState.ENDED]

_UPWARDS: Final = (
    # Nothing ran, as far as this end knows.
    Reason.NEVER_STARTED,
    Reason.CLUSTER_UNREACHABLE,
    Reason.CLUSTER_UNAVAILABLE,
    Reason.STALE,
    Reason.QUOTA,
    # Conclusions from absence: any first-hand account outranks them.
    Reason.LOST,
    Reason.NODE_LOST,
    Reason.EVICTED,
    Reason.PREEMPTED,
    Reason.CANCELLED,
)
_DOWNWARDS: Final = (Reason.COMPLETED, Reason.APPLICATION_ERROR, Reason.TIMEOUT, Reason.MIGRATED)
_MIDDLE: Final = len(_UPWARDS)
RANK: Final[dict[Reason, int]] = {reason: i for i, reason in enumerate(_UPWARDS)} | {
    reason: 255 - i for i, reason in enumerate(_DOWNWARDS)
}
"""Terminals from never-started, the lowest, to completed, the highest; those not named here are
`_MIDDLE`."""

_RAN: Final = frozenset(
    {
        Reason.COMPLETED,
        Reason.APPLICATION_ERROR,
        Reason.OUT_OF_MEMORY,
        Reason.CPU_MISMATCH,
        Reason.TIMEOUT,
        Reason.MIGRATED,
        Reason.CHECKPOINT_FAILED,
        Reason.STORE_UNAVAILABLE,
    }
)
"""Ends that only a pod whose program ran can come to."""

NO_EXIT: Final = -(2**31)
"""Stands for "no exit code": an order needs numbers."""


class Facts(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """The furthest that one account tells. Ordered: stage, rank of the end, then the rest.

    The rest breaks ties between accounts that contradict each other, so that the greater of two is
    the same in whatever order they come.
    """

    stage: int
    rank: int = 0
    reason: str = ""
    digest: str = ""
    record_attempt: int = 0
    exit_code: int = NO_EXIT
    migration_id: str = ""
    pin_node: str = ""
    pod_uid: str = ""
    node: str = ""


class Account(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is known of one pod of an attempt. `ran`: its program did run, however it ended."""

    facts: Facts
    ran: bool


class Attempt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All that is known of one attempt: an account per pod uid, in their order.

    Pods of one name can follow one another: an unstarted one is deleted and made anew elsewhere.
    News that one never started says nothing of another that runs. News without a pod's uid is
    about whichever there was.
    """

    pods: tuple[Account, ...] = ()

    def merge(self, seen: Facts) -> Attempt:
        """This and `seen` together; the same object if `seen` tells nothing new."""
        ran = is_of_a_run(seen)
        for at, account in enumerate(self.pods):
            if account.facts.pod_uid != seen.pod_uid:
                continue
            if account.facts >= seen:
                if account.ran or not ran:
                    return self
                seen = account.facts
            merged = Account(seen, ran or account.ran)
            return Attempt((*self.pods[:at], merged, *self.pods[at + 1 :]))
        pods = (*self.pods, Account(seen, ran))
        return Attempt(pods if len(pods) == 1 else tuple(sorted(pods, key=_pod_uid)))

    @property
    def has_run(self) -> bool:
        """Whether any of its pods ran the program."""
        return any(account.ran for account in self.pods)

    @property
    def known(self) -> Facts | None:
        """What holds: None while only dispatched."""
        pods = self.pods
        if len(pods) <= 1:
            return pods[0].facts if pods else None
        if not self.has_run:
            return max(account.facts for account in pods)
        return max(
            account.facts
            for account in pods
            if account.ran or (account.facts.stage == ENDED and not account.facts.pod_uid)
        )

    @property
    def stage(self) -> int:
        """How far it came; 0: dispatched."""
        known = self.known
        return 0 if known is None else known.stage


def _pod_uid(account: Account) -> str:
    return account.facts.pod_uid


def is_of_a_run(facts: Facts) -> bool:
    """Whether only a pod whose program ran can be the subject."""
    if facts.stage == ENDED:
        return facts.reason in _RAN
    return facts.stage >= RUNNING


def is_digest(text: str) -> bool:
    """Whether it is a SHA-256 in hexadecimal."""
    if len(text) != 64:
        return False
    try:
        return len(bytes.fromhex(text)) == 32
    except ValueError:
        return False


def facts_of(event: AttemptEvent) -> Facts:
    """The event as facts.

    A success without the digest of its completion record is no proof of anything: it counts as an
    end for `internal` reasons, which infrastructure pays for.
    """
    stage = STAGE[event.state]
    reason: Reason | None = event.reason
    digest = ""
    if stage == ENDED:
        if reason is None:
            reason = Reason.INTERNAL
        elif reason is Reason.COMPLETED:
            if is_digest(event.digest):
                digest = event.digest.lower()
            else:
                reason = Reason.INTERNAL
        rank = RANK.get(reason, _MIDDLE)
    else:
        rank = 0
    return Facts(
        stage,
        rank,
        "" if reason is None else reason.value,
        digest,
        (event.record_attempt or event.attempt) if digest else 0,
        NO_EXIT if event.exit_code is None else event.exit_code,
        event.migration_id,
        event.pin_node,
        event.pod_uid,
        event.node,
    )
