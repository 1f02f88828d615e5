"""Answers of decoupled models on the real server: written once, by the owner alone, and again for those who ask."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from shared.contract.batch_shape import Queueing
from shared.contract.ids import Epoch, ExecutorId, GatewayId, ShardId, StepNumber
from shared.contract.messages import InboxStep, ReplyMessage, StepFlag, decode_reply, encode
from shared.statistics.tally import ModelLoad
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.script_values import KeptReplies, StepAnswers, Submission, SubmitCode
from shared.store.work_scripts import Take, WorkDone, WorkHeld, WorkItem, WorkScripts, request_id
from tests.scripted_mesh import GATEWAY, ScriptedMesh, commit_of

ALICE, BOB = ExecutorId("alice-1"), ExecutorId("bob-1")
ONE = {"INPUT": np.ones((1, 1), np.int32)}
LOAD = ModelLoad("sum", "1", "g1")

pytestmark = pytest.mark.leaves_sequences


def reply(number: int, *, more: bool = True, size: int = 0) -> bytes:
    return encode(ReplyMessage("1", number=number, more=more, parameters={"size": "x" * size}))


class Answered:
    """A sequence with an open step, whose model is decoupled."""

    def __init__(self, redis: Redis, key_prefix: str) -> None:
        self.mesh = ScriptedMesh(redis, Keyspace(key_prefix, 1), "sum")
        self.step: InboxStep

    async def begin(self, request_id: str = "a") -> Submission:
        await self.mesh.open()
        submission = self.mesh.submission(7, ONE, StepFlag.START, request_id=request_id)
        await self.mesh.submit(submission)
        await self.owned_by(ALICE)
        return submission

    async def owned_by(self, executor: ExecutorId) -> None:
        await self.mesh.assign(7, executor)
        (*_, self.step) = await self.mesh.steps(executor)

    async def write(
        self, *numbers: int, executor: ExecutorId = ALICE, keep: bool = True, kept_bytes: int = 1 << 20, size: int = 0
    ) -> bool:
        step, answers = self.step, [(number, reply(number, size=size)) for number in numbers]
        written = StepAnswers(step.sequence, step.epoch, step.step, step.gateway, step.token, keep, answers)
        call = self.mesh.scripts.answers([written], executor, kept_bytes=kept_bytes)
        (outcome,) = await self.mesh.scripts.run(call)
        return outcome

    async def commit(self, number: int, *, executor: ExecutorId = ALICE, kept: KeptReplies | None = None) -> None:
        step = msgspec.structs.replace(self.step, flags=self.step.flags | StepFlag.STREAMED)
        await self.mesh.committed(executor, commit_of(step, reply(number, more=False), keep_reply=True), kept=kept)

    async def heard(self, token: str) -> list[int]:
        """Numbers of the answers that a caller got, in their order."""
        return await numbers_of(self.mesh, self.shard, token)

    @property
    def shard(self) -> ShardId:
        return self.mesh.keys.shard_of(self.mesh.sequence(7))

    async def again(self, request_id: str = "a") -> tuple[SubmitCode, str]:
        retry = self.mesh.submission(7, ONE, StepFlag.START, request_id=request_id)
        return (await self.mesh.submit(retry)).code, retry.token


async def numbers_of(mesh: ScriptedMesh, shard: ShardId, token: str) -> list[int]:
    """Numbers of the answers that came to a caller, in their order."""
    # The client library makes dicts of entries, and one entry may hold several answers for one token.
    read = "return redis.call('XRANGE', KEYS[1], '-', '+')"
    entries = await mesh.redis.eval(read, 1, mesh.keys.replies(shard, GatewayId(GATEWAY)))
    pairs = [pair for _, flat in entries for pair in zip(flat[::2], flat[1::2], strict=True)]
    return [decode_reply(data).number for name, data in pairs if name.decode() == token]


@pytest.fixture
def answered(redis: Redis, key_prefix: str) -> Answered:
    return Answered(redis, key_prefix)


async def test_an_answer_that_is_written_twice_reaches_its_caller_once(answered: Answered) -> None:
    first = await answered.begin()

    assert await answered.write(1, 2)
    assert await answered.write(1, 2, 3)
    await answered.commit(4)

    assert [1, 2, 3, 4] == await answered.heard(first.token)
    assert "an" not in await answered.mesh.record(7)


async def test_the_next_owner_writes_only_what_the_one_before_has_not(answered: Answered) -> None:
    first = await answered.begin()
    await answered.write(1, 2)
    late = answered.step
    await answered.mesh.take_over(ALICE)
    await answered.owned_by(BOB)

    taken, answered.step = answered.step, late
    assert not await answered.write(3, executor=ALICE)
    answered.step = taken
    assert await answered.write(1, 2, 3, executor=BOB)

    assert [1, 2, 3] == await answered.heard(first.token)


async def test_a_retry_of_an_open_step_gets_the_answers_before_and_those_to_come(answered: Answered) -> None:
    first = await answered.begin()
    await answered.write(1, 2)

    code, token = await answered.again()
    await answered.write(3)
    await answered.commit(4)

    assert SubmitCode.JOINED is code
    assert [1, 2, 3, 4] == await answered.heard(token) == await answered.heard(first.token)


async def test_a_retry_of_a_step_that_is_over_gets_all_answers(answered: Answered) -> None:
    await answered.begin()
    await answered.write(1, 2)
    await answered.commit(3)

    code, token = await answered.again()

    assert SubmitCode.JOINED is code
    assert [1, 2, 3] == await answered.heard(token)


async def test_the_oldest_answers_give_way_and_a_retry_gets_the_others(answered: Answered) -> None:
    await answered.begin()
    for number in range(1, 6):
        await answered.write(number, size=100, kept_bytes=350)

    _, token = await answered.again()
    await answered.commit(6)
    _, late = await answered.again()

    assert [4, 5, 6] == await answered.heard(token) == await answered.heard(late)
    record = await answered.mesh.record(7)
    assert ["p:1", "p:1:4", "p:1:5"] == sorted(name for name in record if name.startswith("p:"))


async def test_the_answers_of_a_step_give_way_together_with_its_reply(answered: Answered) -> None:
    await answered.begin()
    await answered.write(1, 2)
    await answered.commit(3)
    await answered.mesh.submit(answered.mesh.submission(7, ONE, request_id="b"))
    (*_, answered.step) = await answered.mesh.steps(ALICE)
    await answered.write(1)
    await answered.commit(2, kept=KeptReplies(1))

    names = sorted(name for name in await answered.mesh.record(7) if name.startswith("p:"))
    assert ["p:2", "p:2:1"] == names


async def test_behind_a_gap_the_answers_before_it_are_dropped(answered: Answered) -> None:
    """Redis was restarted with older data: a retry gets what came after the lost answers."""
    await answered.begin()
    await answered.write(1, 2)

    await answered.write(5, 6)

    record = await answered.mesh.record(7)
    assert ["p:1:5", "p:1:6"] == sorted(name for name in record if name.startswith("p:"))
    assert f"1 6 5 {sum(len(record[f'p:1:{number}']) for number in (5, 6))}" == record["an"]
    _, token = await answered.again()
    assert [5, 6] == await answered.heard(token)


async def test_answers_to_a_caller_who_cannot_ask_again_are_not_kept(answered: Answered) -> None:
    first = await answered.begin(request_id="")

    await answered.write(1, 2, keep=False)

    assert [1, 2] == await answered.heard(first.token)
    assert not [name for name in await answered.mesh.record(7) if name.startswith("p:")]


async def test_an_answer_in_another_epoch_or_to_another_step_is_refused(answered: Answered) -> None:
    first = await answered.begin()
    step = answered.step
    for wrong in (
        replace(step, epoch=Epoch(step.epoch + 1)),
        replace(step, step=StepNumber(step.step + 1)),
        replace(step, step=StepNumber(step.step - 1)),
    ):
        answered.step = wrong
        assert not await answered.write(1)

    assert [] == await answered.heard(first.token)


class TestWork:
    """The same of stateless requests."""

    async def test_an_answer_reaches_its_caller_once_whoever_runs_the_request(
        self, redis: Redis, key_prefix: str
    ) -> None:
        mesh = ScriptedMesh(redis, Keyspace(key_prefix, 1), "sum")
        await mesh.open()
        work, id = WorkScripts(mesh.keys), request_id(GATEWAY, "1")
        await mesh.scripts.run(work.enqueue([WorkItem("sum", "1", GATEWAY, "1", b"m", Queueing(shape="s"))], bound=0))

        async def pull(executor: ExecutorId) -> None:
            limits = {"requests_max": 8, "rows_max": 8, "delay_us": 0, "take": Take.WHEN_PLAIN}
            await mesh.scripts.run(work.pull(LOAD, executor, f"of {executor}", **limits))

        async def write(executor: ExecutorId, *numbers: int) -> WorkHeld:
            answers = [(number, reply(number)) for number in numbers]
            (held,) = await mesh.scripts.run(work.answers(LOAD, executor, [(id, answers)]))
            return held

        await pull(ALICE)
        assert WorkHeld.HELD is await write(ALICE, 1, 2)
        assert WorkHeld.HELD is await write(ALICE, 1, 2)
        await mesh.scripts.run(work.requeue(LOAD, ALICE, given_up=b"g"))
        assert WorkHeld.GONE is await write(ALICE, 3)
        await pull(BOB)
        assert WorkHeld.HELD is await write(BOB, 1, 2, 3)
        assert [False] == await mesh.scripts.run(work.withdraw(LOAD, GatewayId(GATEWAY), ["1"], reply=b"c"))
        assert WorkHeld.CANCELLED is await write(BOB)
        await mesh.scripts.run(work.finish(LOAD, BOB, [WorkDone(id, reply(4, more=False))]))

        assert [1, 2, 3, 4] == await numbers_of(mesh, mesh.keys.home_shard("sum"), "1")
        assert 0 == await mesh.redis.hlen(mesh.keys.work_queue("sum", "1").meta)
