"""`seqmesh_client` against a mesh of real processes that are killed: every sum stays right, nothing runs twice."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc

from seqmesh_client import (
    AsyncClient,
    Client,
    NeverSeen,
    NotNumbered,
    OutcomeUnknown,
    Patience,
    SequenceCancelled,
    SequenceEnded,
    SequenceExists,
    StepRefused,
    WrongAnswer,
    WrongStep,
)
from seqmesh_client.wire import pb
from shared.contract.ids import sequence_id
from tests.client.grpc_serving import served
from tests.mesh.running_mesh import PATIENCE_S, RunningMesh, eventually, seqmesh, wait

SUM = Patience(step_s=PATIENCE_S, silence_s=5.0)


def urls(mesh: RunningMesh) -> list[str]:
    return [mesh.grpc(0), mesh.grpc(1)]


def values_of(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(1000) for _ in range(count)]


async def test_sums_are_right_though_every_gateway_and_executor_is_killed(
    victim: RunningMesh, chance: random.Random
) -> None:
    """Sequences one step at a time, and with eight steps ahead."""
    plans = [values_of(chance, 40) for _ in range(8)]
    answered = 0

    async def play(client: AsyncClient, values: list[int], ahead: int) -> list[int]:
        nonlocal answered
        sums: list[int] = []
        async with client.sequence("slow_sum") as sequence:
            async for answer in sequence.steps(([[value]] for value in values), ahead=ahead, end=True):
                sums.append(answer.single.item())
                answered += 1
        return sums

    async def kill() -> None:
        for share, name in enumerate(("gateway-1", "executor-1", "gateway-2", "executor-2"), 1):
            while answered < share * 320 // 6:
                await asyncio.sleep(0.01)
            victim.kill(name)

    async with AsyncClient(urls(victim), patience=SUM) as client, asyncio.TaskGroup() as group:
        played = [group.create_task(play(client, plan, 1 + 7 * (index % 2))) for index, plan in enumerate(plans)]
        group.create_task(kill())

    assert [list(itertools.accumulate(plan)) for plan in plans] == [one.result() for one in played]


def test_the_blocking_client_survives_a_gateway_and_an_executor(victim: RunningMesh, chance: random.Random) -> None:
    values = values_of(chance, 24)
    sums: list[int] = []
    with Client(urls(victim), patience=SUM) as client, client.sequence("slow_sum", id="blocking") as sequence:
        for answer in sequence.steps(([[value]] for value in values[:12]), ahead=4):
            sums.append(answer["OUTPUT"].item())
            if len(sums) == 4:
                victim.kill("gateway-1")
            if len(sums) == 8:
                victim.kill("executor-1")
        for value in values[12:]:
            sums.append(sequence.step([[value]], last=len(sums) == 23).single.item())

    assert list(itertools.accumulate(values)) == sums


PROGRAM = """
import json, os, signal, sys, threading
from seqmesh_client import Client, Patience
place, kill_at, *urls = sys.argv[1:]
token, sums = json.load(open(place))
dies = False
with Client(urls, patience=Patience(step_s=60)) as client:
    sequence = client.resume(token) if token else client.sequence("slow_sum")
    while sequence.answered < 20:
        number = sequence.answered + 1
        if number >= int(kill_at) and not dies:
            # Dies when the step is on its way, or has run, and its answer is not read. Where that comes late, the next
            # kill is further on, too.
            dies = True
            threading.Timer(0.001 * (number % 7) ** 2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        sums.append(sequence.step([[number]], last=number == 20).single.item())
        with open(place + ".new", "w") as file:
            json.dump([sequence.token, sums], file)
        os.replace(place + ".new", place)
"""


def test_a_client_that_is_killed_goes_on_by_its_token(victim: RunningMesh, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.write_text(json.dumps(["", []]))
    codes: list[int] = []
    # The first step is answered before the first kill: without a token there is nothing to go on with.
    for kill_at in (2, 5, 9, 10, 16, 99):
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, place, str(kill_at), *urls(victim)], capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip
        codes.append(ran.returncode)
        assert ran.returncode in (0, -signal.SIGKILL), ran.stderr

    assert list(itertools.accumulate(range(1, 21))) == json.loads(place.read_text())[1]
    assert 0 == codes[-1]
    assert codes.count(-signal.SIGKILL) >= 4


async def test_answers_of_a_decoupled_model_come_once_though_its_executor_and_gateway_are_killed(
    victim: RunningMesh,
) -> None:
    async with AsyncClient(urls(victim), patience=SUM) as client, client.sequence("streamed_sum") as sequence:
        whole = [one async for one in sequence.answers(decoupled_input(sequence.id, 30))]
        sums: list[Any] = []
        async for answer in sequence.answers(decoupled_input(sequence.id, 30), last=True):
            sums.append(answer)
            if len(sums) in (5, 10):
                victim.kill("executor-1" if len(sums) == 5 else "gateway-1")

    assert len(whole) == len(sums)


def decoupled_input(sequence: object, count: int) -> dict[str, Any]:
    return {"INPUT": np.array([[count]], np.int32)}


async def test_reasons_are_exceptions(victim: RunningMesh) -> None:
    async with AsyncClient(urls(victim), patience=SUM) as client:
        first = client.sequence("running_sum", id="reasons")
        await first.step([[1]])
        token = first.token
        await first.step([[2]])

        with pytest.raises(SequenceExists) as exists:
            await client.sequence("running_sum", id="reasons").step([[9]])
        assert 2 == exists.value.last_step
        with pytest.raises(WrongStep, match="same inputs"):
            await client.resume(token).step([[3]])
        with pytest.raises(StepRefused, match=r"unexpected shape") as shape:
            await first.step([[1, 2]])
        assert ("INVALID_ARG", False, 2) == (shape.value.code, shape.value.counted, first.answered)
        beyond = client.sequence("running_sum", id="reasons", after=exists.value.last_step)
        assert 6 == (await beyond.step([[3]])).single.item()
        assert 6 == (await first.step([[3]])).single.item(), "the same step by another object"
        assert 10 == (await first.step([[4]], last=True)).single.item()
        with pytest.raises(SequenceEnded):
            await client.sequence("running_sum", id="reasons", after=4).step([[5]])
        with pytest.raises(NeverSeen):
            await client.sequence("running_sum", id="nobody", after=3).step([[1]])
        with pytest.raises(StepRefused, match="nowhere"):
            await client.sequence("nowhere").step([[1]])
        with pytest.raises(StepRefused, match="nowhere"):
            await client.sequence("nowhere").step({"INPUT": np.zeros((1, 1), np.int32)})


async def test_a_step_that_was_cancelled_is_the_same_step_when_it_is_called_again(victim: RunningMesh) -> None:
    """Nothing can answer it meanwhile: its sequence is paused. At first it is hardly on its way, at last accepted."""
    async with (
        AsyncClient(urls(victim), patience=SUM) as client,
        client.sequence("slow_sum", id="taken back") as sequence,
    ):
        assert 1 == (await sequence.step([[1]])).single.item()
        await seqmesh(victim, "seq", "pause", "slow_sum", "taken back")
        for timeout_s in (0.001, 0.01, 0.3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await sequence.step([[2]])
        await seqmesh(victim, "seq", "resume", "slow_sum", "taken back")
        assert 3 == (await sequence.step([[2]], last=False)).single.item()
        assert 6 == (await sequence.step([[3]], last=True)).single.item()


async def test_a_source_is_not_read_further_than_ahead_and_answers_do_not_wait_for_it(victim: RunningMesh) -> None:
    read = 0
    go_on = asyncio.Event()

    async def source() -> AsyncIterator[list[list[int]]]:
        nonlocal read
        for value in range(10):
            if value == 6:
                await go_on.wait()
            read += 1
            yield [[value]]

    async with AsyncClient(urls(victim), patience=SUM) as client, client.sequence("running_sum") as sequence:
        answers = sequence.steps(source(), ahead=3)
        sums = [(await anext(answers)).single.item()]
        assert read <= 1 + 3
        # The source says nothing, and the answers to what it said before come.
        sums += [(await anext(answers)).single.item() for _ in range(5)]
        go_on.set()
        sums += [answer.single.item() async for answer in answers]
        await sequence.step([[0]], last=True)

    assert list(itertools.accumulate(range(10))) == sums


# -- the end without a step -------------------------------------------------------------------------------------------


def state_of(mesh: RunningMesh, sequence: str) -> bytes:
    """As it stands in the record: b"c" is the tombstone of a sequence that was ended, b"x" of one that expired."""
    state = mesh.redis.hget(mesh.keys.sequence(sequence_id("running_sum", "", sequence)).record, "st")
    assert isinstance(state, bytes)
    return state


async def test_a_context_that_is_left_ends_its_sequence_though_both_gateways_are_killed(victim: RunningMesh) -> None:
    def leave_blocking(client: Client) -> str:
        with client.sequence("running_sum", id="left blocking") as sequence:
            sequence.step([[2]])
            victim.kill("gateway-2")
        return sequence.token

    async with AsyncClient(urls(victim), patience=SUM) as client, client.sequence("running_sum", id="left") as left:
        steps = left.steps(([[value]] for value in range(9)), ahead=4)
        assert 0 == (await anext(steps)).single.item()
        victim.kill("gateway-1")
        victim.kill("gateway-2")
    with Client(urls(victim), patience=SUM) as blocking:
        token = await asyncio.to_thread(leave_blocking, blocking)
        with pytest.raises(SequenceEnded, match="step 1"):
            blocking.resume(token).step([[3]])

    assert left.answered > 1, "the outcomes of open steps came first"
    for sequence in ("left", "left blocking"):
        await eventually(lambda name=sequence: state_of(victim, name) == b"c", "the sequence was ended, and is over")
    async with AsyncClient(urls(victim), patience=SUM) as client:
        anew = client.sequence("running_sum", id="left")
        assert 4 == (await anew.step([[4]])).single.item()
        await left.end()
        assert 9 == (await anew.step([[5]], last=True)).single.item(), "an end of the run before changes nothing"


async def test_a_context_that_is_left_by_an_exception_leaves_its_sequence_for_its_token(victim: RunningMesh) -> None:
    async with AsyncClient(urls(victim), patience=SUM) as client:
        sequence = client.sequence("running_sum")

        async def fail() -> None:
            async with sequence:
                await sequence.step([[1]])
                await sequence.step([[1, 2]])

        with pytest.raises(StepRefused, match="unexpected shape"):
            await fail()
        resumed = client.resume(sequence.token)
        assert 3 == (await resumed.step([[2]])).single.item()
        await resumed.end()
        assert 3 == (await sequence.step([[2]])).single.item(), "the same step by another object"
        with pytest.raises(SequenceCancelled):
            await sequence.step([[3]])


# -- other servers ----------------------------------------------------------------------------------------------------


class PlainServer(cast("Any", service_pb2_grpc).GRPCInferenceServiceServicer):
    """As a Triton: names no step numbers, runs what it gets. breaks: the stream ends instead of the second answer."""

    def __init__(self, *, garbage: bool = False) -> None:
        self.garbage = garbage
        self.total = 0
        self.ran = 0

    def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ServerMetadataResponse(name="triton", extensions=["sequence"])

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        for request in requests:
            self.ran += 1
            self.total += int(np.frombuffer(request.raw_input_contents[0], np.int32)[0])
            if self.ran == 2:
                context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
            said = pb.ModelStreamInferResponse()
            said.infer_response.id = "no such step" if self.garbage else request.id
            said.infer_response.outputs.add(name="OUTPUT", datatype="INT32", shape=[1])
            said.infer_response.raw_output_contents.append(np.int32(self.total).tobytes())
            yield said


@pytest.fixture
def plain(request: pytest.FixtureRequest) -> Iterator[tuple[PlainServer, str]]:
    service = PlainServer(garbage=getattr(request, "param", False))
    with served(service) as url:
        yield service, url


STEP = {"INPUT": np.array([7], np.int32)}


def test_a_plain_triton_is_refused_unless_its_weaker_promise_is_accepted(plain: tuple[PlainServer, str]) -> None:
    service, url = plain
    with Client([url]) as client, pytest.raises(NotNumbered, match="strict=False"):
        client.sequence("sum").step(STEP)
    with Client([url], strict=False) as client, client.sequence("sum") as sequence:
        assert 7 == sequence.step(STEP).single.item()
        with pytest.raises(OutcomeUnknown, match="Begin another"):
            sequence.step(STEP)
        with pytest.raises(SequenceEnded):
            sequence.step(STEP)

    assert 2 == service.ran, "no step was sent twice"


async def test_a_connection_that_broke_leaves_no_task_behind(plain: tuple[PlainServer, str]) -> None:
    before = asyncio.all_tasks()
    async with AsyncClient([plain[1]], strict=False) as client:
        sequence = client.sequence("sum")
        await sequence.step(STEP)
        with pytest.raises(OutcomeUnknown):
            await sequence.step(STEP)
    if left := asyncio.all_tasks() - before:
        await asyncio.wait(left, timeout=PATIENCE_S)

    assert all(task.done() for task in left), left


async def test_a_client_that_is_closed_breaks_connections_and_cancels_no_task(plain: tuple[PlainServer, str]) -> None:
    client = AsyncClient([plain[1]], strict=False)
    sequence = client.sequence("sum")
    await sequence.step(STEP)
    await client.close()

    with pytest.raises(OutcomeUnknown, match="closed"):
        await sequence.step(STEP)


async def test_a_sequence_that_was_dropped_without_being_closed_leaves_no_task_behind(
    plain: tuple[PlainServer, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor when it is in a circle, which Python's collector finds, in any thread."""
    before = asyncio.all_tasks()
    async with AsyncClient([plain[1]], strict=False) as client:
        circle: list[Any] = [client.sequence("sum")]
        await circle[0].step(STEP)
        circle.append(circle)
        left = asyncio.all_tasks() - before
        del circle
        await asyncio.to_thread(gc.collect)
        await asyncio.wait(left, timeout=PATIENCE_S)

    assert all(task.done() for task in left), left
    # gRPC has one queue for all loops of a process. What comes late for a loop that is closed, as those of other tests
    # are, it logs in the loop that runs.
    assert [] == [one for one in caplog.messages if "PollerCompletionQueue" not in one]


def test_a_blocking_sequence_that_was_dropped_leaves_no_thread_behind(plain: tuple[PlainServer, str]) -> None:
    def threads() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if "ThreadPoolExecutor" not in one.name}

    before = threads()
    with Client([plain[1]], strict=False) as client:
        client.sequence("sum").step(STEP)
    wait(lambda: threads() <= before, "the client's threads end")


@pytest.mark.parametrize("plain", [True], indirect=True)
def test_a_server_that_answers_garbage_is_told_so(plain: tuple[PlainServer, str]) -> None:
    with Client([plain[1]], strict=False) as client, pytest.raises(WrongAnswer, match="no such step"):
        client.sequence("sum").step(STEP)


def test_threads_share_a_client(victim: RunningMesh) -> None:
    results: list[list[int]] = []

    def play() -> None:
        with client.sequence("running_sum") as sequence:
            answers = sequence.steps(([[value]] for value in range(20)), end=True)
            results.append([answer.single.item() for answer in answers])

    with Client(urls(victim), patience=SUM) as client:
        threads = [threading.Thread(target=play) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert [list(itertools.accumulate(range(20)))] * 6 == results
