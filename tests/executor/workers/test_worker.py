"""An engine's thread: what the engine raises is the rows' error, never the loop's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from executor.engine.base import BatchResult, Row, RowError, RowResult, Timings
from executor.engine.pytorch import devices
from executor.workers.devices import NO_GPUS, DeviceLostError, Devices
from executor.workers.worker import SHORT_US, SMALL_BYTES, EngineWorker, Lead, Pace, SavedState
from shared.contract.errors import ModelError
from shared.contract.ids import InstanceIndex, SlotIndex, sequence_id
from shared.contract.tensors import Tensor


class Broken:
    """An engine that fails as a whole."""

    def __init__(self, failure: BaseException) -> None:
        self._failure = failure

    def run(self, rows: Any, want_state: Any) -> Any:
        raise self._failure

    def close(self) -> None: ...


class MuteError(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (MemoryError("no room"), "MemoryError: no room"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt("^C"), "KeyboardInterrupt: ^C"),
        (MuteError(), "MuteError: <its text cannot be made>"),
    ],
)
async def test_an_engine_that_raises_fails_every_row_but_the_null_rows(failure: BaseException, text: str) -> None:
    broken: Any = Broken(failure)
    worker = EngineWorker(broken, "sum", "sum_0_0", InstanceIndex(0))

    result = await worker.run([Row(inputs={}), Row(inputs={}, null=True)], [False, False])

    assert [RowError("INTERNAL", f"model 'sum' failed: {text}"), None] == list(result.rows)
    await worker.close()


class Miscounts:
    """A backend that returns other rows than it was given."""

    def __init__(self, given: Sequence[RowResult | None], *, runs_ahead: bool) -> None:
        self.given = given
        self.runs_ahead = runs_ahead

    def run(self, rows: Any, want_state: Any) -> BatchResult:
        return BatchResult(self.given, Timings(0, 0, 0))

    def begin(self, rows: Any, want_state: Any) -> Callable[[], BatchResult]:
        return lambda: self.run(rows, want_state)

    def close(self) -> None: ...


@pytest.mark.parametrize("given", [[], [RowResult(())], [None, None], [RowResult(()), None, None]])
@pytest.mark.parametrize("runs_ahead", [False, True])
async def test_a_backend_that_returns_other_rows_than_it_was_given_fails_the_batch(
    given: Sequence[RowResult | None], *, runs_ahead: bool
) -> None:
    backend: Any = Miscounts(given, runs_ahead=runs_ahead)
    worker = EngineWorker(backend, "sum", "sum_0_0", InstanceIndex(0))

    error, null = (await worker.run([Row(inputs={}), Row(inputs={}, null=True)], [False, False])).rows

    assert isinstance(error, RowError)
    assert "has not returned one result for each row" in error.message
    assert null is None
    await worker.close()


async def test_a_finalize_that_does_not_return_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.workers.worker.FINALIZE_LIMIT_S", 0.05)
    returns = threading.Event()
    hanging: Any = Broken(MemoryError())
    hanging.close = returns.wait
    worker = EngineWorker(hanging, "sum", "sum_0_0", InstanceIndex(0))

    with pytest.raises(TimeoutError, match=r"its finalize has taken more than 0\.05 s"):
        await worker.close()
    returns.set()


def saved(slot: int, *, fits: bool = True) -> SavedState:
    """A declared state, which may not fit."""
    return SavedState(SlotIndex(slot), slot, {"H" if fits else "X": Tensor("H", "UINT8", (1,), b"h")}, b"")


class Picky:
    """An engine that takes states by the name H only: all of a call or none. calls: slots"""

    def __init__(self) -> None:
        self.calls: list[Sequence[int]] = []

    def load_states(self, slots: Sequence[int], states: Sequence[Mapping[str, Tensor]]) -> None:
        self.calls.append(slots)
        if any("H" not in one for one in states):
            raise ModelError("the checkpoint has no state 'H'")

    def close(self) -> None: ...


async def test_many_states_are_loaded_in_one_call() -> None:
    engine: Any = Picky()
    worker = EngineWorker(engine, "sum", "sum_0_0", InstanceIndex(0))

    assert [None] * 3 == await worker.load([saved(slot) for slot in range(3)])
    assert [[0, 1, 2]] == engine.calls
    await worker.close()


async def test_a_state_that_does_not_fit_costs_no_other_one() -> None:
    engine: Any = Picky()
    worker = EngineWorker(engine, "sum", "sum_0_0", InstanceIndex(0))

    refusals = await worker.load([saved(0), saved(1, fits=False), saved(2)])

    assert [None, "the checkpoint has no state 'H'", None] == [one and str(one) for one in refusals]
    assert [[0, 1, 2], [0], [1], [2]] == engine.calls
    await worker.close()


class Clinging:
    """An engine that lets go of no state."""

    frees_slots = True
    has_release = True

    def _refuse(self, *_: object) -> None:
        raise RuntimeError("it stays")

    drop_state = release = release_all = _refuse

    def close(self) -> None: ...


async def test_a_state_that_is_not_dropped_is_told_and_the_worker_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    clinging: Any = Clinging()
    worker = EngineWorker(clinging, "sum", "sum_0_0", InstanceIndex(0))

    worker.release(sequence_id("sum", "", 7), SlotIndex(3))
    worker.release_all([SlotIndex(0), SlotIndex(1)])
    await worker.close()

    assert 4 == caplog.text.count("RuntimeError: it stays"), "however many slots there are"
    assert 4 == [record.getMessage() for record in caplog.records].count("state not dropped")


async def test_states_that_a_model_handed_out_are_refused_if_it_cannot_take_them_back() -> None:
    engine: Any = Picky()
    worker = EngineWorker(engine, "sum", "sum_0_0", InstanceIndex(0))

    (refusal,) = await worker.load([SavedState(SlotIndex(0), 7, {}, b"state")])

    assert "model 'sum' has no methods checkpoint and restore any more" == str(refusal)
    await worker.close()


class Failing:
    """An engine on a GPU; what it says of a batch, or raises."""

    def __init__(self, outcome: Callable[[], RowError]) -> None:
        self._outcome = outcome

    def run(self, *_: object) -> BatchResult:
        return BatchResult([self._outcome()], Timings(0, 0, 0))

    def load_states(self, *_: object) -> None:
        self._outcome()

    def close(self) -> None: ...


def raises() -> RowError:
    raise RuntimeError("CUDA error: unspecified launch failure")


def says() -> RowError:
    return RowError("INTERNAL", "PyTorch execute failure: CUDA error: unspecified launch failure")


def unharmed(_: int) -> str:
    return ""


def gone(gpu: int) -> str:
    return "CUDA error: gone" if gpu == 3 else ""


@pytest.mark.parametrize("outcome", [raises, says])
async def test_what_fails_on_a_gpu_that_is_lost_is_nobody_s_answer(
    outcome: Callable[[], RowError], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing: Any = Failing(outcome)
    worker = EngineWorker(failing, "sum", "sum_0_0", InstanceIndex(0), Devices((0, 3)))
    asked: list[int] = []

    def asks(gpu: int) -> str:
        asked.append(gpu)
        return ""

    monkeypatch.setattr(devices, "gpu_problem", asks)

    (error,) = (await worker.run([Row(inputs={})], [False])).rows

    assert isinstance(error, RowError)
    assert "unspecified launch failure" in error.message
    assert [0, 3] == asked

    monkeypatch.setattr(devices, "gpu_problem", gone)
    with pytest.raises(DeviceLostError, match="cuda:3: CUDA error: gone"):
        await worker.run([Row(inputs={})], [False])
    await worker.close()


async def test_a_checkpoint_that_meets_a_lost_gpu_is_not_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    failing: Any = Failing(raises)
    worker = EngineWorker(failing, "sum", "sum_0_0", InstanceIndex(0), Devices((3,)))
    monkeypatch.setattr(devices, "gpu_problem", gone)

    with pytest.raises(DeviceLostError):
        await worker.load([saved(0), saved(1)])
    await worker.close()


class Threads:
    """An engine that notes on which threads its batches run. busy_s: CPU time of a batch"""

    def __init__(self, *, only_computes: bool = True) -> None:
        self.only_computes = only_computes
        self.names: list[str] = []
        self.busy_s = 0.0

    def run(self, rows: Any, want_state: Any) -> BatchResult:
        self.names.append(threading.current_thread().name)
        end_s = time.thread_time() + self.busy_s
        while time.thread_time() < end_s:
            pass
        return BatchResult([None], Timings(0, 0, 0))

    def load_states(self, slots: Any, states: Any) -> None:
        self.names.append("load")

    def close(self) -> None: ...


SETTLED = 400
"""Short batches after which the next one runs on the loop."""


async def run(worker: EngineWorker, times: int) -> None:
    for _ in range(times):
        await worker.run([Row(inputs={}, null=True)], [False])


async def settle(worker: EngineWorker, engine: Threads) -> None:
    """Runs short batches until they run on the loop. One in which garbage is collected is long."""
    await run(worker, SETTLED)
    async with asyncio.timeout(60):
        while engine.names[-1] != "MainThread":
            await run(worker, 1)


async def test_short_batches_of_a_model_that_only_computes_run_on_the_loop_until_one_is_long() -> None:
    engine: Any = Threads()
    worker = EngineWorker(engine, "sum", "sum_0_0", InstanceIndex(0))

    await settle(worker, engine)
    assert "sum_0_0" == engine.names[0]

    engine.busy_s = 20 * SHORT_US / 1e6
    await run(worker, 1)
    engine.busy_s = 0.0
    await run(worker, 10)
    assert ["sum_0_0"] * 10 == engine.names[-10:]
    await worker.close()


async def test_a_large_batch_runs_on_the_thread_however_short_the_small_ones_were() -> None:
    """A model that computes in Python may take seconds for it, in which the loop renews the lease."""
    engine: Any = Threads()
    worker = EngineWorker(engine, "sum", "sum_0_0", InstanceIndex(0))
    await settle(worker, engine)
    engine.names.clear()

    for size in (SMALL_BYTES // 2, SMALL_BYTES // 2 + 1):
        await worker.run([Row({"x": Tensor("x", "UINT8", (1, size), bytes(size))})] * 2, [False] * 2)

    assert ["MainThread", "sum_0_0"] == engine.names
    await worker.close()


async def test_a_model_that_may_wait_keeps_its_thread() -> None:
    engine: Any = Threads(only_computes=False)
    worker = EngineWorker(engine, "sum", "sum_0_0", InstanceIndex(0))

    await run(worker, SETTLED)

    assert {"sum_0_0"} == set(engine.names)
    await worker.close()


async def test_a_batch_never_overtakes_a_call_that_the_thread_was_given() -> None:
    engine: Any = Threads()
    worker = EngineWorker(engine, "sum", "sum_0_0", InstanceIndex(0))
    await settle(worker, engine)
    engine.names.clear()

    await asyncio.gather(worker.load([saved(0)]), worker.run([Row(inputs={}, null=True)], [False]))
    await run(worker, 1)

    assert ["load", "sum_0_0", "MainThread"] == engine.names
    await worker.close()


def test_one_long_batch_is_forgotten_slowly() -> None:
    pace = Pace()
    assert not pace.is_short

    for _ in range(SETTLED):
        pace.took(20)
    assert pace.is_short

    pace.took(10_000)
    for _ in range(150):
        pace.took(20)
    assert not pace.is_short


class Ahead:
    """An engine whose batches end when they are told to. done: what happened, in order. device_ns: of each batch"""

    runs_ahead = True

    def __init__(self, device_ns: int = 10**12) -> None:
        self.device_ns = device_ns
        self.done: list[str] = []
        self.over = threading.Event()
        self.fails_at = ""

    def begin(self, rows: Sequence[Row], want_state: Sequence[bool]) -> Callable[[], BatchResult]:
        name = rows[0].request_id
        self.done.append(f"begin {name}")
        if self.fails_at == "begin":
            raise RuntimeError("no memory")

        def end() -> BatchResult:
            self.over.wait(SOON_S)
            self.done.append(f"end {name}")
            if self.fails_at == "end":
                raise RuntimeError("CUDA error: gone")
            return BatchResult([RowResult(())], Timings(0, self.device_ns, 0))

        return end

    def load_states(self, slots: Any, states: Any) -> None:
        self.done.append("load")

    def close(self) -> None:
        self.done.append("close")


SOON_S = 60.0


async def ahead_worker(engine: Any, devices: Devices = NO_GPUS) -> EngineWorker:
    """A worker of which one batch has run."""
    worker = EngineWorker(engine, "sum", "sum_0_0", InstanceIndex(0), devices)
    engine.over.set()
    assert [RowResult(())] == list((await worker.run([Row({}, request_id="first")], [False])).rows)
    engine.over.clear()
    engine.done.clear()
    return worker


async def test_an_engine_that_runs_ahead_begins_the_next_call_while_a_batch_is_computed() -> None:
    engine: Any = Ahead()
    worker = await ahead_worker(engine)

    batches = [worker.run([Row({}, request_id=name)], [False]) for name in "ab"]
    loaded = worker.load([saved(0)])
    assert [None] == await loaded
    assert ["begin a", "begin b", "load"] == engine.done

    closing = asyncio.create_task(worker.close())
    engine.over.set()
    results = [await batch for batch in batches]
    await closing
    assert [[RowResult(())], [RowResult(())]] == [list(result.rows) for result in results]
    assert ["end a", "end b", "close"] == engine.done[3:]


async def test_a_batch_that_does_not_end_is_a_call_that_runs() -> None:
    engine: Any = Ahead()
    worker = await ahead_worker(engine)

    batches = [worker.run([Row({}, request_id=name)], [False]) for name in "ab"]
    await worker.load([saved(0)])
    while worker.running is None:
        await asyncio.sleep(0)
    call = worker.running
    assert call.thread != threading.get_ident()
    assert worker.latest_call_s > 0

    engine.over.set()
    await asyncio.gather(*batches)
    await worker.close()
    assert worker.running is None


@pytest.mark.parametrize("at", ["begin", "end"])
async def test_a_batch_that_fails_ahead_fails_its_rows_or_shows_that_the_gpu_is_lost(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = Ahead()
    worker = await ahead_worker(engine, Devices((3,)))
    engine.over.set()
    engine.fails_at = at
    monkeypatch.setattr(devices, "gpu_problem", unharmed)

    (error,) = (await worker.run([Row({}, request_id="a")], [False])).rows
    assert isinstance(error, RowError)
    assert "model 'sum' failed: RuntimeError: " in error.message

    monkeypatch.setattr(devices, "gpu_problem", gone)
    with pytest.raises(DeviceLostError, match="cuda:3: CUDA error: gone"):
        await worker.run([Row({}, request_id="b")], [False])
    engine.fails_at = ""
    assert [RowResult(())] == list((await worker.run([Row({}, request_id="c")], [False])).rows)
    await worker.close()


async def test_batches_that_the_device_has_done_before_the_next_one_is_ready_are_made_one_by_one() -> None:
    engine: Any = Ahead(device_ns=0)
    worker = await ahead_worker(engine)
    engine.over.set()

    await asyncio.gather(*(worker.run([Row({}, request_id=name)], [False]) for name in "ab"))

    assert ["begin a", "end a", "begin b", "end b"] == engine.done
    await worker.close()


def test_a_lead_pays_where_the_device_takes_longer_than_the_host() -> None:
    lead = Lead()
    assert not lead.pays

    lead.took(1000, 2400)
    assert lead.pays
    for _ in range(20):
        lead.took(1000, 800)
    assert not lead.pays
