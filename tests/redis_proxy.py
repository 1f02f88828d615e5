"""The proxy that misbehaves (`deploy.chaos.proxy`) in front of a Redis, whose password goes into its own URL."""

from __future__ import annotations

from urllib.parse import urlsplit

from deploy.chaos.proxy import Proxy
from deploy.local.embedded import through


class RedisProxy(Proxy):
    """A proxy before the server of a URL (`redis://`)."""

    def __init__(self, server: str) -> None:
        parts = urlsplit(server)
        super().__init__(str(parts.hostname), parts.port or 0)
        self._server = server

    @property
    def url(self) -> str:
        """The server's, by way of this proxy."""
        return through(self.address, self._server)
