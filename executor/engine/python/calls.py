"""What a python model's call of another model is: to which request it belongs, its name, and who waits for it.

A model calls by `InferenceRequest.exec` and `async_exec`. The calls leave through one door, which the executor installs
(`install`). It has the two methods of `Calls`, and everything that passes it is a message: a process that runs an
instance for the executor installs a door of its own, which hands them on
(`executor.engine.python.process.remote_calls`).

**To which request of the batch a call belongs** cannot be seen from outside. The rule: to the request whose `trace()`
the call was given; else to the request of the batch with the same correlation id; else to the batch's only request;
else to none.

**A call's name** makes it the same call when its step runs again, after a takeover or because a neighbour failed. It is
made of its request's own name in the mesh (`Origin`), of whom it calls, and of its ordinal: how many calls to the same
model and sequence this request had made before. So a model must make its calls to one sequence in the same order each
time; calls to different ones may overtake each other. A call of no request is named at random: it is answered once, but
it is another call when the step runs again.

A thread of an instance that waits here is not hung (`waits`).
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
import uuid
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import msgspec
import xxhash

from executor.engine.base import Origin, Row
from executor.engine.python.model_metrics import TritonModelException
from shared.contract.calls import CALL_DEPTH_MAX, models_of, version_name, waiting
from shared.contract.errors import Code, MeshError
from shared.contract.ids import CorrelationId, SequenceId, sequence_id
from shared.contract.parameters import Parameter
from shared.contract.tensors import Tensor

NOT_NOW = "BLS is only supported during the 'execute' function."
"""Triton's text."""
NOT_HERE = "calls to other models are made within a mesh only, and not by a process that a model has forked"


class ModelCall(msgspec.Struct, frozen=True):
    """A call, complete.

    number       of the call in this process
    model, version, request_id, correlation_id, flags, inputs, outputs, timeout_us, parameters
                 as the model made its request; version "": the mesh chooses; flags: START 1, END 2
    name         the same when the step that makes the call runs again; "" for a call that nobody could tell again
    chain        who waits for its answer, the first caller first, its own model last; empty for a call of a thread
                 of the model's own
    deadline_us  monotonic clock of this machine, us, when those who wait give up; 0: none of them said
    traceparent  trace context of its request
    asks_readiness
                 the model is not to run: it is asked whether it is ready
    replayed     the sequence of its step, and its owner's epoch, if the step was committed before and runs again for
                 its state alone: without the call's answer the sequence would be lost
    """

    number: int
    model: str
    version: str = ""
    request_id: str = ""
    correlation_id: CorrelationId = 0
    flags: int = 0
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[str, ...] = ()
    timeout_us: int = 0
    parameters: dict[str, Parameter] = {}
    name: str = ""
    chain: tuple[str, ...] = ()
    deadline_us: int = 0
    traceparent: str = ""
    asks_readiness: bool = False
    replayed: tuple[SequenceId, int] | None = None


class CallAnswer(msgspec.Struct, frozen=True):
    """A response. error_code: a `shared.contract.errors.Code`; "" for success. is_ready: answers `asks_readiness`"""

    outputs: tuple[Tensor, ...] = ()
    parameters: dict[str, Parameter] = {}
    error_code: str = ""
    error: str = ""
    is_ready: bool = False


class AnswerStream(Protocol):
    """The responses to a call that may get any number."""

    def read(self) -> Future[CallAnswer | None]:
        """The next response; None behind the last one. One read at a time."""
        ...

    def cancel(self) -> None:
        """The responses that have not come are not wanted any more."""
        ...


class Calls(Protocol):
    """Makes calls. Both methods may be called from any thread but the event loop's, and return at once."""

    def start(self, call: ModelCall) -> Future[CallAnswer]:
        """Makes a call. The future fails in no other way than by being cancelled, which gives the call up."""
        ...

    def stream(self, call: ModelCall) -> AnswerStream:
        """Makes a call that may get any number of responses."""
        ...


