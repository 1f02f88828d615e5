"""Who reads what a process writes. A service must not stand still because a terminal was stopped with Ctrl-S, or what
collects its log hangs: its leases would end.
"""

from __future__ import annotations

import io
import os
import select
import sys
from typing import Any

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


class PatientFile(io.RawIOBase):
    """A descriptor that others print to. What nobody reads is dropped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._reader = Reader(descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = memoryview(data)
        return os.write(self._descriptor, piece[:PIECE_BYTES]) if self._reader.is_reading() else len(piece)


def print_patiently() -> None:
    """From now on no `print` waits for a reader that does not read. For processes that run a model's code, which may
    print whatever it likes; what its libraries write without Python is not covered.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            buffer = io.BufferedWriter(PatientFile(stream.fileno()))
            patient = io.TextIOWrapper(buffer, stream.encoding, stream.errors)
            patient.reconfigure(line_buffering=stream.line_buffering, write_through=stream.write_through)
            setattr(sys, name, patient)
