"""Shares of real molecules for the conformer example, and the job file that submits them.

    python make_shares.py --tasks 200 > job.yaml     # a job file for `springtide submit`
    python make_shares.py --measure                  # what it costs on this machine

The molecules are those that the RDKit wheel ships: the first 5,000 structures of the NCI set and a
hundred ligands of a ChEMBL assay, so nothing is downloaded. Most tasks hold a few small molecules
and end within a second; about one in seventeen holds a single big ligand with many conformers, and
those few hold most of the work. Nothing of it is artificial: the cost of a conformer grows with
nearly the third power of the number of atoms.

Exit codes: 0 done; 64 bad arguments; 69 this RDKit does not ship the molecules.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

EXIT_DONE = 0
EXIT_BAD_INPUT = 64
EXIT_NO_MOLECULES = 69

MAX_TASKS = 100_000
MAX_SCALE = 1_000.0
MAX_CONFORMERS = 10_000
"""What the program takes for one molecule."""

LONG_EVERY = 17
"""One task in so many is a long one: twelve of 200."""
LONG_LEAST_SECONDS = 4.0
LONG_MOST_SECONDS = 20.0
LONG_TAIL_INDEX = 1.5
"""Index of the Pareto law that the long tasks' work follows; below 2 its variance is infinite."""
SHORT_MEDIAN_SECONDS = 0.04
SHORT_SPREAD = 0.8
"""Sigma of the log-normal law that the short tasks' work follows."""
SHORT_MOLECULES = (3, 6)

SMALL_ATOMS = (6, 30)
"""Heavy atoms of the molecules in short tasks."""
BIG_ATOMS = 44
"""Heavy atoms from which a molecule counts as a big ligand."""


class NoMoleculesError(Exception):
    """The installed RDKit does not hold the molecules."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A molecule that can be put into a share."""

    name: str
    smiles: str
    atoms: int
    """With hydrogens."""

    @property
    def seconds(self) -> float:
        """Expected CPU seconds of one conformer on the machine of the README's table."""
        return float(0.024 * (self.atoms / 40) ** 2.75)


def make_items(tasks: int, seed: int, scale: float) -> list[dict[str, Any]]:
    """The shares of an array of `tasks` tasks; each is one array item (as JSON text).

    Args:
        tasks: 1 to 100,000.
        seed: the same seed gives the same shares, anywhere.
        scale: factor on every task's work (conformers); 1.0 is the demonstration.

    Raises:
        ValueError: an argument is out of its range.
        NoMoleculesError: the installed RDKit does not ship the molecules.
    """
    if not 1 <= tasks <= MAX_TASKS:
        raise ValueError(f"tasks: {tasks} is not within 1 to {MAX_TASKS}")
    if not 0.0 < scale <= MAX_SCALE:
        raise ValueError(f"scale: {scale} is not above 0 and at most {MAX_SCALE:g}")
    rng = random.Random(seed)
    small, big = _candidates()
    long_work = _long_tasks(tasks, rng)
    return [
        _long_item(big, long_work[index] * scale, rng)
        if index in long_work
        else _short_item(small, scale, rng)
        for index in range(tasks)
    ]


def _long_tasks(tasks: int, rng: random.Random) -> dict[int, float]:
    """Work (CPU seconds) per index of each long task, staggered through the index range.

    The works are the quantiles of the Pareto law, not draws from it: the total then hardly depends
    on the seed. One lies at a random place in each of as many equal parts of the range from three
    fifths to nineteen twentieths, as in a library that somebody sorted by size: none starts when
    everything else has ended, and most still run when the queue is empty, which is when a tail
    costs money.
    """
    count = max(1, round(tasks / LONG_EVERY))
    works = [
        min(
            LONG_LEAST_SECONDS * (1 - (rank + 0.5) / count) ** (-1 / LONG_TAIL_INDEX),
            LONG_MOST_SECONDS,
        )
        for rank in range(count)
    ]
    rng.shuffle(works)
    part = tasks * 0.35 / count
    return {int(0.6 * tasks + (i + rng.random()) * part): work for i, work in enumerate(works)}


