"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What the gateway is told; times in seconds."""

    token_file: Path
    """One `token [tenant]` per line; made with a fresh token (mode 0600) if absent."""
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs a TLS front: tokens travel in clear."""
    port: int = 8470
    """0 picks a free one; `Gateway.url` tells it."""
    answer_limit_seconds: float = 15.0
    """How long a submit or cancel waits for the coordinator; then 503, and a retry is harmless."""
    request_limit_seconds: float = 30.0
    """Longest work on one request that is no stream; must be above `answer_limit_seconds`."""
    store_limit_seconds: float = 10.0
    """Longest single read from the object store."""
    stream_heartbeat_seconds: float = 5.0
    """Pause after which a quiet stream reads the ledger again and sends a sign of life."""
    stream_limit_seconds: float = 3600.0
    """Life of one event stream; then it ends and the client asks again."""
    max_streams: int = 200
    """Event streams at once; further ones get 429."""
    max_connections: int = 1_000
    """Connections at once; further ones get 503 (in plain text: the server itself refuses them)."""
    max_waiting: int = 1_000
    """Submits and cancels that wait for the coordinator at once; further ones get 503."""
    token_reload_seconds: float = 30.0
    """How often the token file is read anew: a removed token works at most this long."""
    stop_limit_seconds: float = 5.0
    """How long requests in flight may take to end when the gateway stops."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port {self.port} is none; give 0 … 65535")
        if self.answer_limit_seconds >= self.request_limit_seconds:
            raise ValueError("request_limit_seconds must be above answer_limit_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig(GatewayConfig):
    """Where a gateway that runs as a process of its own finds what it needs.

    Read from a file and `SPRINGTIDE_GATEWAY_<FIELD>` variables; the embedded stack hands adapters
    over instead.
    """

    amqp_url: str = ""
    database_url: str = ""
    store_dir: Path | None = None
    """Directory of the object store."""

    def policy(self) -> GatewayConfig:
        """The settings of the service itself."""
        return GatewayConfig(
            **{item.name: getattr(self, item.name) for item in fields(GatewayConfig)}
        )
