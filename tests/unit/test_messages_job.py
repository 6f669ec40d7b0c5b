"""The job: every bad input is refused by the name of its field, and nothing else is."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_shared.errors import InvalidFieldError, PermanentError, Reason, SpringtideError
from springtide_shared.messages import (
    MAX_BODY_BYTES,
    JobCancel,
    JobSubmit,
    decode,
    encode,
    parse_job,
    type_of,
)
from springtide_shared.messages.job import NOT_SUPPORTED

SMALLEST: dict[str, Any] = {"id": "j", "name": "n", "command": ["true"]}
FULL: dict[str, Any] = {
    "id": "01J9ZQ4W8Q6M2N3P4R5S6T7V8W",
    "name": "conformers",
    "command": ["python", "run.py"],
    "application": "conformers",
    "labels": {"project": "kinases"},
    "priority": 10,
    "image": "conformers:1.4",
    "env": {"LC_ALL": "C"},
    "working_dir": "run",
    "array": {"items": ["a", "b"]},
    "resources": {"cpu": "500m", "memory": "2Gi", "scratch": "1Gi"},
    "outputs": ["best.sdf"],
    "checkpoint": {
        "path": "state",
        "ask": "signal",
        "signal": "SIGUSR1",
        "command": [],
        "saved": "quiet",
        "every": "15m",
        "expected_save": "20s",
    },
    "retry": {"application": 1, "memory": 1, "infrastructure": 1, "preemption": 1},
    "limits": {"run_time": "36h", "parallelism": 5},
    "clusters": ["aws-eu"],
    "grace": "45s",
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The full job with one field set."""
    job = copy.deepcopy(FULL)
    *parents, last = path.split(".")
    target = job
    for name in parents:
        target = target[name]
    target[last] = value
    return job


def refusal(job: Any) -> InvalidFieldError:
    with pytest.raises(InvalidFieldError) as caught:
        parse_job(job if isinstance(job, bytes) else json.dumps(job).encode())
    assert len(str(caught.value)) < 2_000, "the reason repeats the input"
    return caught.value


def test_the_smallest_and_the_fullest_job_are_taken() -> None:
    _, small = parse_job(json.dumps(SMALLEST).encode())
    assert (small.size, small.items) == (1, None)
    _, full = parse_job(json.dumps(FULL).encode())
    assert full.size == 2
    assert full.template.shape.cpu_millis == 500
    assert full.template.shape.memory_bytes == 2 << 30
    assert full.template.run_time_seconds == 36 * 3600
    assert full.template.grace_seconds == 45


def test_a_job_file_and_its_json_are_the_same() -> None:
    assert parse_job(FULL) == parse_job(json.dumps(FULL).encode())


def test_a_submitted_job_survives_the_bus() -> None:
    job, spec = parse_job(FULL)
    assert parse_job(encode(job)) == (job, spec)
    assert decode(JobSubmit, encode(job)) == job


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("id", ""),
        ("id", "../etc"),
        ("id", "a b"),
        ("id", "x" * 65),
        ("id", 7),
        ("name", ""),
        ("name", "  "),
        ("name", "n" * 10 * 1024),
        ("name", "two\nlines"),
        ("name", "bell\a"),
        ("name", None),
        ("name", ["n"]),
        ("command", []),
        ("command", [""]),
        ("command", "rm -rf /"),
        ("command", ["a", 7]),
        ("application", "a\nb"),
        ("image", "i" * 513),
        ("labels", {"bad name": "x"}),
        ("labels", {f"l{n}": "x" for n in range(65)}),
        ("labels", {"l": 5}),
        ("priority", 1001),
        ("priority", -1001),
        ("priority", 0.5),
        ("priority", True),
        ("env", {"1X": "v"}),
        ("env", {"A-B": "v"}),
        ("env", {"A=B": "v"}),
        ("env", {"": "v"}),
        ("env", {"A B": "v"}),
        ("env", {"Ä": "v"}),
        ("env", {"E" * 257: "v"}),
        ("working_dir", "/etc"),
        ("working_dir", "../up"),
        ("working_dir", "a/../../b"),
        ("resources.cpu", -1),
        ("resources.cpu", "-1"),
        ("resources.cpu", 0),
        ("resources.cpu", 1e9),
        ("resources.cpu", "many"),
        ("resources.cpu", "1e3"),
        ("resources.cpu", "0.0001"),
        ("resources.cpu", True),
        ("resources.cpu", None),
        ("resources.memory", -5),
        ("resources.memory", 0),
        ("resources.memory", "8GiB"),
        ("resources.memory", "999999Ti"),
        ("resources.memory", "0.5"),
        ("resources.memory", 1.5),
        ("resources.scratch", "-1Gi"),
        ("checkpoint.path", "/abs"),
        ("checkpoint.path", "../x"),
        ("checkpoint.path", ""),
        ("checkpoint.ask", "nicely"),
        ("checkpoint.signal", "SIGKILL"),
        ("checkpoint.signal", "usr1"),
        ("checkpoint.every", 0),
        ("checkpoint.every", "soon"),
        ("checkpoint.every", -1),
        ("checkpoint.expected_save", "-3s"),
        ("checkpoint.saved", "maybe"),
        ("retry.application", -1),
        ("retry.memory", 10_001),
        ("retry.preemption", "2"),
        ("limits.run_time", 0),
        ("limits.run_time", "1000d"),
        ("limits.parallelism", 0),
        ("limits.parallelism", 10**9),
        ("clusters", ["AWS"]),
        ("clusters", ["a", "a"]),
        ("clusters", ["a.b"]),
        ("grace", "forever"),
        ("grace", -1),
    ],
)
def test_a_wrong_value_is_refused_by_name(path: str, value: Any) -> None:
    error = refusal(changed(path, value))
    assert error.field.startswith(path) or error.field == path.split(".", maxsplit=1)[0], error
    assert error.remedy
    assert error.reason in (Reason.INVALID_SPEC, Reason.MALFORMED)