def _long_item(big: Sequence[Candidate], work: float, rng: random.Random) -> dict[str, Any]:
    molecule = rng.choice(big)
    return _item([(molecule, max(1, round(work / molecule.seconds)))])


def _short_item(small: Sequence[Candidate], scale: float, rng: random.Random) -> dict[str, Any]:
    chosen = rng.sample(small, rng.randint(*SHORT_MOLECULES))
    work = SHORT_MEDIAN_SECONDS * rng.lognormvariate(0.0, SHORT_SPREAD) * scale
    # As many for each of them: what an analysis would ask for, small or not.
    conformers = max(1, round(work / sum(molecule.seconds for molecule in chosen)))
    return _item([(molecule, conformers) for molecule in chosen])


def _item(chosen: Sequence[tuple[Candidate, int]]) -> dict[str, Any]:
    return {
        "molecules": [
            {"name": m.name, "smiles": m.smiles, "conformers": min(conformers, MAX_CONFORMERS)}
            for m, conformers in chosen
        ]
    }


def _candidates() -> tuple[list[Candidate], list[Candidate]]:
    """Small molecules and big ligands, in the files' order.

    Salts and mixtures are left out: a conformer of two molecules apart means nothing. So are big
    ones that MMFF94 has no parameters for; small ones of that kind stay, as in any real set.
    """
    from rdkit import RDConfig, rdBase
    from rdkit.Chem import rdForceFieldHelpers, rdmolfiles, rdmolops

    rdBase.DisableLog("rdApp.*")
    files = {
        "nci": Path(RDConfig.RDDataDir, "NCI", "first_5K.smi"),
        "chembl": Path(RDConfig.RDContribDir, "fraggle", "data", "ChEMBL_11265_actives.smi"),
    }
    small: list[Candidate] = []
    big: list[Candidate] = []
    for source, path in files.items():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise NoMoleculesError(
                f"{path}: {error.strerror}; install RDKit from its wheel, which ships this file"
            ) from None
        for line in lines:
            smiles, _, label = line.replace(",", " ").strip().partition(" ")
            if "\t" in smiles:
                smiles, _, label = smiles.partition("\t")
            if not label or "." in smiles:
                continue
            parsed: Any = rdmolfiles.MolFromSmiles(smiles)
            if parsed is None:
                continue
            heavy = parsed.GetNumHeavyAtoms()
            is_small = source == "nci" and SMALL_ATOMS[0] <= heavy <= SMALL_ATOMS[1]
            if not is_small and heavy < BIG_ATOMS:
                continue
            atoms = rdmolops.AddHs(parsed).GetNumAtoms()
            candidate = Candidate(f"{source}-{label.strip()}", smiles, atoms)
            if is_small:
                small.append(candidate)
            elif rdForceFieldHelpers.MMFFHasAllMoleculeParams(rdmolops.AddHs(parsed)):
                big.append(candidate)
    if len(small) < SHORT_MOLECULES[1] or not big:
        raise NoMoleculesError("the RDKit data files hold no usable molecules; reinstall RDKit")
    return small, big


# --- the job file ----------------------------------------------------------------------------