class InstanceWait(msgspec.Struct, frozen=True):
    """An instance that waits for the answer to a call.

    caller, target  versions of models (`version_name`); target "": it waits for no model, only for a gateway
    since_ms        wall clock. 0 of a replayed step, whose sequence would be lost if its call failed: of a deadlock it
                    is never the youngest, unless all are
    thread          of this process, on which it waits; 0: the instance is a process of its own
    """

    number: int
    caller: str
    instance: str
    target: str
    since_ms: int
    thread: int


class Execution:
    """One call of a model's `execute`.

    version      of the model (`version_name`)
    rows         its requests, null rows among them
    thread       that runs it: it is known by that
    loop_thread  on which its coroutine runs, for which `thread` waits; 0: none
    """

    def __init__(self, model: str, version: str, instance: str, rows: Sequence[Row]) -> None:
        self.model = model
        self.version = version
        self.instance = instance
        self.thread = threading.get_ident()
        self.loop_thread = 0
        self._is_over = False
        self._rows = rows
        self._made: dict[tuple[str, ...], int] = {}
        self._lock = threading.Lock()

    def origin_of(self, correlation_id: CorrelationId) -> Origin | None:
        """The request to which a call without `trace` belongs; None if that cannot be known."""
        rows = [row for row in self._rows if not row.null]
        if len(rows) > 1:
            rows = [row for row in rows if correlation_id and row.correlation_id == correlation_id]
        return rows[0].origin if len(rows) == 1 else None

    def name(self, origin: Origin, call: ModelCall) -> str:
        """The name of the next call of a request to this model and sequence."""
        # A sequence's name comes again with its next run, but the time of a step's arrival does not.
        arrived = str(origin.arrived_ns) if origin.step else ""
        of = (self.model, origin.name, str(origin.step), str(origin.passes), arrived)
        to = (call.model, call.version, type(call.correlation_id).__name__, str(call.correlation_id))
        with self._lock:
            ordinal = self._made.get(of + to, 0)
            self._made[of + to] = ordinal + 1
        return "call-" + xxhash.xxh3_128_hexdigest("\n".join((*of, *to, str(ordinal))).encode())

    def over(self) -> None:
        """`execute` has returned: for whatever it has left open, nobody waits."""
        with self._lock:
            self._is_over = True
        for wait in waits():
            if wait.thread == self.thread:
                end_wait(wait.number)

    def wait(self, call: ModelCall) -> None:
        """From now on the instance waits for the answer to a call, unless `execute` has just returned."""
        with self._lock:
            if not self._is_over:
                begin_wait(call, self.version, self.instance, self.thread)

    @property
    def is_waiting_here(self) -> bool:
        """Whether the instance waits for what the calling thread does."""
        return not self._is_over and threading.get_ident() in (self.thread, self.loop_thread)

    def deepest(self) -> tuple[str, ...]:
        """The longest chain among the requests: a call that may belong to any of them is as deep as that."""
        return max((row.origin.chain for row in self._rows if row.origin is not None), key=len, default=())


class RequestTrace(msgspec.Struct, frozen=True, eq=False):
    """What `InferenceRequest.trace()` gives: it tells to which request a call belongs, also on other threads.

    execution  that the request is in; None on threads of the model's own
    origin     of the request; None: of a row of no request, or the model's code never asks
    """

    execution: Execution | None
    origin: Origin | None

    def get_context(self) -> str | None:
        """The headers that carry the trace, as JSON, for OpenTelemetry to extract; None: the request is not traced.

        source  Triton server, user guide, "Triton Server Trace"; python_backend, infer_trace.cc
        """
        if self.origin is None or not self.origin.traceparent:
            return None
        return json.dumps({"traceparent": self.origin.traceparent})


class CallError(MeshError):
    """A call that is not made, because it could never be answered."""

    code = Code.INVALID_ARG


execution: ContextVar[Execution | None] = ContextVar("execution", default=None)
"""The running `execute`; None outside of it, and on threads of the model's own."""
_closed: ContextVar[bool] = ContextVar("closed", default=False)
_door: list[Calls] = []
_numbers = itertools.count(1)
_waits: dict[int, InstanceWait] = {}

