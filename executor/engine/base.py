"""The one interface between batching and the code that runs a model.

An engine is one instance of one version of a model on one device. It knows nothing of sequence ids, streams or Redis:
it is given rows, and each row may name a slot of its state arena. A backend is found by the entry-point group
`seqmesh.backends`; the built-in ones are registered in `backends.py`.

An engine gets one call at a time, on a thread of its own, which has made it and closes it. Short batches of one that
`OnlyComputes` may run on the event loop's thread.

Objects that are made once per row are msgspec structs: a frozen dataclass takes fourteen times as long to make.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from shared.contract.calls import version_name
from shared.contract.ids import CorrelationId
from shared.contract.limits import VALUE_BYTES_MAX
from shared.contract.messages import InferMessage
from shared.contract.model_config import ModelConfig
from shared.contract.parameters import Parameter
from shared.contract.state_fields import GrownState
from shared.contract.tensors import Tensor
from shared.statistics.tally import MemoryUse, Timings


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """What names a row's request in the mesh: the same whoever runs it, and how often.

    name     of the sequence, or of the stateless request
    step     the step's number in the sequence's record; 0 for a stateless request
    passes   how often the step was run before without being answered (`iterative_sequence`)
    arrived_ns, chain, traceparent  of the request's `InferMessage`
    deadline_us  monotonic clock of this machine, us, when those who wait for a call give up; 0: none of them said
    replayed_in  the epoch of the owner that runs a committed step again, for its state alone; 0: a step that is to be
                 answered, or a stateless request. Nobody waits for a replayed step, so it has no deadline
    """

    name: str
    step: int
    passes: int
    arrived_ns: int
    chain: tuple[str, ...]
    deadline_us: int
    traceparent: str
    replayed_in: int = 0

    @classmethod
    def of(
        cls, message: InferMessage, name: str, taken_us: int, step: int = 0, passes: int = 0, replayed_in: int = 0
    ) -> Origin:
        """Of a request, as the mesh holds it. taken_us: when this executor took it in, monotonic clock"""
        deadline_us = 0
        if message.deadline_ms and not replayed_in:
            # By the gateway's clock, which may be hours off: from here on counts what was left when the call arrived.
            deadline_us = taken_us + message.deadline_ms * 1000 - message.arrived_ns // 1000
        return cls(name, step, passes, message.arrived_ns, message.chain, deadline_us, message.traceparent, replayed_in)


class Answers(Protocol):
    """Where the answers to one open request go: one for all passes over the request. Its methods may be called from any
    thread. A request to a decoupled model is open, and any other whose only answer comes behind its batch.
    """

    def send(self, answer: RowResult | RowError) -> None:
        """An answer that is not the last one. Waits while too many answers are on their way to Redis. Dropped if the
        request is over, or its caller has gone.
        """
        ...

    def end(self, last: RowResult | RowError, keep_state: Callable[[], None] | None = None) -> None:
        """The last answer; a later one is dropped. Does not wait.

        keep_state  moves the state in the row's slot on. It is called before the answer is taken, and not at all if the
                    request is over: its slot may be another sequence's by then
        """
        ...

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for the request any more, or this executor does not run it any more."""
        ...


