"""Fixtures that all tests share: real servers, and a check that a test leaves nothing behind.

Real servers are started by the test that first asks for one and serve the whole run, also when
pytest-xdist spreads it over several processes: the processes meet in one test bed under a file
lock. The bed belongs to the main process; it goes down at the end of the run, or when that
process dies, however it dies.

- ``AMQP_URL`` (with ``RABBITMQ_MANAGEMENT_URL`` when there is one) and ``DATABASE_URL`` in the
  environment name servers to use instead of own ones.
- A server that cannot be had skips the tests that need it, with the reason. With
  ``REQUIRE_REAL=1`` it fails them.
"""

from __future__ import annotations

import asyncio
import asyncio.runners
import fcntl
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit, urlunsplit

import psutil
import pytest

from springtide_testbed import Testbed, TestbedError, end_abandoned_beds
from springtide_testbed.management import Management

_GRACE_SECONDS = 2.0
"""How long threads and processes may take to end after the test that started them."""

_BED = pytest.StashKey[Path]()
_FAILED = pytest.StashKey[bool]()


# ---- one test bed a run ---------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """The main process makes the (still empty) bed; xdist's workers are told where it is."""
    worker_input = getattr(config, "workerinput", None)
    if worker_input is not None:
        config.stash[_BED] = Path(worker_input["testbed_home"])
        return
    end_abandoned_beds()
    config.stash[_BED] = Testbed.reserve()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Called by xdist in the main process for each worker before it starts."""
    node.workerinput["testbed_home"] = str(node.config.stash[_BED])


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the servers, once the last worker is gone."""
    if hasattr(config, "workerinput") or _BED not in config.stash:
        return
    bed = Testbed(config.stash[_BED])
    if config.stash.get(_FAILED, False):
        bed.keep_logs(config.rootpath / "out" / "testbed-logs")
    bed.down()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_FAILED] = exitstatus not in {
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    }


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line for each real server that took part, with its version."""
    home = config.stash.get(_BED, None)
    if home is None:
        return
    for name, running in Testbed(home).running().items():
        terminalreporter.write_line(f"real {name} {running.version} (own test bed)")
    for note in sorted(home.glob("foreign-*")):
        terminalreporter.write_line(note.read_text(encoding="utf-8"))


@contextmanager
def _one_at_a_time(home: Path, name: str) -> Iterator[None]:
    """Hold the bed's lock of one server; the wait is limited by the test's own time limit."""
    with (home / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _own_server(config: pytest.Config, name: str) -> dict[str, str]:
    """Start a server of the bed unless it is up already; returns its environment variables."""
    home = config.stash[_BED]
    with _one_at_a_time(home, name):
        refusal = home / f"{name}.refused"
        if refusal.exists():  # another worker tried: one attempt a run is enough
            _cannot_be_had(name, refusal.read_text(encoding="utf-8"))
        bed = Testbed(home)
        bed.start_watcher()
        try:
            return dict(bed.up([name])[name].env)
        except TestbedError as error:
            refusal.write_text(str(error), encoding="utf-8")
            _cannot_be_had(name, str(error))


def _cannot_be_had(name: str, reason: str) -> NoReturn:
    if os.environ.get("REQUIRE_REAL"):
        pytest.fail(f"REQUIRE_REAL is set, but {name} cannot be had: {reason}", pytrace=False)
    pytest.skip(f"{name} cannot be had: {reason}")


def _note_foreign(config: pytest.Config, name: str, text: str) -> None:
    (config.stash[_BED] / f"foreign-{name}").write_text(text, encoding="utf-8")


def _fresh_name() -> str:
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def testbed_home(pytestconfig: pytest.Config) -> Path:
    """Folder of the bed of this run: ``Testbed(testbed_home).kill("rabbitmq")`` and the like."""
    return pytestconfig.stash[_BED]


# ---- RabbitMQ -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitServer:
    """The broker of this run."""

    url: str
    """AMQP URL of its default virtual host."""
    management: Management | None
    """None for a broker from the environment whose management API is not named there."""
    bed: Testbed | None
    """None for a broker from the environment: it is not ours to kill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitScope:
    """What one test has for itself on the broker."""

    url: str
    prefix: str
    """Unique to the test. Exchange and queue names must start with it: on a foreign broker the
    virtual host may be shared."""
    vhost: str | None
    """None on a foreign broker without a management API: there the prefix alone separates."""
    server: RabbitServer

    def close_connections(self) -> int:
        """Force-close every connection of this test, as an operator would; returns how many."""
        if self.vhost is None or self.server.management is None:
            pytest.skip("closing connections needs RABBITMQ_MANAGEMENT_URL")
        return self.server.management.close_connections(self.vhost)


@pytest.fixture(scope="session")
def rabbitmq_server(pytestconfig: pytest.Config, testbed_home: Path) -> RabbitServer:
    """The broker of this run: the one in ``AMQP_URL``, else one of our own."""
    url = os.environ.get("AMQP_URL")
    if url:
        api = os.environ.get("RABBITMQ_MANAGEMENT_URL")
        management = Management(api) if api else None
        version = management.version() if management else "of unknown version"
        _note_foreign(pytestconfig, "rabbitmq", f"real rabbitmq {version} (from AMQP_URL)")
        return RabbitServer(url=url, management=management, bed=None)
    env = _own_server(pytestconfig, "rabbitmq")
    return RabbitServer(
        url=env["AMQP_URL"],
        management=Management(env["RABBITMQ_MANAGEMENT_URL"]),
        bed=Testbed(testbed_home),
    )


