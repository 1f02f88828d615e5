"""One engine and the thread it runs on.

A model's call may take long, so it runs on a thread of its own, and the event loop goes on with heartbeats, reads and
commits. Calls are made in order: loading a checkpoint never overlaps with a running batch.

Only a batch that is over sooner than two threads have told each other of it runs on the event loop itself. It is a
small batch of a model that does nothing but compute (`OnlyComputes`), and of which all batches of late were that short
(`Pace`).

After a failure the worker checks whether the GPUs are still there. If one is lost, the engine's errors are no answers:
nothing is wrong with the steps, and any other executor can run them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from executor.engine.base import (
    NO_TIME,
    BatchResult,
    ChecksReadiness,
    Engine,
    FreesSlots,
    HandsOutState,
    LimitsCalls,
    MakesCalls,
    MeasuresMemory,
    OnlyComputes,
    ReleasesSequences,
    Row,
    RowError,
    RunsAgain,
    RunsAhead,
    SeesCancellation,
)
from executor.engine.error_texts import class_and_text, text_of_error
from executor.workers.devices import NO_GPUS, Devices
from executor.workers.engine_thread import EngineThread, P, R, made
from executor.workers.first_batch import FirstBatch
from executor.workers.readiness import Readiness
from shared.contract.errors import Code, ModelError
from shared.contract.ids import CorrelationId, InstanceIndex, SequenceId, SlotIndex, correlation_id_of
from shared.contract.tensors import Tensor
from shared.process import logs
from shared.statistics.tally import MemoryUse

SHORT_US = 500.0
"""Longest batch for the event loop: for so long a thread may keep the interpreter from the loop in any case
(`shared.process.interpreter.SWITCH_INTERVAL_S`)."""

SMALL_BYTES = 1 << 16
"""Most bytes of inputs of a batch for the event loop: how long a large one takes, small ones do not tell."""

FINALIZE_LIMIT_S = 30.0
"""How long the end of a batch and a model's `finalize` are waited for: as long as Triton waits when it exits."""


class Pace:
    """How long batches take: the longest one of late. Pure.

    One long batch counts at once, and is forgotten slowly: after one of 10 ms, the next 190 batches run on the thread
    even if all of them are short. So do the first 100 batches of a load.
    """

    WEIGHT = 1 / 64

    def __init__(self) -> None:
        self._us = 5 * SHORT_US

    def took(self, us: float) -> None:
        """A batch took so much CPU time: neither other processes nor the interpreter's lock count."""
        self._us = us if us > self._us else self._us + (us - self._us) * self.WEIGHT

    @property
    def is_short(self) -> bool:
        """Whether the next batch is expected to be short."""
        return self._us < SHORT_US


def _are_small(rows: Sequence[Row]) -> bool:
    return sum([len(tensor.raw) for row in rows for tensor in row.inputs.values()]) <= SMALL_BYTES


class Lead:
    """Whether it pays to begin a batch before the one before has ended: its device takes longer than its preparation.
    Pure.

    Otherwise the device waits for the host in any case, and a second thread only costs time.
    """

    WEIGHT = 1 / 8

    def __init__(self) -> None:
        self._gain_ns = 0.0

    def took(self, host_ns: float, device_ns: float) -> None:
        """What a batch took: to be prepared, and on the device."""
        self._gain_ns += (device_ns - host_ns - self._gain_ns) * self.WEIGHT

    @property
    def pays(self) -> bool:
        return self._gain_ns > 0


class EngineCall(msgspec.Struct, frozen=True, eq=False):
    """One call of an engine, while it runs. thread: the thread that it runs on (`threading.get_ident`). began_s: when,
    on the monotonic clock
    """

    worker: str
    thread: int
    began_s: float = 0.0


class SavedState(msgspec.Struct, frozen=True, eq=False):
    """What a sequence goes on from: its declared states, or what its model's own method gave."""

    slot: SlotIndex
    correlation_id: CorrelationId
    states: Mapping[str, Tensor]
    model_state: bytes


