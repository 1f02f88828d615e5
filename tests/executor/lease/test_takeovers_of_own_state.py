"""Models that keep their sequences' state themselves are taken over, whenever their executors die.

Both ways, the model's methods and the replay of its steps, with the real scripts and the real engine. An executor here
dies where its tasks happen to stand: while it restores, replays, runs, or waits for a commit. `test_recovery` takes the
same apart at every point of one step.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from executor.lease import serving
from executor.lease.registration import Applied
from executor.sequences.checkpoints import Checkpoint, read_checkpoints
from executor.sequences.holdings import Holding
from shared.contract.ids import ExecutorId, SequenceId, StepNumber, sequence_id
from shared.contract.messages import ReplyMessage, StepFlag
from shared.contract.tensors import to_numpy
from shared.statistics.tally import ModelLoad
from shared.store.script_values import LedShard, Submission, SubmitCode, VacateCode
from shared.store.scripts import Scripts
from shared.store.totals import Tallies
from tests.executor.living import Running, living
from tests.executor.patience import until
from tests.scripted_mesh import ScriptedMesh

START, END, NONE = StepFlag.START, StepFlag.END, StepFlag.NONE

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''Running sums, kept here by correlation id, with a trace of the last numbers as strings. -1 fails. A sum of 666
    cannot be saved, one of 999 cannot be taken back.'''

    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.add(request) for request in requests]

    def add(self, request):
        value = int(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()[0, 0])
        if value == -1:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("no"))
        sequence = request.correlation_id()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.sums[sequence] = (0, [])
        if sequence not in self.sums:  # a slot that has nothing to run
            return pb_utils.InferenceResponse([])
        total, trace = self.sums[sequence]
        self.sums[sequence] = (total + value, [*trace, b"%d" % value][-3:])
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            total, trace = self.sums.pop(sequence)[0] - value, []
        output = np.array([[total + value]], np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output)])
"""
METHODS = """
    def checkpoint(self, correlation_id):
        total, trace = self.sums[correlation_id]
        if total == 666:
            raise ValueError("the number of the beast")
        if not trace:
            return {}
        # As many tensors as there are numbers: those of an earlier checkpoint must not come back.
        return {"total": np.array(total), **{str(n): np.array([text], np.object_) for n, text in enumerate(trace)}}

    def restore(self, correlation_id, state):
        total = int(state.pop("total", 0))
        if total == 999:
            raise ValueError("too much")
        self.sums[correlation_id] = (total, [state[str(n)][0] for n in range(len(state))])
"""
FLAG = "        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:\n"
TAKING = "        total = int(state.pop"
TELLING = MODEL.replace(FLAG, f"{FLAG}            self.tell('start', sequence)\n") + METHODS.replace(
    TAKING, f"        self.tell('restore', correlation_id)\n{TAKING}"
)
RELEASE = """
    def release(self, correlation_id):
        self.tell("release", correlation_id)
        self.sums.pop(correlation_id, None)

    def tell(self, *words):
        with open("LOG", "a") as log:
            print(*words, file=log)
"""
CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "INPUT" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT64 dims: [ 1 ] } ]
sequence_batching { max_sequence_idle_microseconds: 60000000 STRATEGY }
instance_group [ { kind: KIND_CPU count: INSTANCES } ]
"""
OLDEST = "oldest { max_candidate_sequences: 4 }"

LIVES = 4

Life = Callable[[str], AbstractAsyncContextManager[Running]]
MakeModel = Callable[..., Life]


def value(number: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"INPUT": np.array([[number]], np.int64)}


def told(reply: ReplyMessage) -> int | str:
    """A sum, or why there is none."""
    return reply.reason or reply.error or int(to_numpy(reply.outputs[0])[0, 0])


@pytest.fixture
def make_model(redis_url: str, key_prefix: str, tmp_path: Path) -> MakeModel:
    """Writes the model; returns what runs executors of it."""

    def make(source: str, parameters: Mapping[str, object], *, strategy: str = OLDEST, instances: int = 1) -> Life:
        version = tmp_path / "models" / "sum" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(source)
        config = CONFIG.replace("STRATEGY", strategy).replace("INSTANCES", str(instances))
        texts = [
            f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in parameters.items()
        ]
        (version.parent / "config.pbtxt").write_text(config + "\n".join(texts))
        return lambda name: living(redis_url, key_prefix, tmp_path / "models", "sum", name)

    return make


async def play(mesh: ScriptedMesh, numbers: Sequence[int], *, correlation_id: int = 7) -> list[Submission]:
    """Submits the steps of a sequence, a START first."""
    steps = [mesh.submission(correlation_id, value(n), START if not i else NONE) for i, n in enumerate(numbers)]
    for step in steps:
        await mesh.submit(step)
    return steps


async def answers(mesh: ScriptedMesh, steps: Sequence[Submission]) -> list[int | str]:
    return [told(await mesh.reply(step)) for step in steps]


async def inbox_length(mesh: ScriptedMesh, running: Running) -> int:
    lengths = [await mesh.redis.xlen(mesh.keys.inbox(shard, running.executor)) for shard in mesh.keys.shards]
    return sum(lengths)


WAYS: list[Any] = [
    pytest.param(MODEL + METHODS, {}, id="methods"),
    pytest.param(MODEL + METHODS, {"checkpoint_interval": 4}, id="methods every 4 steps"),
    pytest.param(MODEL, {"sequence_recovery": "replay"}, id="replay"),
]


@pytest.mark.parametrize(
    ("source", "parameters", "strategy", "instances"),
    [
        pytest.param(MODEL + METHODS, {}, OLDEST, 2, id="methods, oldest"),
        pytest.param(MODEL + METHODS, {"checkpoint_interval": 4}, "direct { }", 1, id="methods every 4 steps, direct"),
        pytest.param(MODEL, {"sequence_recovery": "replay"}, OLDEST, 2, id="replay, oldest"),
        pytest.param(MODEL, {"sequence_recovery": "replay"}, "direct { }", 1, id="replay, direct"),
    ],
)
async def test_sums_are_right_whenever_executors_die(
    mesh: ScriptedMesh,
    make_model: MakeModel,
    source: str,
    parameters: Mapping[str, object],
    strategy: str,
    instances: int,
) -> None:
    """Steps that fail, and sequences that begin anew in the middle: every step is answered once, as the oracle says."""
    seed = secrets.randbits(32)
    print(f"seed: {seed}")
    chance = random.Random(seed)
    life = make_model(source, parameters, strategy=strategy, instances=instances)
    wanted: dict[str, int | str] = {}
    sums: dict[int, int] = {}
    unheard: list[Submission] = []

    async def submit(sequence: int, number: int, flags: StepFlag) -> None:
        if number >= 0:
            sums[sequence] = number + (0 if START in flags else sums[sequence])
        step = mesh.submission(sequence, value(number), flags)
        wanted[step.token] = sums[sequence] if number >= 0 else "no"
        await mesh.submit(step)
        unheard.append(step)

    async def submit_some() -> None:
        for sequence in range(1, 5):
            for _ in range(chance.randint(1, 4)):
                if sequence not in sums or chance.random() < 0.2:
                    await submit(sequence, chance.randint(1, 9), START)
                else:
                    await submit(sequence, chance.choice([-1, *range(9)]), NONE)

    before: ExecutorId | None = None
    for generation in range(LIVES):
        async with life(f"e{generation}") as running:
            await submit_some()
            if before is not None:
                await mesh.take_over(before, lost=True)
            for index in range(4):
                slot, instance = index // instances, index % instances
                assert await mesh.assign(index + 1, running.executor, slot=slot, instance=instance)
            await submit_some()
            if generation == LIVES - 1:
                for sequence in range(1, 5):
                    await submit(sequence, 0, END)
            # It dies when some have been answered; which, only the seed and the machine know.
            heard = unheard if generation == LIVES - 1 else chance.sample(unheard, chance.randint(0, len(unheard)))
            for step in list(heard):
                assert wanted[step.token] == told(await mesh.reply(step)), step.token
                unheard.remove(step)
        before = running.executor
    assert [] == unheard


@pytest.mark.parametrize(("source", "parameters"), WAYS)
async def test_a_long_history_is_there_after_many_takeovers_in_a_row(
    mesh: ScriptedMesh, make_model: MakeModel, source: str, parameters: Mapping[str, object]
) -> None:
    """Nobody runs a step in between: what the second owner replayed, or restored, the third one can again."""
    life = make_model(source, parameters)
    async with life("a") as running:
        steps = await play(mesh, [5, -1, 7, 0, -1, -1, 2, 3])
        await mesh.assign(7, running.executor)
        assert [5, "no", 12, 12, "no", "no", 14, 17] == await answers(mesh, steps)
    for slot, name in enumerate("bcd"):
        before = running.executor
        async with life(name) as running:
            await mesh.take_over(before, lost=True)
            await mesh.assign(7, running.executor, slot=slot)
            if name != "c":
                step = mesh.submission(7, value(-1))
                await mesh.submit(step)
                assert "no" == told(await mesh.reply(step))
    async with life("e") as last:
        step = mesh.submission(7, value(100))
        await mesh.submit(step)
        await mesh.take_over(running.executor, lost=True)
        await mesh.assign(7, last.executor)
        assert 117 == told(await mesh.reply(step))
        ended = mesh.submission(7, value(0), END)
        await mesh.submit(ended)
        assert 117 == told(await mesh.reply(ended))
        assert 0 == await inbox_length(mesh, last)


@pytest.mark.parametrize(("source", "parameters"), WAYS)
async def test_an_idle_sequence_has_its_state_before_its_next_step(
    mesh: ScriptedMesh, make_model: MakeModel, source: str, parameters: Mapping[str, object]
) -> None:
    life = make_model(source, parameters)
    async with life("a") as a:
        steps = await play(mesh, [1, 2])
        await mesh.assign(7, a.executor)
        assert [1, 3] == await answers(mesh, steps)
    async with life("b") as b:
        await mesh.take_over(a.executor, lost=True)
        epoch = await mesh.assign(7, b.executor)
        restored = Holding(mesh.sequence(7), epoch, StepNumber(2), StepNumber(2))
        await until(lambda: [restored] == b.registration.serving.holdings)

        await mesh.redis.delete(mesh.keys.sequence(mesh.sequence(7)).checkpoint)
        step = mesh.submission(7, value(3), END)
        await mesh.submit(step)
        assert 6 == told(await mesh.reply(step))


@pytest.mark.leaves_sequences
async def test_what_was_kept_for_a_state_goes_when_its_sequence_was_over_before_that(
    mesh: ScriptedMesh, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It expired between its takeover and its restore: the word of that may come when it is forgotten already."""

    async def read_late(*asked: Any) -> dict[SequenceId, Checkpoint]:
        found = await read_checkpoints(*asked)
        return {sequence: replace(checkpoint, is_over=True) for sequence, checkpoint in found.items()}

    life = make_model(MODEL, {"sequence_recovery": "replay"})
    async with life("a") as a:
        steps = await play(mesh, [1, 2])
        await mesh.assign(7, a.executor)
        assert [1, 3] == await answers(mesh, steps)
        assert 2 == await inbox_length(mesh, a)
    monkeypatch.setattr("executor.sequences.arrivals.read_checkpoints", read_late)
    async with life("b") as b:
        await mesh.take_over(a.executor, lost=True)
        await mesh.assign(7, b.executor)
        async with asyncio.timeout(60):
            while b.registration.serving.holdings or await inbox_length(mesh, b) or await inbox_length(mesh, a):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(("source", "parameters"), WAYS)