def job_file(items: Sequence[dict[str, Any]], program: Path, python: str) -> str:
    """The YAML job file; every item is one line, readable by any YAML parser."""
    lines = [
        "# Conformers of real molecules; written by make_shares.py.",
        "name: conformers",
        "application: conformers",
        f"command: [{_quoted(python)}, {_quoted(str(program))}]",
        "resources: {cpu: 1, memory: 512Mi}",
        "outputs: [result.json]",
        "# The program replaces state.json by a rename after each conformer: whole at any moment.",
        "checkpoint: {path: ., ask: signal, signal: SIGUSR1, saved: atomic, expected_save: 1s}",
        "grace: 10s",
        "array:",
        "  items:",
    ]
    lines += [f"    - {_quoted(json.dumps(item, separators=(',', ':')))}" for item in items]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A single-quoted YAML scalar: nothing in it is special but the quote itself."""
    return "'" + text.replace("'", "''") + "'"


# --- measuring -------------------------------------------------------------------------------

MEASURED_ATOMS = (20, 30, 40, 60, 80, 100, 120, 140, 176)


def measure(items: Sequence[dict[str, Any]], program: Path) -> str:
    """Run every share once, one after another, and tell what it cost (Markdown)."""
    small, big = _candidates()
    bare = sorted(_run({"molecules": _BARE}, program) for _ in range(9))[4]
    rows = [
        f"A bare start (imports, one conformer of methane): {bare:.2f} CPU s.",
        "",
        "| molecule | atoms with H | CPU s per conformer | the model's |",
        "|---|---|---|---|",
    ]
    for atoms in MEASURED_ATOMS:
        molecule = min([*small, *big], key=lambda c: (abs(c.atoms - atoms), c.name))
        count = max(2, min(40, round(1 / molecule.seconds)))
        seconds = max(0.0, _run(_item([(molecule, count)]), program) - bare) / count
        rows.append(
            f"| {molecule.name} | {molecule.atoms} | {seconds:.3f} | {molecule.seconds:.3f} |"
        )
    costs = [_run(item, program) for item in items]
    works = [max(0.0, cost - bare) for cost in costs]
    long_names = {c.name for c in big}
    long_ones = [
        work
        for work, item in zip(works, items, strict=True)
        if item["molecules"][0]["name"] in long_names
    ]
    ordered = sorted(works)
    median, high = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.9)]
    rows += [
        "",
        "| all shares | |",
        "|---|---|",
        f"| tasks | {len(items)} |",
        f"| CPU s in all, starts included | {sum(costs):.0f} |",
        f"| of these, bare starts | {bare * len(items):.0f} |",
        f"| of these, computing | {sum(works):.0f} |",
        f"| long tasks | {len(long_ones)} |",
        f"| their part of the computing | {sum(long_ones) / max(sum(works), 1e-9):.0%} |",
        f"| computing, median task | {median:.2f} |",
        f"| computing, nine of ten tasks below | {high:.2f} |",
        f"| computing, longest task | {ordered[-1]:.1f} |",
        f"| the long ones, in array order | {', '.join(f'{w:.1f}' for w in long_ones)} |",
    ]
    return "\n".join(rows) + "\n"


_BARE = [{"name": "methane", "smiles": "C", "conformers": 1}]


def _run(item: dict[str, Any], program: Path) -> float:
    """CPU seconds of one run of the program, checkpoints included."""
    with tempfile.TemporaryDirectory(prefix="conformers-") as scratch:
        env = os.environ | {
            "SPRINGTIDE_ITEM": json.dumps(item),
            "SPRINGTIDE_OUTPUT_DIR": f"{scratch}/output",
            "SPRINGTIDE_CHECKPOINT_DIR": f"{scratch}/checkpoint",
        }
        env.pop("CONFORMERS_WITNESS", None)
        before = os.times()
        subprocess.run(
            [sys.executable, str(program)], env=env, check=True, stdout=subprocess.DEVNULL
        )
        after = os.times()
    return (
        after.children_user - before.children_user + after.children_system - before.children_system
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"arguments: {message}; see --help")


def main(argv: Sequence[str]) -> int:
    """Print the job file, the bare items or the measurement; returns the exit code."""
    parser = _Parser(description="Shares of molecules for the conformer example.")
    parser.add_argument("--tasks", type=int, default=200, help="tasks of the array (default 200)")
    parser.add_argument("--seed", type=int, default=1, help="another seed, other shares")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the work (default 1)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--items", action="store_true", help="print JSON lines, no job file")
    form.add_argument("--measure", action="store_true", help="run all shares here, print the cost")
    program = Path(__file__).resolve().with_name("conformers.py")
    try:
        arguments = parser.parse_args(argv)
        items = make_items(arguments.tasks, arguments.seed, arguments.scale)
    except ValueError as error:
        print(f"make_shares: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except NoMoleculesError as error:
        print(f"make_shares: {error}", file=sys.stderr)
        return EXIT_NO_MOLECULES
    if arguments.measure:
        print(measure(items, program), end="")
    elif arguments.items:
        for item in items:
            print(json.dumps(item, separators=(",", ":")))
    else:
        print(job_file(items, program, sys.executable), end="")
    return EXIT_DONE


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
