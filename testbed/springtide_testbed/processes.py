"""Starting, recognising and ending server processes.

A process id alone is no identity: numbers are reused. A process is named by its id and its start
time, so that a record from an earlier boot or an earlier run never ends a stranger's process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from springtide_testbed.errors import PartFailedError, PortTakenError

_POLL_SECONDS = 0.02
_LOG_LINES_SHOWN = 20
_children: dict[int, subprocess.Popen[bytes]] = {}
"""What this process started itself: it must be reaped here, or it stays as a zombie."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same number."""

    pid: int
    started: float
    """Start time as the kernel tells it; only ever compared with itself."""

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The identity of a living process; None when there is none (a zombie has ended)."""
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            return cls(pid, _start_time(process))
        except psutil.NoSuchProcess:
            return None

    @classmethod
    def me(cls) -> ProcessId:
        """The identity of this process."""
        own = cls.of(os.getpid())
        assert own is not None
        return own

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ProcessId:
        return cls(**json.loads(text))

    def is_alive(self) -> bool:
        """Whether this very process still runs. Reaps it when it was our child and has ended."""
        child = _children.get(self.pid)
        if child is not None and child.poll() is not None:
            del _children[self.pid]
        return ProcessId.of(self.pid) == self

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a process that has ended already is no error."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait_ended(self, within_seconds: float) -> bool:
        """Wait until the process is gone; False when it still runs after the limit."""
        return wait_until(lambda: not self.is_alive(), within_seconds)


def _start_time(process: psutil.Process) -> float:
    """Ticks since boot on Linux: unlike a wall-clock time it never shifts with the clock."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return process.create_time()
    except ProcessLookupError as error:
        raise psutil.NoSuchProcess(process.pid) from error
    return float(stat.rpartition(")")[2].split()[19])


def wait_until(condition: Callable[[], bool], within_seconds: float) -> bool:
    """Poll ``condition`` until it holds or the limit is over; returns whether it held."""
    deadline = time.monotonic() + within_seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def spawn(
    command: Sequence[str | Path],
    *,
    home: Path,
    log: Path,
    env: Mapping[str, str],
    user: str | None = None,
) -> ProcessId:
    """Start a server in a session of its own, so that Ctrl-C at the terminal does not reach it.

    Its working directory is ``home``: that is how ``leftovers`` finds it when its record was lost.
    ``env`` is the whole environment: nothing of the caller's leaks into the server.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            cwd=home,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
    _children[child.pid] = child
    # Between the start and this line the child cannot vanish: it is ours and not yet reaped. When
    # it has died already, an identity that never matches makes the caller see it as ended.
    return ProcessId.of(child.pid) or ProcessId(child.pid, -1.0)


def wait_ready(
    process: ProcessId, ready: Callable[[], bool], *, what: str, log: Path, within_seconds: float
) -> None:
    """Wait until ``ready`` holds; stop waiting at once when the process dies.

    Raises PartFailedError with the last lines of ``log`` (PortTakenError when these say so).
    """
    alive = True

    def settled() -> bool:
        nonlocal alive
        alive = process.is_alive()
        return not alive or ready()

    in_time = wait_until(settled, within_seconds)
    if in_time and alive:
        return
    happened = "ended during its start" if in_time else f"was not ready in {within_seconds:g} s"
    tail = _tail(log)
    taken = "eaddrinuse" in tail.lower() or "address already in use" in tail.lower()
    kind = PortTakenError if taken else PartFailedError
    raise kind(f"{what} {happened}; the end of {log}:\n{tail}")


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(lines[-_LOG_LINES_SHOWN:])


def leftovers(home: Path, programs: frozenset[str]) -> list[ProcessId]:
    """Every living process of ``programs`` that works below ``home``.

    Both conditions count: a person's shell that stands in the folder is not ours to end.
    """
    root = home.resolve()
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.name() not in programs:
                continue
            folder = Path(process.cwd().removesuffix(" (deleted)"))
            identity = ProcessId.of(process.pid)
            if identity is not None and (folder == root or root in folder.parents):
                found.append(identity)
    return found


def kill_all(processes: Iterable[ProcessId], within_seconds: float = 5.0) -> list[ProcessId]:
    """SIGKILL each process and wait; returns those that still run (a hung kernel call)."""
    doomed = list(processes)
    for process in doomed:
        process.signal(signal.SIGKILL)
    wait_until(lambda: not any(process.is_alive() for process in doomed), within_seconds)
    return [process for process in doomed if process.is_alive()]


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody uses now, all different.

    They are held together and then let go: another process may still take one before the server
    does. Servers then fail with PortTakenError, and the bed starts them on other ports.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [int(held.getsockname()[1]) for held in sockets]


def accepts_connections(port: int) -> bool:
    """Whether something listens on this port of loopback."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