async def test_what_was_kept_for_a_state_goes_when_a_sequence_that_follows_another_ends_with_a_failed_step(
    mesh: ScriptedMesh,
    make_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    parameters: Mapping[str, object],
) -> None:
    monkeypatch.setattr(mesh, "sequence", partial(sequence_id, "sum", "@e//2#5-0.1"))
    async with make_model(source, parameters)("a") as a:
        steps = await play(mesh, [1, 2])
        await mesh.assign(7, a.executor)
        assert [1, 3] == await answers(mesh, steps)
        failing = mesh.submission(7, value(-1))
        await mesh.submit(failing)
        assert ["no"] == await answers(mesh, [failing])
        assert ("f", 0) == ((await mesh.record(7))["st"], await inbox_length(mesh, a))


@pytest.mark.parametrize("shards_lost", [0, 1], ids=["", "and Redis fails once"])
async def test_what_was_kept_for_a_state_goes_when_its_sequence_ends_between_two_loads_of_its_model(
    mesh: ScriptedMesh, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, shards_lost: int
) -> None:
    monkeypatch.setattr(serving, "LINGER_S", 0)
    monkeypatch.setattr(serving, "CLAIM_INTERVAL_S", 0.01)
    drain, failures = Scripts.drain_whole, [RedisConnectionError("gone")] * shards_lost

    async def may_fail(scripts: Scripts, executor: ExecutorId, **where: Any) -> None:
        if failures:
            raise failures.pop()
        await drain(scripts, executor, **where)

    monkeypatch.setattr(Scripts, "drain_whole", may_fail)
    life = make_model(MODEL, {"sequence_recovery": "replay"})
    async with life("a") as a, life("b"):
        steps = await play(mesh, [1, 2])
        await mesh.assign(7, a.executor)
        assert [1, 3] == await answers(mesh, steps)
        a.repository.unload("sum")
        await a.registration.announce(Applied("1-0"))
        await a.changed.wait()
        await a.registration.announce(Applied("1-0"))
        assert not a.registration.serving.holdings
        assert ("l", 2) == ((await mesh.record(7))["st"], await inbox_length(mesh, a))

        sequence = mesh.sequence(7)
        await mesh.redis.delete(mesh.keys.sequence(sequence).idle)
        shard = mesh.keys.shard_of(sequence)
        call = mesh.scripts.expire([sequence], LedShard(shard, mesh.model, mesh.term), tombstone_ms=60_000)
        assert [True] == await mesh.scripts.run(call)
        async with asyncio.timeout(60):
            while await inbox_length(mesh, a):
                await asyncio.sleep(0.01)


