"""`springtide doctor`: what would keep springtide from working here, each with its remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from springtide import connection
from springtide.errors import SpringtideClientError

DEFAULT_PORT: Final = 8470
_LEAST_FREE_BYTES: Final = 1024**3
_PYTHON_FROM: Final = (3, 11)
_PYTHON_BELOW: Final = (3, 14)
_PARTS: Final = (
    "springtide_shared",
    "springtide_coordinator",
    "springtide_submitter",
    "springtide_scaler",
    "springtide_rescheduler",
    "springtide_monitor",
    "springtide_agent",
    "springtide_gateway",
    "springtide_lab",
)


class Verdict(StrEnum):
    """How a check went."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check. Holds no secret."""

    check: str
    verdict: Verdict
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to look at."""

    home: Path
    url: str = ""
    token_file: Path | None = None
    amqp_url: str = ""
    port: int = DEFAULT_PORT


def examine(wanted: Wanted) -> Iterator[Finding]:
    """All checks, cheapest first."""
    yield python_version(sys.version_info[:2])
    yield from packages()
    yield writable_home(wanted.home)
    yield disk(wanted.home)
    endpoint = connection.read_endpoint(wanted.home)
    is_up = endpoint is not None and _is_running(endpoint)
    own_port = _port_of(str(endpoint.get("url", ""))) if endpoint is not None and is_up else None
    yield port(wanted.port, own_port)
    yield from gateway(wanted, is_up=is_up, is_stale=endpoint is not None and not is_up)
    if wanted.amqp_url:
        yield broker(wanted.amqp_url)


def python_version(version: Sequence[int]) -> Finding:
    """Whether this Python is one that springtide supports."""
    shown = ".".join(str(part) for part in version[:2])
    if _PYTHON_FROM <= tuple(version[:2]) < _PYTHON_BELOW:
        return Finding(check="python", verdict=Verdict.OK, detail=f"Python {shown}")
    return Finding(
        check="python",
        verdict=Verdict.FAIL,
        detail=f"Python {shown} is not supported",
        remedy="use Python 3.11, 3.12 or 3.13",
    )


def packages() -> Iterator[Finding]:
    """Whether all parts for `up` and `demo` are there, and the versions of the main ones."""
    missing = [name for name in _PARTS if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding(
            check="packages",
            verdict=Verdict.WARN,
            detail=f"not installed: {', '.join(missing)}; `up` and `demo` need them",
            remedy='run `make setup` in a clone, or pip install "springtide[lab]"',
        )
        return
    version = importlib.metadata.version("springtide")
    yield Finding(check="packages", verdict=Verdict.OK, detail=f"springtide {version}, all parts")


def writable_home(home: Path) -> Finding:
    """Whether `springtide up` can keep its files."""
    existing = home
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        if not existing.is_dir():
            raise NotADirectoryError(20, "Not a directory")
        # Trying is the only test that holds for root, read-only mounts and full disks alike.
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"springtide")
            file.flush()
    except OSError as error:
        return Finding(
            check="home",
            verdict=Verdict.FAIL,
            detail=f"no file can be written in {existing}: {error.strerror}",
            remedy="set SPRINGTIDE_HOME to a directory of yours",
        )
    if home.exists() and os.name == "posix" and home.stat().st_uid != os.getuid():
        return Finding(
            check="home",
            verdict=Verdict.WARN,
            detail=f"{home} belongs to another user",
            remedy="set SPRINGTIDE_HOME to a directory of yours",
        )
    return Finding(check="home", verdict=Verdict.OK, detail=f"{home} can be written")


def disk(home: Path) -> Finding:
    """Whether there is room for checkpoints and results."""
    existing = home
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < _LEAST_FREE_BYTES:
        return Finding(
            check="disk",
            verdict=Verdict.WARN,
            detail=f"{free // 1024**2} MiB are free below {existing}",
            remedy="make room, or set SPRINGTIDE_HOME to another disk",
        )
    return Finding(
        check="disk", verdict=Verdict.OK, detail=f"{free // 1024**3} GiB are free below {existing}"
    )


def port(number: int, own: int | None) -> Finding:
    """Whether `springtide up` can listen. `own`: where one listens already."""
    if own == number:
        return Finding(
            check="port", verdict=Verdict.OK, detail=f"{number} is used by your springtide"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
            probe.listen(1)
        except OSError as error:
            return Finding(
                check="port",
                verdict=Verdict.FAIL,
                detail=f"nothing can listen on 127.0.0.1:{number}: {error.strerror}",
                remedy="end what listens there, or use `springtide up --port 0`",
            )
    return Finding(check="port", verdict=Verdict.OK, detail=f"127.0.0.1:{number} is free")


def gateway(wanted: Wanted, *, is_up: bool, is_stale: bool) -> Iterator[Finding]:
    """Whether springtide answers, and whether the token opens it."""
    named = bool(wanted.url or os.environ.get("SPRINGTIDE_URL"))
    if not named and not is_up:
        detail = "no springtide runs here"
        if is_stale:
            detail += "; the last one ended without taking its address away"
        yield Finding(
            check="gateway", verdict=Verdict.WARN, detail=detail, remedy="run `springtide up`"
        )
        return
    try:
        endpoint = connection.find(wanted.url, wanted.token_file)
    except SpringtideClientError as error:
        yield _failed("token", error)
        return
    if not endpoint.is_loopback and endpoint.url.startswith("http://"):
        yield Finding(
            check="transport",
            verdict=Verdict.WARN,
            detail=f"{endpoint.url}: the token travels in clear",
            remedy="put TLS in front of the gateway and use its https address",
        )
    import httpx

    from springtide.client import Client

    try:
        alive = httpx.get(
            f"{endpoint.url}/healthz", timeout=5.0, trust_env=not endpoint.is_loopback
        )
        if alive.status_code != 200 or alive.json().get("alive") is not True:
            raise ValueError(f"status {alive.status_code}")
    except (httpx.HTTPError, ValueError, AttributeError) as error:
        yield Finding(
            check="gateway",
            verdict=Verdict.FAIL,
            detail=f"{endpoint.url} is no springtide that answers: {error}",
            remedy="is it running? check --url",
        )
        return
    yield Finding(check="gateway", verdict=Verdict.OK, detail=f"{endpoint.url} answers")
    try:
        with Client(endpoint=endpoint) as client:
            who = client.whoami()
    except SpringtideClientError as error:
        yield _failed("token", error)
        return
    yield Finding(check="token", verdict=Verdict.OK, detail=f"valid, tenant {who.tenant}")
    try:
        ready = httpx.get(f"{endpoint.url}/readyz", timeout=5.0, trust_env=not endpoint.is_loopback)
        reasons = [] if ready.status_code == 200 else ready.json().get("reasons", [])
    except (httpx.HTTPError, ValueError, AttributeError) as error:
        reasons = [str(error)]
    if reasons:
        yield Finding(
            check="ready",
            verdict=Verdict.FAIL,
            detail="; ".join(str(reason) for reason in reasons),
            remedy="look at the gateway's log",
        )
    else:
        yield Finding(check="ready", verdict=Verdict.OK, detail="jobs can be submitted")


def broker(url: str) -> Finding:
    """Whether the broker takes us. Neither the URL's user nor its password is shown."""
    from springtide import amqp

    try:
        amqp.check(url)
    except SpringtideClientError as error:
        return _failed("broker", error)
    return Finding(check="broker", verdict=Verdict.OK, detail="the broker takes us")


def _failed(check: str, error: SpringtideClientError) -> Finding:
    return Finding(check=check, verdict=Verdict.FAIL, detail=error.detail, remedy=error.remedy)


def _is_running(endpoint: dict[str, object]) -> bool:
    pid = endpoint.get("pid")
    return isinstance(pid, int) and connection.is_alive(pid)


def _port_of(url: str) -> int | None:
    tail = url.rstrip("/").rpartition(":")[2]
    return int(tail) if tail.isdigit() else None
