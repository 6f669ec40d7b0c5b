"""The shares of the conformer example: deterministic, long-tailed, accepted as a job."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from springtide_shared.messages.job import parse_job
from springtide_shared.messages.task import Ask, Saved

FOLDER = Path(__file__).parents[2] / "examples" / "conformers"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make_shares = load("make_shares")
conformers = load("conformers")


@pytest.fixture(scope="module")
def demonstration() -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = make_shares.make_items(200, 1, 1.0)
    return items


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    small, big = make_shares._candidates()
    return {candidate.name: candidate for candidate in [*small, *big]}


def work(item: dict[str, Any], known: dict[str, Any]) -> float:
    """Expected CPU seconds of one share."""
    return float(sum(known[m["name"]].seconds * m["conformers"] for m in item["molecules"]))


def print_shares(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / "make_shares.py"), *arguments],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_same_seed_gives_the_same_shares_in_any_process(
    demonstration: list[dict[str, Any]],
) -> None:
    first = print_shares("--items", hash_seed="1")
    second = print_shares("--items", hash_seed="2")
    assert first.returncode == second.returncode == 0
    assert first.stdout == second.stdout
    assert [json.loads(line) for line in first.stdout.splitlines()] == demonstration
    assert make_shares.make_items(200, 2, 1.0) != demonstration


def test_most_tasks_are_short_and_a_few_hold_most_of_the_work(
    demonstration: list[dict[str, Any]], known: dict[str, Any]
) -> None:
    works = [work(item, known) for item in demonstration]
    long_ones = [i for i, seconds in enumerate(works) if seconds > 2.5]
    assert len(works) == 200
    assert 10 <= len(long_ones) <= 14
    assert sum(works[i] for i in long_ones) >= 0.45 * sum(works)
    assert max(works) >= 15
    assert sum(works) <= 130  # with 200 starts of 0.2 s: within 170 CPU seconds
    assert sorted(works)[100] < 0.3
    # Staggered: each at its place in the range from three fifths to nineteen twentieths.
    assert min(long_ones) >= 120
    assert max(long_ones) < 190
    assert long_ones[len(long_ones) // 2] in range(140, 170)


@pytest.mark.parametrize("seed", range(20))
def test_every_seed_gives_about_the_same_amount_of_work(seed: int, known: dict[str, Any]) -> None:
    works = [work(item, known) for item in make_shares.make_items(200, seed, 1.0)]
    assert 75 <= sum(works) <= 130
    assert sum(1 for seconds in works if seconds > 2.5) in (11, 12)


def test_scale_multiplies_the_work(known: dict[str, Any]) -> None:
    def total(scale: float) -> float:
        return sum(work(item, known) for item in make_shares.make_items(400, 3, scale))

    assert total(4.0) / total(1.0) == pytest.approx(4.0, rel=0.2)
    assert total(0.001) > 0


@pytest.mark.parametrize("tasks", [1, 2, 17, 1000])
def test_any_number_of_tasks_is_a_list_of_valid_shares(tasks: int) -> None:
    items = make_shares.make_items(tasks, 5, 1.0)
    assert len(items) == tasks
    for item in items:
        conformers.parse_share(json.dumps(item), 5)


def test_the_job_file_is_a_valid_job(demonstration: list[dict[str, Any]]) -> None:
    printed = print_shares()
    assert (printed.returncode, printed.stderr) == (0, "")
    job, spec = parse_job(yaml.safe_load(printed.stdout) | {"id": "conformers-1"})
    assert job.application == "conformers"
    assert job.array.items is not None
    assert [json.loads(item) for item in job.array.items] == demonstration
    assert spec.template.command[1] == str(FOLDER / "conformers.py")
    assert spec.template.outputs == ["result.json"]
    checkpoint = spec.template.checkpoint
    assert checkpoint is not None
    assert (checkpoint.ask, checkpoint.signal) == (Ask.SIGNAL, "SIGUSR1")
    assert checkpoint.saved is Saved.ATOMIC


def test_a_quote_in_a_path_does_not_break_the_job_file() -> None:
    text = make_shares.job_file([{"molecules": []}], Path("/o'clock: #1/c.py"), "python")
    assert yaml.safe_load(text)["command"] == ["python", "/o'clock: #1/c.py"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", "0"), "tasks: 0 is not within 1 to 100000"),
        (("--tasks", "1000000000"), "tasks: 1000000000 is not"),
        (("--scale", "-1"), "scale: -1.0 is not above 0"),
        (("--scale", "nan"), "scale: nan is not"),
        (("--tasks", "many"), "arguments: argument --tasks"),
        (("--items", "--measure"), "arguments: argument --measure: not allowed"),
    ],
)
def test_bad_arguments_end_with_64_and_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = print_shares(*arguments)
    assert done.returncode == 64
    assert done.stderr.startswith(f"make_shares: {message}")
    assert done.stderr.count("\n") == 1


def test_an_rdkit_without_the_molecules_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rdkit import RDConfig

    monkeypatch.setattr(RDConfig, "RDDataDir", str(tmp_path))
    with pytest.raises(make_shares.NoMoleculesError, match=r"first_5K.smi: .*wheel"):
        make_shares.make_items(2, 1, 1.0)