async def test_a_model_hears_of_every_sequence_that_has_left_and_before_anything_else_of_it(
    mesh: ScriptedMesh, make_model: MakeModel, tmp_path: Path
) -> None:
    """However it left; and a sequence that goes on has its state."""
    log = tmp_path / "told"
    log.touch()
    life = make_model((TELLING + RELEASE).replace("LOG", str(log)), {})
    heard: list[str] = []

    async def hears(*words: str) -> None:
        heard.extend(words)
        await until(lambda: len(log.read_text().splitlines()) >= len(heard))
        assert heard == log.read_text().splitlines()

    async def step(sequence: int, number: int, flags: StepFlag = NONE, owner: Running | None = None) -> int | str:
        submission = mesh.submission(sequence, value(number), flags)
        await mesh.submit(submission)
        if owner is not None:
            await mesh.assign(sequence, owner.executor)
        return told(await mesh.reply(submission))

    async with life("a") as a:
        for _ in range(2):
            assert 5 == await step(7, 5, START, a)
            assert 6 == await step(7, 1, END)
        await hears(*["start 7", "release 7"] * 2)
        assert "no" == await step(7, -1, START, a)
        await hears("release 7")

        assert 5 == await step(8, 5, START, a)
        sequence = mesh.sequence(8)
        await mesh.redis.delete(mesh.keys.sequence(sequence).idle)
        shard = mesh.keys.shard_of(sequence)
        call = mesh.scripts.expire([sequence], LedShard(shard, mesh.model, mesh.term), tombstone_ms=1000)
        assert [True] == await mesh.scripts.run(call)
        await hears("start 8", "release 8")

        assert 5 == await step(9, 5, START | StepFlag.PAGEABLE, a)
        assert VacateCode.VACATED is await mesh.vacate(9)
        await hears("start 9", "release 9")
        assert 6 == await step(9, 1, NONE, a)
        assert VacateCode.VACATED is await mesh.vacate(9, moving=True)
        await mesh.assign(9, a.executor)
        await hears("restore 9", "release 9", "restore 9")
        assert 8 == await step(9, 2)
    # Its lease is over: the engine would go on.
    await hears("release 9")
    await mesh.take_over(a.executor, lost=True)
    async with life("b") as b:
        assert 9 == await step(9, 1, END, b)
        await hears("restore 9", "release 9")


