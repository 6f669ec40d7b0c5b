"""The shared fixtures: isolation on real servers, and runs of pytest that end badly."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aio_pika
import aio_pika.exceptions
import asyncpg
import pytest

from springtide_testbed.processes import ProcessId, wait_until

CONFTEST = Path(__file__).parents[1] / "conftest.py"
WITHOUT_SERVERS = {"SPRINGTIDE_POSTGRESQL_BIN": "/nonexistent", "DATABASE_URL": ""}


def test_each_test_has_a_virtual_host_of_its_own(rabbitmq: Any, rabbitmq_url: str) -> None:
    assert rabbitmq_url == rabbitmq.url

    async def main() -> list[str]:
        connection = await aio_pika.connect(rabbitmq_url, timeout=20)
        async with connection:
            channel = await connection.channel()
            await channel.declare_queue(f"{rabbitmq.prefix}q")
        return list(rabbitmq.server.management.queues(rabbitmq.vhost))

    if rabbitmq.vhost is None:
        pytest.skip("a foreign broker without a management API has no virtual hosts to give")
    assert asyncio.run(main()) == [f"{rabbitmq.prefix}q"]


def test_connections_can_be_forced_closed(rabbitmq: Any) -> None:
    async def main() -> tuple[int, BaseException | None]:
        connection = await aio_pika.connect(rabbitmq.url, timeout=20)
        closed = asyncio.Event()
        reasons: list[BaseException | None] = []

        def on_close(_: object, error: BaseException | None) -> None:
            reasons.append(error)
            closed.set()

        connection.close_callbacks.add(on_close)
        count = 0
        async with asyncio.timeout(20):
            while count == 0:
                count = await asyncio.to_thread(rabbitmq.close_connections)
                await asyncio.sleep(0.1)
            await closed.wait()
        return count, reasons[0]

    count, reason = asyncio.run(main())
    assert count == 1
    assert "CONNECTION_FORCED" in repr(reason)


def test_each_test_has_an_empty_database_of_its_own(
    postgres_url: str, postgres_server_url: str
) -> None:
    async def main() -> tuple[int, str]:
        connection = await asyncpg.connect(postgres_url, timeout=20)
        try:
            tables = await connection.fetchval(
                "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
            )
            return tables, await connection.fetchval("SELECT current_database()")
        finally:
            await connection.close()

    tables, name = asyncio.run(main())
    assert tables == 0
    assert name in postgres_url
    assert name not in postgres_server_url


# ---- whole runs of pytest, each in a folder with a copy of the shared fixtures ----------------

RunPytest = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(CONFTEST, tmp_path / "conftest.py")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers = leaves_behind(reason): x\naddopts = -p no:cacheprovider -ra\n",
        encoding="utf-8",
    )
    return tmp_path


@pytest.fixture
def run_pytest(project: Path) -> RunPytest:
    def run(
        test: str, *arguments: str, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        (project / "test_it.py").write_text(textwrap.dedent(test), encoding="utf-8")
        plain = {key: value for key, value in os.environ.items() if key != "REQUIRE_REAL"}
        plain = {key: value for key, value in plain.items() if not key.startswith("PYTEST_")}
        return subprocess.run(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=project,
            env=plain | (env or {}),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


NEEDS_DATABASE = "def test_it(postgres_url): pass\n"


def test_a_server_that_cannot_be_had_skips_with_the_reason(run_pytest: RunPytest) -> None:
    done = run_pytest(NEEDS_DATABASE, env=WITHOUT_SERVERS)
    assert done.returncode == 0, done.stdout
    assert "SKIPPED" in done.stdout
    assert "SPRINGTIDE_POSTGRESQL_BIN='/nonexistent' holds no PostgreSQL programs" in done.stdout


def test_a_server_that_cannot_be_had_fails_where_real_ones_are_required(
    run_pytest: RunPytest,
) -> None:
    done = run_pytest(NEEDS_DATABASE, env=WITHOUT_SERVERS | {"REQUIRE_REAL": "1"})
    assert done.returncode == 1
    assert "REQUIRE_REAL is set, but postgresql cannot be had" in done.stdout


TWO_WORKERS = """
    import pathlib, time, pytest

    @pytest.mark.parametrize("n", [1, 2])
    def test_it(postgres_server_url, n):
        pathlib.Path(f"seen-{n}").write_text(postgres_server_url)
        deadline = time.monotonic() + 60  # both workers take part, whatever the machine's load
        while not pathlib.Path(f"seen-{3 - n}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
"""


def test_workers_of_one_run_share_one_server_and_its_version_is_told(
    run_pytest: RunPytest, project: Path, postgres_server_url: str
) -> None:
    done = run_pytest(TWO_WORKERS, "-n", "2", env={"DATABASE_URL": ""})
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    first, second = ((project / f"seen-{n}").read_text(encoding="utf-8") for n in (1, 2))
    assert first == second
    assert first != postgres_server_url, "the inner run has a server of its own"
    told = [line for line in done.stdout.splitlines() if line.startswith("real postgresql ")]
    assert len(told) == 1
    with pytest.raises(OSError, match="Connect call failed"):
        asyncio.run(asyncpg.connect(first, timeout=5))


def test_a_named_server_is_used_instead_of_an_own_one(
    run_pytest: RunPytest, postgres_server_url: str
) -> None:
    done = run_pytest(NEEDS_DATABASE, env={"DATABASE_URL": postgres_server_url})
    assert done.returncode == 0, done.stdout
    assert "(from DATABASE_URL)" in done.stdout
    assert "own test bed" not in done.stdout


HANGS = """
    import pathlib, time

    def test_it(postgres_server_url, testbed_home):
        record = (testbed_home / "postgresql" / "running.json").read_text()
        pathlib.Path("record.draft").write_text(record)
        pathlib.Path("record.draft").rename("record")
        time.sleep(120)
"""


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "workers"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_broken_off_leaves_no_server(
    project: Path, number: signal.Signals, workers: list[str], postgres_server_url: str
) -> None:
    (project / "test_it.py").write_text(textwrap.dedent(HANGS), encoding="utf-8")
    record = project / "record"
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *workers],
        cwd=project,
        env=os.environ | {"DATABASE_URL": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as run:
        try:
            assert wait_until(record.exists, 60.0)
        finally:
            run.send_signal(number)
            run.wait(30)

    server = ProcessId(**json.loads(record.read_text(encoding="utf-8"))["main"])
    assert server.wait_ended(20.0)


LEAKS = {
    "task": """
        import asyncio

        def test_it():
            async def main():
                asyncio.ensure_future(asyncio.sleep(60))
            asyncio.run(main())
    """,
    "thread": """
        import threading

        def test_it():
            threading.Thread(target=threading.Event().wait, args=(4,), name="stray").start()
    """,
    "process": """
        import subprocess, sys

        kept = []

        def test_it():
            kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(5)"]))
    """,
}
COMPLAINTS = {
    "task": "tasks were still running when their event loop ended",
    "thread": "threads are left behind",
    "process": "processes are left behind",
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_test_that_leaves_something_behind_fails(run_pytest: RunPytest, leak: str) -> None:
    done = run_pytest(LEAKS[leak])
    assert done.returncode == 1, done.stdout
    assert COMPLAINTS[leak] in done.stdout


def test_a_leak_that_is_the_subject_of_the_test_may_be_marked(run_pytest: RunPytest) -> None:
    marked = "import pytest\npytestmark = pytest.mark.leaves_behind('on purpose')\n"
    done = run_pytest(marked + textwrap.dedent(LEAKS["task"]))
    assert done.returncode == 0, done.stdout


def test_a_tidy_test_passes(run_pytest: RunPytest) -> None:
    tidy = """
        import asyncio, subprocess, sys, threading

        def test_it():
            async def main():
                await asyncio.gather(asyncio.to_thread(int), asyncio.sleep(0))
            asyncio.run(main())
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()
            subprocess.run([sys.executable, "-c", ""], check=True)
    """
    assert run_pytest(tidy).returncode == 0
