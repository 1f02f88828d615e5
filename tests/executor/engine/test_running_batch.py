"""A GPU's batches: while one is computed the next ones are made, and every byte is what a CPU gives at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor.engine.base import BatchResult, LoadRequest, Row, RowResult
from executor.engine.pytorch import loading
from executor.engine.pytorch.engine import TorchEngine
from executor.engine.pytorch.running_batch import GpuBatch, GpuStreams
from shared.contract.errors import LoadError
from shared.contract.model_config import ModelConfig, StateSpec, TensorSpec
from tests.executor.engine import torch_modules
from tests.executor.engine.late_gpu import late_gpu
from tests.executor.engine.model_workshop import Workshop, plain_config, raws, sequence_config, wire

__all__ = ["late_gpu"]

X, Y = TensorSpec("x", "FP32", (-1,)), TensorSpec("y", "FP32", (-1,))


def with_state(name: str, *states: StateSpec) -> ModelConfig:
    return sequence_config(name, "pytorch", inputs=[X], outputs=[Y], states=states)


CELL = with_state("cell", StateSpec("h", "h_next", "FP32", (3,)), StateSpec("c", "c_next", "FP32", (3,)))
TOTAL = StateSpec("total", "total_next", "FP32", (3,))


def on_late_gpu(workshop: Workshop, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> TorchEngine:
    make: Any = loading._engine  # pyright: ignore[reportPrivateUsage]

    def made(request: LoadRequest, *rest: Any) -> TorchEngine:
        return make(request, *rest[:-1], GpuStreams(torch.device("cpu"), is_shared=False))

    with monkeypatch.context() as patched:
        patched.setattr(loading, "_engine", made)
        engine = workshop.load(config)
    assert isinstance(engine, TorchEngine)
    return engine


def batch(step: int, *firsts: float) -> list[Row]:
    return [
        Row({"x": wire("x", [[first + step, 2, slot]])}, slot=slot, start=step == 0)
        for slot, first in enumerate(firsts)
    ]


def told(result: BatchResult) -> list[object]:
    return [raws(row) if isinstance(row, RowResult) else row for row in result.rows]


@pytest.mark.parametrize(
    ("module", "config"),
    [
        (torch_modules.Cell(), CELL),
        (torch_modules.Picky(), with_state("picky", TOTAL)),
        (torch_modules.Negated(), with_state("negated", TOTAL)),
        (torch_modules.Unreadable(), with_state("unreadable", TOTAL)),
        (torch_modules.OwnMemory(), plain_config("own_memory", "pytorch", inputs=[X], outputs=[Y])),
    ],
    ids=lambda value: value.name if isinstance(value, ModelConfig) else "",
)
@pytest.mark.usefixtures("late_gpu")
def test_batches_that_are_begun_before_others_have_ended_give_what_they_give_one_by_one(
    workshop: Workshop, module: torch.nn.Module, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop.device = "cpu"
    workshop.script(config.name, module)
    batches = [batch(0, 1, 2, -5), batch(1, 3, 4), batch(2, 5, -6, 7)]
    wants = [[True] * len(rows) for rows in batches]
    here, there = workshop.load(config), on_late_gpu(workshop, config, monkeypatch)

    expected = [told(here.run(rows, want)) for rows, want in zip(batches, wants, strict=True)]
    ends = [there.begin(rows, want) for rows, want in zip(batches, wants, strict=True)]

    assert expected == [told(end()) for end in ends]


@pytest.mark.usefixtures("late_gpu")
def test_what_a_module_returns_elsewhere_than_on_its_gpu_is_copied_at_once() -> None:
    streams = GpuStreams(torch.device("cuda", 1), is_shared=False)

    with streams.active():
        running = GpuBatch(streams)
        running.start()
        running.input_done()
        own = torch.ones(2) * 3
        running.infer_done()
        pieces = running.pieces(own, 2, [(0, 1), (1, 2)])
        own.zero_()
        running.output_done()

    assert [wire("", 3).raw] * 2 == pieces


def test_a_module_that_forks_computes_where_torchs_own_threads_do(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[bool] = []

    def no_gpu(device: torch.device, *, is_shared: bool) -> GpuStreams:
        shared.append(is_shared)
        raise LoadError("no GPU here")

    monkeypatch.setattr(loading, "GpuStreams", no_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    workshop.device = "cuda:0"
    for module in (torch_modules.Forks(), torch_modules.Doubled()):
        workshop.script("doubled", module)
        with pytest.raises(LoadError, match="no GPU here"):
            workshop.load(plain_config("doubled", "pytorch", inputs=[X], outputs=[Y]))

    assert [True, False] == shared
