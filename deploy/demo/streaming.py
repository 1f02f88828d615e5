"""Streams several sequences through a mesh by `seqmesh_client`, all at once: a step, its answer, a pause, the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.demo.local_mesh import KilledExecutor, LocalMesh
from deploy.demo.screen import Screen, View, ViewT
from deploy.demo.showing import numbered, show_owners
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
    mesh     whose executors are shown, and may be killed; None: it does not run on this machine
    noun     what a sequence is called
    """

    client: AsyncClient
    model: str
    inputs: Sequence[Sequence[Any]]
    ids: Sequence[str]
    outputs: Sequence[str]
    pace_s: float
    mesh: LocalMesh | None
    noun: str

    async def run(
        self, screen: Screen[ViewT], take: Callable[[int, StepOutputs], None], *, kill: bool
    ) -> tuple[list[list[AnsweredPiece]], KilledExecutor | None]:
        """Streams all sequences at once; returns the answers of each, and the executor that was killed.

        take    called with each answer and its sequence's index
        kill    kills an executor when half of all steps are answered; the streams go on meanwhile
        raises  SeqmeshError
        """
        answered, half = 0, asyncio.Event()

        def count(index: int, answer: StepOutputs) -> None:
            nonlocal answered
            take(index, answer)
            answered += 1
            if 2 * answered >= sum(map(len, self.inputs)):
                half.set()

        async def kill_at_half(mesh: LocalMesh) -> KilledExecutor:
            await half.wait()
            victim = await mesh.kill_one(self.ids)
            held = numbered(self.noun, victim.held)
            screen.say(f"  {victim.name} (process {victim.pid}) is killed; it held {held}")
            return victim

        killing: asyncio.Task[KilledExecutor] | None = None
        owners = asyncio.create_task(show_owners(self.mesh, self.ids, screen), name="owners")
        try:
            async with asyncio.TaskGroup() as group:
                ticker = group.create_task(keep_drawing(screen), name="screen")
                streams = [group.create_task(self._one(index, view, count)) for index, view in enumerate(screen.views)]
                if kill and self.mesh is not None:
                    killing = group.create_task(kill_at_half(self.mesh), name="kill")
                await asyncio.wait([*streams, *([killing] if killing else [])])
                ticker.cancel()
        except ExceptionGroup as failures:
            # When the mesh fails, all streams mostly fail with the same error: the first one is enough.
            raise failures.exceptions[0] from failures
        finally:
            owners.cancel()
        screen.refresh()
        return [stream.result() for stream in streams], killing.result() if killing else None

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
