"""What an executor serves: loaded models, and their versions with their engines."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from executor.models.custom_batching import BatchStrategy
from executor.models.fingerprints import Fingerprint
from executor.models.sources import ModelFiles
from executor.reporting.statistics import StatisticsRecorder
from executor.workers.readiness import Readiness
from executor.workers.worker import EngineWorker
from shared.contract.messages import ModelRecord, ServedModel
from shared.contract.model_config import ModelConfig
from shared.process import logs
from shared.statistics.reports import ModelReport


@dataclass(frozen=True, slots=True, eq=False)
class ServedVersion:
    """One version of a model with its engines, one worker per instance. It outlives a lost lease. An ensemble has none:
    executors only announce it, and gateways send its steps to the models that it names.

    files  the folder that it was loaded from, kept as long as the version exists; None: of no folder
    slots  of each instance; 0 for a stateless model
    cache_scope  what its answers depend on, for the response cache; "" if the model has it not enabled
    mark    what its sequences' states depend on: a load with another mark does not use them; "" if states are not
            compared
    """

    config: ModelConfig
    version: str
    workers: Sequence[EngineWorker]
    slots: int
    statistics: StatisticsRecorder
    fingerprint: Fingerprint
    files: ModelFiles | None = None
    strategy: BatchStrategy | None = None
    load_seconds: float = 0.0
    cache_scope: str = ""
    mark: str = ""

    def report(self, *, pending: int) -> ModelReport:
        """What this executor reports of the version. pending: requests that wait here"""
        memory = tuple(use for worker in self.workers for use in worker.memory_usage)
        batches, exemplars = self.statistics.take_batches(), tuple(self.statistics.requests.meter.exemplars)
        return ModelReport(self.config.name, self.version, pending, self.load_seconds, memory, batches, exemplars)

    @property
    def announcement(self) -> ServedModel:
        """What the registration says of the version."""
        return ServedModel(
            self.config.name,
            self.version,
            len(self.workers),
            self.slots,
            says_ready=all(one.is_ready for one in self.readiness),
            pageable=self.config.pageable,
            idle_ms=self.config.shortest_idle_ms,
            mark=self.mark,
        )

    @property
    def readiness(self) -> list[Readiness]:
        """The readiness checks of the instances that have one."""
        return [worker.readiness for worker in self.workers if worker.readiness is not None]


@dataclass(slots=True)
class LoadedModel:
    """A model with the versions that this executor serves.

    record    what it was loaded by
    versions  in no order
    """

    record: ModelRecord
    versions: list[ServedVersion]

    def at(self, version: str) -> ServedVersion | None:
        return next((served for served in self.versions if served.version == version), None)


@contextmanager
def finalizing(model: str, instance: str) -> Generator[None]:
    """A block that finalizes an instance. What it raises is logged, so that it holds up nothing behind it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a model's own `finalize` may raise anything; it is gone anyway
        logs.error("model not finalized", error, model=model, instance=instance)


async def close(served: ServedVersion) -> None:
    for worker in served.workers:
        with finalizing(served.config.name, worker.name):
            await worker.close()
    if served.strategy is not None:
        await served.strategy.close()


def close_now(served: ServedVersion) -> None:
    """Finalizes the engines of a version on which nothing has run yet."""
    close_workers_now(served.config.name, served.workers)
    if served.strategy is not None:
        served.strategy.close_now()


def close_workers_now(model: str, workers: Iterable[EngineWorker]) -> None:
    """Finalizes engines on which nothing has run yet."""
    for worker in workers:
        with finalizing(model, worker.name):
            worker.close_now()
