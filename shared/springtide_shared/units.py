"""Quantities as types: text is parsed at the edge, sums run on whole numbers.

CPU is counted in thousandths of a core, memory and scratch in bytes, time in seconds. Floats never
enter a sum of resources, so that a plan of 100,000 tasks adds up exactly.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Final

import msgspec

from springtide_shared.errors import shown

KiB: Final = 1024
MiB: Final = 1024 * KiB
GiB: Final = 1024 * MiB
TiB: Final = 1024 * GiB

_BYTE_UNITS: Final = {
    "": 1,
    "k": 1000,
    "K": 1000,
    "M": 1000**2,
    "G": 1000**3,
    "T": 1000**4,
    "Ki": KiB,
    "Mi": MiB,
    "Gi": GiB,
    "Ti": TiB,
}
_SECOND_UNITS: Final[dict[str, Decimal]] = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
    "w": Decimal(604800),
}
_QUANTITY: Final = re.compile(r"^(\d{1,18}(?:\.\d{1,9})?)([A-Za-z]{0,2})$", re.ASCII)
_DURATION: Final = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)(ms|[smhdw])", re.ASCII)

MAX_CPU_MILLIS: Final = 1_000_000
"""1,000 cores: more than any instance type on sale (2026) has."""
MAX_BYTES: Final = 64 * TiB
MAX_SECONDS: Final = 366 * 86400


def _number(text: str, what: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f"{text!r} is no {what}") from error


def parse_cpu(value: str | float) -> int:
    """Cores (`2`, `0.5`, `"2"`, `"500m"`) as thousandths of a core.

    Raises:
        ValueError: not a number, negative, finer than a thousandth, or above 1,000 cores.
    """
    remedy = 'give cores as a number (2, 0.5) or thousandths as text ("500m")'
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{shown(value)!r} is no amount of CPU; {remedy}")
    if isinstance(value, int) and not 0 <= value <= MAX_CPU_MILLIS:
        raise ValueError(f"{shown(value)!r} is no amount of CPU; {remedy}")
    text = value.strip() if isinstance(value, str) else repr(value)
    scale = 1000
    if text.endswith("m"):
        text, scale = text[:-1], 1
    if not re.fullmatch(r"\d{1,9}(\.\d{1,6})?", text, re.ASCII):
        raise ValueError(f"{shown(value)!r} is no amount of CPU; {remedy}")
    millis = _number(text, "amount of CPU") * scale
    if millis != int(millis):
        raise ValueError(f"{shown(value)!r} is finer than a thousandth of a core; {remedy}")
    if millis > MAX_CPU_MILLIS:
        raise ValueError(
            f"{shown(value)!r} is more than 1,000 cores; ask for what one node can hold"
        )
    return int(millis)


def parse_bytes(value: str | int) -> int:
    """Bytes as a whole number or as text with a unit (`"8Gi"`, `"500M"`).

    Raises:
        ValueError: not a size, negative, a fraction of a byte, or above 64 TiB.
    """
    remedy = 'give bytes as a whole number or text with a unit ("8Gi", "500M")'
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{shown(value)!r} is no size; {remedy}")
    if isinstance(value, int) and not 0 <= value <= MAX_BYTES:
        raise ValueError(f"{shown(value)!r} is no size of 0 … 64 TiB; {remedy}")
    match = _QUANTITY.match(value.strip() if isinstance(value, str) else str(value))
    if match is None or match[2] not in _BYTE_UNITS:
        raise ValueError(f"{shown(value)!r} is no size; {remedy}")
    size = _number(match[1], "size") * _BYTE_UNITS[match[2]]
    if size != int(size):
        raise ValueError(f"{shown(value)!r} is a fraction of a byte; {remedy}")
    if size > MAX_BYTES:
        raise ValueError(f"{shown(value)!r} is more than 64 TiB; ask for what one node can hold")
    return int(size)


def parse_duration(value: str | float) -> float:
    """Seconds as a number, or text with units (`"90m"`, `"1h30m"`, `"250ms"`).

    Raises:
        ValueError: not a duration, negative, not finite, or above 366 days.
    """
    remedy = 'give seconds as a number or text with a unit ("90m", "1h30m")'
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{shown(value)!r} is no duration; {remedy}")
    if isinstance(value, str):
        text = value.strip()
        parts = _DURATION.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise ValueError(f"{shown(value)!r} is no duration; {remedy}")
        seconds = float(
            sum((Decimal(number) * _SECOND_UNITS[unit] for number, unit in parts), Decimal(0))
        )
    elif isinstance(value, int) and not 0 <= value <= MAX_SECONDS:
        raise ValueError(f"{shown(value)!r} is no duration of 0 … 366 days; {remedy}")
    else:
        seconds = float(value)
        if not 0 <= seconds < float("inf"):  # also refuses NaN
            raise ValueError(f"{shown(value)!r} is no duration; {remedy}")
    if seconds > MAX_SECONDS:
        raise ValueError(f"{shown(value)!r} is more than 366 days; {remedy}")
    return seconds


def format_cpu(millis: int) -> str:
    """Cores for people: `2`, `0.5`."""
    return f"{millis / 1000:g}"


def format_bytes(size: int) -> str:
    """A size for people, in the largest binary unit that keeps three digits: `8Gi`, `1.5Mi`."""
    for unit, name in ((TiB, "Ti"), (GiB, "Gi"), (MiB, "Mi"), (KiB, "Ki")):
        if size >= unit:
            return f"{size / unit:.3g}{name}"
    return str(size)


def format_duration(seconds: float) -> str:
    """A duration for people, two units at most: `1h30m`, `42s`, `0.25s`."""
    if seconds < 60:
        return f"{seconds:.3g}s"
    whole = round(seconds)
    for unit, name, below, below_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit}{name}" + (f"{rest}{below_name}" if rest else "")
    return f"{whole // 60}m" + (f"{whole % 60}s" if whole % 60 else "")


class Resources(msgspec.Struct, frozen=True, order=True, gc=False):
    """An amount of what a node offers and a task requests; plans make them by the million.

    `cpu_millis` thousandths of a core; `memory_bytes`, `scratch_bytes` bytes; `gpu` whole devices;
    `pods` places in the kubelet's list (a task takes one).
    """

    cpu_millis: int = 0
    memory_bytes: int = 0
    scratch_bytes: int = 0
    gpu: int = 0
    pods: int = 0

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            self.cpu_millis + other.cpu_millis,
            self.memory_bytes + other.memory_bytes,
            self.scratch_bytes + other.scratch_bytes,
            self.gpu + other.gpu,
            self.pods + other.pods,
        )

    def __sub__(self, other: Resources) -> Resources:
        return Resources(
            self.cpu_millis - other.cpu_millis,
            self.memory_bytes - other.memory_bytes,
            self.scratch_bytes - other.scratch_bytes,
            self.gpu - other.gpu,
            self.pods - other.pods,
        )

    def __mul__(self, times: int) -> Resources:
        return Resources(
            self.cpu_millis * times,
            self.memory_bytes * times,
            self.scratch_bytes * times,
            self.gpu * times,
            self.pods * times,
        )

    def fits(self, room: Resources) -> bool:
        """Whether this request finds place in `room`."""
        return (
            self.cpu_millis <= room.cpu_millis
            and self.memory_bytes <= room.memory_bytes
            and self.scratch_bytes <= room.scratch_bytes
            and self.gpu <= room.gpu
            and self.pods <= room.pods
        )

    def times_in(self, room: Resources) -> int:
        """How often this request fits into `room` at once (0 if it asks for nothing at all)."""
        least = -1
        for need, have in (
            (self.cpu_millis, room.cpu_millis),
            (self.memory_bytes, room.memory_bytes),
            (self.scratch_bytes, room.scratch_bytes),
            (self.gpu, room.gpu),
            (self.pods, room.pods),
        ):
            if need > 0:
                times = have // need
                if times <= 0:
                    return 0
                if least < 0 or times < least:
                    least = times
        return max(0, least)

    @property
    def is_negative(self) -> bool:
        """Whether any part is below zero: something was promised twice."""
        return min(self.cpu_millis, self.memory_bytes, self.scratch_bytes, self.gpu, self.pods) < 0


SIGNAL_EXIT_BASE: Final = 128
"""A program that a signal ended exits, for the world, with 128 + its number (as shells say it)."""


def exit_code_of(returncode: int) -> int:
    """What `subprocess` says (negative: a signal) as one exit code of 0 … 255."""
    return SIGNAL_EXIT_BASE - returncode if returncode < 0 else returncode
