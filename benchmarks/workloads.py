"""The workloads: which inputs are sent, and how each answer is checked. Pure.

A sequence is one `Track`: it gives the next input and checks the answer. Every model of the benchmark has one input
INPUT and one output OUTPUT.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

SEED = 7
STEPS = 20
"""Mean length of a sequence."""
STEPS_SPREAD = 4
"""Lengths differ by up to this, so that sequences do not start in step."""
SUMMAND_MAX = 999
"""Largest summand. Sums of a sequence stay far below INT32's bound."""
SCRIPTS = 4
"""Different sequences of inputs for the LSTM. Few, because each is probed before the load; more than one, because
state that leaks into another sequence must show."""
INPUT_SIZE = 128
OUTPUT_SIZE = 10
TOLERANCE = 1e-4
"""Largest absolute difference of an LSTM's output to the probe's, FP32: a row's last bits depend on its batch."""


class Track(Protocol):
    """One sequence under way."""

    def next_input(self) -> bytes:
        """The bytes of INPUT for the next step."""
        ...

    def is_right(self, output: bytes) -> bool:
        """Whether the bytes of OUTPUT are the answer to the input given last."""
        ...


@dataclass(frozen=True, slots=True)
class TensorForm:
    """How INPUT is declared in a request."""

    datatype: str
    shape: tuple[int, ...]
    size_bytes: int


class Workload(Protocol):
    """What sequences of a measurement send, and how their answers are judged."""

    form: TensorForm

    def begin(self) -> Track: ...

    def steps(self) -> int:
        """How many steps the next sequence has."""
        ...


class Lengths:
    """How long sequences are: evenly spread about the mean."""

    def __init__(self) -> None:
        self._chance = random.Random(SEED)

    def steps(self) -> int:
        """How many steps the next sequence has."""
        return self._chance.randint(STEPS - STEPS_SPREAD, STEPS + STEPS_SPREAD)


class RunningSums(Lengths):
    """Random summands; the answer is the exact sum so far."""

    form = TensorForm("INT32", (1, 1), 4)

    def begin(self) -> SumTrack:
        """A sequence whose sum is 0."""
        return SumTrack(self._chance)


class SumTrack:
    """A sequence of random summands, and the sum that each answer must be."""

    __slots__ = ("_chance", "_sum")

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._sum = 0

    def next_input(self) -> bytes:
        summand = self._chance.randint(1, SUMMAND_MAX)
        self._sum += summand
        return summand.to_bytes(4, "little")

    def is_right(self, output: bytes) -> bool:
        """Whether it is the sum, INT32, exactly."""
        return output == self._sum.to_bytes(4, "little")


class LstmScripts(Lengths):
    """A few fixed scripts of inputs; the answers are those of a quiet probe.

    Each script's second input equals its first. A server that answers both alike keeps no state (`remembers`).

    expected  per script and step the probe's OUTPUT, [10] float32; empty until the probe is done
    """

    form = TensorForm("FP32", (1, INPUT_SIZE), 4 * INPUT_SIZE)
    steps_max = STEPS + STEPS_SPREAD

    def __init__(self) -> None:
        super().__init__()
        table = np.random.default_rng(SEED).standard_normal((SCRIPTS, self.steps_max, INPUT_SIZE), dtype=np.float32)
        table[:, 1] = table[:, 0]
        self.inputs = [[row.tobytes() for row in script] for script in table]
        self.expected: list[list[npt.NDArray[np.float32]]] = []

    def remembers(self) -> bool:
        """Whether the probe's answers depend on the steps before."""
        return all(float(np.abs(first - second).max()) > TOLERANCE for first, second, *_ in self.expected)

    def begin(self) -> LstmTrack:
        """A sequence that follows one of the scripts."""
        script = self._chance.randrange(SCRIPTS)
        return LstmTrack(self.inputs[script], self.expected[script])


class LstmTrack:
    """One sequence of LSTM steps."""

    __slots__ = ("_expected", "_inputs", "_step")

    def __init__(self, inputs: list[bytes], expected: list[npt.NDArray[np.float32]]) -> None:
        self._inputs = inputs
        self._expected = expected
        self._step = -1

    def next_input(self) -> bytes:
        """The script's next vector, [1, 128] FP32."""
        self._step += 1
        return self._inputs[self._step]

    def is_right(self, output: bytes) -> bool:
        """Whether it is the probe's answer, up to `TOLERANCE`."""
        if len(output) != 4 * OUTPUT_SIZE:
            return False
        difference = np.frombuffer(output, np.float32) - self._expected[self._step]
        return bool(np.abs(difference).max() <= TOLERANCE)


def is_lstm(model: str) -> bool:
    """Whether a model of benchmarks/models is an LSTM; the others sum up."""
    return model.startswith("lstm")
