"""An engine's thread: what the engine raises is the rows' error, never the loop's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from executor.engine.base import BatchResult, Row, RowError, Timings
from executor.engine.pytorch import devices
from executor.workers.devices import DeviceLostError, Devices
from executor.workers.worker import EngineWorker
from shared.contract.ids import InstanceIndex, SlotIndex


class Broken:
    """An engine that fails as a whole."""

    def __init__(self, failure: BaseException) -> None:
        self._failure = failure

    def run(self, rows: Any, want_state: Any) -> Any:
        raise self._failure

    def close(self) -> None: ...


@pytest.mark.parametrize("failure", [MemoryError("no room"), SystemExit(3)])
async def test_an_engine_that_raises_fails_every_row_but_the_null_rows(failure: BaseException) -> None:
    broken: Any = Broken(failure)
    worker = EngineWorker(broken, "sum", "sum_0_0", InstanceIndex(0))

    result = await worker.run([Row(inputs={}), Row(inputs={}, null=True)], [False, False])

    assert [RowError("INTERNAL", f"model 'sum' failed: {type(failure).__name__}: {failure}"), None] == list(result.rows)
    await worker.close()


class Failing:
    """An engine on a GPU; what it says of a batch, or raises."""

    def __init__(self, outcome: Callable[[], RowError]) -> None:
        self._outcome = outcome

    def run(self, *_: object) -> BatchResult:
        return BatchResult([self._outcome()], Timings(0, 0, 0))

    def load_state(self, *_: object) -> None:
        self._outcome()

    def close(self) -> None: ...


def raises() -> RowError:
    raise RuntimeError("CUDA error: unspecified launch failure")


def says() -> RowError:
    return RowError("INTERNAL", "PyTorch execute failure: CUDA error: unspecified launch failure")


def gone(gpu: int) -> str:
    return "CUDA error: gone" if gpu == 3 else ""


@pytest.mark.parametrize("outcome", [raises, says])
async def test_what_fails_on_a_gpu_that_is_lost_is_nobody_s_answer(
    outcome: Callable[[], RowError], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing: Any = Failing(outcome)
    worker = EngineWorker(failing, "sum", "sum_0_0", InstanceIndex(0), Devices((0, 3)))
    asked: list[int] = []

    def unharmed(gpu: int) -> str:
        asked.append(gpu)
        return ""

    monkeypatch.setattr(devices, "gpu_problem", unharmed)

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
        await worker.load_state(SlotIndex(0), {})
    await worker.close()
