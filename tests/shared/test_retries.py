"""Promise 6: a step that is sent again never runs twice, and gets its stored reply or a typed outcome.

By examples, and by seeded games in which two gateways submit and repeat steps of the same sequences while they are
taken over, end, expire and begin anew; a model beside the game knows what each retry must be told.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from redis.asyncio import Redis

from shared.ids import ExecutorId, Term
from shared.keyspace import Keyspace
from shared.messages import InboxStep, ReplyMessage, StepFlag, encode, inbox_entry
from shared.scripts import CommitCode, KeptReplies, Outcome, StepCommit, SubmitCode, Submitted
from tests.scripted_mesh import GATEWAY, ScriptedMesh

ONE = {"INPUT": np.ones((1, 1), np.int32)}
START, END, NONE = StepFlag.START, StepFlag.END, StepFlag.NONE
ALICE, BOB, EVE = ExecutorId("alice-1"), ExecutorId("bob-1"), ExecutorId("eve-1")
OTHER = "g-other"
TOMBSTONE_MS = 60_000

pytestmark = pytest.mark.leaves_sequences


@pytest.fixture
async def mesh(redis: Redis, key_prefix: str) -> ScriptedMesh:
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, 2), "sum")
    await mesh.open()
    return mesh


async def steps_of(mesh: ScriptedMesh, executor: ExecutorId, correlation_id: int = 7) -> list[InboxStep]:
    """A sequence's steps in an executor's inbox, by number."""
    shard = mesh.keys.shard_of(mesh.sequence(correlation_id))
    entries = await cast("Any", mesh.redis).xrange(mesh.keys.inbox(shard, executor))
    items = [inbox_entry(entry, fields) for entry, fields in entries]
    steps = [item for item in items if isinstance(item, InboxStep) and item.sequence == mesh.sequence(correlation_id)]
    return sorted(steps, key=lambda step: step.step)


def reply_to(step: InboxStep, size: int = 0) -> bytes:
    """What the step computes: nothing else has this reply."""
    return encode(ReplyMessage("1", step=step.step, error=f"{step.token} {'x' * size}"))


async def commit(
    mesh: ScriptedMesh,
    executor: ExecutorId,
    step: InboxStep,
    *,
    size: int = 0,
    outcome: Outcome = Outcome.DONE,
    kept: KeptReplies | None = None,
) -> CommitCode:
    """Makes a step final, with a reply of about that size."""
    final = StepCommit(
        sequence=step.sequence,
        epoch=step.epoch,
        step=step.step,
        flags=step.flags,
        outcome=outcome,
        gateway=step.gateway,
        token=step.token,
        reply=reply_to(step, size),
        keep_reply=True,
        entries=[step.entry],
        checkpoint=[("s:h", b"state")],
    )
    call = mesh.scripts.commit(
        [final],
        shard=mesh.keys.shard_of(step.sequence),
        executor=executor,
        model=mesh.model,
        idle_ms=600_000,
        tombstone_ms=TOMBSTONE_MS,
        kept=kept,
    )
    (code,) = await mesh.scripts.run(call)
    return code


async def run_sequence(
    mesh: ScriptedMesh, ids: str, *, end: bool = False, numbered: bool = False, kept: int = 8
) -> None:
    """A sequence on ALICE with a committed step per letter, all of them open at the same time."""
    last = len(ids) - 1
    for index, name in enumerate(ids):
        flags = (START if index == 0 else NONE) | (END if end and index == last else NONE)
        submission = mesh.submission(
            7, ONE, flags, request_id="" if numbered else name, expected_step=index + 1 if numbered else None
        )
        assert (await mesh.submit(submission)).code >= 0
    await mesh.assign(7, ALICE)
    for step in await steps_of(mesh, ALICE):
        assert await commit(mesh, ALICE, step, kept=KeptReplies(kept)) > 0


async def again(
    mesh: ScriptedMesh, name: str = "", flags: StepFlag = NONE, *, step: int | None = None
) -> tuple[SubmitCode, int]:
    """What a retry through another gateway hears."""
    outcome = await mesh.submit(mesh.submission(7, ONE, flags, request_id=name, expected_step=step, gateway=OTHER))
    return outcome.code, outcome.step


class TestRequestIds:
    async def test_each_of_several_open_steps_is_known_when_it_comes_again(self, mesh: ScriptedMesh) -> None:
        await run_sequence(mesh, "ab")

        assert [(SubmitCode.REPEATED, 1), (SubmitCode.REPEATED, 2)] == [
            await again(mesh, "a", START),
            await again(mesh, "b"),
        ]
        assert "2" == (await mesh.record(7))["nx"]

    async def test_replies_go_before_ids_and_a_step_without_reply_does_not_run_again(self, mesh: ScriptedMesh) -> None:
        await run_sequence(mesh, "abcde", kept=2)

        heard = [await again(mesh, name, START if name == "a" else NONE) for name in "abcde"]

        assert [(SubmitCode.ANSWERED, 5)] * 3 + [(SubmitCode.REPEATED, 4), (SubmitCode.REPEATED, 5)] == heard

    async def test_the_replies_beyond_the_newest_are_bounded_by_bytes(self, mesh: ScriptedMesh) -> None:
        for name in "abcd":
            await mesh.submit(mesh.submission(7, ONE, START if name == "a" else NONE, request_id=name))
        await mesh.assign(7, ALICE)
        for step, size in zip(await steps_of(mesh, ALICE), (100, 100, 900, 5_000), strict=True):
            await commit(mesh, ALICE, step, size=size, kept=KeptReplies(size=1_100))

        assert [SubmitCode.ANSWERED, SubmitCode.REPEATED, SubmitCode.REPEATED, SubmitCode.REPEATED] == [
            (await again(mesh, name))[0] for name in "abcd"
        ]
        await mesh.submit(mesh.submission(7, ONE, request_id="e"))
        (step,) = await steps_of(mesh, ALICE)
        await commit(mesh, ALICE, step, kept=KeptReplies(size=1_100))
        assert {"p:5"} == {name for name in await mesh.record(7) if name.startswith("p:")}

    async def test_ids_are_remembered_for_so_many_steps_and_as_long_as_they_are_in_flight(
        self, mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("shared.scripts.RETRY_IDS", 3)
        for name in "abcde":
            await mesh.submit(mesh.submission(7, ONE, START if name == "a" else NONE, request_id=name))
        assert SubmitCode.JOINED is (await again(mesh, "a", START))[0]
        await mesh.assign(7, ALICE)
        for step in await steps_of(mesh, ALICE):
            await commit(mesh, ALICE, step, kept=KeptReplies(1))
        await mesh.submit(mesh.submission(7, ONE, request_id="f"))

        assert 3 * 16 == await cast("Any", mesh.redis).hstrlen(mesh.keys.sequence(mesh.sequence(7)).record, "rd")
        assert [SubmitCode.ANSWERED, SubmitCode.REPEATED, SubmitCode.JOINED] == [
            (await again(mesh, name))[0] for name in "def"
        ]
        assert SubmitCode.DELIVERED is (await again(mesh, "c"))[0]

    async def test_a_client_without_ids_and_numbers_leaves_no_trace_for_retries(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, START))

        assert not {"rd", "rk"} & (await mesh.record(7)).keys()

    async def test_steps_of_the_sequence_before_are_known_while_the_next_one_runs(self, mesh: ScriptedMesh) -> None:
        await run_sequence(mesh, "abc", end=True, kept=2)
        assert (SubmitCode.ANSWERED, 3) == await again(mesh, "a", START)

        accepted = await mesh.submit(mesh.submission(7, ONE, START, request_id="d"))

        assert SubmitCode.WAITING is accepted.code
        assert SubmitCode.ANSWERED is (await again(mesh, "a", START))[0]
        assert [SubmitCode.REPEATED, SubmitCode.REPEATED] == [(await again(mesh, name))[0] for name in "bc"]
        await mesh.assign(7, BOB)
        (step,) = await steps_of(mesh, BOB)
        assert CommitCode.COMMITTED is await commit(mesh, BOB, step)
        assert (SubmitCode.WRONG_STEP, 1) == await again(mesh, step=3)
        assert SubmitCode.DELIVERED is (await again(mesh, step=2))[0]

    async def test_a_reply_survives_the_loss_of_its_owner_and_the_end(self, mesh: ScriptedMesh) -> None:
        for name in "abc":
            flags = {"a": START, "c": END}.get(name, NONE)
            await mesh.submit(mesh.submission(7, ONE, flags, request_id=name))
        await mesh.assign(7, ALICE)
        first = (await steps_of(mesh, ALICE))[0]
        await commit(mesh, ALICE, first)
        await mesh.take_over(ALICE, lost=True)
        assert [SubmitCode.REPEATED, SubmitCode.JOINED] == [(await again(mesh, name))[0] for name in "ab"]
        await mesh.assign(7, BOB)
        for step in await steps_of(mesh, BOB):
            await commit(mesh, BOB, step)

        assert "e" == (await mesh.record(7))["st"]
        assert [SubmitCode.REPEATED] * 3 == [(await again(mesh, name))[0] for name in "abc"]


class TestNumbers:
    async def test_each_of_several_open_steps_is_known_by_its_number(self, mesh: ScriptedMesh) -> None:
        await run_sequence(mesh, "abc", numbered=True, kept=2)

        assert [(SubmitCode.ANSWERED, 3), (SubmitCode.REPEATED, 2)] == [
            await again(mesh, step=1),
            await again(mesh, step=2),
        ]

    async def test_a_first_step_for_a_sequence_that_is_beyond_it_hears_that_it_exists(self, mesh: ScriptedMesh) -> None:
        await run_sequence(mesh, "abc", numbered=True, kept=2)

        assert (SubmitCode.EXISTS, 3) == await again(mesh, "", START, step=1)
        assert (SubmitCode.EXISTS, 3) == await again(mesh, "another", START, step=1)
        assert SubmitCode.DELIVERED is (await again(mesh, "", START))[0]

    async def test_a_number_that_another_request_id_had_is_not_a_retry(self, mesh: ScriptedMesh) -> None:
        await run_sequence(mesh, "abc")

        assert (SubmitCode.EXISTS, 3) == await again(mesh, "x", START, step=1)
        assert (SubmitCode.WRONG_STEP, 3) == await again(mesh, "x", step=2)
        assert (SubmitCode.REPEATED, 2) == await again(mesh, "b", step=2)
        assert (SubmitCode.REPEATED, 2) == await again(mesh, step=2)

    async def test_a_first_step_after_the_end_is_a_retry_unless_its_request_id_is_new(self, mesh: ScriptedMesh) -> None:
        await run_sequence(mesh, "ab", numbered=True, end=True)
        assert (SubmitCode.REPEATED, 1) == await again(mesh, "", START, step=1)
        assert (SubmitCode.REPEATED, 2) == await again(mesh, step=2)

        assert SubmitCode.WAITING is (await again(mesh, "new", START, step=1))[0]

    @pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "not reaped yet"])
    async def test_a_first_step_after_an_expiry_begins_anew(self, mesh: ScriptedMesh, reaped: bool) -> None:
        await run_sequence(mesh, "ab", numbered=True)
        await mesh.redis.delete(mesh.keys.sequence(mesh.sequence(7)).idle)
        if reaped:
            await expire(mesh, 7)

        assert (await again(mesh, "", START, step=1))[0] in {SubmitCode.WAITING, SubmitCode.DELIVERED}

    async def test_a_first_step_after_a_failed_start_begins_anew(self, mesh: ScriptedMesh) -> None:
        await mesh.submit(mesh.submission(7, ONE, START, expected_step=1))
        await mesh.assign(7, ALICE)
        (step,) = await steps_of(mesh, ALICE)
        assert CommitCode.OVER is await commit(mesh, ALICE, step, outcome=Outcome.FAILED)

        assert SubmitCode.WAITING is (await again(mesh, "", START, step=1))[0]


async def test_a_commit_by_anybody_but_the_owner_is_refused_whatever_its_epoch(mesh: ScriptedMesh) -> None:
    """After a restart with older data an epoch may be given out again."""
    await mesh.submit(mesh.submission(7, ONE, START, request_id="a"))
    await mesh.assign(7, ALICE)
    (step,) = await steps_of(mesh, ALICE)

    assert CommitCode.REFUSED is await commit(mesh, BOB, step)
    assert CommitCode.COMMITTED is await commit(mesh, ALICE, step)


async def expire(mesh: ScriptedMesh, correlation_id: int) -> None:
    """What the reaper does with an idle sequence."""
    sequence = mesh.sequence(correlation_id)
    call = mesh.scripts.expire(
        [sequence],
        shard=mesh.keys.shard_of(sequence),
        model=mesh.model,
        term=Term(1),
        tombstone_ms=TOMBSTONE_MS,
    )
    assert [True] == await mesh.scripts.run(call)


# -- games ----------------------------------------------------------------------------------------------------------

IDS = (1, 2, 3)
IDS_REMEMBERED, REPLIES, REPLY_BYTES = 8, 3, 600
OPEN_MAX = 5
SEEDS, MOVES = 24, 160
LIVE = {"l", "w", "m"}


@dataclass(eq=False)
class Request:
    """What a client asked for once, and may ask for again. number: 0 when it named the step by its id only."""

    correlation_id: int
    run: int
    place: int
    name: str
    number: int
    flags: StepFlag
    step: int = 0
    reply: bytes = b""


@dataclass
class Life:
    """What the model knows of one correlation id; steps are counted over all of its runs."""

    run: int = 0
    accepted: list[Request] = field(default_factory=list[Request])
    kept: list[Request] = field(default_factory=list[Request])

    def committed(self, request: Request) -> None:
        """The replies beyond the newest have room for so many and so much."""
        while self.kept and (len(self.kept) >= REPLIES or sum(len(one.reply) for one in self.kept) > REPLY_BYTES):
            self.kept.pop(0)
        self.kept.append(request)


class Game:
    """Two gateways, executors that may be lost, and clients with several open steps that repeat them."""

    def __init__(self, mesh: ScriptedMesh, chance: random.Random) -> None:
        self.mesh = mesh
        self.chance = chance
        self.lives = {number: Life() for number in IDS}
        self.names = itertools.count(1)
        self.slots = itertools.count(1)
        self.asked: Counter[str] = Counter()
        self.effects: Counter[tuple[int, int]] = Counter()
        self.late: list[tuple[ExecutorId, InboxStep]] = []
        self.told: Counter[SubmitCode] = Counter()

    async def open(self) -> None:
        for shard in self.mesh.keys.shard_ids():
            stream = self.mesh.keys.replies(shard, cast("Any", OTHER))
            await self.mesh.redis.xadd(stream, {"opened": ""})
            await self.mesh.redis.pexpire(stream, 60_000)

    async def move(self) -> None:
        number = self.chance.choice(IDS)
        moves = [self.ask] * 6 + [self.repeat] * 6 + [self.assign] * 3 + [self.run] * 4 + [self.take_over, self.idle]
        await self.chance.choice(moves)(number)

    async def send(self, request: Request) -> Submitted:
        submission = self.mesh.submission(
            request.correlation_id,
            ONE,
            request.flags,
            request_id=request.name,
            expected_step=request.number or None,
            gateway=self.chance.choice((GATEWAY, OTHER)),
        )
        outcome = await self.mesh.submit(submission)
        self.told[outcome.code] += 1
        if outcome.code in {SubmitCode.DELIVERED, SubmitCode.WAITING, SubmitCode.JOINED}:
            self.asked[submission.token] += 1
        return outcome

    async def ask(self, number: int) -> None:
        """A new step, of the sequence that is open, or of a new one."""
        record, life = await self.mesh.record(number), self.lives[number]
        if int(record.get("nx", 0)) - int(record.get("cm", 0)) >= OPEN_MAX:
            return
        begins = record.get("st") not in LIVE or record["cl"] == "1"
        place = 1 if begins else int(record["nx"]) - int(record["sn"]) + 2
        flags = (START if begins else NONE) | (END if self.chance.random() < 0.15 else NONE)
        # A first step that has a number only would be a retry of the one before.
        numbered = self.chance.random() < 0.4
        name = "" if numbered and not begins else f"r{next(self.names)}"
        life.run += begins
        request = Request(number, life.run, place, name, place if numbered else 0, flags)
        outcome = await self.send(request)
        assert outcome.code in {SubmitCode.DELIVERED, SubmitCode.WAITING}, (request, outcome)
        assert outcome.step == len(life.accepted) + 1
        request.step = outcome.step
        life.accepted.append(request)

    async def repeat(self, number: int) -> None:
        """Any step that is remembered is asked for once more."""
        life = self.lives[number]
        newest = len(life.accepted)
        known = [one for one in life.accepted if self.is_known(one, life, newest)]
        if not known:
            return
        one = self.chance.choice(known)
        outcome = await self.send(one)
        if not one.reply:
            assert (SubmitCode.JOINED, one.step) == (outcome.code, outcome.step), one
        elif one in life.kept:
            assert (SubmitCode.REPEATED, one.reply) == (outcome.code, outcome.extra), one
        else:
            assert SubmitCode.ANSWERED is outcome.code, one

    def is_known(self, one: Request, life: Life, newest: int) -> bool:
        """A request id is remembered while its step is in flight, and then for so many steps; a number is one of the
        sequence that runs now. Of a first step the id decides."""
        by_id = bool(one.name) and (not one.reply or newest - one.step < IDS_REMEMBERED)
        return by_id or (not one.name and one.run == life.run)

    async def assign(self, number: int) -> None:
        record = await self.mesh.record(number)
        if record.get("st") in {"w", "m"}:
            await self.mesh.assign(number, self.chance.choice((ALICE, BOB, EVE)), slot=next(self.slots))

    async def run(self, number: int) -> None:
        """The owner commits its next steps; some are committed twice, by a process that lost the answer."""
        record = await self.mesh.record(number)
        if record.get("st") != "l":
            return
        owner, life = ExecutorId(record["ow"]), self.lives[number]
        for step in (await steps_of(self.mesh, owner, number))[: self.chance.choice((1, 2, 9))]:
            size = self.chance.choice((0, 0, 100, 700))
            code = await self.commit(owner, step, size)
            assert code in {CommitCode.COMMITTED, CommitCode.OVER}
            self.effects[number, step.step] += 1
            request = life.accepted[step.step - 1]
            request.reply = reply_to(step, size)
            life.committed(request)
            if self.chance.random() < 0.2:
                assert await self.commit(owner, step, size) in {CommitCode.BEFORE, CommitCode.REFUSED}

    async def commit(self, owner: ExecutorId, step: InboxStep, size: int) -> CommitCode:
        return await commit(self.mesh, owner, step, size=size, kept=KeptReplies(REPLIES, REPLY_BYTES))

    async def take_over(self, _number: int) -> None:
        """An executor is lost; it wakes up later and commits what it had."""
        lost = self.chance.choice((ALICE, BOB, EVE))
        for number in IDS:
            self.late += [(lost, step) for step in await steps_of(self.mesh, lost, number)]
        await self.mesh.take_over(lost, tombstone_ms=TOMBSTONE_MS)
        for executor, step in self.late:
            assert await self.commit(executor, step, 0) in {CommitCode.BEFORE, CommitCode.REFUSED}

    async def idle(self, number: int) -> None:
        record = await self.mesh.record(number)
        if record.get("st") == "l" and record["nx"] == record["cm"]:
            await self.mesh.redis.delete(self.mesh.keys.sequence(self.mesh.sequence(number)).idle)
            await expire(self.mesh, number)

    async def settle(self) -> None:
        for number in IDS:
            while any(not one.reply for one in self.lives[number].accepted):
                await self.assign(number)
                await self.run(number)

    async def check(self) -> None:
        """Every accepted step ran once, and every caller who was to wait was answered once."""
        assert {(number, one.step): 1 for number in IDS for one in self.lives[number].accepted} == self.effects
        heard: Counter[str] = Counter()
        for shard in self.mesh.keys.shard_ids():
            for gateway in (GATEWAY, OTHER):
                stream = self.mesh.keys.replies(shard, cast("Any", gateway))
                for _, fields in await cast("Any", self.mesh.redis).xrange(stream):
                    heard.update(token.decode() for token in fields if token != b"opened")
        assert self.asked == heard


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_no_retry_runs_twice_and_each_is_told_what_the_model_says(
    mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("shared.scripts.RETRY_IDS", IDS_REMEMBERED)
    game = Game(mesh, random.Random(seed))
    await game.open()
    for _ in range(MOVES):
        await game.move()
    await game.settle()

    await game.check()
    assert {SubmitCode.DELIVERED, SubmitCode.WAITING, SubmitCode.REPEATED, SubmitCode.JOINED} <= set(game.told)
