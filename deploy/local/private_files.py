"""Makes files that only their owner may read, because data and logs of a mesh hold what its clients have sent."""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

PRIVATE_UMASK = 0o077


@contextmanager
def private_files() -> Generator[int]:
    """Files and directories that this process makes in the block are for their owner only. Yields the former umask."""
    before = os.umask(PRIVATE_UMASK)
    try:
        yield before
    finally:
        os.umask(before)


def make_private(directory: Path) -> str:
    """Makes a directory that only its owner may enter. A directory that exists keeps its mode.

    returns  what other users may do in the directory, as a sentence; "" for nothing
    raises   PermissionError for a directory of another user. That user could replace a file that this process writes
             by a link to another file of its owner, or replace the server. (Root could do so anyway.)
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
        remedy = shlex.join(["chmod", "-R", "go=", str(directory)])
        return f"{directory} is open to other users of this machine (mode {mode}): {remedy}"
    return ""