@pytest.mark.parametrize(
    ("array", "field"),
    [
        ({"size": 10**9}, "array.size"),
        ({"size": 1_000_001}, "array.size"),
        ({"size": 0}, "array.size"),
        ({"size": -1}, "array.size"),
        ({"size": "10"}, "array.size"),
        ({"size": 1.5}, "array.size"),
        ({}, "array.size"),
        ({"items": []}, "array.items"),
        ({"items": [1]}, "array.items[0]"),
        ({"items": "abc"}, "array.items"),
        ({"items": ["ok", "x" * (16 * 1024 + 1)]}, "array.items[1]"),
        ({"items": ["ok", "nul\0"]}, "array.items[1]"),
        ({"size": 1, "items": ["a"]}, "array"),
        ([], "array"),
    ],
)
def test_a_wrong_array_is_refused_by_name(array: Any, field: str) -> None:
    assert refusal({**SMALLEST, "array": array}).field == field


def test_the_largest_array_is_taken_quickly() -> None:
    began = time.process_time()
    _, spec = parse_job(json.dumps({**SMALLEST, "array": {"size": 1_000_000}}).encode())
    assert spec.size == 1_000_000
    assert time.process_time() - began < 0.1


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("colour", "colour"),
        ("Name", "Name"),
        ("array.sizes", "array.sizes"),
        ("resources.cpus", "resources.cpus"),
        ("checkpoint.when", "checkpoint.when"),
        ("retry.always", "retry.always"),
        ("limits.walltime", "limits.walltime"),
        ("tenant", "tenant"),
    ],
)
def test_an_unknown_field_is_refused_by_name(path: str, field: str) -> None:
    error = refusal(changed(path, "x"))
    assert error.field == field
    assert "no such field" in error.remedy


@pytest.mark.parametrize("path", sorted(NOT_SUPPORTED))
def test_a_later_versions_field_is_refused_as_not_supported_yet(path: str) -> None:
    error = refusal(changed(path, {}))
    assert error.field == path
    assert error.reason is Reason.NOT_SUPPORTED
    assert "not supported yet" in error.remedy


def test_an_absent_field_is_named() -> None:
    for name in SMALLEST:
        assert refusal({key: value for key, value in SMALLEST.items() if key != name}).field == name


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'"text"',
        b"7",
        b'{"id": "j"',
        b'{"id": NaN}',
        b'{"id": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ],
    ids=lambda body: repr(body[:12]),
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    assert refusal(body).reason in (Reason.MALFORMED, Reason.INVALID_SPEC)


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400, "9" * 5_000, "-" + "9" * 5_000]
)
@pytest.mark.parametrize("field", ["resources.cpu", "limits.run_time", "array.size", "priority"])
def test_numbers_beyond_all_bounds_are_refused(field: str, number: str) -> None:
    job = changed(field, "@")
    if field == "array.size":
        del job["array"]["items"]
    body = json.dumps(job).replace('"@"', number).encode()
    with pytest.raises(InvalidFieldError):
        parse_job(body)


def test_huge_integers_of_a_job_file_are_refused() -> None:
    """YAML gives integers of any length."""
    for field in ("resources.cpu", "resources.memory", "limits.run_time", "priority"):
        for value in (10**6_000, -(10**6_000)):
            with pytest.raises(InvalidFieldError) as caught:
                parse_job(changed(field, value))
            assert caught.value.field == field


def test_a_huge_body_is_refused_before_it_is_read() -> None:
    body = b'{"id": "' + b"j" * (40 << 20) + b'"}'
    began = time.process_time()
    with pytest.raises(PermanentError) as caught:
        parse_job(body)
    assert caught.value.reason is Reason.TOO_LARGE
    assert str(MAX_BODY_BYTES) in str(caught.value)
    assert time.process_time() - began < 0.1


