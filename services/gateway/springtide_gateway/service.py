"""The gateway: an HTTP server and three readers of the bus under one roof."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import uvicorn

from springtide_gateway.config import GatewayConfig
from springtide_gateway.desk import Desk, TenantBus
from springtide_gateway.feeds import ClusterBoard, JobFeed
from springtide_gateway.http import Parts, build_app
from springtide_gateway.tokens import TokenTable, ensure_tokens, read_tokens
from springtide_shared.errors import InvalidFieldError, PermanentError, TransientError
from springtide_shared.messages.cluster import Capacity, Credit, Usage
from springtide_shared.messages.job import JobEvents
from springtide_shared.ports.bus import Delivery, Subscription
from springtide_shared.ports.clock import Clock, Ids
from springtide_shared.ports.ledger import Ledger
from springtide_shared.ports.store import ObjectStore
from springtide_shared.runtime.service import Loop, Service, backoff

_BACKLOG: Final = 256


class _Server(uvicorn.Server):
    """Leaves signals alone: the process that runs the services owns them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Gateway(Service):
    """See the README. `url` is known once `start` has run; the port is bound there."""

    name = "gateway"

    def __init__(
        self,
        *,
        bus: TenantBus,
        ledger: Ledger,
        store: ObjectStore,
        clock: Clock,
        ids: Ids,
        config: GatewayConfig,
    ) -> None:
        super().__init__(bus=bus, clock=clock, ids=ids)
        self.config = config
        self._socket: socket.socket | None = None
        self._desk = Desk(
            bus, ids, limit=config.answer_limit_seconds, max_waiting=config.max_waiting
        )
        self._feed = JobFeed(config.max_streams)
        self._board = ClusterBoard()
        self._parts = Parts(
            config=config,
            ledger=ledger,
            store=store,
            clock=clock,
            ids=ids,
            desk=self._desk,
            feed=self._feed,
            board=self._board,
            tokens=TokenTable(()),
            health=self.health,
        )

    @property
    def url(self) -> str:
        """`http://host:port` as it really listens.

        Raises:
            PermanentError: it does not listen (yet).
        """
        if self._socket is None:
            raise RuntimeError("the gateway has not been started")
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Read the tokens and bind the port, so that a taken one is told at once.

        Raises:
            InvalidFieldError: the port is taken or may not be bound, or the token file is no good.
        """
        self._parts.tokens = ensure_tokens(self.config.token_file)
        self._socket = _bound(self.config.host, self.config.port)
        self.log.info("gateway.listening", url=self.url)

    def loops(self) -> Sequence[tuple[str, Loop]]:
        """The HTTP server, the readers of the bus, the reload of the tokens."""
        events = Subscription(queue="gateway.job-events", types=(JobEvents,), durable=False)
        snapshots = Subscription(
            queue="gateway.snapshots", types=(Capacity, Usage, Credit), durable=False
        )
        return (
            ("http", self._serve_http),
            ("answers", self._read_answers),
            self.consumer(events, self._on_events),
            self.consumer(snapshots, self._on_snapshots),
            self.timer("tokens", self.config.token_reload_seconds, self._reload_tokens),
        )

    def not_ready(self) -> Sequence[str]:
        """Why submits cannot be answered now."""
        return () if self._desk.is_open else ("answers cannot reach the gateway",)

    async def _serve_http(self) -> None:
        assert self._socket is not None
        self._me("http").idle = True  # at a stop it is cancelled, and drains by itself
        server = _Server(
            uvicorn.Config(
                build_app(self._parts),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                backlog=_BACKLOG,
                limit_concurrency=self.config.max_connections,
                timeout_graceful_shutdown=max(1, round(self.config.stop_limit_seconds)),
            )
        )
        serving = asyncio.create_task(
            server.serve(sockets=[self._socket]), name=f"{self.name}/http-server"
        )
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            self._feed.close()
            server.should_exit = True
            if not self._stopping:
                serving.cancel()
            await asyncio.wait([serving], timeout=self.config.stop_limit_seconds + 2)
            raise
        finally:
            if not serving.done():
                serving.cancel()
                await asyncio.wait([serving])
            self._socket.close()

    async def _read_answers(self) -> None:
        self._me("answers").idle = True
        failures = 0
        while not self._stopping:
            try:
                await self._desk.read_answers()
            except TransientError as error:
                failures += 1
                self.log.warning("answers.lost", error=str(error))
                await asyncio.sleep(backoff(failures, self.ids, most=30.0))

    async def _on_events(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            message = delivery.message
            if isinstance(message, JobEvents):
                self._feed.take(message)
            await delivery.ack()

    async def _on_snapshots(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self._board.take(delivery.message)
            await delivery.ack()

    async def _reload_tokens(self) -> None:
        try:
            self._parts.tokens = read_tokens(self.config.token_file)
        except PermanentError as error:
            # Half-written or gone: the tokens known so far go on, a person has to look.
            self.log.error("tokens.unreadable", error=str(error))


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise InvalidFieldError(
            "port", f"{host}:{port}", f"{error.strerror}; end what listens there or set port"
        ) from error
    return bound
