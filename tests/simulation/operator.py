"""An operator in the middle of traffic and faults: pauses, resumes, moves, copies and ends what the clients have open.

The operator is one more process, with the code of `seqmesh seq`. It is killed, frozen and cut off like the others, in
the middle of what it does, and begins again with something else. It repeats itself now and then. The ledger judges what
becomes of the clients' steps, as without an operator; beside that

    copies    a step of a copy builds on exactly the steps that its origin had run
    pauses    an idle time stands still while a sequence is paused, and nothing of it is committed
    no rest   when the operator has resumed what was paused, every client has its answers

`python -m tests.simulation --operator --seeds 1000`
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

from gateway.requests.infer_call import InferCall
from shared.contract.errors import MeshError, Reason
from shared.contract.ids import sequence_id
from shared.process import lifecycle
from shared.process.lifecycle import Stop, Tasks
from shared.store.connections.redis_client import connect
from shared.store.connections.redis_py import LOST_OR_REFUSED
from shared.store.exported import from_file, to_file
from shared.store.membership import Membership
from shared.store.moving import wish_to_move
from shared.store.sequence_status import SequenceStatus, Wanted
from shared.store.sequences import Sequences
from shared.store.wishes import uttered
from tests.simulation.clients import Client, Door, Habit, LostError
from tests.simulation.model import INPUT, NAME, fold, number, value_of
from tests.simulation.story import Story
from tests.simulation.world import Life, Member, Plan, Result, World, plan_of, play

BEGIN_S = 2.5
PAUSE_S = 0.6
"""Between two things that the operator does, on the average."""
Verb = Callable[[Sequences, SequenceStatus], Awaitable[None]]
COPIES_FROM = 900_000
"""Ids of copies: no client has one of these."""


class OperatedWorld(World):
    """A mesh that has an operator."""

    def __init__(self, seed: int, story: Story, plan: Plan) -> None:
        super().__init__(seed, story, plan)
        self._whims = random.Random(f"operator {seed}")
        self._copies = COPIES_FROM
        self.operator = Member(self, "op", self._operates)

    @property
    def members(self) -> list[Member]:
        return [*super().members, self.operator]

    def _client(self, index: int, habit: Habit, doors: list[Door]) -> Client:
        client = super()._client(index, habit, doors)
        client.excused |= {Reason.CANCELLED}
        return client

    async def _clear_up(self) -> None:
        self.operator.wanted = False
        if self.operator.life is not None:
            self.operator.life.stop.request("the end")
        await super()._clear_up()

    async def _operates(self, life: Life) -> int:
        return await lifecycle.outcome(self._serve, life.stop)

    async def _serve(self, tasks: Tasks, stop: Stop) -> None:
        """The operator's process."""
        redis = self._redis = connect(self.url)
        sequences = Sequences(redis, self.keys, Membership(redis, self.keys))
        await asyncio.sleep(BEGIN_S)
        while not stop.requested:
            await asyncio.sleep(self._whims.expovariate(1 / PAUSE_S))
            try:
                await self._do_something(sequences)
            except (LostError, MeshError, *LOST_OR_REFUSED) as error:
                self.story.tell(f"the operator hears: {type(error).__name__} {error}")
        await redis.aclose()

    async def _do_something(self, sequences: Sequences) -> None:
        found, _ = await sequences.page(NAME, Wanted())
        if self._calm:
            for one in found:
                if one.state == "paused":
                    self.story.tell(f"the operator resumes {one.id}")
                    await sequences.resume(one.sequence)
            return
        if not found:
            return
        one = self._whims.choice(found)
        verb = self._whims.choice(self._verbs())
        for _ in range(self._whims.choice((1, 1, 1, 2))):
            await verb(sequences, one)

    def _verbs(self) -> list[Verb]:
        """What it may do next, the more often the likelier."""
        return [*[self._pause] * 4, *[self._resume] * 3, self._move, self._copy, self._end]

    async def _pause(self, sequences: Sequences, one: SequenceStatus) -> None:
        pause_ms = self._whims.choice((300, 2000, 20_000))
        status = await sequences.pause(one.sequence, pause_ms)
        self.story.tell(f"the operator has paused {one.id} for {pause_ms} ms: {status.open_steps} steps open")

    async def _resume(self, sequences: Sequences, one: SequenceStatus) -> None:
        status = await sequences.resume(one.sequence)
        self.story.tell(f"the operator has resumed {one.id}: {status.state}")

    async def _move(self, _: Sequences, one: SequenceStatus) -> None:
        self.story.tell(f"the operator wishes that {one.id} moves")
        await uttered(self._redis, self.keys, one.sequence, wish_to_move())

    async def _end(self, sequences: Sequences, one: SequenceStatus) -> None:
        # One that waits for its first slot would be forgotten at once, with whatever its client asks next.
        if one.state != "waiting":
            self.story.tell(f"the operator ends {one.id}: {(await sequences.end(one.sequence)).name}")

    async def _copy(self, sequences: Sequences, one: SequenceStatus) -> None:
        """Through a file, and one step further."""
        origin = one.sequence
        exported = from_file(to_file(await sequences.export(origin)))
        self._copies += 1
        name, copy = self._copies, sequence_id(NAME, "", self._copies)
        states = self.ledger.states_behind(origin, exported.last_step)
        await sequences.reopen(copy, exported.without_replies())
        self.story.tell(f"the operator has copied {one.id} at step {exported.last_step} to {name}")
        self.ledger.copied(copy, origin, exported)
        value = name * 1000
        call = InferCall(NAME, correlation_id=name, end=True, request_id=f"r{value}", inputs=(number(INPUT, value),))
        (answer,) = await self._whims.choice(self.doors()).infer([call], lambda _call, _answer: None)
        async with asyncio.timeout(20.0):
            got = value_of((await answer).message.outputs[0])
        if got not in {fold(state, value) for state in states if state is not None}:
            self.story.violate(f"the copy {name} of {one.id} gave {got}, behind {states}")


def operated(seed: int) -> Result:
    """Runs one seed with an operator. The model is not decoupled: a copy is told from its origin by its one answer."""
    plan = plan_of(seed)
    return play(seed, replace(plan, shape=replace(plan.shape, decoupled=False)), OperatedWorld)
