"""What an engine costs beside a bare loop over the same module: an LSTM of two layers, 64 sequences a batch.

The bare loop is what a user writes without a server: the input goes to the device, the module is called, its output
comes back, and the states stay where they are. The engine does the same for the rows of 64 sequences, and hands their
states out too, so that each step has a checkpoint. It is measured under its worker, as an executor uses it: one batch
after the other, and with the next one staged while one is computed.

All of them take turns, round by round, so that load from other users of the machine is spread.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path

import click
import numpy as np
import torch
import uvloop

from benchmarks.build_models import INPUT_SIZE, MODELS, StackedLstm, seeded_lstm
from benchmarks.results import markdown
from executor.configuration.load import load_model_config
from executor.engine.backends import installed_backends
from executor.engine.base import BatchResult, LoadRequest, Row, RowResult
from executor.workers.worker import EngineWorker
from shared.contract.ids import InstanceIndex
from shared.contract.tensors import from_numpy
from shared.process import interpreter

ROWS = 64
LAYERS = 2
HIDDEN_SIZES = (512, 4096, 8192)
"""On a GPU a batch of the first one is over before the next one can be made, and one of the last one is not."""
ROUNDS = 5
BATCHES = 100
"""Of each way in a round."""
WARMUP_BATCHES = 20

Way = Callable[[int], Awaitable[None]]
"""Runs so many batches."""


class BareLoop:
    """The module alone."""

    def __init__(self, module: StackedLstm, device: torch.device, hidden_size: int) -> None:
        self._module = torch.jit.script(module).to(device)
        self._device = device
        self._states = [torch.zeros(ROWS, LAYERS, hidden_size, device=device) for _ in range(2)]
        self._input = torch.randn(ROWS, INPUT_SIZE)

    async def run(self, batches: int) -> None:
        with torch.inference_mode():
            for _ in range(batches):
                made = self._module(self._input.to(self._device), *self._states)
                self._states = [made["HIDDEN_OUT"], made["CELL_OUT"]]
                made["OUTPUT"].cpu()


class ServedEngine:
    """The engine under its worker. Two waves of sequences, so that one can be staged while the other is computed."""

    def __init__(self, module: StackedLstm, device: torch.device, hidden_size: int, directory: Path) -> None:
        folder = directory / "lstm_512"
        (folder / "1").mkdir(parents=True)
        text = (MODELS / "lstm_512" / "config.pbtxt").read_text()
        (folder / "config.pbtxt").write_text(text.replace("[ 2, 512 ]", f"[ {LAYERS}, {hidden_size} ]"))
        torch.jit.script(module).save(str(folder / "1" / "model.pt"))
        backend = installed_backends()["pytorch"]
        loaded = load_model_config(folder, backends={"pytorch": backend.auto_complete})
        request = LoadRequest(loaded.config, loaded.json, folder, "1", "lstm_0", str(device), 2 * ROWS)
        self._worker = EngineWorker(backend.load(request), "lstm", "lstm_0", InstanceIndex(0))
        steps = np.random.default_rng(1).standard_normal((2 * ROWS, 1, INPUT_SIZE), dtype=np.float32)
        tensors = [from_numpy("INPUT", step) for step in steps]
        rows = [Row({"INPUT": tensor}, slot=slot, start=True) for slot, tensor in enumerate(tensors)]
        self._firsts = rows[:ROWS], rows[ROWS:]
        self._waves = [[Row(row.inputs, slot=row.slot) for row in wave] for wave in self._firsts]

    async def open(self) -> None:
        """Every sequence has made its first step."""
        for wave in self._firsts:
            await self._worker.run(wave, [True] * ROWS)

    async def unsaved(self, batches: int) -> None:
        """No checkpoints, one batch after the other."""
        for batch in range(batches):
            await self._start(batch, saves=False)

    async def saved(self, batches: int) -> None:
        """A checkpoint of every step, one batch after the other."""
        for batch in range(batches):
            _check(await self._start(batch))

    async def staged(self, batches: int) -> None:
        """As `saved`, with the next batch given to the worker before the one before it has ended."""
        ahead = self._start(0)
        for batch in range(1, batches):
            running, ahead = ahead, self._start(batch)
            _check(await running)
        _check(await ahead)

    def _start(self, batch: int, *, saves: bool = True) -> asyncio.Future[BatchResult]:
        return self._worker.run(self._waves[batch % 2], [saves] * ROWS)

    async def close(self) -> None:
        await self._worker.close()


def _check(result: BatchResult) -> None:
    for row in result.rows:
        if not isinstance(row, RowResult) or len(row.states) != 2:
            raise AssertionError(f"the engine failed: {row}")


async def _microseconds(way: Way) -> float:
    """A batch's mean time."""
    began = time.perf_counter()
    await way(BATCHES)
    return (time.perf_counter() - began) / BATCHES * 1e6


async def measure(device: torch.device, hidden_size: int, directory: Path) -> dict[str, list[float]]:
    """Microseconds of a batch, by way and round."""
    module = seeded_lstm(hidden_size)
    engine = ServedEngine(module, device, hidden_size, directory)
    await engine.open()
    ways: dict[str, Way] = {
        "bare loop": BareLoop(module, device, hidden_size).run,
        "engine, no checkpoints": engine.unsaved,
        "engine, checkpoints": engine.saved,
        "engine, checkpoints, staged": engine.staged,
    }
    for way in ways.values():
        await way(WARMUP_BATCHES)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            found[name].append(await _microseconds(way))
    await engine.close()
    return found


def measure_engine(*, device: str, quick: bool, out: Path) -> None:
    """Measures all; writes engine.md and prints it: the medians of the rounds."""
    interpreter.share_often()
    rows: list[list[str]] = []
    for hidden_size in HIDDEN_SIZES[:1] if quick else HIDDEN_SIZES:
        with tempfile.TemporaryDirectory(prefix="seqmesh-engine-") as directory, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            found = uvloop.run(measure(torch.device(device), hidden_size, Path(directory)))
        bare = statistics.median(found["bare loop"])
        for name, times in found.items():
            middle = statistics.median(times)
            rounds = f"{min(times):.0f} to {max(times):.0f}"
            rows.append([str(hidden_size), name, f"{middle:.0f}", rounds, f"{middle / bare:.2f}"])
    text = markdown(["hidden", "way", "us a batch", "rounds", "of the bare loop"], rows)
    out.mkdir(parents=True, exist_ok=True)
    (out / "engine.md").write_text(text + "\n")
    click.echo(f"{text}\n\nwritten: {out}/engine.md")
