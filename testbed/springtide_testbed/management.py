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

    def create_vhost(self, name: str, password: str) -> None:
        """Make a virtual host and a user of the same name that may do everything in it, alone.

        This client's user may too: the API shows it only virtual hosts it has permissions for.
        """
        self.call("PUT", "vhosts", name, body={})
        self.call("PUT", "users", name, body={"password": password, "tags": ""})
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        for user in (name, self._user):
            self.call("PUT", "permissions", name, user, body=everything)

    def delete_vhost(self, name: str) -> None:
        """Remove a virtual host with its queues and its user; the broker closes connections."""
        self.call("DELETE", "vhosts", name)
        self.call("DELETE", "users", name)

    def close_connections(self, user: str) -> int:
        """Force-close every connection of a user, as an operator would; returns how many.

        By user, because that list is current. The lists by virtual host and by name come from the
        statistics, which learn of a new connection seconds late.
        """
        names = self.call("GET", "connections", "username", user)
        self.call("DELETE", "connections", "username", user)
        return len(names)

    def queues(self, vhost: str) -> dict[str, dict[str, Any]]:
        """The queues of a virtual host by name, as the API describes them."""
        return {str(queue["name"]): queue for queue in self.call("GET", "queues", vhost)}
