"""The part of RabbitMQ's management API that tests and people need, over plain HTTP.

Blocking on purpose: it is called from fixtures and from a thread beside the code under test, so
that it works while the event loop is what is being tested.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64encode
from typing import Any

from springtide_testbed.errors import TestbedError

_LIMIT_SECONDS = 10.0


class ManagementError(TestbedError):
    """The management API refused a call, or could not be reached."""


class Management:
    """A client of one broker's management API."""

    def __init__(self, url: str) -> None:
        """``url`` with the credentials in it, as ``RABBITMQ_MANAGEMENT_URL`` has them."""
        self.url = url
        parts = urllib.parse.urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        self._base = f"{parts.scheme}://{host}{parts.path.rstrip('/')}/api/"
        self._user = urllib.parse.unquote(parts.username or "guest")
        secret = urllib.parse.unquote(parts.password or "guest")
        self._authorization = "Basic " + b64encode(f"{self._user}:{secret}".encode()).decode()
        # No proxy of the environment: the API is on loopback or in the same network.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def call(self, method: str, *path: str, body: object = None) -> Any:
        """One request; ``path`` segments are escaped here. Returns the decoded answer or None.

        Raises ManagementError with the API's own reason.
        """
        address = self._base + "/".join(urllib.parse.quote(segment, safe="") for segment in path)
        request = urllib.request.Request(
            address,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": self._authorization, "Content-Type": "application/json"},
        )
        try:
            with self._opener.open(request, timeout=_LIMIT_SECONDS) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                reason = error.read().decode(errors="replace")[:500]
            raise ManagementError(
                f"{method} {'/'.join(path)} was refused with {error.code}: {reason}"
            ) from error
        except OSError as error:
            raise ManagementError(f"{method} {'/'.join(path)} failed: {error}") from error
        return json.loads(content) if content else None

    def is_ready(self) -> bool:
        """Whether the API answers and the broker holds no alarm."""
        try:
            self.call("GET", "health", "checks", "alarms")
        except ManagementError:
            return False
        return True

    def version(self) -> str:
        """The broker's version."""
        return str(self.call("GET", "overview")["rabbitmq_version"])

    def create_vhost(self, name: str) -> None:
        """Make a virtual host where this client's user may do everything."""
        self.call("PUT", "vhosts", name, body={})
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        self.call("PUT", "permissions", name, self._user, body=everything)

    def delete_vhost(self, name: str) -> None:
        """Remove a virtual host with all its queues; its connections are closed by the broker."""
        self.call("DELETE", "vhosts", name)

    def connections(self, vhost: str) -> list[str]:
        """Names of the open connections of a virtual host.

        The broker tells of a new connection up to its statistics interval late (1 s here).
        """
        return [str(c["name"]) for c in self.call("GET", "vhosts", vhost, "connections")]

    def close_connections(self, vhost: str) -> int:
        """Force-close every connection the API knows of in a virtual host; returns how many."""
        closed = 0
        for name in self.connections(vhost):
            try:
                self.call("DELETE", "connections", name)
            except ManagementError as error:
                if not isinstance(error.__cause__, urllib.error.HTTPError):
                    raise
                if error.__cause__.code != 404:  # closed by itself since it was listed
                    raise
            else:
                closed += 1
        return closed

    def queues(self, vhost: str) -> dict[str, dict[str, Any]]:
        """The queues of a virtual host by name, as the API describes them."""
        return {str(queue["name"]): queue for queue in self.call("GET", "queues", vhost)}
