"""Lowest-energy conformers of a share of molecules: a long, checkpointing program.

A plain scientific program: it imports RDKit and the standard library, and knows of springtide only
the environment variables that any task finds. For each molecule of its share it embeds N conformers
(ETKDGv3), relaxes each with MMFF94 and keeps the K lowest energies.

    python conformers.py --item '{"molecules": [{"name": "a", "smiles": "CCO", "conformers": 8}]}'

What it promises to whoever runs it:

* Every conformer has a seed of its own, made from the molecule's name and the conformer's index
  alone, so no conformer depends on another and a resumed run ends in the same bytes.
* After each conformer ``state.json`` in the checkpoint directory is replaced by a rename: at every
  moment it is one whole state, whatever kills the program (but the machine itself: no fsync, the
  agent copies the file off the machine and verifies what it copied).
* ``result.json`` appears in the output directory at the end, whole, and holds nothing that differs
  between two runs of one share: no times, no attempt number, no host.
* SIGTERM ends it at once (exit 143), also inside a conformer; the checkpoint is on disk already.
  SIGUSR1 ("checkpoint, please") is answered by the save that follows the current conformer.

Exit codes: 0 done; 64 bad input or directory; 65 checkpoint damaged or of another share;
74 a file could not be written; 143 ended by SIGTERM.
"""

# ruff: noqa: E402 - the signals are blocked before anything else is imported

import signal

SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1})

if __name__ == "__main__":
    # Until these two are blocked, their default action would end the process without a word.
    # Threads started later (numpy's too) inherit the mask; `watch_signals` collects the signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

import argparse
import hashlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

# One task, one core; and numpy's start costs a third less CPU without a pool of BLAS threads.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

EXIT_DONE = 0
EXIT_BAD_INPUT = 64
EXIT_BAD_CHECKPOINT = 65
EXIT_WRITE_FAILED = 74
EXIT_TERMINATED = 143

STATE_FORMAT = "conformers-state/1"
RESULT_FORMAT = "conformers-result/1"
STATE_FILE = "state.json"
RESULT_FILE = "result.json"

MAX_MOLECULES = 1_000
"""Molecules in one share; the whole state is rewritten per conformer, so it has to stay small."""
MAX_CONFORMERS = 10_000
MAX_TOP = 100
MAX_NAME = 200
MAX_SMILES = 2_000
"""Characters; far above any drug, far below what exhausts the SMILES parser's stack."""

EMBED_ITERATIONS = 20
"""Tries of one embedding before random start coordinates are used, then as many tries of those."""
MINIMISE_ITERATIONS = 2_000
HOPELESS_AFTER = 3
"""A molecule whose first conformers all fail to embed is given up after so many of them."""


class ShareError(Exception):
    """The input is not a share, or a directory cannot be used; the text names field and remedy."""


class CheckpointError(Exception):
    """The checkpoint is damaged or belongs to another share."""


@dataclass(frozen=True, slots=True)
class Molecule:
    """One molecule of the share and how many conformers it gets."""

    name: str
    smiles: str
    conformers: int


@dataclass(frozen=True, slots=True)
class Share:
    """What this run computes: the molecules in order, and how many energies are kept of each."""

    molecules: tuple[Molecule, ...]
    top: int

    def digest(self) -> str:
        """SHA-256 (hex) over everything of the share that the result depends on."""
        rows = [[m.name, m.smiles, m.conformers] for m in self.molecules]
        return sha256_of({"molecules": rows, "top": self.top})


@dataclass(frozen=True, slots=True)
class Conformer:
    """One relaxed conformer; its seed rebuilds the coordinates, their digest proves it."""

    energy: float
    """MMFF94 energy, kcal/mol."""
    index: int
    seed: int
    converged: bool
    coordinates_sha256: str
    """Over x, y, z of every atom (hydrogens too) in order, as little-endian doubles."""