@pytest.mark.parametrize(("source", "parameters"), WAYS)
async def test_a_start_drops_what_was(
    mesh: ScriptedMesh, make_model: MakeModel, source: str, parameters: Mapping[str, object]
) -> None:
    """The log begins anew with it, and what a methods' checkpoint held of before does not come back."""
    life = make_model(source, parameters)
    async with life("a") as a:
        steps = [mesh.submission(7, value(n), START if n in (1, 20) else NONE) for n in (1, 2, 3, 4, 20, 5)]
        for step in steps:
            await mesh.submit(step)
        await mesh.assign(7, a.executor)
        assert [1, 3, 6, 10, 20, 25] == await answers(mesh, steps)
        assert (2 if parameters.get("sequence_recovery") else 6 % 4 if parameters else 0) == await inbox_length(mesh, a)
    late = mesh.submission(7, value(5))
    await mesh.submit(late)
    anew = mesh.submission(7, value(40), START | END)
    await mesh.submit(anew)

    await mesh.take_over(a.executor, lost=True)
    async with life("b") as b:
        await mesh.assign(7, b.executor)
        assert [30, 40] == await answers(mesh, [late, anew])
        assert "e" == (await mesh.record(7))["st"]


@pytest.mark.parametrize(("source", "parameters"), WAYS)
async def test_what_is_replayed_is_neither_answered_nor_counted(
    mesh: ScriptedMesh, make_model: MakeModel, source: str, parameters: Mapping[str, object]
) -> None:
    life = make_model(source, parameters)
    async with life("a") as a:
        steps = await play(mesh, [1, 2, 3])
        await mesh.assign(7, a.executor)
        assert [1, 3, 6] == await answers(mesh, steps)
    step = mesh.submission(7, value(4), END)
    await mesh.submit(step)
    await mesh.take_over(a.executor, lost=True)
    async with life("b") as b:
        await mesh.assign(7, b.executor)
        assert 10 == told(await mesh.reply(step))

    tallies, load = Tallies(mesh.scripts, mesh.keys), ModelLoad("sum", "1", "0")
    counts = (await tallies.read([load]))[load]
    executions = sum(count for name, count in counts.items() if name.startswith("batch:") and name.endswith(":count"))
    assert (4, 4, 4) == (counts["success_count"], counts["inference_count"], executions)
    assert [step.token for step in (*steps, step)] == mesh.heard


