"""What clients ask for beside the answers to their steps, in half of the meshes beside all that `--vary` has.

    connections  one for the steps of a sequence. It is closed when the client leaves the sequence, and now and then
                 between two steps: an orphan has a shorter idle time, until it is used over another connection
    waits        how long a step has waited for a slot, and a START that is not to wait for long
    runs         their names, by which some clients end their sequences without a step
    tenants      that may send few requests a second, and have few sequences

`python -m tests.simulation --ask --seeds 1000`
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import replace

from msgspec.structs import replace as changed

from gateway.requests.infer_call import InferCall
from gateway.requests.waiting import Answer
from shared.contract.errors import MeshError, Reason, SequenceError
from shared.contract.messages import WAITED_MS
from shared.contract.tenants import TenantLimits
from tests.simulation.clients import Client, GivenUpError, LostError, Sequence, Stream, Style
from tests.simulation.model import value_of
from tests.simulation.varying import TENANTS, TenantsWorld, VariedWorld, varied_plan
from tests.simulation.world import Plan, Result, plan_of, play

GRACE_S = 1.0, 4.0
"""The idle time of orphans; each model has its own."""
WAITS_MS = 0, 0, 1, 20, 1000
"""How long clients wait for a first slot; 0: as long as it takes."""
HANGS_UP, CLOSES = 0.2, 0.4
"""How often a client closes its connection between two steps, and ends a sequence by the name of its run."""
LATE_S = 2.0
SLACK_MS = 2
"""Clocks have milliseconds."""
SLOW = {"slow": TenantLimits(live_max=4, steps_per_s=4, burst=3)}


class AskingSequence(Sequence):
    """One sequence of such a client."""

    def __init__(self, client: AskingClient, correlation_id: int, unique: int) -> None:
        super().__init__(client, correlation_id, unique)
        self._client: AskingClient
        self._stream: Stream | None = None
        self._run = ""
        self._closes = not self._habit.iterative and self._chance.random() < CLOSES
        self._sent_s: dict[int, float] = {}

    async def run(self) -> bool:
        try:
            ends = await super().run()
            return await self._close() if ends and self._closes else ends
        finally:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    async def _pause(self) -> None:
        if self._chance.random() < HANGS_UP:
            self._hang_up()
        await super()._pause()

    def _step(self, index: int, *, first: bool, last: bool) -> InferCall:
        call = super()._step(index, first=first, last=last and not self._closes)
        call = changed(call, wait_info=True, run_info=True, wait_max_ms=self._chance.choice(WAITS_MS) * call.start)
        if call.wait_max_ms:
            # Its gateway may take it back.
            self._client._ledger.given_up.add(value_of(call.inputs[0]))
        return call

    async def _through_one(self, calls: list[InferCall]) -> list[asyncio.Future[Answer]]:
        for call in calls:
            self._sent_s.setdefault(value_of(call.inputs[0]), self._client._ledger._now_s())
        self._stream = self._stream or self._chance.choice(self._client._doors).stream()
        return await self._stream.infer(calls, self._take)

    def _let_go(self, calls: list[InferCall], answers: list[asyncio.Future[Answer]]) -> None:
        super()._let_go(calls, answers)
        self._hang_up()

    def _check(self, call: InferCall, answer: Answer) -> None:
        super()._check(call, answer)
        value, story = value_of(call.inputs[0]), self._client._story
        # A gateway that has heard of a step's answer alone, or not the first time, knows no more of it.
        may_lack = self._habit.style is Style.PLAIN or value in self._client._ledger.known_before
        run, waited_ms = answer.parameters.get("sequence_run", ""), answer.parameters.get(WAITED_MS)
        assert isinstance(run, str)
        if call.start or not self._run:
            self._run = run
        if not (may_lack if run == "" else run == self._run):
            story.violate(f"sequence {self._id}: {value} is of run {run!r} instead of {self._run!r}")
        most_ms = (self._client._ledger._now_s() - self._sent_s[value]) * 1000 + SLACK_MS
        if not (may_lack if waited_ms is None else isinstance(waited_ms, int) and 0 <= waited_ms <= most_ms):
            story.violate(f"sequence {self._id}: {value} has waited for {waited_ms} ms, and came {most_ms} ms ago")

    def _refused(self, call: InferCall, error: MeshError) -> None:
        value = value_of(call.inputs[0])
        if isinstance(error, SequenceError) and error.reason == Reason.WAIT_TOO_LONG and call.wait_max_ms:
            low_ms = error.outlook.low_ms if error.outlook is not None else None
            if low_ms is None or low_ms <= call.wait_max_ms or self._client._ledger.has_run(value):
                self._client._story.violate(f"sequence {self._id}: {value} is refused: {error.message}")
            raise GivenUpError(f"sequence {self._id}: {error.message}")
        super()._refused(call, error)

    async def _close(self) -> bool:
        """Ends the sequence by the name of its run, if a step has told it, whatever has ended it before."""
        call = InferCall(self._habit.model, correlation_id=self._id, ended_run=self._run, tenant=self._habit.tenant)
        while self._run:
            self._client.doing = f"sequence {self._id}: ends its run {self._run}"
            try:
                async with asyncio.timeout(self._client.patience_s):
                    await self._ended(call)
                self._client.late = asyncio.ensure_future(self._end_again(call))
                return True
            except (LostError, TimeoutError, MeshError) as error:
                self._client._story.tell(f"sequence {self._id}: its run is not ended: {error!r}")
            await asyncio.sleep(self._chance.uniform(0.05, 0.6))
        return False

    async def _ended(self, call: InferCall) -> None:
        (answer,) = await self._chance.choice(self._client._doors).infer([call], self._take)
        await answer

    async def _end_again(self, call: InferCall) -> None:
        """The same request, held up on its way. By now there may be another run under the id."""
        await asyncio.sleep(self._chance.uniform(0.0, LATE_S))
        if not self._client._is_over():
            with suppress(LostError, MeshError):
                await self._ended(call)


class AskingClient(Client):
    """A client that asks for all of this. late: the latest request that was held up"""

    late: asyncio.Future[None] | None = None

    def _sequence(self, name: int, unique: int) -> Sequence:
        return AskingSequence(self, name, unique)


class AskedWorld(TenantsWorld):
    """A mesh with such clients."""

    client = AskingClient
    tenants = TENANTS | SLOW


class AskedVaried(AskedWorld, VariedWorld):
    """With all else, too."""


def asked_plan(plan: Plan, seed: int) -> Plan:
    """What a seed means for such a mesh."""
    chance = random.Random(f"ask {seed}")
    grace = {"orphan_grace_microseconds": str(int(chance.uniform(*GRACE_S) * 1e6))}
    habits = [replace(habit, bold=True, tenant=chance.choice(("", "few", "slow"))) for habit in plan.habits]
    return replace(plan, shape=replace(plan.shape, parameters=grace), habits=habits)


def asked(seed: int) -> Result:
    """Runs one seed of such a mesh."""
    plan, world = (varied_plan(seed), AskedVaried) if seed % 2 else (plan_of(seed), AskedWorld)
    return play(seed, asked_plan(plan, seed), world)
