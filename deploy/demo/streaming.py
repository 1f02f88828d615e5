"""Streams several sequences through a mesh by `seqmesh_client`, all at once: a step, its answer, a pause, the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.demo.screen import Screen, View, ViewT
from deploy.demo.transcript import AnsweredPiece
from seqmesh_client import AsyncClient, StepOutputs

REDRAW_INTERVAL_S = 0.04
"""25 drawings a second are enough."""


@dataclass(frozen=True, slots=True)
class Streams:
    """What is streamed.

    inputs   of each sequence's steps
    ids      of the sequences
    outputs  names of those that are compared
    pace_s   pause between an answer and the next step of the same sequence
    """

    client: AsyncClient
    model: str
    inputs: Sequence[Sequence[Any]]
    ids: Sequence[str]
    outputs: Sequence[str]
    pace_s: float

    async def run(
        self,
        screen: Screen[ViewT],
        take: Callable[[int, StepOutputs], None],
        at_half: Callable[[], Awaitable[None]] | None = None,
    ) -> list[list[AnsweredPiece]]:
        """Streams all sequences at once; returns the answers of each.

        take     called with each answer and its sequence's index
        at_half  called once, when half of all steps are answered; the streams go on meanwhile
        raises   SeqmeshError
        """
        answered, half = 0, asyncio.Event()

        def count(index: int, answer: StepOutputs) -> None:
            nonlocal answered
            take(index, answer)
            answered += 1
            if 2 * answered >= sum(map(len, self.inputs)):
                half.set()

        async def wait_for_half() -> None:
            if at_half is not None:
                await half.wait()
                await at_half()

        try:
            async with asyncio.TaskGroup() as group:
                ticker = group.create_task(keep_drawing(screen), name="screen")
                halfway = group.create_task(wait_for_half(), name="half")
                streams = [group.create_task(self._one(index, view, count)) for index, view in enumerate(screen.views)]
                await asyncio.wait([*streams, halfway])
                ticker.cancel()
        except ExceptionGroup as failures:
            # When the mesh fails, all streams mostly fail with the same error: the first one is enough.
            raise failures.exceptions[0] from failures
        screen.refresh()
        return [stream.result() for stream in streams]

    async def _one(self, index: int, view: View, take: Callable[[int, StepOutputs], None]) -> list[AnsweredPiece]:
        answers: list[AnsweredPiece] = []
        async with self.client.sequence(self.model, id=self.ids[index]) as sequence:
            for inputs in self.inputs[index]:
                sent_s = view.waiting_since_s = time.monotonic()
                answer = await sequence.step(inputs, outputs=self.outputs)
                view.waiting_since_s = None
                content = tuple(answer[name].tobytes() for name in self.outputs)
                answers.append(AnsweredPiece(content, sent_s, time.monotonic()))
                take(index, answer)
                await asyncio.sleep(self.pace_s)
        return answers


async def keep_drawing(screen: Screen[ViewT]) -> None:
    while True:
        await asyncio.sleep(REDRAW_INTERVAL_S)
        screen.refresh()
