"""The test bed itself: servers come up, survive what they should, and are gone afterwards."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import aio_pika
import asyncpg
import psutil
import pytest

from springtide_testbed import (
    PartFailedError,
    Testbed,
    TestbedError,
    end_abandoned_beds,
    processes,
)
from springtide_testbed.errors import PartUnavailableError, PortTakenError
from springtide_testbed.part import Part
from springtide_testbed.postgresql import PostgreSQL
from springtide_testbed.processes import ProcessId, wait_until
from springtide_testbed.rabbitmq import RabbitMQ

MakeBed = Callable[..., Testbed]


@pytest.fixture
def make_bed() -> Iterator[MakeBed]:
    """Makes beds that go down with the test; skips it where a server cannot be had."""
    made: list[Testbed] = []

    def make(*parts: Part) -> Testbed:
        for part in parts:
            try:
                part.ensure_available()
            except PartUnavailableError as error:
                if os.environ.get("REQUIRE_REAL"):
                    raise
                pytest.skip(str(error))
        made.append(Testbed.owned(parts))
        return made[-1]

    yield make
    for bed in made:
        bed.down()


def processes_below(home: Path) -> list[str]:
    """Every process, of whatever program, that works below the folder."""
    found = []
    for process in psutil.process_iter():
        try:
            folder = Path(process.cwd())
        except (psutil.Error, OSError):
            continue
        if folder.is_relative_to(home):
            found.append(f"{process.pid} {process.name()}")
    return found


async def publish(url: str, body: bytes) -> None:
    connection = await aio_pika.connect(url, timeout=20)
    async with connection:
        channel = await connection.channel(publisher_confirms=True)
        await channel.declare_queue("kept", durable=True)
        message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await channel.default_exchange.publish(message, "kept", timeout=20)


async def take(url: str) -> bytes:
    connection = await aio_pika.connect(url, timeout=20)
    async with connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("kept", durable=True, passive=True)
        message = await queue.get(timeout=20)
        assert message is not None
        await message.ack()
        return message.body


async def sql(url: str, *statements: str) -> object:
    connection = await asyncpg.connect(url, timeout=20)
    try:
        result: object = None
        for statement in statements:
            result = await connection.fetchval(statement, timeout=20)
        return result
    finally:
        await connection.close(timeout=10)


def test_both_servers_run_side_by_side_with_another_bed_and_leave_no_process(
    make_bed: MakeBed,
) -> None:
    first = make_bed(RabbitMQ(), PostgreSQL())
    second = make_bed(RabbitMQ())
    running = first.up()
    second.up()
    first_env, second_env = first.env(), second.env()
    assert first_env["AMQP_URL"] != second_env["AMQP_URL"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", running["rabbitmq"].version)
    assert int(running["postgresql"].version.split(".")[0]) >= 13

    asyncio.run(publish(first_env["AMQP_URL"], b"one"))
    asyncio.run(publish(second_env["AMQP_URL"], b"two"))
    assert asyncio.run(take(first_env["AMQP_URL"])) == b"one"
    assert asyncio.run(sql(first_env["DATABASE_URL"], "SELECT 42")) == 42

    second.down()
    asyncio.run(publish(first_env["AMQP_URL"], b"still here"))
    assert asyncio.run(take(first_env["AMQP_URL"])) == b"still here"
    assert processes_below(first.home), "the check below must be able to see the servers"
    first.down()
    for bed in (first, second):
        assert not bed.home.exists()
        assert wait_until(lambda bed=bed: not processes_below(bed.home), 5.0), processes_below(  # type: ignore[misc]
            bed.home
        )


def test_a_killed_broker_comes_back_with_its_messages_at_the_same_address(
    make_bed: MakeBed,
) -> None:
    bed = make_bed(RabbitMQ())
    before = bed.up()["rabbitmq"]
    url = before.env["AMQP_URL"]
    asyncio.run(publish(url, b"kept"))

    bed.kill("rabbitmq")
    assert bed.running() == {}
    after = bed.restart("rabbitmq")

    assert after.main != before.main
    assert after.env == before.env
    assert asyncio.run(take(url)) == b"kept"


def test_a_paused_broker_answers_again_once_resumed(make_bed: MakeBed) -> None:
    bed = make_bed(RabbitMQ())
    url = bed.up()["rabbitmq"].env["AMQP_URL"]
    bed.pause("rabbitmq")
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(publish(url, b"lost"), 1.0))
    bed.resume("rabbitmq")
    asyncio.run(publish(url, b"arrived"))
    assert asyncio.run(take(url)) == b"arrived"


def test_a_killed_database_comes_back_with_its_rows_at_the_same_address(
    make_bed: MakeBed,
) -> None:
    bed = make_bed(PostgreSQL())
    url = bed.up()["postgresql"].env["DATABASE_URL"]
    asyncio.run(sql(url, "CREATE TABLE kept (n int)", "INSERT INTO kept VALUES (7)"))

    bed.kill("postgresql")
    bed.restart("postgresql")

    assert asyncio.run(sql(url, "SELECT n FROM kept")) == 7


def test_a_stopped_database_keeps_its_rows(make_bed: MakeBed) -> None:
    bed = make_bed(PostgreSQL())
    url = bed.up()["postgresql"].env["DATABASE_URL"]
    asyncio.run(sql(url, "CREATE TABLE kept (n int)", "INSERT INTO kept VALUES (7)"))
    bed.stop("postgresql")
    assert bed.running() == {}
    bed.restart("postgresql")
    assert asyncio.run(sql(url, "SELECT n FROM kept")) == 7


def test_up_twice_starts_nothing_anew(make_bed: MakeBed) -> None:
    bed = make_bed(PostgreSQL())
    assert bed.up() == bed.up()


def test_settings_reach_the_servers(make_bed: MakeBed) -> None:
    bed = make_bed(PostgreSQL(settings={"max_connections": "17"}))
    url = bed.up()["postgresql"].env["DATABASE_URL"]
    assert asyncio.run(sql(url, "SHOW max_connections")) == "17"


@pytest.mark.parametrize("kind", [RabbitMQ, PostgreSQL])
def test_a_fixed_port_that_is_taken_is_named_with_the_remedy(
    make_bed: MakeBed, kind: type[RabbitMQ] | type[PostgreSQL]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        bed = make_bed(kind(port=port))
        with pytest.raises(PortTakenError, match=rf"port {port} .* is taken.*choose another"):
            bed.up()


def test_a_free_port_that_is_lost_before_the_start_is_replaced(
    make_bed: MakeBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_ports = processes.free_ports
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        lost = taken.getsockname()[1]
        answers = [[lost], free_ports(1)]
        monkeypatch.setattr(processes, "free_ports", lambda count: answers.pop(0))
        url = make_bed(PostgreSQL()).up()["postgresql"].env["DATABASE_URL"]
        assert answers == []
        assert f":{lost}/" not in url
        assert asyncio.run(sql(url, "SELECT 1")) == 1


def test_a_start_that_fails_shows_the_end_of_the_log_and_leaves_no_process(
    make_bed: MakeBed,
) -> None:
    bed = make_bed(PostgreSQL(settings={"shared_buffers": "a lot"}))
    with pytest.raises(PartFailedError, match=r'ended during its start.*\n.*"shared_buffers"'):
        bed.up()
    bed.down()
    assert wait_until(lambda: not processes_below(bed.home), 5.0)


def test_down_spares_a_stranger_that_works_in_the_folder(make_bed: MakeBed) -> None:
    bed = make_bed(PostgreSQL())
    bed.up()
    with subprocess.Popen(["sleep", "60"], cwd=bed.log_folder("postgresql")) as stranger:
        bed.down()
        assert stranger.poll() is None
        stranger.kill()


def test_logs_can_be_kept_for_a_failed_run(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(PostgreSQL())
    bed.up()
    bed.keep_logs(tmp_path)
    bed.down()
    log = (tmp_path / "postgresql" / "postgresql.log").read_text(encoding="utf-8")
    assert "ready to accept connections" in log


OWNER = """
    import sys, time
    from springtide_testbed import Testbed
    from springtide_testbed.postgresql import PostgreSQL

    bed = Testbed.owned([PostgreSQL()])
    main = bed.up()["postgresql"].main
    print(bed.home, main.to_json(), sep="|", flush=True)
    time.sleep(120)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_bed_goes_down_when_its_owner_is_killed(make_bed: MakeBed, number: int) -> None:
    make_bed(PostgreSQL())  # skips where there is none
    home, server = _start_owner_and_end_it(number)
    assert server.wait_ended(20.0)
    assert wait_until(lambda: not home.exists() and not processes_below(home), 10.0)


