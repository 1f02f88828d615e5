"""Batch strategies: a Python file by which a model decides which requests share a batch (triton-spec 3.4).

Triton loads a shared library with five hooks; here they are five functions of a module, under the same names:

    model_batcher_initialize(model: ModelConfig) -> batcher       once per load; the others are given its result
    model_batch_initialize(batcher) -> batch                      a batch is begun
    model_batch_include_request(request: BatchRequest, batch) -> bool     may this request join the batch?
    model_batch_finalize(batch)                                   the batch is formed, or will be formed again later
    model_batcher_finalize(batcher)                               the model is unloaded

The strategy adds to the rules of the dynamic batcher and replaces none. It is asked for the first request too, so that
it can measure it, but a single request always runs. So while a hook hangs (`--batch-limit-s`), requests run one by one.
While a batch waits for more requests, it is formed again from its first request on each time. All that a strategy does,
it does on one thread of its own, one hook at a time: it may keep what belongs to the thread that made it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from executor.configuration.parameters import STRATEGY
from executor.core.batching import Wait
from executor.core.dynamic_batcher import BatchRules
from executor.engine.error_texts import class_and_text
from executor.workers.engine_thread import EngineThread
from executor.workers.worker import FINALIZE_LIMIT_S
from shared.contract.errors import Code, LoadError, MeshError
from shared.contract.messages import InferMessage
from shared.contract.model_config import ModelConfig
from shared.contract.tensors import Tensor, to_numpy
from shared.process import logs
from shared.store.work_scripts import Front, RequestId, Seen

FILE_NAME = "batchstrategy.py"
HOOKS = (
    "model_batcher_initialize",
    "model_batch_initialize",
    "model_batch_include_request",
    "model_batch_finalize",
    "model_batcher_finalize",
)

_modules = itertools.count(1)


class StrategyError(MeshError):
    """A hook raised for one request. Only that request is answered with the error.

    request  its id
    """

    code = Code.INTERNAL

    def __init__(self, message: str, request: RequestId) -> None:
        super().__init__(message)
        self.request = request


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A waiting request, as a strategy sees it. rows: its own batch size."""

    id: str
    rows: int
    inputs: Mapping[str, Tensor]
    correlation_id: int | str
    priority: int
    timeout_us: int
    parameters: Mapping[str, str | int | bool | float]

    def shape(self, name: str) -> tuple[int, ...]:
        """An input's shape, with its batch dimension. Raises KeyError for an input that the request did not bring."""
        return self.inputs[name].shape

    def as_numpy(self, name: str) -> np.ndarray[Any, Any]:
        return to_numpy(self.inputs[name])


