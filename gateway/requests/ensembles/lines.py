"""The order of the requests to one ensemble's sequence, as this gateway sends them. Pure.

The steps of a sequence reach an ensemble in order, but a stateless step in front may be answered out of order. So a
request sends a stateful step only after the request ahead of it has sent the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable


class LinePlace:
    """One request's place in its line.

    passed   stateful steps that it has sent
    waiting  stateful steps that it is to send -> what sends them
    then     what is to be done when it and all requests ahead of it are over
    """

    __slots__ = ("ahead", "behind", "passed", "then", "waiting")

    def __init__(self, ahead: LinePlace | None) -> None:
        self.ahead = ahead
        self.behind: LinePlace | None = None
        self.passed: set[int] = set()
        self.waiting: dict[int, Callable[[], None]] = {}
        self.then: list[Callable[[], None]] = []

    def take(self, index: int, send: Callable[[], None]) -> None:
        """Sends the step, now or as soon as the request ahead has sent its own. `send` must not call back in here."""
        self.waiting[index] = send
        self.release(index)

    def release(self, index: int) -> None:
        """Sends the step, here and behind, as far as its place has come."""
        place: LinePlace | None = self
        # A loop, because a line may be long.
        while place is not None and index in place.waiting and (place.ahead is None or index in place.ahead.passed):
            place.passed.add(index)
            place.waiting.pop(index)()
            place = place.behind

    def when_first(self, act: Callable[[], None]) -> None:
        """Acts when no request is ahead any more, though this one be over by then."""
        if self.ahead is None:
            act()
        else:
            self.ahead.then.append(act)

    def leave(self) -> None:
        """Takes a request that is over out of its line: those behind it move up."""
        ahead, behind = self.ahead, self.behind
        if ahead is not None:
            ahead.behind = behind
            ahead.then += self.then
        else:
            for act in self.then:
                act()
        if behind is not None:
            behind.ahead = ahead
            for index in list(behind.waiting):
                behind.release(index)


class StepLines:
    """The lines of this gateway, by sequence."""

    def __init__(self) -> None:
        self._last: dict[Hashable, LinePlace] = {}

    def __len__(self) -> int:
        return len(self._last)

    def join(self, sequence: Hashable) -> LinePlace:
        """A place at the end of the sequence's line."""
        ahead = self._last.get(sequence)
        place = self._last[sequence] = LinePlace(ahead)
        if ahead is not None:
            ahead.behind = place
        return place

    def leave(self, sequence: Hashable, place: LinePlace) -> None:
        """The request of this place is over."""
        if self._last.get(sequence) is place:
            if place.ahead is None:
                del self._last[sequence]
            else:
                self._last[sequence] = place.ahead
        place.leave()
