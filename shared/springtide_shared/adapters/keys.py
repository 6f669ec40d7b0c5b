"""What a key of an object may be: one rule for every store, so a laptop refuses what S3 does."""

from __future__ import annotations

from typing import Final

from springtide_shared.errors import InvalidFieldError

MAX_KEY_BYTES: Final = 1_024
"""S3's limit."""
MAX_PART_BYTES: Final = 255
"""A file system's limit for one name."""


def check_key(key: str) -> str:
    """The key itself.

    Raises:
        InvalidFieldError: empty, absolute, with empty, `.` or `..` parts, NUL, no valid Unicode,
            or too long.
    """
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidFieldError("key", ascii(key), "write valid Unicode") from error
    if size > MAX_KEY_BYTES:
        raise InvalidFieldError("key", key, f"{size} bytes, the limit is {MAX_KEY_BYTES}")
    if "\0" in key:
        raise InvalidFieldError("key", key, "leave out NUL characters")
    for part in key.split("/"):
        if part in ("", ".", ".."):
            raise InvalidFieldError(
                "key", key, "give a relative path without empty, `.` or `..` parts"
            )
        if len(part.encode()) > MAX_PART_BYTES:
            raise InvalidFieldError("key", key, f"a part is longer than {MAX_PART_BYTES} bytes")
    return key


def check_range(offset: int, length: int | None) -> None:
    """Refuse a range that no object can have.

    Raises:
        InvalidFieldError: negative offset or length.
    """
    if offset < 0:
        raise InvalidFieldError("offset", offset, "give 0 or more bytes")
    if length is not None and length < 0:
        raise InvalidFieldError("length", length, "give 0 or more bytes, or nothing for the rest")


def path_conflict(key: str, other: str) -> InvalidFieldError:
    """A key that would have to be a file and a folder at once."""
    return InvalidFieldError(
        "key", key, f"an object lies at {other!r}: keys are paths, none is another's folder"
    )
