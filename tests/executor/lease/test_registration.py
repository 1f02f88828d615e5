"""An executor against the real server: order, state, failures, takeover. The test plays gateway and scheduler."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from executor.lease import serving
from executor.lease.registration import Applied, LeaseLostError, Registration
from executor.models.repository import ModelRepository
from executor.models.served import LoadedModel, ServedVersion
from executor.models.sources import LocalFolder
from executor.sequences.holdings import Holding
from shared.contract.errors import LoadError, Reason
from shared.contract.ids import Epoch, ExecutorId, StepNumber
from shared.contract.messages import ExecutorRegistration, ModelRecord, ReplyMessage, StepFlag, encode
from shared.contract.model_config import ModelConfig
from shared.contract.tensors import Tensor, to_numpy
from shared.statistics.tally import ModelLoad
from shared.store.membership import Membership
from shared.store.script_values import CancelCode, LedShard, Submission, SubmitCode, VacateCode
from shared.store.totals import Tallies
from tests.executor.living import LEASE_MS, Running, living
from tests.executor.patience import until
from tests.redis_proxy import RedisProxy
from tests.scripted_mesh import ScriptedMesh

ONE = StepNumber(1)
START, END, NONE, PAGEABLE = StepFlag.START, StepFlag.END, StepFlag.NONE, StepFlag.PAGEABLE

MODEL = """
import os
import time

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''A running sum; -1 fails, and so does a START of 0. 777 lasts until the gate is opened, 778 fails until then, and
    779 fails from then on.'''

    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            start = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
            while value[0, 0] == 777 and not os.path.exists("GATE"):
                open("GATE.waits", "w").close()
                time.sleep(0.005)
            if value[0, 0] in (-1, 779 if os.path.exists("GATE") else 778) or (start and value[0, 0] == 0):
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("no")))
                continue
            total = pb_utils.get_input_tensor_by_name(request, "SUM_IN").as_numpy() + value
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("OUTPUT", total), pb_utils.Tensor("SUM_OUT", total)]))
        return responses
"""

CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "INPUT" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT64 dims: [ 1 ] } ]
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest { max_candidate_sequences: 4 }
  state [ { input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_INT64 dims: [ 1 ] } ]
}
parameters { key: "checkpoint_interval" value { string_value: "INTERVAL" } }
"""


Life = Callable[[str], AbstractAsyncContextManager[Running]]


def value(number: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"INPUT": np.array([[number]], np.int64)}


def total(reply: ReplyMessage) -> int:
    assert "" == reply.error, reply
    return int(to_numpy(reply.outputs[0])[0, 0])


@pytest.fixture
def interval() -> int:
    """The model's checkpoint interval; a test overrides it by parametrising."""
    return 1


class Gate:
    """What steps of the model wait for, or depend on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def reached(self) -> None:
        """Returns when a step waits."""
        while not Path(f"{self.path}.waits").exists():
            await asyncio.sleep(0.001)

    def open(self) -> None:
        self.path.touch()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


@pytest.fixture
def models(tmp_path: Path, interval: int, gate: Gate) -> Path:
    version = tmp_path / "models" / "sum" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL.replace("GATE", str(gate.path)))
    (version.parent / "config.pbtxt").write_text(CONFIG.replace("INTERVAL", str(interval)))
    return tmp_path / "models"


@pytest.fixture
async def executor(redis_url: str, key_prefix: str, models: Path) -> Life:
    """Runs executors of the test's model, each with its own engines, as its context lasts."""
    return lambda name: living(redis_url, key_prefix, models, "sum", name)


async def play(
    mesh: ScriptedMesh, running: Running, *numbers: int, correlation_id: int = 7, slot: int = 0, flags: StepFlag = START
) -> list[Submission]:
    """Submits the steps of a sequence that begins, and gives it to an executor. flags: of the first one"""
    steps = [mesh.submission(correlation_id, value(n), NONE if i else flags) for i, n in enumerate(numbers)]
    for step in steps:
        await mesh.submit(step)
    await mesh.assign(correlation_id, running.executor, slot=slot)
    return steps


async def sums(mesh: ScriptedMesh, steps: Iterable[Submission]) -> list[int]:
    """The answers to steps."""
    return [total(await mesh.reply(step)) for step in steps]


async def end(mesh: ScriptedMesh, correlation_id: int) -> int:
    """Ends a sequence, adding nothing."""
    last = mesh.submission(correlation_id, value(0), END)
    await mesh.submit(last)
    return total(await mesh.reply(last))


async def test_steps_submitted_before_and_after_the_assignment_run_in_order(mesh: ScriptedMesh, executor: Life) -> None:
    async with executor("a") as a:
        submissions = [mesh.submission(7, value(n), START if n == 1 else NONE) for n in range(1, 9)]
        for index, submission in enumerate(submissions):
            await mesh.submit(submission)
            if index == 3:
                await mesh.assign(7, a.executor)

        sums = [total(await mesh.reply(submission)) for submission in submissions]

        assert np.cumsum(range(1, 9)).tolist() == sums
        assert 36 == await end(mesh, 7)


async def test_neighbours_in_a_batch_do_not_see_each_other(mesh: ScriptedMesh, executor: Life) -> None:
    async with executor("a") as a:
        for number in range(1, 5):
            await play(mesh, a, number, correlation_id=number, slot=number - 1)
        second = [mesh.submission(i, value(100 * i)) for i in range(1, 5)]
        for submission in second:
            await mesh.submit(submission)

        assert [101, 202, 303, 404] == await sums(mesh, second)
        for number in range(1, 5):
            await end(mesh, number)


async def test_a_failing_step_is_answered_and_the_sequence_goes_on_from_its_state(
    mesh: ScriptedMesh, executor: Life
) -> None:
    async with executor("a") as a:
        _, bad, good = await play(mesh, a, 5, -1, 2)

        assert ("INTERNAL", "no") == ((failed := await mesh.reply(bad)).error_code, failed.error)
        assert 7 == total(await mesh.reply(good))
        await end(mesh, 7)


async def test_after_a_failed_start_the_queued_steps_fail_and_the_slot_is_free(
    mesh: ScriptedMesh, executor: Life
) -> None:
    async with executor("a") as a:
        begin, follow = await play(mesh, a, 0, 2)

        assert "no" == (await mesh.reply(begin)).error
        assert "must specify the START flag" in (failed := await mesh.reply(follow)).error
        assert "failed" == failed.reason
        assert "f" == (await mesh.record(7))["st"]


@pytest.mark.parametrize("interval", [1, 3])
async def test_a_takeover_continues_as_if_nothing_had_happened(mesh: ScriptedMesh, executor: Life) -> None:
    """Also with steps that were committed but not checkpointed: they are replayed and not answered again."""
    async with executor("a") as a:
        assert [1, 3, 6, 10, 15] == await sums(mesh, await play(mesh, a, *range(1, 6)))
    in_flight = mesh.submission(7, value(6))
    await mesh.submit(in_flight)

    await mesh.take_over(a.executor)
    async with executor("b") as b:
        await mesh.assign(7, b.executor, slot=2)
        after = mesh.submission(7, value(7))
        await mesh.submit(after)

        assert [21, 28] == await sums(mesh, [in_flight, after])
        assert 28 == await end(mesh, 7)


@pytest.mark.parametrize("interval", [3])
async def test_what_was_kept_for_a_replay_goes_when_its_sequence_expires(mesh: ScriptedMesh, executor: Life) -> None:
    async with executor("a") as a:
        (step,) = await play(mesh, a, 5)
        assert 5 == total(await mesh.reply(step))
        commands, shard = mesh.redis, mesh.keys.shard_of(step.sequence)
        inbox = mesh.keys.inbox(shard, a.executor)
        assert 1 == await commands.xlen(inbox)

        await commands.delete(mesh.keys.sequence(step.sequence).idle)
        expired = mesh.scripts.expire([step.sequence], LedShard(shard, mesh.model, mesh.term), tombstone_ms=1000)
        assert [True] == await mesh.scripts.run(expired)

        async with asyncio.timeout(60):
            while await commands.xlen(inbox):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("interval", [3])
async def test_a_step_that_failed_does_not_succeed_when_others_are_replayed(
    mesh: ScriptedMesh, executor: Life, gate: Gate
) -> None:
    """Its caller has heard that it failed; also the second time that the window is replayed."""
    async with executor("a") as a:
        replies = [await mesh.reply(step) for step in await play(mesh, a, 1, 778, 778, 2, 778)]
        assert [1, "no", "no", 3, "no"] == [reply.error or total(reply) for reply in replies]
    gate.open()

    before = a.executor
    for slot, name in enumerate("bc"):
        step = mesh.submission(7, value(-1))
        await mesh.submit(step)
        await mesh.take_over(before)
        async with executor(name) as running:
            before = running.executor
            await mesh.assign(7, before, slot=slot)
            assert "no" == (await mesh.reply(step)).error
            if name == "c":
                assert 3 == await end(mesh, 7)


@pytest.mark.parametrize("interval", [3])
async def test_a_step_that_does_not_succeed_again_when_it_is_replayed_ends_in_a_lost_sequence(
    mesh: ScriptedMesh, executor: Life, gate: Gate
) -> None:
    """Nobody gets an answer that builds on another state than the answers before it; the next owner says the same."""
    async with executor("a") as a:
        assert [1, 780] == await sums(mesh, await play(mesh, a, 1, 779))
    gate.open()
    step = mesh.submission(7, value(1))
    await mesh.submit(step)

    await mesh.take_over(a.executor)
    async with executor("b") as b:
        await mesh.assign(7, b.executor)
        assert "lost" == (await mesh.reply(step)).reason
    record = await mesh.record(7)
    assert ("o", "3") == (record["st"], record["cm"])
    anew = mesh.submission(7, value(1), START)
    await mesh.submit(anew)
    async with executor("c") as c:
        await mesh.assign(7, c.executor)
        assert 1 == total(await mesh.reply(anew))
        await end(mesh, 7)


async def test_a_sequence_with_an_unusable_checkpoint_is_lost_for_good(mesh: ScriptedMesh, executor: Life) -> None:
    async with executor("a") as a:
        assert [5] == await sums(mesh, await play(mesh, a, 5))
    checkpoint = mesh.keys.sequence(mesh.sequence(7)).checkpoint
    await mesh.redis.hset(checkpoint, "s:SUM_IN", encode(Tensor("SUM_IN", "INT32", (1,), b"four")))
    steps = [mesh.submission(7, value(1)), mesh.submission(7, value(1))]
    for submission in steps:
        await mesh.submit(submission)

    await mesh.take_over(a.executor)
    async with executor("b") as b:
        await mesh.assign(7, b.executor)
        assert ["lost"] * 2 == [(await mesh.reply(submission)).reason for submission in steps]
    assert "o" == (await mesh.record(7))["st"]


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("interval", [1, 3])
async def test_a_sequence_that_gave_up_its_slot_goes_on_where_it_stood(
    mesh: ScriptedMesh, executor: Life, *, moving: bool
) -> None:
    """Somebody else has its slot meanwhile; it comes back to the same executor, or to another one."""
    async with executor("a") as a, executor("b") as b:
        before = await play(mesh, a, *range(1, 6), flags=START | PAGEABLE)
        assert 15 == total(await mesh.reply(before[-1]))
        expected = 15
        for owner, slot, tenant in ((a.executor, 1, 8), (b.executor, 0, 9)):
            here = await mesh.record(7)
            assert await mesh.vacate(7, moving=moving) is not VacateCode.KEPT
            other = mesh.submission(tenant, value(100), START)
            await mesh.submit(other)
            await mesh.assign(tenant, ExecutorId(here["ow"]), slot=int(here["sl"]))
            assert 100 == total(await mesh.reply(other))

            following = [mesh.submission(7, value(n)) for n in (10, 20)]
            for submission in following:
                await mesh.submit(submission)
            await mesh.assign(7, owner, slot=slot)
            assert [expected + 10, expected + 30] == await sums(mesh, following)
            expected += 30
            assert 100 == await end(mesh, tenant)
        assert expected == await end(mesh, 7)


async def test_an_executor_with_hardly_a_free_slot_gives_up_those_that_were_used_least_recently(
    mesh: ScriptedMesh, executor: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of its four slots are to be free; half of them may be taken before."""

    def spare_slots(config: ModelConfig, slots: int) -> int:
        return slots // 2

    monkeypatch.setattr("executor.sequences.sequence_model.spare_slots", spare_slots)
    async with executor("a") as a:
        for slot, number in enumerate((1, 2, 3, 1, 4)):
            begins = slot == number - 1 or number == 4
            step = mesh.submission(number, value(number), START | PAGEABLE if begins else PAGEABLE)
            await mesh.submit(step)
            if begins:
                await mesh.assign(number, a.executor, slot=number - 1)
            assert number * (1 if begins else 2) == total(await mesh.reply(step))
        await until(lambda: len(a.registration.serving.holdings) <= 2)

        assert {1: "l", 2: "p", 3: "p", 4: "l"} == {number: (await mesh.record(number))["st"] for number in range(1, 5)}
        for number in (2, 3):
            following = mesh.submission(number, value(10), END)
            await mesh.submit(following)
            assert await mesh.assign(number, a.executor, slot=number)
            assert number + 10 == total(await mesh.reply(following))
        assert [2, 4] == [await end(mesh, number) for number in (1, 4)]


async def test_an_idle_sequence_has_its_state_at_its_new_owner_before_its_next_step(
    mesh: ScriptedMesh, executor: Life
) -> None:
    """Whoever comes to it, by a takeover or by a move; then the checkpoint is not needed any more."""
    async with executor("b") as b, executor("c") as c:
        async with executor("a") as a:
            assert [5] == await sums(mesh, await play(mesh, a, 5))
        await mesh.take_over(a.executor)
        await here(mesh, b, {7: await mesh.assign(7, b.executor, slot=2)})
        assert VacateCode.VACATED is await mesh.vacate(7, moving=True)
        await here(mesh, c, {7: await mesh.assign(7, c.executor, slot=1)})
        await here(mesh, b, {})

        await mesh.redis.delete(mesh.keys.sequence(mesh.sequence(7)).checkpoint)
        assert 5 == await end(mesh, 7)


async def test_an_owner_that_is_told_too_late_forgets_it_again(mesh: ScriptedMesh, executor: Life) -> None:
    """The entry is read when its sequence has given up its slot, has ended, or was never there; and it may say what
    this executor has no place for. Who has the slot meanwhile is not disturbed."""
    async with executor("a") as a:
        for number, flags in ((7, START | PAGEABLE), (9, START | END)):
            step = mesh.submission(number, value(5), flags)
            await mesh.submit(step)
            await mesh.assign(number, a.executor)
            assert 5 == total(await mesh.reply(step))
            if number == 7:
                assert VacateCode.VACATED is await mesh.vacate(7)
        tenant = mesh.submission(8, value(100), START)
        await mesh.submit(tenant)
        epoch = await mesh.assign(8, a.executor)
        assert 100 == total(await mesh.reply(tenant))
        for number, slot in ((7, 0), (7, 1), (8, 0), (9, 0), (9, 2), (10, 3), (10, 99)):
            told = {"k": "owned", "q": mesh.sequence(number), "e": epoch if number == 8 else 1, "i": 0, "l": slot}
            shard = mesh.keys.shard_of(mesh.sequence(number))
            inbox = mesh.keys.inbox(shard, a.executor)
            await mesh.redis.xadd(inbox, {**told, "c": 1, "v": "1"})

        await here(mesh, a, {8: epoch})
        assert 100 == await end(mesh, 8)
        step = mesh.submission(7, value(1), END)
        await mesh.submit(step)
        await mesh.assign(7, a.executor)
        assert 6 == total(await mesh.reply(step))


async def here(mesh: ScriptedMesh, running: Running, epochs: Mapping[int, Epoch]) -> None:
    """Returns when an executor has heard all that it was told, and holds these sequences of one step, with state."""
    held = {Holding(mesh.sequence(number), epoch, ONE, ONE) for number, epoch in epochs.items()}
    async with asyncio.timeout(60):
        while any(
            [await mesh.redis.xlen(mesh.keys.inbox(shard, running.executor)) for shard in mesh.keys.shards]
        ) or held != set(running.registration.serving.holdings):
            await asyncio.sleep(0.01)


async def test_a_step_that_was_run_but_not_committed_counts_once(mesh: ScriptedMesh, executor: Life) -> None:
    """The old owner computes a step whose commit is refused; the new owner's result is the only one."""
    async with executor("a") as a, executor("b") as b:
        await play(mesh, a, 5)
        while (await mesh.record(7)).get("cm") != "1":
            await asyncio.sleep(0)
        step = mesh.submission(7, value(2))
        await mesh.submit(step)
        await mesh.take_over(a.executor)
        await mesh.assign(7, b.executor)

        assert 7 == total(await mesh.reply(step))
        assert 7 == await end(mesh, 7)


async def test_a_lease_that_has_ended_ends_the_registration(
    mesh: ScriptedMesh, executor: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew_often(monkeypatch)
    async with executor("a") as a:
        await mesh.redis.delete(mesh.keys.executor_lease(a.executor))

        with pytest.raises(ExceptionGroup) as ended:
            await a.task

        assert ended.group_contains(LeaseLostError)


def renew_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors ask for their lease every 10 ms."""
    monkeypatch.setattr("executor.lease.registration.RENEWALS_PER_LEASE", LEASE_MS // 10)


async def test_a_model_that_changes_while_a_registration_ends_is_the_next_ones(
    mesh: ScriptedMesh, redis_url: str, key_prefix: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not end the process: of the registration that ends, no new task is begun."""
    ending, may_end = asyncio.Event(), asyncio.Event()

    async def ends_late(_: Registration) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await may_end.wait()

    renew_often(monkeypatch)
    monkeypatch.setattr(Registration, "_add_up_counts", ends_late)
    async with living(redis_url, key_prefix, models, "sum", "a", applied=Applied) as a:
        await mesh.redis.delete(mesh.keys.executor_lease(a.executor))
        await ending.wait()
        a.repository.unload("sum")
        a.changed.set()
        for _ in range(10):
            await asyncio.sleep(0)
        may_end.set()

        with pytest.raises(ExceptionGroup) as ended:
            await a.task

        assert [LeaseLostError] == [type(error) for error in ended.value.exceptions]
        assert a.changed.is_set()


async def test_an_executor_that_is_not_registered_any_more_is_one_that_leaves(
    mesh: ScriptedMesh, executor: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a leader that begins later takes its sequences away: it finds them by the registrations."""
    monkeypatch.setattr("executor.lease.registration.KNOWN_INTERVAL_S", 0)
    async with executor("a") as a:
        await mesh.redis.delete(mesh.keys.executors)

        with pytest.raises(ExceptionGroup) as ended:
            await a.task

        assert ended.group_contains(LeaseLostError)
        (member,) = await Membership(mesh.redis, mesh.keys).members()
        assert (a.executor, True, False) == (member.registration.executor, member.registration.leaving, member.alive)


class ModelsMeanwhile:
    """A loaded model; while it is looked at, the thread that loads models brings another one."""

    def __init__(self, repository: ModelRepository) -> None:
        self._loaded = repository.loaded
        self.versions: list[ServedVersion] = []

    @property
    def record(self) -> ModelRecord:
        record = self._loaded["sum"].record
        self._loaded["later"] = LoadedModel(record, [])
        return record


async def test_a_registration_outlives_a_load_that_ends_while_it_looks_at_its_models(
    executor: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: asyncio.Queue[int] = asyncio.Queue()

    async def unknown(_membership: Membership, records: Sequence[ModelRecord]) -> Sequence[ModelRecord]:
        seen.put_nowait(len(records))
        return ()

    monkeypatch.setattr("executor.lease.registration.KNOWN_INTERVAL_S", 0)
    monkeypatch.setattr(Membership, "unknown", unknown)
    async with executor("a") as a:
        a.repository.loaded["meanwhile"] = cast("LoadedModel", ModelsMeanwhile(a.repository))
        await _seen(seen, 3, a.task)


async def _seen(counts: asyncio.Queue[int], count: int, running: asyncio.Task[None]) -> None:
    """Returns when so many models were looked at. Raises what has ended the registration."""
    while True:
        counted = asyncio.create_task(counts.get())
        await asyncio.wait({counted, running}, return_when=asyncio.FIRST_COMPLETED)
        if not counted.done():
            await running
        if await counted == count:
            return


async def test_a_registration_without_an_answer_is_not_repeated_under_the_same_id(
    mesh: ScriptedMesh, executor: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease may have begun, and ended since: a leader that saw it end gives that id nothing any more."""
    register, registered = Membership.register, list[ExecutorRegistration]()

    async def unanswered(membership: Membership, registration: ExecutorRegistration, *, lease_ms: int) -> None:
        await register(membership, registration, lease_ms=lease_ms)
        registered.append(registration)
        raise RedisConnectionError("connection reset by peer")

    monkeypatch.setattr(Membership, "register", unanswered)

    with pytest.raises(ExceptionGroup) as ended:
        async with executor("a"):
            pass

    assert ended.group_contains(LeaseLostError)
    assert 1 == len(registered)


async def test_leaving_finishes_what_runs_and_hands_the_rest_over(mesh: ScriptedMesh, executor: Life) -> None:
    async with executor("a") as a, executor("b") as b:
        _, *rest = await play(mesh, a, *[1] * 21)
        await a.registration.leave()

        members = {m.registration.executor: m for m in await Membership(mesh.redis, mesh.keys).members()}
        assert members[a.executor].registration.leaving
        assert not members[a.executor].alive
        await mesh.take_over(a.executor)
        await mesh.assign(7, b.executor)

        assert list(range(2, 22)) == await sums(mesh, rest)
        await end(mesh, 7)


@pytest.mark.parametrize("how", ["leave", "give_up"])
async def test_whoever_ends_its_lease_has_not_lost_it(
    mesh: ScriptedMesh, executor: Life, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A renewal may come between the end of the lease and the answer to whoever has ended it: a model that hangs, say,
    of which nothing would be told."""
    end_lease, renew, refused = getattr(Membership, how), Membership.renew, asyncio.Event()

    async def answered_late(*arguments: Any) -> None:
        await end_lease(*arguments)
        await refused.wait()

    async def renewed(membership: Membership, executor: ExecutorId, *, lease_ms: int) -> bool:
        is_held = await renew(membership, executor, lease_ms=lease_ms)
        if not is_held:
            refused.set()
        return is_held

    monkeypatch.setattr(Membership, how, answered_late)
    monkeypatch.setattr(Membership, "renew", renewed)
    renew_often(monkeypatch)
    async with executor("a") as a:
        await getattr(a.registration, how)()
        await asyncio.wait([a.task], timeout=0.1)

        assert refused.is_set()
        assert not a.task.done()


async def test_an_executor_that_cannot_tell_redis_leaves_its_lease_to_its_end(
    mesh: ScriptedMesh, executor: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def unwritable(membership: Membership, registration: ExecutorRegistration) -> None:
        raise RedisConnectionError("MISCONF Errors writing to the AOF file")

    async with executor("a") as a:
        monkeypatch.setattr(Membership, "leave", unwritable)
        await a.registration.leave()

    assert "executor left without a word" in caplog.text


async def test_an_executor_that_leaves_serves_on_what_only_it_can_serve_but_not_for_ever(
    mesh: ScriptedMesh, executor: Life
) -> None:
    async with executor("a") as a:
        first = msgspec.structs.replace(mesh.submission(7, value(1), START), flags=START)
        await mesh.submit(first)
        await mesh.assign(7, a.executor)
        assert 1 == total(await mesh.reply(first))
        enough = asyncio.Event()

        async def patience() -> None:
            await enough.wait()

        settling = asyncio.create_task(a.registration.settle(patience()))
        membership = Membership(mesh.redis, mesh.keys)
        async with asyncio.timeout(60):
            while not (await membership.members())[0].registration.models[0].closing:
                await asyncio.sleep(0.01)
        second = msgspec.structs.replace(mesh.submission(7, value(2)), flags=NONE)
        await mesh.submit(second)
        assert 3 == total(await mesh.reply(second))
        assert not settling.done()
        enough.set()

        assert await settling
        await a.registration.leave()
        await mesh.take_over(a.executor)
        assert "o" == (await mesh.record(7))["st"]


async def test_an_executor_without_such_sequences_need_not_wait(mesh: ScriptedMesh, executor: Life) -> None:
    async with executor("a") as a:
        await play(mesh, a, 1)

        assert not await a.registration.settle(asyncio.sleep(600))

        await end(mesh, 7)


async def test_statistics_of_all_executors_add_up(mesh: ScriptedMesh, executor: Life) -> None:
    async with executor("a") as a:
        await play(mesh, a, 1, 2, 3, -1)
        await end(mesh, 7)
        await a.registration.leave()

    load = ModelLoad("sum", "1", "0")
    counts = (await Tallies(mesh.scripts, mesh.keys).read([load]))[load]
    assert (4, 1, 4) == (counts["success_count"], counts["fail_count"], counts["inference_count"])


async def test_counts_are_added_up_though_nobody_reads_them(
    mesh: ScriptedMesh, executor: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.lease.registration.COUNTS_INTERVAL_S", 0.01)
    place = (mesh.keys.shard_of(mesh.sequence(7)), "sum", "1", "0")
    async with executor("a") as a:
        await play(mesh, a, 1)
        await end(mesh, 7)

        async with asyncio.timeout(60):
            while await mesh.redis.llen(mesh.keys.tally(*place)):
                await asyncio.sleep(0.01)
        assert 1 == await mesh.redis.exists(mesh.keys.counts(*place))


async def test_the_executors_id_is_never_used_twice(executor: Life) -> None:
    ids: set[ExecutorId] = set()
    for _ in range(2):
        async with executor("same") as life:
            ids.add(life.executor)

    assert 2 == len(ids)


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize(
    ("before", "after", "instances"),
    [
        ("", "instance_group [ { count: 2 kind: KIND_CPU } ]", 2),
        ("oldest { max_candidate_sequences: 4 }", "direct { }", 1),
        ("max_sequence_idle_microseconds: 60000000", "max_sequence_idle_microseconds: 50000000", 1),
        ("", 'parameters { key: "virtual_slots" value { string_value: "false" } }', 1),
    ],
    ids=["instances", "strategy", "idle time", "virtual slots"],
)
async def test_a_model_that_is_served_otherwise_goes_on_with_its_sequences(
    mesh: ScriptedMesh, executor: Life, models: Path, before: str, after: str, instances: int
) -> None:
    """A load that changes nothing on which a state depends ends no sequence whose state the mesh holds."""
    async with executor("a") as a:
        *_, fifth = await play(mesh, a, *range(1, 6))
        await mesh.reply(fifth)

        config = models / "sum" / "config.pbtxt"
        text = config.read_text()
        assert before in text
        config.write_text(text.replace(before, after) if before else f"{text}\n{after}\n")
        a.repository.load("sum")
        await a.registration.announce(Applied("1-0"))
        last = mesh.submission(7, value(6))
        await mesh.submit(last)

        assert 21 == total(await mesh.reply(last))
        assert [instances] == [served.instances for served in (await registration(mesh, a)).models]
        await end(mesh, 7)


async def test_a_connection_that_looks_alive_and_is_silent_does_not_cost_the_lease(
    mesh: ScriptedMesh, redis_url: str, key_prefix: str, models: Path
) -> None:
    """However long Redis may take to answer: another connection is made in time."""
    slow_ms, lease_ms = 600_000, 3_000
    with RedisProxy(redis_url) as proxy:
        async with living(proxy.url, key_prefix, models, "sum", "a", redis_timeout_ms=slow_ms, lease_ms=lease_ms) as a:
            lease = mesh.keys.executor_lease(a.executor)
            assert proxy.strand()
            # A machine that is busy must not end it, or have ended it: what counts is that it is renewed at all.
            await mesh.redis.set(lease, "1", px=slow_ms)

            async with asyncio.timeout(60):
                while await mesh.redis.pttl(lease) > lease_ms:
                    await asyncio.sleep(0.01)
            assert not a.task.done()


async def test_the_loop_that_renews_the_lease_asks_no_file_system_what_there_is_to_announce(
    executor: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system that does not answer would hold it up for longer than the lease lasts."""
    on_the_loop: list[bool] = []
    names = LocalFolder.names

    def asked(self: LocalFolder) -> Collection[str]:
        on_the_loop.append(threading.current_thread() is threading.main_thread())
        return names(self)

    async with executor("a") as a:
        monkeypatch.setattr(LocalFolder, "names", asked)
        await a.registration.announce(Applied("1-0"))
        await a.registration.leave()

    assert [False] == on_the_loop


async def test_a_load_that_changes_nothing_leaves_engines_and_sequences_alone(
    mesh: ScriptedMesh, executor: Life
) -> None:
    async with executor("a") as a:
        await play(mesh, a, 5)
        (before,) = a.repository.loaded["sum"].versions

        a.repository.load("sum", generation="other")
        await a.registration.announce(Applied("1-0"))

        assert [before] == a.repository.loaded["sum"].versions
        assert "0" == a.repository.loaded["sum"].record.generation
        assert 5 == await end(mesh, 7)


async def test_a_reload_finishes_what_was_accepted_and_ends_what_is_open(
    mesh: ScriptedMesh, executor: Life, models: Path, gate: Gate
) -> None:
    """Steps of before run on the old engines, sequences that begin later on the new ones. Who is idle then is over at
    once, and who is not hears it with the next step: also one whose step came while the old engines were at work."""
    async with executor("a") as a:
        await play(mesh, a, 1, correlation_id=9, slot=2)
        old = await play(mesh, a, *[1] * 20, 777)
        await gate.reached()
        reload = await reload_of(models, a)
        assert [1001] == await sums(mesh, await play(mesh, a, 1, correlation_id=8, slot=1))
        late = mesh.submission(7, value(1))
        await mesh.submit(late)
        gate.open()
        await reload

        assert [*range(1, 21), 797] == await sums(mesh, old)
        assert Reason.LOST == (await mesh.reply(late)).reason
        assert ["o", "l", "o"] == [(await mesh.record(number))["st"] for number in (7, 8, 9)]
        assert "second" == a.repository.loaded["sum"].record.generation
        assert 2001 == await end(mesh, 8)


async def test_a_reload_waits_for_no_entry_that_left_the_inbox_before_it_was_read_again(
    mesh: ScriptedMesh,
    executor: Life,
    models: Path,
    gate: Gate,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The reload of another version, and a failover of Redis, have everything read again that is still there."""
    async with executor("a") as a:
        running = await play(mesh, a, 777)
        await gate.reached()
        reload = await reload_of(models, a)
        a.registration._inbox.read_again()
        gate.open()
        await reload

        assert [777] == await sums(mesh, running)
    assert "model ends with steps unfinished" not in caplog.messages


async def test_a_reload_leaves_to_the_scheduler_what_neither_load_has_a_place_for(
    mesh: ScriptedMesh, executor: Life, models: Path, gate: Gate
) -> None:
    """A load before these two had two instances. What is read again is older than the new load, so the old one gets
    it."""
    async with executor("a") as a:
        placed, busy = mesh.submission(7, value(1), START), mesh.submission(8, value(777), START)
        for submission in (placed, busy):
            await mesh.submit(submission)
        await mesh.assign(7, a.executor, instance=1)
        await mesh.assign(8, a.executor)
        await gate.reached()
        a.registration.serving._inbox.read_again()
        reload = await reload_of(models, a)
        assert [1001] == await sums(mesh, await play(mesh, a, 1, correlation_id=9, slot=1))
        gate.open()
        await reload

        assert 777 == total(await mesh.reply(busy))
        assert "l" == (await mesh.record(7))["st"]
        await mesh.take_over(a.executor)
        for number in (7, 9):
            await mesh.assign(number, a.executor, slot=number - 7)
        assert 1001 == total(await mesh.reply(placed))
        assert [2001, 2001] == [await end(mesh, number) for number in (7, 9)]


@pytest.mark.leaves_sequences
async def test_a_state_is_taken_by_no_other_load_wherever_it_comes_to_it(
    mesh: ScriptedMesh, executor: Life, models: Path
) -> None:
    """From a page, by a move or by a takeover; whether the executor of before has loaded anew or not."""
    async with executor("a") as a, executor("b") as b:
        for number in (1, 2, 3, 4):
            first = await play(mesh, a, number, correlation_id=number, slot=number - 1, flags=START | PAGEABLE)
            assert [number] == await sums(mesh, first)
        assert VacateCode.VACATED is await mesh.vacate(1)
        assert VacateCode.VACATED is await mesh.vacate(2)
        # Told nobody yet: the scheduler does not know that this executor has loaded anew.
        change_model(models, "total = ", "total = 1000 + ")
        b.repository.load("sum", generation="second")
        await b.registration.announce(Applied())

        assert VacateCode.VACATED is await mesh.vacate(3, moving=True)
        lost_by_page, kept, moved = (mesh.submission(n, value(1)) for n in (1, 2, 3))
        for submission in (lost_by_page, kept, moved):
            await mesh.submit(submission)
        await mesh.assign(1, b.executor)
        await mesh.assign(2, a.executor, slot=1)
        await mesh.assign(3, b.executor, slot=2)
        assert Reason.LOST == (await mesh.reply(lost_by_page)).reason
        assert Reason.LOST == (await mesh.reply(moved)).reason
        assert 3 == total(await mesh.reply(kept))

        taken = mesh.submission(4, value(1))
        await mesh.take_over(a.executor)
        await mesh.submit(taken)
        await mesh.assign(4, b.executor, slot=3)
        assert Reason.LOST == (await mesh.reply(taken)).reason


async def test_a_reload_that_fails_leaves_the_old_model_serving(
    mesh: ScriptedMesh, executor: Life, models: Path
) -> None:
    async with executor("a") as a:
        await play(mesh, a, 5)
        change_model(models, "class TritonPythonModel", "raise ValueError('broken')\nclass TritonPythonModel")

        with pytest.raises(
            LoadError, match=r"load failed for model 'sum': version 1 is at UNAVAILABLE state: .*broken"
        ):
            a.repository.load("sum")
        await a.registration.announce(Applied("1-0"))

        assert [("sum", "1", "READY")] == [
            (line.model, line.version, line.state) for line in (await registration(mesh, a)).repository
        ]
        assert 5 == await end(mesh, 7)


async def test_an_unloaded_model_finishes_what_was_accepted_and_then_is_offered_no_more(
    mesh: ScriptedMesh, executor: Life, gate: Gate
) -> None:
    async with executor("a") as a:
        steps = await play(mesh, a, *[1] * 20, 777)
        a.repository.unload("sum")
        await a.registration.announce(Applied("1-0"))

        assert ["UNLOADING"] == [line.state for line in (await registration(mesh, a)).repository]
        await until(lambda: a.registration.serving.queued_bytes, "they wait here")
        gate.open()
        assert [*range(1, 21), 797] == await sums(mesh, steps)
        await until(lambda: not a.registration.serving.queued_bytes, "none waits here")
        await a.changed.wait()
        await a.registration.announce(Applied("1-0"))
        told = await registration(mesh, a)
        assert () == told.models
        assert [("UNAVAILABLE", "unloaded")] == [(line.state, line.reason) for line in told.repository]
        await mesh.take_over(a.executor)
    async with executor("b") as b:
        await mesh.assign(7, b.executor)
        await end(mesh, 7)


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("other", ["serves", "unloads", "is not there"])
async def test_an_idle_sequence_that_cannot_be_paged_is_lost_with_the_last_executor_that_has_its_model(
    mesh: ScriptedMesh, executor: Life, models: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """It would wait for a slot that never comes, be refused, and be forgotten. With another executor it goes on."""
    monkeypatch.setattr(serving, "LINGER_S", 0)
    with (models / "sum" / "config.pbtxt").open("a") as config:
        config.write('parameters { key: "virtual_slots" value { string_value: "false" } }')
    async with executor("a") as a, AsyncExitStack() as stack:
        assert [1] == await sums(mesh, await play(mesh, a, 1))
        if other != "is not there":
            b = await stack.enter_async_context(executor("b"))
            if other == "unloads":
                b.repository.unload("sum")
                await b.registration.announce(Applied("1-0"))
        a.repository.unload("sum")
        await a.registration.announce(Applied("1-0"))
        await a.changed.wait()

        next_step = await mesh.submit(mesh.submission(7, value(1)))

    assert (SubmitCode.DELIVERED if other == "serves" else SubmitCode.LOST) is next_step.code


async def test_nothing_is_kept_of_models_that_come_and_go(
    mesh: ScriptedMesh, executor: Life, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "LINGER_S", 0)
    async with executor("a") as a:

        def kept() -> dict[str, set[object]]:
            known = vars(a.registration.serving).items()
            return {name: set(cast("dict[object, object]", one)) for name, one in known if isinstance(one, dict)}

        before = kept()
        for name in ("comes", "goes"):
            shutil.copytree(models / "sum", models / name)
            a.repository.load(name)
            await a.registration.announce(Applied("1-0"))
            a.repository.unload(name)
            await a.registration.announce(Applied("1-0"))
            await a.changed.wait()
            a.changed.clear()

        assert before == kept()


async def test_a_finalize_that_takes_long_holds_up_no_other_model(
    mesh: ScriptedMesh, executor: Life, models: Path, gate: Gate
) -> None:
    finalize = f"""    def finalize(self):
        open({f"{gate.path}.waits"!r}, "w").close()
        while not os.path.exists({str(gate.path)!r}):
            time.sleep(0.001)

    def execute("""
    change_model(models, "    def execute(", finalize)
    async with executor("a") as a:
        a.repository.unload("sum")
        await a.registration.announce(Applied("1-0"))
        await a.changed.wait()
        try:
            async with asyncio.timeout(60):
                await a.registration.announce(Applied("1-0"))
                await gate.reached()

                change_model(models, "total = ", "total = 1000 + ")
                a.repository.load("sum", generation="second")
                await a.registration.announce(Applied("2-0"))
            assert ["READY"] == [line.state for line in (await registration(mesh, a)).repository]
            await play(mesh, a, 5)
            assert 2005 == await end(mesh, 7)
        finally:
            gate.open()


@pytest.mark.leaves_sequences
@pytest.mark.parametrize("how", ["is loaded anew", "has other instances", "is unloaded"])
async def test_a_model_that_hangs_holds_up_no_other_change(
    mesh: ScriptedMesh, executor: Life, models: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Whoever mends a model that hangs loads it anew."""
    monkeypatch.setattr(serving, "LINGER_S", 0)
    monkeypatch.setattr(serving, "FINISH_S", 0.1)
    monkeypatch.setattr(serving, "RETURN_S", 0.1)
    async with executor("a") as a:
        hangs = await play(mesh, a, 777)
        await gate.reached()
        match how:
            case "is loaded anew":
                change_model(models, "== 777", "== 7777")
                a.repository.load("sum", generation="second")
            case "has other instances":
                with (models / "sum" / "config.pbtxt").open("a") as config:
                    config.write("instance_group [ { count: 2 } ]")
                a.repository.load("sum")
            case _:
                a.repository.unload("sum")
        try:
            async with asyncio.timeout(60):
                await a.registration.announce(Applied("1-0"))
                if how == "is unloaded":
                    await a.changed.wait()
                await a.registration.announce(Applied("2-0"))

                served = (await registration(mesh, a)).models
                if how == "is loaded anew":
                    assert [777] == await sums(mesh, hangs)
        finally:
            gate.open()
        assert (how != "is unloaded") == bool(served)
        if how == "has other instances":
            assert [777] == await sums(mesh, hangs)


@pytest.mark.leaves_sequences
async def test_a_model_that_hangs_holds_up_no_sequence_of_an_executor_that_is_drained(
    mesh: ScriptedMesh, redis_url: str, models: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stays until it ends lets the others go, also those that a batch holds that does not return."""
    monkeypatch.setattr(serving, "RETURN_S", 0.1)
    shutil.copytree(models / "sum", models / "kept")
    other = ScriptedMesh(mesh.redis, mesh.keys, "kept")
    async with living(redis_url, mesh.keys.prefix, models, "sum", "a", "kept") as a:
        await play(mesh, a, 777)
        await other.submit(msgspec.structs.replace(other.submission(8, value(1), START), flags=START))
        await other.assign(8, a.executor)
        await gate.reached()
        settling = asyncio.create_task(a.registration.settle(asyncio.sleep(600)))
        try:
            async with asyncio.timeout(60):
                while ["kept"] != [one.model for one in (await registration(mesh, a)).models]:
                    await asyncio.sleep(0.01)
        finally:
            settling.cancel()
            gate.open()


async def reload_of(models: Path, running: Running) -> asyncio.Task[None]:
    """Begins a reload of the model, whose sums are larger by 1000 then. Returns when new engines take steps: what was
    in the inbox before is for the old ones.
    """
    change_model(models, "total = ", "total = 1000 + ")
    running.repository.load("sum", generation="second")
    reload = asyncio.create_task(running.registration.announce(Applied("1-0")))
    while len({load for load in running.registration.serving.loads if load.model == "sum"}) < 2:
        await asyncio.sleep(0.001)
    return reload


def change_model(models: Path, old: str, new: str) -> None:
    """Edits the model's code."""
    path = models / "sum" / "1" / "model.py"
    code = path.read_text()
    assert old in code
    path.write_text(code.replace(old, new))


async def registration(mesh: ScriptedMesh, running: Running) -> ExecutorRegistration:
    """What an executor says of itself now."""
    members = await Membership(mesh.redis, mesh.keys).members()
    return next(m.registration for m in members if m.registration.executor == running.executor)


@pytest.mark.leaves_sequences
async def test_cancelled_step_and_those_behind_it_do_not_run_and_the_running_one_is_not_affected(
    mesh: ScriptedMesh, executor: Life, gate: Gate
) -> None:
    """The sequence has lost its state then; a START behind them begins anew, in the same slot."""
    async with executor("alice") as alice:
        running, cancelled, behind, anew = (
            mesh.submission(7, value(number), flags)
            for number, flags in ((777, START), (1, NONE), (2, NONE), (5, START))
        )
        begun = await mesh.submit(running)
        await mesh.assign(7, alice.executor)
        told = await mesh.submit(cancelled)
        await mesh.submit(behind)
        await gate.reached()

        assert CancelCode.TOLD is await mesh.cancel(running, begun)
        assert CancelCode.TOLD is await mesh.cancel(cancelled, told)
        inbox = mesh.keys.inbox(mesh.keys.shard_of(mesh.sequence(7)), alice.executor)
        try:
            while any(b"k" in fields for _, fields in await mesh.redis.xrange(inbox)):
                await asyncio.sleep(0.001)
            await mesh.submit(anew)
        finally:
            gate.open()

        assert 777 == total(await mesh.reply(running))
        for submission in (cancelled, behind):
            reply = await mesh.reply(submission)
            assert ("CANCELLED", "") == (reply.error_code, reply.error)
        assert 5 == total(await mesh.reply(anew))
        last = mesh.submission(7, value(1), END)
        await mesh.submit(last)
        assert 6 == total(await mesh.reply(last))
