"""structlog as JSON lines on stderr: events with fields, never sentences, never secrets."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any, Final, TextIO

import structlog

_URL_PASSWORD: Final = re.compile(r"(?P<head>[a-z0-9+]+://[^:/@\s]*):[^@/\s]+@", re.IGNORECASE)
_SECRET_FIELDS: Final = ("password", "secret", "token", "credential", "authorization")


def redact(text: str) -> str:
    """The text with passwords of URLs taken out."""
    return _URL_PASSWORD.sub(r"\g<head>:***@", text)


def _without_secrets(_logger: Any, _name: str, event: dict[str, Any]) -> dict[str, Any]:
    for key, value in event.items():
        if any(word in key.lower() for word in _SECRET_FIELDS):
            event[key] = "***"
        elif isinstance(value, str):
            event[key] = redact(value)
    return event


def setup(level: str = "info", stream: TextIO | None = None) -> None:
    """Send all logging, the standard library's too, as JSON lines to `stream` (default stderr)."""
    number = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _without_secrets,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(stream or sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processor=structlog.processors.JSONRenderer()
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))
