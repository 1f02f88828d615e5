"""Who reads what a process writes. A service must not stand still because a terminal was stopped with Ctrl-S, or what
collects its log hangs: its leases would end.
"""

from __future__ import annotations

import select

READER_WAIT_S = 1.0
"""How long a reader that does not read is waited for: shorter than leases are."""
PIECE_BYTES = select.PIPE_BUF
"""So much can be written without waiting where `Reader.is_reading`."""


class Reader:
    """The other end of a pipe, a terminal, or a file, which always reads."""

    def __init__(self, descriptor: int) -> None:
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._is_reading = True

    def is_reading(self) -> bool:
        """Whether it takes the next bytes. One that has stopped is waited for once, and then not before it reads again.

        True, too, of one that has gone: who writes hears of it.
        """
        self._is_reading = bool(self._poll.poll(1000 * READER_WAIT_S if self._is_reading else 0))
        return self._is_reading
