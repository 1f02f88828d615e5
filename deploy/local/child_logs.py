"""The log files of a mesh's processes, as the launcher reads and cuts them."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from shared.process.logs import Level, level_of_line
from shared.process.repeats import Repeats

LOG_BYTES_MAX = 32 << 20
LINE_BYTES_MAX = 1 << 16
"""A line that is longer is read in pieces: it may never end, as that of a progress bar."""
LOG_TAIL_LINES = 20
TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")


class LogFile:
    """A child's log file. The child writes it; the launcher reads it and keeps it short.

    Lines from an earlier launcher's children are kept, and not shown again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen_bytes = path.stat().st_size if path.exists() else 0
        self._first_byte = 0
        """Where the latest process began to write."""
        self._important = False
        self._repeats = Repeats()

    def open_for_child(self) -> BinaryIO:
        """The file to hand to a new process."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab")
        self._first_byte = file.tell()
        return file

    def new_important_lines(self, least: Level = Level.WARNING) -> list[str]:
        """What is as bad as that since the last call, with the indented lines (tracebacks) that follow it.

        A line that repeats is returned at growing intervals.
        """
        important: list[str] = []
        for line in self._new_lines():
            level = level_of_line(line)
            if level is not None:
                # A process that ends again and again logs the same line each time, but for the time in it.
                said = TIME.sub("", line, count=1)
                self._important = level >= least and self._repeats.suppressed(said) is not None
            elif not line.startswith(" "):
                self._important = False
            if self._important:
                important.append(line)
        return important

    def tail(self) -> str:
        """The last lines of the latest process, indented: those before it said the same, where each has failed."""
        try:
            data = self.path.read_bytes()[self._first_byte :]
        except OSError:
            data = b""
        lines = data.decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join("    " + line for line in lines) or "    (empty)"

    def _new_lines(self) -> list[str]:
        """Lines since the last call. The last one is left for the next call if it has no end yet."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._seen_bytes:  # somebody else has moved it away, or emptied it
                    self._first_byte = self._seen_bytes = 0
                file.seek(self._seen_bytes)
                data = file.read()
        except OSError:  # it is not there, or cannot be read now
            return []
        end = data.rfind(b"\n") + 1
        whole = data[:end] if len(data) - end <= LINE_BYTES_MAX else data
        self._seen_bytes += len(whole)
        if self._seen_bytes > LOG_BYTES_MAX:
            self._cut()
        return whole.decode(errors="replace").splitlines()

    def _cut(self) -> None:
        """Copies the file to `.1` and empties it in place, because the child has it open for appending.

        Lines that are written between the two calls are lost. In return a child need not reopen its log.
        """
        # Where the disk is full it is emptied all the same: that makes room, and the mesh would end with the launcher.
        with suppress(OSError):
            shutil.copyfile(self.path, self.path.with_suffix(".log.1"))
        # Who rotates logs may have moved it away meanwhile.
        with suppress(FileNotFoundError):
            os.truncate(self.path, 0)
        self._first_byte = self._seen_bytes = 0
