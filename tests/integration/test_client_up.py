"""`springtide up` as people use it: a process in one terminal, the command in another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ENTRY = [sys.executable, "-c", "from springtide.cli import main; main()"]


class Terminal:
    """Runs the command with a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        clean = {name: value for name, value in os.environ.items() if "SPRINGTIDE" not in name}
        self.env = {**clean, "SPRINGTIDE_HOME": str(folder / "home")}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*ENTRY, *arguments],
            cwd=self.folder,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *arguments: str, code: int = 0) -> str:
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=90)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == code, err
        return out or err


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path)
    up = made.start("up", "--port", "0")
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "home" / "endpoint.json").exists():
            assert up.poll() is None, up.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield made
        up.send_signal(signal.SIGINT)
        out, err = up.communicate(timeout=30)
    finally:
        up.kill()
        up.wait()
    assert (up.returncode, out) == (0, ""), err
    assert "springtide is up at http://127.0.0.1:" in err
    assert "Traceback" not in err
    assert not (tmp_path / "home" / "endpoint.json").exists()


@pytest.mark.slow
def test_a_job_runs_through_every_part_on_this_machine(terminal: Terminal) -> None:
    job = terminal.folder / "job.yaml"
    job.write_text(
        "id: squares\n"
        "name: squares\n"
        "command: [sh, -c, 'echo task $SPRINGTIDE_TASK_INDEX;"
        " expr $SPRINGTIDE_ITEM \\* $SPRINGTIDE_ITEM > $SPRINGTIDE_OUTPUT_DIR/r.txt']\n"
        "array: {items: ['3', '4', '5']}\n"
        "resources: {memory: 32Mi}\n"
        "outputs: [r.txt]\n"
    )
    terminal.run("submit", "job.yaml", "--wait", "--timeout", "60")
    info = json.loads(terminal.run("status", "squares", "--json"))
    assert (info["state"], info["counts"]["succeeded"]) == ("succeeded", 3)
    assert terminal.run("logs", "squares", "2") == "task 2\n"
    terminal.run("results", "squares", "--download", "out")
    files = sorted((terminal.folder / "out").rglob("r.txt"))
    assert [file.read_text() for file in files] == ["9\n", "16\n", "25\n"]
    found = json.loads(terminal.run("doctor", "--json"))
    assert {one["check"]: one["verdict"] for one in found["checks"]}["ready"] == "ok"
    # Another one for the same home would run the same jobs.
    assert "another springtide" in terminal.run("up", "--port", "0", code=8)

    # Nothing here can ever hold this: it is told, within seconds, and not left to guess.
    terminal.run("submit", "--id", "vast", "--cpu", "1000", "--memory", "32Mi", "--", "true")
    deadline = time.monotonic() + 15
    while "waiting: unschedulable" not in (told := terminal.run("status", "vast")):
        assert time.monotonic() < deadline, told
        time.sleep(0.2)
    assert "no node group can hold 1000 cores, 32Mi of memory (1 task)" in told
    (waiting,) = json.loads(terminal.run("status", "vast", "--json"))["waiting"]
    assert (waiting["reason"], waiting["count"]) == ("unschedulable", 1)
    terminal.run("cancel", "vast")

    terminal.run("submit", "--id", "long", "--memory", "32Mi", "--", "sleep", "600")
    terminal.run("cancel", "long")
    terminal.run("watch", "long", "--timeout", "30", code=1)
    assert json.loads(terminal.run("status", "long", "--json"))["state"] == "cancelled"
    failing = ("--set", "retry.application=0", "--memory", "32Mi", "--wait", "--timeout", "60")
    terminal.run("submit", "--id", "bad", *failing, "--", "sh", "-c", "echo oh >&2; exit 3", code=1)
    (task,) = json.loads(terminal.run("status", "bad", "--state", "failed", "--json"))["tasks"]
    assert (task["exit_code"], task["reason"]) == (3, "application-error")
    assert terminal.run("logs", "bad", "--stderr") == "oh\n"