async def test_a_cancelled_step_ends_the_log_and_a_start_behind_it_begins_another(
    mesh: ScriptedMesh, make_model: MakeModel
) -> None:
    life = make_model(MODEL, {"sequence_recovery": "replay"})
    async with life("a") as a:
        steps = await play(mesh, [1, 2])
        await mesh.assign(7, a.executor)
        assert [1, 3] == await answers(mesh, steps)
    gone, behind, anew = (mesh.submission(7, value(n), START if n == 30 else NONE) for n in (10, 20, 30))
    accepted = await mesh.submit(gone)
    await mesh.submit(behind)
    await mesh.cancel(gone, accepted)
    await mesh.take_over(a.executor, lost=True)
    async with life("b") as b:
        await mesh.assign(7, b.executor)
        await mesh.submit(anew)
        replies = [await mesh.reply(step) for step in (gone, behind, anew)]
        assert ["CANCELLED", "CANCELLED", ""] == [reply.error_code for reply in replies]
    step = mesh.submission(7, value(3), END)
    await mesh.submit(step)
    await mesh.take_over(b.executor, lost=True)
    async with life("c") as c:
        await mesh.assign(7, c.executor)
        assert 33 == told(await mesh.reply(step))


@pytest.mark.leaves_sequences
@pytest.mark.parametrize(("log_steps", "expected"), [(1000, 7), (1, "lost")])
async def test_a_load_of_equal_files_goes_on_from_a_log_if_that_is_complete(
    mesh: ScriptedMesh, make_model: MakeModel, tmp_path: Path, log_steps: int, expected: int | str
) -> None:
    life = make_model(MODEL, {"sequence_recovery": "replay", "sequence_log_steps": log_steps})
    async with life("a") as a:
        steps = await play(mesh, [1, 2])
        await mesh.assign(7, a.executor)
        assert [1, 3] == await answers(mesh, steps)

        os.utime(tmp_path / "models" / "sum" / "1" / "model.py", (1, 1))
        (before,) = a.repository.loaded["sum"].versions
        assert before not in a.repository.load("sum", generation="second").versions
        await a.registration.announce(Applied())

        step = mesh.submission(7, value(4))
        await mesh.submit(step)
        assert [expected] == await answers(mesh, [step])


