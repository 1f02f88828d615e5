"""What clients have registered, for several gateways that share a port: one file for each region, in a folder.

A client registers over one connection and infers over another, which may reach another gateway. So what is registered
is read from the folder at each use: a registration counts for all gateways from the moment it is answered, and so does
its end. Each gateway opens the region itself. Files appear and disappear as a whole, so no gateway waits for another.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec


class RegionEntry(msgspec.Struct, frozen=True):
    """A registration. key: name of the region's file; offset: where it begins in the file; both sizes in bytes."""

    name: str
    key: str
    offset: int
    byte_size: int


_decoder = msgspec.json.Decoder(RegionEntry)


@dataclass(frozen=True, slots=True)
class RegionFolder:
    """The registrations of one port. A stamp stands for one registration: another one of the same name has another."""

    path: Path

    def __post_init__(self) -> None:
        self.path.mkdir(mode=0o700, exist_ok=True)

    def __len__(self) -> int:
        return len(self._files())

    def add(self, entry: RegionEntry) -> bool:
        """Registers a region; False if there is one of that name."""
        new = self.path / f".{uuid.uuid4().hex}"
        try:
            new.write_bytes(msgspec.json.encode(entry))
            os.link(new, self._file(entry.name))
        except FileExistsError:
            return False
        finally:
            # It is not there if the folder has no room for another file.
            new.unlink(missing_ok=True)
        return True

    def remove(self, name: str) -> None:
        self._file(name).unlink(missing_ok=True)

    def clear(self) -> None:
        for file in self._files():
            file.unlink(missing_ok=True)

    def entries(self) -> list[RegionEntry]:
        found: list[RegionEntry] = []
        for file in self._files():
            with suppress(FileNotFoundError):
                found.append(_decoder.decode(file.read_bytes()))
        return sorted(found, key=lambda entry: entry.name)

    def find(self, name: str) -> RegionEntry | None:
        try:
            return _decoder.decode(self._file(name).read_bytes())
        except FileNotFoundError:
            return None

    def stamp(self, name: str) -> tuple[int, int] | None:
        """The stamp of the region of that name; None if there is none. Costs about as much as reading four bytes."""
        try:
            found = self._file(name).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _files(self) -> list[Path]:
        return [file for file in self.path.iterdir() if not file.name.startswith(".")]

    def _file(self, name: str) -> Path:
        # A region's name may have any character.
        return self.path / hashlib.sha256(name.encode()).hexdigest()
