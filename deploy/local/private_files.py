"""Files that nobody but their owner may read: data and logs of a mesh hold what its clients have sent."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

PRIVATE_UMASK = 0o077


@contextmanager
def private_files() -> Generator[int]:
    """What this process makes within the block only its owner may read or enter; yields the umask from before."""
    before = os.umask(PRIVATE_UMASK)
    try:
        yield before
    finally:
        os.umask(before)


def make_private(directory: Path) -> str:
    """Makes a directory that only its owner may enter. One that is there already keeps its mode: returns what others
    may do there, as a sentence; "" for nothing.

    Raises PermissionError for a directory of another user, who could put a link to any of our files in the place of one
    that we write, or a server of their own in the place of ours. (Root can do so anyway.)
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        status = directory.stat()
    else:
        return ""
    if status.st_uid not in {0, os.getuid()}:
        raise PermissionError(f"{directory} belongs to another user ({status.st_uid})")
    if status.st_mode & PRIVATE_UMASK:
        mode = f"{status.st_mode & 0o777:o}"
        return f"{directory} is open to other users of this machine (mode {mode}): chmod -R go= {directory}"
    return ""
