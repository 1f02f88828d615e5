"""Bounds the bytes of requests that a gateway holds, from their first byte until they are answered.

A body with an announced length counts at once; a body without one counts as it arrives. When a request is admitted, its
count changes from the bytes of its body to the bytes of its input tensors, in one turn of the event loop.

A request that does not fit is refused at once. Requests that were accepted before are never dropped for it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from gateway.bounds.fair_lock import FairLock
from gateway.bounds.memory import MemoryBound
from shared.contract.errors import Code, RequestError, UnavailableError

SMALL_BYTES = 16 << 10
"""A request up to this size may take what is left of the bound, a larger one must leave an eighth of the bound. So
bodies that are announced and do not come, and large requests that wait, keep no ordinary step out."""


class ByteBudget:
    """Counts the bytes of requests that a gateway holds.

    bytes_max  bound; a request that does not fit is refused
    memory     while it is full, every request is refused
    """

    def __init__(self, bytes_max: int, memory: MemoryBound | None = None) -> None:
        self.bytes_max = bytes_max
        self.taken = 0
        self.decoding = FairLock()
        """Held while something large is decoded in a thread. Decoding takes many times its size: one goes at a time."""
        self._memory = memory or MemoryBound()

    def take(self, size: int, *, own: int = 0) -> None:
        """Takes `size` bytes of the budget; the caller gives them back exactly once.

        own     bytes of the budget that this request has taken already
        raises  UnavailableError when the bytes do not fit. A request larger than the whole budget is taken if it is the
                only one
        """
        if self._memory.is_full:
            raise self._memory.refusal()
        others = self.taken - own
        most = self.bytes_max if own + size <= SMALL_BYTES else self.bytes_max - self.bytes_max // 8
        if others and self.taken + size > most:
            raise UnavailableError(
                f"the gateway has requests of {others} bytes in flight, of at most {most}, and this one has "
                f"{own + size}: try again later"
            )
        self.taken += size

    def add(self, size: int) -> None:
        """Takes bytes that must be held whatever the bound, because their request was let in. They are given back."""
        self.taken += size

    def give_back(self, size: int) -> None:
        self.taken -= size

    def reserve(self) -> Reservation:
        """A reservation, still empty, for a body that is about to be received."""
        return Reservation(self)


class Reservation:
    """The part of the budget that one body has taken. A context manager: its exit gives all of it back."""

    __slots__ = ("_budget", "_size")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._size = 0

    def hold(self, size: int) -> None:
        """Grows the reservation to at least `size` bytes. Raises UnavailableError (see `ByteBudget.take`)."""
        if size > self._size:
            self._budget.take(size - self._size, own=self._size)
            self._size = size

    def hold_decoded(self, size: int, weight: int) -> None:
        """Grows the reservation to `size` bytes and the `weight` bytes that decoding them takes for a while.

        raises  RequestError when `weight` is more than the whole budget; otherwise as `hold`
        """
        if weight > self._budget.bytes_max:
            raise RequestError(
                f"the request's {size} bytes may take {weight} more to decode, and the gateway has room for "
                f"{self._budget.bytes_max} (--max-bytes-in-flight): send its tensors as binary data",
                Code.RESOURCE_EXHAUSTED,
            )
        self.hold(size + weight)

    def leave(self) -> None:
        self._budget.give_back(self._size)
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.leave()
