"""How signals end a process of springtide: the first asks, a later one ends, an echo is neither."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

PROGRAM: Final = """
import asyncio, sys
from springtide_shared.runtime import run

async def main(work):
    stop = asyncio.Event()
    with run.stop_on_signals(stop):
        print("ready", flush=True)
        await stop.wait()
        print("stopping", flush=True)
        await asyncio.sleep(work)
    print("done", flush=True)

run.ONE_WISH_SECONDS = float(sys.argv[1])
asyncio.run(main(float(sys.argv[2])))
"""


@contextmanager
def a_process(*, one_wish: float, work: float) -> Iterator[subprocess.Popen[str]]:
    """A process that takes `work` seconds to end after its first signal."""
    command = [sys.executable, "-c", PROGRAM, str(one_wish), str(work)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert said(process) == "ready"
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    """The next line of what it says."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("echo", [signal.SIGTERM, signal.SIGINT])
def test_an_echo_of_the_first_signal_changes_nothing(echo: signal.Signals) -> None:
    with a_process(one_wish=60.0, work=0.3) as process:
        process.send_signal(signal.SIGTERM)
        assert said(process) == "stopping"
        process.send_signal(echo)
        assert said(process) == "done"
        assert process.wait(timeout=10) == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_later_second_signal_ends_the_process_at_once(second: signal.Signals) -> None:
    with a_process(one_wish=0.05, work=60.0) as process:
        process.send_signal(signal.SIGTERM)
        assert said(process) == "stopping"
        time.sleep(0.5)
        process.send_signal(second)
        assert process.wait(timeout=10) == -second