class BatchStrategy:
    """The loaded strategy of one model version."""

    def __init__(self, path: Path, config: ModelConfig, limit_s: float = 0.0) -> None:
        """Loads the file and initializes its batcher. Blocks. Raises LoadError with the reason.

        limit_s  how long the hooks for one batch may take; 0: any time
        """
        self.path = path
        self._limit_s = limit_s
        self._hangs = False
        self._hook = ""
        self._model = config.name
        self._thread = EngineThread(f"{config.name} strategy")
        self._module_name = f"seqmesh_batch_strategy_{next(_modules)}"
        try:
            self._thread.run(self._load, config)
        except BaseException:
            sys.modules.pop(self._module_name, None)
            self._thread.stop()
            raise

    async def decide(
        self, rules: BatchRules, front: Front, messages: Mapping[RequestId, InferMessage], *, was_busy: bool = False
    ) -> int | Wait:
        """How many requests of the front run now (see `BatchRules.decide`): one, while a hook hangs. Raises
        StrategyError.
        """
        self._hangs = self._hangs and not self._thread.is_idle
        if self._hangs:
            return 1
        try:
            async with asyncio.timeout(self._limit_s or None):
                return await self._thread.start(self._decide, rules, front, messages, was_busy=was_busy)
        except TimeoutError:
            self._hangs = True
            logs.error(
                "batch strategy hangs",
                model=self._model,
                hook=self._hook,
                seconds=self._limit_s,
                remedy="requests run one by one until it returns: mend it, and start the executor anew",
            )
            return 1

    async def close(self) -> None:
        """Finalizes the batcher. A failure of that is logged, and so is one that takes too long: it is left behind."""
        if not await self._thread.end(self._finalize, FINALIZE_LIMIT_S):
            logs.error("batch strategy not finalized", model=self._model, seconds=FINALIZE_LIMIT_S)

    def close_now(self) -> None:
        """As `close`, for a strategy that is not used yet, called from a thread that may block."""
        self._thread.end_now(self._finalize)

    def _finalize(self) -> None:
        self._quietly("model_batcher_finalize", self._batcher)
        sys.modules.pop(self._module_name, None)

    def _load(self, config: ModelConfig) -> None:
        self._hooks = self._hooks_of(self._import(self.path))
        self._batcher = self._initialized(config)

    def _decide(
        self, rules: BatchRules, front: Front, messages: Mapping[RequestId, InferMessage], *, was_busy: bool
    ) -> int | Wait:
        with self._asked("model_batch_initialize", front.front[0].id) as initialize:
            batch = initialize(self._batcher)

        def include(seen: Seen) -> bool:
            request = _request(seen, messages[seen.id])
            with self._asked("model_batch_include_request", seen.id) as includes:
                joins = includes(request, batch)
                if joins is None:
                    raise TypeError("it returned None, and not whether the request joins the batch")
                return bool(joins)  # within the block: an array has no truth value

        try:
            return rules.decide(
                front.front, now_us=front.now_us, deadline_us=front.deadline_us, was_busy=was_busy, include=include
            )
        finally:
            self._quietly("model_batch_finalize", batch)

    @contextmanager
    def _asked(self, hook: str, request: RequestId) -> Generator[Callable[..., Any]]:
        """A hook, and a block for its work on a request. What is raised there fails the request."""
        self._hook = hook
        try:
            yield self._hooks[hook]
        except BaseException as failure:
            raise StrategyError(f"{self._blame(hook)}: {class_and_text(failure)}", request) from failure

    def _quietly(self, hook: str, argument: Any) -> None:
        self._hook = hook
        try:
            self._hooks[hook](argument)
        except BaseException as failure:  # noqa: BLE001 - no request depends on this hook; the operator is told
            logs.error("batch strategy failed", failure, model=self._model, hook=hook)

    def _import(self, path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(self._module_name, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise LoadError(f"batch strategy '{path}' of model '{self._model}' is not a Python file")
        module = importlib.util.module_from_spec(spec)
        # Registered because dataclasses look a class's module up by its name.
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as failure:
            raise LoadError(
                f"batch strategy '{path}' of model '{self._model}' cannot be imported: {class_and_text(failure)}"
            ) from failure
        return module

    def _hooks_of(self, module: ModuleType) -> dict[str, Callable[..., Any]]:
        missing = [name for name in HOOKS if not callable(getattr(module, name, None))]
        if missing:
            raise LoadError(f"batch strategy '{self.path}' of model '{self._model}' has no {', '.join(missing)}")
        return {name: getattr(module, name) for name in HOOKS}

    def _initialized(self, config: ModelConfig) -> Any:
        try:
            return self._hooks["model_batcher_initialize"](config)
        except BaseException as failure:
            raise LoadError(f"{self._blame('model_batcher_initialize')}: {class_and_text(failure)}") from failure

    def _blame(self, hook: str) -> str:
        return f"{hook} of the batch strategy of model '{self._model}' failed"


def find_strategy(
    config: ModelConfig, model_dir: Path, version: str, backend_dirs: Sequence[Path] = (), limit_s: float = 0.0
) -> BatchStrategy | None:
    """A model version's batch strategy, loaded; None when it has none. Blocks. Raises LoadError.

    The parameter TRITON_BATCH_STRATEGY_PATH names the file, relative to the model's directory and inside the repository
    or a backend directory: a load request may bring the parameter, but no code from elsewhere. Else `batchstrategy.py`
    is looked for in the version's, the model's and the backend's directory (`<backend dir>/<backend>`), in this order.
    That of a sequence model, or of a model without `dynamic_batching`, is logged as an error and ignored, as in Triton.

    limit_s  how long its hooks may take for one batch (`BatchStrategy`)
    """
    named = config.parameters.get(STRATEGY)
    own = (model_dir / version, model_dir)
    if config.sequence_batching is not None or config.dynamic_batching is None:
        if named is not None or any((folder / FILE_NAME).is_file() for folder in own):
            cause = "it has no dynamic_batching"
            if config.sequence_batching is not None:
                cause = "sequence models batch by their own rules"
            logs.error("batch strategy ignored", model=config.name, cause=cause)
        return None
    if named is not None:
        path = (model_dir / named).resolve()
        if not any(path.is_relative_to(root.resolve()) for root in (model_dir.parent, model_dir, *backend_dirs)):
            raise LoadError(f"batch strategy '{named}' of model '{config.name}' is not in the model repository")
        return BatchStrategy(path, config, limit_s)
    folders = (*own, *(folder / config.backend for folder in backend_dirs))
    found = next((path for folder in folders if (path := folder / FILE_NAME).is_file()), None)
    if found is None:
        return None
    logs.info("batch strategy", model=config.name, version=version, file=str(found))
    return BatchStrategy(found, config, limit_s)


def _request(seen: Seen, message: InferMessage) -> BatchRequest:
    return BatchRequest(
        message.request_id,
        seen.rows,
        {tensor.name: tensor for tensor in message.inputs},
        message.correlation_id,
        message.priority,
        message.timeout_us,
        message.parameters,
    )
