"""One engine's place in the loop of a sequence model."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from executor.core.actions import LoadState, RunBatch
from executor.core.batching import Wait
from executor.engine.base import BatchResult, Row
from executor.sequences.committer import Taken
from executor.sequences.step_commits import StepCommits
from executor.workers.worker import EngineWorker


def monotonic_us() -> int:
    """The clock of batching: microseconds that never go back; comparable within this process only."""
    return time.monotonic_ns() // 1000


class GivenBatch(NamedTuple):
    """A batch that the engine was given. at_ns: when, wall clock"""

    batch: RunBatch
    rows: Sequence[Row]
    result: asyncio.Future[BatchResult]
    at_ns: int


class Instance:
    """One engine's place in the loop.

    wake      there may be a batch to be run
    rests     its loop waits for that
    given     the batch that runs, and the staged one, with which the engine goes on as soon as that has ended
    idle      no batch was given
    ended_ns  when the last batch ended, wall clock
    loads     states that came in this turn of the loop, for the engine
    answered  the steps that this instance has handed to the committer, and those before them
    """

    def __init__(self, worker: EngineWorker, commits: StepCommits) -> None:
        self.worker = worker
        self.commits = commits
        self.wake = asyncio.Event()
        self.rests = False
        self.given: deque[GivenBatch] = deque()
        self.idle = asyncio.Event()
        self.idle.set()
        self.ended_ns = 0
        self.loads: list[LoadState] = []
        self.answered: Taken = ()
        self.failure: Exception | None = None

    def give_up(self) -> None:
        """Nobody waits for its batches any more. A staged one is not run."""
        for given in self.given:
            given.result.cancel()
        self.given.clear()
        self.idle.set()

    def fail(self, failure: Exception) -> None:
        """The engine cannot go on: the loop raises the failure."""
        self.failure = failure
        self.wake.set()

    async def sleep(self, wait: Wait) -> None:
        """Returns when there is something new to be decided, or the time for it has come."""
        # No await lies between the decision and this line, so no wake-up is lost.
        self.wake.clear()
        self.rests = True
        timer: asyncio.TimerHandle | None = None
        if wait.until_us is not None:
            delay_s = max(0, wait.until_us - monotonic_us()) / 1e6
            timer = asyncio.get_running_loop().call_later(delay_s, self.wake.set)
        try:
            await self.wake.wait()
        finally:
            self.rests = False
            if timer is not None:
                timer.cancel()
