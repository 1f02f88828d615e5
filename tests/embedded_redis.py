"""A real server for the tests, over TCP with a password: to be stopped, killed, started again, put behind a proxy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from deploy.chaos.node import Node


class EmbeddedRedis(Node):
    """A server alone."""

    @property
    def nodes(self) -> Sequence[Self]:
        """As of a Cluster: itself."""
        return [self]
