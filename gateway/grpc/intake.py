"""Receives the messages of gRPC calls within bounds: of the process's memory, and of what they unpack and decode to.

Receiving. Until the gateway asks for a message, the transport receives no more of it than a stream's window. Then the
transport receives all of it, up to the port's largest size, and does not show its progress. So the gateway asks freely
while the process is far from its memory bound (`gateway.bounds.memory`). Near the bound, the connections with the most
undelivered bytes lose their calls (`gateway.grpc.arrivals`). At the bound, no request is received.

Unpacking. The transport would unpack compressed messages before their bytes could be counted, so it is told not to.
Whether a message is compressed shows in its first byte. No message of the protocols begins like gzip's or zlib's data,
which would be the tags of a field 3 with an unknown wire type and of a field 15.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import DecodeError

from gateway.bounds.byte_budget import ByteBudget
from gateway.bounds.clients import PATIENCE_S, SLOWEST_BYTES_S
from gateway.bounds.inflate import EITHER_WINDOW, gathered, inflated
from gateway.bounds.memory import MemoryBound
from gateway.grpc.arrivals import END_OF_REQUESTS, Arrivals
from gateway.grpc.pb import AnyMessage, Context
from gateway.grpc.weight import CARRIED, decoding_bytes
from shared.contract.errors import Code, MeshError, RequestError

SMALL_BYTES = 64 << 10
"""A message up to this size is decoded without counting the memory that decoding takes."""
PLAIN_BYTES_MAX = 1 << 20
"""Largest message that is neither an inference request nor a load request."""
PACKED = frozenset({b"\x1f", b"\x78"})
"""First byte of gzip's and of zlib's data."""


class Intake:
    """Receives the messages of one port.

    message_bytes_max  largest message, unpacked
    patience_s         how long a unary call's message may take to come. The gateway does not see how much of it has
                       come, so the time is that of the largest message for all
    """

    def __init__(self, budget: ByteBudget, memory: MemoryBound, arrivals: Arrivals, *, message_bytes_max: int) -> None:
        self._budget = budget
        self._memory = memory
        self._arrivals = arrivals
        self._message_bytes_max = message_bytes_max
        self.patience_s = PATIENCE_S + message_bytes_max / SLOWEST_BYTES_S

    async def only_message(self, context: Context, kind: Any) -> AnyMessage:
        """The message of a unary call.

        kind    the message's class
        raises  UnavailableError when there is no memory for it; RequestError when it is malformed or too large. A call
                whose message does not come is ended by `Arrivals`
        """
        if self._memory.is_full and kind.DESCRIPTOR.name in CARRIED:
            raise self._memory.refusal()
        raw = await self._arrivals.read(context, self.patience_s)
        if raw is END_OF_REQUESTS:
            raise RequestError(f"failed to parse the request: there is no {kind.DESCRIPTOR.full_name}")
        return decoded(raw, kind) if is_small(raw) else await self._large_message(raw, kind)

    def messages(self, context: Context, kind: Any) -> Callable[[], Awaitable[AnyMessage]]:
        """Reads the messages of a stream: each call returns the next one, or END_OF_REQUESTS.

        Waits while memory is full. Raises as `only_message`.
        """

        async def next_message() -> AnyMessage:
            if self._memory.is_full:
                await self._memory.eased()
            raw = await self._arrivals.read(context)
            if raw is END_OF_REQUESTS:
                return raw
            return decoded(raw, kind) if is_small(raw) else await self._large_message(raw, kind)

        return next_message

    async def _large_message(self, raw: bytes, kind: Any) -> AnyMessage:
        """A message that must be counted while it is unpacked or decoded."""
        with self._budget.reserve() as reservation:
            reservation.hold(len(raw))
            if raw[:1] in PACKED:
                pieces = inflated(raw, EITHER_WINDOW, self._message_bytes_max, self._too_large)
                raw = await gathered(pieces, len(raw), reservation)
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


def is_small(raw: bytes) -> bool:
    """Whether a message is as the client wrote it, and takes little memory to decode."""
    return len(raw) <= SMALL_BYTES and raw[:1] not in PACKED


def decoded(raw: bytes, kind: Any) -> AnyMessage:
    """Parses a message. Raises RequestError."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        error = RequestError(f"failed to parse the request: the message is no {kind.DESCRIPTOR.full_name}")
    # Raised outside the handler, so that it does not chain the DecodeError and its frames.
    raise error