@pytest.mark.parametrize("bound", [{"sequence_log_steps": 3}, {"sequence_log_bytes": 300}])
async def test_beyond_the_logs_bound_a_sequence_goes_on_and_is_lost_with_its_executor(
    mesh: ScriptedMesh, make_model: MakeModel, caplog: pytest.LogCaptureFixture, bound: Mapping[str, object]
) -> None:
    """Said once, counted once; and a START begins a new log."""
    life = make_model(MODEL, {"sequence_recovery": "replay", **bound})
    async with life("a") as a:
        steps = await play(mesh, [1, 2, 3, 4, 5, 6])
        await mesh.assign(7, a.executor)
        assert [1, 3, 6, 10, 15, 21] == await answers(mesh, steps)
        assert 0 == await inbox_length(mesh, a)
        assert "0" == (await mesh.record(7))["du"]
    assert ["sequence not recoverable: its log is full"] == [
        record.message for record in caplog.records if "log is full" in record.message
    ]
    lost = mesh.submission(7, value(1))
    await mesh.submit(lost)
    anew = mesh.submission(7, value(8), START)
    await mesh.submit(anew)

    await mesh.take_over(a.executor, lost=True)
    async with life("b") as b:
        await mesh.assign(7, b.executor)
        lost_reply = await mesh.reply(lost)
        assert "lost" == lost_reply.reason
        assert f"{next(iter(bound.values()))} " in lost_reply.error, "which bound it was"
        assert "raise the model's parameters sequence_log_steps and sequence_log_bytes" in lost_reply.error
        assert 8 == told(await mesh.reply(anew))
        assert "1" == (await mesh.record(7))["du"]
    await mesh.take_over(b.executor, lost=True)
    step = mesh.submission(7, value(1), END)
    await mesh.submit(step)
    async with life("c") as c:
        await mesh.assign(7, c.executor)
        assert 9 == told(await mesh.reply(step))
    tallies, load = Tallies(mesh.scripts, mesh.keys), ModelLoad("sum", "1", "0")
    assert 1 == (await tallies.read([load]))[load]["full_log_count"]


