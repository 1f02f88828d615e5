"""What an executor finds in Redis and cannot read: it concerns its own sequence or model, and the executor goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

from executor.lease.registration import LeaseLostError
from shared.contract.errors import Code, Reason
from shared.contract.ids import ExecutorId
from shared.contract.messages import ReplyMessage, StepFlag, encode
from shared.contract.tensors import to_numpy
from shared.store.commands import Redis
from shared.store.membership import Membership
from shared.store.reading import tell_now
from tests.executor.living import Running
from tests.executor.patience import PATIENCE_S, until
from tests.scripted_mesh import ScriptedMesh

VICTIM, OTHER = 7, 8
pytestmark = pytest.mark.leaves_sequences


@pytest.fixture
async def mesh(mesh: ScriptedMesh, redis: Redis) -> AsyncIterator[ScriptedMesh]:
    yield mesh
    # What was counted here is no other test's.
    await tell_now(redis, mesh.keys)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> asyncio.Semaphore:
    """The executor looks at its registration as often as this is released. To be named before the executor."""
    looks, is_known = asyncio.Semaphore(0), Membership.is_known

    async def when_let(membership: Membership, executor: ExecutorId) -> bool:
        await looks.acquire()
        return await is_known(membership, executor)

    monkeypatch.setattr(Membership, "is_known", when_let)
    return looks


async def step(
    mesh: ScriptedMesh, correlation_id: int, *, to: ExecutorId | None = None, slot: int = 0, message: bytes = b""
) -> ReplyMessage:
    """The answer to the next step, which adds 1. to: where its sequence begins; message: stored instead of its own."""
    flags = StepFlag.START if to else StepFlag.NONE
    submission = mesh.submission(correlation_id, {"INPUT": np.array([[1]], np.int32)}, flags)
    if message:
        submission = msgspec.structs.replace(submission, message=message)
    await mesh.submit(submission)
    if to:
        await mesh.assign(correlation_id, to, slot=slot)
    return await mesh.reply(submission)


def total(reply: ReplyMessage) -> int:
    assert not reply.error_code, reply.error
    return int(to_numpy(reply.outputs[0]).item())


async def test_a_step_whose_message_cannot_be_read_fails_and_its_sequence_goes_on(
    mesh: ScriptedMesh, executor: Running
) -> None:
    assert 1 == total(await step(mesh, VICTIM, to=executor.executor))
    for message in (b"\xc1 garbage", b"\x93\xa3sum", encode({"of": "another kind"})):
        refused = await step(mesh, VICTIM, message=message)
        assert (Code.INTERNAL, True) == (refused.error_code, "cannot be read" in refused.error)

    assert 2 == total(await step(mesh, VICTIM))
    failed = await step(mesh, OTHER, to=executor.executor, slot=1, message=b"\xc1")
    assert Code.INTERNAL == failed.error_code
    assert Reason.ENDED == (await step_refused(mesh, OTHER))
    assert not executor.task.done()


async def step_refused(mesh: ScriptedMesh, correlation_id: int) -> Reason:
    """Why the next step is not accepted."""
    outcome = await mesh.submit(mesh.submission(correlation_id, {"INPUT": np.array([[1]], np.int32)}))
    return Reason.ENDED if outcome.code < 0 else Reason.BUSY


async def test_an_entry_that_says_nothing_goes_and_those_beside_it_are_read(
    mesh: ScriptedMesh, executor: Running
) -> None:
    assert 1 == total(await step(mesh, VICTIM, to=executor.executor))
    client, sequence = mesh.redis, mesh.sequence(VICTIM)
    inbox = mesh.keys.inbox(mesh.keys.shard_of(sequence), executor.executor)
    for fields in (
        {b"\xff": b"\x00"},
        {"k": "expired", "q": sequence},
        {"k": "hint-of-a-newer-release", "q": sequence, "e": 1},
        {"q": "nobody", "n": "x", "e": "y"},
        {"q": sequence, "e": "1", "n": "nine", "f": 0},
        {"q": b"\xfe\xff", "e": "1"},
    ):
        await client.xadd(inbox, fields)

    assert 2 == total(await step(mesh, VICTIM))
    assert not executor.task.done()
    async with asyncio.timeout(PATIENCE_S):
        while await client.xlen(inbox):
            await asyncio.sleep(0.01)


async def test_a_sequence_that_another_service_cannot_read_is_forgotten_by_its_owner(
    mesh: ScriptedMesh, executor: Running
) -> None:
    """Else its state would stay, and behind a restart of Redis the owner would miss it, and give up all others."""
    assert 1 == total(await step(mesh, VICTIM, to=executor.executor))
    assert 1 == total(await step(mesh, OTHER, to=executor.executor, slot=1))
    await mesh.redis.hset(mesh.keys.sequence(mesh.sequence(VICTIM)).record, "nx", "many")

    assert Reason.ENDED == await step_refused(mesh, VICTIM)

    await until(lambda: [mesh.sequence(OTHER)] == [held.sequence for held in executor.registration.serving.holdings])
    inbox = mesh.keys.inbox(mesh.keys.shard_of(mesh.sequence(VICTIM)), executor.executor)
    async with asyncio.timeout(PATIENCE_S):
        while await mesh.redis.xlen(inbox):
            await asyncio.sleep(0.01)
    assert not executor.task.done()


@pytest.mark.parametrize("field", ["s:state", "n", "another type", "gone"])
async def test_a_checkpoint_that_cannot_be_read_loses_its_sequence_alone(
    mesh: ScriptedMesh, executor: Running, field: str
) -> None:
    for slot, number in enumerate((VICTIM, OTHER)):
        assert 1 == total(await step(mesh, number, to=executor.executor, slot=slot))
    client, own = mesh.redis, mesh.keys.sequence(mesh.sequence(VICTIM))
    (state,) = [name for name in await client.hkeys(own.checkpoint) if name.startswith(b"s:")]
    for number in (VICTIM, OTHER):
        assert await mesh.vacate(number, moving=True)
    if field in ("another type", "gone"):
        await client.delete(own.checkpoint)
    if field == "another type":
        await client.set(own.checkpoint, "no hash")
    elif field != "gone":
        await client.hset(own.checkpoint, state if field == "s:state" else field, b"\xc1 garbage")

    for slot, number in enumerate((VICTIM, OTHER)):
        await mesh.assign(number, executor.executor, slot=slot)
    answer = await step(mesh, VICTIM)
    if field == "n":  # nobody reads it
        assert 2 == total(answer)
    else:
        assert (Code.INVALID_ARG, Reason.LOST) == (answer.error_code, answer.reason)
    assert 2 == total(await step(mesh, OTHER))
    assert not executor.task.done()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ck", b"\xff garbage"),
        ("fl", b"\xff garbage"),
        ("ca", b"\xff garbage"),
        ("ck", b"7"),
        ("ck", b"-1"),
        ("ck", b""),
    ],
)
async def test_a_record_that_its_owner_cannot_read_loses_its_sequence_alone(
    mesh: ScriptedMesh, executor: Running, field: str, value: bytes
) -> None:
    for slot, number in enumerate((VICTIM, OTHER)):
        assert 1 == total(await step(mesh, number, to=executor.executor, slot=slot))
        assert await mesh.vacate(number, moving=True)
    await mesh.redis.hset(mesh.keys.sequence(mesh.sequence(VICTIM)).record, field, value)

    submission = mesh.submission(VICTIM, {"INPUT": np.array([[1]], np.int32)})
    await mesh.submit(submission)
    for slot, number in enumerate((VICTIM, OTHER)):
        await mesh.assign(number, executor.executor, slot=slot)

    told = await mesh.reply(submission)
    assert (Code.INVALID_ARG, Reason.LOST) == (told.error_code, told.reason)
    assert 2 == total(await step(mesh, OTHER))
    assert not executor.task.done()


async def test_a_record_of_the_model_that_cannot_be_read_is_published_anew(
    mesh: ScriptedMesh, looks: asyncio.Semaphore, executor: Running
) -> None:
    client, membership = mesh.redis, Membership(mesh.redis, mesh.keys)
    for damage in (lambda: client.hset(mesh.keys.models, "sum", b"{torn"), lambda: client.delete(mesh.keys.models)):
        await damage()
        assert {} == await membership.models()
        looks.release()
        async with asyncio.timeout(PATIENCE_S):
            while "sum" not in await membership.models():
                await asyncio.sleep(0.05)
    assert not executor.task.done()


async def test_a_registration_that_cannot_be_read_ends_this_life_for_a_new_one(
    mesh: ScriptedMesh, executor: Running
) -> None:
    membership = Membership(mesh.redis, mesh.keys)
    await mesh.redis.hset(mesh.keys.executors, executor.executor, b"{torn")

    (member,) = await membership.members()
    assert (executor.executor, False, False) == (member.registration.executor, member.alive, member.usable)
    assert await membership.is_leaving(executor.executor), "its sequences go on elsewhere, and blame no step"
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ExceptionGroup) as ended:
            await executor.task
    assert ended.group_contains(LeaseLostError)
