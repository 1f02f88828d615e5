"""An object store, by fsspec: what it lists, and its objects as files.

Nothing that this module raises or logs contains credentials.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from executor.remote.listing import Listing, RemoteFile, listings
from shared.contract.errors import LoadError, MeshError
from shared.contract.locations import RemoteLocation

CONNECT_S = 5
READ_S = 60
"""How long a store may take to accept a connection, and to send the next bytes."""
ATTEMPTS = 2
LIBRARIES = {
    "s3": ("s3fs", "S3FileSystem", "s3"),
    "gs": ("gcsfs", "GCSFileSystem", "gcs"),
    "as": ("adlfs", "AzureBlobFileSystem", "azure"),
}
"""Of each scheme: fsspec's library, its class, and the extra of this package that installs it."""
SECRETS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_CLIENT_SECRET",
)
_QUERY = re.compile(r"\?[^\s'\"]+")
"""Queries of signed URLs, which libraries put into their errors."""


class StorageError(OSError):
    """A store did not do what it was asked.

    lasting  asking again will not help: no such bucket, no permission, wrong credentials
    """

    def __init__(self, message: str, *, lasting: bool) -> None:
        super().__init__(message)
        self.lasting = lasting


class Storage:
    """The store of one repository. Its methods block, and may be called on any thread.

    All raise StorageError, if the store cannot be reached or refuses.
    """

    def __init__(self, location: RemoteLocation) -> None:
        """Raises MeshError if the library for such stores is not installed, with the command that installs it."""
        self.location = location
        library, _, extra = LIBRARIES[location.scheme]
        if find_spec(library) is None:
            raise MeshError(
                f"{location}: repositories in {location.scheme}:// need {library}, which is not installed: "
                f"pip install 'seqmesh[{extra}]'"
            )

    @cached_property
    def _files(self) -> Any:
        library, name, _ = LIBRARIES[self.location.scheme]
        return getattr(import_module(library), name)(**options(self.location))

    def models(self) -> dict[str, Listing]:
        """Every model of the repository, by name."""
        return self._list(self.location.path)

    def model(self, name: str) -> Listing | None:
        return self._list(f"{self.location.path}/{name}").get(name)

    def fetch(self, model: str, files: Sequence[RemoteFile], folder: Path) -> None:
        """Writes objects of a model below a folder."""
        places = [folder / file.path for file in files]
        for place in places:
            place.parent.mkdir(parents=True, exist_ok=True)
        names = [f"{self.location.path}/{model}/{file.path}" for file in files]
        self._ask(lambda: self._files.get(names, [str(place) for place in places]))

    def texts(self, names: Sequence[str]) -> list[str]:
        """The objects of those names below the repository, as texts. What is gone meanwhile is left out."""
        paths = [f"{self.location.path}/{name}" for name in names]
        found: dict[str, Any] = self._ask(lambda: self._files.cat(paths, on_error="omit")) if paths else {}
        return [content.decode(errors="replace") for content in found.values()]

    def _list(self, path: str) -> dict[str, Listing]:
        def ask() -> dict[str, dict[str, Any]]:
            self._files.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._files.find(path, withdirs=True, detail=True)
            if not found:
                # Raises if there is no such bucket: some stores say of it only that it holds nothing.
                self._files.ls(path.split("/", maxsplit=1)[0])
            return found

        found = self._ask(ask)
        try:
            return listings(self.location.path, found)
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            said = f"{self.location} lists an object in a form that is not known: {type(error).__name__}: {error}"
            raise StorageError(without_secrets(said), lasting=True) from None

    def _ask(self, call: Any) -> Any:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - each library raises errors of its own, and of those below it.
            said = without_secrets(f"{self.location} cannot be read: {error or type(error).__name__}")
            lasting = isinstance(error, (FileNotFoundError, PermissionError, ImportError, ValueError))
            lasting = lasting or "credential" in said.lower()
            raise StorageError(said, lasting=lasting) from None


def options(location: RemoteLocation) -> dict[str, Any]:
    """The arguments of fsspec's class. Credentials come from the environment, and from where each library looks."""
    plain: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    match location.scheme:
        case "s3":
            config: dict[str, Any] = {
                "connect_timeout": CONNECT_S,
                "read_timeout": READ_S,
                "retries": {"max_attempts": ATTEMPTS},
            }
            if location.endpoint:
                # Servers other than Amazon's seldom have a host name for each bucket.
                config["s3"] = {"addressing_style": "path"}
            return {**plain, "endpoint_url": location.endpoint or None, "config_kwargs": config}
        case "gs":
            return {**plain, "requests_timeout": READ_S}
        case _:
            # Triton's names of the variables; those of adlfs itself are read by it.
            key = os.environ.get("AZURE_STORAGE_KEY")
            times = {"connection_timeout": CONNECT_S, "read_timeout": READ_S}
            return {**plain, **times, "account_name": location.endpoint, **({"account_key": key} if key else {})}


def without_secrets(text: str) -> str:
    """A text in which no credential of the environment stands, and no query of a URL."""
    text = _QUERY.sub("?...", text)
    for value in (os.environ.get(name) for name in SECRETS):
        if value:
            text = text.replace(value, "...")
    return text


def unreachable(error: OSError, model: str) -> UnreachableError:
    """The error of a load that could not read the model."""
    return UnreachableError(f"failed to load '{model}', failed to poll from model repository: {error}")


class UnreachableError(LoadError):
    """A model could not be read at the moment. It says nothing about the model: the load may be tried again."""
