"""Replay one simulated run: `python -m springtide_lab.simulated --seed 7 --tasks 500 --chaos`."""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import replace
from pathlib import Path

import structlog

from springtide_lab.simulated.invariants import examine
from springtide_lab.simulated.run import RunResult, simulate
from springtide_lab.simulated.scenarios import two_clusters
from springtide_shared.runtime.run import calm_collector
from springtide_shared.testing.virtual import run_virtual


def main() -> int:
    """Run, print what happened and every law; 0 if all laws hold."""
    parser = argparse.ArgumentParser(prog="python -m springtide_lab.simulated", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=1_000)
    parser.add_argument("--chaos", action="store_true", help="every fault at once")
    parser.add_argument("--no-rescheduling", action="store_true")
    parser.add_argument("--no-codec", action="store_true", help="pass structs, do not encode")
    parser.add_argument("--trace", type=Path, help="write every published message to this file")
    parser.add_argument("--log", default="error", choices=["debug", "info", "warning", "error"])
    options = parser.parse_args()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[options.log.upper()]
        ),
        # A service that fails again and again would spend the run on coloured tracebacks.
        processors=[
            structlog.processors.add_log_level,
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
        ],
    )
    spec = two_clusters(
        options.seed,
        options.tasks,
        chaos=options.chaos,
        rescheduling=not options.no_rescheduling,
    )
    spec = replace(spec, codec=not options.no_codec)
    calm_collector()
    wall, cpu = time.perf_counter(), time.process_time()
    trace: list[str] | None = None if options.trace is None else []
    try:
        result = run_virtual(simulate(spec, trace=trace))
    finally:
        if options.trace is not None and trace is not None:
            options.trace.write_text("\n".join(trace) + "\n")
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return _report(result, wall, cpu)


def _report(result: RunResult, wall: float, cpu: float) -> int:
    tasks = sum(view.spec.size for view in result.jobs.values())
    published = result.broker.published
    lines = [
        f"digest {result.digest}",
        (
            f"virtual {result.virtual_seconds:.0f} s, wall {wall:.1f} s, "
            f"cpu {1000 * cpu / tasks:.2f} ms a task, "
            f"{published.total() / tasks:.2f} messages a task"
        ),
        (
            f"attempts {len(result.recording.attempts)}, moved {len(result.recording.moved())}, "
            f"nodes {len(result.recording.nodes)}, peak {result.recording.peak_nodes()}, "
            f"node-seconds {result.node_seconds:.0f}"
        ),
        f"crashes {dict(result.crashes)}, failures {dict(result.failures)}",
        "published " + ", ".join(f"{topic} {count}" for topic, count in sorted(published.items())),
    ]
    laws = examine(result)
    lines += [
        f"{'broken' if law.broken else 'held':>6} {law.name} ({law.examined} looks)"
        + "".join(f"\n         {case}" for case in law.broken[:5])
        for law in laws.values()
    ]
    print("\n".join(lines))
    return 1 if any(law.broken for law in laws.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
