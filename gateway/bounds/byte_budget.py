"""Bounds the bytes of requests that a gateway holds, from their first byte until they are answered.

A body with an announced length counts at once; a body without one counts as it arrives. When a request is admitted, its
count changes from the bytes of its body to the bytes of its input tensors, in one turn of the event loop.

A request that does not fit is refused at once. Requests that were accepted before are never dropped for it. A client
that has nearly all of the bound is refused before others are (`gateway.bounds.client_shares`).
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from gateway.bounds.client_shares import ClientShares
from gateway.bounds.fair_lock import FairLock
from gateway.bounds.memory import MemoryBound
from shared.contract.errors import Code, RequestError, UnavailableError

SMALL_BYTES = 16 << 10
"""A request up to this size may take what is left of the bound, a larger one must leave an eighth of the bound. So
bodies that are announced and do not come, and large requests that wait, keep no ordinary step out."""


class ByteBudget:
    """Counts the bytes of requests that a gateway holds. Where a client is asked for, "" is the gateway itself.

    bytes_max  bound; a request that does not fit is refused
    memory     while it is full, every request is refused
    """

    def __init__(self, bytes_max: int, memory: MemoryBound | None = None) -> None:
        self.bytes_max = bytes_max
        self.decoding = FairLock()
        """Held while something large is decoded in a thread. Decoding takes many times its size: one goes at a time."""
        self._memory = memory or MemoryBound()
        self._shares = ClientShares()

    @property
    def taken(self) -> int:
        return self._shares.taken

    def take(self, size: int, client: str = "", *, own: int = 0) -> None:
        """Takes `size` bytes of the budget; the caller gives them back exactly once.

        own     bytes of the budget that this request has taken already
        raises  UnavailableError when the bytes do not fit. A request larger than the whole budget, or than the client's
                part of it, is taken if it is the only one, or the client's only one
        """
        if self._memory.is_full:
            raise self._memory.refusal()
        # With less than half of the budget nobody has more than its part.
        if self._shares.taken + size > self.bytes_max // 2:
            self._check(size, client, own)
        self._shares.take(client, size)

    def _check(self, size: int, client: str, own: int) -> None:
        size += own
        is_small = size <= SMALL_BYTES
        room = self.bytes_max if is_small else self.bytes_max - self.bytes_max // 8
        share = self._shares.most(client, room, is_small=is_small)
        others, of_client = self.taken - own, self._shares.of(client) - own
        for who, held, most in (("the gateway", others, room), ("this client", of_client, share)):
            if held and held + size > most:
                raise UnavailableError(
                    f"{who} has requests of {held} bytes in flight, of at most {most}, and this one has {size}: try "
                    "again later"
                )

    def add(self, size: int, client: str = "") -> None:
        """Takes bytes that must be held whatever the bound, because their request was let in. They are given back."""
        self._shares.take(client, size)

    def give_back(self, size: int, client: str = "") -> None:
        self._shares.take(client, -size)

    def reserve(self, client: str = "") -> Reservation:
        """A reservation, still empty, for a body that is about to be received."""
        return Reservation(self, client)


class Reservation:
    """The part of the budget that one body has taken. A context manager: its exit gives all of it back."""

    __slots__ = ("_budget", "_client", "_size")

    def __init__(self, budget: ByteBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._size = 0

    def hold(self, size: int) -> None:
        """Grows the reservation to at least `size` bytes. Raises UnavailableError (see `ByteBudget.take`)."""
        if size > self._size:
            self._budget.take(size - self._size, self._client, own=self._size)
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
        self._budget.give_back(self._size, self._client)
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.leave()
