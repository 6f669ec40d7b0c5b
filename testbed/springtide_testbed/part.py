"""The contract between the test bed and one kind of server.

A part is one module: it knows where the server's programs are, how to start them in a private
folder and how they like to be ended. Everything that is the same for all servers (parallel start,
records on disk, clean-up after a crash) is in ``bed``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from springtide_testbed.processes import ProcessId


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A part that was started: what a client needs to reach it and what is needed to end it.

    Not to be confused with "alive": the server may have died since; ask ``Testbed.status``.
    """

    part: str
    version: str
    env: Mapping[str, str]
    """Variables a client reads, for instance ``AMQP_URL``."""
    main: ProcessId
    """The server itself: what ``Testbed.kill`` kills."""
    helpers: tuple[ProcessId, ...] = ()
    """Processes beside it that outlive its death, such as the name service of RabbitMQ."""

    def save(self, path: Path) -> None:
        """Write the record whole or not at all; it holds passwords, so it is the owner's only."""
        draft = path.with_suffix(".draft")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1)
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> Running | None:
        """Read a record back; None when the part was never started here."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return cls(
            part=fields["part"],
            version=fields["version"],
            env=fields["env"],
            main=ProcessId(**fields["main"]),
            helpers=tuple(ProcessId(**helper) for helper in fields["helpers"]),
        )


class Part(Protocol):
    """One kind of server. Implementations hold settings only, no state: state is in ``home``."""

    @property
    def name(self) -> str:
        """Short and stable: the folder's name, the ``--parts`` value, the pytest marker."""
        ...

    @property
    def programs(self) -> frozenset[str]:
        """Names of every process the server may leave behind; nothing else is ever ended."""
        ...

    @property
    def port(self) -> int | None:
        """The port clients asked for by number; None when any free one does."""
        ...

    def ensure_available(self) -> None:
        """Find the server's programs, install them where that is possible.

        Raises PartUnavailableError, whose text names what is missing and the remedy.
        """
        ...

    def start(self, home: Path) -> Running:
        """Start in ``home`` and return once a client can connect.

        Called again on the same ``home`` after the server died, it starts on the same ports with
        the same data. Raises PartFailedError with the end of the server's log.
        """
        ...

    def stop(self, running: Running, *, keep_data: bool) -> None:
        """Ask the server to end and wait, within a limit. What remains is killed by the bed.

        Without ``keep_data`` the folder is removed next, so the quickest way that leaves nothing
        behind outside it is the right one.
        """
        ...
