"""Opens what the agent needs, by the pod document: the only place that names adapters."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from springtide_shared.errors import InvalidFieldError
from springtide_shared.ports.store import ObjectStore


def open_store(url: str) -> ObjectStore:
    """The object store behind `url`.

    Raises:
        InvalidFieldError: a scheme that this version does not know.
        TransientError: the store does not answer.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        from springtide_shared.adapters.directory_store import DirectoryStore

        return DirectoryStore(Path(unquote(parts.path)))
    raise InvalidFieldError("store_url", url, "give file:///… for a directory")
