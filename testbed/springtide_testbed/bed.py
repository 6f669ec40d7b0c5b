"""A test bed: some parts, each in its own folder below one home.

State is on disk only (``<home>/<part>/running.json``), so that any process can end what another
one started, also after a crash. Three nets make sure that no server outlives its use:

1. ``down`` ends the recorded processes, then every process of the parts that works below the home.
2. A bed with an owner has a watcher, a small process of its own, that calls ``down`` when the
   owner is gone, however it ended.
3. ``end_abandoned_beds`` ends beds whose owner and watcher were both killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from springtide_testbed.errors import PartFailedError, PortTakenError, TestbedError
from springtide_testbed.part import Part, Running
from springtide_testbed.postgresql import PostgreSQL
from springtide_testbed.processes import (
    ProcessId,
    accepts_connections,
    kill_all,
    leftovers,
    spawn,
    wait_until,
)
from springtide_testbed.rabbitmq import RabbitMQ

_RECORD = "running.json"
_OWNER = "owner.json"
_WATCHER = "watcher.json"
_OWNED_PREFIX = "springtide-bed-"
_PORT_TRIES = 3
_WATCH_SECONDS = 0.5


def default_parts() -> tuple[Part, ...]:
    """Every part there is, with its usual settings. A new part is one module and one entry here."""
    return (RabbitMQ(), PostgreSQL())


class Testbed:
    """Servers in one home folder.

    Used as a context manager it is up inside the block and gone after it. Methods block and are
    meant for fixtures and the command line; every wait inside has a limit.
    """

    __test__ = False  # the name starts like a test class; pytest must not collect it

    def __init__(self, home: Path, parts: Iterable[Part] | None = None) -> None:
        self.home = home.absolute()
        self.parts: dict[str, Part] = {
            part.name: part for part in (default_parts() if parts is None else parts)
        }

    @classmethod
    def reserve(cls) -> Path:
        """Make an empty home for a bed that this process owns.

        No watcher runs before ``start_watcher``: most test runs never start a server.
        """
        home = Path(tempfile.mkdtemp(prefix=_OWNED_PREFIX))
        home.chmod(0o711)  # a server may run as another user and must reach its own folder
        (home / _OWNER).write_text(ProcessId.me().to_json(), encoding="utf-8")
        return home

    @classmethod
    def owned(cls, parts: Iterable[Part] | None = None) -> Testbed:
        """A bed in a fresh folder that goes down when this process is gone, however it ends."""
        bed = cls(cls.reserve(), parts)
        bed.start_watcher()
        return bed

    def start_watcher(self) -> None:
        """Start the process that ends this bed when its owner is gone; once is enough.

        May be called by another process than the owner (a worker of a test run).
        """
        note = self.home / _WATCHER
        with suppress(FileNotFoundError):
            if ProcessId.from_json(note.read_text(encoding="utf-8")).is_alive():
                return
        watcher = spawn(
            [sys.executable, "-m", "springtide_testbed", "watch", "--home", self.home],
            home=self.home,
            log=self.home / "watcher.out",
            env=os.environ,
        )
        note.write_text(watcher.to_json(), encoding="utf-8")

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.down()

    def up(self, names: Sequence[str] | None = None) -> dict[str, Running]:
        """Start the named parts (all by default) side by side; one that is up already stays.

        When one part fails the others stay as they are and the first error is raised.
        """
        wanted = [self._part(name) for name in (self.parts if names is None else names)]
        self.home.mkdir(mode=0o711, parents=True, exist_ok=True)
        if self.home.stat().st_uid != os.geteuid():
            raise TestbedError(f"{self.home} belongs to another user; choose another folder")
        with ThreadPoolExecutor(max_workers=max(1, len(wanted))) as starters:
            futures = [starters.submit(self._start, part) for part in wanted]
        return {part.name: future.result() for part, future in zip(wanted, futures, strict=True)}

    def down(self) -> None:
        """End every part and remove the home with all data. Harmless when nothing is up.

        Raises PartFailedError when a process survives even SIGKILL.
        """
        with ThreadPoolExecutor(max_workers=max(1, len(self.parts))) as stoppers:
            list(stoppers.map(lambda part: self._stop(part, keep_data=False), self.parts.values()))
        shutil.rmtree(self.home, ignore_errors=True)

    def stop(self, name: str) -> None:
        """End one part in its orderly way and keep its data: ``restart`` brings it back."""
        self._stop(self._part(name), keep_data=True)

    def kill(self, name: str) -> None:
        """``kill -9`` of the server, as a crash; its data stays. Returns once it is gone."""
        running = self._record(name)
        running.main.signal(signal.SIGKILL)
        if not running.main.wait_ended(10.0):
            raise PartFailedError(f"{name} (process {running.main.pid}) survived SIGKILL")

    def pause(self, name: str) -> None:
        """Freeze the server (SIGSTOP): connections stay open and nothing answers."""
        self._record(name).main.signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a frozen server go on."""
        self._record(name).main.signal(signal.SIGCONT)

    def restart(self, name: str) -> Running:
        """Start a part that was killed or stopped: same ports, same credentials, same data."""
        return self._start(self._part(name))

    def running(self) -> dict[str, Running]:
        """The parts that are up and alive now."""
        found = {}
        for name in self.parts:
            record = Running.load(self.home / name / _RECORD)
            if record is not None and record.main.is_alive():
                found[name] = record
        return found

    def env(self) -> dict[str, str]:
        """What clients of the living parts put into their environment."""
        return {key: value for part in self.running().values() for key, value in part.env.items()}

    def log_folder(self, name: str) -> Path:
        """Where a part writes its logs; gone after ``down``."""
        return self.home / name / "log"

    def keep_logs(self, folder: Path) -> None:
        """Copy all logs to ``folder``, for a failed test run."""
        for name in self.parts:
            with suppress(FileNotFoundError):
                shutil.copytree(self.log_folder(name), folder / name, dirs_exist_ok=True)

    def _part(self, name: str) -> Part:
        try:
            return self.parts[name]
        except KeyError:
            known = ", ".join(self.parts)
            raise TestbedError(f"there is no part {name!r}; known parts: {known}") from None

    def _record(self, name: str) -> Running:
        record = Running.load(self.home / self._part(name).name / _RECORD)
        if record is None:
            raise TestbedError(f"{name} was never started in {self.home}")
        return record

    def _start(self, part: Part) -> Running:
        part.ensure_available()
        folder = self.home / part.name
        record = folder / _RECORD
        before = Running.load(record)
        if before is not None and before.main.is_alive():
            return before
        first_start = before is None
        if part.port is not None and accepts_connections(part.port):
            raise PortTakenError(
                f"port {part.port} of 127.0.0.1, wanted for {part.name}, is taken: end what "
                f"listens there ('ss -ltnp sport = :{part.port}' names it) or choose another port"
            )
        for tries_left in reversed(range(_PORT_TRIES)):
            folder.mkdir(mode=0o700, exist_ok=True)
            try:
                running = part.start(folder)
            except PortTakenError:
                # Somebody was quicker on a port that was free a moment ago. A restart must come
                # back where its clients look for it, and a fixed port was asked for by name.
                if not first_start or part.port is not None or tries_left == 0:
                    raise
                kill_all(leftovers(folder, part.programs))
                shutil.rmtree(folder, ignore_errors=True)
            else:
                running.save(record)
                return running
        raise AssertionError("the loop above returns or raises")

    def _stop(self, part: Part, *, keep_data: bool) -> None:
        folder = self.home / part.name
        record = Running.load(folder / _RECORD)
        if record is not None and record.main.is_alive():
            part.stop(record, keep_data=keep_data)
        stuck = kill_all(leftovers(folder, part.programs))
        if stuck:
            pids = ", ".join(str(process.pid) for process in stuck)
            raise PartFailedError(f"processes of {part.name} survived SIGKILL: {pids}")


def watch(home: Path) -> None:
    """Wait until the owner of a bed is gone, then end the bed. The watcher's whole life.

    Ends also when the bed went down before.
    """
    owner = _owner(home)
    while owner is not None and owner.is_alive() and home.exists():
        wait_until(lambda: False, _WATCH_SECONDS)
    Testbed(home).down()


def end_abandoned_beds() -> list[Path]:
    """End owned beds of this user whose owner is gone; returns their homes.

    Only needed when a watcher was killed together with its owner.
    """
    ended = []
    for home in Path(tempfile.gettempdir()).glob(f"{_OWNED_PREFIX}*"):
        with suppress(OSError):
            if home.stat().st_uid != os.geteuid():
                continue
            owner = _owner(home)
            if owner is not None and not owner.is_alive():
                Testbed(home).down()
                ended.append(home)
    return ended


def _owner(home: Path) -> ProcessId | None:
    try:
        return ProcessId.from_json((home / _OWNER).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
