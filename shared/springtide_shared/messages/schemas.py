"""Schemas and the messages page, generated from the structs: the code is their only source.

`python -m springtide_shared.messages.schemas --write` writes `docs/schemas/*.json`,
`docs/asyncapi.json` and `docs/messages.md`; `--check` exits with 1 and names each file that differs
from what the code says.
"""

from __future__ import annotations

import argparse
import ast
import enum
import inspect
import itertools
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from springtide_shared.messages.base import MAX_BODY_BYTES, Kind, Message, registered, type_name
from springtide_shared.messages.job import NOT_SUPPORTED, JobAnswer, JobCancel, JobEvents, JobSubmit
from springtide_shared.messages.pod import PodDocument
from springtide_shared.messages.records import (
    CheckpointOrder,
    CompletionRecord,
    Manifest,
    Termination,
)
from springtide_shared.messages.slices import Range
from springtide_shared.messages.task import AttemptNumber, Index, JobId

RECORDS: Final[tuple[type[msgspec.Struct], ...]] = (
    CheckpointOrder,
    CompletionRecord,
    Manifest,
    PodDocument,
    Termination,
)
"""Structs that lie in the store or on a pod instead of travelling over the bus."""

EXCHANGE: Final = "springtide"
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_KINDS: Final[dict[Kind, str]] = {
    Kind.COMMAND: "a wish; durable, confirmed, refused at once if no queue takes it",
    Kind.FACT: "what happened; durable, confirmed, kept until each consumer has settled it",
    Kind.SNAPSHOT: "totals until `valid_until`; a lost one costs a period, a doubled one nothing",
    Kind.BROADCAST: "for whoever listens at the moment",
    Kind.ANSWER: "sent to the `reply_to` of a command; dropped if nobody waits there",
}

_RACES: Final[tuple[tuple[str, str, str], ...]] = (
    ("job.submit", "job.cancel", "cancel wins: of an unknown job it leaves a tombstone"),
    ("slice.run", "slice.cancel", "cancel wins: the submitter remembers it longer than a slice"),
    ("slice.run", "slice.run (redelivered)", "adopts the pods it finds and creates none"),
    ("attempt.events", "attempt.events", "states form a lattice: any order ends the same"),
    (
        "attempt.events",
        "inventory",
        "an inventory judges only slices below `settled_below`, with all its parts there",
    ),
    ("migrate (end)", "attempt.events", "an attempt that ended by itself keeps its own reason"),
    ("vacate", "plan", "a cordoned slot takes nothing new, whichever is seen first"),
    (
        "any snapshot",
        "its successor",
        "the higher (epoch, seq) holds; parts of an older are dropped",
    ),
)


# -- reading the structs ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """One field as the source has it."""

    name: str
    type: str
    default: str
    """Empty: required."""
    meaning: str


@cache
def _class_body(cls: type) -> tuple[ast.stmt, ...]:
    source = textwrap.dedent(inspect.getsource(cls))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    return tuple(definition.body)