class LateAnswer:
    """The only answer to a request, which comes after its batch has returned: see `Answers`, to which it is given once
    that is known.
    """

    def __init__(self) -> None:
        self._to: Answers | None = None
        self._is_given_up = False
        self._end: tuple[RowResult | RowError, Callable[[], None] | None] | None = None
        self._ended = threading.Event()
        # Re-entrant: the collector of garbage may call `end` on a thread that holds it.
        self._lock = threading.RLock()

    def give(self, to: Answers) -> None:
        """Says where the answer goes; one that is there already goes at once."""
        with self._lock:
            self._to, end = to, self._end
        if end is not None:
            to.end(*end)

    def give_up(self) -> None:
        """The answer goes nowhere, and no state moves on."""
        self._is_given_up = True

    def end(self, last: RowResult | RowError, keep_state: Callable[[], None] | None = None) -> None:
        """Keeps the answer until it is known where it goes. A second one is dropped."""
        with self._lock:
            if self._end is not None:
                return
            self._end, to = (last, keep_state), self._to
        self._ended.set()
        if to is not None:
            to.end(last, keep_state)

    def send(self, answer: RowResult | RowError) -> None:
        """Not called: there is one answer."""
        raise AssertionError("a model that is not decoupled has one answer")

    def wait(self) -> RowResult | RowError:
        """Waits for the answer, which then goes nowhere else. The state moves on."""
        self._ended.wait()
        assert self._end is not None, "it has ended"
        last, keep_state = self._end
        if keep_state is not None:
            keep_state()
        return last

    @property
    def is_cancelled(self) -> bool:
        return self._is_given_up or (self._to is not None and self._to.is_cancelled)


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One request's part of a batch; or a null row, which is padding that no model result may depend on.

    inputs    by name; each tensor with its leading batch dimension if the model has one (a stateless request may bring
              several rows of its own: then dim 0 is that number). Only what the client sent; control tensors are in
              `controls`
    controls  control tensors by name, shaped [1, 1], or [1] for a model without batch dimension
    slot      arena row that holds this sequence's implicit state; None for a stateless model or a null row. A row with
              START may have none: it begins from the initial state, and its state is forgotten afterwards (warm-up)
    start     begin from the initial state instead of the arena's content
    end       the sequence's last step
    outputs   names that the caller asked for; empty means all
    origin    only for engines that may ask for it (`MakesCalls`). None for a row of no request: padding, trials and
              warm-up
    answers   of a decoupled model: where its answers go; None where nobody is answered (warm-up)
    """

    inputs: Mapping[str, Tensor]
    controls: Mapping[str, Tensor] = {}
    slot: int | None = None
    start: bool = False
    end: bool = False
    null: bool = False
    correlation_id: CorrelationId = 0
    request_id: str = ""
    outputs: tuple[str, ...] = ()
    timeout_us: int = 0
    priority: int = 0
    parameters: Mapping[str, Parameter] = {}
    origin: Origin | None = None
    answers: Answers | None = None


class RowError(msgspec.Struct, frozen=True, array_like=True):
    """Why one row has no result. The row's state stays as it was.

    code         a `shared.contract.errors.Code`
    model_state  of a model that hands its state out: the state after the failed step; b"" if the model was not asked
    lost         the model could not be asked for its state, so the state is unknown from here on
    number       as of `ReplyMessage`
    """

    code: str
    message: str
    model_state: bytes = b""
    lost: bool = False
    number: int = 0


class RowResult(msgspec.Struct, frozen=True, array_like=True):
    """One row's outputs, in the order of the model's configuration; only declared outputs, and only those asked for.

    states  the implicit state after this step, by the state's *input* name, without the batch dimension: bytes,
            dtype and shape as they go into the checkpoint. Empty for stateless models, and where `want_state` was off
    grown   what the checkpoint writes of the states that grow, which are not in `states`
    again   the model wants this request in a later batch once more before it answers (triton-spec 1.10): no outputs.
            Only from models with `iterative_sequence`
    parameters  of the response, for the caller
    model_state  the state after this step as the model's own method gave it, encoded; only where `want_state` was on
                 and the model has such a method (see `HandsOutState`)
    open  the row's answers go to `Row.answers`, now and later: this is none of them. Of a model that is not decoupled,
          the only answer comes by `late`
    late  from an engine, where `open`; never sent anywhere
    number, empty  as of `ReplyMessage`
    """

    outputs: Sequence[Tensor]
    states: Mapping[str, Tensor] = {}
    again: bool = False
    parameters: Mapping[str, Parameter] = {}
    model_state: bytes = b""
    grown: Sequence[GrownState] = ()
    open: bool = False
    number: int = 0
    empty: bool = False
    late: LateAnswer | None = None


NO_TIME = Timings(0, 0, 0)


class BatchResult(msgspec.Struct, frozen=True):
    """One entry per row given, in the same order (null rows: None)."""

    rows: Sequence[RowResult | RowError | None]
    timings: Timings


class Engine(Protocol):
    """One loaded instance of a model, with the states of its slots."""

    def run(self, rows: Sequence[Row], want_state: Sequence[bool]) -> BatchResult:
        """Runs one batch and moves each row's implicit state on, in the arena.

        rows        1..max_batch_size requests' rows, no slot twice
        want_state  per row: whether `RowResult.states` must be filled. These states are the sequence's next checkpoint,
                    unless the sequence begins anew here: by a START, or by `load_states`
        returns     a row that fails has a `RowError` and leaves its slot's state as it was; a failing row never
                    changes another row's result. An exception out of here means: every row failed; and so does another
                    number of results.
        """
        ...

    def load_states(self, slots: Sequence[int], states: Sequence[Mapping[str, Tensor]]) -> None:
        """Puts checkpoints' tensors (by state input name, no batch dimension) into arena rows.

        If it raises, the worker tries the states one by one, so that only one that does not fit is refused.
        """
        ...

    def describe_state(self, slot: int) -> str:
        """A line for the log: each state's name, dtype, shape, mean and norm."""
        ...

    def drop_state(self, slot: int) -> None:
        """Forgets an arena row. Rows of a fixed size may stay as they are, because a START overwrites them.
        It is called for sequences that leave if the engine `FreesSlots`.
        """
        ...

    def close(self) -> None:
        """Calls the model's `finalize`, frees the device. The engine is not used afterwards."""
        ...


