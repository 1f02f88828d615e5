"""What the fuzz of the scripts stands on: the twin, its clock, the calls, the story, and the truth beside them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

from shared.contract.ids import sequence_id
from shared.contract.limits import ANSWERS_BYTES_MAX
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from shared.store.script_sender import Call
from shared.store.script_values import NO_JOURNAL, JournalBounds
from shared.store.scripts import Scripts
from tests.simulation.lua_scripts import run_script
from tests.simulation.script_truth import MODEL, Truth
from tests.simulation.store import Store, StoreError

SEQUENCES = 3
BEGIN_US = 1_000_000_000_000

T = TypeVar("T")


class Fenced(Exception):
    """A newer leader exists."""


DECOUPLED = 0.4
"""The share of runs whose model is decoupled."""
STEPS_BACK = 0.2
"""The share of runs in which the clock of Redis is set back now and then."""
STEPS_AHEAD = 0.2
"""The share of runs in which it jumps ahead, as that of a machine which was suspended."""
FOLLOWS = 0.5
"""The share of runs in which one of the sequences follows another."""
FOLLOWING = "@ensemble//1#2-0.1"
"""The version that this one requests."""
JOURNALS = (NO_JOURNAL, JournalBounds(100, 100_000), JournalBounds(100, 100_000), JournalBounds(3, 100_000))
JOURNALS_BY_BYTES = (JournalBounds(100, 60), JournalBounds(100, 120))
"""What journals may hold: nothing, everything, few steps, few bytes."""


class Bench:
    """One run's store. lines: its story; calls: how many there were.

    steps_back  the clock of Redis, now_us, is set back now and then; latest_us: where it was before
    back_ms     by so much it was set back, together
    steps_ahead, ahead_ms  the same of its jumps ahead
    decoupled   steps have answers before their last ones
    journal     what the journals of its sequences may hold
    kept_bytes  of these answers that are kept for retries; keeps_all: so many that it is all of them
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        # Drawn by itself, so that a seed goes on to mean what it meant in everything else.
        habits = random.Random(f"answers {seed}")
        self.decoupled = habits.random() < DECOUPLED
        self.keeps_all = habits.random() < 0.7
        self.kept_bytes = ANSWERS_BYTES_MAX if self.keeps_all else 60
        self.journal = random.Random(f"journal {seed}").choice((*JOURNALS, *JOURNALS_BY_BYTES))
        self.steps_back = random.Random(f"clock {seed}").random() < STEPS_BACK
        self.steps_ahead = random.Random(f"clock ahead {seed}").random() < STEPS_AHEAD
        self.now_us = self.latest_us = BEGIN_US
        self.back_ms = self.ahead_ms = 0
        self.store = Store(lambda: self.now_us, random.Random(seed), run_script)
        self.keys = Keyspace("fuzz", 1)
        # It never sends anything itself.
        self.scripts = Scripts(connect("redis://nowhere"), self.keys)
        self.sequences = [sequence_id(MODEL, "", number) for number in range(1, SEQUENCES + 1)]
        if random.Random(f"follows {seed}").random() < FOLLOWS:
            self.sequences[0] = sequence_id(MODEL, FOLLOWING, 1)
        # Of the others the state is lost with their owner.
        self.durable = frozenset(self.sequences[: self.chance.randint(SEQUENCES - 1, SEQUENCES)])
        self.truth = Truth(self.store, self.keys, self.sequences, self.journal)
        self.lines: list[str] = []
        self.calls = 0

    @property
    def passed_us(self) -> int:
        """The clock of services, which is never set."""
        return self.now_us + self.slow_ms * 1000

    @property
    def slow_ms(self) -> int:
        """By so much the clock of services shows more than that of Redis, as the latter was set."""
        return self.back_ms - self.ahead_ms

    def set_back(self, ms: int) -> None:
        """The clock of Redis is set back, or a replica whose clock is behind takes over."""
        self.latest_us = max(self.latest_us, self.now_us)
        self.now_us -= ms * 1000
        self.back_ms += ms
        self.truth.behind_ms = (self.latest_us - self.now_us) // 1000
        self.tell(f"the clock is set back by {ms} ms")

    def set_ahead(self, ms: int) -> None:
        """The clock of Redis jumps, or a replica whose clock is ahead takes over."""
        self.now_us += ms * 1000
        self.ahead_ms += ms
        self.tell(f"the clock jumps ahead by {ms} ms")

    def run(self, call: Call[T]) -> T:
        """One call. Raises Fenced."""
        if not self.calls:
            self.store.execute([b"FUNCTION", b"LOAD", b"REPLACE", self.scripts.library.text.encode()])
        self.calls += 1
        function = self.scripts.library.function(call.script).encode()
        command = [b"FCALL", function, _wire(len(call.keys)), *map(_wire, call.keys), *map(_wire, call.args)]
        try:
            return call.read(self.store.execute(command))
        except StoreError as error:
            if str(error).startswith("FENCED"):
                raise Fenced from error
            raise

    def do(self, *command: Any) -> Any:
        """A plain command."""
        return self.store.execute([_wire(part) for part in command])

    def tell(self, text: str) -> None:
        """A line of the story."""
        self.lines.append(f"{self.now_us // 1000 % 1_000_000:7d} {text}")


def pairs(flat: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Fields and values of a stream entry, or of a hash."""
    return list(zip(flat[::2], flat[1::2], strict=True))


def _wire(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
