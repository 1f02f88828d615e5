"""Bubbles: how long a device stands still between two batches, although there is always work for the next one.

    python -m tests.executor.bubbles

One model's loop in this process, without Redis and gateway: every commit is final at once, and its caller sends the
next step soon after it. The device is simulated: a thread that sleeps, for a batch always the same time. More callers
than rows keep steps waiting. A bubble is the time from the end of one sleep to the begin of the next.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import click
import uvloop

from benchmarks.results import markdown
from executor.engine.base import BatchResult, Row, RowResult, Timings
from executor.models.fingerprints import Fingerprint
from executor.models.served import ServedVersion
from executor.reporting.statistics import StatisticsRecorder
from executor.sequences.sequence_model import SequenceModel
from executor.workers.worker import EngineWorker
from shared.contract.ids import Epoch, ExecutorId, InstanceIndex, SequenceId, SlotIndex, StepNumber
from shared.contract.messages import InboxStep, InferMessage, StepFlag
from shared.contract.model_config import Direct, ModelConfig, Oldest, SequenceBatching, StateSpec, TensorSpec
from shared.contract.tensors import Tensor
from shared.statistics.tally import ModelLoad
from shared.store.script_values import CommitCode, StepCommit
from shared.traces.tracing import Tracing

ROWS = 4
SLOTS = 64
CALLERS = 16
THINK_S = (0.0005, 0.002)
STATE_BYTES = 4096
STRATEGIES: Mapping[str, Direct | Oldest] = {"direct": Direct(), "oldest": Oldest(SLOTS)}
BATCHES_MS = (5.0, 1.0)


class Device:
    """An engine on a simulated device. calls: begin and end of each, ns"""

    def __init__(self, batch_s: float) -> None:
        self.calls: list[tuple[int, int]] = []
        self._batch_s = batch_s

    def run(self, rows: Sequence[Row], want_state: Sequence[bool]) -> BatchResult:
        """As `executor.engine.base.Engine.run`."""
        began_ns = time.monotonic_ns()
        time.sleep(self._batch_s)
        self.calls.append((began_ns, time.monotonic_ns()))
        state = {"STATE": Tensor("STATE", "UINT8", (STATE_BYTES,), bytes(STATE_BYTES))}
        return BatchResult([RowResult([Tensor("OUT", "INT32", (1, 1), bytes(4))], state)] * len(rows), Timings(0, 0, 0))

    def close(self) -> None:
        """Nothing is left behind."""


class Callers:
    """In the committer's place: everything is final at once, and the caller of a step sends the next one."""

    def __init__(self) -> None:
        self.steps = 0
        self.below_bounds = asyncio.Event()
        self.below_bounds.set()
        self._chance = random.Random(7)

    def begin(self, model: SequenceModel) -> None:
        """Every caller sends its first step."""
        for number in range(CALLERS):
            self._send(model, SequenceId(f"device||i{number}"), 1)

    def put(self, owner: SequenceModel, steps: Sequence[StepCommit]) -> int:
        """As `Committer.put`."""
        owner.committed(steps, [CommitCode.COMMITTED] * len(steps), 0, 0)
        loop = asyncio.get_running_loop()
        for step in steps:
            loop.call_later(self._chance.uniform(*THINK_S), self._send, owner, step.sequence, step.step + 1)
        self.steps += len(steps)
        return self.steps

    def _send(self, model: SequenceModel, sequence: SequenceId, number: int) -> None:
        slot = int(sequence.rpartition("i")[2])
        message = InferMessage("device", "1", "", slot, (Tensor("IN", "INT32", (1, 1), bytes(4)),))
        step = InboxStep(
            entry=f"{number}-{slot}",
            sequence=sequence,
            step=StepNumber(number),
            flags=StepFlag.START if number == 1 else StepFlag.NONE,
            epoch=Epoch(1),
            instance=InstanceIndex(0),
            slot=SlotIndex(slot),
            committed=StepNumber(number - 1),
            version="1",
            gateway="g",
            token=str(number),
            message=b"",
        )
        model.take(step, message)
        model.look()


async def play(strategy: Direct | Oldest, batch_s: float, seconds: float) -> list[str]:
    """One cell's figures."""
    inputs, outputs = (TensorSpec("IN", "INT32", (1,)),), (TensorSpec("OUT", "INT32", (1,)),)
    states = (StateSpec("STATE", "STATE_OUT", "UINT8", (STATE_BYTES,)),)
    batching = SequenceBatching(strategy, 60_000_000, states=states)
    config = ModelConfig("device", "simulated", "", ROWS, inputs, outputs, sequence_batching=batching)
    device = Device(batch_s)
    worker = EngineWorker(cast("Any", device), "device", "device_0", InstanceIndex(0))
    recorder = StatisticsRecorder(ModelLoad("device", "1", "0"))
    served = ServedVersion(config, "1", [worker], SLOTS, recorder, Fingerprint("one", "one"))
    callers = Callers()
    model = SequenceModel(served, executor=ExecutorId("e"), committer=cast("Any", callers), tracing=Tracing())
    running = asyncio.create_task(model.run())
    callers.begin(model)
    await asyncio.sleep(seconds)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await worker.close()
    bubbles_us = sorted((after - before) / 1000 for (_, before), (after, _) in itertools.pairwise(device.calls))
    lasted_ns = device.calls[-1][1] - device.calls[0][0]
    busy = sum(end - begin for begin, end in device.calls) / lasted_ns
    p50, p99 = (bubbles_us[len(bubbles_us) * part // 100] for part in (50, 99))
    return [f"{callers.steps / (lasted_ns / 1e9):.0f}", f"{p50:.0f}", f"{p99:.0f}", f"{busy:.1%}"]


@click.command()
@click.option("--seconds", default=5.0, show_default=True, help="of each cell")
def bubbles(seconds: float) -> None:
    """Measures both strategies on a slow and on a fast device."""
    rows: list[list[str]] = []
    for (name, strategy), batch_ms in itertools.product(STRATEGIES.items(), BATCHES_MS):
        figures = uvloop.run(play(strategy, batch_ms / 1000, seconds))
        rows.append([name, f"{batch_ms:g}", *figures])
    click.echo(markdown(["strategy", "batch ms", "steps/s", "bubble p50 us", "p99 us", "device busy"], rows))


if __name__ == "__main__":
    bubbles()