@runtime_checkable
class MeasuresMemory(Protocol):
    """An engine that knows how much memory it holds. May be asked from another thread, while a batch runs."""

    def memory_usage(self) -> Sequence[MemoryUse]:
        """Memory of the weights and of fixed-size state, without what a running batch takes."""
        ...


@runtime_checkable
class OnlyComputes(Protocol):
    """An engine that knows whether a batch does nothing but compute: its call waits for nothing, and cannot tell on
    which thread it is made.
    """

    @property
    def only_computes(self) -> bool: ...


@runtime_checkable
class RunsAhead(Protocol):
    """An engine whose device may compute a batch while the next one is prepared."""

    @property
    def runs_ahead(self) -> bool: ...

    def begin(self, rows: Sequence[Row], want_state: Sequence[bool]) -> Callable[[], BatchResult]:
        """As `Engine.run`, but returns as soon as the device has its work, and what waits for the result. That is
        called once, on another thread, while other calls are made of the engine, but before `close`.
        """
        ...


@runtime_checkable
class LimitsCalls(Protocol):
    """An engine that ends a call that does not return, by itself: its executor need not end with it."""

    def limit_calls(self, limit_s: float) -> None:
        """From now on a call may take so long; 0: for ever."""
        ...


@runtime_checkable
class MakesCalls(Protocol):
    """An engine whose model may call other models: its rows say where they come from (`Row.origin`)."""

    @property
    def makes_calls(self) -> bool: ...


@runtime_checkable
class RunsAgain(Protocol):
    """An engine that may have to run open rows again, between the calls that are made of it."""

    def run_again_on(self, post: Callable[[Callable[[], None]], None]) -> None:
        """post: has the engine's own thread make a call after those before it. It may be called from any thread"""
        ...


@runtime_checkable
class SeesCancellation(Protocol):
    """An engine whose model may ask whether anybody still waits for a row."""

    def cancel(self, row: Row) -> None:
        """Nobody waits for this row any more, which runs, or which `run` is about to be given. Changes nothing if its
        batch is over. May be called from another thread, while a batch runs.
        """
        ...


