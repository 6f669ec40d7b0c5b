"""`springtide up`: every service in one process, on a laptop, with nothing to install.

In-memory bus, SQLite ledger, directory object store, and a local cluster whose nodes are made of
this machine's cores and whose pods are real processes. What must survive the process (jobs, tasks,
results, checkpoints) is in the home directory; pods do not survive it and are run again from their
last checkpoint.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from springtide_gateway.config import GatewayConfig
from springtide_gateway.service import Gateway
from springtide_lab.local import LocalCluster, LocalGroup
from springtide_lab.local.defaults import default_groups
from springtide_lab.recorder import Recorder, Recording
from springtide_lab.stack import ClusterParts, Shared, StackConfig, seat_services
from springtide_lab.supervisor import Supervisor
from springtide_monitor.adapters.process_stats import ProcessStats
from springtide_monitor.adapters.sinks import JsonLinesSink
from springtide_shared.adapters.clock import SystemClock, SystemIds
from springtide_shared.adapters.directory_state import DirectoryState
from springtide_shared.adapters.directory_store import DirectoryStore
from springtide_shared.adapters.memory_bus import InMemoryBus, MemoryBroker
from springtide_shared.adapters.memory_state import InMemoryLeases
from springtide_shared.adapters.sql_ledger import SqlLedger
from springtide_shared.errors import PermanentError, Reason
from springtide_shared.ports.clock import Ids
from springtide_shared.runtime.config import MOST_HASTE

CLUSTER: Final = "local"
DEFAULT_PORT: Final = 8470


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedConfig:
    """What `springtide up` can be told."""

    home: Path
    """Everything that is kept: ledger, store, state, pods' directories, token."""
    port: int = DEFAULT_PORT
    """Of the gateway, on loopback; 0 picks a free one."""
    oversubscription: float = 1.0
    """How many times this machine's cores are given out. Above 1 tasks slow one another down."""
    groups: Sequence[LocalGroup] = ()
    """Node groups; empty: `default_groups`."""
    time_factor: float = 1.0
    """Divides every time constant of policy, so that hours of policy fit into a demonstration."""
    poll_seconds: float = 0.25
    """How often an agent looks at its annotations and at its program's files."""
    stack: StackConfig = field(default_factory=StackConfig)


@dataclass(slots=True)
class Embedded:
    """A running embedded stack."""

    url: str
    token_file: Path
    store: DirectoryStore
    broker: MemoryBroker
    cluster: LocalCluster
    recording: Recording
    supervisor: Supervisor


@asynccontextmanager
async def embedded(config: EmbeddedConfig) -> AsyncIterator[Embedded]:
    """The stack, running while the context is open; leaving it stops in order.

    Raises:
        PermanentError: another `springtide up` owns the home directory, or the port is taken.
    """
    home = config.home.resolve()  # pods run in directories of their own
    home.mkdir(parents=True, exist_ok=True)
    clock = SystemClock()
    lives: Counter[str] = Counter()

    def ids_for(name: str) -> Ids:
        lives[name] += 1
        return SystemIds(clock)

    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        stack.enter_context(_only_owner(home))
        ledger = await stack.enter_async_context(
            SqlLedger.open(f"sqlite:///{(home / 'ledger.sqlite').resolve()}", migrate=True)
        )
        store = DirectoryStore(home / "store")
        cluster = LocalCluster(
            name=CLUSTER,
            root=home / "cluster",
            groups=config.groups or default_groups(os.cpu_count() or 1, config.oversubscription),
            store_url=(home / "store").resolve().as_uri(),
            clock=clock,
            ids=ids_for("cluster"),
            oversubscription=config.oversubscription,
            poll_seconds=config.poll_seconds,
            time_scale=min(config.time_factor, MOST_HASTE),
        )
        await stack.enter_async_context(cluster)
        broker = MemoryBroker()
        bus = InMemoryBus(broker)
        shared = Shared(
            bus=bus,
            ledger=ledger,
            store=store,
            leases=InMemoryLeases(clock),
            clock=clock,
            ids_for=ids_for,
        )
        parts = ClusterParts(
            name=CLUSTER,
            view=cluster,
            pods=cluster,
            nodes=cluster.node_control,
            groups=cluster,
            stats=ProcessStats(cluster.pod_processes, clock),
            sink=JsonLinesSink(home / "samples.jsonl"),
            state=DirectoryState(home / "state"),
        )
        supervisor = Supervisor(ids_for("supervisor"))
        recording = Recording()
        supervisor.add(
            "recorder",
            lambda: Recorder(bus=bus, clock=clock, ids=ids_for("recorder"), recording=recording),
        )
        seat_services(supervisor, shared, [parts], config.stack.scaled(config.time_factor))
        token_file = home / "token"
        supervisor.add(
            "gateway",
            lambda: Gateway(
                bus=bus,
                ledger=ledger,
                store=store,
                clock=clock,
                ids=ids_for("gateway"),
                config=GatewayConfig(token_file=token_file, port=config.port),
            ),
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(supervisor.serve(stop), name="supervisor")
            try:
                url = await _gateway_url(supervisor)
                stack.enter_context(_endpoint(home, url, token_file))
                yield Embedded(url, token_file, store, broker, cluster, recording, supervisor)
            finally:
                stop.set()


async def run_up(config: EmbeddedConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set."""
    async with embedded(config):
        await stop.wait()


async def _gateway_url(supervisor: Supervisor, limit: float = 30.0) -> str:
    """Where the gateway listens, once it does.

    Raises:
        PermanentError: it cannot; the reason is the gateway's own (a taken port, for instance).
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit
    seat = supervisor.seats["gateway"]
    while loop.time() < deadline:
        if isinstance(seat.service, Gateway) and seat.service.health().is_ready:
            return seat.service.url
        if (error := supervisor.last_errors.get("gateway")) is not None:
            raise error
        await asyncio.sleep(0.02)
    raise PermanentError(Reason.EXPIRED, f"the gateway did not start within {limit:.0f} s")


@contextmanager
def _only_owner(home: Path) -> Iterator[None]:
    """Two stacks on one home would both run its jobs: the second is refused."""
    with (home / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise PermanentError(
                Reason.LIMIT_REACHED,
                f"another springtide (pid {file.read().strip() or 'unknown'}) runs on {home};"
                " stop it, or name another directory with SPRINGTIDE_HOME",
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def _endpoint(home: Path, url: str, token_file: Path) -> Iterator[None]:
    """Tell clients on this machine where the gateway is, for as long as it is there."""
    path = home / "endpoint.json"
    partial = path.with_suffix(".partial")
    partial.write_text(
        json.dumps({"url": url, "token_file": str(token_file.resolve()), "pid": os.getpid()})
    )
    partial.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
