"""Closed-loop load: a number of sessions, each of which sends a step when the one before is answered.

A session plays one sequence after the other. Every answer is checked. Only steps that are answered inside the measuring
window are counted and timed.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.clients import BenchClient, LoadSession, StepError
from benchmarks.workloads import SCRIPTS, LstmScripts, Track, Workload

PAUSE_AFTER_ERROR_S = 0.05
"""Pause after an error, so that a server that refuses every step is not asked in a busy loop."""
DRAIN_TIMEOUT_S = 20.0
EXAMPLES_MAX = 5


def new_sequence_ids() -> Iterator[int]:
    """Ids that no earlier run on the same server has used."""
    return itertools.count(time.time_ns() // 1000)


@dataclass(slots=True)
class Tally:
    """The counts of a run.

    latencies_ns  of the steps answered in the window
    examples      texts of errors -> their number
    """

    latencies_ns: list[int] = field(default_factory=list)
    wrong: int = 0
    errors: int = 0
    examples: Counter[str] = field(default_factory=Counter)

    def fail(self, error: StepError) -> None:
        """One step that got an error."""
        self.errors += 1
        text = str(error)
        if text in self.examples or len(self.examples) < EXAMPLES_MAX:
            self.examples[text] += 1


class LoadRun:
    def __init__(self, client: BenchClient, workload: Workload, ids: Iterator[int]) -> None:
        self._client = client
        self._workload = workload
        self._ids = ids
        self._measuring = False
        self._stopping = False
        self.tally = Tally()

    async def run(self, concurrency: int, *, warmup_s: float, seconds: float, at_edge: Callable[[], None]) -> Tally:
        """Loads the server; `at_edge` is called at the window's beginning and end.

        Sequences that are under way at the end are ended with their next step, so that no slot stays taken. Raises
        TimeoutError when the server does not answer those.
        """
        sessions = [asyncio.create_task(self._session(), name="session") for _ in range(concurrency)]
        try:
            await asyncio.sleep(warmup_s)
            gc.collect()
            gc.disable()
            at_edge()
            self._measuring = True
            await asyncio.sleep(seconds)
            self._measuring = False
            at_edge()
            self._stopping = True
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                await asyncio.gather(*sessions)
        finally:
            gc.enable()
            for task in sessions:
                task.cancel()
        return self.tally

    async def _session(self) -> None:
        session = await self._client.session()
        while not self._stopping:
            try:
                await self._sequence(session)
            except StepError as error:
                self.tally.fail(error)
                await asyncio.sleep(PAUSE_AFTER_ERROR_S)
                session = await self._again(session)
        await session.close()

    async def _again(self, session: LoadSession) -> LoadSession:
        """A new session after an error; the old one if the server cannot be reached."""
        try:
            fresh = await self._client.session()
        except StepError as error:
            self.tally.fail(error)
            return session
        await session.close()
        return fresh

    async def _sequence(self, session: LoadSession) -> None:
        sequence, steps, track = next(self._ids), self._workload.steps(), self._workload.begin()
        for index in range(steps):
            end = index == steps - 1 or (self._stopping and index > 0)
            await self._step(session, sequence, track, start=index == 0, end=end)
            if end:
                return

    async def _step(self, session: LoadSession, sequence: int, track: Track, *, start: bool, end: bool) -> None:
        data = track.next_input()
        sent_ns = time.perf_counter_ns()
        output = await session.step(sequence, data, start=start, end=end)
        took_ns = time.perf_counter_ns() - sent_ns
        if not track.is_right(output):
            self.tally.wrong += 1
        if self._measuring:
            self.tally.latencies_ns.append(took_ns)


async def probe(session: LoadSession, scripts: LstmScripts, ids: Iterator[int]) -> None:
    """Fixes what the LSTM must answer, one step at a time on a quiet server.

    Raises `StepError`, also when the answers show that the server keeps no state: nothing could be checked by them.
    """
    for script in range(SCRIPTS):
        sequence, last = next(ids), scripts.steps_max - 1
        outputs = [
            await session.step(sequence, data, start=step == 0, end=step == last)
            for step, data in enumerate(scripts.inputs[script])
        ]
        scripts.expected.append([np.frombuffer(output, np.float32) for output in outputs])
    if not scripts.remembers():
        scripts.expected.clear()
        raise StepError("the probe's answers do not depend on the steps before: the server keeps no state")
