"""The models of this executor: found in their repositories, loaded, and kept with the result of each load.

A model that fails to load does not stop the others, and its predecessor goes on serving, as in Triton. A load changes
only the versions that differ (`executor.models.fingerprints`). Everything here is slow (files, weights) and runs on a
thread; nothing here knows of Redis.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from executor.configuration.load import LoadedConfig, load_model_config
from executor.configuration.parameters import misspelt
from executor.engine.backends import installed_backends
from executor.engine.base import Backend
from executor.models.labels import read_labels
from executor.models.recovery import of_versions
from executor.models.served import LoadedModel, ServedVersion, close, close_now
from executor.models.sources import LocalFolder, ModelFiles, ModelSource, Override
from executor.models.version_maker import LoadOptions, ReadModel, VersionMaker
from executor.remote.storage import StorageError, UnreachableError, unreachable
from executor.workers.devices import DeviceLostError, Devices
from shared.contract.errors import Code, LoadError, MeshError, sendable
from shared.contract.messages import UNLOADED, ModelRecord, RepositoryEntry
from shared.process import logs
from shared.process.collector import Collector
from shared.process.machine import fill_standard_streams

CODE_NAMES: Mapping[Code, str] = {
    Code.UNKNOWN: "Unknown",
    Code.INTERNAL: "Internal",
    Code.NOT_FOUND: "Not found",
    Code.INVALID_ARG: "Invalid argument",
    Code.UNAVAILABLE: "Unavailable",
    Code.UNSUPPORTED: "Unsupported",
    Code.ALREADY_EXISTS: "Already exists",
    Code.CANCELLED: "Cancelled",
}
"""How Triton writes a code before a reason."""
UNLOADED_MAX = 64
"""Unloaded versions of a model that the index names, beside those of the last unload; every service reads it. Who has
waited for one that was unloaded before so many others was refused long ago.
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the last load of a model failed. version: "" if it failed before a version was loaded"""

    version: str
    reason: str


class NoSuchModelError(LoadError):
    """No repository of this executor has the model."""

    code = Code.INTERNAL


@dataclass(slots=True)
class ModelRepository:
    """All models in the given repositories.

    sources   the first one that has a name wins; a path is a folder of this machine
    loaded    by name
    failures  by name: why the last load failed
    unloaded  by name: versions that were taken out of service, the latest last
    retired   versions that were unloaded or replaced, to be closed once nothing runs on them any more
    loading   by name: since when it is being loaded, seconds since 1970
    options   of all loads
    """

    sources: Sequence[ModelSource | Path]
    devices: Devices
    options: LoadOptions = field(default_factory=LoadOptions)
    loaded: dict[str, LoadedModel] = field(default_factory=dict[str, LoadedModel])
    failures: dict[str, Failure] = field(default_factory=dict[str, Failure])
    unloaded: dict[str, dict[str, None]] = field(default_factory=dict[str, dict[str, None]])
    retired: list[ServedVersion] = field(default_factory=list[ServedVersion])
    loading: dict[str, float] = field(default_factory=dict[str, float])

    _sources: Sequence[ModelSource] = field(init=False)
    _maker: VersionMaker = field(init=False)
    _closing: dict[ServedVersion, asyncio.Task[None]] = field(
        init=False, default_factory=dict[ServedVersion, asyncio.Task[None]]
    )
    _collector: Collector = field(init=False, default_factory=Collector)

    def __post_init__(self) -> None:
        self._sources = [LocalFolder(one) if isinstance(one, Path) else one for one in self.sources]
        self._maker = VersionMaker(self.devices, self.options)

    def refresh(self) -> bool:
        """Looks anew at repositories elsewhere. Returns whether that changes what the index says. Blocks."""
        before = self.names(), self.problems()
        for source in self._sources:
            source.refresh()
        return before != (self.names(), self.problems())

    def problems(self) -> list[StorageError]:
        """Why repositories could not be read at the last look."""
        return [source.problem for source in self._sources if source.problem is not None]

    def listed(self, *, readable_alone: bool = False) -> dict[str, ModelSource]:
        """The repository of each model, by the model's name: the first one that has it. Each is listed once, whatever
        it holds. Raises OSError if one cannot be read.

        readable_alone  leaves out a repository that cannot be read, and logs it, in place of the error
        """
        listed: dict[str, ModelSource] = {}
        for source in reversed(self._sources):
            try:
                listed |= dict.fromkeys(source.names(), source)
            except OSError as error:
                if not readable_alone:
                    raise
                logs.warning("models not listed", cause=str(error))
        return listed

    def names(self) -> list[str]:
        """The names of all models of all repositories, sorted."""
        return sorted(self.listed())

    def fingerprint(self, name: str) -> str | None:
        """A text that changes when anything in a model's directory changes; None if there is no such model.
        Raises OSError if that cannot be read.
        """
        source = self.listed().get(name)
        return None if source is None else source.fingerprint(name)

    def mentions(self, word: str) -> bool:
        """Whether the configuration file of any model contains the word. A file that cannot be read does not."""
        return any(source.mentions(word) for source in self._sources)

    def load(
        self,
        name: str,
        override_json: str | None = None,
        files: Mapping[str, bytes] | None = None,
        generation: str = "0",
    ) -> LoadedModel:
        """Loads a model; of a loaded model, the versions that have changed. Blocks.

        files       the model's files, in place of those in the repository; path below its directory -> content
        generation  which load it is (`ModelRecord.generation`); the last one is kept unless every version is new
        raises      LoadError with Triton's words; its reason stays in `failures`. DeviceLostError: this process can
                    load nothing more
        """
        self.note_load(name)
        try:
            return self._load(name, override_json or None, files, generation)
        except NoSuchModelError:
            # Not kept in `failures`: the index names only models that this executor has, or had.
            raise
        except LoadError as error:
            # A repository that cannot be read says nothing about a model that is served.
            if name not in self.loaded or not isinstance(error, UnreachableError):
                self.failures.setdefault(name, Failure("", error.message))
            raise
        except DeviceLostError as error:
            logs.error("GPU lost while a model was loaded", model=name, cause=str(error))
            raise
        except Exception as error:  # Names, paths and texts are a caller's: none of them may end the executor.
            self.failures[name] = Failure("", sendable(str(error)))
            message = f"failed to load '{name}', failed to poll from model repository: {error}"
            raise LoadError(message, Code.INTERNAL) from error
        finally:
            self.loading.pop(name, None)
            if files and name in self.failures:
                self._forget_stranger(name)
            if closed := fill_standard_streams():
                logs.warning("model closed standard streams, they lead nowhere now", model=name, descriptors=closed)

    def _forget_stranger(self, name: str) -> None:
        """Forgets that a load failed of a model that no repository has and that was never served: its files came with
        the request, whose caller is told. As in Triton, the index does not name it. Else callers' names would gather.
        """
        known = {*self.loaded, *self.unloaded, *self.listed(readable_alone=True)}
        if name not in known:
            self.failures.pop(name, None)

    def note_load(self, name: str) -> None:
        """Notes that a model is being loaded, since now or since an earlier note."""
        self.loading.setdefault(name, time.time())

    def refuse(self, name: str, reason: str) -> None:
        """Notes that a load is not even tried. The versions served before go on."""
        self.loading.pop(name, None)
        self.failures[name] = Failure("", reason)
        logs.error("model given up", model=name, cause=reason)

    def never_found(self, name: str, reason: str) -> None:
        """Notes that no repository has a model that was to be loaded at the start: the index names it all the same."""
        self.failures[name] = Failure("", reason)

    def unload(self, name: str) -> None:
        """Takes a model out of service, and forgets that its last load failed. It is no error if the model is not
        loaded.
        """
        self.failures.pop(name, None)
        model = self.loaded.pop(name, None)
        if model is None:
            return
        self._note_unloaded(name, model.record.versions)
        self.retired += model.versions
        logs.info("model unloaded", model=name)

    def never_loaded(self, name: str) -> None:
        """Notes that the mesh has unloaded a model that this executor may never have had."""
        self.unloaded.setdefault(name, {})

    def _note_unloaded(self, name: str, versions: Sequence[str]) -> None:
        before = [version for version in self.unloaded.get(name, ()) if version not in versions]
        self.unloaded[name] = dict.fromkeys([*before[-UNLOADED_MAX:], *versions])

    async def close_retired(self, in_use: Collection[ServedVersion] = ()) -> None:
        """Finalizes the engines of retired versions that are not in use, one version beside the other, and frees what
        they held. What has been begun goes on to its end, though the caller is cancelled: its lease may end meanwhile.
        """
        begun: list[asyncio.Task[None]] = []
        for served in [served for served in self.retired if served not in in_use]:
            # Before the await, so that no second call closes it too.
            self.retired.remove(served)
            begun.append(asyncio.create_task(self._close(served), name=f"end of {served.config.name}"))
            self._closing[served] = begun[-1]
        await asyncio.shield(asyncio.gather(*begun))
        if begun:
            # A model may be in a circle of references, with all its weights. Not at once: this call still refers to it.
            self._collector.look_soon()

    async def _close(self, served: ServedVersion) -> None:
        await close(served)
        del self._closing[served]
        self._remove_files(served)

    async def close(self) -> None:
        for source in self._sources:
            source.close()
        for model in self.loaded.values():
            self.retired += model.versions
        self.loaded.clear()
        await self.close_retired()
        await asyncio.gather(*self._closing.values())

    def index(
        self, listed: Mapping[str, ModelSource], in_use: Collection[ServedVersion] = ()
    ) -> tuple[RepositoryEntry, ...]:
        """What the repository index says of this executor's models. What was loaded from a repository that cannot be
        read is served, and stays in the index. Asks no file system.

        listed  what `listed` has returned, with `readable_alone`
        in_use  versions that have not ended yet
        """
        names = {*listed, *self.loaded, *self.unloaded, *self.failures, *self.loading}
        ending = {(served.config.name, served.version) for served in in_use}
        return tuple(line for name in sorted(names) for line in self._lines(name, listed.get(name), ending))

    def _lines(
        self, name: str, source: ModelSource | None, ending: Collection[tuple[str, str]]
    ) -> list[RepositoryEntry]:
        """The lines of one model. source: its repository, if it can be listed"""
        model = self.loaded.get(name)
        failure = self.failures.get(name)
        problem = str(source.problem or "") if source is not None else ""
        if failure is not None and not problem:
            problem = f"the last load failed, what was loaded before is served: {failure.reason}"
        since = _since(self.loading.get(name))
        if since and not problem:
            problem = f"is being loaded anew {since}, what was loaded before is served"
        ready = model.record.versions if model else ()
        lines = [RepositoryEntry(name, version, "READY", problem) for version in ready]
        for version in sorted(self.unloaded.get(name, {}).keys() - ready, key=int):
            state = "UNLOADING" if (name, version) in ending else "UNAVAILABLE"
            lines.append(RepositoryEntry(name, version, state, UNLOADED if state == "UNAVAILABLE" else ""))
        if since and not ready:
            return [*lines, RepositoryEntry(name, "", "LOADING", since)]
        # Beside versions that are served, as in Triton, one that could not be loaded has a line of its own.
        if failure is not None and (not ready or failure.version not in ("", *ready)):
            others = [line for line in lines if line.version != failure.version]
            return [*others, RepositoryEntry(name, failure.version, "UNAVAILABLE", failure.reason)]
        if not lines and name in self.unloaded:
            return [RepositoryEntry(name, "", "UNAVAILABLE", UNLOADED)]
        return lines or [RepositoryEntry(name)]

    def _remove_files(self, closed: ServedVersion) -> None:
        """Lets go of files that no other version shares."""
        still_there = (served for model in list(self.loaded.values()) for served in model.versions)
        others = [*self.retired, *self._closing, *still_there]
        if closed.files is not None and not any(served.files is closed.files for served in others):
            closed.files.cleanup()

    # -- loading ----------------------------------------------------------------------------------------------------

    def _load(
        self, name: str, override_json: str | None, files: Mapping[str, bytes] | None, generation: str
    ) -> LoadedModel:
        began = time.monotonic()
        self.failures.pop(name, None)
        taken, options = self._take(name, files), self.options
        try:
            backends = installed_backends(options.backend_dirs, completion_limit_s=options.completion_limit_s)
            loaded = self._read(name, override_json, taken.folder, backends)
            labels = read_labels(loaded.config, loaded.model_dir)
            versions = self._versions(ReadModel(loaded, taken, backends, generation))
        except BaseException:
            taken.cleanup()
            raise
        before = self.loaded.get(name)
        if before is not None and any(_continues(before, served) for served in versions):
            generation = before.record.generation
        # All versions must count under one generation, because gateways read them so.
        versions = [_counted_under(served, generation) for served in versions]
        record = ModelRecord(
            of_versions(loaded.config, [served.config for served in versions]),
            loaded.json,
            tuple(str(version) for version in loaded.versions),
            generation,
            labels,
            {served.version: served.cache_scope for served in versions if served.cache_scope},
        )
        model = LoadedModel(record, versions)
        self._replace(name, model)
        if not any(served.files is taken for served in versions):
            taken.cleanup()
        _tell(model, seconds=time.monotonic() - began)
        return model

    def _take(self, name: str, files: Mapping[str, bytes] | None) -> ModelFiles:
        """The model's files: those given, or those of the first repository that has the model."""
        if files:
            return Override(name, files)
        problem: UnreachableError | None = None
        for source in self._sources:
            try:
                taken = source.take(name)
            except UnreachableError as error:
                if name in source.names():
                    raise
                problem = error
                continue
            except OSError as error:
                problem = unreachable(error, name)
                continue
            if taken is not None:
                return taken
        text = f"failed to load '{name}', failed to poll from model repository: no repository has a folder of that name"
        raise problem or NoSuchModelError(text)

    def _read(
        self, name: str, override_json: str | None, folder: Path, backends: Mapping[str, Backend]
    ) -> LoadedConfig:
        """The configuration, as the backend completes it. Raises LoadError, and notes the failure."""
        try:
            return load_model_config(
                folder,
                backends={key: backend.auto_complete for key, backend in backends.items()},
                gpu_count=len(self.devices.gpus),
                override_json=override_json,
                config_name=self.options.config_name,
                auto_complete=self.options.auto_complete,
            )
        except MeshError as error:
            self.failures[name] = Failure("", error.message)
            message = f"failed to load '{name}', failed to poll from model repository: {error.message}"
            raise LoadError(message, Code.INTERNAL) from error

    def _versions(self, model: ReadModel) -> list[ServedVersion]:
        """Every version that the version policy chooses. Unchanged ones are taken over, the others made; if one fails,
        none is.
        """
        name = model.read.config.name
        versions: dict[int, ServedVersion] = {}
        made: list[ServedVersion] = []
        missing: Sequence[int] = model.read.versions
        while missing:
            before = self.loaded.get(name)
            for number in missing:
                known = before.at(str(number)) if before else None
                try:
                    one = self._maker.renewed(model, number, known)
                except BaseException as error:  # A model's own code; whatever it raises, the load failed.
                    self.devices.check()
                    for served in made:
                        close_now(served)
                    raise self._failed(name, str(number), error) from error
                versions[number] = one
                if one is not known:
                    made.append(one)
            # An unload takes unchanged versions away, also while others are made.
            now = self.loaded.get(name)
            there = [*made, *(now.versions if now else ())]
            missing = [number for number, served in versions.items() if served not in there]
        return [versions[number] for number in model.read.versions]

    def _failed(self, name: str, version: str, error: BaseException) -> LoadError:
        """The error for a version that could not be loaded, in Triton's words."""
        if isinstance(error, MeshError):
            reason = f"{CODE_NAMES[error.code]}: {error.message}"
        else:
            reason = sendable(f"Internal: {type(error).__name__}: {error}")
        self.failures[name] = Failure(version, reason)
        return LoadError(
            f"load failed for model '{name}': version {version} is at UNAVAILABLE state: {reason};\n", Code.INVALID_ARG
        )

    def _replace(self, name: str, model: LoadedModel) -> None:
        """Puts a model in its predecessor's place; versions that are not served any more are retired."""
        before = self.loaded.get(name)
        self.loaded[name] = model
        gone = [served for served in before.versions if served not in model.versions] if before else []
        self.retired += gone
        self._note_unloaded(name, [served.version for served in gone])
        for version in model.record.versions:
            self.unloaded[name].pop(version, None)
        if not self.unloaded[name]:
            del self.unloaded[name]


def _continues(before: LoadedModel, served: ServedVersion) -> bool:
    """Whether a version is the same as before, perhaps with other instances."""
    known = before.at(served.version)
    return known is not None and known.fingerprint.content == served.fingerprint.content


def _counted_under(served: ServedVersion, generation: str) -> ServedVersion:
    load = served.statistics.load
    if load.generation == generation:
        return served
    return replace(served, statistics=served.statistics.of(msgspec.structs.replace(load, generation=generation)))


def _since(began_s: float | None) -> str:
    return time.strftime("since %Y-%m-%d %H:%M:%S UTC", time.gmtime(began_s)) if began_s is not None else ""


def _tell(model: LoadedModel, *, seconds: float) -> None:
    config = model.record.config
    for note in config.notes:
        logs.info("model note", model=config.name, note=note)
    for written, meant in misspelt(config.parameters).items():
        logs.warning("unknown model parameter", model=config.name, parameter=written, did_you_mean=meant)
    logs.info(
        "model loaded",
        model=config.name,
        versions=",".join(model.record.versions),
        instances=0 if config.ensemble else config.instance_count,
        slots=model.versions[0].slots if model.versions else 0,
        seconds=round(seconds, 2),
    )
