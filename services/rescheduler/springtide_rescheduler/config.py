"""Settings of the rescheduler. All `_seconds` fields are divided by a demonstration's factor."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ReschedulerConfig:
    """What one rescheduler is told. Times in seconds, ratios over a node's allocatable."""

    # when to look
    cycle_seconds: float = 60.0
    """Between two decisions."""
    tick_seconds: float = 5.0
    """How often limits of waits are looked at and unanswered commands are sent again."""
    look_first_seconds: float = 1.0
    """First pause between two looks for a manifest in the store; grows by half each time."""
    look_most_seconds: float = 15.0
    lease_seconds: float = 30.0

    # which nodes
    trigger_ratio: float = 0.9
    """Only nodes whose requested share of CPU and of memory is below this are emptied."""
    busy_ratio: float = 1.5
    """A node that uses more than this times what its tasks requested is left alone: packed closer,
    they would slow each other. Usage that is not known never speaks for a move."""
    foreign_ratio: float = 0.1
    """A node on which others' pods request more than this is left alone: it would not get empty.
    Daemons request a few hundredths."""
    least_age_seconds: float = 60.0
    """A task that has run for less has hardly saved anything yet."""

    # what pays
    horizon_seconds: float = 7_200.0
    """How far ahead a node's life is counted."""
    min_gain_seconds: float = 60.0
    """Least gain of emptying a node after all its costs, in seconds of that node's price."""
    delay_weight: float = 1.0
    """What a second of delay of a task costs beside the rooms held, in the price of its cores."""
    fit_weight: float = 0.02
    """Preference for the tighter hole, as a share of the source's price per horizon."""
    save_seconds: float = 60.0
    """From the request to a verified manifest, until it was measured for the job."""
    stop_seconds: float = 10.0
    resume_seconds: float = 72.0
    """From the end on the source to running on the target, until it was measured for the job."""

    # against thrash
    rest_seconds: float = 1_800.0
    """A task's k-th move waits this long times `rest_growth`^k after the one before."""
    rest_growth: float = 1.25
    retry_seconds: float = 300.0
    """Rest of a task whose move failed before anything was asked of it (no room, no cordon)."""
    most_in_flight: int = 50
    """Tasks on their way at once; follows Little's law: moves per hour times their dead time."""
    most_moves_per_window: int = 100
    window_seconds: float = 60.0

    # limits of the saga's waits
    reserve_limit_seconds: float = 60.0
    cordon_limit_seconds: float = 60.0
    save_limit_seconds: float = 600.0
    end_limit_seconds: float = 120.0
    end_margin_seconds: float = 10.0
    """A manifest seen later than this before its order's limit counts no more: the program may go
    on before the request to end reaches it."""
    restore_limit_seconds: float = 300.0
    release_limit_seconds: float = 300.0
    undo_limit_seconds: float = 120.0
    """For the answers to CANCEL and UNCORDON."""
    resend_seconds: float = 15.0
    """A command without its answer is sent again after this."""
    vanish_seconds: float = 60.0
    """An attempt that inventories have not named for so long has ended, whatever was not heard."""
    resume_grace_seconds: float = 30.0
    """After a restart, waits that ran out meanwhile get this long: their answers are queued."""

    # memory
    most_lives: int = 5_000
    """Ended run times kept per job, newest last."""
    most_jobs: int = 200
    most_history: int = 1_500
    """Tasks whose moves are remembered across restarts; a document holds 256 KiB."""

    def __post_init__(self) -> None:
        """Refuse combinations that cannot work."""
        for item in fields(self):
            value = getattr(self, item.name)
            if value < 0 or (value == 0 and item.name.endswith("_seconds")):
                raise ValueError(f"{item.name} is {value}; give more than 0")
        if not 0 < self.trigger_ratio <= 1:
            raise ValueError(f"trigger_ratio is {self.trigger_ratio}; give more than 0, at most 1")
        if self.rest_growth < 1:
            raise ValueError(f"rest_growth is {self.rest_growth}; give 1 or more")

    @property
    def saga_limit_seconds(self) -> float:
        """Longest life of a move, from the first reservation to the task running again."""
        return (
            self.reserve_limit_seconds
            + self.cordon_limit_seconds
            + self.save_limit_seconds
            + self.end_limit_seconds
            + self.restore_limit_seconds
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig(ReschedulerConfig):
    """Where a rescheduler that runs as a process of its own finds what it needs.

    Read from a file and `SPRINGTIDE_RESCHEDULER_<FIELD>` variables; the embedded stack hands
    adapters over instead.
    """

    cluster: str = ""
    """Name of the cluster, as jobs and the other services know it."""
    amqp_url: str = ""
    state_dir: Path | None = None
    """For sagas under way, the memory of moves and the lease; kept across restarts."""
    store_dir: Path | None = None
    """The object store, read for the manifests of tasks that are being moved."""
    health_host: str = "127.0.0.1"
    health_port: int = 0
    """For `/healthz` and `/readyz`; 0 picks a free one, which the log names."""

    def __post_init__(self) -> None:
        """Check the settings of the service itself."""
        self.policy()

    def policy(self) -> ReschedulerConfig:
        """The settings of the service itself."""
        return ReschedulerConfig(
            **{item.name: getattr(self, item.name) for item in fields(ReschedulerConfig)}
        )
