"""Notices that a client has left while it waits for its answers."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.types import Receive

from gateway.rest.body import ClientLeftError

T = TypeVar("T")

WATCH_AFTER_S = 1.0
"""After this time the connection is watched for the client's leaving. Not before: each watch costs a task."""


class ClientWatch:
    """Watches one client inside its `with` block. When the client leaves, what is awaited for it is cancelled.

    The request is then withdrawn (`gateway.requests.cancellation`).
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._has_left = False
        self._awaited: asyncio.Future[Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        # A task that was cancelled keeps its frames, and they keep this watch: in a cycle, the answer would wait for
        # the collector.
        self._task = self._awaited = None

    async def while_present(self, awaited: asyncio.Future[T]) -> T:
        """The future's result. Raises ClientLeftError when the client leaves first, or has left already."""
        self._awaited = awaited
        if self._has_left:
            awaited.cancel()
        try:
            return await awaited
        except asyncio.CancelledError:
            # Cancelled by the watch, because the client left; otherwise this handler itself is being cancelled.
            if self._has_left:
                raise ClientLeftError("the client left before the answer came") from None
            raise

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="client watch")

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        if self._awaited is not None:
            self._awaited.cancel()
