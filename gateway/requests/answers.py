"""The answers of one request, one after the other: of a decoupled model any number, of another model one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from gateway.bounds.unread_answers import answer_bytes
from gateway.requests.infer_call import InferCall
from gateway.requests.inference import Inference
from gateway.requests.waiting import Answer, OpenRequest
from shared.contract.errors import MeshError, UnavailableError

UNTAKEN_BYTES_MAX = 64 << 20
"""Bytes of answers of one request that its client has not taken. Beyond it the request fails, unless they are of one
answer: its client has had no time to take that."""
TOO_SLOW = "the client takes the answers too slowly: those that wait for it have reached the gateway's bound"


def answers_of(inference: Inference, call: InferCall, client: str) -> AsyncGenerator[Answer | MeshError]:
    """Submits a request at once. Gives its answers one at a time, and an error in the place of one.

    Closing the generator before its end, or cancelling it, means that the client has left.
    """
    return RequestAnswers(inference, call, client).each()


class RequestAnswers:
    """The answers of one request that its client has not taken. The request is sent at once."""

    def __init__(self, inference: Inference, call: InferCall, client: str) -> None:
        self._untaken: deque[Answer | MeshError] = deque()
        self._bytes = 0
        self._unread = inference.unread
        self._news = asyncio.Event()
        self._request: OpenRequest | None = None
        self._last = inference.submit(call, on_open=self._opened, client=client)
        self._last.add_done_callback(lambda _: self._news.set())

    def _opened(self, request: OpenRequest) -> None:
        if request.is_many:
            self._request = request
            request.take = self._take

    def _take(self, content: Answer | MeshError) -> None:
        self._untaken.append(content)
        self._bytes += size_of(content)
        self._unread.add(self, size_of(content), self._too_slow)
        self._news.set()
        if len(self._untaken) > 1 and (self._bytes > UNTAKEN_BYTES_MAX or self._unread.is_beyond(self)):
            self._too_slow()

    def _too_slow(self) -> None:
        # Its client may never read, and so never come to an end: what waits for it goes now.
        self._untaken.clear()
        self._unread.took(self, self._bytes)
        self._bytes = 0
        if self._request is not None:
            self._request.failed(UnavailableError(TOO_SLOW))

    async def each(self) -> AsyncGenerator[Answer | MeshError]:
        """See `answers_of`."""
        try:
            while True:
                while self._untaken:
                    content = self._untaken.popleft()
                    size = size_of(content)
                    self._bytes -= size
                    self._unread.took(self, size)
                    yield content.released() if isinstance(content, MeshError) else content
                if self._last.done():
                    break
                self._news.clear()
                await self._news.wait()
            last = self._result()
            # A last answer may have nothing to give: it only says that no other follows.
            if isinstance(last, MeshError) or not last.message.empty:
                yield last
        finally:
            self._unread.took(self, self._bytes)
            self._last.cancel()
            # In a cycle, the request's inputs would wait for the collector.
            self._request = None

    def _result(self) -> Answer | MeshError:
        try:
            return self._last.result()
        except MeshError as error:
            return error.released()


def size_of(content: Answer | MeshError) -> int:
    return answer_bytes(() if isinstance(content, MeshError) else content.message.outputs)