# Neither the event loop that makes calls goes on in a fork, nor does an answer find its way there.
os.register_at_fork(after_in_child=_door.clear)


@contextmanager
def install(calls: Calls) -> Generator[None]:
    """Within the block calls leave this process through `calls`."""
    _door.append(calls)
    try:
        yield
    finally:
        _door.remove(calls)


@contextmanager
def no_calls() -> Generator[None]:
    """Within the block, which is `initialize` or `finalize`, the model may not call."""
    token = _closed.set(True)
    try:
        yield
    finally:
        _closed.reset(token)


def waits() -> list[InstanceWait]:
    """The instances of this process that wait for answers, for the time being."""
    return list(_waits.values())


def door() -> Calls:
    """Where calls leave this process. Raises TritonModelException where none may be made now."""
    if _closed.get():
        raise TritonModelException(NOT_NOW)
    return open_door()


def open_door() -> Calls:
    """As `door`, also in `initialize` and `finalize`."""
    if not _door:
        raise TritonModelException(NOT_HERE)
    return _door[-1]


def complete(call: ModelCall, trace: object) -> ModelCall:
    """The call with what the mesh adds: number, name, chain, deadline, trace context.

    trace   what the model gave as `trace`
    raises  CallError for a call that could never be answered
    """
    running, origin = execution.get(), None
    if isinstance(trace, RequestTrace) and trace.execution is not None and trace.origin is not None:
        running, origin = trace.execution, trace.origin
    elif running is not None:
        origin = running.origin_of(call.correlation_id)
    call = msgspec.structs.replace(call, number=next_number())
    if running is None or origin is None:
        name = f"call-{uuid.uuid4().hex}" if call.correlation_id else ""
        chain = (*running.deepest(), running.model) if running is not None else ()
        return _checked(msgspec.structs.replace(call, name=name, chain=chain))
    entry = waiting(running.model, SequenceId(origin.name) if origin.step else None)
    return _checked(
        msgspec.structs.replace(
            call,
            name=running.name(origin, call),
            chain=(*origin.chain, entry),
            deadline_us=origin.deadline_us,
            traceparent=origin.traceparent,
            replayed=(SequenceId(origin.name), origin.replayed_in) if origin.replayed_in else None,
        )
    )


def _checked(call: ModelCall) -> ModelCall:
    """Raises CallError for a call that waits for itself, or that is too deep."""
    path = " -> ".join([*models_of(call.chain), call.model])
    if call.correlation_id:
        target = waiting(call.model, sequence_id(call.model, call.version, call.correlation_id))
        if target in call.chain:
            raise CallError(
                f"the call to sequence {call.correlation_id} of model '{call.model}' would wait for itself: a step of "
                f"that sequence waits for the answer ({path})"
            )
    if len(call.chain) > CALL_DEPTH_MAX:
        raise CallError(f"models call each other more than {CALL_DEPTH_MAX} deep, which is the limit: {path}")
    return call


@contextmanager
def waiting_for(call: ModelCall) -> Generator[None]:
    """Within the block this instance waits for the answer to a call. On threads of the model's own it does nothing:
    while they wait, their instance may go on.
    """
    running = instance_execution()
    if running is None:
        yield
        return
    running.wait(call)
    try:
        yield
    finally:
        end_wait(call.number)


def instance_execution() -> Execution | None:
    """The running `execute`, on a thread of its own: if that waits, its instance does."""
    running = execution.get()
    return running if running is not None and running.is_waiting_here else None


def begin_wait(call: ModelCall, caller: str, instance: str, thread: int = 0) -> None:
    """From now on an instance waits for the answer to a call. See `InstanceWait`."""
    target = "" if call.asks_readiness else version_name(call.model, call.version)
    since_ms = 0 if call.replayed else time.time_ns() // 1_000_000
    _waits[call.number] = InstanceWait(call.number, caller, instance, target, since_ms, thread)


def end_wait(number: int) -> None:
    """Nobody waits for the answer to this call any more, if anybody did."""
    _waits.pop(number, None)


def next_number() -> int:
    """The number of a call in this process."""
    return next(_numbers)