@pytest.fixture
def rabbitmq(rabbitmq_server: RabbitServer) -> Iterator[RabbitScope]:
    """A virtual host of the test's own, removed afterwards with all that is in it."""
    name = _fresh_name()
    management = rabbitmq_server.management
    if management is None:
        yield RabbitScope(
            url=rabbitmq_server.url, prefix=f"{name}-", vhost=None, server=rabbitmq_server
        )
        return
    password = uuid.uuid4().hex
    management.create_vhost(name, password)
    address = urlsplit(rabbitmq_server.url)
    host = address.netloc.rpartition("@")[2]
    url = urlunsplit(address._replace(netloc=f"{name}:{password}@{host}", path=f"/{name}"))
    try:
        yield RabbitScope(url=url, prefix=f"{name}-", vhost=name, server=rabbitmq_server)
    finally:
        management.delete_vhost(name)


@pytest.fixture
def rabbitmq_url(rabbitmq: RabbitScope) -> str:
    """AMQP URL of a virtual host of the test's own; ask for ``rabbitmq`` to get more than that."""
    return rabbitmq.url


# ---- PostgreSQL -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgres_server_url(pytestconfig: pytest.Config) -> str:
    """URL of the server of this run: ``DATABASE_URL``, else one of our own."""
    url = os.environ.get("DATABASE_URL")
    if not url:
        return _own_server(pytestconfig, "postgresql")["DATABASE_URL"]
    if not urlsplit(url).scheme.startswith("postgres"):
        _cannot_be_had("postgresql", f"DATABASE_URL names {urlsplit(url).scheme!r}")
    url = urlunsplit(urlsplit(url)._replace(scheme="postgresql"))
    version = asyncio.run(_execute(url, "SHOW server_version"))
    _note_foreign(pytestconfig, "postgresql", f"real postgresql {version} (from DATABASE_URL)")
    return url


@pytest.fixture
def postgres_url(postgres_server_url: str) -> Iterator[str]:
    """URL (``postgresql://…``) of an empty database of the test's own, dropped afterwards."""
    name = _fresh_name()
    asyncio.run(_execute(postgres_server_url, f'CREATE DATABASE "{name}"'))
    try:
        yield urlunsplit(urlsplit(postgres_server_url)._replace(path=f"/{name}"))
    finally:
        asyncio.run(_execute(postgres_server_url, f'DROP DATABASE "{name}" WITH (FORCE)'))


async def _execute(url: str, statement: str) -> Any:
    import asyncpg

    connection = await asyncpg.connect(url, timeout=30)
    try:
        return await connection.fetchval(statement, timeout=60)
    finally:
        await connection.close(timeout=10)


# ---- a test leaves nothing behind -----------------------------------------------------------

_left_tasks: list[str] = []
"""Names of the tasks that were still running when an event loop ended."""

_cancel_all_tasks: Callable[[asyncio.AbstractEventLoop], None] = asyncio.runners._cancel_all_tasks  # type: ignore[attr-defined]


def _note_left_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Stands before asyncio's own clean-up, which would cancel forgotten tasks without a word."""
    _left_tasks.extend(f"{task.get_name()}: {task.get_coro()}" for task in asyncio.all_tasks(loop))
    _cancel_all_tasks(loop)


asyncio.runners._cancel_all_tasks = _note_left_tasks  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves an unowned task, a thread or a process.

    The mark ``leaves_behind(reason)`` lifts it, for a test whose subject is such a leak.
    """
    _left_tasks.clear()
    threads_before = set(threading.enumerate())
    children_before = set(_children())
    yield
    if request.node.get_closest_marker("leaves_behind") is not None:
        return
    home = request.config.stash[_BED]
    deadline = time.monotonic() + _GRACE_SECONDS
    while True:
        threads = [t for t in threading.enumerate() if t not in threads_before and not t.daemon]
        children = [pid for pid in _children() if pid not in children_before]
        foreign = [pid for pid in children if not _is_server_of(home, pid)]
        if not (threads or foreign) or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    assert not _left_tasks, f"tasks were still running when their event loop ended: {_left_tasks}"
    assert not threads, f"threads are left behind: {threads}"
    assert not foreign, f"processes are left behind: {[_describe(pid) for pid in foreign]}"


def _children() -> list[int]:
    """Ids of this process's children; read from the kernel's own list, which costs microseconds."""
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += [int(pid) for pid in task.read_text(encoding="ascii").split()]
    return found


def _is_server_of(home: Path, pid: int) -> bool:
    """Whether the process is the bed's, or not worth a word: ended, or Python's own helper."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        if "multiprocessing.resource_tracker" in " ".join(process.cmdline()):
            return True
        return Path(process.cwd().removesuffix(" (deleted)")).is_relative_to(home)
    except psutil.Error:
        return True


def _describe(pid: int) -> str:
    with suppress(psutil.Error):
        return f"{pid}: {' '.join(psutil.Process(pid).cmdline())[:200]}"
    return f"{pid}: gone meanwhile"