class EngineWorker:
    """Calls one engine, one call at a time."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        name: str,
        index: InstanceIndex,
        devices: Devices = NO_GPUS,
        thread: EngineThread | None = None,
        call_limit_s: float = 0.0,
    ) -> None:
        """devices: checked after a failure. thread: on which the engine was made; a new one by default. call_limit_s:
        how long a call may take, for an engine that ends late calls itself
        """
        self.name = name
        self._model = model
        self.index = index
        self._engine = engine
        self._devices = devices
        self.first_batch = FirstBatch.from_environment()
        """An engine belongs to one load of the model, and so does this."""
        self.readiness: Readiness | None = None
        """None for a model without a readiness check."""
        if isinstance(engine, ChecksReadiness) and engine.has_readiness:
            self.readiness = Readiness(engine.is_ready, name)
        self._frees_slots = isinstance(engine, FreesSlots) and engine.frees_slots
        self._releases = engine if isinstance(engine, ReleasesSequences) and engine.has_release else None
        self._cancels = engine if isinstance(engine, SeesCancellation) else None
        self.makes_calls = isinstance(engine, MakesCalls) and engine.makes_calls
        """Whether rows must say where they come from."""
        self._runs_ahead = engine if isinstance(engine, RunsAhead) and engine.runs_ahead else None
        self._limits = isinstance(engine, LimitsCalls)
        if isinstance(engine, LimitsCalls):
            engine.limit_calls(call_limit_s)
        self._measures = engine if isinstance(engine, MeasuresMemory) else None
        self._thread = thread or EngineThread(name)
        self._waiting: EngineThread | None = None
        self._lead = Lead()
        if isinstance(engine, RunsAgain):
            engine.run_again_on(self._thread.post)
        self._pace = Pace() if isinstance(engine, OnlyComputes) and engine.only_computes else None
        self._running: list[EngineCall] = []
        self._took_s = 0.0

    @property
    def running(self) -> EngineCall | None:
        """The call that runs now, the oldest one of several: a batch, or a state that is loaded. None for an engine
        that ends late calls itself: nobody else is to look after it.
        """
        # Another thread may take the last one away at any time.
        return next(iter(self._running), None)

    @property
    def latest_call_s(self) -> float:
        """How long the running call has taken so far, or else the last one; 0.0 before the first."""
        call = self.running
        return self._took_s if call is None else time.monotonic() - call.began_s

    @property
    def memory_usage(self) -> Sequence[MemoryUse]:
        """The memory that the engine holds, as far as it knows."""
        return self._measures.memory_usage() if self._measures is not None else ()

    def run(self, rows: Sequence[Row], want_state: Sequence[bool]) -> asyncio.Future[BatchResult]:
        """Runs one batch (see `Engine.run`), at once after the calls before it. What the engine raises becomes every
        row's error; the future raises DeviceLostError.
        """
        if self._pace is not None and self._pace.is_short and self._thread.is_idle and _are_small(rows):
            return made(self._watched, self._run, rows, want_state)
        if self._runs_ahead is not None and self._lead.pays:
            if self._waiting is None:
                self._waiting = EngineThread(f"{self.name} waits")
            return self._thread.start_with(self._waiting, lambda: self._watched(self._begin, rows, want_state))
        return self._start(self._run, rows, want_state)

    def _run(self, rows: Sequence[Row], want_state: Sequence[bool]) -> BatchResult:
        if self._runs_ahead is not None:
            return self._begin(rows, want_state)()
        began_ns = time.thread_time_ns()
        try:
            return self._checked(rows, self._engine.run(rows, want_state))
        except BaseException as failure:  # noqa: BLE001 - a model may raise anything; the callers are told
            return self._failed(rows, failure)
        finally:
            if self._pace is not None:
                self._pace.took((time.thread_time_ns() - began_ns) / 1000)

    def _begin(self, rows: Sequence[Row], want_state: Sequence[bool]) -> Callable[[], BatchResult]:
        assert self._runs_ahead is not None, "the engine can begin a batch"
        began_ns = time.perf_counter_ns()
        try:
            result = self._runs_ahead.begin(rows, want_state)
        except BaseException as failure:  # noqa: BLE001 - as above
            failed = self._failed(rows, failure)
            return lambda: failed
        host_ns = time.perf_counter_ns() - began_ns
        return lambda: self._watched(self._end, rows, result, host_ns)

    def _end(self, rows: Sequence[Row], result: Callable[[], BatchResult], host_ns: int) -> BatchResult:
        try:
            ended = self._checked(rows, result())
        except BaseException as failure:  # noqa: BLE001 - as above
            return self._failed(rows, failure)
        self._lead.took(host_ns, ended.timings.compute_infer_ns)
        return ended

    def _checked(self, rows: Sequence[Row], result: BatchResult) -> BatchResult:
        if [row.null for row in rows] != [row is None for row in result.rows]:
            raise ModelError("its backend has not returned one result for each row, and None for a null row")
        # A lost GPU may show as errors of single rows.
        if RowError in map(type, result.rows):
            self._devices.check()
        return result

    def _failed(self, rows: Sequence[Row], failure: BaseException) -> BatchResult:
        """The result of a batch whose engine raised."""
        self._devices.check()
        logs.error("batch failed", failure, instance=self.name, rows=len(rows))
        error = RowError(Code.INTERNAL, f"model '{self._model}' failed: {class_and_text(failure)}")
        return BatchResult([None if row.null else error for row in rows], NO_TIME)

    def load(self, saved: Sequence[SavedState]) -> asyncio.Future[Sequence[BaseException | None]]:
        """Puts states where their sequences go on, before any batch that is run after this call. Why one of them cannot
        be used, or None, for each; the future raises DeviceLostError.
        """
        return self._start(self._load, saved)

    def _load(self, saved: Sequence[SavedState]) -> Sequence[BaseException | None]:
        if len(saved) > 1 and all(one.states for one in saved):
            try:
                self._engine.load_states([one.slot for one in saved], [one.states for one in saved])
            except BaseException as failure:  # noqa: BLE001 - as below
                cause = text_of_error(failure)
                logs.warning("states loaded one by one", instance=self.name, states=len(saved), cause=cause)
            else:
                return [None] * len(saved)
        return [self._refusal(one) for one in saved]

    def _refusal(self, saved: SavedState) -> BaseException | None:
        try:
            if saved.states:
                self._engine.load_states([saved.slot], [saved.states])
            elif isinstance(self._engine, HandsOutState) and self._engine.hands_out_state:
                self._engine.restore_model(saved.correlation_id, saved.model_state)
            else:
                raise ModelError(f"model '{self._model}' has no methods checkpoint and restore any more")
        except BaseException as failure:  # noqa: BLE001 - a model may raise anything
            self._devices.check()
            return failure
        return None

    def _start(self, call: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> asyncio.Future[R]:
        return self._thread.start(self._watched, call, *arguments, **named)

    def _watched(self, call: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        running = EngineCall(self.name, threading.get_ident(), time.monotonic())
        if not self._limits:
            self._running.append(running)
        try:
            return call(*arguments, **named)
        except BaseException:
            self._devices.check()
            raise
        finally:
            # The event loop reads these fields at any time.
            self._took_s = time.monotonic() - running.began_s
            if not self._limits:
                self._running.remove(running)

    def describe_state(self, slot: SlotIndex) -> asyncio.Future[str]:
        """A line for the log about a slot's state, before any batch that is run after this call."""
        return self._thread.start(self._engine.describe_state, slot)

    def cancel(self, row: Row) -> None:
        """Nobody waits for a row any more: its model may ask for that while the row runs."""
        if self._cancels is not None:
            self._cancels.cancel(row)

    def release(self, sequence: SequenceId, slot: SlotIndex | None) -> None:
        """Has the model forget a sequence, and the engine the state in its slot, after what it runs now and before any
        batch that is run after this call.
        """
        if self._releases is not None:
            self._forget(self._releases.release, correlation_id_of(sequence))
        if self._frees_slots and slot is not None:
            self._forget(self._engine.drop_state, slot)

    def release_all(self, slots: Sequence[SlotIndex]) -> None:
        """Has the model forget every sequence that it was given, and the engine the states in these slots."""
        if self._releases is not None:
            self._forget(self._releases.release_all)
        if self._frees_slots:
            # One call: a future for each slot would hold up the loop, which renews the lease, for seconds.
            self._forget(self._drop_all, slots)

    def _drop_all(self, slots: Sequence[SlotIndex]) -> None:
        for slot in slots:
            self._engine.drop_state(slot)

    def _forget(self, call: Callable[P, None], *arguments: P.args, **named: P.kwargs) -> None:
        self._start(call, *arguments, **named).add_done_callback(self._told)

    def _told(self, forgotten: asyncio.Future[None]) -> None:
        """Nobody waits for it. What does not go only takes memory: a START, or a state that is loaded, replaces it."""
        if not forgotten.cancelled() and (failure := forgotten.exception()) is not None:
            logs.error("state not dropped", failure, instance=self.name)

    async def close(self) -> None:
        """Lets the running batch end, then finalizes the model. Raises what its `finalize` does, and TimeoutError if it
        takes too long: then it is left behind, with what the model holds.
        """
        if not await self._thread.end(self._close, FINALIZE_LIMIT_S):
            raise TimeoutError(f"its finalize has taken more than {FINALIZE_LIMIT_S:g} s, and is not waited for")

    def close_now(self) -> None:
        """As `close`, for an engine on which nothing has run yet, called from a thread that may block."""
        self._thread.end_now(self._close)

    def _close(self) -> None:
        if self._waiting is not None:
            # Returns when the batches that were begun have ended.
            self._waiting.run(self._waiting.stop)
        self._engine.close()
