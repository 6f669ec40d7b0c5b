"""Bearer tokens: one file, one tenant per token."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from springtide_shared.errors import InvalidFieldError, PermanentError, Reason

DEFAULT_TENANT: Final = "default"
_TOKEN: Final = re.compile(r"^[A-Za-z0-9._~+/=-]{16,512}$", re.ASCII)
_TENANT: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", re.ASCII)


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Which token belongs to which tenant; holds digests only."""

    entries: tuple[tuple[bytes, str], ...]

    def tenant_of(self, token: str) -> str | None:
        """The tenant, or None. Takes the same time whichever entry matches, and if none does."""
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        found: str | None = None
        for known, tenant in self.entries:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def parse_tokens(text: str, name: str) -> TokenTable:
    """The table in `text`: a line is `token` or `token tenant`; `#` begins a comment line.

    Raises:
        InvalidFieldError: names the line, never the token.
    """
    entries: list[tuple[bytes, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{name}: line {number}"
        if len(words) > 2 or not _TOKEN.fullmatch(words[0]):
            raise InvalidFieldError(
                where, "(not shown)", "write `token [tenant]`; a token has 16 … 512 characters"
            )
        tenant = words[1] if len(words) == 2 else DEFAULT_TENANT
        if not _TENANT.fullmatch(tenant):
            raise InvalidFieldError(
                where, tenant, "tenants: letters, digits, . _ - (≤ 63), a letter or digit first"
            )
        entries.append((hashlib.sha256(words[0].encode()).digest(), tenant))
    if not entries:
        raise InvalidFieldError(
            name, "(empty)", "put a token into it, or delete it for a fresh one"
        )
    return TokenTable(tuple(entries))


def ensure_tokens(path: Path) -> TokenTable:
    """Read the file; make it first, readable by its owner alone, if it is absent.

    Raises:
        PermanentError: it cannot be made or read.
        InvalidFieldError: it holds no usable token.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            # Made aside and linked: of two gateways that start at once one makes the file, and
            # nobody reads half of it.
            aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
            try:
                with os.fdopen(
                    os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
                ) as f:
                    f.write(secrets.token_urlsafe(32) + "\n")
                with suppress(FileExistsError):
                    os.link(aside, path)
            finally:
                aside.unlink(missing_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error
    return read_tokens(path)


def read_tokens(path: Path) -> TokenTable:
    """Read the file.

    Raises:
        PermanentError: it cannot be read, or others than its owner may read it.
        InvalidFieldError: it holds no usable token.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise PermanentError(
                Reason.UNAUTHORISED,
                f"others may read the token file {path}; run: chmod 600 {path}",
            )
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, error) from error
    return parse_tokens(text, path.name)


def _unusable(path: Path, error: Exception) -> PermanentError:
    why = error.strerror if isinstance(error, OSError) else "it is no text"
    return PermanentError(
        Reason.INVALID_SPEC, f"the token file {path} cannot be used ({why}); set token_file"
    )
