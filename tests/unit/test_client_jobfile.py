"""Job files: what is wrong is named with file, line, field, value and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from springtide.errors import JobFileError, RefusedError, UsageError
from springtide.jobfile import (
    MAX_FILE_BYTES,
    JobFile,
    job_of,
    parse_job_file,
    parse_set,
    read_job_file,
)

GOOD = """\
# a comment
id: job-1
name: conformers
command: [python, run.py, "10"]
array:
  items:
    - first
    - second
    - third
resources:
  cpu: 2
  memory: 2Gi
env:
  OMP_NUM_THREADS: "1"
limits: {run_time: 90m}
"""


def fault(text: str, name: str = "job.yaml") -> JobFileError:
    with pytest.raises(JobFileError) as caught:
        parse_job_file(text, name).check()
    assert caught.value.file == name
    assert caught.value.exit_code == 3
    return caught.value


def test_a_good_file_is_the_job_it_says() -> None:
    spec = parse_job_file(GOOD, "job.yaml").check()
    assert (spec.id, spec.size, spec.items) == ("job-1", 3, ["first", "second", "third"])
    assert spec.template.command == ["python", "run.py", "10"]
    assert spec.template.run_time_seconds == 5400.0


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "reason"),
    [
        ("cpu: 2", "cpu: two", 11, "resources.cpu", "invalid-spec"),
        ("cpu: 2", "cpu: -2", 11, "resources.cpu", "invalid-spec"),
        ("memory: 2Gi", "memory: 2Gb", 12, "resources.memory", "invalid-spec"),
        ("memory: 2Gi", "memery: 2Gi", 12, "resources.memery", "invalid-spec"),
        ("memory: 2Gi", "gpu: 1", 12, "resources.gpu", "not-supported"),
        ("- third", "- 3", 9, "array.items[2]", "malformed"),
        ("- third", "- [a]", 9, "array.items[2]", "malformed"),
        ('"10"]', "10]", 4, "command[2]", "malformed"),
        ('[python, run.py, "10"]', "python run.py", 4, "command", "malformed"),
        ('"1"', "1", 14, "env.OMP_NUM_THREADS", "malformed"),
        ("OMP_NUM_THREADS", "OMP-NUM", 13, "env", "invalid-spec"),
        ("OMP_NUM_THREADS", "SPRINGTIDE_X", 14, "env.SPRINGTIDE_X", "invalid-spec"),
        ("run_time: 90m", "run_time: 90x", 15, "limits.run_time", "invalid-spec"),
        ("run_time: 90m", "cost: 5", 15, "limits.cost", "not-supported"),
        ("id: job-1", "id: a/b", 2, "id", "malformed"),
        ("name: conformers", "name: ''", 3, "name", "invalid-spec"),
        ("name: conformers", "deadline: tomorrow", 3, "deadline", "not-supported"),
        ("name: conformers\n", "", 1, "name", "malformed"),
        ("id: job-1", "id: job-1\nsteps: []", 3, "steps", "not-supported"),
        ("id: job-1", "id: job-1\noutputs: [a, ../b]", 3, "outputs[1]", "invalid-spec"),
        ("limits:", "outputs:\n  - a\n  - /b\nlimits:", 17, "outputs[1]", "invalid-spec"),
    ],
)
def test_a_wrong_field_is_named_with_its_line_and_a_remedy(
    old: str, new: str, line: int, field: str, reason: str
) -> None:
    assert old in GOOD
    error = fault(GOOD.replace(old, new))
    assert (error.line, error.field, error.reason) == (line, field, reason)
    assert error.remedy
    assert str(error).startswith(f"job.yaml:{line}: {field}: ")
    shown = error.as_dict()
    assert (shown["file"], shown["line"], shown["field"]) == ("job.yaml", line, field)


@pytest.mark.parametrize("old", ["- third", '"10"]', '"1"'])
def test_a_number_where_text_is_meant_says_to_quote_it(old: str) -> None:
    new = {"- third": "- 3", '"10"]': "10]", '"1"': "1"}[old]
    assert "quotes" in fault(GOOD.replace(old, new)).remedy


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "holds no job"),
        ("# nothing\n", 1, "holds no job"),
        ("- a\n- b\n", 1, "holds no job"),
        ("hello", 1, "holds no job"),
        ("name: a\n---\nname: b\n", 2, "several documents"),
        ("name: a\nid: b\nname: c\n", 3, "'name' is given twice"),
        ("array:\n  size: 1\n  size: 2\n", 3, "'size' is given twice"),
        ("name: [a\n", 2, "is no YAML"),
        ("name: a\n  id: b\n", 2, "is no YAML"),
        ("name: a\n\tid: b\n", 2, "is no YAML"),
        ("name: *nobody\n", 1, "is no YAML"),
        ("name: !!python/object:os.system {}\n", 1, "is no YAML"),
        ("a: &a [*a]\n", 1, "refers to itself"),
        ("[" * 100_000, 1, "is no YAML"),
        ("a: \x00\n", 0, "is no YAML"),
    ],
)
def test_what_is_no_job_file_says_where(text: str, line: int, words: str) -> None:
    error = fault(text)
    assert words in error.detail
    assert error.line == line


def test_a_few_lines_that_stand_for_a_billion_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert fault("\n".join(lines)).reason == "too-large"


def test_references_that_share_a_value_are_fine() -> None:
    text = GOOD.replace('env:\n  OMP_NUM_THREADS: "1"', "labels: &l {a: b}\nenv: *l")
    assert parse_job_file(text, "job.yaml").check().template.env == {"a": "b"}


def test_text_that_older_yaml_reads_as_something_else_stays_text() -> None:
    text = GOOD.replace('[python, run.py, "10"]', "[no, on, 1:30, 2026-01-01, 0x1f, 010, 1_000]")
    command = parse_job_file(text, "job.yaml").check().template.command
    assert command == ["no", "on", "1:30", "2026-01-01", "0x1f", "010", "1_000"]


# ---------------------------------------------------------------- JSON


def test_json_may_have_tabs_and_any_text() -> None:
    job = {"id": "j", "name": "\U0001f30a\t\x41", "command": ["a"], "array": {"items": ["/\\\n"]}}
    job["name"] = "\U0001f30a"
    text = json.dumps(job, indent="\t")
    assert parse_job_file(text, "job.json").check().items == ["/\\\n"]
    assert parse_job_file(text, "-").check().name == "\U0001f30a"


@pytest.mark.parametrize(
    ("text", "line", "field", "words"),
    [
        ('{\n\t"name": "a",\n\t"command": 5,\n\t"id": "x"\n}', 3, "command", "Expected"),
        ('{\n "name": "a"\n "id": 1}', 3, "", "is no JSON"),
        ('{"name": "a",\n"name": "b"}', 0, "name", "given twice"),
        ('{"name": "a"} {"name": "b"}', 1, "", "is no JSON"),
        ('{"name": NaN}\n', 1, "name", "refused"),
        ('{"a":' * 100_000, 0, "", "deep"),
    ],
)
def test_faults_in_json_say_where(text: str, line: int, field: str, words: str) -> None:
    error = fault(text, "job.json")
    assert (error.line, error.field) == (line, field)
    assert words in str(error)


# ---------------------------------------------------------------- files


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="No such file"):
        read_job_file(tmp_path / "absent.yaml")
    with pytest.raises(JobFileError, match="directory"):
        read_job_file(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\x80\x81")
    with pytest.raises(JobFileError, match="no UTF-8"):
        read_job_file(binary)
    big = tmp_path / "big.yaml"
    with big.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(JobFileError, match="at most"):
        read_job_file(big)
    bom = tmp_path / "bom.yaml"
    bom.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert read_job_file(bom).check().id == "job-1"


# ---------------------------------------------------------------- --set


def test_set_goes_over_the_file_and_is_named_when_wrong() -> None:
    job = parse_job_file(GOOD, "job.yaml")
    for text in ("resources.cpu=0.5", "env.A.B=x", "priority=7", 'name="12"'):
        path, value = parse_set(text)
        job.set(path, value, "--set")
    assert job.content["resources"] == {"cpu": 0.5, "memory": "2Gi"}
    assert job.content["env"]["A.B"] == "x"
    assert (job.content["priority"], job.content["name"]) == (7, "12")
    del job.content["env"]["A.B"]
    job.set("resources.cpu", -1, "--set")
    with pytest.raises(JobFileError) as caught:
        job.check()
    assert (caught.value.file, caught.value.line) == ("--set", 0)
    assert caught.value.field == "resources.cpu"


@pytest.mark.parametrize("text", ["", "name", "=x", "name=[", "name=a: b: c"])
def test_a_set_that_is_none_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_set(text)


def test_set_does_not_lead_through_what_is_no_mapping() -> None:
    with pytest.raises(UsageError, match="no mapping"):
        parse_job_file(GOOD, "job.yaml").set("name.first", 1, "--set")
    with pytest.raises(UsageError, match="no field"):
        job_of({}).set("array..size", 1, "--set")


# ---------------------------------------------------------------- laws

fields = st.dictionaries(
    st.sampled_from(["name", "id", "command", "array", "env", "resources", "oops", "steps"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["size", "items", "cpu", "A", "b c"]), inner, max_size=3
            )
        ),
        max_leaves=8,
    ),
    max_size=6,
)


@given(fields)
def test_any_mapping_is_a_job_or_refused_by_line(content: dict[str, Any]) -> None:
    text = yaml.safe_dump(content, allow_unicode=True)
    found: Exception | None = None
    try:
        parse_job_file(text, "job.yaml").check()
    except RefusedError as error:
        found = error
    if found is not None and content:
        assert isinstance(found, JobFileError)
        assert 0 <= found.line <= text.count("\n")


@given(st.text(max_size=200))
def test_no_text_breaks_the_reader(text: str) -> None:
    try:
        job = parse_job_file(text, "job.yaml")
    except JobFileError:
        return
    assert isinstance(job, JobFile)
    assert isinstance(job.content, dict)


def test_what_is_sent_is_what_was_checked() -> None:
    job = parse_job_file(GOOD, "job.yaml")
    sent = msgspec.json.decode(msgspec.json.encode(job.content))
    assert parse_job_file(json.dumps(sent), "job.json").check() == job.check()
