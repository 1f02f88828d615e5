"""How many frames a client may send that ask for nothing. Pure: times are the loop's, in seconds.

Frames of settings, priorities and windows, pings, empty frames and those of streams that are closed cost a server as
much as frames that bring a message, and a client can send them without end. So each frame of a client uses up a part of
its connection's allowance. Calls, bytes of messages, and frames of answers, which clients acknowledge, earn more than
they use. A client that keeps to the protocol stays far from the bound.

Source: RFC 9113, section 10.5; the counters of nghttp2 (its rate limit of "glitches": 1000, and 33 a second) and of
Envoy (ten updates of windows for each frame of data).
"""

from __future__ import annotations

from h2.events import Event

FRAMES, FRAMES_PER_S = 500, 33
"""Of a connection at its begin, and what comes back to one that has fewer. Handling one takes some 10 us, and to open a
connection about a hundred times as long."""
EARNED = 10
"""By a call, by bytes of a message, by a frame of an answer."""
RESET = EARNED
"""What a call takes that its client leaves before it has sent a message: it may open as many as it likes, and leave
some hundreds of them at once."""
USEFUL_BYTES = 16
"""Fewer bytes of a message earn nothing."""


class Useless(Event):
    """The allowance of a connection is spent."""


class FrameAllowance:
    """left: how many frames more"""

    def __init__(self, now: float) -> None:
        self.left = FRAMES
        self._since = now

    def is_spent(self, now: float) -> bool:
        """Whether nothing is left, with what has come back since the last time that nothing was."""
        if self.left < 0:
            came_back = int((now - self._since) * FRAMES_PER_S)
            self._since = now
            self.left = min(FRAMES, self.left + came_back)
        return self.left < 0
