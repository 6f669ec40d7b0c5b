"""Each import contract holds on tidy code and breaks on code that crosses it."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# One module that crosses each contract, by the contract's key in .importlinter.
CROSSINGS = {
    "services-are-independent": ("springtide_scaler/shell.py", "import springtide_agent"),
    "services-know-no-users": ("springtide_monitor/shell.py", "import springtide_lab"),
    "shared-is-the-bottom": ("springtide_shared/late.py", "import springtide_scaler"),
    "testbed-stands-alone": ("springtide_testbed/extra.py", "import springtide_shared"),
    "testbed-is-for-tests": ("springtide/extra.py", "import springtide_testbed"),
    "decisions-are-pure": ("springtide_submitter/policy.py", "import asyncio"),
    "messages-are-pure": ("springtide_shared/messages/extra.py", "import logging"),
    "ports-are-abstract": ("springtide_shared/ports/extra.py", "import springtide_shared.adapters"),
    "broker-library": ("springtide_gateway/extra.py", "import aio_pika"),
    "database-libraries": ("springtide_coordinator/extra.py", "import sqlalchemy"),
    "http-server-libraries": ("springtide_lab/extra.py", "import litestar"),
    "process-library": ("springtide_agent/extra.py", "import psutil"),
    "client-libraries": ("springtide_rescheduler/extra.py", "import rich.table"),
    "plot-library": ("springtide/plot.py", "import matplotlib.pyplot"),
}

# What looks alike but is allowed: the homes of the libraries.
ALLOWED = {
    "springtide_shared/adapters/rabbit.py": "import aio_pika",
    "springtide_shared/adapters/sql.py": "import sqlalchemy",
    "springtide_gateway/http.py": "import litestar",
    "springtide_lab/local.py": "import psutil",
    "springtide_monitor/adapters.py": "import psutil",
    "springtide_testbed/processes.py": "import psutil",
    "springtide/cli.py": "import typer",
    "springtide_scaler/policy.py": "from datetime import timedelta",
    "springtide_scaler/service.py": "import asyncio",
}


def contracts() -> dict[str, str]:
    """Key -> shown name of every contract."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter", encoding="utf-8")
    prefix = "importlinter:contract:"
    return {
        section.removeprefix(prefix): parser[section]["name"]
        for section in parser.sections()
        if section.startswith(prefix)
    }


@pytest.fixture
def tidy(tmp_path: Path) -> Path:
    """A small tree with every root package, and libraries where they belong."""
    shutil.copy(ROOT / ".importlinter", tmp_path)
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter", encoding="utf-8")
    folders = parser["importlinter"]["root_packages"].split()
    shared = ("adapters", "ledger", "messages", "ports", "runtime", "testing")
    folders += [f"springtide_shared/{name}" for name in shared]
    for folder in folders:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "__init__.py").touch()
    for name in ("units", "errors"):
        (tmp_path / "springtide_shared" / f"{name}.py").touch()
    for name, line in ALLOWED.items():
        (tmp_path / name).write_text(f"{line}\n", encoding="utf-8")
    return tmp_path


def verdicts(tree: Path) -> dict[str, str]:
    """Shown name of each contract -> KEPT or BROKEN."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = dict(re.findall(r"^(.+) (KEPT|BROKEN)\b", done.stdout, re.MULTILINE))
    assert found, done.stdout + done.stderr
    return found


def test_tidy_code_keeps_every_contract(tidy: Path) -> None:
    assert verdicts(tidy) == dict.fromkeys(contracts().values(), "KEPT")


@pytest.mark.parametrize(
    "name",
    [
        "springtide_coordinator/model.py",
        "springtide_submitter/core.py",
        "springtide_submitter/slots.py",
        "springtide_rescheduler/lives.py",
        "springtide_shared/ledger/chunks.py",
    ],
)
def test_every_place_of_decisions_is_kept_pure(tidy: Path, name: str) -> None:
    (tidy / name).write_text("import asyncio\n", encoding="utf-8")
    broken = [contract for contract, verdict in verdicts(tidy).items() if verdict == "BROKEN"]
    assert broken == [contracts()["decisions-are-pure"]]


def test_every_contract_is_broken_by_code_that_crosses_it(tidy: Path) -> None:
    assert CROSSINGS.keys() == contracts().keys(), "each contract needs a crossing here"
    for name, line in CROSSINGS.values():
        (tidy / name).write_text(f"{line}\n", encoding="utf-8")
    assert verdicts(tidy) == dict.fromkeys(contracts().values(), "BROKEN")