@runtime_checkable
class ChecksReadiness(Protocol):
    """An engine whose model may say that it is not ready."""

    @property
    def has_readiness(self) -> bool:
        """Whether the model has a readiness check."""
        ...

    def is_ready(self) -> bool:
        """Whether the model calls itself ready.
        Does not raise; may be called from another thread, while a batch runs.
        """
        ...


@runtime_checkable
class FixesShape(Engine, Protocol):
    """An engine that can run a model so that a row's results do not depend on its batch (`fixed_shape`).

    batch_rows     rows of every call of the model: 1 where each row runs alone, 0 where the mode is off
    alone_because  why rows run alone; "" where they do not
    is_testable    whether made-up rows may be run, because they leave nothing behind in the model
    """

    @property
    def batch_rows(self) -> int: ...
    @property
    def alone_because(self) -> str: ...
    @property
    def is_testable(self) -> bool: ...
    def run_rows_alone(self, because: str) -> None:
        """From now on every row runs alone. because: the reason, one line for the operator"""
        ...

    def move_weights(self, offset_bytes: int) -> None:
        """Moves each weight to `offset_bytes` (a multiple of 64, less than a page) behind the beginning of a page.
        Weights that the engine cannot move stay.
        """
        ...


@runtime_checkable
class HandsOutState(Protocol):
    """An engine whose model keeps the state of its sequences itself, and may have methods to hand it out.

    If the model has such methods, `run` fills `model_state` of every row whose state is wanted, and of every row that
    failed in the middle of its sequence. Only the model knows what a failed step left of the state, and the next owner
    must find the same.
    """

    @property
    def hands_out_state(self) -> bool:
        """Whether the model has methods to hand its state out."""
        ...

    def restore_model(self, correlation_id: CorrelationId, state: bytes) -> None:
        """Gives the model a sequence's state back. Raises ModelError if the model refuses it."""
        ...


@runtime_checkable
class FreesSlots(Protocol):
    """An engine in which a slot's state may take memory of its own."""

    @property
    def frees_slots(self) -> bool:
        """Whether it does, until `Engine.drop_state`."""
        ...


@runtime_checkable
class ReleasesSequences(Protocol):
    """An engine whose model may want to know when it does not own a sequence any more."""

    @property
    def has_release(self) -> bool:
        """Whether the model has a method for that."""
        ...

    def release(self, correlation_id: CorrelationId) -> None:
        """Has the model forget a sequence, if the model was given it. Does not raise."""
        ...

    def release_all(self) -> None:
        """Has the model forget every sequence that it was given."""
        ...


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """All that a backend needs to make one instance.

    config  the configuration, checked and complete
    config_json  Triton's canonical JSON of the same configuration, as `model.py` gets it
    model_dir  the model's folder in the repository; the model's file lies in the folder of the version in it
    instance_name  name of this one instance, for logs and for `model.py`
    device  "cpu" or "cuda:<n>"
    slots   sequences whose states it may be given (0 for a stateless model). There may be 262,144: an engine takes
            memory for them as they are used
    state_value_bytes_max  largest state tensor of one sequence: a step that leaves a larger one fails
    code  of a python-based backend: the backend's `model.py`, in the place of one in `model_dir`
    """

    config: ModelConfig
    config_json: str
    model_dir: Path
    version: str
    instance_name: str
    device: str
    slots: int
    state_value_bytes_max: int = VALUE_BYTES_MAX
    code: Path | None = None

    @property
    def version_name(self) -> str:
        """The version among all that wait for calls."""
        return version_name(self.config.name, self.version)


class Backend(Protocol):
    """A kind of model file. `name` is what `backend:` names in a configuration."""

    name: str

    def auto_complete(self, config_json: str, version_dir: Path) -> str:
        """Fills in what a configuration left out, from the model's own signature; Triton's JSON in, the same out.

        Raises `shared.contract.errors.ConfigError` when model and configuration contradict each other.
        """
        ...

    def load(self, request: LoadRequest) -> Engine:
        """Loads the model. Raises `shared.contract.errors.LoadError` with the reason."""
        ...
