"""One instance of a decoupled `TritonPythonModel`: a request has any number of answers.

`execute` returns None. The answers come by response senders, also from the model's own threads and after `execute` has
returned. So `run` leaves its rows open; the instance may run the next batch meanwhile. `execute` may be `async`: then
it runs on an event loop of the instance, beside the next batches, as in Triton.

The state of a row moves on with its last answer. Declared states may be in any answer; of each the last one holds. A
model that hands its state out is asked for it while the last answer is sent, on the thread that sends it, and when the
request fails. So a model must have moved its own state on before.

When `execute` raises, the requests of the call that have no last answer yet fail, as in Triton. They are not tried
again one by one, because some of their answers may have gone out.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from executor.engine.base import Answers, BatchResult, LoadRequest, Row, RowError, RowResult, Timings
from executor.engine.python import triton_python_backend_utils as interface
from executor.engine.python.columns import Columns
from executor.engine.python.engine import PythonEngine, RowPass
from executor.engine.python.requests import DecoupledRequest
from executor.engine.python.response_senders import DiscardedAnswers, Given, MadeAnswer, ResponseSender
from executor.engine.python.slot_states import States


class OpenPass(RowPass):
    """A request in one pass over it. states: the implicit state so far; began: as the pass began"""

    answers: Answers
    began: States | None


class DecoupledEngine(PythonEngine):
    """See `base.Engine`, and `PythonEngine`."""

    def __init__(self, request: LoadRequest) -> None:
        super().__init__(request)
        # A sender may wait for the event loop of the executor, so its thread cannot run the model.
        self.only_computes, self.makes_calls = False, True
        # Nobody would compare the answers: they go to senders, and may come when the trial is over.
        self.is_testable = False

    def _run_once(self, rows: Sequence[Row], want_state: Sequence[bool]) -> tuple[BatchResult, None]:
        """One call of `execute`. It is never called again for the same rows, so that it may seem not to have raised."""
        began = time.perf_counter_ns()
        results, batch, members = self._batch(rows)
        if not members:
            return BatchResult(results, Timings(time.perf_counter_ns() - began, 0, 0)), None
        states = self._states_before(batch)
        columns = Columns(self._sources, batch, states)
        requests = [DecoupledRequest(row, columns, position) for position, row in enumerate(batch)]
        opened: dict[int, OpenPass] = {}
        for position, index, count in members:
            row = rows[index]
            answers = row.answers or DiscardedAnswers()
            before = states[position]
            one = OpenPass(row, count, want_state[index], columns, position, before, answers, before)
            requests[position].sender = self._sender(one)
            opened[index] = one
        for request in requests:
            if not hasattr(request, "sender"):
                # A null row: a model may answer it like the others.
                request.sender = ResponseSender(_discarded, DiscardedAnswers())
        called = time.perf_counter_ns()
        failure = self._executed(requests, batch)
        returned = time.perf_counter_ns()
        for index, one in opened.items():
            request = requests[one.position]
            if failure is not None:
                request.sender.fail(failure)
            elif request.release_flags == interface.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
                results[index] = self._passed(request.sender, one)
                continue
            failed = one.answers.failure if isinstance(one.answers, DiscardedAnswers) else None
            results[index] = failed or RowResult((), open=True)
        return BatchResult(results, Timings(called - began, returned - called, 0)), None

    def _sender(self, one: OpenPass) -> ResponseSender:
        asks = self._asks(one.row)
        return ResponseSender(lambda given, last: self._made(one, given, last=last), one.answers, asks=asks)

    def _passed(self, sender: ResponseSender, one: OpenPass) -> RowResult | RowError:
        """The end of a pass after which the model wants another one."""
        result = self._rescheduled(one, None)
        if isinstance(result, RowError):
            sender.fail(result)
            return RowResult((), open=True)
        sender.rescheduled = True
        return result

    # --- calls of execute

    def _executed(self, requests: list[DecoupledRequest], batch: Sequence[Row]) -> RowError | None:
        """Calls `execute`. Returns the error of all requests that have no last answer, if there is one."""
        try:
            with self._executing(batch):
                returned = self._model.execute(list(requests))
                if inspect.iscoroutine(returned):
                    self._begin(returned, [request.sender for request in requests], requests[0].columns)
                    return None
        except BaseException as error:  # noqa: BLE001 - the model's own code
            return self._raised(error, requests[0].columns)
        return None if returned is None else self._call_error(self._not_none)

    @property
    def _not_none(self) -> str:
        return f"Python model '{self._instance}' is using the decoupled mode and the execute function must return None."

    def _begin(self, coroutine: Coroutine[Any, Any, object], senders: list[ResponseSender], columns: Columns) -> None:
        """Runs an `async` execute beside the batches to come."""

        async def run() -> None:
            try:
                returned = await coroutine
                failure = None if returned is None else self._call_error(self._not_none)
            except BaseException as error:
                # Cancelled while the instance is open, the model has cancelled something itself.
                if isinstance(error, asyncio.CancelledError) and not self._coroutines.is_open:
                    raise
                failure = self._raised(error, columns)
            if failure is not None:
                for sender in senders:
                    sender.fail(failure)
            senders.clear()

        self._coroutines.start()
        self._coroutines.begin(run())

    # --- answers

    def _made(self, one: OpenPass, given: Given, *, last: bool) -> MadeAnswer:
        result = given if isinstance(given, RowError) else self._answer(one, given)
        if not last:
            return MadeAnswer(result)
        result = self._with_state(one.row, result, wanted=one.wanted)
        if isinstance(result, RowError) or one.row.slot is None:
            return MadeAnswer(result)
        states = self._states_left(one)
        if states is None or isinstance(states, RowError):
            return MadeAnswer(result if states is None else states)
        if one.wanted:
            result = RowResult(result.outputs, states, parameters=result.parameters, empty=result.empty)
        return MadeAnswer(result, partial(self._states.put, one.row.slot, states))

    def _answer(self, one: OpenPass, response: interface.InferenceResponse | None) -> RowResult | RowError:
        if response is None:
            return RowResult((), empty=True)
        read = self._reader.read(one.row, one.count, response, one.states)
        if isinstance(read, RowError):
            return read
        result, one.states = read
        return result

    def _states_left(self, one: RowPass) -> States | RowError | None:
        """The states after the pass: what the answers had, and else what the model wrote in place."""
        assert isinstance(one, OpenPass), "made here"
        written = super()._states_left(one)
        if isinstance(written, RowError) or written is None or one.began is None or one.states is None:
            return written
        return {**written, **{name: state for name, state in one.states.items() if state is not one.began[name]}}


def in_this_process(request: LoadRequest) -> PythonEngine:
    """One instance, on the calling thread. Raises LoadError."""
    return DecoupledEngine(request) if request.config.decoupled else PythonEngine(request)


def _discarded(_given: Given, _last: bool) -> MadeAnswer:  # noqa: FBT001 - see `Make`
    return MadeAnswer(RowResult(()))