def _docs_below(body: Sequence[ast.stmt]) -> dict[str, str]:
    """Name → the string that stands below its assignment."""
    found = {}
    for statement, following in itertools.pairwise(body):
        target: ast.expr
        if isinstance(statement, ast.AnnAssign):
            target = statement.target
        elif isinstance(statement, ast.Assign):
            target = statement.targets[0]
        else:
            continue
        if (
            isinstance(target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            found[target.id] = inspect.cleandoc(following.value.value)
    return found


def field_docs(cls: type[msgspec.Struct]) -> list[FieldDoc]:
    """The fields of a struct, in order, its bases' included."""
    written: dict[str, tuple[str, str]] = {}
    for base in reversed(cls.__mro__):
        if base is msgspec.Struct or not issubclass(base, msgspec.Struct):
            continue
        body = _class_body(base)
        meanings = _docs_below(body)
        for statement in body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = statement.target.id
                written[name] = (ast.unparse(statement.annotation), meanings.get(name, ""))
    return [
        FieldDoc(field.name, *_typed(field, written[field.name]))
        for field in msgspec.structs.fields(cls)
    ]


def _typed(field: msgspec.structs.FieldInfo, written: tuple[str, str]) -> tuple[str, str, str]:
    annotation, meaning = written
    if field.default is not msgspec.NODEFAULT:
        default = _shown(field.default)
    elif field.default_factory is not msgspec.NODEFAULT:
        default = _shown(field.default_factory())
    else:
        default = ""
    return annotation, default, meaning


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode()


def parts_of(cls: type[msgspec.Struct]) -> list[type[msgspec.Struct] | type[enum.Enum]]:
    """The structs and enumerations inside a struct, each once, in order of first use."""
    found: list[Any] = []

    def walk(hint: Any) -> None:
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct | enum.Enum):
            if hint in found:
                return
            found.append(hint)
            if issubclass(hint, msgspec.Struct):
                for field in msgspec.structs.fields(hint):
                    walk(field.type)
            return
        for inner in get_args(hint):
            walk(inner)

    for field in msgspec.structs.fields(cls):
        walk(field.type)
    return found


def _title(cls: type[msgspec.Struct]) -> str:
    return type_name(cls) if issubclass(cls, Message) else cls.__name__


# -- JSON Schema -----------------------------------------------------------------------------------


def schema(cls: type[msgspec.Struct], ref: str = "#/$defs/{name}") -> dict[str, Any]:
    """The JSON Schema of a struct, each field with its meaning."""
    (top,), definitions = msgspec.json.schema_components([cls], ref_template=ref)
    for part in [cls, *parts_of(cls)]:
        if issubclass(part, msgspec.Struct) and part.__name__ in definitions:
            _describe(part, definitions[part.__name__])
    own = definitions.pop(cls.__name__)
    assert top == {"$ref": ref.format(name=cls.__name__)}
    result = {"$schema": _DIALECT, "$id": f"{_title(cls)}.json", **own, "title": _title(cls)}
    if definitions:
        result["$defs"] = dict(sorted(definitions.items()))
    return result


def _describe(cls: type[msgspec.Struct], definition: dict[str, Any]) -> None:
    definition["description"] = inspect.cleandoc(cls.__doc__ or "")
    for field in field_docs(cls):
        if field.meaning and field.name in definition.get("properties", {}):
            definition["properties"][field.name]["description"] = field.meaning


# -- AsyncAPI --------------------------------------------------------------------------------------


def asyncapi() -> dict[str, Any]:
    """The public `job.*` topics as an AsyncAPI 3 document; springtide is the application."""
    public: tuple[tuple[type[Message], str], ...] = (
        (JobSubmit, "receive"),
        (JobCancel, "receive"),
        (JobEvents, "send"),
        (JobAnswer, "send"),
    )
    schemas: dict[str, Any] = {}
    for cls, _ in public:
        whole = schema(cls, ref="#/components/schemas/{name}")
        schemas.update(whole.pop("$defs", {}))
        del whole["$schema"], whole["$id"]
        schemas[cls.__name__] = whole
    messages = {
        cls.__name__: {
            "name": type_name(cls),
            "title": type_name(cls),
            "summary": inspect.cleandoc(cls.__doc__ or "").splitlines()[0],
            "contentType": "application/json",
            "correlationId": {"location": "$message.header#/correlation_id"},
            "payload": {"$ref": f"#/components/schemas/{cls.__name__}"},
            "bindings": {"amqp": {"messageType": type_name(cls), "bindingVersion": "0.3.0"}},
        }
        for cls, _ in public
    }
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    for cls, action in public:
        name = cls.__name__
        answer = cls is JobAnswer
        exchange = {"name": EXCHANGE, "type": "topic", "durable": True, "autoDelete": False}
        channels[name] = {
            "address": None if answer else type_name(cls),
            "messages": {name: {"$ref": f"#/components/messages/{name}"}},
        }
        if answer:
            channels[name]["description"] = (
                "The queue that the command named in its `reply_to` property,"
                " by the default exchange."
            )
        else:
            channels[name]["bindings"] = {
                "amqp": {"is": "routingKey", "exchange": exchange, "bindingVersion": "0.3.0"}
            }
            operations[name] = {
                "action": action,
                "channel": {"$ref": f"#/channels/{name}"},
                "messages": [{"$ref": f"#/channels/{name}/messages/{name}"}],
            }
        if action == "receive":
            operations[name]["reply"] = {
                "address": {"location": "$message.header#/reply_to"},
                "channel": {"$ref": "#/channels/JobAnswer"},
                "messages": [{"$ref": "#/channels/JobAnswer/messages/JobAnswer"}],
            }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "springtide: jobs",
            "version": "1",
            "description": (
                "Anyone with an AMQP library can publish a job. Set the properties `type` (as the"
                " routing key), `message_id`, and `reply_to` if an answer is wanted; publish with"
                f" confirms and `mandatory`. Bodies are at most {MAX_BODY_BYTES} bytes. The tenant"
                " is the broker-validated `user_id` property."
            ),
        },
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": dict(sorted(schemas.items()))},
    }


