"""Job files, YAML or JSON: what is wrong is named with file, line, field, value and remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from springtide.errors import JobFileError, UsageError
from springtide_shared.errors import InvalidFieldError, PermanentError
from springtide_shared.messages.base import MAX_BODY_BYTES
from springtide_shared.messages.job import JobSpec, parse_job

MAX_FILE_BYTES: Final = 8 * MAX_BODY_BYTES
"""Comments and white space may make a file larger than the message that is made of it."""
_MAX_NODES: Final = 2_000_000
"""With all references written out; a few lines of YAML can stand for more than a memory holds."""

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """YAML as people mean it: `no`, `1:30` and `2026-01-01` are text, as in YAML 1.2."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", [*"~nN", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", [*"tTfF"]),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", [*"-+0123456789"]),
    ("float", r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$",
     [*"-+.0123456789"]),
):  # fmt: skip
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


@dataclass(slots=True)
class JobFile:
    """A job as written, with the line of every field."""

    content: dict[str, Any]
    name: str = ""
    """Of the file; empty: it came as arguments."""
    lines: dict[str, int] = field(default_factory=dict)
    given_by: dict[str, str] = field(default_factory=dict)
    """Fields set otherwise than in the file, and by what (`--set`)."""

    def set(self, path: str, value: Any, by: str) -> None:
        """Put a value at a dotted path, over what the file says.

        Raises:
            UsageError: the path leads through something that is no mapping.
        """
        names = path.split(".")
        # Names of variables and labels may have dots of their own.
        if names[0] in ("env", "labels"):
            names = [names[0], ".".join(names[1:])] if len(names) > 1 else names
        if not all(names):
            raise UsageError(f"{by}: {path!r} is no field; write field=value or field.part=value")
        at = self.content
        for name in names[:-1]:
            inner = at.setdefault(name, {})
            if not isinstance(inner, dict):
                raise UsageError(f"{by}: {path}: {name} is no mapping, so it has no parts")
            at = inner
        at[names[-1]] = value
        self.given_by[path] = by

    def check(self) -> JobSpec:
        """The job normalised.

        Raises:
            JobFileError: names file, line, field, value and remedy.
        """
        try:
            _job, spec = parse_job(self.content)
        except InvalidFieldError as error:
            raise self._explained(error) from error
        except PermanentError as error:
            raise self.placed(error.detail, reason=error.reason.value) from error
        return spec

    def _explained(self, error: InvalidFieldError) -> JobFileError:
        path, value, remedy = error.field, error.value, error.remedy
        if path.endswith("[...]"):  # the decoder does not say which entry of a mapping it means
            base = path.removesuffix("[...]")
            entries = self.content.get(base)
            if isinstance(entries, dict):
                wrong = (name for name, entry in entries.items() if not isinstance(entry, str))
                path = f"{base}.{next(wrong, '')}".rstrip(".")
        if value.startswith("Expected `str`, got"):
            remedy = "this is text: put the value in quotes"
        detail = f"{path}: {value!r} is refused; {remedy}"
        return self.placed(
            detail, reason=error.reason.value, field=path, value=value, remedy=remedy
        )

    def placed(
        self, detail: str, *, reason: str, field: str = "", value: str = "", remedy: str = ""
    ) -> JobFileError:
        """The fault with its place: the line of the field, or of what it should stand in."""
        by = next((self.given_by[p] for p in _outwards(field) if p in self.given_by), "")
        line = 0
        if not by:
            line = next((self.lines[p] for p in _outwards(field) if p in self.lines), 0)
            line = line or (1 if self.lines else 0)
        return JobFileError(
            detail,
            file=by or self.name or "job",
            line=line,
            reason=reason,
            field=field,
            value=value,
            remedy=remedy,
        )


def _outwards(path: str) -> Iterator[str]:
    """The path and all that it stands in: `a.b[3]`, `a.b`, `a`."""
    while path:
        yield path
        cut = max(path.rfind("."), path.rfind("["))
        path = path[:cut] if cut > 0 else ""


def read_job_file(path: Path) -> JobFile:
    """Read a job file.

    Raises:
        JobFileError: it cannot be read, is no YAML or JSON, or holds other than one job.
    """
    name = str(path)
    try:
        if path.is_dir():
            raise JobFileError("this is a directory; name a job file", file=name, line=0)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise JobFileError(
                f"{path.stat().st_size} bytes; a job file has at most {MAX_FILE_BYTES}",
                file=name,
                line=0,
                reason="too-large",
                remedy="split the array or shorten its items",
            )
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise JobFileError(
            f"cannot be read: {error.strerror}", file=name, line=0, remedy="name an existing file"
        ) from error
    except UnicodeDecodeError as error:
        raise JobFileError(
            f"is no UTF-8 text (byte {error.start})", file=name, line=0, reason="malformed"
        ) from error
    return parse_job_file(text, name)


