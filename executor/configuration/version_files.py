"""The files of a model's version, each as a line that changes when the file does."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path

CONFIG_FILES = ("config.pbtxt", "configs")
"""Not counted as files, because the parsed configuration is counted."""
UNSEEN = ("__pycache__",)
NO_CONTENT, ALL_CONTENT = -1, math.inf
"""No file's content is read; every file's is."""


def lines_of_version(model_dir: Path, version: str, code_dir: Path | None, *, content_max: float) -> list[str]:
    """A line for each file of a version.

    code_dir     the folder of a python-based backend: its code is the model's
    content_max  larger files are told by size and time, without their content
    """
    # Other versions' folders do not count: a change there leaves this version as it is.
    others = {path.name for path in model_dir.iterdir() if path.name.isdigit()} - {version}
    found = list(lines(model_dir, content_max=content_max, skip={*others, *CONFIG_FILES}))
    if code_dir is not None:
        found += [f"backend {line}" for line in lines(code_dir, content_max=content_max)]
    return found


def lines(folder: Path, *, content_max: float = NO_CONTENT, skip: Collection[str] = ()) -> Iterator[str]:
    """A line for each file of a folder: its path, size, and time or content. Raises OSError."""
    for path in _files(folder, skip):
        found = path.stat()
        state = _content(path) if found.st_size <= content_max else found.st_mtime_ns
        yield f"{path.relative_to(folder)} {found.st_size} {state}"


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path, skip: Collection[str]) -> Iterator[Path]:
    """Every file of a model's directory, in a fixed order. skip: names in the directory itself that are left out"""
    for path in sorted(folder.iterdir()):
        if path.name not in skip and path.name not in UNSEEN and not path.name.startswith("."):
            yield from _below(path, ())


def _below(path: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    """The file itself, or every file of the folder. above: the folders that lead here, to which links may lead back"""
    if path.is_file():
        yield path
    elif path.is_dir():
        state = path.stat()
        here = (state.st_dev, state.st_ino)
        # Of a folder that may not be read, the model reads nothing either.
        if here not in above and os.access(path, os.R_OK | os.X_OK):
            for inner in sorted(path.iterdir()):
                if inner.name not in UNSEEN:
                    yield from _below(inner, (*above, here))
