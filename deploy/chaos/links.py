"""Runs the proxies (`proxy.py`) in a process of their own, so that they do not compete with the clients' event loop.

Each proxy has a name: `REDIS`, or a gateway's protocol (`gateway_link`).
"""

from __future__ import annotations

import asyncio
import os
import signal
from multiprocessing import active_children, get_context, resource_tracker
from multiprocessing.managers import BaseManager
from typing import Any, Self

from deploy.chaos.proxy import Proxy
from deploy.local.tether import ask_for_signal_at_parents_death

REDIS = "redis"


def gateway_link(number: int, protocol: str) -> str:
    """The name of the proxy in front of a gateway's protocol. number: from 0."""
    return f"gateway {number} {protocol}"


class Manager(BaseManager):
    """Runs the proxies in a process of their own, and calls them there."""


Manager.register("Proxy", Proxy, exposed=("listen", "close", "cut", "strand", "hold", "release", "delay"))


STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Ctrl-C and the like may reach a whole group of processes: the main one handles them."""


class Links:
    """All proxies. A context manager: the process lives as long as the block."""

    def __init__(self) -> None:
        # Spawned, because forking a process with threads is unsafe.
        self._manager: Any = Manager(ctx=get_context("spawn"))
        self._proxies: dict[str, Any] = {}

    def __enter__(self) -> Self:
        others = active_children()
        resource_tracker.ensure_running()  # before: it lets signals through when it starts
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            # The process begins with these signals blocked, and keeps them so; it dies with this one.
            self._manager.start(ask_for_signal_at_parents_death, (os.getpid(), signal.SIGKILL))
        except BaseException:
            # Interrupted through another thread: nobody will hear of its address, nor end it.
            for process in active_children():
                if process not in others:
                    process.kill()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(self, *_: object) -> None:
        for proxy in self._proxies.values():
            proxy.close()
        self._manager.shutdown()

    def listen(self, name: str, host: str, port: int) -> str:
        """A new proxy in front of an address; returns its own, host:port."""
        self._proxies[name] = self._manager.Proxy(host, port)
        return self._proxies[name].listen()

    async def call(self, name: str, method: str, *arguments: Any) -> Any:
        """Calls a method of that proxy, in a thread: it takes effect before this returns."""
        return await asyncio.to_thread(getattr(self._proxies[name], method), *arguments)
