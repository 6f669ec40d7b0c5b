"""PodStats over process groups of this machine, by psutil."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
        leaders = self._leaders()
        if not leaders:
            return ()
        children = _children()
        return [
            reading
            for uid, pid in leaders
            if (reading := self._read_tree(uid, pid, children)) is not None
        ]

    def _read_tree(
        self, uid: str, leader: int, children: Mapping[int, Sequence[int]]
    ) -> PodReading | None:
        cpu, memory, seen = 0.0, 0, False
        members = [leader]
        for pid in members:  # grows while it is walked
            members += children.get(pid, ())
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    times = process.cpu_times()
                    memory += process.memory_info().rss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            cpu += times.user + times.system + times.children_user + times.children_system
            seen = True
        if not seen:
            return None
        return PodReading(pod_uid=uid, at=self._clock.now(), cpu_seconds=cpu, memory_bytes=memory)


def _children() -> dict[int, list[int]]:
    """Children of every process, from one look at all of them: a look per pod costs more."""
    found: dict[int, list[int]] = {}
    for process in psutil.process_iter(["ppid"]):
        found.setdefault(process.info["ppid"], []).append(process.pid)
    return found
