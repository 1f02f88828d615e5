"""Writes answers without keeping the event loop from others: a batch may bring many of them at one moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.types import Scope

from gateway.bounds.fair_lock import FairLock, through_in_thread
from gateway.ports.turns import LoopTurns
from gateway.rest.body import BULKY_BYTES, client_in
from gateway.rest.compression import pack

T = TypeVar("T")

SMALL_BYTES = 16 << 10
"""What is written at once: it takes about 0.1 ms."""


class Encoding:
    """Of all answers of inference over HTTP: small ones at once, others in turns, large ones in one thread."""

    def __init__(self) -> None:
        self._turns = LoopTurns()
        self._large = FairLock()

    async def of(self, scope: Scope, size: int, encode: Callable[[], T]) -> T:
        """What `encode` returns.

        scope  of the request; its client takes turns with others
        size   bytes of the tensors that are written as JSON
        """
        if size > BULKY_BYTES:
            return await self._large.in_thread(client_in(scope), encode)
        if size > SMALL_BYTES:
            await self._turns.entered(client_in(scope))
        return encode()


async def packed(content: bytes, encoding: str) -> bytes:
    """As `pack`. A thread takes 30 us of the processor, more than a small answer takes to pack. Others have a thread
    each, in which the event loop goes on."""
    return pack(content, encoding) if len(content) <= SMALL_BYTES else await through_in_thread(pack, content, encoding)
