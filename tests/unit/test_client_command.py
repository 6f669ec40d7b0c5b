"""The command as users start it, where no springtide runs: exit codes, faults, start-up cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from springtide.cli import main
from springtide.errors import EXIT_CODES

ENTRY = "from springtide.cli import main; main()"


def springtide(*arguments: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if "SPRINGTIDE" not in name}
    return subprocess.run(
        [sys.executable, "-c", ENTRY, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=home,
        env={**clean, "SPRINGTIDE_HOME": str(home / "home"), **env},
    )


def test_help_names_every_exit_code_and_every_command(tmp_path: Path) -> None:
    result = springtide("--help", home=tmp_path)
    assert result.returncode == 0
    for code, meaning in EXIT_CODES.items():
        assert f"{code:>3}  {meaning}" in result.stdout
    for command in (
        "up", "submit", "status", "watch", "logs", "results", "cancel", "demo", "doctor",
    ):  # fmt: skip
        assert f"  {command} " in result.stdout


def test_help_loads_no_heavy_library(tmp_path: Path) -> None:
    code = (
        "import sys, resource; sys.argv = ['springtide', '--help']\n"
        "from springtide.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "heavy = {'httpx', 'rich', 'yaml', 'litestar', 'uvicorn', 'kubernetes_asyncio', 'aio_pika',"
        " 'springtide_lab', 'msgspec', 'asyncio', 'sqlalchemy'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)), used.ru_utime + used.ru_stime)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded, _, seconds = result.stdout.rpartition("LOADED ")[2].rpartition(" ")
    assert loaded == "[]"
    assert float(seconds) < 0.35


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["submit"], 2, "behind `--`"),
        (["nothing"], 2, "No such command"),
        (["submit", "--size", "x", "--", "a"], 2, "--size"),
        (["submit", "absent.yaml"], 3, "No such file"),
        (["submit", "--set", "name", "--", "a"], 2, "field=value"),
        (["submit", "--size", "0", "--", "a"], 3, "array.size"),
        (["submit", "--wait", "--amqp", "amqp://a", "--", "a"], 2, "springtide watch"),
        (["submit", "--timeout", "x", "--", "a"], 2, "--timeout"),
        (["submit", "--", "a"], 4, "springtide up"),
        (["status"], 4, "springtide up"),
        (["status", "--", "a"], 2, "only `submit`"),
        (["status", "--tasks"], 2, "need a JOB"),
        (["status", "--url", "ftp://x"], 2, "http(s)"),
        (["status", "--url", "http://127.0.0.1:1"], 5, "--token-file"),
        (["logs"], 2, "JOB"),
        (["logs", "job", "-1"], 2, "-1"),
        (["submit", "--amqp", "amqp://u:swordfish@127.0.0.1:1/", "--", "a"], 4, "broker"),
    ],
)
def test_each_fault_has_its_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    for name in os.environ:
        if name.startswith("SPRINGTIDE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SPRINGTIDE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["springtide", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == code, told.err
    assert told.out == ""
    assert words in told.err
    assert "swordfish" not in told.err


def test_a_fault_with_json_is_one_line_of_json_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("id: x\nname: y\ncommand: [a]\ngrace: never\n")
    result = springtide("submit", "job.yaml", "--json", home=tmp_path)
    assert (result.returncode, result.stdout) == (3, "")
    told = json.loads(result.stderr)
    assert told["file"] == "job.yaml"
    assert (told["line"], told["field"], told["value"]) == (4, "grace", "never")
    assert told["remedy"]


def test_doctor_without_springtide_warns_and_names_the_remedy(tmp_path: Path) -> None:
    result = springtide("doctor", "--json", "--port", "8479", home=tmp_path)
    told = json.loads(result.stdout)
    by_name = {one["check"]: one for one in told["checks"]}
    assert by_name["python"]["verdict"] == "ok"
    assert by_name["home"]["verdict"] == "ok"
    assert by_name["gateway"]["verdict"] == "warn"
    assert "springtide up" in by_name["gateway"]["remedy"]
    assert all(one["remedy"] for one in told["checks"] if one["verdict"] != "ok")
    assert (result.returncode, told["ok"]) == (0, True)


def test_doctor_fails_where_something_is_broken(tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    result = springtide(
        "doctor", home=tmp_path, SPRINGTIDE_AMQP_URL="amqp://u:swordfish@127.0.0.1:1/"
    )
    assert result.returncode == 1
    assert "fail home: " in result.stdout
    assert "fail broker: " in result.stdout
    assert "swordfish" not in result.stdout + result.stderr


def test_a_springtide_that_has_ended_is_told_as_such(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text("a-token-of-some-length\n")
    content = {"url": "http://127.0.0.1:1", "token_file": str(home / "token"), "pid": 2**22 + 1}
    (home / "endpoint.json").write_text(json.dumps(content))
    result = springtide("status", home=tmp_path)
    assert result.returncode == 4
    assert "has ended" in result.stderr
    assert "springtide up" in result.stderr


@pytest.mark.parametrize("command", [["up"], ["demo", "--tasks", "1"]])
def test_without_the_lab_the_commands_that_need_it_say_so(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("springtide_lab", "springtide_lab.embedded", "springtide_lab.demo"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["springtide", *command])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (8, "")
    assert "not installed" in told.err
    assert "springtide[lab]" in told.err
    assert list(tmp_path.iterdir()) == []
