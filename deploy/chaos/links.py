"""Runs the proxies (`proxy.py`) in a process of their own, so that they do not compete with the clients' event loop.

Each proxy has a name: `REDIS`, or a gateway's protocol (`gateway_link`).
"""

from __future__ import annotations

import asyncio
import signal
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from typing import Any, Self

import uvloop

from deploy.chaos.proxy import Proxy

REDIS = "redis"


def gateway_link(number: int, protocol: str) -> str:
    """The name of the proxy in front of a gateway's protocol. number: from 0."""
    return f"gateway {number} {protocol}"


class Proxies:
    """The proxies, in the other process."""

    def __init__(self) -> None:
        self._proxies: dict[str, Proxy] = {}

    def listen(self, name: str, host: str, port: int) -> str:
        """A new proxy in front of an address; returns its own, host:port."""
        proxy = Proxy(host, port, new_loop=uvloop.new_event_loop)
        self._proxies[name] = proxy.__enter__()
        return proxy.address

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        """Calls a method of that proxy."""
        return getattr(self._proxies[name], method)(*arguments)

    def close(self) -> None:
        """Ends all proxies."""
        for proxy in self._proxies.values():
            proxy.__exit__()


class Manager(BaseManager):
    """Runs `Proxies` in another process."""


Manager.register("Proxies", Proxies, exposed=("listen", "call", "close"))


def prepare() -> None:
    """Prepares the other process: it ignores Ctrl-C, which only the main process handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Links:
    """All proxies. A context manager: the process lives as long as the block."""

    def __init__(self) -> None:
        # Spawned, because forking a process with threads is unsafe.
        self._manager = Manager(ctx=get_context("spawn"))
        self._proxies: Any = None

    def __enter__(self) -> Self:
        self._manager.start(prepare)
        self._proxies = getattr(self._manager, "Proxies")()  # noqa: B009 -- made by `register`
        return self

    def __exit__(self, *_: object) -> None:
        self._proxies.close()
        self._manager.shutdown()

    def listen(self, name: str, host: str, port: int) -> str:
        """See `Proxies`."""
        return self._proxies.listen(name, host, port)

    async def call(self, name: str, method: str, *arguments: Any) -> Any:
        """Calls a method of that proxy, in a thread: it takes effect before this returns."""
        return await asyncio.to_thread(self._proxies.call, name, method, *arguments)
