"""What a document of ServiceState may be: one rule for every keeper."""

from __future__ import annotations

import re
from typing import Final

from springtide_shared.errors import ConflictError, InvalidFieldError, Reason

MAX_DOCUMENT_BYTES: Final = 256 * 1024
"""Several fit into one ConfigMap (1 MiB)."""
_KEY: Final = re.compile(r"[a-z0-9._-]{1,128}", re.ASCII)
_PREFIX: Final = re.compile(r"[a-z0-9._-]{0,128}", re.ASCII)


def check_document(key: str, body: bytes = b"", expected: int = 0) -> None:
    """Refuse a key, a body or a version that no keeper takes.

    Raises:
        InvalidFieldError: names the field, the value and the remedy.
    """
    if not _KEY.fullmatch(key):
        raise InvalidFieldError("key", key, "use 1 … 128 characters of a-z 0-9 . _ -")
    if len(body) > MAX_DOCUMENT_BYTES:
        raise InvalidFieldError(
            "body",
            f"{len(body)} bytes",
            f"the limit is {MAX_DOCUMENT_BYTES} bytes; split the document",
            Reason.TOO_LARGE,
        )
    if expected < 0:
        raise InvalidFieldError("expected", expected, "give the version loaded, 0 for none")


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that no key has.

    Raises:
        InvalidFieldError: names the field, the value and the remedy.
    """
    if not _PREFIX.fullmatch(prefix):
        raise InvalidFieldError("prefix", prefix, "use up to 128 characters of a-z 0-9 . _ -")


def changed_since(key: str, expected: int, found: int) -> ConflictError:
    """Somebody else wrote the document; `found` 0: it is gone."""
    return ConflictError(
        Reason.STALE, "the document was changed since", key=key, expected=expected, found=found
    )
