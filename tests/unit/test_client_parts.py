"""The client without a gateway: where it finds springtide, what it writes, how it reads answers."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import springtide
from springtide import calls, connection, doctor
from springtide.download import Download, DownloadRefusedError, is_there, sweep, target_of
from springtide.errors import (
    EXIT_CODES,
    DuplicateIdError,
    LocalError,
    NotFoundError,
    RefusedError,
    SpringtideClientError,
    UnauthorisedError,
    UnreachableError,
    UsageError,
)
from springtide_shared.httpapi import JobProgress, OutputInfo, WhoAmI

# ---------------------------------------------------------------- where springtide is


def left_by_up(home: Path, url: str = "http://127.0.0.1:8470", pid: int = 1) -> None:
    home.mkdir(exist_ok=True)
    (home / "token").write_text("# a comment\nsecret-of-up tenant\n")
    content = {"url": url, "token_file": str(home / "token"), "pid": pid}
    (home / "endpoint.json").write_text(json.dumps(content))


def test_what_up_left_is_found(tmp_path: Path) -> None:
    left_by_up(tmp_path)
    found = connection.find(environ={"SPRINGTIDE_HOME": str(tmp_path)})
    assert (found.url, found.token, found.pid) == ("http://127.0.0.1:8470", "secret-of-up", 1)
    assert "secret" not in repr(found)


def test_arguments_go_over_the_environment_and_that_over_the_home(tmp_path: Path) -> None:
    left_by_up(tmp_path)
    (tmp_path / "t2").write_text("token-two\n")
    env = {
        "SPRINGTIDE_HOME": str(tmp_path),
        "SPRINGTIDE_URL": "https://a.example/",
        "SPRINGTIDE_TOKEN": " token-one ",
    }
    found = connection.find(environ=env)
    assert (found.url, found.token, found.pid) == ("https://a.example", "token-one", None)
    found = connection.find("http://b.example:1", tmp_path / "t2", environ=env)
    assert (found.url, found.token) == ("http://b.example:1", "token-two")
    del env["SPRINGTIDE_TOKEN"]
    env["SPRINGTIDE_TOKEN_FILE"] = str(tmp_path / "t2")
    assert connection.find(environ=env).token == "token-two"


def test_the_token_of_up_goes_to_the_address_of_up_only(tmp_path: Path) -> None:
    left_by_up(tmp_path)
    env = {"SPRINGTIDE_HOME": str(tmp_path)}
    assert connection.find("http://127.0.0.1:8470/", environ=env).token == "secret-of-up"
    with pytest.raises(UnauthorisedError):
        connection.find("http://127.0.0.1:8471", environ=env)


def test_nothing_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError) as caught:
        connection.find(environ={"SPRINGTIDE_HOME": str(tmp_path)})
    assert "springtide up" in caught.value.remedy
    for content in ("", "{", "[]", "{}"):
        (tmp_path / "endpoint.json").write_text(content)
        with pytest.raises(UnreachableError):
            connection.find(environ={"SPRINGTIDE_HOME": str(tmp_path)})


@pytest.mark.parametrize(
    "url",
    ["x", "ftp://a", "http://", "http://u:pass@a", "http://a:99999", "http://a?b=c", "http://[::1"],
)
def test_an_address_that_is_none_is_a_usage_error_without_its_secrets(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        connection.checked_url(url)
    assert "pass" not in str(caught.value)


def test_a_token_file_that_is_of_no_use_says_why(tmp_path: Path) -> None:
    with pytest.raises(UnauthorisedError, match="No such file"):
        connection.read_token(tmp_path / "absent")
    (tmp_path / "empty").write_text("# only this\n")
    with pytest.raises(UnauthorisedError, match="empty"):
        connection.read_token(tmp_path / "empty")


# ---------------------------------------------------------------- answers


def a_problem(reason: str) -> bytes:
    return json.dumps(
        {"reason": reason, "detail": "d", "field": "f", "value": "v", "remedy": "r"}
    ).encode()


@pytest.mark.parametrize(
    ("status", "reason", "kind", "exit_code"),
    [
        (400, "malformed", RefusedError, 3),
        (401, "unauthorised", UnauthorisedError, 5),
        (403, "admission-denied", UnauthorisedError, 5),
        (404, "unknown-job", NotFoundError, 7),
        (409, "duplicate-id", DuplicateIdError, 3),
        (409, "cancelled", RefusedError, 3),
        (413, "too-large", RefusedError, 3),
        (422, "invalid-spec", RefusedError, 3),
        (429, "quota", UnreachableError, 4),
        (503, "expired", UnreachableError, 4),
        (500, "internal", SpringtideClientError, 70),
    ],
)
def test_a_refusal_becomes_a_typed_fault(
    status: int, reason: str, kind: type[SpringtideClientError], exit_code: int
) -> None:
    error = calls.fault(status, a_problem(reason), "http://x")
    assert type(error) is kind
    assert (error.exit_code, error.reason, error.field, error.value) == (
        exit_code,
        reason,
        "f",
        "v",
    )
    assert error.exit_code in EXIT_CODES


def test_what_is_no_springtide_is_told_apart() -> None:
    assert isinstance(calls.fault(502, b"<html>", "http://x"), UnreachableError)
    with pytest.raises(UnreachableError, match="no springtide"):
        calls.decoded(calls.whoami(), 200, b"<html>", "http://x")
    answer = b'{"tenant": "t", "version": "9", "field of the future": 1}'
    assert calls.decoded(calls.whoami(), 200, answer, "http://x") == WhoAmI(tenant="t", version="9")


def test_ids_that_are_none_never_reach_a_path() -> None:
    for wrong in ("", "a/b", "..", "a b", "x" * 65, "a?b"):
        with pytest.raises(NotFoundError):
            calls.job(wrong)
    with pytest.raises(UnreachableError):
        calls.check_path("http://evil.example/api/v1/x")
    with pytest.raises(UnreachableError):
        calls.check_path("//evil.example/api/v1/x")


def test_pauses_grow_and_respect_the_servers_wish_within_reason() -> None:
    pauses = [calls.pause_before(attempt, None) for attempt in range(1, 9)]
    assert pauses == sorted(pauses)
    assert max(pauses) == 8.0
    assert calls.pause_before(1, "3") == 3.0
    assert calls.pause_before(1, "3600") == 8.0
    assert calls.pause_before(1, "soon") == pauses[0]


def test_events_are_taken_from_lines() -> None:
    lines = calls.EventLines()
    text = (
        ": alive\n\nevent: progress\n"
        'data: {"id":"j","state":"running","counts":{"queued":1},"at":1.5}\n\n'
        "event: other\ndata: {}\n\n"
        'event: end\ndata: {"reason":"final"}\n\n'
    )
    found = [event for line in text.split("\n") for event in lines.take(line)]
    assert len(found) == 2
    assert isinstance(found[0], JobProgress)
    assert (found[0].id, found[0].counts.queued) == ("j", 1)
    assert found[1] is None


# ---------------------------------------------------------------- downloads

PATHS_OUT = [
    "",
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a/./b",
    "a//b",
    "a/",
    "..",
    ".",
    "a\\b",
    "C:/x",
    "a\x00b",
    "a\nb",
]


@pytest.mark.parametrize("path", PATHS_OUT)
def test_a_path_that_leads_out_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(DownloadRefusedError):
        target_of(tmp_path, 0, path)


@given(st.text(max_size=30))
def test_no_path_leads_out(path: str) -> None:
    folder = Path("/somewhere/out")
    try:
        target = target_of(folder, 7, path)
    except DownloadRefusedError:
        return
    assert Path(os.path.normpath(target)).is_relative_to(folder / "0000007")
    assert target.name


def test_nothing_is_written_through_a_symbolic_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "out"
    (folder / "0000000").mkdir(parents=True)
    (folder / "0000000" / "link").symlink_to(outside)
    with pytest.raises(DownloadRefusedError, match="symbolic link"):
        target_of(folder, 0, "link/file")
    (folder / "0000001").symlink_to(outside)
    with pytest.raises(DownloadRefusedError, match="symbolic link"):
        target_of(folder, 1, "file")
    assert list(outside.iterdir()) == []


def an_output(data: bytes, path: str = "a") -> OutputInfo:
    return OutputInfo(
        path=path, url="/api/v1/x", size=len(data), sha256=hashlib.sha256(data).hexdigest()
    )


def test_a_file_appears_whole_and_verified(tmp_path: Path) -> None:
    target = tmp_path / "0000000" / "deep" / "a"
    download = Download(target, an_output(b"abcdef"))
    download.write(b"abc")
    assert not target.exists()
    download.write(b"def")
    download.finish()
    download.abandon()
    assert target.read_bytes() == b"abcdef"
    assert is_there(target, an_output(b"abcdef"))
    assert not is_there(target, an_output(b"abcdeF"))
    assert not is_there(target, an_output(b"abcde"))
    assert [one.name for one in target.parent.iterdir()] == ["a"]


@pytest.mark.parametrize("pieces", [[b"abc"], [b"abcdeX"], [b"abcdefg"]])
def test_a_file_that_is_not_what_was_named_never_appears(
    tmp_path: Path, pieces: list[bytes]
) -> None:
    target = tmp_path / "a"
    target.write_bytes(b"the file before")
    download = Download(target, an_output(b"abcdef"))

    def take_all() -> None:
        for piece in pieces:
            download.write(piece)
        download.finish()

    with pytest.raises(DownloadRefusedError):
        take_all()
    download.abandon()
    assert target.read_bytes() == b"the file before"
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def test_a_link_in_the_files_place_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    target = tmp_path / "a"
    target.symlink_to(tmp_path / "precious")
    assert not is_there(target, an_output(b"precious"))
    download = Download(target, an_output(b"x"))
    download.write(b"x")
    download.finish()
    assert (tmp_path / "precious").read_text() == "precious"
    assert not target.is_symlink()


def test_a_folder_that_cannot_be_made_is_a_local_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LocalError, match="cannot be written"):
        Download(tmp_path / "file" / "a", an_output(b"x"))


def test_parts_of_a_killed_download_are_swept(tmp_path: Path) -> None:
    folder = tmp_path / "0000000" / "deep"
    folder.mkdir(parents=True)
    dead = folder / ".a.part-999999999"
    mine = folder / f".b.part-{os.getpid()}"
    dead.touch()
    mine.touch()
    sweep(tmp_path)
    assert [one.name for one in folder.iterdir()] == [mine.name]


# ---------------------------------------------------------------- doctor


@pytest.mark.parametrize(
    ("version", "verdict"),
    [((3, 10), "fail"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "fail"), ((4, 0), "fail")],
)
def test_the_python_versions_are_those_we_support(version: tuple[int, int], verdict: str) -> None:
    assert doctor.python_version(version).verdict.value == verdict


def test_a_taken_port_is_found_and_ones_own_is_not_blamed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        found = doctor.port(number, None)
        assert found.verdict is doctor.Verdict.FAIL
        assert str(number) in found.detail
        assert "--port" in found.remedy
        assert doctor.port(number, number).verdict is doctor.Verdict.OK
    assert doctor.port(number, None).verdict is doctor.Verdict.OK


def test_a_home_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    assert doctor.writable_home(tmp_path / "new" / "er").verdict is doctor.Verdict.OK
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    found = doctor.writable_home(tmp_path / "file" / "home")
    assert found.verdict is doctor.Verdict.FAIL
    assert "SPRINGTIDE_HOME" in found.remedy


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_home_without_permission_is_found(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    found = doctor.writable_home(tmp_path)
    assert found.verdict is doctor.Verdict.FAIL
    assert "Permission denied" in found.detail


def test_a_filesystem_that_refuses_writes_is_found() -> None:
    # Also root may not: the kernel's own tree takes no files.
    found = doctor.writable_home(Path("/proc/springtide"))
    assert found.verdict is doctor.Verdict.FAIL


@pytest.mark.parametrize(
    "url",
    [
        "amqp://user:swordfish@127.0.0.1:1/",
        "amqp://user:swordfish@",
        "swordfish",
        "amqp://:swordfish@h",
    ],
)
def test_a_broker_that_is_not_there_fails_without_its_password(url: str) -> None:
    found = doctor.broker(url)
    assert found.verdict is doctor.Verdict.FAIL
    assert "swordfish" not in found.detail + found.remedy
    assert found.detail
    assert found.remedy


# ---------------------------------------------------------------- the package


def test_the_package_has_what_it_names() -> None:
    for name in springtide.__all__:
        assert getattr(springtide, name) is not None
    with pytest.raises(AttributeError):
        _ = springtide.nothing
