"""How the messages of gRPC calls are received: while there is memory for them, unpacked and decoded within bounds.

Until a message is asked for, the transport receives no more of it than a stream's window. Then it receives all of it,
at most the largest size that the port takes, and nobody sees how far it is. So messages are asked for freely while the
process is far from its bound (`gateway.bounds.memory`); near it the connections that have sent most lose the calls
whose message is not there yet (`gateway.grpc.arrivals`), and at it no request is received.

The transport does not unpack what clients have compressed, for it would do so before anybody could count the bytes. No
message of the protocols begins as gzip's and zlib's data do (the tags of a field 3 of an unknown kind, and of a field
15), so nobody has to be asked which messages are packed.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from gateway.bounds.byte_budget import ByteBudget
from gateway.bounds.clients import PATIENCE_S, SLOWEST_BYTES_S
from gateway.bounds.inflate import EITHER_WINDOW, gathered, inflated
from gateway.bounds.memory import MemoryBound
from gateway.grpc.arrivals import END_OF_REQUESTS, Arrivals
from gateway.grpc.pb import AnyMessage
from gateway.grpc.weight import CARRIED, decoding_bytes
from shared.contract.errors import Code, MeshError, RequestError

Context = Any
"""grpc.aio.ServicerContext; its methods carry no types."""
SMALL_BYTES = 64 << 10
"""A message up to this size is decoded at once, whatever it takes for that moment."""
PLAIN_BYTES_MAX = 1 << 20
"""Largest message that is neither for inference nor brings a model."""
PACKED = frozenset({b"\x1f", b"\x78"})
"""First bytes of gzip's and of zlib's data."""


class MalformedError(RequestError):
    """A message that is none of its kind."""


class Intake:
    """Of one port.

    message_bytes_max  the largest message, unpacked
    patience_s         how long a unary call's message may take to come: the gateway does not see how much of it has
                       come, so this is the time of the largest message at the slowest pace
    """

    def __init__(self, budget: ByteBudget, memory: MemoryBound, arrivals: Arrivals, *, message_bytes_max: int) -> None:
        self._budget = budget
        self._memory = memory
        self._arrivals = arrivals
        self._message_bytes_max = message_bytes_max
        self.patience_s = PATIENCE_S + message_bytes_max / SLOWEST_BYTES_S

    async def only_message(self, context: Context, kind: Any) -> AnyMessage:
        """The message of a unary call.

        kind    its class
        raises  UnavailableError when there is no memory for it; RequestError. A call whose message does not come
                is ended from outside
        """
        if self._memory.is_full and kind.DESCRIPTOR.name in CARRIED:
            raise self._memory.refusal()
        raw = await self._arrivals.read(context, self.patience_s)
        if raw is END_OF_REQUESTS:
            raise MalformedError(f"failed to parse the request: there is no {kind.DESCRIPTOR.full_name}")
        return await self._message(raw, kind)

    async def next_message(self, context: Context, kind: Any) -> AnyMessage:
        """The next message of a stream, or END_OF_REQUESTS; while there is no memory, nothing is read. As above."""
        await self._memory.eased()
        raw = await self._arrivals.read(context)
        return raw if raw is END_OF_REQUESTS else await self._message(raw, kind)

    async def _message(self, raw: bytes, kind: Any) -> AnyMessage:
        if len(raw) <= SMALL_BYTES and raw[:1] not in PACKED:
            return decoded(raw, kind)
        with self._budget.reserve() as reservation:
            reservation.hold(len(raw))
            if raw[:1] in PACKED:
                pieces = inflated(raw, EITHER_WINDOW, self._message_bytes_max, self._too_large)
                raw = await gathered(pieces, len(raw), reservation)
            if len(raw) > SMALL_BYTES:
                name: str = kind.DESCRIPTOR.name
                if name not in CARRIED and len(raw) > PLAIN_BYTES_MAX:
                    raise MalformedError(f"{len(raw)} bytes are too many for {kind.DESCRIPTOR.full_name}")
                reservation.hold_decoded(len(raw), decoding_bytes(raw, name))
            return decoded(raw, kind)

    def _too_large(self, size: int) -> MeshError:
        return RequestError(
            f"Decompressed message larger than max ({size} vs. {self._message_bytes_max})", Code.RESOURCE_EXHAUSTED
        )


def decoded(raw: bytes, kind: Any) -> AnyMessage:
    """The message. Raises MalformedError."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        error = MalformedError(f"failed to parse the request: the message is no {kind.DESCRIPTOR.full_name}")
    raise error
