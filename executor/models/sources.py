"""Where an executor's models come from: folders of this machine, and repositories elsewhere (`executor.remote`)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from executor.configuration.files import check_readable
from executor.models.fingerprints import folder_fingerprint
from executor.remote.cache import Cache
from executor.remote.repository import RemoteRepository
from executor.remote.storage import Storage, StorageError
from shared.configuration.parse import CONFIG_BYTES_MAX
from shared.contract.errors import LoadError, sendable
from shared.contract.locations import ModelLocation
from shared.process import logs
from shared.process.locked_folders import TemporaryFolder

OVERRIDE = "seqmesh-override-"
"""Begins the names of temporary folders that hold the files of load requests."""


class ModelFiles(Protocol):
    """A model's files, for a load and for the versions that it makes. folder: the model's, with its name"""

    @property
    def folder(self) -> Path: ...
    def cleanup(self) -> None:
        """The files are not used any more."""
        ...


class ModelSource(Protocol):
    """A model repository. `names` and `problem` answer at once, the others may block.

    problem  why the repository could not be read the last time; None if it could
    """

    problem: StorageError | None

    def refresh(self) -> None:
        """Reads anew which models there are. If that fails it says so in `problem`, and what was read before stays in
        force.
        """
        ...

    def names(self) -> Collection[str]:
        """Raises OSError if the folder of this machine cannot be read."""
        ...

    def fingerprint(self, model: str) -> str:
        """A text that changes when anything of the model changes. Raises OSError if that cannot be read."""
        ...

    def mentions(self, word: str) -> bool:
        """Whether the configuration file of any model contains the word. A file that cannot be read does not."""
        ...

    def take(self, model: str) -> ModelFiles | None:
        """The model as it is now; None if it is not there. Raises LoadError, or OSError as `names` does."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class InPlace:
    """A model whose files are read where they are."""

    folder: Path

    def cleanup(self) -> None:
        """The files are the user's."""


class Override:
    """A load request's files (`1/model.pt` -> content), written into a folder of their own.

    raises  LoadError for a path that leaves the folder, for a model whose name is no folder's, and where they cannot be
            written
    """

    def __init__(self, model: str, files: Mapping[str, bytes]) -> None:
        # Gateways refuse such a name, but what Redis holds may come from elsewhere.
        if model in ("", ".", "..") or "/" in model:
            raise LoadError(f"failed to load {model!r}, a model's name must name a folder of its own")
        self._place = TemporaryFolder(OVERRIDE)
        self.folder = self._place.path / model
        try:
            for name, content in files.items():
                path = (self.folder / name.removeprefix("file:")).resolve()
                if not path.is_relative_to(self.folder.resolve()):
                    raise LoadError(f"failed to load '{model}', file '{name}' must not leave the model's directory")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        except OSError as error:
            self.cleanup()
            where = f"{self._place.path.parent} (TMPDIR)"
            raise LoadError(f"failed to load '{model}', its files cannot be written to {where}: {error}") from error
        except BaseException:
            self.cleanup()
            raise

    def cleanup(self) -> None:
        """Removes the folder with the files that the load request brought."""
        self._place.remove()


class LocalFolder:
    """A repository in a folder of this machine. It is read each time, so there is nothing to refresh."""

    def __init__(self, root: Path) -> None:
        # A model may change the directory that the process works in.
        self._root = root.absolute()
        self.problem: StorageError | None = None

    def refresh(self) -> None: ...

    def names(self) -> Collection[str]:
        """Raises OSError also for a root that is away: that says nothing about its models."""
        with os.scandir(self._root) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".") and _is_folder(entry)]
        for name in names:
            if not name.isprintable():
                logs.warning("folder left out, its name is no text", folder=sendable(name))
        return [name for name in names if name.isprintable()]

    def fingerprint(self, model: str) -> str:
        return folder_fingerprint(self._root / model)

    def mentions(self, word: str) -> bool:
        try:
            folders = [self._root / name for name in self.names()]
        except OSError as error:
            logs.warning("configurations not looked at", cause=str(error))
            return False
        files = (path for one in folders for path in (*one.glob("*.pbtxt"), *one.glob("configs/*.pbtxt")))
        return any(word in _text(path) for path in files)

    def take(self, model: str) -> InPlace | None:
        return InPlace(self._root / model) if model in self.names() else None

    def close(self) -> None: ...


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Without a question to the file system, which may be far away, unless the entry is a link."""
    return Path(entry).is_dir() if entry.is_symlink() else entry.is_dir(follow_symlinks=False)


def open_sources(locations: Iterable[ModelLocation], cache_dir: Path, cache_bytes_max: int) -> list[ModelSource]:
    """The repositories at these locations.

    raises  MeshError for a folder that is not there, for an object store whose library is not installed, and for a
            cache that cannot be used
    """
    found: list[ModelSource] = []
    for location in locations:
        if isinstance(location, Path):
            if not location.is_dir():
                raise LoadError(f"no model repository at {location}: --models names a directory of models")
            found.append(LocalFolder(location))
        else:
            found.append(RemoteRepository(Storage(location), Cache(cache_dir, cache_bytes_max)))
    return found


def _text(path: Path) -> str:
    try:
        check_readable(path, CONFIG_BYTES_MAX)
        return path.read_text(errors="replace")
    except OSError:
        return ""