async def test_an_idle_sequence_whose_log_was_full_is_lost_at_once(mesh: ScriptedMesh, make_model: MakeModel) -> None:
    life = make_model(MODEL, {"sequence_recovery": "replay", "sequence_log_steps": 1})
    async with life("a") as a:
        steps = await play(mesh, [1, 2])
        await mesh.assign(7, a.executor)
        assert [1, 3] == await answers(mesh, steps)

    await mesh.take_over(a.executor, lost=True)

    assert SubmitCode.LOST is (await mesh.submit(mesh.submission(7, value(1)))).code


async def test_a_state_that_cannot_be_saved_costs_its_own_sequence_alone(
    mesh: ScriptedMesh, make_model: MakeModel
) -> None:
    """The caller of that very step hears why; those behind it that the sequence is lost, also from the next owner."""
    life = make_model(MODEL + METHODS, {})
    async with life("a") as a:
        neighbour = await play(mesh, [1, 2, 3], correlation_id=8)
        steps = await play(mesh, [600, 66, 1])
        await mesh.assign(8, a.executor, slot=1)
        await mesh.assign(7, a.executor)
        first, failed, behind = [await mesh.reply(step) for step in steps]
        assert (600, "lost", "lost") == (told(first), failed.reason, behind.reason)
        assert ("INTERNAL", True) == (failed.error_code, "ValueError: the number of the beast" in failed.error)
        assert [1, 3, 6] == await answers(mesh, neighbour)
    assert SubmitCode.LOST is (await mesh.submit(mesh.submission(7, value(1)))).code
    await mesh.take_over(a.executor, lost=True)
    last = mesh.submission(8, value(4), END)
    await mesh.submit(last)
    async with life("b") as b:
        await mesh.assign(8, b.executor)
        assert 10 == told(await mesh.reply(last))


async def test_a_state_that_cannot_be_taken_back_costs_its_own_sequence_alone(
    mesh: ScriptedMesh, make_model: MakeModel
) -> None:
    life = make_model(MODEL + METHODS, {})
    async with life("a") as a:
        steps = [*await play(mesh, [999]), *await play(mesh, [5], correlation_id=8)]
        await mesh.assign(7, a.executor)
        await mesh.assign(8, a.executor, slot=1)
        assert [999, 5] == await answers(mesh, steps)
    bad, good = mesh.submission(7, value(1)), mesh.submission(8, value(1), END)
    for step in (bad, good):
        await mesh.submit(step)
    await mesh.take_over(a.executor, lost=True)
    async with life("b") as b:
        await mesh.assign(7, b.executor)
        await mesh.assign(8, b.executor, slot=1)
        assert ["lost", 6] == await answers(mesh, [bad, good])
        assert "o" == (await mesh.record(7))["st"]
        record = b.repository.loaded["sum"].record
        assert record.config.state_methods
        assert "its methods checkpoint and restore carry the state of its sequences" in record.config.notes


async def test_a_step_that_its_owners_were_lost_with_is_given_up_without_replaying_the_others(
    mesh: ScriptedMesh, make_model: MakeModel
) -> None:
    """The replay may be what kills them. What it would have replayed leaves the inbox."""
    life = make_model(MODEL, {"sequence_recovery": "replay"})
    async with life("a") as a:
        steps = await play(mesh, [1, 2, 3])
        await mesh.assign(7, a.executor)
        assert [1, 3, 6] == await answers(mesh, steps)
    record = mesh.keys.sequence(mesh.sequence(7)).record
    await mesh.redis.hset(record, "gu", 4)
    step = mesh.submission(7, value(4))
    await mesh.submit(step)
    await mesh.take_over(a.executor, lost=True)
    async with life("b") as b:
        await mesh.assign(7, b.executor)
        assert "lost" == told(await mesh.reply(step))
        assert 0 == await inbox_length(mesh, b)
        assert "o" == (await mesh.record(7))["st"]
