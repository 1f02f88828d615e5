"""Folders that are there as long as a process uses them.

A process that uses a folder holds a shared lock on it, one that fills or removes it an exclusive one. Locks end with
their process, however that ends: what nobody has locked was left behind, and whoever comes upon it may remove it.

A model's own interpreter imports this module too, so it needs no package.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir


class TemporaryFolder:
    """A new folder among the system's temporary files. It goes with `remove`, or with the process; if that is killed,
    with another's `remove_abandoned`. prefix: begins its name
    """

    def __init__(self, prefix: str) -> None:
        while True:
            self._holder = TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
            self.path = Path(self._holder.name)
            # Until it is locked, a process that starts may take it for abandoned.
            if (lock := locked_in_use(self.path)) is not None:
                self._lock = lock
                return
            self._holder.cleanup()

    def remove(self) -> None:
        """Removes the folder. What cannot be removed now is abandoned."""
        os.close(self._lock)
        self._holder.cleanup()


def remove_abandoned(*prefixes: str) -> None:
    """Removes the temporary folders with these prefixes whose processes were killed."""
    for prefix in prefixes:
        for folder in temporary_files().glob(f"{prefix}*"):
            with suppress(OSError):  # another user's, or a link to itself
                remove_unused(folder)


def temporary_files() -> Path:
    """Where temporary files lie; where nothing can be written, as on a full disk, where they would."""
    try:
        return Path(gettempdir())
    except FileNotFoundError:
        return Path(os.environ.get("TMPDIR", "/tmp"))  # noqa: S108 - the system's, as Python has it


@contextmanager
def locked(folder: Path) -> Generator[Path | None]:
    """Makes a folder and holds it exclusively. None: another process had it, and has moved it away meanwhile."""
    # Not with `exist_ok`: that fails if the folder that stood there is moved away at that moment.
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    try:
        lock = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        yield None
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder if is_at(folder, lock) else None
    finally:
        os.close(lock)


def locked_in_use(folder: Path) -> int | None:
    """Keeps a folder from being removed (`remove_unused`) until the returned descriptor is closed, or this process has
    ended. None: it is not there.
    """
    try:
        lock = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    fcntl.flock(lock, fcntl.LOCK_SH)
    if is_at(folder, lock):
        return lock
    # It was removed before it was locked.
    os.close(lock)
    return None


def remove_unused(folder: Path) -> bool:
    """Removes a folder, unless a process uses it. Returns whether the folder that was there is gone."""
    try:
        # To open a pipe of that name, which any user can make among the temporary files, would wait for its writer.
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Before it was locked another process may have removed it, and put a new one in its place.
        if is_at(folder, lock):
            shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def is_at(folder: Path, opened: int) -> bool:
    """Whether an open folder is the one that a path leads to."""
    try:
        return os.path.samestat(folder.stat(), os.fstat(opened))
    except FileNotFoundError:
        return False
