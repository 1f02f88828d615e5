"""The bytes of requests that a gateway holds: while they are received, and until they are answered.

A body whose length is announced counts at once; a body without a length counts as it arrives. When a request is
admitted, the bytes of its body become the bytes of its input tensors, in the same turn of the loop. A request that does
not fit is refused at once: requests that were accepted before are never dropped for it.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from gateway.bounds.memory import MemoryBound
from shared.contract.errors import Code, RequestError, UnavailableError


class ByteBudget:
    """How many bytes of requests a gateway holds.

    bytes_max  a request beyond it is refused
    memory     while it is full, every request is refused
    """

    def __init__(self, bytes_max: int, memory: MemoryBound | None = None) -> None:
        self.bytes_max = bytes_max
        self.taken = 0
        self.decoding = asyncio.Lock()
        """Held while something bulky is decoded beside the loop: decoding takes many times its size."""
        self._memory = memory or MemoryBound()

    def take(self, size: int, *, own: int = 0) -> None:
        """Takes bytes, to be given back once; `own` of what is taken are this request's already.

        raises  UnavailableError when they do not fit. A request larger than the whole budget is taken when it is alone
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
        """Bytes that were taken."""
        self.taken -= size

    def reserve(self) -> Reservation:
        """For a body that is about to be received."""
        return Reservation(self)


class Reservation:
    """The bytes that one body has taken of the budget. A context manager: its exit gives all of them back."""

    __slots__ = ("_budget", "_size")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._size = 0

    def hold(self, size: int) -> None:
        """From now on it takes at least so many bytes. Raises UnavailableError (see `ByteBudget.take`)."""
        if size > self._size:
            self._budget.take(size - self._size, own=self._size)
            self._size = size

    def hold_decoded(self, size: int, weight: int) -> None:
        """As `hold`, of bytes that are about to be decoded, which takes `weight` more of them for a while.

        raises  RequestError where that would be more than the whole budget
        """
        if weight > self._budget.bytes_max:
            raise RequestError(
                f"the request's {size} bytes may take {weight} more to decode, and the gateway has room for "
                f"{self._budget.bytes_max} (--max-bytes-in-flight): send its tensors as binary data",
                Code.RESOURCE_EXHAUSTED,
            )
        self.hold(size + weight)

    def leave(self) -> None:
        """Gives everything back."""
        self._budget.give_back(self._size)
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.leave()