def test_a_bed_whose_owner_and_watcher_were_killed_is_ended_next_time(make_bed: MakeBed) -> None:
    make_bed(PostgreSQL())
    home, server = _start_owner_and_end_it(signal.SIGKILL, watcher_too=True)
    assert not server.wait_ended(1.5), "nobody is left who could have ended it"
    assert home in end_abandoned_beds()
    assert not server.is_alive()
    assert not home.exists()


def _start_owner_and_end_it(number: int, *, watcher_too: bool = False) -> tuple[Path, ProcessId]:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        folder, server = owner.stdout.readline().strip().split("|")
        home = Path(folder)
        if watcher_too:
            watcher = ProcessId.from_json((home / "watcher.json").read_text(encoding="utf-8"))
            watcher.signal(signal.SIGKILL)
            assert watcher.wait_ended(5.0)
        owner.send_signal(number)
        owner.wait(10)
    return home, ProcessId.from_json(server)


def test_the_command_line_starts_shows_and_ends_a_bed(make_bed: MakeBed) -> None:
    make_bed(PostgreSQL())
    # Not below pytest's own folder: that is closed to the user the database runs as.
    home = Path(tempfile.mkdtemp(prefix="springtide-cli-test-"))
    home.chmod(0o711)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "springtide_testbed", *arguments, "--home", str(home)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    try:
        up = run("up", "--parts", "postgresql")
        assert up.returncode == 0, up.stderr
        exports = [line for line in up.stdout.splitlines() if line.startswith("export ")]
        assert len(exports) == 1
        assert run("env").stdout.splitlines() == exports
        url = exports[0].removeprefix("export DATABASE_URL=")
        assert asyncio.run(sql(url, "SELECT 1")) == 1
        status = run("status").stdout
        assert "postgresql: up, version" in status
        assert "rabbitmq: down" in status
    finally:
        down = run("down")
    assert down.returncode == 0, down.stderr
    assert not home.exists()
    assert run("down").returncode == 0, "down twice is harmless"


def test_an_unknown_part_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(TestbedError, match="no part 'kafka'; known parts: rabbitmq, postgresql"):
        Testbed(tmp_path).up(["kafka"])


def test_a_recycled_process_number_is_not_mistaken_for_the_server() -> None:
    me = ProcessId.me()
    assert me.is_alive()
    impostor = ProcessId(me.pid, me.started - 1)
    assert not impostor.is_alive()
    impostor.signal(signal.SIGKILL)  # must not reach this very process


def test_a_home_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(TestbedError, match="belongs to another user"):
        Testbed(tmp_path).up([])
