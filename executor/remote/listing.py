"""What an object store says that a model consists of: names, sizes, times and tags; never the content.

Names come from outside. A model with a name that would lead out of its folder is refused as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from shared.contract.errors import LoadError

NS = 10**9
PART_BYTES_MAX = 255
"""Longest name of a file or folder that Linux takes."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """An object. mtime_ns: whole seconds are the time of change, the fraction follows from the store's tag (ETag); so
    another content has another time, also within one second.
    """

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Listing:
    """A model in the store. Paths are relative to the model's folder.

    folders  that exist although they hold no object
    unsafe   a name that leads out of the folder; "" if there is none
    """

    model: str
    files: tuple[RemoteFile, ...]
    folders: tuple[str, ...] = ()
    unsafe: str = ""

    @property
    def digest(self) -> str:
        """A text that changes when anything of the model changes; the same on every executor."""
        lines = [f"{one.path}\n{one.size}\n{one.mtime_ns}" for one in self.files]
        return hashlib.sha256("\0".join((*lines, *self.folders)).encode()).hexdigest()[:32]

    def check(self) -> None:
        """Raises LoadError for a model that cannot be a folder of files."""
        if self.unsafe:
            raise LoadError(f"the name {self.unsafe!r} leads out of the folder of model '{self.model}'")


def listings(root: str, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Listing]:
    """The models among the objects below a root, by name.

    found   name of the object (root included) -> what fsspec says of it; a name that ends in '/' marks a folder
    raises  KeyError, OverflowError, TypeError or ValueError for an object of which a store says something else
    """
    files: dict[str, list[RemoteFile]] = {}
    folders: dict[str, set[str]] = {}
    unsafe: dict[str, str] = {}
    for name, info in found.items():
        relative = name.removeprefix(root).removeprefix("/")
        is_folder = name.endswith("/") or info["type"] == "directory"
        model, _, path = relative.removesuffix("/").partition("/")
        if not is_safe([model]) or model.startswith(".") or (not path and not is_folder):
            # A file beside the models, or what can be no model's folder.
            continue
        files.setdefault(model, [])
        parts = path.split("/") if path else []
        if not is_safe(parts):
            unsafe[model] = min(path, unsafe.get(model, path))
        elif is_folder:
            folders.setdefault(model, set()).update([path] if path else [])
        else:
            files[model].append(RemoteFile(path, int(info["size"] or 0), changed_ns(info)))
    return {
        model: Listing(
            model,
            tuple(sorted(present, key=lambda file: file.path)),
            tuple(sorted(folders.get(model, set()))),
            unsafe.get(model, ""),
        )
        for model, present in files.items()
    }


def is_safe(parts: Iterable[str]) -> bool:
    """Whether the parts of a path are plain names of files."""
    return all(
        part not in ("", ".", "..")
        and len(part.encode(errors="replace")) <= PART_BYTES_MAX
        and part.isprintable()
        and "\\" not in part
        for part in parts
    )


def changed_ns(info: Mapping[str, Any]) -> int:
    """`RemoteFile.mtime_ns` of an object, from the fields of s3fs, gcsfs or adlfs."""
    when = next((info[name] for name in ("LastModified", "last_modified", "updated", "mtime") if info.get(name)), 0)
    if isinstance(when, str):
        when = datetime.fromisoformat(when)
    seconds = int(when.timestamp() if isinstance(when, datetime) else when)
    tag = next((info[name] for name in ("ETag", "etag", "generation") if info.get(name)), "")
    return seconds * NS + int.from_bytes(hashlib.sha256(f"{tag} {when}".encode()).digest()[:8]) % NS
