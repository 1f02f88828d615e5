"""What every fuzzer has in common: inputs by seed, and somebody who watches the attacked meanwhile.

A fuzzer is a module with one function, `fuzzer(folder)`: an async context manager that starts what is attacked and
yields a `Fuzzer`. Each input is made from one seed alone, and the seeds of a run follow each other, so that
`python -m tests.fuzz --only NAME --seed SEED --inputs 1` repeats any of them.

A failure is whatever `attack` or `health` raises, an attacked process that ended, memory or a delay beyond the
fuzzer's bounds, and an input that does not come to an end.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

LOOK_EVERY_S = 0.2
"""Between two questions for health."""
TELL_EVERY_S = 10.0
INPUT_S_MAX = 120.0
"""An input that takes longer is a failure: nothing may wait for ever."""
FAILURES_MAX = 20
"""A run ends after so many different ones."""
NUMBERS = re.compile(r"\d+")
"""What tells failures of one cause apart."""
TEXT_MAX = 2000
"""Shown of a failure, characters."""


class Fuzzer(Protocol):
    """One kind of attack on something that runs.

    at_once           inputs that are tried side by side
    memory_bytes_max  what the attacked processes may take, each one's worst moment added up
    health_s_max      how long `health` may take while they are attacked
    """

    @property
    def at_once(self) -> int: ...
    @property
    def memory_bytes_max(self) -> int: ...
    @property
    def health_s_max(self) -> float: ...

    def attacked(self) -> Collection[int]:
        """Ids of the processes that are attacked, their children not among them. None of them may end."""
        ...

    async def attack(self, chance: random.Random) -> None:
        """Tries one input, made by `chance` alone. Raises whatever was found wrong."""
        ...

    async def health(self) -> None:
        """Asks what everybody else would ask meanwhile, and checks the answer. Raises when it is not right."""
        ...


OpenFuzzer = Callable[[Path], AbstractAsyncContextManager[Fuzzer]]
"""Starts what is attacked. The folder is empty, and the fuzzer's own."""


@dataclass(slots=True)
class Failure:
    """seed: of the first input that shows it, or that was tried when it was seen; times: that the like was seen."""

    seed: int
    text: str
    times: int = 1


@dataclass(slots=True)
class Findings:
    """What a run has shown; memory in bytes."""

    inputs: int = 0
    memory_bytes: int = 0
    health_s: float = 0.0
    causes: dict[str, Failure] = field(default_factory=dict[str, Failure])

    @property
    def failures(self) -> list[Failure]:
        """One for each cause, as far as their texts tell."""
        return list(self.causes.values())


async def fuzz(
    fuzzer: Fuzzer,
    *,
    seed: int,
    inputs: int | None = None,
    seconds: float | None = None,
    tell: Callable[[Findings], None] = lambda _: None,
) -> Findings:
    """Tries inputs from `seed` on: so many of them, or for so long. tell: hears now and then how it goes."""
    run = _Run(fuzzer, seed, inputs, seconds)
    watch = asyncio.create_task(run.watch(tell), name="watch")
    await asyncio.gather(*[run.attack() for _ in range(fuzzer.at_once)])
    run.over = True
    await watch
    return run.findings


class _Run:
    """One run of a fuzzer."""

    def __init__(self, fuzzer: Fuzzer, seed: int, inputs: int | None, seconds: float | None) -> None:
        self.findings = Findings()
        self.over = False
        self._fuzzer = fuzzer
        self._first = self._next = seed
        self._end = None if inputs is None else seed + inputs
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._underway: set[int] = set()
        self._suspects: set[int] = set()
        self._victims = [psutil.Process(pid) for pid in fuzzer.attacked()]

    def _seeds(self) -> Iterator[int]:
        """Those that are left; shared by all that attack."""
        while not (
            self.over
            or self._next == self._end
            or (self._deadline is not None and time.monotonic() >= self._deadline)
            or len(self.findings.causes) >= FAILURES_MAX
        ):
            self._next += 1
            yield self._next - 1

    async def attack(self) -> None:
        """Tries one input after the other."""
        for seed in self._seeds():
            self._underway.add(seed)
            self._suspects.add(seed)
            try:
                async with asyncio.timeout(INPUT_S_MAX):
                    await self._fuzzer.attack(random.Random(seed))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is what was looked for
                self._fail(error, seed)
            self._underway.discard(seed)
            self.findings.inputs += 1

    async def watch(self, tell: Callable[[Findings], None]) -> None:
        """Looks until the run is over, and once after that."""
        told = time.monotonic()
        last = False
        while not last:
            last = self.over
            await self._look()
            self._suspects = set(self._underway)
            if time.monotonic() - told >= TELL_EVERY_S:
                told = time.monotonic()
                tell(self.findings)
            if not last:
                await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(INPUT_S_MAX):
                await self._fuzzer.health()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)
        took = time.monotonic() - began
        self.findings.health_s = max(self.findings.health_s, took)
        if took > self._fuzzer.health_s_max:
            self._fail(f"health took {took:.2f} s, more than {self._fuzzer.health_s_max:g} s")
        ended = [victim.pid for victim in self._victims if not _runs(victim)]
        if ended:
            self._fail(f"processes {ended} have ended")
            self.over = True
            return
        taken = sum(map(peak_bytes, self._victims))
        self.findings.memory_bytes = max(self.findings.memory_bytes, taken)
        if taken > self._fuzzer.memory_bytes_max:
            self._fail(f"{taken >> 20} MiB of memory, more than {self._fuzzer.memory_bytes_max >> 20} MiB")
            self.over = True

    def _fail(self, problem: Exception | str, seed: int | None = None) -> None:
        """seed: None when any of those tried since the last look may have done it."""
        text = problem if isinstance(problem, str) else f"{type(problem).__name__}: {problem}"
        cause = NUMBERS.sub("#", text[:TEXT_MAX])
        if cause in self.findings.causes:
            self.findings.causes[cause].times += 1
            return
        if seed is None:
            seed = min(self._suspects, default=self._first)
            text += f" (seen while the seeds {seed} to {self._next - 1} were tried)"
        self.findings.causes[cause] = Failure(seed, text[:TEXT_MAX])


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def peak_bytes(process: psutil.Process) -> int:
    """The most that a process and its children have held in memory, each one's worst moment added up; 0 of one that
    has ended. Where the system does not tell the worst moment, what they hold now."""
    try:
        return sum(map(_peak, [process, *process.children(recursive=True)]))
    except psutil.NoSuchProcess:
        return 0


def _peak(process: psutil.Process) -> int:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return int(process.memory_info().rss)
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(line.split()[1]) << 10
