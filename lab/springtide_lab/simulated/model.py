"""What the simulated cluster is told: machines, delays, and how long tasks really take."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from springtide_shared.units import GiB, Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupModel:
    """One node group. Seconds, currency units per hour."""

    name: str
    instance_type: str
    cpu_millis: int
    memory_bytes: int
    price_per_hour: float
    boot_seconds: float
    max_size: int
    max_pods: int = 110

    @property
    def allocatable(self) -> Resources:
        """What pods may take on one node."""
        return Resources(
            cpu_millis=self.cpu_millis,
            memory_bytes=self.memory_bytes,
            scratch_bytes=1024 * GiB,
            pods=self.max_pods,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterModel:
    """Delays of a cluster and of the agent in its pods, all in seconds."""

    bind_seconds: float = 0.2
    """From a pod's creation (or room for it) to its node."""
    pod_start_seconds: float = 3.0
    """From the bind to the running program, image and agent included."""
    stop_seconds: float = 1.0
    """From a polite request to the end of a program that obeys."""
    release_seconds: float = 5.0
    """From a terminate call to the machine being gone; billed."""
    order_seconds: float = 1.0
    """Until the agent sees an annotation."""
    save_seconds: float = 20.0
    """Ask, save and upload of a checkpoint; the program is frozen for it."""
    restore_seconds: float = 20.0
    """Download and load of a checkpoint, before work goes on."""
    boot_jitter: float = 0.1
    """Boot times vary by this share to both sides."""
    store_retry_seconds: float = 30.0
    """How often an agent tries the store again."""
    store_limit_seconds: float = 1800.0
    """After it the agent gives up with `store-unavailable`."""


@dataclass(frozen=True, slots=True)
class TaskRun:
    """What one attempt of a task will do. `exit_code` other than 0 comes at the end."""

    seconds: float
    exit_code: int = 0
    save_seconds: float | None = None
    """None: the cluster's."""


class WorkModel(Protocol):
    """How long tasks take, which nobody but the simulation knows."""

    def run(self, job_id: str, index: int, attempt: int) -> TaskRun:
        """The whole run time of the task from nothing, and how this attempt ends."""
        ...


class LognormalWork:
    """Run times exp(N(log median, sigma)), by task; a share of first attempts fails with exit 1."""

    def __init__(
        self, median_seconds: float, sigma: float, seed: int, failing_share: float = 0.0
    ) -> None:
        self._median = median_seconds
        self._sigma = sigma
        self._seed = seed
        self._failing = failing_share

    def run(self, job_id: str, index: int, attempt: int) -> TaskRun:
        """The same task takes the same time in every attempt and every process."""
        dice = random.Random(f"{self._seed}/{job_id}/{index}")
        seconds = self._median * math.exp(self._sigma * dice.gauss(0.0, 1.0))
        fails = dice.random() < self._failing
        return TaskRun(seconds, exit_code=1 if fails and attempt == 1 else 0)


class MeasuredWork:
    """Run times as a real run measured them, in seconds by task index."""

    def __init__(
        self, seconds: Mapping[int, float], save_seconds: Mapping[int, float] | None = None
    ) -> None:
        self._seconds = seconds
        self._saves = save_seconds or {}

    def run(self, job_id: str, index: int, attempt: int) -> TaskRun:  # noqa: ARG002 - the port's
        """The measured time of this index, whatever the job and attempt."""
        return TaskRun(self._seconds[index], save_seconds=self._saves.get(index))
