"""Stateless work on real executors and the real server: batches, order, policies; executors die, leave and wake."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.lease import serving
from executor.lease.control import Applied
from executor.sequences.inbox import Inbox
from executor.stateless import work_source
from executor.stateless.work_source import takers_of
from shared.contract.batch_shape import Queueing
from shared.contract.ids import ExecutorId, GatewayId
from shared.contract.limits import LOST_EXECUTORS_MAX
from shared.contract.messages import UNREADABLE, InferMessage, ReplyMessage, encode
from shared.contract.response_cache import entry_name
from shared.contract.tensors import from_numpy, to_numpy
from shared.statistics.meter import Phase
from shared.statistics.tally import ModelLoad
from shared.store.commands import Redis
from shared.store.connections.homes import MESH_TAG, tag_of
from shared.store.connections.link import Link, SharedLinks
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace, WorkKeys
from shared.store.membership import Membership
from shared.store.script_sender import Call
from shared.store.work_scripts import WorkItem, WorkScripts
from tests.embedded_cluster import EmbeddedCluster
from tests.executor.living import SHARDS, Running, living, scripted
from tests.executor.patience import PATIENCE_S, until
from tests.executor.work_gate import Gate, new_gate
from tests.scripted_mesh import GATEWAY, ScriptedMesh

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils
from tests.executor import work_gate

class TritonPythonModel:
    '''Its input, doubled.'''

    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests]
        work_gate.gate.enter([int(value[0, 0]) for value in values])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", 2 * value)]) for value in values]
"""
CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "INPUT" data_type: TYPE_INT64 dims: [ -1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT64 dims: [ -1 ] } ]
"""
LOAD = ModelLoad("work", "1", "0")
MANY = 50


class Callers:
    """Sends requests as a gateway would, and reads their answers. A request is known by its value."""

    def __init__(self, mesh: ScriptedMesh) -> None:
        self.mesh = mesh
        self.redis = mesh.redis
        self.keys = mesh.keys.work_queue(mesh.model, "1")
        self._work = WorkScripts(mesh.keys)

    async def send(self, *values: int, size: int = 1, cache_key: str = "", **fields: Any) -> list[bool | bytes]:
        """Puts requests in the queue. size: elements of the input."""
        items: list[WorkItem] = []
        for value in values:
            tensor = from_numpy("INPUT", np.full((1, size), value, np.int64))
            message = InferMessage(
                self.mesh.model, "1", f"r{value}", 0, (tensor,), cache_key=cache_key, cache_bytes=1 << 20
            )
            token = f"{value}"
            items.append(
                WorkItem(self.mesh.model, "1", GATEWAY, token, encode(message), Queueing(shape=f"{size}", **fields))
            )
        return await self.mesh.scripts.run(self._work.enqueue(items, bound=0))

    async def withdraw(self, *values: int) -> list[bool]:
        """What a gateway does when callers leave."""
        reply = encode(ReplyMessage("1", error_code="CANCELLED"))
        call = self._work.withdraw(LOAD, GatewayId(GATEWAY), [f"{value}" for value in values], reply=reply)
        return await self.mesh.scripts.run(call)

    async def reply(self, value: int) -> ReplyMessage:
        return await self.mesh.reply_to(f"{value}")

    async def doubles(self, *values: int) -> list[int]:
        """The answers, which must be successes."""
        replies = [await self.reply(value) for value in values]
        assert [""] * len(values) == [reply.error for reply in replies]
        return [int(to_numpy(reply.outputs[0])[0, 0]) for reply in replies]

    async def holders(self) -> set[str]:
        """Executors that hold something."""
        return {holder.decode() for holder in await self.redis.hvals(self.keys.held)}


Life = Callable[[str], AbstractAsyncContextManager[Running]]


@pytest.fixture
def gate() -> Iterator[Gate]:
    with new_gate() as gate:
        yield gate


@pytest.fixture
def batching() -> str:
    """The model's batching; a test overrides it by parametrising."""
    return "dynamic_batching { }"


