"""What is said of a file that is not there."""

from __future__ import annotations

import difflib
from pathlib import Path


def absence(name: str, folder: Path) -> str:
    """Says that a folder lacks a file, and names the entry that may be the file, misspelt."""
    try:
        entries = [entry.name for entry in folder.iterdir()]
    except OSError:
        entries = []
    near = "".join(f", but {one}" for one in difflib.get_close_matches(name, entries, 1))
    return f"there is no {name} in {folder}{near}"
