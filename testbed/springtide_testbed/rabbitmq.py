"""RabbitMQ: one private node on loopback, with the management API.

The node has a name service (epmd) of its own: the machine-wide one would be shared with other
nodes, and its name would outlive ours. It is started here, in the foreground, before the broker:
left to itself the broker would start one as a daemon that nobody can name afterwards.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from springtide_testbed import installing, processes
from springtide_testbed.errors import PartFailedError
from springtide_testbed.management import Management
from springtide_testbed.part import Running
from springtide_testbed.processes import ProcessId

_VARIABLE = "SPRINGTIDE_RABBITMQ_BIN"
_USER = "springtide"
_EPMD_LIMIT_SECONDS = 15.0
_START_LIMIT_SECONDS = 120.0
_STOP_LIMIT_SECONDS = 20.0
_ERLANG_BIN = "/usr/lib/erlang/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitMQ:
    """Settings of the part."""

    port: int | None = None
    """A fixed AMQP port; None takes a free one. The other ports are always free ones."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Lines of rabbitmq.conf beyond, or instead of, the test bed's own."""

    @property
    def name(self) -> str:
        return "rabbitmq"

    @property
    def programs(self) -> frozenset[str]:
        # rabbitmq-server is the start script before it becomes the Erlang machine (beam.smp); the
        # last four are Erlang's port programs.
        return frozenset(
            {
                "beam.smp",
                "epmd",
                "rabbitmq-server",
                "erl_child_setup",
                "inet_gethost",
                "cpu_sup",
                "memsup",
            }
        )

    def ensure_available(self) -> None:
        _programs()

    def start(self, home: Path) -> Running:
        programs = _programs()
        node = self._prepare(home)
        env = node.environment(home)
        log = home / "log" / "rabbitmq.out"
        log.write_bytes(b"")
        epmd = _start_epmd(node, home, env)
        main = processes.spawn([programs / "rabbitmq-server"], home=home, log=log, env=env)
        management = Management(node.management_url)
        try:
            processes.wait_ready(
                main,
                lambda: processes.accepts_connections(node.amqp) and management.is_ready(),
                what="RabbitMQ",
                log=log,
                within_seconds=_START_LIMIT_SECONDS,
            )
        except PartFailedError:
            processes.kill_all([main, epmd])
            raise
        return Running(
            part=self.name,
            version=management.version(),
            env={"AMQP_URL": node.amqp_url, "RABBITMQ_MANAGEMENT_URL": node.management_url},
            main=main,
            helpers=(epmd,),
        )

    def stop(self, running: Running, *, keep_data: bool) -> None:
        # An orderly stop takes seconds; the node has nothing outside its folder to tidy up.
        running.main.signal(signal.SIGTERM if keep_data else signal.SIGKILL)
        running.main.wait_ended(_STOP_LIMIT_SECONDS)
        # Only now the name service: a broker that loses it while it stops waits for it.
        for epmd in running.helpers:
            epmd.signal(signal.SIGTERM)
            epmd.wait_ended(_EPMD_LIMIT_SECONDS)

    def _prepare(self, home: Path) -> _Node:
        """Write the node's files at the first start; read them back at every later one."""
        note = home / "node.json"
        if note.exists():
            return _Node(**json.loads(note.read_text(encoding="utf-8")))
        amqp, management, distribution, epmd = processes.free_ports(4)
        node = _Node(
            amqp=amqp if self.port is None else self.port,
            management=management,
            distribution=distribution,
            epmd=epmd,
            password=secrets.token_hex(16),
        )
        (home / "log").mkdir(exist_ok=True)
        _write_secret(home / ".erlang.cookie", secrets.token_hex(16), mode=0o400)
        (home / "enabled_plugins").write_text("[rabbitmq_management].\n", encoding="utf-8")
        (home / "environment").write_text("", encoding="utf-8")
        (home / "advanced.config").write_text(
            "[{rabbit, [{quorum_tick_interval, 1000}, {channel_tick_interval, 1000}]}].\n",
            encoding="utf-8",
        )
        settings = {
            "listeners.tcp.1": f"127.0.0.1:{node.amqp}",
            "management.tcp.ip": "127.0.0.1",
            "management.tcp.port": str(node.management),
            # This user takes the place of the well-known guest, which is not made at all: a
            # client with wrong settings must not get in by accident.
            "default_user": _USER,
            "default_pass": node.password,
            "default_user_tags.administrator": "true",
            "log.console": "false",
            "log.file": str(home / "log" / "rabbitmq.log"),
            "log.file.level": "info",
            "vm_memory_high_watermark.absolute": "1GB",
            "disk_free_limit.absolute": "50MB",
            "consumer_timeout": "1800000",
            "collect_statistics_interval": "1000",
            **self.settings,
        }
        lines = "".join(f"{key} = {value}\n" for key, value in settings.items())
        _write_secret(home / "rabbitmq.conf", lines)
        _write_secret(note, json.dumps(asdict(node)))
        return node


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """What a restart needs again: the ports and the password of the first start."""

    amqp: int
    management: int
    distribution: int
    epmd: int
    password: str

    @property
    def amqp_url(self) -> str:
        return f"amqp://{_USER}:{self.password}@127.0.0.1:{self.amqp}/"

    @property
    def management_url(self) -> str:
        return f"http://{_USER}:{self.password}@127.0.0.1:{self.management}"

    def environment(self, home: Path) -> dict[str, str]:
        """Everything the scripts and the node read; no file of the machine-wide broker counts."""
        return {
            "PATH": f"{os.environ.get('PATH', os.defpath)}:{_ERLANG_BIN}",
            "LANG": "C.UTF-8",
            "HOME": str(home),  # here the Erlang cookie lies
            "RABBITMQ_NODENAME": f"springtide{self.amqp}@localhost",
            "RABBITMQ_BASE": str(home),
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_LOG_BASE": str(home / "log"),
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(home / "advanced.config"),
            "RABBITMQ_CONF_ENV_FILE": str(home / "environment"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(home / "config"),
            "RABBITMQ_PID_FILE": str(home / "server.pid"),
            "RABBITMQ_DIST_PORT": str(self.distribution),
            "ERL_EPMD_PORT": str(self.epmd),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            # Two scheduler threads that sleep when idle: a test bed shares a small machine.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none "
                "-kernel inet_dist_use_interface {127,0,0,1}"
            ),
            # Makes the start script become the node instead of standing before it: the process
            # that was started is the one to signal.
            "RUNNING_UNDER_SYSTEMD": "true",
        }


