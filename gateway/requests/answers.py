"""The answers of one request, one after the other: of a decoupled model any number, of another model one.

Whoever takes them closes them, too:

    answers = RequestAnswers(inference, call, connection)
    try:
        async for answer in answers:
            ...  # answer.content is an Answer or a MeshError; the last one has answer.is_last
    finally:
        answers.close()
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from gateway.bounds.unread_answers import answer_bytes
from gateway.requests.infer_call import InferCall
from gateway.requests.inference import Inference
from gateway.requests.orphans import ConnectionSequences
from gateway.requests.waiting import Answer, OpenRequest
from shared.contract.errors import MeshError, UnavailableError

UNTAKEN_BYTES_MAX = 64 << 20
"""Bytes of answers of one request that its client has not taken. Beyond it the request fails."""
TOO_SLOW = "the client takes the answers too slowly: those that wait for it have reached the gateway's bound"


class OneAnswer(msgspec.Struct, frozen=True):
    """One answer, or the error in its place. is_last: no other follows.

    A last answer may have nothing to give (`content.message.empty`): it only says that no other follows.
    """

    content: Answer | MeshError
    is_last: bool


class RequestAnswers:
    """The answers of one request, which is sent at once. See above.

    Cancelling the iteration, or `close` before the last answer, means that the client has left.
    """

    def __init__(self, inference: Inference, call: InferCall, connection: ConnectionSequences | None = None) -> None:
        self._taken: deque[OneAnswer] = deque()
        self._bytes = 0
        self._unread = inference.unread
        self._news = asyncio.Event()
        self._last = inference.submit(call, connection, self._opened)
        self._last.add_done_callback(lambda _: self._news.set())

    def _opened(self, request: OpenRequest) -> None:
        if not request.is_many:
            return

        def take(content: Answer | MeshError) -> None:
            self._taken.append(OneAnswer(content, is_last=False))
            self._bytes += size_of(content)
            self._unread.add(self, size_of(content), too_slow)
            self._news.set()
            if self._bytes > UNTAKEN_BYTES_MAX or (len(self._taken) > 1 and self._unread.is_beyond(self)):
                too_slow()

        def too_slow() -> None:
            request.failed(UnavailableError(TOO_SLOW))

        request.take = take

    async def __aiter__(self) -> AsyncIterator[OneAnswer]:
        while True:
            while self._taken:
                one = self._taken.popleft()
                size = size_of(one.content)
                self._bytes -= size
                self._unread.took(self, size)
                yield one
            if self._last.done():
                break
            self._news.clear()
            await self._news.wait()
        try:
            content: Answer | MeshError = self._last.result()
        except MeshError as error:
            content = error
        yield OneAnswer(content, is_last=True)

    def close(self) -> None:
        """The client takes no further answer."""
        self._unread.took(self, self._bytes)
        self._last.cancel()


def size_of(content: Answer | MeshError) -> int:
    return answer_bytes(() if isinstance(content, MeshError) else content.message.outputs)