_HEAD: Final = (
    f"Topic exchange `{EXCHANGE}`, routing key `<topic>.v<version>[.<cluster>]`, the same type in",
    f"the AMQP property `type`. Bodies are UTF-8 JSON of at most {MAX_BODY_BYTES:,} bytes. Times",
    "are seconds since 1970 UTC. Unknown fields are ignored, except in a job; missing or wrong",
    "ones dead-letter the message with a reason that names the field. JSON Schemas are in",
    "[schemas/](schemas/), the public topics in [asyncapi.json](asyncapi.json).",
)
_ALIASES: Final[dict[str, Any]] = {
    "AttemptNumber": AttemptNumber,
    "Index": Index,
    "JobId": JobId,
    "Range": Range,
}
"""Names that stand for constrained simple types in the tables."""


# -- the page --------------------------------------------------------------------------------------


def page() -> str:
    """`docs/messages.md`."""
    lines = [
        "# Messages",
        "",
        "Generated by `python -m springtide_shared.messages.schemas --write`; do not edit.",
        "",
        *_HEAD,
        "",
        "| kind | means |",
        "|---|---|",
        *(f"| {kind} | {meaning} |" for kind, meaning in _KINDS.items()),
        "",
        "| message | kind | from | to |",
        "|---|---|---|---|",
    ]
    for cls in registered():
        anchor = type_name(cls).replace(".", "")
        lines.append(
            f"| [`{type_name(cls)}`](#{anchor}) | {cls.kind} | {cls.producer} |"
            f" {', '.join(cls.consumers)} |"
        )
    lines += [
        "",
        "## Which two may race",
        "",
        "| one | other | outcome |",
        "|---|---|---|",
        *(f"| {first} | {second} | {outcome} |" for first, second, outcome in _RACES),
    ]
    for cls in registered():
        clustered = any(field.name == "cluster" for field in msgspec.structs.fields(cls))
        key = f"`{type_name(cls)}" + (".<cluster>`" if clustered else "`")
        if cls.kind is Kind.ANSWER:
            key = "the command's `reply_to`"
        lines += [
            "",
            f"## {type_name(cls)}",
            "",
            inspect.cleandoc(cls.__doc__ or ""),
            "",
            f"- kind: {cls.kind}; key: {key}",
            f"- from {cls.producer} to {', '.join(cls.consumers)}",
            f"- a duplicate does: {cls.duplicate}",
            "",
            *_field_table(cls),
        ]
        if cls is JobSubmit:
            lines += ["", *_unsupported()]
    lines += ["", "# Records", "", "Objects in the store and on pods, not on the bus."]
    for record in RECORDS:
        lines += ["", f"## {record.__name__}", "", inspect.cleandoc(record.__doc__ or ""), ""]
        lines += _field_table(record)
    lines += ["", "# Parts", "", "What messages and records are made of."]
    lines += ["", "| simple type | as JSON Schema |", "|---|---|"]
    lines += [
        f"| `{name}` | `{_cell(json.dumps(msgspec.json.schema(alias)))}` |"
        for name, alias in _ALIASES.items()
    ]
    for part in _all_parts():
        lines += ["", f"## {part.__name__}", "", inspect.cleandoc(part.__doc__ or ""), ""]
        lines += _field_table(part) if issubclass(part, msgspec.Struct) else _values(part)
    return "\n".join(lines) + "\n"