def _write_secret(path: Path, text: str, *, mode: int = 0o600) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _start_epmd(node: _Node, home: Path, env: Mapping[str, str]) -> ProcessId:
    """The node's own name service; one that survived a killed broker is used again."""
    for survivor in processes.leftovers(home, frozenset({"epmd"})):
        return survivor
    program = shutil.which("epmd", path=env["PATH"])
    if program is None:
        raise PartFailedError("epmd (part of Erlang) is not on the PATH; install erlang-base")
    log = home / "log" / "epmd.out"
    command = [program, "-port", str(node.epmd), "-address", "127.0.0.1"]
    epmd = processes.spawn(command, home=home, log=log, env=env)
    try:
        processes.wait_ready(
            epmd,
            lambda: processes.accepts_connections(node.epmd),
            what="epmd",
            log=log,
            within_seconds=_EPMD_LIMIT_SECONDS,
        )
    except PartFailedError:
        processes.kill_all([epmd])
        raise
    return epmd


def _find_programs() -> Path | None:
    """The folder with the node's own start script.

    Not Debian's rabbitmq-server on the PATH: that wrapper switches to the package's user.
    """
    named = os.environ.get(_VARIABLE)
    if named:
        candidates = [Path(named)]
    else:
        candidates = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin"))[::-1]
        on_path = shutil.which("rabbitmq-server")
        if on_path and not Path(on_path).resolve().is_relative_to("/usr/lib/rabbitmq"):
            candidates.append(Path(on_path).resolve().parent)
    for folder in candidates:
        if (folder / "rabbitmq-server").exists() and (folder / "rabbitmq-env").exists():
            return folder
    return None


def _programs() -> Path:
    return installing.require(
        _find_programs, what="RabbitMQ", package="rabbitmq-server", variable=_VARIABLE
    )
