"""PostgreSQL: one private cluster on loopback, without durable writes (for tests only)."""

from __future__ import annotations

import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from springtide_testbed import installing, processes
from springtide_testbed.errors import PartFailedError
from springtide_testbed.part import Running

_VARIABLE = "SPRINGTIDE_POSTGRESQL_BIN"
_USER = "springtide"
_INITDB_LIMIT_SECONDS = 60.0
_START_LIMIT_SECONDS = 60.0
_STOP_LIMIT_SECONDS = 10.0
_START_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgreSQL:
    """Settings of the part."""

    port: int | None = None
    """A fixed port; None takes a free one."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Server settings beyond the test bed's own, by their names in postgresql.conf."""

    @property
    def name(self) -> str:
        return "postgresql"

    @property
    def programs(self) -> frozenset[str]:
        return frozenset({"postgres", "initdb"})

    def ensure_available(self) -> None:
        _programs()

    def start(self, home: Path) -> Running:
        bin_folder = _programs()
        owner = _server_user()
        data = home / "data"
        log = home / "log" / "postgresql.log"
        log.parent.mkdir(exist_ok=True)
        env = {"PATH": os.defpath, "LC_ALL": "C.UTF-8", "HOME": str(home)}
        if owner is not None:
            shutil.chown(home, owner)
        password_file = home / "password"
        if not (data / "PG_VERSION").exists():
            _make_cluster(bin_folder, home, owner=owner, password_file=password_file, env=env)
        password = password_file.read_text(encoding="utf-8").strip()
        port = self._port(home)
        options = {
            "port": str(port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",  # their paths are limited to 107 bytes; TCP does
            "max_connections": "100",
            # A killed server loses nothing by these: the kernel still has its writes. Only a
            # crash of the whole machine would, and the data is thrown away anyway.
            "fsync": "off",
            "full_page_writes": "off",
            **self.settings,
        }
        command: list[str | Path] = [bin_folder / "postgres", "-D", data]
        for key, value in options.items():
            command += ["-c", f"{key}={value}"]
        main = _start_server(command, home=home, data=data, log=log, env=env, owner=owner)
        return Running(
            part=self.name,
            version=_version(bin_folder),
            env={"DATABASE_URL": f"postgresql://{_USER}:{password}@127.0.0.1:{port}/postgres"},
            main=main,
        )

    def stop(self, running: Running, *, keep_data: bool) -> None:
        # Fast shutdown, then immediate. Never SIGKILL first: it would leave the server's System V
        # shared memory to the machine.
        for number in (signal.SIGINT, signal.SIGQUIT) if keep_data else (signal.SIGQUIT,):
            running.main.signal(number)
            if running.main.wait_ended(_STOP_LIMIT_SECONDS):
                return

    def _port(self, home: Path) -> int:
        """The port of the first start, so that clients find a restarted server again."""
        note = home / "port"
        if not note.exists():
            port = self.port if self.port is not None else processes.free_ports(1)[0]
            note.write_text(str(port), encoding="utf-8")
        return int(note.read_text(encoding="utf-8"))


def _find_programs() -> Path | None:
    """The folder with initdb and postgres: Debian keeps it off the PATH, one a version."""
    named = os.environ.get(_VARIABLE)
    if named:
        candidates = [Path(named)]
    else:
        candidates = sorted(
            Path("/usr/lib/postgresql").glob("*/bin"),
            key=lambda folder: int(re.sub(r"\D", "", folder.parent.name) or 0),
            reverse=True,
        )
        on_path = shutil.which("initdb")
        if on_path:
            candidates.append(Path(on_path).resolve().parent)
    for folder in candidates:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    return None


def _programs() -> Path:
    return installing.require(
        _find_programs, what="PostgreSQL", package="postgresql", variable=_VARIABLE
    )


def _server_user() -> str | None:
    """initdb and the server refuse to run as root: the package's own user takes over then."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            pwd.getpwnam(name)
        except KeyError:
            continue
        return name
    raise PartFailedError(
        "PostgreSQL refuses to run as root and there is no user 'postgres': "
        "run the test bed as an ordinary user, or create that user"
    )


def _make_cluster(
    bin_folder: Path, home: Path, *, owner: str | None, password_file: Path, env: Mapping[str, str]
) -> None:
    descriptor = os.open(password_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(16) + "\n")
    if owner is not None:
        shutil.chown(password_file, owner)
    command: list[str | Path] = [
        bin_folder / "initdb",
        "-D",
        home / "data",
        "-U",
        _USER,
        "-E",
        "UTF8",
    ]
    command += ["--auth=scram-sha-256", f"--pwfile={password_file}"]
    command += ["--no-sync", "--no-instructions"]
    done = subprocess.run(
        command,
        cwd=home,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_INITDB_LIMIT_SECONDS,
        check=False,
        user=owner,
        group=owner,
        extra_groups=None if owner is None else [],
    )
    if done.returncode != 0:
        raise PartFailedError(f"initdb failed: {done.stderr.strip() or done.stdout.strip()}")


def _start_server(
    command: list[str | Path],
    *,
    home: Path,
    data: Path,
    log: Path,
    env: Mapping[str, str],
    owner: str | None,
) -> processes.ProcessId:
    """Start the server, again while it finds the shared memory of a killed predecessor.

    That predecessor's children need up to a second to notice its death; until then a new server
    refuses the folder.
    """
    for tries_left in reversed(range(_START_TRIES)):
        log.write_bytes(b"")
        main = processes.spawn(command, home=home, log=log, env=env, user=owner)
        try:
            processes.wait_ready(
                main,
                lambda pid=main.pid: _is_ready(data, pid),  # type: ignore[misc]
                what="PostgreSQL",
                log=log,
                within_seconds=_START_LIMIT_SECONDS,
            )
        except PartFailedError as error:
            processes.kill_all([main])
            predecessor = "shared memory block" in str(error) or "lock file" in str(error)
            if not predecessor or tries_left == 0:
                raise
            processes.wait_until(lambda: False, within_seconds=0.3)
        else:
            return main
    raise AssertionError("the loop above returns or raises")


def _is_ready(data: Path, pid: int) -> bool:
    """The server writes its state into the last line of its pid file, as pg_ctl reads it."""
    try:
        lines = (data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return False
    return len(lines) >= 8 and lines[0].strip() == str(pid) and lines[7].strip() == "ready"


def _version(bin_folder: Path) -> str:
    told = subprocess.run(
        [bin_folder / "postgres", "--version"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    found = re.search(r"\d+(\.\d+)*", told)
    return found.group() if found else told.strip()
