"""The bytes of requests that a gateway holds: while they are received, and until they are answered.

What is announced counts at once, what is not as it arrives. A body's bytes become those of its input tensors when the
request is admitted, in the same turn of the loop. Whoever asks for more than there is is refused at once, and nothing
that was accepted before makes room for it.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from gateway.bounds.memory import Memory
from shared.contract.errors import Code, RequestError, UnavailableError


class Room:
    """A gateway's room for requests.

    bytes_max  at the bound callers are refused
    memory     likewise while it is full
    """

    def __init__(self, bytes_max: int, memory: Memory | None = None) -> None:
        self.bytes_max = bytes_max
        self.taken = 0
        self.decoding = asyncio.Lock()
        """Held by who decodes something bulky beside the loop: that takes many times its size."""
        self._memory = memory or Memory()

    def take(self, size: int, *, own: int = 0) -> None:
        """Takes bytes, to be given back once; `own` of what is taken are this request's already.

        raises  UnavailableError when there is no room. One that is larger than all of it is taken when it is alone
        """
        if self._memory.is_full:
            raise self._memory.refusal()
        others = self.taken - own
        if others and self.taken + size > self.bytes_max:
            raise UnavailableError(
                f"the gateway has requests of {others} bytes in flight, of at most {self.bytes_max}, and this one has "
                f"{own + size}: try again later"
            )
        self.taken += size

    def give_back(self, size: int) -> None:
        """Of what was taken."""
        self.taken -= size

    def place(self) -> Place:
        """For a body that is about to be received."""
        return Place(self)


class Place:
    """What one body has taken of the room; left as a context it gives all of it back."""

    __slots__ = ("_room", "_size")

    def __init__(self, room: Room) -> None:
        self._room = room
        self._size = 0

    def hold(self, size: int) -> None:
        """From now on it takes at least so many bytes. Raises UnavailableError (see `Room.take`)."""
        if size > self._size:
            self._room.take(size - self._size, own=self._size)
            self._size = size

    def hold_decoded(self, size: int, weight: int) -> None:
        """As `hold`, of bytes that are about to be decoded, which takes `weight` more of them for a while.

        raises  RequestError where that would be more than all of the room
        """
        if weight > self._room.bytes_max:
            raise RequestError(
                f"the request's {size} bytes may take {weight} more to decode, and the gateway has room for "
                f"{self._room.bytes_max} (--max-bytes-in-flight): send its tensors as binary data",
                Code.RESOURCE_EXHAUSTED,
            )
        self.hold(size + weight)

    def leave(self) -> None:
        """Gives everything back."""
        self._room.give_back(self._size)
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.leave()
