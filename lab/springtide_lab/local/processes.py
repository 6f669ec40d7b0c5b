"""Pods as processes: start, wait without polling, find every descendant, end them all.

A pod's processes are found in three ways, because each alone can be escaped: by the session that
its first process leads, by descent from it, and by a mark in the environment, which even a process
that left its session and lost its parent still carries.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import psutil

MARK: Final = "SPRINGTIDE_POD_UID"
"""Environment variable with the pod's uid."""
_POLL_SECONDS: Final = 0.05
"""Where the system cannot tell of a process's end."""


_TICK_SECONDS: Final = 0.02
"""Start times are told in clock ticks."""


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Enough to find a pod's processes after the death of who started them."""

    pod_uid: str
    pid: int
    """Of the first process; its process group and session bear the same number."""
    started_at: float
    """As the system has it; tells the process from a later one of the same number."""


def start(
    command: Sequence[str], pod_uid: str, directory: Path, log: Path
) -> subprocess.Popen[bytes]:
    """Start a pod's first process in a session of its own, at a lower priority than ours.

    Its own streams go to `log`. The environment is ours without springtide's settings (they are
    for services, and may hold credentials), with the mark.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SPRINGTIDE_") or name.startswith("SPRINGTIDE_AGENT_")
    }
    with log.open("ab") as stream:
        process = subprocess.Popen(
            list(command),
            cwd=directory,
            env={**env, MARK: pod_uid},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
    return process


NICE: Final = 10
"""Pods yield to what people do on this machine, and to the services that look after them."""


async def ended(process: subprocess.Popen[bytes]) -> None:
    """Until the process has ended; it is not reaped yet, so its number stays taken."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # not on this system: look again and again
        while not _is_over(process):  # noqa: ASYNC110  (nothing there sets an event)
            await asyncio.sleep(_POLL_SECONDS)
        return
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def over() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(descriptor, over)
    try:
        await future
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _is_over(process: subprocess.Popen[bytes]) -> bool:
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """All processes at one moment, with parent and session."""

    rows: Mapping[int, tuple[psutil.Process, int, int]]
    """Number → (process, its parent's number, its session)."""

    @staticmethod
    def take(since: float = 0.0) -> ProcessTable:
        """Read it; `since`: only processes that began then or later, the system's time.

        A pod's processes all began after its first one, and start times are remembered from one
        table to the next, so that on a busy machine this costs little.
        """
        rows: dict[int, tuple[psutil.Process, int, int]] = {}
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if process.create_time() >= since:
                    rows[process.pid] = (process, process.ppid(), os.getsid(process.pid))
        return ProcessTable(rows)

    def of_pods(self, leaders: Mapping[str, int]) -> dict[str, list[psutil.Process]]:
        """Processes by pod uid, by session and descent; `leaders`: uid → first process."""
        uid_of = {pid: uid for uid, pid in leaders.items()}
        found: dict[str, list[psutil.Process]] = {uid: [] for uid in leaders}
        for pid, (process, _, session) in sorted(self.rows.items()):
            uid = uid_of.get(session)
            above, steps = pid, 0
            while uid is None and above in self.rows and steps < len(self.rows):
                uid = uid_of.get(above)
                above, steps = self.rows[above][1], steps + 1
            if uid is not None:
                found[uid].append(process)
        return found

    def marked(self) -> list[tuple[str, psutil.Process]]:
        """(Pod uid, process) of all processes that carry a mark and that we may read."""
        found: list[tuple[str, psutil.Process]] = []
        for _, (process, _, _) in sorted(self.rows.items()):
            with suppress(psutil.Error, OSError):
                uid = process.environ().get(MARK)
                if uid:
                    found.append((uid, process))
        return found


def kill_pod(record: ProcessRecord) -> int:
    """SIGKILL to everything of a pod, also to what left its group or its session.

    Call it before the leader is reaped. Returns how many processes besides the leader were there.
    A process that forks while it is looked for is found in the next round.
    """
    others, pod_uid, leader = 0, record.pod_uid, record.pid
    for _ in range(5):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
        table = ProcessTable.take(since=record.started_at - _TICK_SECONDS)
        members = {item.pid: item for item in table.of_pods({pod_uid: leader})[pod_uid]}
        members |= {item.pid: item for uid, item in table.marked() if uid == pod_uid}
        members.pop(leader, None)
        alive = [item for _, item in sorted(members.items()) if _lives(item)]
        if not alive:
            break
        others += len(alive)
        for item in alive:
            with suppress(psutil.Error):
                item.kill()
    return others


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def record_of(pod_uid: str, pid: int) -> ProcessRecord:
    """The record of a process that was just started."""
    try:
        started_at = psutil.Process(pid).create_time()
    except psutil.Error:  # it ended at once
        started_at = 0.0
    return ProcessRecord(pod_uid=pod_uid, pid=pid, started_at=started_at)


def end_orphans(records: Sequence[ProcessRecord], pod_uids: Sequence[str], limit: float) -> int:
    """End what an earlier life left: by recorded session and start time, and by mark.

    A number that the system has given to another process since is left alone. Blocks until they
    are gone, at most `limit` seconds; returns how many there were.
    """
    uids = {*pod_uids, *(item.pod_uid for item in records)}
    seen: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + limit
    while True:
        table = ProcessTable.take()
        marked = [item for uid, item in table.marked() if uid in uids]
        leaders = {}
        for record in records:
            row = table.rows.get(record.pid)
            with suppress(psutil.Error):
                # The system's start times shift a little when its clock is set.
                if row and abs(row[0].create_time() - record.started_at) < 2.0:
                    leaders[record.pod_uid] = record.pid
        orphans = [item for group in table.of_pods(leaders).values() for item in group] + marked
        alive = {item.pid: item for item in orphans if _lives(item)}
        seen |= alive
        if not alive or time.monotonic() > deadline:
            return len(seen)
        for _, item in sorted(alive.items()):
            with suppress(psutil.Error):
                item.kill()
        psutil.wait_procs([item for _, item in sorted(alive.items())], timeout=0.5)


def resident_bytes(processes: Sequence[psutil.Process]) -> int:
    """Resident memory of all of them; pages that they share are counted once per process."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total
