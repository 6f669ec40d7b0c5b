"""Generated documents: they agree with the code, and the schemas with the messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from springtide_shared.messages import registered, type_name
from springtide_shared.messages.schemas import (
    RECORDS,
    asyncapi,
    documents,
    drift,
    field_docs,
    main,
    parts_of,
    schema,
    write,
)

DOCS = Path(__file__).parents[2] / "docs"
GOLDEN = Path(__file__).parent / "golden"
EVERYTHING = (*registered(), *RECORDS)


def test_the_committed_documents_are_those_of_the_code() -> None:
    assert drift(DOCS) == []


@pytest.mark.parametrize("cls", EVERYTHING, ids=lambda cls: str(cls.__name__))
def test_schemas_are_valid_and_accept_the_golden_message(cls: type[msgspec.Struct]) -> None:
    made = schema(cls)
    jsonschema.Draft202012Validator.check_schema(made)
    name = made["title"]
    given = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(made)
    validator.validate(given)
    for required in made.get("required", []):
        lacking = {key: value for key, value in given.items() if key != required}
        assert list(validator.iter_errors(lacking)), f"{name} without {required} is valid"


@pytest.mark.parametrize("cls", registered(), ids=lambda cls: str(cls.__name__))
def test_every_message_says_what_the_page_needs(cls: Any) -> None:
    assert cls.__doc__
    assert cls.producer
    assert cls.consumers
    assert cls.duplicate
    page = documents()["messages.md"]
    assert f"\n## {type_name(cls)}\n" in page
    assert cls.duplicate in page


@pytest.mark.parametrize("cls", EVERYTHING, ids=lambda cls: str(cls.__name__))
def test_fields_are_listed_in_order_with_their_types(cls: type[msgspec.Struct]) -> None:
    assert [row.name for row in field_docs(cls)] == list(cls.__struct_fields__)
    for part in parts_of(cls):
        assert part.__doc__, part


def test_asyncapi_references_resolve() -> None:
    document = asyncapi()
    assert document["asyncapi"] == "3.0.0"
    references = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                if key == "$ref":
                    references.append(value)
                else:
                    walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)
    assert len(references) > 20
    for reference in references:
        target = document
        for step in reference.removeprefix("#/").split("/"):
            assert step in target, reference
            target = target[step]
    assert {channel["address"] for channel in document["channels"].values()} == {
        "job.submit.v1",
        "job.cancel.v1",
        "job.events.v1",
        None,
    }


def test_the_check_names_what_drifts(tmp_path: Path) -> None:
    said: list[str] = []
    write(tmp_path)
    assert main(["--check", "--docs", str(tmp_path)], said.append) == 0
    assert said == []
    (tmp_path / "schemas" / "plan.v1.json").write_text("{}")
    (tmp_path / "schemas" / "retired.v1.json").write_text("{}")
    (tmp_path / "messages.md").unlink()
    assert main(["--check", "--docs", str(tmp_path)], said.append) == 1
    text = "\n".join(said)
    assert "plan.v1.json: differs" in text
    assert "retired.v1.json: no struct" in text
    assert "messages.md: is missing" in text
    said.clear()
    assert main(["--write", "--docs", str(tmp_path)], said.append) == 0
    assert len(said) == 3
    assert main(["--check", "--docs", str(tmp_path)], said.append) == 0
