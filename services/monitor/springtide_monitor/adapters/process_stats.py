"""PodStats over process groups of this machine, by psutil."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import psutil

from springtide_shared.ports.clock import Clock
from springtide_shared.ports.metrics import PodReading


class ProcessStats:
    """Reads every process of a pod's tree: the program, its children, and children of those.

    `leaders` gives (pod uid, pid of the pod's first process) of all running pods. Children that
    ended and were waited for count through their parent, so a pod's total seldom falls back.
    """

    def __init__(self, leaders: Callable[[], Sequence[tuple[str, int]]], clock: Clock) -> None:
        self._leaders = leaders
        self._clock = clock

    async def read(self) -> Sequence[PodReading]:
        """See the port; a process that ends meanwhile is left out."""
        readings = []
        for uid, pid in self._leaders():
            try:
                leader = psutil.Process(pid)
                members = [leader, *leader.children(recursive=True)]
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            cpu, memory = 0.0, 0
            for member in members:
                try:
                    with member.oneshot():
                        times = member.cpu_times()
                        cpu += times.user + times.system
                        cpu += times.children_user + times.children_system
                        memory += member.memory_info().rss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            readings.append(
                PodReading(pod_uid=uid, at=self._clock.now(), cpu_seconds=cpu, memory_bytes=memory)
            )
        return readings
