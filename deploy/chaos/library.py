"""Plays sequences with `seqmesh_client`, as its users do: the library numbers, repeats and resumes, this module judges.

A hang-up is the death of the client's process: what it had in memory is dropped, and it goes on by its token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np

from deploy.chaos.clients import CHANNELS, GatewayAddresses, RefusedError
from deploy.chaos.fold import FoldState
from deploy.chaos.history import AttemptOutcome
from deploy.chaos.load import BUDGET_S, Clock, Player, Score, Sent
from deploy.chaos.scripts import Script
from seqmesh_client import AsyncClient, AsyncSequence, NoAnswer, Patience, StepOutputs, StepRefused

SILENCE_S = 5.0


def libraries_for(gateways: Sequence[GatewayAddresses]) -> Sequence[AsyncClient]:
    """The clients of a run, none if a gateway has no gRPC. Several, so that one cut does not hit all sequences."""
    urls = [gateway.grpc for gateway in gateways]
    patience = Patience(step_s=BUDGET_S, silence_s=SILENCE_S)
    return [AsyncClient(urls, patience=patience) for _ in range(CHANNELS)] if all(urls) else []


class LibraryPlayer(Player):
    """Plays one sequence. Of each step one attempt is recorded for each time that its client lived."""

    def __init__(self, script: Script, library: AsyncClient, clock: Clock, score: Score, seed: int) -> None:
        super().__init__(script, (), clock, score, seed)
        self._library = library
        self._token = library.sequence(script.model, id=script.correlation_id).token
        self._sent_max = 0
        self._progress = asyncio.Event()

    async def _go_on(self) -> bool:
        """One life of the client, to its death or to the last step."""
        sequence = self._library.resume(self._token)
        living = asyncio.create_task(self._live(sequence))
        try:
            await asyncio.wait((living, self._leave), return_when="FIRST_COMPLETED")
        finally:
            # Not awaited itself: its cancellation would pass for that of this task, or hide it.
            living.cancel()
            await asyncio.wait((living,))
        if not living.cancelled():
            living.result()
        self._token = sequence.token
        sequence.hang_up()
        for sent in self._open:
            self._note(sent, AttemptOutcome.LEFT)
        self._open.clear()
        return False

    async def _live(self, sequence: AsyncSequence) -> None:
        """The steps from the first one without an outcome to the last, or to an error."""
        try:
            async for answer in sequence.steps(self._inputs(sequence), ahead=self.script.window):
                self._settle(answer)
            if len(self._done) == len(self.script.values) - 1:
                step = len(self.script.values)
                await self._quiet(step)
                self._settle(await sequence.step(self._begin(step), last=self.script.ends))
        except StepRefused as error:
            head = self._open.popleft()
            head.answer.set_exception(RefusedError(error.text, error.reason, error.last_step, error.code))
            self._note(head, AttemptOutcome.LEFT)
        except NoAnswer:
            self._note(self._open.popleft(), AttemptOutcome.LATE)

    async def _inputs(self, sequence: AsyncSequence) -> AsyncIterator[dict[str, np.ndarray]]:
        """The inputs of all steps but the last. When the run ends, the next new step becomes the last."""
        step = sequence.answered + 1
        while step < len(self.script.values):
            if self._cut_short and not self._was_sent(step):
                self._end_with(step)
                return
            await self._quiet(step)
            yield self._begin(step)
            step += 1

    async def _quiet(self, step: int) -> None:
        """The script's pause before a step; a silence begins when all steps before it are answered."""
        while step == self.script.silent_at and not self._was_sent(step) and len(self._done) < step - 1:
            self._progress.clear()
            await self._progress.wait()
        await self._pause(step)

    def _was_sent(self, step: int) -> bool:
        return step <= self._sent_max

    def _begin(self, step: int) -> dict[str, np.ndarray]:
        self._sent_max = max(self._sent_max, step)
        self._open.append(Sent(step, self._clock.now(), asyncio.get_running_loop().create_future()))
        if step in self.script.hang_ups and step not in self._hung_up:
            self._hung_up.add(step)
            asyncio.get_running_loop().call_later(self._chance.uniform(0, 0.02), self.hang_up)
        return {"INPUT": np.array([[self.script.values[step - 1]]], np.int64)}

    def _settle(self, answer: StepOutputs) -> None:
        fold, length = answer["OUTPUT"].reshape(-1).tolist()
        head = self._open.popleft()
        head.answer.set_result(FoldState(fold, length))
        self._note(head, AttemptOutcome.LEFT)
        self._progress.set()