@dataclass(slots=True)
class Progress:
    """What is known of one molecule so far; grows by one conformer at a time."""

    done: int = 0
    """Conformers tried, failed ones included: the index of the next one."""
    failed: int = 0
    skipped: str | None = None
    lowest: list[Conformer] = field(default_factory=list)

    def add(self, conformer: Conformer | None, top: int) -> None:
        """Count the next conformer (None: it could not be embedded); keep the `top` lowest."""
        self.done += 1
        if conformer is None:
            self.failed += 1
            return
        # The index breaks ties, so the order never depends on what was computed first.
        ranked = sorted([*self.lowest, conformer], key=lambda c: (c.energy, c.index))
        self.lowest = ranked[:top]

    def to_json(self) -> dict[str, Any]:
        """Plain data for the state and the result; floats survive JSON to the last bit."""
        return {
            "done": self.done,
            "failed": self.failed,
            "skipped": self.skipped,
            "lowest": [
                {
                    "energy_kcal_per_mol": c.energy,
                    "index": c.index,
                    "seed": c.seed,
                    "converged": c.converged,
                    "coordinates_sha256": c.coordinates_sha256,
                }
                for c in self.lowest
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Progress":
        """The inverse of `to_json`; KeyError or TypeError if `data` is something else."""
        lowest = [
            Conformer(
                energy=float(c["energy_kcal_per_mol"]),
                index=int(c["index"]),
                seed=int(c["seed"]),
                converged=bool(c["converged"]),
                coordinates_sha256=str(c["coordinates_sha256"]),
            )
            for c in data["lowest"]
        ]
        skipped = data["skipped"]
        return cls(
            done=int(data["done"]),
            failed=int(data["failed"]),
            skipped=None if skipped is None else str(skipped),
            lowest=lowest,
        )


# --- input -----------------------------------------------------------------------------------


def parse_share(text: str, top: int) -> Share:
    """Read a share from its JSON text; ShareError names the field, its value and the remedy."""
    if not 1 <= top <= MAX_TOP:
        raise ShareError(f"--top: {top} is not within 1 to {MAX_TOP}; choose a number within it")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShareError(f"share: not JSON ({error}); give an object with 'molecules'") from None
    _check_keys(data, {"molecules"}, "share")
    rows = data["molecules"]
    if not isinstance(rows, list) or not rows:
        raise ShareError(f"molecules: {_shown(rows)} is not a list with at least one molecule")
    if len(rows) > MAX_MOLECULES:
        raise ShareError(f"molecules: {len(rows)} is over {MAX_MOLECULES}; use more, smaller tasks")
    molecules = tuple(_parse_molecule(row, f"molecules[{i}]") for i, row in enumerate(rows))
    names: dict[str, int] = {}
    for i, molecule in enumerate(molecules):
        first = names.setdefault(molecule.name, i)
        if first != i:
            raise ShareError(
                f"molecules[{i}].name: {_shown(molecule.name)} is molecules[{first}] too; "
                "names seed the conformers, give each its own"
            )
    return Share(molecules, top)


def _parse_molecule(row: Any, where: str) -> Molecule:
    _check_keys(row, {"name", "smiles", "conformers"}, where)
    name = _check_text(row["name"], f"{where}.name", MAX_NAME)
    smiles = _check_text(row["smiles"], f"{where}.smiles", MAX_SMILES)
    conformers = row["conformers"]
    if type(conformers) is not int or not 1 <= conformers <= MAX_CONFORMERS:
        raise ShareError(
            f"{where}.conformers: {_shown(conformers)} is not a whole number "
            f"within 1 to {MAX_CONFORMERS}"
        )
    return Molecule(name, smiles, conformers)


def _check_keys(data: Any, wanted: set[str], where: str) -> None:
    if not isinstance(data, dict):
        raise ShareError(f"{where}: {_shown(data)} is not an object with {_listed(wanted)}")
    unknown = sorted(data.keys() - wanted)
    if unknown:
        raise ShareError(f"{where}.{unknown[0][:40]!s}: unknown key; known are {_listed(wanted)}")
    missing = sorted(wanted - data.keys())
    if missing:
        raise ShareError(f"{where}.{missing[0]}: missing; give {_listed(wanted)}")


def _check_text(value: Any, where: str, limit: int) -> str:
    if not isinstance(value, str) or not value or not value.isprintable() or len(value) > limit:
        raise ShareError(
            f"{where}: {_shown(value)} is not a text of 1 to {limit} printable characters"
        )
    return value


def _listed(names: set[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))


def _shown(value: Any) -> str:
    """The value for a one-line message, cut short: inputs can be megabytes."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- files -----------------------------------------------------------------------------------


def canonical(data: Any) -> bytes:
    """The one JSON text of `data`: sorted keys, no spaces, floats as `repr` writes them."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256_of(data: Any) -> str:
    """SHA-256 (hex) of the canonical JSON text of `data`."""
    return hashlib.sha256(canonical(data)).hexdigest()


def replace_file(path: Path, content: bytes) -> None:
    """Put `content` at `path` in one step: readers see the old file or the new one, whole.

    The temporary file is a hidden one with a fixed name, so an interrupted write leaves at most one
    behind, and the next write takes it over.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def usable_directory(text: str, name: str) -> Path:
    """The directory, made if need be; ShareError if it cannot be written to."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ShareError(
            f"{name}: {text!r} cannot be made ({error.strerror}); give a writable directory"
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ShareError(f"{name}: {text!r} is not writable; give a writable directory")
    return path


def save_state(path: Path, share_digest: str, rdkit: str, progress: Sequence[Progress]) -> None:
    """Replace the checkpoint by the state after the conformer just done."""
    body = {
        "format": STATE_FORMAT,
        "share": share_digest,
        "rdkit": rdkit,
        "progress": [p.to_json() for p in progress],
    }
    replace_file(path, canonical({"body": body, "sha256": sha256_of(body)}))


def load_state(path: Path, share: Share, rdkit: str) -> list[Progress] | None:
    """The checkpointed progress per molecule, None without a checkpoint.

    Raises CheckpointError rather than start anew in silence: whoever restored these files believes
    in them, and should choose an older checkpoint or none.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        document = json.loads(content)
        body = document["body"]
        intact = document["sha256"] == sha256_of(body)
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(f"{path}: damaged; restore an older checkpoint or remove it")
    for key, wanted in (("format", STATE_FORMAT), ("share", share.digest()), ("rdkit", rdkit)):
        if body.get(key) != wanted:
            raise CheckpointError(
                f"{path}: {key} is {_shown(body.get(key))}, this run's is {_shown(wanted)}; "
                "it belongs to another run, give each run its own checkpoint directory"
            )
    try:
        progress = [Progress.from_json(row) for row in body["progress"]]
    except (KeyError, TypeError, ValueError):
        progress = []
    if len(progress) != len(share.molecules):
        raise CheckpointError(f"{path}: damaged; restore an older checkpoint or remove it")
    return progress


class Witness:
    """An independent record of what was computed, for tests and for the demonstration.

    One JSON line per event, each appended by a single write with O_APPEND, so that lines of many
    processes never mix and none is lost with a killed process.
    """

    def __init__(self, path: str | None, share_digest: str, env: Mapping[str, str]) -> None:
        self._share = share_digest
        self._index = _number(env.get("SPRINGTIDE_TASK_INDEX"))
        self._attempt = _number(env.get("SPRINGTIDE_ATTEMPT"))
        self._file: int | None = None
        if path:
            try:
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            except OSError as error:
                raise ShareError(
                    f"CONFORMERS_WITNESS: {path!r} cannot be opened ({error.strerror}); "
                    "name a writable file or unset it"
                ) from None

    def append(self, event: str, done: int) -> None:
        """Append `event`; `done` counts the conformers of the share done so far."""
        if self._file is None:
            return
        line = {
            "event": event,
            "share": self._share,
            "index": self._index,
            "attempt": self._attempt,
            "pid": os.getpid(),
            "done": done,
            "t": time.time(),
        }
        os.write(self._file, canonical(line) + b"\n")


def _number(text: str | None) -> int | str | None:
    """Task index and attempt are numbers; anything else is passed on as it came."""
    return int(text) if text is not None and text.isdecimal() else text


# --- chemistry -------------------------------------------------------------------------------


def conformer_seed(name: str, index: int) -> int:
    """The seed of one conformer, 0 to 2^31 - 1: depends on nothing but molecule and index."""
    digest = hashlib.sha256(f"{name}\n{index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFF_FFFF


class Chemistry:
    """The four RDKit modules that are needed, imported late: a bad share is refused without them.

    ``rdkit.Chem.AllChem`` would bring dozens more. The largest part of a bare start is numpy, which
    the distance-geometry module loads by itself.
    """

    def __init__(self) -> None:
        from rdkit import __version__, rdBase
        from rdkit.Chem import rdDistGeom, rdForceFieldHelpers, rdmolfiles, rdmolops

        rdBase.DisableLog("rdApp.*")  # the reasons for skipping go into the result instead
        self.version: str = __version__
        self._embedding = rdDistGeom
        self._force_field = rdForceFieldHelpers
        self._files = rdmolfiles
        self._operations = rdmolops

    def prepare(self, smiles: str) -> Any:
        """The molecule with hydrogens, or the reason (a str) why it has to be skipped."""
        if not smiles.isascii() or " " in smiles:
            return "smiles-not-valid"  # RDKit would read the part before it, another molecule
        try:
            molecule: Any = self._files.MolFromSmiles(smiles)  # None too, whatever the stubs say
            if molecule is None:
                return "smiles-not-valid"
            if molecule.GetNumAtoms() == 0:
                return "no-atoms"
            molecule = self._operations.AddHs(molecule)
            if not self._force_field.MMFFHasAllMoleculeParams(molecule):
                return "mmff-has-no-parameters"
        except (RuntimeError, ValueError) as error:
            return f"rdkit-failed: {_first_line(error)}"
        return molecule

    def conformer(self, molecule: Any, name: str, index: int) -> Conformer | None:
        """Embed and relax conformer `index`; None if no embedding was found."""
        seed = conformer_seed(name, index)
        if not self._embed(molecule, seed):
            return None
        try:
            # Both calls are the ones that release Python's lock, so SIGTERM is served meanwhile.
            ((not_converged, energy),) = self._force_field.MMFFOptimizeMoleculeConfs(
                molecule, numThreads=1, maxIters=MINIMISE_ITERATIONS
            )
        except (RuntimeError, ValueError):
            return None
        if not_converged < 0 or not math.isfinite(energy):
            return None
        coordinates = molecule.GetConformer().GetPositions().astype("<f8").tobytes()
        return Conformer(
            energy=float(energy),
            index=index,
            seed=seed,
            converged=not_converged == 0,
            coordinates_sha256=hashlib.sha256(coordinates).hexdigest(),
        )

    def _embed(self, molecule: Any, seed: int) -> bool:
        """Replace the molecule's coordinates by a new embedding; False if none was found."""
        settings: Any = self._embedding.ETKDGv3()  # the stubs type its fields wrongly
        settings.randomSeed = seed
        settings.maxIterations = EMBED_ITERATIONS
        settings.numThreads = 1
        for random_start in (False, True):  # crowded and very large molecules need the second
            settings.useRandomCoords = random_start
            try:
                if self._embedding.EmbedMolecule(molecule, settings) >= 0:
                    return True
            except (RuntimeError, ValueError):
                return False
        return False


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# --- the run ---------------------------------------------------------------------------------


class Run:
    """Computes one share; the only place where state, checkpoint and witness come together."""

    def __init__(
        self, share: Share, output: Path, checkpoint: Path | None, witness: Witness
    ) -> None:
        self._share = share
        self._digest = share.digest()
        self._result_path = output / RESULT_FILE
        self._state_path = None if checkpoint is None else checkpoint / STATE_FILE
        self._witness = witness
        self._progress = [Progress() for _ in share.molecules]
        # Held for each save with its witness line, so that SIGTERM never comes between the two.
        self._writing = threading.Lock()
        self._finished = False

    def compute(self) -> None:
        """Resume or start, do every conformer that is missing, write the result."""
        chemistry = Chemistry()
        if self._state_path is not None:
            restored = load_state(self._state_path, self._share, chemistry.version)
            if restored is not None:
                self._progress = restored
                self._witness.append("resume", self._done())
                print(f"resumed: {self._done()} conformers were done", flush=True)
        for position, molecule in enumerate(self._share.molecules):
            self._compute_molecule(chemistry, molecule, self._progress[position])
            self._report(position)
        with self._writing:
            replace_file(self._result_path, canonical(self._result(chemistry.version)) + b"\n")
            self._witness.append("end", self._done())
            self._finished = True

    def leave(self) -> None:
        """End the process at once for SIGTERM, unless the result is there already.

        Runs on the signal thread while the main thread may be deep inside RDKit, hence `os._exit`:
        there is nothing to flush, every line and file is written when it is complete.
        """
        # A save takes milliseconds; a disk that hangs must not keep the process for ever.
        locked = self._writing.acquire(timeout=5.0)
        if self._finished:
            return
        try:
            if locked:
                self._witness.append("stop", self._done())
        finally:
            os._exit(EXIT_TERMINATED)

    def _compute_molecule(
        self, chemistry: Chemistry, molecule: Molecule, progress: Progress
    ) -> None:
        if progress.skipped is not None or progress.done >= molecule.conformers:
            return
        prepared = chemistry.prepare(molecule.smiles)
        if isinstance(prepared, str):
            progress.skipped = prepared
            return
        while progress.done < molecule.conformers and progress.skipped is None:
            conformer = chemistry.conformer(prepared, molecule.name, progress.done)
            with self._writing:
                progress.add(conformer, self._share.top)
                if progress.failed == progress.done >= min(HOPELESS_AFTER, molecule.conformers):
                    progress.skipped = "no-conformer-found"
                self._save(chemistry.version)

    def _save(self, rdkit: str) -> None:
        if self._state_path is not None:
            save_state(self._state_path, self._digest, rdkit, self._progress)
            self._witness.append("checkpoint", self._done())

    def _done(self) -> int:
        return sum(p.done for p in self._progress)

    def _report(self, position: int) -> None:
        molecule, progress = self._share.molecules[position], self._progress[position]
        if progress.skipped is not None:
            outcome = f"skipped ({progress.skipped})"
        else:
            outcome = f"{progress.done} conformers, lowest {progress.lowest[0].energy:.3f} kcal/mol"
        place = f"{position + 1}/{len(self._share.molecules)}"
        print(f"molecule {place} {molecule.name}: {outcome}", flush=True)

    def _result(self, rdkit: str) -> dict[str, Any]:
        rows = [
            {
                "name": molecule.name,
                "smiles": molecule.smiles,
                "conformers": molecule.conformers,
                **progress.to_json(),
            }
            for molecule, progress in zip(self._share.molecules, self._progress, strict=True)
        ]
        return {
            "format": RESULT_FORMAT,
            "share": self._digest,
            "top": self._share.top,
            "rdkit": rdkit,
            "molecules": rows,
        }


def watch_signals(run: Run) -> None:
    """Serve the blocked signals on a thread of their own, for as long as the process lives.

    A Python signal handler would have to wait for the RDKit call in progress to return.
    """

    def serve() -> None:
        while True:
            if signal.sigwait(SIGNALS) == signal.SIGTERM:
                run.leave()
            # SIGUSR1: every conformer is followed by a save, so the answer is on its way.

    threading.Thread(target=serve, name="signals", daemon=True).start()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ShareError(f"arguments: {message}; see --help")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(description="Lowest-energy conformers of a share of molecules.")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--item", help="the share as JSON text (else: $SPRINGTIDE_ITEM)")
    source.add_argument("--item-file", "--share", metavar="FILE", help="a file with that text")
    parser.add_argument("--top", type=int, default=5, help="energies kept per molecule (default 5)")
    parser.add_argument("--output", help="else $SPRINGTIDE_OUTPUT_DIR, else here")
    parser.add_argument("--checkpoint", help="else $SPRINGTIDE_CHECKPOINT_DIR, else none is made")
    return parser.parse_args(argv)


def _share_text(arguments: argparse.Namespace, env: Mapping[str, str]) -> str:
    if arguments.item is not None:
        return str(arguments.item)
    if arguments.item_file is not None:
        try:
            return Path(arguments.item_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ShareError(
                f"--item-file: {arguments.item_file!r} cannot be read ({_first_line(error)})"
            ) from None
    if "SPRINGTIDE_ITEM" in env:
        return env["SPRINGTIDE_ITEM"]
    raise ShareError("share: none given; set SPRINGTIDE_ITEM or use --item or --item-file")


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run one share; returns the exit code. Errors are one line on stderr."""
    try:
        arguments = _arguments(argv)
        share = parse_share(_share_text(arguments, env), arguments.top)
        output_text = arguments.output or env.get("SPRINGTIDE_OUTPUT_DIR") or "."
        output = usable_directory(output_text, "SPRINGTIDE_OUTPUT_DIR")
        checkpoint_text = arguments.checkpoint or env.get("SPRINGTIDE_CHECKPOINT_DIR")
        checkpoint = None
        if checkpoint_text:
            checkpoint = usable_directory(checkpoint_text, "SPRINGTIDE_CHECKPOINT_DIR")
        witness = Witness(env.get("CONFORMERS_WITNESS"), share.digest(), env)
        run = Run(share, output, checkpoint, witness)
        witness.append("start", 0)
        watch_signals(run)
        run.compute()
    except ShareError as error:
        return _refused(error, EXIT_BAD_INPUT)
    except CheckpointError as error:
        return _refused(error, EXIT_BAD_CHECKPOINT)
    except OSError as error:
        return _refused(error, EXIT_WRITE_FAILED)
    return EXIT_DONE


def _refused(error: Exception, code: int) -> int:
    print(f"conformers: {error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], os.environ))
