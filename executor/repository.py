"""The models of this executor: found in the repository's folders, loaded, and kept with what became of each.

A model that fails to load does not stop the others: it stands in the repository index with its reason. Everything here
is slow (files, weights) and runs on a thread; nothing here knows of Redis.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from executor.custom_batching import BatchStrategy
from executor.devices import Devices
from executor.engine.backends import find_backend, installed_backends
from executor.engine.base import Engine, LoadRequest
from executor.labels import read_labels
from executor.statistics import ModelStatistics
from executor.worker import EngineWorker
from shared import logs
from shared.errors import LoadError, MeshError
from shared.ids import InstanceIndex
from shared.messages import ModelRecord, RepositoryEntry, ServedModel
from shared.model_config.load import LoadedConfig, load_model_config
from shared.model_config.values import ModelConfig
from shared.tally import Load


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """One version of a model with its engines, one worker per instance. Outlives a lost lease."""

    config: ModelConfig
    version: str
    workers: Sequence[EngineWorker]
    statistics: ModelStatistics
    strategy: BatchStrategy | None = None

    @property
    def announcement(self) -> ServedModel:
        """What the registration says of it."""
        return ServedModel(self.config.name, self.version, len(self.workers), self.config.slots_per_instance)


@dataclass(slots=True)
class LoadedModel:
    """A model that is being served."""

    record: ModelRecord
    versions: list[ServedVersion]


@dataclass(slots=True)
class Repository:
    """All models in the given folders.

    loaded    by name
    failures  by name: why the last load failed
    retired   unloaded or replaced, to be closed once nothing runs on them any more
    """

    folders: Sequence[Path]
    devices: Devices
    loaded: dict[str, LoadedModel] = field(default_factory=dict[str, LoadedModel])
    failures: dict[str, str] = field(default_factory=dict[str, str])
    unloaded: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    retired: list[LoadedModel] = field(default_factory=list[LoadedModel])

    def names(self) -> list[str]:
        """Every model folder, sorted; the first repository that has a name wins."""
        return sorted({path.name for folder in self.folders for path in _model_folders(folder)})

    def load(
        self, name: str, override_json: str | None = None, folder: Path | None = None, generation: str = "0"
    ) -> LoadedModel:
        """Loads a model (anew). Blocks. Raises LoadError with the reason, which stays in `failures`.

        folder      a directory with the model's files, in place of the one in the repository
        generation  which load it is (`ModelRecord.generation`)
        """
        began = time.monotonic()
        try:
            model = self._load(name, override_json or None, folder, generation)
        except MeshError as error:
            self.failures[name] = error.message
            raise
        except Exception as error:
            self.failures[name] = f"{type(error).__name__}: {error}"
            raise LoadError(f"failed to load '{name}': {error}") from error
        self.failures.pop(name, None)
        self.unloaded.pop(name, None)
        if name in self.loaded:
            self.retired.append(self.loaded[name])
        self.loaded[name] = model
        for note in model.record.config.notes:
            logs.info("model note", model=name, note=note)
        logs.info(
            "model loaded",
            model=name,
            versions=",".join(model.record.versions),
            instances=model.record.config.instance_count,
            slots=model.record.config.slots_per_instance,
            seconds=round(time.monotonic() - began, 2),
        )
        return model

    def unload(self, name: str) -> None:
        """Takes a model out of service. Unknown names are no error."""
        model = self.loaded.pop(name, None)
        if model is None:
            return
        self.unloaded[name] = model.record.versions
        self.retired.append(model)
        logs.info("model unloaded", model=name)

    async def close_retired(self) -> None:
        """Finalizes the engines of models that were unloaded or replaced."""
        while self.retired:
            await close(self.retired.pop())

    async def close(self) -> None:
        """Finalizes every engine."""
        self.retired += self.loaded.values()
        self.loaded.clear()
        await self.close_retired()

    def index(self) -> tuple[RepositoryEntry, ...]:
        """What the repository index says of this executor's models."""
        entries: list[RepositoryEntry] = []
        for name in sorted({*self.names(), *self.loaded}):
            if name in self.loaded:
                entries += [RepositoryEntry(name, version, "READY") for version in self.loaded[name].record.versions]
            elif name in self.failures:
                entries.append(RepositoryEntry(name, "", "UNAVAILABLE", self.failures[name]))
            elif name in self.unloaded:
                entries += [
                    RepositoryEntry(name, version, "UNAVAILABLE", "unloaded") for version in self.unloaded[name]
                ]
            else:
                entries.append(RepositoryEntry(name))
        return tuple(entries)

    def _load(self, name: str, override_json: str | None, folder: Path | None, generation: str) -> LoadedModel:
        found = (path for root in self.folders for path in _model_folders(root) if path.name == name)
        folder = folder or next(found, None)
        if folder is None:
            raise LoadError(f"failed to load '{name}', failed to poll from model repository")
        backends = {key: backend.auto_complete for key, backend in installed_backends().items()}
        loaded = load_model_config(folder, backends=backends, gpu_count=self.devices.count, override_json=override_json)
        labels = read_labels(loaded.config, loaded.model_dir)
        versions = [self._serve(loaded, Load(name, str(version), generation)) for version in loaded.versions]
        names = tuple(str(version) for version in loaded.versions)
        record = ModelRecord(loaded.config, loaded.json, names, generation, labels)
        return LoadedModel(record, versions)

    def _serve(self, loaded: LoadedConfig, load: Load) -> ServedVersion:
        config = loaded.config
        backend = find_backend(config.backend)
        engines: list[Engine] = []
        workers: list[EngineWorker] = []
        try:
            for name, device in self.devices.places(config):
                request = LoadRequest(
                    config=config,
                    config_json=loaded.json,
                    model_dir=loaded.model_dir,
                    version=load.version,
                    instance_name=name,
                    device=device,
                    slots=config.slots_per_instance,
                )
                engines.append(backend.load(request))
                workers.append(EngineWorker(engines[-1], config.name, name, InstanceIndex(len(workers))))
        except BaseException:
            for engine in engines:
                engine.close()
            raise
        return ServedVersion(config, load.version, workers, ModelStatistics(load))


async def close(model: LoadedModel) -> None:
    """Finalizes every engine of a model."""
    for version in model.versions:
        for worker in version.workers:
            await worker.close()


def _model_folders(root: Path) -> Iterable[Path]:
    return (path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
