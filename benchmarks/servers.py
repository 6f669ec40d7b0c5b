"""Private real servers to measure against; never one from the environment, which may be in use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from springtide_testbed import Part, Testbed, TestbedError


@contextmanager
def server(part: Part, variable: str) -> Iterator[str | None]:
    """The server's URL; None, with a word on stderr, where it cannot be had."""
    bed = Testbed.owned([part])
    try:
        try:
            url = bed.up()[part.name].env[variable]
        except TestbedError as error:
            print(f"not measured: {part.name} cannot be had: {error}", file=sys.stderr)
            yield None
        else:
            yield url
    finally:
        bed.down()
