"""Steps of decoupled models that are moved, paused, taken over, asked for again or given up between two answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shared.contract.errors import Reason
from shared.contract.ids import GatewayId
from shared.contract.messages import ReplyMessage, StepFlag, decode_reply
from shared.contract.tensors import to_numpy
from shared.store.commands import Redis
from shared.store.script_values import CancelCode, Submission
from tests.executor.living import Running, living, scripted
from tests.executor.patience import until
from tests.executor.work_gate import Gate, new_gate
from tests.mesh.model_repository import add_streaming_models
from tests.scripted_mesh import GATEWAY, ScriptedMesh

SEQUENCE, ANSWERS, HELD = 7, 6, 5
START, END, NONE = StepFlag.START, StepFlag.END, StepFlag.NONE
pytestmark = pytest.mark.leaves_sequences


@pytest.fixture
async def mesh(redis: Redis, key_prefix: str) -> AsyncIterator[ScriptedMesh]:
    async with scripted(redis, key_prefix, "streamed_sum") as mesh:
        yield mesh


@pytest.fixture
def gate() -> Iterator[Gate]:
    with new_gate() as gate:
        gate.hold(HELD)
        yield gate


@pytest.fixture
async def executor(
    redis_url: str, key_prefix: str, tmp_path: Path, mesh: ScriptedMesh, gate: Gate
) -> AsyncIterator[Running]:
    """Its model sends no answer that is held."""
    add_streaming_models(tmp_path / "models")
    source = tmp_path / "models" / "streamed_sum" / "1" / "model.py"
    text = source.read_text().replace("time.sleep(0.01)", "work_gate.gate.enter([number])")
    source.write_text(f"from tests.executor import work_gate\n{text}")
    async with living(redis_url, key_prefix, tmp_path / "models", "streamed_sum", "a") as running:
        yield running


def step(mesh: ScriptedMesh, flags: StepFlag = NONE, *, request_id: str = "", count: int = ANSWERS) -> Submission:
    return mesh.submission(SEQUENCE, {"INPUT": np.array([[count]], np.int32)}, flags, request_id=request_id)


async def heard(mesh: ScriptedMesh, step: Submission) -> list[ReplyMessage]:
    """All that came to the caller of a step so far."""
    # The client library makes dicts of entries, and one entry may hold several answers for one token.
    read = "return redis.call('XRANGE', KEYS[1], '-', '+')"
    entries = await mesh.redis.eval(read, 1, mesh.keys.replies(mesh.keys.shard_of(step.sequence), GatewayId(GATEWAY)))
    pairs = [pair for _, flat in entries for pair in zip(flat[::2], flat[1::2], strict=True)]
    return [decode_reply(data) for token, data in pairs if token.decode() == step.token]


async def some(mesh: ScriptedMesh, step: Submission) -> None:
    """Returns in the middle of a step's answers: the next one is held."""

    async def is_there() -> bool:
        return sums(await heard(mesh, step))[-1:] == [HELD - 1]

    await until(is_there)


async def all_of(mesh: ScriptedMesh, step: Submission) -> list[ReplyMessage]:
    """All answers to a step, with the last one."""

    async def is_over() -> bool:
        return any(not one.more for one in await heard(mesh, step))

    await until(is_over)
    return await heard(mesh, step)


def sums(replies: list[ReplyMessage]) -> list[int]:
    return [int(to_numpy(one.outputs[0]).item()) for one in replies if one.outputs]


async def paused(mesh: ScriptedMesh, executor: Running) -> None:
    assert await mesh.pause(SEQUENCE)
    assert await mesh.resume(SEQUENCE)
    await mesh.assign(SEQUENCE, executor.executor, slot=1)


async def taken_over(mesh: ScriptedMesh, executor: Running) -> None:
    await mesh.take_over(executor.executor, lost=True)
    await mesh.assign(SEQUENCE, executor.executor, slot=1)


MOVES = pytest.mark.parametrize("move", [paused, taken_over])
Move = Callable[[ScriptedMesh, Running], Awaitable[None]]


async def begun(mesh: ScriptedMesh, executor: Running) -> None:
    """The sequence has one step behind it, whose sum is 1."""
    first = step(mesh, START, request_id="first", count=1)
    await mesh.submit(first)
    await mesh.assign(SEQUENCE, executor.executor)
    assert [1] == sums(await all_of(mesh, first))


@MOVES
@pytest.mark.parametrize("flags", [NONE, END])
@pytest.mark.parametrize("request_id", ["", "named"])
async def test_its_caller_hears_each_answer_once(
    mesh: ScriptedMesh, executor: Running, gate: Gate, move: Move, flags: StepFlag, request_id: str
) -> None:
    await begun(mesh, executor)
    open_step, behind = step(mesh, flags, request_id=request_id), step(mesh, START if flags else NONE)
    for one in (open_step, behind):
        await mesh.submit(one)
    await some(mesh, open_step)
    assert not await mesh.expire(SEQUENCE), "it is not idle"

    await move(mesh, executor)
    gate.release()

    replies = await all_of(mesh, open_step)
    assert list(range(2, 2 + ANSWERS)) == sums(replies)
    assert {2} == {one.step for one in replies}
    first = 1 if flags else 2 + ANSWERS
    assert list(range(first, first + ANSWERS)) == sums(await all_of(mesh, behind))


@MOVES
async def test_who_asks_again_in_the_middle_hears_each_answer_once(
    mesh: ScriptedMesh, executor: Running, gate: Gate, move: Move
) -> None:
    await begun(mesh, executor)
    first, before, behind = (step(mesh, request_id="named") for _ in range(3))
    await mesh.submit(first)
    await some(mesh, first)
    await mesh.submit(before)

    await move(mesh, executor)
    gate.release()
    await mesh.submit(behind)

    for one in (first, before, behind):
        assert list(range(2, 2 + ANSWERS)) == sums(await all_of(mesh, one))
    late = step(mesh, request_id="named")
    await mesh.submit(late)
    assert list(range(2, 2 + ANSWERS)) == sums(await all_of(mesh, late))


@MOVES
async def test_what_is_cancelled_in_the_middle_ends_and_the_steps_behind_it_hear_so(
    mesh: ScriptedMesh, executor: Running, gate: Gate, move: Move
) -> None:
    await begun(mesh, executor)
    open_step, behind, anew = step(mesh), step(mesh), step(mesh, START)
    accepted = await mesh.submit(open_step)
    for one in (behind, anew):
        await mesh.submit(one)
    await some(mesh, open_step)

    assert CancelCode.TOLD is await mesh.cancel(open_step, accepted)
    await move(mesh, executor)
    gate.release()

    assert list(range(1, 1 + ANSWERS)) == sums(await all_of(mesh, anew))
    (last,) = await all_of(mesh, behind)
    assert (Reason.CANCELLED, 2) == (last.reason, last.step)