def parse_job_file(text: str, name: str) -> JobFile:
    """See `read_job_file`; `name` is shown in errors."""
    is_json = text.lstrip()[:1] == "{" and (name.endswith(".json") or _is_json(text))
    content: Any = None
    if is_json:
        try:
            content = json.loads(text, object_pairs_hook=_once(name))
        except json.JSONDecodeError as error:
            raise JobFileError(
                f"is no JSON: {error.msg} (column {error.colno})",
                file=name,
                line=error.lineno,
                reason="malformed",
            ) from error
        except RecursionError as error:
            raise _too_deep(name) from error
    lines: dict[str, int] = {}
    try:
        # In JSON a tab is white space only, but YAML takes none: columns do not matter here.
        loader = _Loader(text.replace("\t", " ") if is_json else text)
        try:
            node = loader.get_single_node()
            if node is not None:
                _note_lines(node, name, lines)
            if not is_json:
                content = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        if not is_json:
            raise _broken_yaml(error, name) from error
    except (yaml.YAMLError, ValueError) as error:
        if not is_json:
            what = str(error).splitlines()[0]
            raise JobFileError(
                f"is no YAML: {what}", file=name, line=0, reason="malformed"
            ) from error
    except RecursionError as error:
        raise _too_deep(name) from error
    if not isinstance(content, dict):
        raise JobFileError(
            "holds no job",
            file=name,
            line=1,
            reason="malformed",
            value=type(content).__name__,
            remedy="write one mapping with `name`, `command` and what else the job needs",
        )
    return JobFile(content, name, lines)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _once(name: str) -> Any:
    def take(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        taken: dict[str, Any] = {}
        for key, value in pairs:
            if key in taken:
                raise _twice(key, name, 0)
            taken[key] = value
        return taken

    return take


def _note_lines(root: Any, name: str, lines: dict[str, int]) -> None:
    """Fill `lines` with the line of each field, counted from 1."""
    count = 0
    stack: list[tuple[Any, str, tuple[int, ...]]] = [(root, "", ())]
    while stack:
        node, path, around = stack.pop()
        count += 1
        if count > _MAX_NODES or id(node) in around or len(around) > 200:
            raise JobFileError(
                "refers to itself, or stands for too much once its references are written out",
                file=name,
                line=node.start_mark.line + 1,
                reason="too-large",
            )
        inner = (*around, id(node))
        if isinstance(node, yaml.SequenceNode):
            for i, child in enumerate(node.value):
                lines[f"{path}[{i}]"] = child.start_mark.line + 1
                stack.append((child, f"{path}[{i}]", inner))
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, child in node.value:
                shown = str(key.value)
                line = key.start_mark.line + 1
                if shown in seen and shown != "<<":
                    raise _twice(shown, name, line)
                seen.add(shown)
                full = f"{path}.{shown}" if path else shown
                lines[full] = line
                stack.append((child, full, inner))


def _twice(key: str, name: str, line: int) -> JobFileError:
    return JobFileError(
        f"{key!r} is given twice",
        file=name,
        line=line,
        reason="malformed",
        field=key,
        remedy="keep one of them",
    )


def _too_deep(name: str) -> JobFileError:
    return JobFileError("is nested too deeply", file=name, line=0, reason="malformed")


def _broken_yaml(error: yaml.MarkedYAMLError, name: str) -> JobFileError:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else 0
    if isinstance(error, yaml.composer.ComposerError) and "single document" in str(error):
        return JobFileError(
            "holds several documents",
            file=name,
            line=line,
            reason="malformed",
            remedy="write one job per file, without a `---` between jobs",
        )
    return JobFileError(
        f"is no YAML: {error.problem or error.context or 'cannot be read'}",
        file=name,
        line=line,
        reason="malformed",
    )


def parse_set(text: str) -> tuple[str, Any]:
    """`field=value` of the command line; the value is read as in a YAML job file.

    Raises:
        UsageError: there is no `=`, or the value is no YAML.
    """
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise UsageError(f"--set {text}: write field=value, for instance --set resources.cpu=2")
    loader = None
    try:
        loader = _Loader(value)
        return path, loader.get_single_data()
    except yaml.YAMLError as error:
        raise UsageError(f"--set {path}: the value is no YAML; quote it") from error
    finally:
        if loader is not None:
            loader.dispose()


def job_of(fields: Mapping[str, Any]) -> JobFile:
    """A job from keyword arguments or a mapping."""
    return JobFile(dict(fields))
