"""What must hold after every run, each law with a name and how often it was really examined."""

from __future__ import annotations

from dataclasses import dataclass, field

from springtide_lab.simulated.run import RunResult
from springtide_shared.errors import Reason
from springtide_shared.ledger.views import TaskState
from springtide_shared.messages import JobState


@dataclass(slots=True)
class Law:
    """One invariant: how often it was looked at, and where it broke."""

    name: str
    examined: int = 0
    broken: list[str] = field(default_factory=list)

    def check(self, holds: bool, what: str) -> None:
        """Look once."""
        self.examined += 1
        if not holds and len(self.broken) < 20:
            self.broken.append(what)


def examine(result: RunResult, *, paid_tolerance: float = 0.01) -> dict[str, Law]:
    """All laws by name. `paid_tolerance`: allowed share between reported and true node time."""
    laws: dict[str, Law] = {}

    def law(name: str) -> Law:
        return laws.setdefault(name, Law(name))

    for job_id, view in result.jobs.items():
        tasks = result.tasks[job_id]
        size = view.spec.size
        counts = view.counts
        law("job-is-final").check(view.state.is_final, f"{job_id} is {view.state}")
        total = counts.queued + counts.live + counts.succeeded + counts.failed + counts.cancelled
        law("counts-sum-to-size").check(total == size, f"{job_id}: {counts} of {size}")
        by_state = {state: sum(t.state is state for t in tasks) for state in TaskState}
        law("counts-equal-base-rows").check(
            len(tasks) == size
            and by_state[TaskState.SUCCEEDED] == counts.succeeded
            and by_state[TaskState.FAILED] == counts.failed
            and by_state[TaskState.CANCELLED] == counts.cancelled,
            f"{job_id}: {by_state} against {counts}",
        )
        law("final-means-nothing-open").check(
            counts.queued == 0 and counts.live == 0, f"{job_id}: {counts}"
        )
        if view.state is JobState.SUCCEEDED:
            law("succeeded-means-all").check(counts.succeeded == size, f"{job_id}: {counts}")
        for task in tasks:
            records = {r.attempt: r for r in result.records.get((job_id, task.index), [])}
            if task.state is TaskState.SUCCEEDED:
                law("result-has-its-record").check(
                    task.record_attempt in records and task.digest != "",
                    f"{job_id}/{task.index}: {task.record_attempt} of {sorted(records)}",
                )
            elif task.state is TaskState.FAILED and view.state is not JobState.CANCELLED:
                law("no-result-thrown-away").check(
                    not records, f"{job_id}/{task.index} failed but has records {sorted(records)}"
                )
            law("no-task-computed-to-its-end-twice").check(
                len(records) <= 1, f"{job_id}/{task.index}: records of {sorted(records)}"
            )
    for name, left in result.machines_left.items():
        law("no-machine-leaked").check(left == 0, f"{name}: {left} machines")
    for name, left in result.pods_left.items():
        law("no-pod-left").check(left == 0, f"{name}: {left} pods")
    for life in result.recording.attempts.values():
        if life.reason is Reason.MIGRATED:
            law("no-move-without-checkpoint").check(
                any(
                    (m.job_id, m.index, m.attempt)
                    == (life.key.job_id, life.key.index, life.key.attempt)
                    for m in result.manifests.values()
                ),
                f"{life.key} was moved unsaved",
            )
    reported = result.recording.node_seconds_paid(float("inf"))
    law("paid-equals-node-lives").check(
        abs(reported - result.node_seconds) <= paid_tolerance * max(1.0, result.node_seconds),
        f"reported {reported:.0f} s, true {result.node_seconds:.0f} s",
    )
    try:
        result.broker.assert_nothing_left()
    except AssertionError as error:
        law("every-message-settled").check(False, str(error))
    else:
        law("every-message-settled").check(True, "")
    return laws


def assert_laws(result: RunResult, *, paid_tolerance: float = 0.01) -> dict[str, Law]:
    """Examine all laws.

    Raises:
        AssertionError: names each broken law with its first cases.
    """
    laws = examine(result, paid_tolerance=paid_tolerance)
    broken = [f"{law.name}: " + "; ".join(law.broken[:5]) for law in laws.values() if law.broken]
    assert not broken, "\n".join(broken)
    return laws
