"""The program as a child process in a group of its own: start, signal, freeze, thaw, end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from springtide_shared.ports.clock import Clock
from springtide_shared.units import exit_code_of

_PR_SET_PDEATHSIG: Final = 1
_WATCH_SECONDS: Final = 0.1
"""How often a program is looked at where the system has no pidfd."""


def _dies_with_agent() -> Callable[[], None] | None:
    """What the child does before exec so that the kernel kills it when the agent is gone.

    Without it a killed agent leaves a program that nobody watches while the next attempt runs.
    """
    if sys.platform != "linux":
        return None
    import ctypes

    libc = ctypes.CDLL(None)
    agent = os.getpid()

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != agent:  # it died in between
            os._exit(SIGKILL_EXIT)

    return in_child


SIGKILL_EXIT: Final = 137


class Program:
    """One running program; its process group is signalled as a whole."""

    def __init__(self, process: subprocess.Popen[bytes], clock: Clock) -> None:
        self._process = process
        self._clock = clock
        self._started = clock.monotonic()
        self._ended_at: float | None = None
        self._frozen_at: float | None = None
        self._frozen_seconds = 0.0
        self._pidfd = -1
        self._is_closed = False
        self.ended = asyncio.Event()
        """Set when the group's leader has ended."""
        self.on_end: Callable[[], None] = lambda: None
        self._watch()

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdout: IO[bytes],
        stderr: IO[bytes],
        clock: Clock,
    ) -> Program:
        """Run `command` as given: an argument list, never a shell's text.

        Raises:
            OSError, ValueError, subprocess.SubprocessError: it cannot be executed.
        """
        process = subprocess.Popen(
            list(command),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            process_group=0,
            preexec_fn=_dies_with_agent(),  # noqa: PLW1509 - only prctl, in a child without threads
        )
        return cls(process, clock)

    # ------------------------------------------------------------ facts
    @property
    def pid(self) -> int:
        """The leader's process id, also its group's."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the leader has ended."""
        return self.ended.is_set()

    @property
    def is_frozen(self) -> bool:
        """Whether `freeze` holds it."""
        return self._frozen_at is not None

    @property
    def exit_code(self) -> int:
        """Of an ended program, 128 + n for a signal."""
        assert self._process.returncode is not None
        return exit_code_of(self._process.returncode)

    def run_seconds(self) -> float:
        """How long it has run, frozen time excluded."""
        end = self._ended_at if self._ended_at is not None else self._clock.monotonic()
        still = end - self._frozen_at if self._frozen_at is not None else 0.0
        return max(0.0, end - self._started - self._frozen_seconds - still)

    def would_die_of(self, number: signal.Signals) -> bool:
        """Whether the leader neither catches, blocks nor ignores the signal at this moment.

        A program that has not installed its handler yet would be ended by the request to save.
        False where the system does not tell.
        """
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return False
        masks = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        try:
            heard = [int(masks[name], 16) for name in ("SigCgt", "SigIgn", "SigBlk")]
        except (KeyError, ValueError):
            return False
        return not any(mask >> (number - 1) & 1 for mask in heard)

    # ------------------------------------------------------------ acts
    def signal_leader(self, number: signal.Signals) -> None:
        """Send to the leader alone; nothing happens if it has ended."""
        if not self.has_ended:
            self._process.send_signal(number)

    def signal_group(self, number: signal.Signals) -> None:
        """Send to whatever is left of the group."""
        if self._is_closed:
            return  # the number may be another group's by now
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    def freeze(self) -> None:
        """Stop the whole group where it is."""
        if self._frozen_at is None and not self.has_ended:
            self.signal_group(signal.SIGSTOP)
            self._frozen_at = self._clock.monotonic()

    def thaw(self) -> None:
        """Let it go on; nothing happens if it is not frozen."""
        if self._frozen_at is not None:
            self.signal_group(signal.SIGCONT)
            self._frozen_seconds += self._clock.monotonic() - self._frozen_at
            self._frozen_at = None

    def all_stopped(self) -> bool:
        """Whether every process of the group has come to its stop (a stop takes effect late)."""
        try:
            stats = [entry for entry in os.scandir("/proc") if entry.name.isdigit()]
        except OSError:
            return True
        for entry in stats:
            try:
                text = Path(entry.path, "stat").read_text(errors="replace")
            except OSError:
                continue
            state, _, group = text.rpartition(")")[2].split()[:3]
            if int(group) == self.pid and state not in ("T", "t", "Z", "X"):
                return False
        return True

    def close(self) -> None:
        """Kill whatever is left of the group, the leader too; nothing happens the second time."""
        self.signal_group(signal.SIGKILL)
        if not self.has_ended:
            self._process.wait()
            self._look()
        self._is_closed = True

    # ------------------------------------------------------------ watching
    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        if hasattr(os, "pidfd_open"):
            try:
                self._pidfd = os.pidfd_open(self.pid)
            except OSError:
                self._pidfd = -1
        if self._pidfd >= 0:
            loop.add_reader(self._pidfd, self._look)
        else:
            loop.call_later(_WATCH_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._look()
        if not self.has_ended:
            asyncio.get_running_loop().call_later(_WATCH_SECONDS, self._look_again)

    def _look(self) -> None:
        if self.has_ended or self._process.poll() is None:
            return
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._ended_at = self._clock.monotonic()
        self.ended.set()
        self.on_end()
