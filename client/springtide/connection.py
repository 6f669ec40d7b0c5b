"""Where springtide is and what opens it: arguments, then the environment, then `springtide up`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from springtide.errors import UnauthorisedError, UnreachableError, UsageError

ENDPOINT_FILE: Final = "endpoint.json"
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address and its token. The token is never shown."""

    url: str
    token: str
    pid: int | None = None
    """Of the `springtide up` that wrote the address; None: given otherwise."""

    def __repr__(self) -> str:
        return f"Endpoint({self.url})"

    @property
    def is_loopback(self) -> bool:
        """Whether it is on this machine."""
        return (urlsplit(self.url).hostname or "") in _LOOPBACK


def home(environ: Mapping[str, str] | None = None) -> Path:
    """`$SPRINGTIDE_HOME`, else `~/.springtide`."""
    env = os.environ if environ is None else environ
    given = env.get("SPRINGTIDE_HOME")
    return Path(given).expanduser() if given else Path.home() / ".springtide"


def find(
    url: str = "",
    token_file: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> Endpoint:
    """The endpoint to use.

    The token that `springtide up` left is sent to the address that it left, and nowhere else.

    Args:
        url: over `SPRINGTIDE_URL` and the home's `endpoint.json`.
        token_file: over `SPRINGTIDE_TOKEN`, `SPRINGTIDE_TOKEN_FILE` and the home's.

    Raises:
        UnreachableError: nothing tells where springtide is.
        UnauthorisedError: no token can be had for it.
        UsageError: the address is no http(s) URL.
    """
    env = os.environ if environ is None else environ
    left = read_endpoint(home(env))
    wanted = url or env.get("SPRINGTIDE_URL", "")
    if not wanted and left is None:
        raise UnreachableError(
            f"no springtide is known here: {home(env) / ENDPOINT_FILE} does not exist",
            remedy="run `springtide up` in another terminal, or give --url and --token-file",
        )
    address = checked_url(wanted or str((left or {}).get("url", "")))
    same = left is not None and checked_url(str(left.get("url", ""))) == address
    pid = left.get("pid") if left is not None and same else None
    token = ""
    if token_file is None and env.get("SPRINGTIDE_TOKEN"):
        token = env["SPRINGTIDE_TOKEN"].strip()
    else:
        file = token_file or _path(env.get("SPRINGTIDE_TOKEN_FILE", ""))
        if file is None and left is not None and same:
            file = _path(str(left.get("token_file", "")))
        if file is None:
            raise UnauthorisedError(
                f"no token for {address}",
                remedy="give --token-file or set SPRINGTIDE_TOKEN",
            )
        token = read_token(file)
    return Endpoint(address, token, pid if isinstance(pid, int) else None)


def _path(text: str) -> Path | None:
    return Path(text).expanduser() if text else None


def checked_url(url: str) -> str:
    """The address without a slash at its end.

    Raises:
        UsageError: no http(s) URL, or one with a password in it.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        usable = False
    if not usable or parts.username or parts.query or parts.fragment:
        raise UsageError(
            "the address of springtide is no plain http(s) URL",
            remedy="write for instance --url http://127.0.0.1:8470",
        )
    return url.rstrip("/")


def read_token(file: Path) -> str:
    """The first token of a token file.

    Raises:
        UnauthorisedError: it cannot be read or holds none.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UnauthorisedError(
            f"the token file {file} cannot be read: {why}", remedy="give another --token-file"
        ) from error
    for line in text.splitlines():
        words = line.split()
        if words and not words[0].startswith("#"):
            return words[0]
    raise UnauthorisedError(f"the token file {file} is empty", remedy="give another --token-file")


def read_endpoint(folder: Path) -> dict[str, Any] | None:
    """What `springtide up` left in a home; None if nothing usable is there."""
    try:
        content = json.loads((folder / ENDPOINT_FILE).read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("url") else None


def is_alive(pid: int) -> bool:
    """Whether a process of this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
