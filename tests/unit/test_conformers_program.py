"""The example program: resumes to the bit, its checkpoint is whole at every moment."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "conformers" / "conformers.py"
LIMIT = 60.0
"""Seconds after which a run of the program counts as hung."""

ASPIRIN = "CC(=O)OC1=CC=CC=C1C(O)=O"
ETHANOL = "CCO"
CDK2_LIGAND = "[NH3+][C@H]1CC[C@@H](Nc2nc(NCC3CC3)c3ncn(C4CCCC4)c3n2)CC1"
ACTINOMYCIN = (
    "CC(C)[CH]1NC(=O)[CH](NC(=O)C2=C3N=C4C(=C(C)C(=O)C(=C4C(=O)N[CH]5[CH](C)OC(=O)"
    "[CH](C(C)C)N(C)C(=O)CN(C)C(=O)[CH]6CCCN6C(=O)[CH](NC5=O)C(C)C)N)OC3=C(C)C=C2)"
    "[CH](C)OC(=O)[CH](C(C)C)N(C)C(=O)CN(C)C(=O)[CH]7CCCN7C1=O"
)
"""176 atoms: one conformer takes more than a second of CPU."""


def load_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conformers_example", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


conformers = load_program()


def molecule(name: str, smiles: str, count: int) -> dict[str, Any]:
    return {"name": name, "smiles": smiles, "conformers": count}


SHARE = {
    "molecules": [
        molecule("ethanol", ETHANOL, 6),
        molecule("ligand", CDK2_LIGAND, 10),
        molecule("aspirin", ASPIRIN, 12),
    ]
}
SHARE_CONFORMERS = 28


class Task:
    """One task in a directory of its own, run as many times as its test wants."""

    def __init__(self, root: Path, share: object) -> None:
        self.output = root / "output"
        self.checkpoint = root / "checkpoint"
        self.witness = root / "witness.jsonl"
        root.mkdir(exist_ok=True)
        self.attempt = 0
        self.env = {
            "PATH": os.environ["PATH"],
            "SPRINGTIDE_ITEM": share if isinstance(share, str) else json.dumps(share),
            "SPRINGTIDE_OUTPUT_DIR": str(self.output),
            "SPRINGTIDE_CHECKPOINT_DIR": str(self.checkpoint),
            "CONFORMERS_WITNESS": str(self.witness),
            "SPRINGTIDE_TASK_INDEX": "7",
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        self.attempt += 1
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            env=self.env | {"SPRINGTIDE_ATTEMPT": str(self.attempt)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=LIMIT)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @property
    def result(self) -> bytes:
        return (self.output / "result.json").read_bytes()

    @property
    def state(self) -> Path:
        return self.checkpoint / "state.json"

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.witness.read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Task:
    task = Task(tmp_path_factory.mktemp("uninterrupted"), SHARE)
    done = task.run()
    assert (done.returncode, done.stderr) == (0, "")
    return task


def wait_for(path: Path) -> None:
    until = time.monotonic() + LIMIT
    while not path.exists():
        assert time.monotonic() < until, f"{path} never came"
        time.sleep(0.002)


def checked_state(path: Path) -> int:
    """Conformers done in the state at `path`; fails if it is not one whole state."""
    document = json.loads(path.read_bytes())
    body = json.dumps(document["body"], sort_keys=True, separators=(",", ":")).encode()
    assert document["sha256"] == hashlib.sha256(body).hexdigest()
    return sum(row["done"] for row in document["body"]["progress"])


# --- resuming --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random_points_it_ends_in_the_same_bytes(
    uninterrupted: Task, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    task = Task(tmp_path, SHARE)
    killed_at: list[int] = []
    for _ in range(40):
        before = killed_at[-1] if killed_at else 0
        process = task.start()
        # Kill at some moment after this life's first save, so that every life gets somewhere.
        until = time.monotonic() + LIMIT
        while process.poll() is None and time.monotonic() < until:
            if task.state.exists() and checked_state(task.state) > before:
                time.sleep(rng.uniform(0.0, 0.25))
                break
            time.sleep(0.002)
        process.kill()
        process.communicate(timeout=LIMIT)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        killed_at.append(checked_state(task.state))
        assert killed_at[-1] > before
    assert process.returncode == 0
    assert len(killed_at) >= 3
    assert task.result == uninterrupted.result
    assert task.state.read_bytes() == uninterrupted.state.read_bytes()

    # Nothing that was saved is computed again. (A line may be missing: killed between the two.)
    computed = [event["done"] for event in task.events() if event["event"] == "checkpoint"]
    assert len(computed) == len(set(computed))
    assert set(computed) <= set(range(1, SHARE_CONFORMERS + 1))
    resumed = [event["done"] for event in task.events() if event["event"] == "resume"]
    assert resumed == killed_at


def test_state_is_whole_at_every_moment(tmp_path: Path) -> None:
    task = Task(tmp_path, {"molecules": [molecule("ethanol", ETHANOL, 300)]})
    process = task.start()
    wait_for(task.state)
    seen = [checked_state(task.state)]
    while process.poll() is None:
        seen.append(checked_state(task.state))
    process.communicate(timeout=LIMIT)
    assert seen == sorted(seen)
    assert len(set(seen)) > 20


def test_a_failed_write_leaves_the_state_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    conformers.replace_file(path, b"before")

    def full_disk(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full_disk)
        with pytest.raises(OSError, match="No space left"):
            conformers.replace_file(path, b"after")
    assert path.read_bytes() == b"before"
    conformers.replace_file(path, b"after")
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
    assert path.read_bytes() == b"after"


def test_a_run_that_had_finished_only_writes_its_result_again(
    uninterrupted: Task, tmp_path: Path
) -> None:
    task = Task(tmp_path, SHARE)
    task.checkpoint.mkdir()
    task.state.write_bytes(uninterrupted.state.read_bytes())
    assert task.run().returncode == 0
    assert task.result == uninterrupted.result
    assert [e["event"] for e in task.events()] == ["start", "resume", "end"]


# --- signals ---------------------------------------------------------------------------------


def test_sigterm_ends_it_inside_a_conformer(tmp_path: Path) -> None:
    share = [molecule("ethanol", ETHANOL, 2), molecule("actinomycin", ACTINOMYCIN, 50)]
    task = Task(tmp_path, {"molecules": share})
    process = task.start()
    assert process.stdout is not None
    assert process.stdout.readline().startswith("molecule 1/2 ethanol: 2 conformers")
    time.sleep(0.1)  # now it is in the middle of a conformer that takes a second and more
    process.terminate()
    process.communicate(timeout=LIMIT)
    assert process.returncode == 143
    last = task.events()[-1]
    assert (last["event"], last["done"]) == ("stop", 2)
    assert checked_state(task.state) == 2
    assert not (task.output / "result.json").exists()


def test_sigterm_during_the_imports_is_kept_for_later(tmp_path: Path) -> None:
    task = Task(tmp_path, {"molecules": [molecule("actinomycin", ACTINOMYCIN, 50)]})
    process = task.start()
    wait_for(task.witness)
    process.terminate()
    process.communicate(timeout=LIMIT)
    assert process.returncode == 143
    assert [e["event"] for e in task.events()] == ["start", "stop"]


def test_asking_for_a_checkpoint_changes_nothing(uninterrupted: Task, tmp_path: Path) -> None:
    task = Task(tmp_path, SHARE)
    process = task.start()
    wait_for(task.witness)
    asked = 0
    while process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        asked += 1
        time.sleep(0.02)
    process.communicate(timeout=LIMIT)
    assert process.returncode == 0
    assert asked > 5
    assert task.result == uninterrupted.result


# --- refusing checkpoints --------------------------------------------------------------------


def rewritten(state: bytes, **changes: object) -> bytes:
    """The state with other fields and a digest that fits them."""
    body = json.loads(state)["body"] | changes
    digest = hashlib.sha256(conformers.canonical(body)).hexdigest()
    return bytes(conformers.canonical({"body": body, "sha256": digest}))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("empty", "damaged"),
        ("truncated", "damaged"),
        ("one digit changed", "damaged"),
        ("not an object", "damaged"),
        ("one molecule missing", "damaged"),
        ("rows of another kind", "damaged"),
        ("another share", "share is"),
        ("another RDKit", "rdkit is"),
        ("another format", "format is"),
    ],
)
def test_a_checkpoint_that_is_not_its_own_is_refused(
    uninterrupted: Task, tmp_path: Path, case: str, message: str
) -> None:
    good = uninterrupted.state.read_bytes()
    body = json.loads(good)["body"]
    bad = {
        "empty": b"",
        "truncated": good[: len(good) // 2],
        "one digit changed": good.replace(b'"seed":1', b'"seed":2', 1),
        "not an object": b"[1]",
        "one molecule missing": rewritten(good, progress=body["progress"][:-1]),
        "rows of another kind": rewritten(good, progress=[{}, {}, {}]),
        "another share": rewritten(good, share="0" * 64),
        "another RDKit": rewritten(good, rdkit="1999.01.1"),
        "another format": rewritten(good, format="conformers-state/0"),
    }[case]
    assert bad != good
    path = tmp_path / "state.json"
    path.write_bytes(bad)
    share = conformers.parse_share(json.dumps(SHARE), 5)
    with pytest.raises(conformers.CheckpointError, match=message):
        conformers.load_state(path, share, body["rdkit"])
    path.write_bytes(good)
    assert conformers.load_state(path, share, body["rdkit"]) is not None


def test_a_refused_checkpoint_ends_the_run_and_stays_as_it_is(
    uninterrupted: Task, tmp_path: Path
) -> None:
    task = Task(tmp_path, SHARE)
    task.checkpoint.mkdir()
    task.state.write_bytes(uninterrupted.state.read_bytes()[:-30])
    before = task.state.read_bytes()
    done = task.run()
    assert done.returncode == 65
    assert done.stderr.count("\n") == 1
    assert "damaged; restore an older checkpoint" in done.stderr
    assert task.state.read_bytes() == before
    assert not (task.output / "result.json").exists()


# --- results and witness ---------------------------------------------------------------------


def test_the_witness_tells_each_step(uninterrupted: Task) -> None:
    events = uninterrupted.events()
    assert [e["event"] for e in events] == ["start", *["checkpoint"] * SHARE_CONFORMERS, "end"]
    assert [e["done"] for e in events] == [*range(SHARE_CONFORMERS + 1), SHARE_CONFORMERS]
    assert {e["index"] for e in events} == {7}
    assert {e["attempt"] for e in events} == {1}
    assert {e["share"] for e in events} == {json.loads(uninterrupted.result)["share"]}
    assert len({e["pid"] for e in events}) == 1
    times = [e["t"] for e in events]
    assert times == sorted(times)


def test_the_result_keeps_the_lowest_energies(uninterrupted: Task) -> None:
    result = json.loads(uninterrupted.result)
    assert [row["done"] for row in result["molecules"]] == [6, 10, 12]
    for row in result["molecules"]:
        energies = [c["energy_kcal_per_mol"] for c in row["lowest"]]
        assert len(energies) == 5
        assert energies == sorted(energies)
        assert len({c["seed"] for c in row["lowest"]}) == 5
    assert not {"attempt", "index", "t"} & result.keys()


def test_no_conformer_depends_on_another() -> None:
    chemistry = conformers.Chemistry()
    prepared = chemistry.prepare(ASPIRIN)
    in_order = [chemistry.conformer(prepared, "aspirin", index) for index in range(4)]
    backwards = [
        chemistry.conformer(chemistry.prepare(ASPIRIN), "aspirin", index)
        for index in reversed(range(4))
    ]
    assert in_order == backwards[::-1]
    assert len({c.coordinates_sha256 for c in in_order}) == 4
    assert chemistry.conformer(prepared, "another name", 0) != in_order[0]


def test_molecules_that_cannot_be_computed_are_skipped_with_the_reason(tmp_path: Path) -> None:
    share = [
        molecule("unclosed ring", "C1CC", 2),
        molecule("manganese", "[Mn]", 2),
        molecule("two words", "C O", 2),
        molecule("not ascii", "Cé", 2),
        molecule("texas carbon", "CC(C)(C)(C)C", 4),
        molecule("ethanol", ETHANOL, 1),
    ]
    task = Task(tmp_path, {"molecules": share})
    done = task.run()
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["name"]: row for row in json.loads(task.result)["molecules"]}
    assert rows["unclosed ring"]["skipped"] == "smiles-not-valid"
    assert rows["two words"]["skipped"] == "smiles-not-valid"
    assert rows["not ascii"]["skipped"] == "smiles-not-valid"
    assert rows["texas carbon"]["skipped"] == "smiles-not-valid"
    assert rows["manganese"]["skipped"] == "mmff-has-no-parameters"
    assert rows["ethanol"]["skipped"] is None
    assert len(rows["ethanol"]["lowest"]) == 1


def test_the_deepest_smiles_that_is_let_in_does_not_end_the_process() -> None:
    depth = (conformers.MAX_SMILES - 1) // 3
    prepared = conformers.Chemistry().prepare("C(" * depth + "C" + ")" * depth)
    assert prepared.GetNumHeavyAtoms() == depth + 1


def test_a_molecule_without_any_embedding_is_given_up_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The share is real, only the embedding step fails: whether RDKit embeds a given odd molecule
    # changes with its releases.
    monkeypatch.setattr(conformers.Chemistry, "_embed", lambda self, molecule, seed: False)
    share = conformers.parse_share(json.dumps({"molecules": [molecule("a", ETHANOL, 50)]}), 5)
    witness = conformers.Witness(None, share.digest(), {})
    conformers.Run(share, tmp_path, None, witness).compute()
    (row,) = json.loads((tmp_path / "result.json").read_bytes())["molecules"]
    assert (row["skipped"], row["done"], row["failed"]) == ("no-conformer-found", 3, 3)


# --- bad input -------------------------------------------------------------------------------

GOOD = molecule("a", ETHANOL, 1)


def bad_shares() -> Iterator[tuple[object, str]]:
    yield "", "share: not JSON"
    yield "[" * 100_000, "share: not JSON"
    yield "[]", "share: .* is not an object"
    yield {}, "share.molecules: missing"
    yield {"molecules": []}, "molecules: .* at least one"
    yield {"molecules": {"a": 1}}, "molecules: .* is not a list"
    yield {"molecules": [GOOD], "keep": 3}, "share.keep: unknown key; known are 'molecules'"
    yield {"molecules": [GOOD | {"seed": 1}]}, r"molecules\[0\].seed: unknown key"
    yield {"molecules": [GOOD, "CCO"]}, r"molecules\[1\]: .* is not an object"
    yield {"molecules": [{"name": "a", "smiles": "C"}]}, r"molecules\[0\].conformers: missing"
    yield {"molecules": [GOOD | {"smiles": ["C"]}]}, r"molecules\[0\].smiles: \[\"C\"\] is not"
    yield {"molecules": [GOOD | {"smiles": ""}]}, r"molecules\[0\].smiles: \"\" is not"
    yield {"molecules": [GOOD | {"smiles": "C" * 2001}]}, r"molecules\[0\].smiles: .* 1 to 2000"
    yield {"molecules": [GOOD | {"name": "a\nb"}]}, r"molecules\[0\].name: .* printable"
    yield {"molecules": [GOOD | {"name": "n" * 10_240}]}, r"molecules\[0\].name: .* 1 to 200"
    yield {"molecules": [GOOD | {"conformers": 0}]}, r"conformers: 0 is not .* 1 to 10000"
    yield {"molecules": [GOOD | {"conformers": -1}]}, "conformers: -1 is not"
    yield {"molecules": [GOOD | {"conformers": 10**9}]}, "conformers: 1000000000 is not"
    yield {"molecules": [GOOD | {"conformers": True}]}, "conformers: true is not"
    yield {"molecules": [GOOD | {"conformers": 2.0}]}, "conformers: 2.0 is not"
    yield {"molecules": [GOOD, GOOD]}, r"molecules\[1\].name: \"a\" is molecules\[0\] too"
    many = [GOOD | {"name": f"m{i}"} for i in range(1001)]
    yield {"molecules": many}, "molecules: 1001 is over 1000"


@pytest.mark.parametrize(("share", "message"), list(bad_shares()))
def test_a_bad_share_is_refused_by_field(share: object, message: str) -> None:
    text = share if isinstance(share, str) else json.dumps(share)
    with pytest.raises(conformers.ShareError, match=message) as caught:
        conformers.parse_share(text, 5)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("top", [0, -1, 101])
def test_a_bad_number_of_energies_is_refused(top: int) -> None:
    with pytest.raises(conformers.ShareError, match=f"--top: {top} is not within"):
        conformers.parse_share(json.dumps({"molecules": [GOOD]}), top)


def test_bad_input_ends_with_64_and_one_line(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("")
    good = json.dumps({"molecules": [GOOD]})
    for number, (changes, arguments, message) in enumerate(
        [
            ({"SPRINGTIDE_ITEM": "{"}, (), "share: not JSON"),
            ({}, ("--top", "many"), "arguments: argument --top"),
            ({}, ("--item-file", str(tmp_path / "none")), "--item-file: "),
            ({"SPRINGTIDE_OUTPUT_DIR": str(file)}, (), "SPRINGTIDE_OUTPUT_DIR: "),
            ({"SPRINGTIDE_CHECKPOINT_DIR": f"{file}/x"}, (), "SPRINGTIDE_CHECKPOINT_DIR: "),
            ({"CONFORMERS_WITNESS": str(tmp_path)}, (), "CONFORMERS_WITNESS: "),
        ]
    ):
        task = Task(tmp_path / str(number), good)
        task.env |= changes
        done = task.run(*arguments)
        assert done.returncode == 64, changes
        assert done.stderr.startswith(f"conformers: {message}"), changes
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""


def test_the_share_may_come_as_an_argument_or_a_file(tmp_path: Path) -> None:
    text = json.dumps({"molecules": [GOOD]})
    file = tmp_path / "share.json"
    file.write_text(text)
    task = Task(tmp_path / "task", "not used")
    assert task.run("--item", text, "--output", str(tmp_path / "1")).returncode == 0
    task.state.unlink()
    assert task.run("--share", str(file), "--output", str(tmp_path / "2")).returncode == 0
    first, second = (tmp_path / n / "result.json" for n in ("1", "2"))
    assert first.read_bytes() == second.read_bytes()
