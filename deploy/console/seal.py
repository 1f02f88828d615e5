"""Whether the built page belongs to its sources. `web/seal.mjs` writes the digests; this makes them without node."""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent
WEB, STATIC = FOLDER / "web", FOLDER / "static"
LEFT_OUT = frozenset(("node_modules", "seal.json"))


def digest(folder: Path) -> str:
    """SHA-256 over the paths and contents of a folder's files, by path."""
    paths = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and LEFT_OUT.isdisjoint(path.relative_to(folder).parts)
    )
    whole = hashlib.sha256()
    for path in paths:
        whole.update(f"{path} {hashlib.sha256((folder / path).read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()