def test_too_much_command_and_environment_is_refused() -> None:
    assert refusal({**SMALLEST, "env": {"A": "x" * 70_000}}).reason is Reason.TOO_LARGE


NASTY = ["'; touch canary", '"', "`id`", "$(id)", "a\nb", "a;b|c&d", "\\", "*", "ä€😀", " ", "-rf"]


@pytest.mark.parametrize("text", NASTY)
def test_shell_characters_are_data(text: str) -> None:
    """B55: they reach the program byte for byte, since no shell reads them."""
    job = {
        **SMALLEST,
        "command": ["prog", text],
        "env": {"A": text},
        "array": {"items": [text]},
    }
    if "\n" not in text and text.strip():
        job["name"] = text
    _, spec = parse_job(json.dumps(job).encode())
    assert spec.template.command == ["prog", text]
    assert spec.template.env == {"A": text}
    assert spec.items == [text]


def test_line_breaks_in_a_programs_name_are_refused() -> None:
    for name in ("prog\nrm", "prog\r"):
        assert refusal({**SMALLEST, "command": [name]}).field == "command[0]"


def test_names_of_springtides_own_variables_are_refused() -> None:
    assert refusal({**SMALLEST, "env": {"SPRINGTIDE_ITEM": "x"}}).field == "env.SPRINGTIDE_ITEM"


def test_nul_is_refused_everywhere() -> None:
    for field, job in {
        "command[1]": {**SMALLEST, "command": ["a", "b\0"]},
        "env.A": {**SMALLEST, "env": {"A": "b\0"}},
        "name": {**SMALLEST, "name": "b\0"},
        "working_dir": {**SMALLEST, "working_dir": "b\0"},
        "checkpoint.command[0]": changed("checkpoint.command", ["b\0"]),
    }.items():
        assert refusal(job).field == field


@pytest.mark.parametrize(
    "name", ["job.submit.v2", "job.submit.v0", "job.submit", "job.v1", "", "x"]
)
def test_a_wrong_version_is_named(name: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        type_of(name)
    assert caught.value.field == "type"
    assert caught.value.reason is Reason.WRONG_VERSION
    assert "job.submit.v1" in caught.value.remedy


def test_types_are_found_behind_routing_keys() -> None:
    assert type_of("job.submit.v1") is JobSubmit
    assert type_of("job.cancel.v1.some-cluster") is JobCancel


# -- laws ------------------------------------------------------------------------------------------

any_text = st.text(st.characters(), max_size=30)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**18, max_value=10**30),
    st.floats(),
    any_text,
    st.sampled_from(["8Gi", "90m", "1h30m", "-1", "SIGUSR1", "signal", "..", "/", "a/b", "\n"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(any_text, inner, max_size=4)
    ),
    max_leaves=12,
)
paths = st.sampled_from(
    [
        *FULL,
        *(f"{name}.{key}" for name, part in FULL.items() if isinstance(part, dict) for key in part),
        "array.size",
        "labels.x",
        "env.A",
        "unknown",
    ]
)


def only_springtides(job: Any) -> None:
    """Either a job or a fault of ours, and what is taken survives the wire."""
    try:
        parsed, spec = parse_job(job)
    except SpringtideError:
        return
    assert parse_job(encode(parsed)) == (parsed, spec)
    assert 1 <= spec.size <= 1_000_000
    assert spec.template.shape.cpu_millis >= 1


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(body: bytes) -> None:
    only_springtides(body)


@settings(max_examples=300, deadline=None)
@given(values)
def test_no_json_raises_anything_else(value: Any) -> None:
    only_springtides(json.dumps(value).encode(errors="surrogatepass"))


@settings(max_examples=600, deadline=None)
@given(path=paths, value=values)
def test_no_change_of_one_field_raises_anything_else(path: str, value: Any) -> None:
    job = changed(path, value)
    only_springtides(job)
    only_springtides(json.dumps(job).encode(errors="surrogatepass"))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.one_of(paths, st.integers(), st.none(), any_text), values, max_size=5))
def test_no_mapping_raises_anything_else(job: dict[Any, Any]) -> None:
    only_springtides({**SMALLEST, **job})


@settings(max_examples=200, deadline=None)
@given(
    command=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), max_size=5),
    size=st.integers(1, 1_000_000),
    millis=st.integers(1, 1_000_000),
    memory=st.integers(1, 1 << 40),
)
def test_every_good_job_is_taken_as_it_is(
    command: list[str], size: int, millis: int, memory: int
) -> None:
    job = {
        **SMALLEST,
        "command": ["prog", *command],
        "array": {"size": size},
        "resources": {"cpu": f"{millis}m", "memory": memory},
    }
    _, spec = parse_job(json.dumps(job).encode())
    assert spec.template.command == ["prog", *command]
    assert spec.size == size
    assert spec.template.shape.cpu_millis == millis
    assert spec.template.shape.memory_bytes == memory
