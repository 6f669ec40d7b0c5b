"""The command and the SDK against a real gateway over HTTP, with a coordinator by script."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import structlog

import springtide
from springtide import aio
from springtide.cli import main
from springtide.client import Client
from springtide.connection import Endpoint
from springtide.download import DownloadRefusedError
from springtide.errors import (
    DuplicateIdError,
    ExpiredError,
    JobFailedError,
    JobFileError,
    NotFoundError,
    UnauthorisedError,
    UnreachableError,
)
from springtide_gateway.testing import Rig, rig
from springtide_shared.errors import Reason
from springtide_shared.httpapi import JobProgress
from springtide_shared.messages.job import JobAnswer, JobState, Waiting
from springtide_shared.messages.records import output_key
from springtide_shared.runtime import logs

T = TypeVar("T")


class Live:
    """A rig on a thread of its own, so that the synchronous client can speak to it."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder = folder
        self._settings = settings
        self._started = threading.Event()
        self._end: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self.rig: Rig

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        try:
            async with rig(self._folder, **self._settings) as self.rig:
                self._started.set()
                await self._end.wait()
        finally:
            self._started.set()

    def __enter__(self) -> Live:
        self._thread.start()
        assert self._started.wait(20)
        return self

    def __exit__(self, *_exc: object) -> None:
        assert self._loop is not None
        assert self._end is not None
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine beside the gateway."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def client(self, tenant: str = "ann") -> Client:
        return Client(endpoint=Endpoint(self.rig.url, self.rig.token(tenant)))


@pytest.fixture
def quiet() -> Iterator[None]:
    """The gateway's log goes elsewhere: stdout is what the command's tests look at."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logs.setup("error", stream=io.StringIO())
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
def live(tmp_path: Path, quiet: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    for name in list(os.environ):
        if name.startswith("SPRINGTIDE"):
            monkeypatch.delenv(name)
    with Live(tmp_path, {"tenants": ("ann", "bob"), "stream_heartbeat_seconds": 0.2}) as made:
        monkeypatch.setenv("SPRINGTIDE_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("SPRINGTIDE_URL", made.rig.url)
        monkeypatch.setenv("SPRINGTIDE_TOKEN", made.rig.token("ann"))
        monkeypatch.chdir(tmp_path)
        yield made


@pytest.fixture
def run(
    live: Live, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process; returns exit code, stdout and stderr."""

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["springtide", *arguments])
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        sys.stdout.flush()
        told = capfdbinary.readouterr()
        code = ended.value.code or 0
        assert isinstance(code, int)
        return code, told.out.decode(errors="replace"), told.err.decode(errors="replace")

    return command


Run = Callable[..., tuple[int, str, str]]

JOB = "id: job-1\nname: squares\ncommand: [square]\narray: {size: 3}\noutputs: [r.txt]\n"


@contextmanager
def soon(live: Live, *work: Callable[[], Coroutine[Any, Any, object]]) -> Iterator[None]:
    """Let things happen while the block waits for them."""

    async def one_by_one() -> None:
        for step in work:
            await asyncio.sleep(0.15)
            await step()

    assert live._loop is not None
    future = asyncio.run_coroutine_threadsafe(one_by_one(), live._loop)
    yield
    future.result(20)


# ---------------------------------------------------------------- the command


