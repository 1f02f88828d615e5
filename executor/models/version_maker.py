"""Makes the versions of a model: engines with their threads, warmed up, and what tells one load's states from
another's.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from executor.configuration.load import LoadedConfig
from executor.engine.backends import folder_of
from executor.engine.base import Backend, Engine, LoadRequest
from executor.engine.mkl import require_fixed_products
from executor.engine.python.model_completion import LIMIT_S
from executor.models.custom_batching import find_strategy
from executor.models.fingerprints import Fingerprint, fingerprint
from executor.models.fixed_shape import settle_shape
from executor.models.recovery import with_methods
from executor.models.served import ServedVersion, close_now, close_workers_now, finalizing
from executor.models.slots import slots_within
from executor.models.sources import ModelFiles, Override
from executor.models.warmup import warm_up
from executor.reporting.statistics import StatisticsRecorder
from executor.workers.devices import Devices
from executor.workers.engine_thread import EngineThread
from executor.workers.worker import EngineWorker
from shared.contract.ids import InstanceIndex
from shared.contract.limits import VALUE_BYTES_MAX
from shared.contract.model_config import FixedShape
from shared.process import logs
from shared.statistics.metrics_config import FIRST_RESPONSE, FIRST_RESPONSE_BUCKETS_MS, MetricsConfig
from shared.statistics.tally import ModelLoad


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the executor's settings say about loads.

    config_name         name of the configurations that are read in place of config.pbtxt
    backend_dirs        folders that hold, in a folder of each backend's name, the backend's batch strategy, or the
                        `model.py` that is the backend
    auto_complete       models may complete their configurations
    completion_limit_s  how long a python model may take for that
    metrics             which latencies are counted
    value_bytes_max     largest state tensor of one sequence
    state_bytes_max     bytes of the states that an instance holds, where they decide about its slots (`slots_within`)
    call_limit_s        how long a call may take, for engines that end late calls themselves, and for batch strategies
    reloads             models may be loaded again; if not, no state can come from another load
    """

    config_name: str = ""
    backend_dirs: Sequence[Path] = ()
    auto_complete: bool = True
    completion_limit_s: float = LIMIT_S
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    value_bytes_max: int = VALUE_BYTES_MAX
    state_bytes_max: int = 0
    call_limit_s: float = 0.0
    reloads: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend_dirs", [folder.absolute() for folder in self.backend_dirs])


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model as it was read: what all of its versions are made from.

    read        the configuration, as the backend has completed it
    files       what the versions are made from
    backends    one set: what a backend has unpacked to complete the configuration, it loads from
    generation  see `ModelRepository.load`
    """

    read: LoadedConfig
    files: ModelFiles
    backends: Mapping[str, Backend]
    generation: str


class VersionMaker:
    """devices: on which instances are made"""

    def __init__(self, devices: Devices, options: LoadOptions) -> None:
        self._devices = devices
        self._options = options

    def renewed(self, model: ReadModel, number: int, known: ServedVersion | None) -> ServedVersion:
        """A version as its files are now: the known one if they are the same, else one that is made. If they change
        meanwhile it is made once more, so that its mark is that of what every instance has loaded.
        """
        name, version = model.read.config.name, str(number)
        for is_last in (False, True):
            present = self._fingerprint_of(model, version)
            if known is not None and known.fingerprint == present:
                return known
            goes_on = known is not None and known.fingerprint.content == present.content
            counted = known.statistics.load if known and goes_on else ModelLoad(name, version, model.generation)
            served = self._serve(model, counted, present)
            try:
                made = self._marked(model, served)
                is_shared = made.cache_scope or (made.mark and made.config.recoverable)
                if not is_shared or self._fingerprint_of(model, version) == present:
                    return made
            except BaseException:
                close_now(served)
                raise
            logs.warning("model changed while it was loaded", model=name, version=number)
            if not is_last:
                close_now(served)
        # A model that writes into its folder with every load: it is served, and has its states to itself.
        return replace(made, cache_scope="", mark=made.mark and secrets.token_hex(8))

    def _marked(self, model: ReadModel, served: ServedVersion) -> ServedVersion:
        """A version with what is the same on all executors with the same files: mark and cache scope. If only the
        engine holds the states, the mark is unique: no other load can use them.
        """
        config = served.config
        is_cached = config.response_cache and not config.ensemble
        has_states = self._options.reloads and config.sequence_batching is not None
        content = ""
        if is_cached or (has_states and config.recoverable):
            content = self._fingerprint_of(model, served.version, by_content=True).content
        mark = (content if config.recoverable else secrets.token_hex(8)) if has_states else ""
        return replace(served, cache_scope=content if is_cached else "", mark=mark)

    def _fingerprint_of(self, model: ReadModel, version: str, *, by_content: bool = False) -> Fingerprint:
        by_content |= isinstance(model.files, Override)
        backend_dir = folder_of(model.read.config.backend, self._options.backend_dirs)
        return fingerprint(model.read, int(version), by_content=by_content, backend_dir=backend_dir)

    def _serve(self, model: ReadModel, counted: ModelLoad, present: Fingerprint) -> ServedVersion:
        """Makes the engines of a version. counted: what its requests are counted under"""
        began, options = time.monotonic(), self._options
        config, version, model_dir = model.read.config, counted.version, model.read.model_dir
        if config.ensemble:
            statistics = StatisticsRecorder(counted, options.metrics)
            return ServedVersion(config, version, (), 0, statistics, present, model.files)
        slots = slots_within(config, options.state_bytes_max)
        engines: list[Engine] = []
        workers: list[EngineWorker] = []
        try:
            for name, device in self._devices.places(config):
                request = LoadRequest(
                    config=config,
                    config_json=model.read.json,
                    model_dir=model_dir,
                    version=version,
                    instance_name=name,
                    device=device,
                    slots=slots,
                    state_value_bytes_max=options.value_bytes_max,
                )
                thread, index = EngineThread(name), InstanceIndex(len(workers))
                engines.append(_loaded(model.backends[config.backend], request, thread))
                workers.append(
                    EngineWorker(engines[-1], config.name, name, index, self._devices, thread, options.call_limit_s)
                )
            config = with_methods(config, engines)
            strategy = find_strategy(config, model_dir, version, options.backend_dirs, options.call_limit_s)
        except BaseException:
            close_workers_now(config.name, workers)
            raise
        bounds_ms = config.histogram_buckets.get(FIRST_RESPONSE, FIRST_RESPONSE_BUCKETS_MS)
        statistics = StatisticsRecorder(counted, options.metrics, bounds_ms)
        seconds = time.monotonic() - began
        return ServedVersion(config, version, workers, slots, statistics, present, model.files, strategy, seconds)


def _loaded(backend: Backend, request: LoadRequest, thread: EngineThread) -> Engine:
    """An instance that is loaded, warmed up and tried, all on its own thread: a model may keep what belongs to the
    thread that made it, such as a connection of sqlite3. If that fails the thread ends.
    """
    config, name = request.config, request.instance_name
    try:
        if config.fixed_shape is not FixedShape.OFF and request.device == "cpu":
            require_fixed_products(config.name)
        engine = thread.run(backend.load, request)
    except BaseException:
        thread.stop()
        raise
    try:
        thread.run(warm_up, engine, config, request.model_dir, name)
        thread.run(settle_shape, engine, config, name, request.slots)
    except BaseException:
        with finalizing(config.name, name):
            thread.end_now(engine.close)
        raise
    return engine