@pytest.fixture
def strategy() -> str:
    """The model's batch strategy, "" for none; a test overrides it by parametrising."""
    return ""


@pytest.fixture
def models(tmp_path: Path, batching: str, strategy: str) -> Path:
    version = tmp_path / "models" / "work" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL)
    (version.parent / "config.pbtxt").write_text(CONFIG + batching)
    if strategy:
        (version / "batchstrategy.py").write_text(strategy)
    return tmp_path / "models"


@pytest.fixture
async def callers(redis: Redis, key_prefix: str) -> AsyncIterator[Callers]:
    async with scripted(redis, key_prefix, "work") as mesh:
        yield Callers(mesh)


@pytest.fixture
async def executor(redis_url: str, key_prefix: str, models: Path, gate: Gate) -> Life:
    """Runs executors of the test's model, each with its own engines, as its context lasts."""

    @asynccontextmanager
    async def life(name: str) -> AsyncGenerator[Running]:
        async with living(redis_url, key_prefix, models, "work", name) as running:
            try:
                yield running
            finally:
                gate.release()

    return life


class TestBatches:
    async def test_what_waits_together_runs_together_up_to_the_size_of_a_batch(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        gate.hold(1)
        async with executor("a"):
            await callers.send(1)
            await until(lambda: gate.began(1), "the first runs")
            await callers.send(2, 3, 4, 5, 6)
            gate.release()

            assert [2, 4, 6, 8, 10, 12] == await callers.doubles(1, 2, 3, 4, 5, 6)
        assert [[1], [2, 3, 4, 5], [6]] == gate.batches

    @pytest.mark.parametrize("phase", [Phase.QUEUE, Phase.COMPUTE])
    async def test_every_request_of_a_batch_is_measured(
        self, callers: Callers, executor: Life, phase: Phase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("shared.store.metering.METERING_INTERVAL_S", 3600)
        async with executor("a") as a:
            await callers.send(1, 2, 3)
            await callers.doubles(1, 2, 3)
            (meter,) = [meter for load, meter in a.registration.serving.meters if load == LOAD]

        measured = meter.phase(phase).take()
        assert 3 == sum(count for field, count in measured.items() if not field.endswith(":sum"))

    @pytest.mark.parametrize("batching", ["response_cache { enable: true }"])
    async def test_an_answer_is_stored_in_the_response_cache_if_its_request_named_a_key(
        self, callers: Callers, executor: Life
    ) -> None:
        cache = callers.mesh.keys.cache(callers.mesh.keys.home_shard("work"))
        async with executor("a") as a:
            await callers.send(1)
            await callers.send(2, cache_key="k")
            assert [2, 4] == await callers.doubles(1, 2)
            (served,) = a.registration.serving.in_use
            stored = await callers.redis.hkeys(cache.entries)
            await callers.redis.delete(*cache)

        assert [entry_name(served.cache_scope, LOAD.generation, "k").encode()] == stored

    async def test_requests_of_other_shapes_do_not_share_a_batch(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        gate.hold(1)
        async with executor("a"):
            await callers.send(1)
            await until(lambda: gate.began(1), "the first runs")
            await callers.send(2, 3)
            await callers.send(4, size=2)
            await callers.send(5)
            gate.release()
            await callers.doubles(1, 2, 3, 4, 5)

        assert [[1], [2, 3], [4], [5]] == gate.batches

    @pytest.mark.parametrize("batching", [""])
    async def test_without_dynamic_batching_each_request_runs_alone(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        await callers.send(1, 2, 3)
        async with executor("a"):
            await callers.doubles(1, 2, 3)

        assert [[1], [2], [3]] == gate.batches

    @pytest.mark.parametrize("batching", [""])
    async def test_no_more_is_taken_than_the_instances_run_however_much_waits(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        await callers.send(1, 2, 3, 4, 5, 6)
        gate.hold(4)
        async with executor("a"):
            await until(lambda: gate.began(4), "the fourth runs")
            await asyncio.sleep(0.05)
            held = await callers.redis.hkeys(callers.keys.held)
            gate.release()
            await callers.doubles(1, 2, 3, 4, 5, 6)

        assert [f"{GATEWAY}/4".encode()] == held

    @pytest.mark.parametrize("batching", ["dynamic_batching { preferred_batch_size: [ 2 ] }"])
    async def test_the_largest_preferred_size_that_was_reached_runs(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        await callers.send(1, 2, 3, 4, 5)
        async with executor("a"):
            await callers.doubles(1, 2, 3, 4, 5)

        assert [[1, 2], [3, 4], [5]] == gate.batches

    @pytest.mark.parametrize(
        "batching",
        [
            "dynamic_batching { max_queue_delay_microseconds: 60000000 }",
            "dynamic_batching { preferred_batch_size: [ 3 ], max_queue_delay_microseconds: 60000000 }",
        ],
    )
    async def test_a_batch_waits_until_it_is_full_or_has_a_preferred_size(
        self, callers: Callers, executor: Life, gate: Gate, batching: str
    ) -> None:
        size = 3 if "preferred" in batching else 4
        async with executor("a"):
            for value in range(1, size + 1):
                await callers.send(value)
            await callers.doubles(*range(1, size + 1))

        assert [list(range(1, size + 1))] == gate.batches

    @pytest.mark.parametrize(
        "batching", ["dynamic_batching { preferred_batch_size: [ 2 ], max_queue_delay_microseconds: 60000000 }"]
    )
    async def test_what_gathered_behind_a_running_batch_leaves_nobody_to_wait(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        gate.hold(1)
        async with executor("a"):
            await callers.send(1, 2)
            await until(lambda: gate.began(1), "the first run")
            await callers.send(3, 4, 5)
            gate.release()
            await callers.doubles(1, 2, 3, 4, 5)

        assert [[1, 2], [3, 4, 5]] == gate.batches

    @pytest.mark.parametrize("batching", ["dynamic_batching { max_queue_delay_microseconds: 20000 }"])
    async def test_past_the_delay_it_runs_with_what_there_is(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        async with executor("a"):
            await callers.send(1, 2)
            await callers.doubles(1, 2)

        assert [[1, 2]] == gate.batches

    async def test_the_first_batch_can_be_held_back_for_a_test(
        self, callers: Callers, executor: Life, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "3")
        async with executor("a"):
            for value in (1, 2, 3):
                await callers.send(value)
            await callers.doubles(1, 2, 3)
            await callers.send(4)
            await callers.doubles(4)

        assert [[1, 2, 3], [4]] == gate.batches


class TestOrder:
    @pytest.mark.parametrize(
        "batching", ["dynamic_batching { priority_levels: 3, default_priority_level: 2, preferred_batch_size: [ 1 ] }"]
    )
    async def test_lower_levels_run_first_whichever_executor_is_free(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        gate.hold(1, 2)
        async with executor("a"), executor("b"):
            await callers.send(1, 2, level=2)
            await until(lambda: gate.began(1) and gate.began(2), "both are busy")
            await callers.send(6, 7, level=3)
            await callers.send(4, 5, level=2)
            await callers.send(3, level=1)
            gate.release(1)
            await callers.doubles(1, 3, 4, 5, 6, 7)
            gate.release(2)
            await callers.doubles(2)

        assert [[3], [4], [5], [6], [7]] == gate.batches[2:]

    @pytest.mark.parametrize("batching", ["dynamic_batching { preserve_ordering: true, preferred_batch_size: [ 1 ] }"])
    async def test_answers_leave_in_request_order_over_all_executors(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        gate.hold(1)
        async with executor("a"), executor("b"):
            await callers.send(1, ordered=True)
            await until(lambda: gate.began(1), "one executor is busy")
            await callers.send(2, 3, ordered=True)
            await until(lambda: gate.began(3), "the other has run the rest")
            gate.release()
            await callers.doubles(1, 2, 3)

            assert ["1", "2", "3"] == callers.mesh.heard


class TestPolicies:
    async def test_a_withdrawn_request_does_not_run(self, callers: Callers, executor: Life, gate: Gate) -> None:
        gate.hold(1)
        async with executor("a"):
            await callers.send(1)
            await until(lambda: gate.began(1), "the instance is busy")
            await callers.send(2, 3)

            assert [False, True] == await callers.withdraw(1, 2)
            gate.release()
            await callers.doubles(1, 3)

        assert [[1], [3]] == gate.batches


STRATEGY = """
def model_batcher_initialize(model):
    return {"batches": 0}

def model_batch_initialize(batcher):
    return []

def model_batch_include_request(request, batch):
    value = int(request.as_numpy("INPUT")[0, 0])
    if value == 13:
        raise ValueError("thirteen")
    if value == 14:
        raise SystemExit("fourteen")
    batch.append(value)
    return sum(batch) <= 5

def model_batch_finalize(batch):
    assert batch is not None

def model_batcher_finalize(batcher):
    pass
"""


@pytest.mark.parametrize("strategy", [STRATEGY])
class TestStrategies:
    async def test_a_strategy_ends_a_batch_and_a_request_alone_runs_whatever_it_says(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        await callers.send(1, 2, 3, 9, 1001)
        async with executor("a"):
            await callers.doubles(1, 2, 3, 9, 1001)

        assert [[1, 2], [3], [9], [1001]] == gate.batches

    async def test_the_rules_of_the_dynamic_batcher_still_hold(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        await callers.send(-1, -2, -3, -4, -5)
        async with executor("a"):
            await callers.doubles(-1, -2, -3, -4, -5)

        assert [[-1, -2, -3, -4], [-5]] == gate.batches

    async def test_a_request_on_which_it_raises_hears_of_it_and_nobody_else(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        await callers.send(1, 13, 2)
        async with executor("a"):
            failed = await callers.reply(13)

            assert "INTERNAL" == failed.error_code
            assert failed.error == (
                "model_batch_include_request of the batch strategy of model 'work' failed: ValueError: thirteen"
            )
            await callers.doubles(1, 2)
        assert [[1, 2]] == gate.batches

    async def test_one_that_leaves_the_process_is_an_error_of_the_request_and_the_executor_lives(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        await callers.send(1, 14, 2)
        async with executor("a"):
            failed = await callers.reply(14)

            assert failed.error == (
                "model_batch_include_request of the batch strategy of model 'work' failed: SystemExit: fourteen"
            )
            await callers.doubles(1, 2)
            assert [[1, 2]] == gate.batches

    @pytest.mark.parametrize("damaged", [False, True])
    async def test_a_request_whose_message_is_lost_hears_of_it_and_nobody_behind_it_waits(
        self, callers: Callers, executor: Life, gate: Gate, *, damaged: bool
    ) -> None:
        await callers.send(1, 2, 3)
        if damaged:
            await callers.redis.hset(callers.keys.messages, f"{GATEWAY}/2", "no message")
        else:
            await callers.redis.hdel(callers.keys.messages, f"{GATEWAY}/2")
        async with executor("a"):
            lost = await callers.reply(2)

            assert ("INTERNAL", UNREADABLE) == (lost.error_code, lost.error)
            assert [2, 6] == await callers.doubles(1, 3)
        assert [[1, 3]] == gate.batches


def dozers_of(executor: Any) -> dict[str, Any]:
    (part,) = executor.registration.serving._dozing._parts.values()
    return part._dozers


class TestQuietModels:
    async def test_many_of_them_share_connections_and_cost_no_calls(
        self,
        redis_url: str,
        key_prefix: str,
        models: Path,
        callers: Callers,
        gate: Gate,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        others = [f"quiet{number}" for number in range(MANY - 1)]
        for other in others:
            shutil.copytree(models / "work", models / other)
        made: set[str] = set()
        claims: list[int] = []

        async def noting(links: SharedLinks, queues: Sequence[WorkKeys]) -> list[set[ExecutorId]]:
            claims.append(len(queues))
            return await takers_of(links, queues)

        monkeypatch.setattr(serving, "takers_of", noting)
        before = {client["id"] for client in await callers.redis.client_list()}
        async with living(redis_url, key_prefix, models, "work", "a", *others) as a:
            connections = a.registration._connections
            run_all = connections.scripts.run_all

            async def sent(calls: Sequence[Call[Any]], link: Link | None = None) -> list[Any]:
                made.update(call.script for call in calls)
                return await run_all(calls, link)

            monkeypatch.setattr(connections.scripts, "run_all", sent)
            await until(lambda: len(dozers_of(a)) == MANY, "all of them doze")
            made.clear()
            claims.clear()
            await until(lambda: len(claims) >= 3, "dead executors were looked for several times")
            clients = {client["id"] for client in await callers.redis.client_list()} - before

            assert {MANY} == set(claims)
            assert not any(script.startswith("work_") for script in made)
            assert len(clients) < MANY
            await callers.send(1)
            assert [2] == await callers.doubles(1)

    async def test_one_that_dozes_again_is_woken_again(
        self, callers: Callers, executor: Life, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(work_source, "VAIN_POPS_MAX", 1)
        async with executor("a") as a:
            dozers = dozers_of(a)
            for value in (1, 2):
                await until(lambda: len(dozers) == 1, "it dozes")
                await callers.send(value)
                assert [2 * value] == await callers.doubles(value)


class TestExecutors:
    async def test_what_a_dead_executor_held_is_run_by_another_and_answered_once(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        gate.hold(1)
        async with executor("a") as a:
            await callers.send(1, 2)
            await until(lambda: gate.began(1), "a has taken them")
            assert {a.executor} == await callers.holders()
            # It dies: its loops stop, and its lease ends.
            a.task.cancel()
            await asyncio.gather(a.task, return_exceptions=True)
            await callers.redis.delete(callers.mesh.keys.executor_lease(a.registration.executor))

            async with executor("b") as b:
                await until(lambda: gate.batches.count([1, 2]) == 2, "b runs them again, at their old places")
                assert {b.executor} == await callers.holders()
                gate.release()
                assert [2, 4] == await callers.doubles(1, 2)

    async def test_a_request_that_kills_whoever_runs_it_is_answered_in_the_end(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        gate.hold(1)
        await callers.send(1)
        async with AsyncExitStack() as lives:
            for life in range(1, LOST_EXECUTORS_MAX + 1):
                one = await lives.enter_async_context(executor("a"))
                await until(lambda: gate.batches.count([1]) == life, "it runs once more")  # noqa: B023 - at once
                one.task.cancel()
                await asyncio.gather(one.task, return_exceptions=True)
                await callers.redis.delete(callers.mesh.keys.executor_lease(one.registration.executor))

            await lives.enter_async_context(executor("b"))
            await callers.send(2)
            refused = await callers.reply(1)
            gate.release()
            assert [4] == await callers.doubles(2)
        assert "INTERNAL" == refused.error_code
        assert "request to model 'work' was given up: 3 executors were lost while they ran it" == refused.error
        assert LOST_EXECUTORS_MAX == gate.batches.count([1])

    async def test_what_a_new_executor_holds_stays_with_it_though_another_looks_for_dead_ones_meanwhile(
        self, callers: Callers, executor: Life, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A process that was frozen while it looked put the work of the living back, as if they were lost."""
        looks, freed = list[SharedLinks](), asyncio.Event()

        async def frozen(links: SharedLinks, queues: Sequence[WorkKeys]) -> list[set[ExecutorId]]:
            looks.append(links)
            await freed.wait()
            return await takers_of(links, queues)

        gate.hold(1, 2)
        async with executor("a") as a:
            await callers.send(1)
            await until(lambda: gate.began(1), "a has taken it")
            monkeypatch.setattr(serving, "takers_of", frozen)
            await until(lambda: bool(looks), "a looks for dead executors")
            await callers.send(2)
            async with executor("b") as b:
                await until(lambda: gate.began(2), "b has taken the other one")
                freed.set()
                links = a.registration._connections.links
                await until(lambda: looks.count(links) > 1, "a has acted on what it saw")

                assert {a.executor, b.executor} == await callers.holders()
                gate.release()
                assert [2, 4] == await callers.doubles(1, 2)
        assert [[1], [2]] == gate.batches

    async def test_an_executor_takes_nothing_before_it_has_its_lease(
        self, callers: Callers, executor: Life, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Others would put back what it holds."""
        register, before = Membership.register, list[int]()

        async def slowly(*arguments: Any, **named: Any) -> None:
            for _ in range(100):
                await asyncio.sleep(0.001)
            before.append(len(gate.batches))
            await register(*arguments, **named)

        monkeypatch.setattr(Membership, "register", slowly)
        await callers.send(1)
        async with executor("a"):
            assert [2] == await callers.doubles(1)
        assert [0] == before

    async def test_an_executor_whose_work_was_given_away_answers_nothing(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        """It was frozen for longer than its lease: what it computed when it wakes is refused."""
        gate.hold(1)
        async with executor("a") as a:
            await callers.send(1)
            await until(lambda: gate.began(1), "a has taken it")
            async with executor("b"):
                handed_back = WorkScripts(callers.mesh.keys).requeue(LOAD, a.registration.executor)
                assert 1 == await callers.mesh.scripts.run(handed_back)
                await until(lambda: gate.batches.count([1]) == 2, "b runs it again")
                gate.release()

                # `ScriptedMesh` fails on a second answer.
                assert [2] == await callers.doubles(1)
                await a.registration.leave()
                await callers.send(2)
                assert [4] == await callers.doubles(2)

    async def test_a_leaving_executor_answers_what_it_runs_and_holds_nothing(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        gate.hold(1)
        async with executor("a") as a:
            await callers.send(1)
            await until(lambda: gate.began(1), "a has taken it")
            await callers.send(2, 3)
            leaving = asyncio.create_task(a.registration.leave())
            gate.release()
            await leaving

            assert [2] == await callers.doubles(1)
            assert set() == await callers.holders()
            assert 0 == await callers.redis.hlen(callers.keys.takers)
            async with executor("b"):
                assert [4, 6] == await callers.doubles(2, 3)

    @pytest.mark.parametrize("batching", [""])
    async def test_a_leaving_executor_takes_nothing_more_however_much_waits(
        self, callers: Callers, executor: Life, gate: Gate
    ) -> None:
        values = range(1, MANY + 1)
        await callers.send(*values)
        gate.hold(4)
        async with executor("a") as a:
            await until(lambda: gate.began(4), "the fourth runs")
            leaving = asyncio.create_task(a.registration.leave())
            gate.release()
            await leaving
            ran = len(gate.batches)
            async with executor("b"):
                await callers.doubles(*values)

        assert ran < MANY // 2
        assert [[value] for value in values] == gate.batches, "none of them ran twice"

    @pytest.mark.parametrize("loaded", ["work", "other"])
    async def test_an_executor_that_is_to_leave_takes_nothing_for_a_model_that_is_loaded_meanwhile(
        self, redis_url: str, callers: Callers, executor: Life, gate: Gate, models: Path, loaded: str
    ) -> None:
        """It may stay for hours, until the last sequence has ended that it alone can serve."""
        gate.hold(1)
        keys = callers.mesh.keys
        called = Callers(ScriptedMesh(callers.redis, keys, loaded))
        await called.mesh.open()
        async with executor("a") as a:
            await a.registration.serving.close({"sums"})
            if loaded != "work":
                shutil.copytree(models / "work", models / loaded)
            (models / loaded / "1" / "model.py").write_text(MODEL + "# mended")
            a.repository.load(loaded, generation="second")
            await a.registration.announce(Applied())
            await called.send(1)
            async with living(redis_url, keys.prefix, models, loaded, "b") as b:
                await until(lambda: gate.began(1), "it is run")

                assert {b.executor} == await called.holders()
                gate.release()
                assert [2] == await called.doubles(1)

    async def test_what_hangs_in_one_load_is_run_by_the_next(
        self, callers: Callers, executor: Life, gate: Gate, models: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(serving, "RETURN_S", 0.1)
        gate.hold(1)
        async with executor("a") as a:
            await callers.send(1)
            await until(lambda: gate.began(1), "it runs")
            (models / "work" / "1" / "model.py").write_text(MODEL + "# mended")
            a.repository.load("work", generation="second")
            async with asyncio.timeout(PATIENCE_S):
                await a.registration.announce(Applied())
            await until(lambda: gate.batches.count([1]) == 2, "the next load runs it")
            gate.release()

            # `ScriptedMesh` fails on a second answer.
            assert [2] == await callers.doubles(1)
            await callers.send(2)
            assert [4] == await callers.doubles(2)

    async def test_a_load_has_no_inbox_read_again(
        self, executor: Life, models: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its requests are in no inbox; those of sequences may be many, and were all taken in before."""
        again: list[Inbox] = []

        def read_again(inbox: Inbox) -> None:
            again.append(inbox)

        monkeypatch.setattr(Inbox, "read_again", read_again)
        async with executor("a") as a:
            (models / "work" / "1" / "model.py").write_text(MODEL + "# mended")
            a.repository.load("work", generation="second")
            await a.registration.announce(Applied())

        assert [] == again

    async def test_what_comes_for_a_version_that_nobody_serves_any_more_is_refused(
        self, callers: Callers, executor: Life
    ) -> None:
        async with executor("a") as a:
            a.repository.unload("work")
            await a.registration.announce(Applied())
            # It lingers for gateways that do not know yet; then it is gone, and the mesh is told.
            await a.changed.wait()
            await a.registration.announce(Applied())
            await callers.send(1)

            refused = await callers.reply(1)

        assert ("NOT_FOUND", "Request for unknown model: 'work' has no available versions") == (
            refused.error_code,
            refused.error,
        )

    async def test_a_version_that_was_unloaded_long_ago_is_not_looked_after_any_more(
        self, callers: Callers, executor: Life, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An executor may see thousands of models come and go."""
        refused: list[str] = []

        async def refuse(*arguments: Any, **_: Any) -> None:
            refused.append(arguments[3].model)

        monkeypatch.setattr(serving, "refuse_waiting", refuse)
        monkeypatch.setattr(serving, "CLAIM_INTERVAL_S", 0.01)
        monkeypatch.setattr(serving, "LINGER_S", 0)
        async with executor("a") as a:
            a.repository.unload("work")
            await a.registration.announce(Applied())
            await a.changed.wait()
            await a.registration.announce(Applied())
            await until(lambda: refused.count("work") > 1, "its requests are refused")
            monkeypatch.setattr(serving, "REFUSE_S", 0.0)

            await until(lambda: not a.registration.serving._unloaded, "it is forgotten")


async def test_what_a_dead_executor_held_is_taken_back_though_the_node_of_another_model_is_away(
    private_cluster: EmbeddedCluster, key_prefix: str, models: Path, gate: Gate
) -> None:
    keys = Keyspace(key_prefix, SHARDS)
    node = {shard: private_cluster.holder(tag_of(keys.base(shard))) for shard in keys.shards}
    here = next(shard for shard in keys.shards if node[shard] is private_cluster.holder(MESH_TAG))
    (away,) = set(keys.shards) - {here}
    names = {keys.home_shard(name): name for name in (f"work{number}" for number in range(20))}
    for name in names.values():
        shutil.copytree(models / "work", models / name)
    async with (
        connect(private_cluster.url) as redis,
        living(private_cluster.url, key_prefix, models, names[away], "a", names[here]),
    ):
        node[away].kill()
        takers = keys.work_queue(names[here], "1").takers
        await redis.hset(takers, "dead", "t 1")
        async with asyncio.timeout(PATIENCE_S):
            while await redis.hexists(takers, "dead"):
                await asyncio.sleep(0.01)
        assert not node[away].is_running
