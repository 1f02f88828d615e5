"""The recipe "How to add a backend" of docs/design/where.md, step by step: what it says works."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from executor.engine import backends
from executor.engine.base import Backend, Engine, Row, RowError, RowResult
from executor.models.repository import ModelRepository
from executor.models.served import ServedVersion
from executor.workers.devices import Devices
from shared.contract.errors import LoadError
from shared.contract.tensors import from_numpy, to_numpy
from tests.design.weighted_sum_backend import WeightedSumBackend, WeightedSumEngine
from tests.markdown_pages import ROOT, all_blocks

CONFIG = """
backend: "weighted_sum"
max_batch_size: 4
input { name: "INPUT" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 1 ] }
sequence_batching {
  state {
    input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_FP64 dims: [ 1 ]
  }
}
"""


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installed package would announce it."""
    entry = EntryPoint(
        "weighted_sum", f"{WeightedSumBackend.__module__}:WeightedSumBackend", backends.ENTRY_POINT_GROUP
    )

    monkeypatch.setattr(backends, "announced_backends", lambda: (entry,))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ServedVersion]:
    """The model of weight 2, loaded as an executor loads it."""
    folder = tmp_path / "doubled" / "1"
    folder.mkdir(parents=True)
    (folder / "model.weighted_sum").write_text("2.0")
    (tmp_path / "doubled" / "config.pbtxt").write_text(CONFIG)
    repository = ModelRepository((tmp_path,), Devices())
    yield repository.load("doubled").versions[0]
    await repository.close()


def row(slot: int, value: float, *, start: bool = False) -> Row:
    return Row({"INPUT": from_numpy("INPUT", np.full((1, 1), value, np.float32))}, slot=slot, start=start)


def output(result: RowResult | RowError | None) -> float:
    assert isinstance(result, RowResult)
    return to_numpy(result.outputs[0]).item()


def test_the_two_protocols_are_all_that_is_needed() -> None:
    backend: Backend = WeightedSumBackend()
    engine: Engine = WeightedSumEngine(1.0)

    assert "weighted_sum" == backend.name
    assert "SUM_IN FP64 [1] mean 0 norm 0" == engine.describe_state(0)


def test_it_is_found_by_its_entry_point() -> None:
    assert isinstance(backends.installed_backends()["weighted_sum"], WeightedSumBackend)


async def test_a_model_of_it_runs_two_sequences_in_one_batch(served: ServedVersion) -> None:
    worker = served.workers[0]
    first = await worker.run([row(0, 1, start=True), row(1, 10, start=True)], [False, False])
    second = await worker.run([row(0, 2), row(1, 20)], [True, True])

    assert [2, 20] == [output(result) for result in first.rows]
    assert [6, 60] == [output(result) for result in second.rows]


async def test_an_engine_goes_on_from_the_state_of_another(served: ServedVersion) -> None:
    worker = served.workers[0]
    first = await worker.run([row(0, 1, start=True)], [True])
    (result,) = first.rows
    assert isinstance(result, RowResult)

    engine = WeightedSumEngine(2.0)
    engine.load_states([3], [result.states])

    assert [4] == [output(one) for one in engine.run([row(3, 1)], [False]).rows]


async def test_a_row_that_fails_changes_neither_its_state_nor_its_neighbour(served: ServedVersion) -> None:
    worker = served.workers[0]
    await worker.run([row(0, 1, start=True), row(1, 1, start=True)], [False, False])
    failed = await worker.run([row(0, float("nan")), row(1, 1)], [False, False])
    after = await worker.run([row(0, 1)], [False])

    assert isinstance(failed.rows[0], RowError)
    assert [4, 4] == [output(failed.rows[1]), output(after.rows[0])]


def test_a_file_that_is_no_model_fails_the_load(tmp_path: Path) -> None:
    folder = tmp_path / "broken" / "1"
    folder.mkdir(parents=True)
    (folder / "model.weighted_sum").write_text("heavy")
    (tmp_path / "broken" / "config.pbtxt").write_text(CONFIG)

    with pytest.raises(LoadError, match=r"model\.weighted_sum: could not convert"):
        ModelRepository((tmp_path,), Devices()).load("broken")


def test_the_guide_shows_the_example_as_it_is() -> None:
    """Parts of docs/guides/backends.md stand word for word in the files of examples/backend that their marks name."""
    shown = {
        (mark.removeprefix("not run: "), block.text)
        for block in all_blocks()
        if block.page == "docs/guides/backends.md"
        for mark in block.marks
        if mark.startswith("not run: examples/")
    }

    assert 5 == len(shown)
    assert [] == [name for name, text in shown if text not in (ROOT / name).read_text()]
