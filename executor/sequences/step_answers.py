"""Writes answers of open steps, those of decoupled models, except the last ones, which leave with the commits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from executor.core.actions import BatchMember
from executor.workers.carrier import Carrier
from executor.workers.open_rows import Numbered
from shared.contract.ids import ExecutorId, ShardId
from shared.store.connections.link import SharedLinks
from shared.store.keyspace import Keyspace
from shared.store.script_values import StepAnswers
from shared.store.scripts import Scripts
from shared.store.work_scripts import WorkHeld


class AnswerWriter:
    """The answers of one model's steps. `run` sends them, for ever."""

    def __init__(self, scripts: Scripts, links: SharedLinks, keys: Keyspace, executor: ExecutorId, model: str) -> None:
        self._scripts = scripts
        self._keys = keys
        self._executor = executor
        self._carrier = Carrier(scripts, links, f"answers of {model}")

    async def run(self) -> None:
        await self._carrier.run()

    async def write(self, steps: Sequence[tuple[BatchMember, Sequence[Numbered]]]) -> Sequence[WorkHeld]:
        """Writes answers; GONE for each step whose sequence has another owner."""
        by_shard: dict[ShardId, list[int]] = {}
        for index, (member, _) in enumerate(steps):
            by_shard.setdefault(self._keys.shard_of(member.owned.sequence), []).append(index)
        calls = [
            self._carrier.send(self._scripts.answers([_answers_of(*steps[i]) for i in indexes], self._executor))
            for indexes in by_shard.values()
        ]
        held: dict[int, bool] = {}
        for indexes, written in zip(by_shard.values(), await asyncio.gather(*calls), strict=True):
            held.update(zip(indexes, written, strict=True))
        return [WorkHeld.HELD if held[index] else WorkHeld.GONE for index in range(len(steps))]


def _answers_of(member: BatchMember, answers: Sequence[Numbered]) -> StepAnswers:
    step = member.queued.step
    return StepAnswers(
        step.sequence, step.epoch, step.step, step.gateway, step.token, member.queued.message.keep_reply, answers
    )
