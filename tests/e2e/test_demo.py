"""The demonstration as a newcomer runs it, smaller."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_demo_loses_nothing_and_packs_its_tail(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("springtide")),
            *("demo", "--json", "--tasks", "60", "--out", "demo"),
        ],
        capture_output=True,
        text=True,
        timeout=590,
        cwd=tmp_path,  # a relative folder, as the default is one
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert json.loads(done.stdout) == summary
    assert summary["succeeded"] == summary["tasks"] == 60
    assert (summary["lost"], summary["doubled"], summary["final_nodes"]) == (0, 0, 0)
    assert summary["bitwise_equal"]
    assert summary["compared"] >= 10
    assert summary["peak_nodes"] >= 2
    assert summary["recomputed_conformers_max"] <= 1
    assert summary["attempts"] == 60 + summary["migrations"]
    assert summary["node_seconds_paid"] > 0
    assert (out / "run.png").stat().st_size > 10_000
    lines = (out / "witness.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["event"] == "end" for line in lines) == 60
