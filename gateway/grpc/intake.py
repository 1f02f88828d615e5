"""Receives the messages of calls within bounds: of the process's memory, and of what they unpack and decode to.

A call receives no more than its window before it is asked for a message; then it receives all of that message, up to
the port's largest size. So the gateway asks freely while the process is far from its memory bound
(`gateway.bounds.memory`). Near the bound, the calls that keep the largest parts of messages end
(`gateway.grpc.server`). At the bound, no request is received.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from gateway.bounds.byte_budget import ByteBudget
from gateway.bounds.inflate import EITHER_WINDOW, gathered, inflated
from gateway.bounds.memory import MemoryBound
from gateway.grpc.pb import AnyMessage
from gateway.grpc.weight import CARRIED, decoding_bytes
from gateway.grpc.wire.messages import Packed
from gateway.grpc.wire.rpc import Rpc
from shared.contract.errors import Code, MeshError, RequestError

QUICK_BYTES = 4 << 10
"""A message up to this size is decoded at once, in about 0.1 ms. The calls with larger ones take turns, because many
messages may end at one moment."""
SMALL_BYTES = 64 << 10
"""A message up to this size is decoded without counting the memory that decoding takes."""
PLAIN_BYTES_MAX = 1 << 20
"""Largest message that is neither an inference request nor a load request."""


class Intake:
    """Receives the messages of one port. message_bytes_max: largest message, unpacked"""

    def __init__(self, budget: ByteBudget, memory: MemoryBound, *, message_bytes_max: int) -> None:
        self._budget = budget
        self._memory = memory
        self._message_bytes_max = message_bytes_max

    async def only_message(self, rpc: Rpc, kind: Any) -> AnyMessage:
        """The message of a call that has one.

        kind    the message's class
        raises  UnavailableError when there is no memory for it, or it does not come; RequestError when it is malformed
                or too large
        """
        if self._memory.is_full and kind.DESCRIPTOR.name in CARRIED:
            raise self._memory.refusal()
        raw = await rpc.read(is_awaited=True)
        if raw is None:
            raise malformed("there is no", kind)
        rpc.message_bytes = len(raw)
        return decoded(raw, kind) if is_quick(raw) else await self._in_turn(rpc, raw, kind)

    async def next_message(self, rpc: Rpc, kind: Any) -> AnyMessage | None:
        """The next message of a stream, None when there is none any more.

        Waits while memory is full. Raises as `only_message`.
        """
        if self._memory.is_full:
            await self._memory.eased()
        raw = await rpc.read()
        if raw is None:
            return None
        rpc.message_bytes = len(raw)
        return decoded(raw, kind) if is_quick(raw) else await self._in_turn(rpc, raw, kind)

    async def _in_turn(self, rpc: Rpc, raw: bytes, kind: Any) -> AnyMessage:
        """A message that waits for its turn to be unpacked and decoded, and is counted meanwhile."""
        with self._budget.reserve(rpc.client) as reservation:
            reservation.hold(len(raw))
            await rpc.turn()
            if isinstance(raw, Packed):
                pieces = inflated(raw, EITHER_WINDOW, self._message_bytes_max, self._too_large)
                raw = await gathered(pieces, len(raw), reservation)
                await rpc.turn()  # A thread may have unpacked it.
                rpc.message_bytes = len(raw)
            if len(raw) > SMALL_BYTES:
                name: str = kind.DESCRIPTOR.name
                if name not in CARRIED and len(raw) > PLAIN_BYTES_MAX:
                    raise RequestError(f"{len(raw)} bytes are too many for {kind.DESCRIPTOR.full_name}")
                reservation.hold_decoded(len(raw), decoding_bytes(raw, name))
            return decoded(raw, kind)

    def _too_large(self, size: int) -> MeshError:
        return RequestError(
            f"Decompressed message larger than max ({size} vs. {self._message_bytes_max})", Code.RESOURCE_EXHAUSTED
        )


def is_quick(raw: bytes) -> bool:
    """Whether a message is as the client wrote it, and takes little time to decode."""
    return len(raw) <= QUICK_BYTES and not isinstance(raw, Packed)


def decoded(raw: bytes, kind: Any) -> AnyMessage:
    """Parses a message. Raises RequestError."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        pass
    # Raised outside the handler, so that it does not chain the DecodeError and its frames.
    raise malformed("the message is no", kind)


def malformed(what: str, kind: Any) -> RequestError:
    """The error of a message that is none, with the code that gRPC's own servers give it (grpc, doc/statuscodes.md)."""
    return RequestError(f"failed to parse the request: {what} {kind.DESCRIPTOR.full_name}", Code.INTERNAL)
