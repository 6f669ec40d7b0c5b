"""Settings: one frozen dataclass a service, read from a file and the environment, checked once.

Every field whose name ends in `_seconds` is a time constant of policy; `scaled` divides all of them
by one factor, which is how a demonstration of hours fits into minutes.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from springtide_shared.errors import InvalidFieldError
from springtide_shared.units import parse_bytes, parse_duration

C = TypeVar("C")


def load(
    cls: type[C],
    *,
    prefix: str,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> C:
    """Make `cls` from its defaults, then `file` (YAML or JSON), then `<PREFIX>_<FIELD>` variables.

    Fields ending in `_seconds` take durations (`"90m"`), in `_bytes` sizes (`"8Gi"`).

    Raises:
        InvalidFieldError: an unknown field, a wrong type or a missing value; names the field (and
            the variable or file it came from), the value and the remedy. Values of fields whose
            names speak of secrets are not shown.
    """
    hints = typing.get_type_hints(cls)
    fields = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    if file is not None:
        for name, value in _read(file).items():
            if name not in fields:
                known = ", ".join(sorted(fields))
                raise InvalidFieldError(f"{file.name}: {name}", value, f"known settings: {known}")
            values[name] = _convert(f"{file.name}: {name}", hints[name], name, value)
    env = os.environ if environ is None else environ
    for name in fields:
        variable = f"{prefix}_{name}".upper()
        if variable in env:
            values[name] = _convert(variable, hints[name], name, env[variable])
    for name, value in (overrides or {}).items():
        if name not in fields:
            raise InvalidFieldError(name, value, f"known settings: {', '.join(sorted(fields))}")
        values[name] = value
    for name, item in fields.items():
        if (
            name not in values
            and item.default is dataclasses.MISSING
            and item.default_factory is dataclasses.MISSING
        ):
            raise InvalidFieldError(name, "(absent)", f"set {f'{prefix}_{name}'.upper()}")
    try:
        return cls(**values)
    except ValueError as error:  # a __post_init__ that refuses a combination
        raise InvalidFieldError(cls.__name__, "(combination)", str(error)) from error


TRADE_OFFS: Final = frozenset(
    {
        "cycle_seconds",
        "horizon_seconds",
        "idle_seconds",
        "least_age_seconds",
        "min_gain_seconds",
        "release_seconds",
        "rest_seconds",
        "resume_seconds",
        "retry_seconds",
        "save_seconds",
        "stop_seconds",
    }
)
"""Constants that weigh money against work, in proportion to how long tasks run."""
MOST_HASTE: Final = 10.0
"""All other times are bound to real processes, stores and brokers, which a demonstration does not
make faster; they are divided by the factor too, but by no more than this."""
NOT_SCALED: Final = frozenset({"lease_seconds", "finishing_limit_seconds", "store_limit_seconds"})
"""Guards against stalled processes and absent stores, whose stalls do not shrink at all."""


def scaled(config: C, factor: float) -> C:
    """The same settings with every `_seconds` field divided by `factor`, nested ones too.

    Fields that are no `TRADE_OFFS` are divided by at most `MOST_HASTE`; those in `NOT_SCALED` stay.
    """
    changes: dict[str, Any] = {}
    for item in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changes[item.name] = scaled(value, factor)
        elif (
            item.name.endswith("_seconds")
            and item.name not in NOT_SCALED
            and isinstance(value, int | float)
        ):
            divisor = factor if item.name in TRADE_OFFS else min(factor, MOST_HASTE)
            changes[item.name] = value / divisor
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def _read(file: Path) -> Mapping[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise InvalidFieldError(
            "config file", str(file), f"cannot be read ({error.strerror}); name an existing file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidFieldError("config file", str(file), f"write YAML or JSON: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidFieldError("config file", str(file), "write one mapping of settings")
    return content


_TRUTH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def _convert(shown: str, hint: Any, name: str, value: Any) -> Any:
    is_secret = any(word in name for word in ("password", "secret", "token", "url"))
    given = "(not shown)" if is_secret else value
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    for option in options:
        try:
            return _convert_one(option, name, value)
        except (ValueError, TypeError):
            continue
    wanted = " or ".join(getattr(item, "__name__", str(item)) for item in options)
    if name.endswith("_seconds"):
        wanted = 'a duration such as 30 or "90m"'
    elif name.endswith("_bytes"):
        wanted = 'a size such as "8Gi"'
    raise InvalidFieldError(shown, given, f"give {wanted}")


def _convert_one(option: Any, name: str, value: Any) -> Any:
    if option is bool:
        if isinstance(value, bool):
            return value
        text = str(value).strip().lower()
        if text not in _TRUTH:
            raise ValueError(value)
        return _TRUTH[text]
    if option in (int, float) and name.endswith("_seconds"):
        return option(parse_duration(_number(value)))
    if option is int and name.endswith("_bytes"):
        return parse_bytes(_number(value))
    if option in (int, float):
        if isinstance(value, bool):
            raise TypeError(value)
        number = option(value)
        if number != number:  # NaN
            raise ValueError(value)
        return number
    if option is str:
        if not isinstance(value, str):
            raise TypeError(value)
        return value
    if option is Path:
        return Path(str(value))
    if typing.get_origin(option) in (tuple, list):
        parts = value.split(",") if isinstance(value, str) else value
        return typing.get_origin(option)(str(part).strip() for part in parts)
    if isinstance(value, option):
        return value
    raise TypeError(value)


def _number(value: Any) -> Any:
    """A plain number in text is a number: variables hold only text."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            try:
                return float(value)
            except ValueError:
                return value
    return value
