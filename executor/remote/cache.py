"""Copies of models from object stores, as folders of this machine that all its executors share.

    DIR/<key>/<model>/...           a complete copy; the key follows from the repository, the model and its listing
    DIR/incoming/<key>/<key>/...    a copy that is being fetched

A copy never changes: another content is another copy. It is moved into its place when it is complete, so a folder that
is there can be used, whoever was killed when. A process that uses a copy holds a shared lock on the folder, one that
fetches or removes it an exclusive one. Locks end with their process, so nothing has to be cleaned up after it.

A copy goes when the last process stops using it. Those that a process leaves behind at its end spare the next one the
download; they go, the oldest first, when the cache would grow beyond its bound.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from executor.remote.listing import Listing, RemoteFile
from shared.contract.errors import LoadError
from shared.contract.locations import RemoteLocation
from shared.process import logs
from shared.process.locked_folders import locked, locked_in_use, remove_unused

INCOMING = "incoming"
FILE_MODE = 0o444
"""Files that did not change are shared between copies, so no model may write into them."""

Fetch = Callable[[Sequence[RemoteFile], Path], None]
"""Writes files into a folder, and raises if they are not those of the listing any more."""


@dataclass(slots=True)
class Copy:
    """A copy that this process uses. folder: of the model"""

    folder: Path
    cache: Cache
    lock: int

    def cleanup(self) -> None:
        """The copy is not used any more: it is removed, unless another process uses it or this one is ending."""
        os.close(self.lock)
        if not self.cache.is_closing:
            remove_unused(self.folder.parent)


class Cache:
    """The copies in a directory. bytes_max: of all files in it

    raises  LoadError for a directory that others may write to: the models are code that runs here
    """

    def __init__(self, directory: Path, bytes_max: int) -> None:
        # A model may change the directory that the process works in.
        self.directory = directory = directory.absolute()
        self.bytes_max = bytes_max
        self.is_closing = False
        self._incoming = directory / INCOMING
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._incoming.mkdir(mode=0o700, exist_ok=True)
            status = directory.stat()
        except OSError as error:
            raise LoadError(f"the model cache {directory} cannot be used ({error}): give --model-cache-dir") from error
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise LoadError(
                f"the model cache {directory} belongs to another user, or others may write to it: "
                "give another --model-cache-dir, or take their right away (chmod go-w)"
            )

    def copy_of(self, location: RemoteLocation, listing: Listing, fetch: Fetch) -> Copy:
        """The copy of a model, fetched if it is not there. Blocks, also while another process fetches it.

        raises  LoadError if it does not fit; what `fetch` raises
        """
        key = hashlib.sha256(f"{location}\n{listing.model}\n{listing.digest}".encode()).hexdigest()[:32]
        folder = self.directory / key
        while True:
            copy = self._held(folder, listing)
            if copy is not None:
                return copy
            with locked(self._incoming / key) as arriving:
                if arriving is None:
                    continue
                if not folder.exists():
                    self._fill(arriving / key, listing, fetch)
                    # Not the locked folder itself: whoever waits for its lock would wait for the copy's users.
                    (arriving / key).rename(folder)
                arriving.rmdir()

    def _held(self, place: Path, listing: Listing) -> Copy | None:
        """A copy that is there, locked against removal."""
        lock = locked_in_use(place)
        if lock is None:
            return None
        folder = place / listing.model
        if all(is_same(folder / file.path, file) for file in listing.files):
            # The time of last use, for `_make_room`.
            os.utime(place)
            return Copy(folder, self, lock)
        os.close(lock)
        if not remove_unused(place):
            raise LoadError(f"somebody has changed {folder}, which another process uses: restart that process")
        return None

    def _fill(self, arriving: Path, listing: Listing, fetch: Fetch) -> None:
        """Fetches a copy into a folder."""
        if arriving.exists():
            # Of a process that was killed.
            shutil.rmtree(arriving)
        folder = arriving / listing.model
        folder.mkdir(parents=True)
        for path in listing.folders:
            (folder / path).mkdir(parents=True, exist_ok=True)
        missing = [file for file in listing.files if not self._link(folder, listing.model, file)]
        self._make_room(listing.model, sum(file.size for file in missing))
        try:
            fetch(missing, folder)
            for file in missing:
                path = folder / file.path
                os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
                path.chmod(FILE_MODE)
                if not is_same(path, file):
                    raise OSError(f"{file.path} was not fetched whole")
        except BaseException:
            shutil.rmtree(arriving, ignore_errors=True)
            raise

    def _link(self, folder: Path, model: str, file: RemoteFile) -> bool:
        """Takes a file from an earlier copy of the model, if one has it."""
        for place in self._copies():
            known = place / model / file.path
            if is_same(known, file):
                (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
                with suppress(OSError):
                    os.link(known, folder / file.path)
                    return True
        return False

    def _copies(self) -> list[Path]:
        """Complete copies, the one that was used last at the end."""
        found: list[tuple[int, Path]] = []
        for place in self.directory.iterdir():
            with suppress(FileNotFoundError):
                if place != self._incoming:
                    found.append((place.stat().st_mtime_ns, place))
        return [place for _, place in sorted(found)]

    def _make_room(self, model: str, needed: int) -> None:
        """Removes copies that nobody uses until there is room. Raises LoadError if there is not enough."""
        others = [*self._incoming.iterdir(), *self._copies()]
        while (used := self.size()) + needed > self.bytes_max:
            if not others:
                raise LoadError(
                    f"model '{model}' needs {needed} bytes more in the model cache {self.directory}, in which {used} "
                    f"of {self.bytes_max} are in use: raise --model-cache-bytes"
                )
            folder = others.pop(0)
            if remove_unused(folder):
                logs.info("copy of a model removed", place=folder, reason="the model cache is full")

    def size(self) -> int:
        """Bytes of all files. A file that copies share counts once."""
        sizes: dict[int, int] = {}
        # Not `rglob`, which raises for a folder that another process removes meanwhile.
        for folder, _, names in os.walk(self.directory):
            for name in names:
                with suppress(FileNotFoundError):
                    status = Path(folder, name).lstat()
                    sizes[status.st_ino] = status.st_size
        return sum(sizes.values())


def is_same(path: Path, file: RemoteFile) -> bool:
    """Whether a local file is a whole copy of an object."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns)