def test_a_job_from_file_to_files(live: Live, run: Run, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    assert run("submit", "job.yaml") == (0, "job-1\n", "")
    code, out, err = run("submit", "job.yaml")
    assert (code, out) == (0, "job-1\n")
    assert "there already" in err
    code, out, _ = run("status", "job-1")
    assert code == 0
    assert "squares" in out
    assert "3 queued" in out
    for index in range(3):
        live.do(
            live.rig.succeed(
                "job-1", index, {"r.txt": b"%d" % index**2}, stdout=b"task %d\n" % index
            )
        )
    assert run("logs", "job-1", "2") == (0, "task 2\n", "")
    assert run("logs", "job-1", "2", "--stderr") == (0, "", "")
    code, out, _ = run("results", "job-1")
    assert code == 0
    assert out.count("r.txt (1)") == 3
    code, out, _ = run("results", "job-1", "--download", "out")
    assert (code, out) == (0, "3 files downloaded to out, 0 were there already\n")
    files = sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert [str(path.relative_to(tmp_path / "out")) for path in files] == [
        "0000000/r.txt", "0000001/r.txt", "0000002/r.txt",
    ]  # fmt: skip
    assert [path.read_text() for path in files] == ["0", "1", "4"]
    files[1].write_text("broken")
    code, out, _ = run("results", "job-1", "--download", "out")
    assert out == "1 files downloaded to out, 2 were there already\n"
    assert files[1].read_text() == "1"
    code, out, _ = run("status")
    assert "job-1" in out
    assert "succeeded" in out
    code, out, _ = run("cancel", "job-1")
    assert "had ended already" in out


def test_status_says_why_tasks_wait(live: Live, run: Run) -> None:
    run("submit", "--id", "j", "--size", "3", "--", "prog")
    detail = "no node group can hold 1000 cores, 1Gi of memory"
    live.do(
        live.rig.wait_for(
            "j",
            Waiting(reason=Reason.UNSCHEDULABLE, count=2, detail=detail),
            Waiting(reason=Reason.NO_ROOM, count=1, since=time.time() - 90),
        )
    )
    code, out, _ = run("status", "j")
    assert code == 0
    assert f"  waiting: unschedulable: {detail} (2 tasks)\n" in out
    assert "  waiting: no-room (1 task, the oldest for 1m3" in out
    told = json.loads(run("status", "j", "--json")[1])["waiting"]
    assert [(one["reason"], one["count"]) for one in told] == [("unschedulable", 2), ("no-room", 1)]
    with live.client() as client:
        found = client.job("j").status().waiting
    assert [one.reason for one in found] == [Reason.UNSCHEDULABLE, Reason.NO_ROOM]
    live.do(live.rig.wait_for("j"))
    assert "waiting" not in run("status", "j")[1]


def test_json_on_stdout_has_the_same_shape_each_time(live: Live, run: Run) -> None:
    code, out, err = run(
        "submit", "--name", "n", "--size", "2", "--cpu", "0.5", "--memory", "1Gi", "--id", "j",
        "--output", "r", "--set", "labels.a=b", "--json", "--", "prog", "--flag", "--", "x y",
    )  # fmt: skip
    assert (code, json.loads(out), err) == (0, {"id": "j", "created": True}, "")
    _, sent = live.rig.seen[-1]
    assert getattr(sent, "command", None) == ["prog", "--flag", "--", "x y"]
    _, out, _ = run("status", "j", "--json")
    info = json.loads(out)
    assert (info["id"], info["state"], info["counts"]["queued"]) == ("j", "accepted", 2)
    assert info["labels"] == {"a": "b"}
    _, out, _ = run("status", "--json")
    assert [job["id"] for job in json.loads(out)["jobs"]] == ["j"]
    live.do(live.rig.succeed("j", 0, {"r": b"x"}, stdout=b"hi"))
    live.do(live.rig.fail("j", 1, exit_code=3))
    _, out, _ = run("status", "j", "--tasks", "--json")
    assert [task["state"] for task in json.loads(out)["tasks"]] == ["succeeded", "failed"]
    _, out, _ = run("status", "j", "--state", "failed", "--json")
    assert [task["exit_code"] for task in json.loads(out)["tasks"]] == [3]
    _, out, _ = run("results", "j", "--json")
    (result,) = json.loads(out)["results"]
    assert (result["index"], result["outputs"][0]["path"]) == (0, "r")
    _, out, _ = run("logs", "j", "0", "--json")
    assert json.loads(out)["text"] == "hi"
    _, out, _ = run("results", "j", "--download", "d", "--json")
    assert json.loads(out) == {"files": ["d/0000000/r"], "downloaded": 1}
    code, out, err = run("watch", "j", "--json")
    assert (code, json.loads(out)["state"]) == (1, "failed")
    assert json.loads(err)["reason"] == "job-failed"
    _, out, _ = run("cancel", "j", "--json")
    assert json.loads(out)["id"] == "j"
    code, out, _ = run("doctor", "--json")
    checks = {one["check"]: one["verdict"] for one in json.loads(out)["checks"]}
    assert (checks["gateway"], checks["token"], checks["ready"]) == ("ok", "ok", "ok")


def test_an_id_is_made_where_there_is_none(live: Live, run: Run) -> None:
    _, first, _ = run("submit", "--", "prog")
    _, second, _ = run("submit", "--", "prog")
    assert len(first.strip()) == 26
    assert first < second
    assert [getattr(command, "name", "") for _, command in live.rig.seen] == ["prog", "prog"]


def test_waiting_ends_with_the_job(live: Live, run: Run) -> None:
    rig_ = live.rig
    with soon(live, lambda: rig_.succeed("a", 0)):
        code, out, err = run("submit", "--id", "a", "--size", "1", "--wait", "--", "prog")
    assert (code, out) == (0, "a succeeded: 1 tasks\n")
    assert "succeeded: 1 done" in err
    with soon(live, lambda: rig_.fail("b", 0), lambda: rig_.succeed("b", 1)):
        code, out, err = run("submit", "--id", "b", "--size", "2", "--wait", "--", "prog")
    assert (code, out) == (1, "")
    assert "1 failed" in err
    assert "--state failed" in err


def test_faults_have_their_exit_codes(live: Live, run: Run, monkeypatch: Any) -> None:
    live.rig.refusals["no"] = JobAnswer(
        job_id="no", accepted=False, reason=Reason.UNSCHEDULABLE, field="resources", detail="big"
    )
    code, _, err = run("submit", "--id", "no", "--json", "--", "prog")
    assert (code, json.loads(err)["reason"]) == (3, "unschedulable")
    run("submit", "--id", "one", "--", "prog")
    code, _, err = run("submit", "--id", "one", "--", "other")
    assert code == 3
    assert "another id" in err
    code, _, err = run("status", "unknown")
    assert (code, err) == (7, "springtide: no job of this id\n")
    assert run("results", "unknown", "--json")[:2] == (7, "")
    assert run("logs", "one", "0")[0] == 7
    assert run("logs", "one", "5")[0] == 7
    assert run("cancel", "a/b")[0] == 7
    assert run("status", "one", "--state", "odd")[0] == 2
    code, _, err = run("watch", "one", "--timeout", "300ms")
    assert code == 6
    assert "goes on" in err
    monkeypatch.setenv("SPRINGTIDE_TOKEN", "wrong-token-of-some-length")
    code, _, err = run("status")
    assert code == 5
    assert "wrong-token" not in err
    code, out, _ = run("doctor")
    assert code == 1
    assert "fail token: " in out
    monkeypatch.setenv("SPRINGTIDE_TOKEN", live.rig.token("bob"))
    assert run("status", "one")[0] == 7
    monkeypatch.setenv("SPRINGTIDE_URL", "http://127.0.0.1:1")
    code, out, _ = run("doctor")
    assert code == 1
    assert "fail gateway: " in out


def test_names_that_look_like_markup_are_only_shown(live: Live, run: Run) -> None:
    run("submit", "--id", "m", "--name", "[red]x[/red]", "--", "prog")
    assert "[red]x[/red]" in run("status")[1]
    live.do(live.rig.succeed("m", 0, {"[bold]": b"x"}))
    assert "[bold]" in run("results", "m")[1]


def test_ctrl_c_while_waiting_is_clean(live: Live, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "from springtide.cli import main; main()", "submit", "--id", "c",
         "--wait", "--", "prog"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 30
        while not live.do(_streams(live)) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (130, "")
    assert "interrupted" in err
    assert "Traceback" not in err


async def _streams(live: Live) -> bool:
    return bool(live.rig.gateway._feed._listeners)


# ---------------------------------------------------------------- the SDK


def test_the_sdk_does_what_its_words_say(live: Live, tmp_path: Path) -> None:
    job = springtide.submit(
        name="n", command=["prog"], array={"items": ["a", "b"]}, resources={"cpu": 2}
    )
    try:
        assert job.status().counts.queued == 2
        seen: list[JobProgress] = []
        steps = (
            lambda: live.rig.succeed(job.id, 0, {"r": b"A"}, stdout=b"out", stderr=b"err"),
            lambda: live.rig.succeed(job.id, 1, {"r": b"B"}),
        )
        with soon(live, *steps):
            info = job.wait(timeout=20, progress=seen.append)
        assert info.state is JobState.SUCCEEDED
        assert [event.counts.succeeded for event in seen] == [0, 1, 2]
        assert job.require_success().size == 2
        assert [result.index for result in job.results()] == [0, 1]
        assert [task.state.value for task in job.tasks(["failed"])] == []
        assert (job.logs(0), job.logs(0, "stderr")) == ("out", "err")
        told: list[bool] = []
        files = job.download(tmp_path / "out", lambda _path, is_new: told.append(is_new))
        assert [path.read_bytes() for path in files] == [b"A", b"B"]
        assert told == [True, True]
    finally:
        job.client.close()


def test_the_sdk_raises_typed_faults(live: Live, tmp_path: Path) -> None:
    with live.client() as client:
        with pytest.raises(JobFileError) as caught:
            springtide.submit(client=client, name="n", command=["a"], resources={"cpu": "x"})
        assert (caught.value.field, caught.value.value) == ("resources.cpu", "x")
        assert caught.value.remedy
        (tmp_path / "job.json").write_text('{"name": "n",\n"command": ["a"], "prio": 1}')
        with pytest.raises(JobFileError) as caught:
            springtide.submit(tmp_path / "job.json", client=client)
        assert (caught.value.line, caught.value.field) == (2, "prio")
        job = springtide.submit({"id": "j", "name": "n", "command": ["a"]}, client=client)
        with pytest.raises(DuplicateIdError):
            springtide.submit({"id": "j", "name": "n", "command": ["b"]}, client=client)
        with pytest.raises(ExpiredError):
            job.wait(timeout=0.3)
        with pytest.raises(NotFoundError):
            client.job("other").status()
        with pytest.raises(NotFoundError):
            job.logs(0)
        live.do(live.rig.fail("j", 0))
        with pytest.raises(JobFailedError, match="1 failed"):
            job.require_success()
    with (
        Client(endpoint=Endpoint(live.rig.url, "wrong")) as stranger,
        pytest.raises(UnauthorisedError),
    ):
        stranger.whoami()
    with (
        Client(endpoint=Endpoint("http://127.0.0.1:1", "x")) as nowhere,
        pytest.raises(UnreachableError, match="does not answer"),
    ):
        nowhere.whoami()


def test_a_wait_survives_streams_that_end(tmp_path: Path, quiet: None) -> None:
    settings = {"tenants": ("ann",), "stream_limit_seconds": 0.2}
    with Live(tmp_path, settings) as live, live.client() as client:
        job = springtide.submit({"name": "n", "command": ["a"]}, client=client)

        async def later() -> None:
            await asyncio.sleep(0.8)
            await live.rig.succeed(job.id, 0)

        with soon(live, later):
            assert job.wait(timeout=20).state is JobState.SUCCEEDED


def test_a_broken_output_is_no_file(live: Live, tmp_path: Path) -> None:
    with live.client() as client:
        job = springtide.submit({"id": "j", "name": "n", "command": ["a"]}, client=client)
        live.do(live.rig.succeed("j", 0, {"good": b"good", "r": b"right"}))
        live.do(live.rig.store.put(output_key("j", 0, 1, "r"), b"wrong"))
        with pytest.raises(DownloadRefusedError, match="SHA-256"):
            job.download(tmp_path / "out")
    names = [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert names == ["good"]


@pytest.mark.parametrize("path", ["../../evil", "/evil", "a/../../../evil"])
def test_an_output_that_leads_out_of_the_folder_is_refused(
    live: Live, tmp_path: Path, path: str
) -> None:
    async def hostile() -> None:
        # A record by hand: no agent of ours would name such a path.
        await live.rig.succeed("j", 0, {"x": b"evil"})

    with live.client() as client:
        job = springtide.submit({"id": "j", "name": "n", "command": ["a"]}, client=client)
        live.do(hostile())
        results = list(job.results())
        forged = [_with_output_path(result, path) for result in results]
        job.results = lambda first=0: iter(forged)  # type: ignore[method-assign]
        with pytest.raises(DownloadRefusedError):
            job.download(tmp_path / "deep" / "er" / "out")
    assert not list(tmp_path.rglob("evil"))


def _with_output_path(result: Any, path: str) -> Any:
    import msgspec

    outputs = [msgspec.structs.replace(output, path=path) for output in result.outputs]
    return msgspec.structs.replace(result, outputs=outputs)


def test_the_async_client_does_the_same(live: Live) -> None:
    async def check() -> None:
        endpoint = Endpoint(live.rig.url, live.rig.token("ann"))
        async with aio.AsyncClient(endpoint=endpoint) as client:
            assert (await client.whoami()).tenant == "ann"
            job = await aio.submit(name="n", command=["a"], client=client)
            with pytest.raises(ExpiredError):
                await job.wait(timeout=0.2)
            await asyncio.to_thread(live.do, live.rig.succeed(job.id, 0, {"r": b"x"}))
            assert (await job.wait(timeout=10)).state is JobState.SUCCEEDED
            assert [one.index async for one in job.results()] == [0]
            assert [one.state.value async for one in job.tasks()] == ["succeeded"]
            assert (await job.cancel()).state.is_final
            assert (await client.capacity()).clusters == []
            with pytest.raises(NotFoundError):
                await client.job("other").status()

    asyncio.run(check())


# ---------------------------------------------------------------- real time and a busy server


def test_a_gateway_that_is_busy_is_asked_again(tmp_path: Path, quiet: None) -> None:
    with Live(tmp_path, {"tenants": ("ann",), "answer_limit_seconds": 0.2}) as live:
        live.rig.is_silent = True

        async def wake() -> None:
            await asyncio.sleep(0.5)
            live.rig.is_silent = False

        with live.client() as client, soon(live, wake):
            job = springtide.submit({"id": "j", "name": "n", "command": ["a"]}, client=client)
            assert job.status().state is JobState.ACCEPTED
        assert len(live.rig.seen) >= 2