def _all_parts() -> list[Any]:
    found: list[Any] = []
    for cls in (*registered(), *RECORDS):
        found += [part for part in parts_of(cls) if part not in found]
    return sorted(found, key=lambda part: str(part.__name__))


def _field_table(cls: type[msgspec.Struct]) -> list[str]:
    rows = field_docs(cls)
    if not rows:
        return ["No fields."]
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for row in rows:
        default = f"`{_cell(row.default)}`" if row.default else "required"
        lines.append(f"| `{row.name}` | `{_cell(row.type)}` | {default} | {_cell(row.meaning)} |")
    return lines


def _values(part: type[enum.Enum]) -> list[str]:
    meanings = _docs_below(_class_body(part))
    rows = [f"| `{member.value}` | {_cell(meanings.get(member.name, ''))} |" for member in part]
    return ["| value | meaning |", "|---|---|", *rows]


def _unsupported() -> list[str]:
    return [
        "Refused by name as not supported yet: "
        + ", ".join(f"`{name}` ({what})" for name, what in sorted(NOT_SUPPORTED.items()))
        + "."
    ]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# -- files -----------------------------------------------------------------------------------------


def documents() -> dict[str, str]:
    """Every generated file by its path below the docs folder."""
    files = {f"schemas/{_title(cls)}.json": _json(schema(cls)) for cls in (*registered(), *RECORDS)}
    files["asyncapi.json"] = _json(asyncapi())
    files["messages.md"] = page()
    return files


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def drift(docs: Path) -> list[str]:
    """What differs from the code: `<path>: <how>` each."""
    expected = documents()
    found = []
    for name, text in expected.items():
        path = docs / name
        if not path.is_file():
            found.append(f"{path}: is missing")
        elif path.read_text(encoding="utf-8") != text:
            found.append(f"{path}: differs from the code")
    found += [
        f"{path}: no struct has this name any more"
        for path in sorted((docs / "schemas").glob("*.json"))
        if f"schemas/{path.name}" not in expected
    ]
    return found


def write(docs: Path) -> list[str]:
    """Bring the files up to date; returns which were changed."""
    changed = drift(docs)
    expected = documents()
    (docs / "schemas").mkdir(parents=True, exist_ok=True)
    for path in (docs / "schemas").glob("*.json"):
        if f"schemas/{path.name}" not in expected:
            path.unlink()
    for name, text in expected.items():
        (docs / name).write_text(text, encoding="utf-8")
    return changed


def main(arguments: Sequence[str] | None = None, say: Callable[[str], object] = print) -> int:
    """Exit codes: 0 done or no difference; 1 `--check` found a difference; 2 bad usage."""
    parser = argparse.ArgumentParser(
        prog="python -m springtide_shared.messages.schemas", description=__doc__
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="write the files")
    mode.add_argument("--check", action="store_true", help="exit with 1 if a file differs")
    parser.add_argument(
        "--docs", type=Path, default=Path("docs"), help="the docs folder (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    lines: Iterable[str] = write(options.docs) if options.write else drift(options.docs)
    for line in lines:
        say(f"{'written: ' if options.write else ''}{line}")
    if options.check and lines:
        say("run `make schemas` and look at what changed before you commit it")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
