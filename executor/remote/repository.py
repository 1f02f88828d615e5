"""A model repository in an object store. Executors load copies on this machine (`executor.remote.cache`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from executor.remote.cache import Cache, Copy
from executor.remote.listing import Listing, RemoteFile, is_safe
from executor.remote.storage import Storage, StorageError, UnreachableError, unreachable
from shared.configuration.parse import CONFIG_BYTES_MAX
from shared.contract.errors import LoadError
from shared.process import logs

TRIES = 3
"""How often a model that changes while it is fetched is fetched again at once."""


class RemoteRepository:
    """The repository. Its methods block, except `names` and `problem`.

    problem  why the store could not be read the last time; None if it could
    """

    def __init__(self, storage: Storage, cache: Cache) -> None:
        self._storage = storage
        self._cache = cache
        self._models: dict[str, Listing] = {}
        self.problem: StorageError | None = None

    def __str__(self) -> str:
        return str(self._storage.location)

    def refresh(self) -> None:
        """Reads the listing anew. If that fails, `problem` says why, and the last listing stays in force."""
        try:
            self._models = self._storage.models()
        except StorageError as error:
            if str(error) != str(self.problem):
                logs.warning("model repository cannot be read", cause=str(error), loaded_models="stay")
                self.problem = error
            return
        if self.problem is not None:
            logs.info("model repository can be read again", repository=str(self))
        self.problem = None

    def names(self) -> Collection[str]:
        """The models of the last listing."""
        return self._models.keys()

    def fingerprint(self, model: str) -> str:
        """A text that changes when anything of the model changes, as of the last listing."""
        return self._models[model].digest

    def mentions(self, word: str) -> bool:
        """Whether the configuration file of any model of the last listing contains the word. A file that cannot be
        read does not.
        """
        names = [
            f"{model}/{file.path}"
            for model, listing in self._models.items()
            for file in listing.files
            if file.path.endswith(".pbtxt") and file.size <= CONFIG_BYTES_MAX and not listing.unsafe
        ]
        try:
            return any(word in text for text in self._storage.texts(names))
        except StorageError as error:
            logs.warning("configurations not looked at", cause=str(error))
            return False

    def take(self, model: str) -> Copy | None:
        """The model as it is in the store now, as a folder; None if it is not there. The caller says when it does not
        need the copy any more.

        raises  UnreachableError if the store cannot be read, or the model changes all the time; LoadError if the model
                cannot be kept here
        """
        if not is_safe([model]):
            return None
        try:
            for _ in range(TRIES):
                listing = self._storage.model(model)
                if listing is None:
                    return None
                listing.check()
                try:
                    return self._cache.copy_of(self._storage.location, listing, partial(self._fetch, listing))
                except ChangedError:
                    logs.info("model changed while it was fetched", model=model, repository=str(self))
        except StorageError as error:
            raise unreachable(error, model) from error
        except OSError as error:
            raise LoadError(f"the copy of model '{model}' cannot be written: {error}") from error
        raise UnreachableError(f"failed to load '{model}', it changes while it is fetched from {self}")

    def close(self) -> None:
        """This process is ending: its copies stay for the next one."""
        self._cache.is_closing = True

    def _fetch(self, listing: Listing, files: Sequence[RemoteFile], folder: Path) -> None:
        """Fetches files of a listing. Raises ChangedError unless the listing holds before and after."""
        try:
            self._storage.fetch(listing.model, files, folder)
        finally:
            # Also behind an error: what was listed and is gone has changed.
            now = self._storage.model(listing.model)
            if now is None or now.digest != listing.digest:
                raise ChangedError(listing.model)


class ChangedError(Exception):
    """The model is not the listed one any more."""
