"""Many answers while somebody does not read them, Redis is restarted, or who waits for them is a model that dies."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway.requests.answers import TOO_SLOW
from shared.contract.ids import sequence_id
from tests.embedded_redis import EmbeddedRedis
from tests.mesh.conftest import wait_until_equal
from tests.mesh.model_repository import add_streaming_models
from tests.mesh.running_mesh import PATIENCE_S, RunningMesh, eventually, running_mesh
from tests.mesh.streams import VALUES, Reader

CLIENTS = 4
UNREAD_BYTES = 16 << 20
LARGE, SMALL = 1 << 16, 1
GROWN_BYTES = 160 << 20
"""What a process may grow by while a client does not read: far more than its bounds, far less than without them."""
COUNTS = list(range(1, sum(VALUES) + 1))
FLOOD = """
import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    # Answers of so many bytes, without end: until nobody listens.

    def execute(self, requests):
        for request in requests:
            size = int(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().item())
            threading.Thread(target=self.flood, args=(request.get_response_sender(), size), daemon=True).start()

    def flood(self, sender, size):
        answer = pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array([[b"x" * size]], object))])
        while not sender.is_cancelled():
            sender.send(answer)
        sender.send(flags=FINAL)
"""
TELLER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    # Has a decoupled model count, and answers with all that it said.

    def execute(self, requests):
        return [self.tell(request) for request in requests]

    def tell(self, request):
        call = pb_utils.InferenceRequest(
            model_name="streamed_sum",
            requested_output_names=["OUTPUT"],
            inputs=[pb_utils.get_input_tensor_by_name(request, "INPUT")],
            correlation_id=request.correlation_id(),
            flags=request.flags(),
            trace=request.trace(),
        )
        said = []
        for response in call.exec(decoupled=True):
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            for tensor in response.output_tensors():
                said.append(str(tensor.as_numpy().item()))
        output = pb_utils.Tensor("OUTPUT", np.array([[" ".join(said)]], object))
        steps = pb_utils.get_input_tensor_by_name(request, "STEPS_IN").as_numpy() + 1
        return pb_utils.InferenceResponse([output, pb_utils.Tensor("STEPS_OUT", steps)])
"""
CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 4
input [ {{ name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "OUTPUT" data_type: TYPE_STRING dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
{more}
"""
SEQUENCES = """
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest { max_candidate_sequences: 4 }
  state [
    { input_name: "STEPS_IN" output_name: "STEPS_OUT" data_type: TYPE_INT64 dims: [ 1 ]
      initial_state: { name: "none" data_type: TYPE_INT64 dims: [ 1 ] zero_data: true } }
  ]
}
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
ALL = ("streamed_sum", "teller")


def add_model(repository: Path, name: str, code: str, more: str) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG.format(name=name, more=more))
    (version / "model.py").write_text(code)


@dataclass(frozen=True)
class Streaming:
    """A mesh with two gateways and two executors, and its Redis, which may be restarted."""

    mesh: RunningMesh
    server: EmbeddedRedis


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streaming]:
    directory = tmp_path_factory.mktemp("streaming-faults")
    repository = directory / "models"
    add_streaming_models(repository)
    add_model(repository, "flood", FLOOD, DECOUPLED)
    add_model(repository, "teller", TELLER, SEQUENCES)
    environment = {"SEQMESH_MAX_BYTES_UNREAD": str(UNREAD_BYTES)}
    with EmbeddedRedis(directory / "redis", appendfsync="always") as server:
        environment["SEQMESH_REDIS_URL"] = server.url
        with running_mesh(directory / "data", [repository], gateways=2, executors=2, environment=environment) as mesh:
            yield Streaming(mesh, server)


@pytest.fixture
def streaming(whole: Streaming) -> Iterator[Streaming]:
    mesh = whole.mesh
    yield whole
    assert [] == mesh.tracebacks()
    wait_until_equal([0, 0], lambda: [mesh.slots_held(model) for model in ALL], "slots held")
    wait_until_equal([], mesh.leaks, "keys left without TTL")


# -- a client that does not read --------------------------------------------------------------------------------------


def resident_bytes(pid: int) -> int:
    (line,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(line) << 10


@asynccontextmanager
async def bounded(streaming: Streaming) -> AsyncGenerator[None]:
    """While it lasts no process grows much, and in the end nothing is left of the request in Redis."""
    mesh = streaming.mesh
    names = [child.name for child in mesh.gateways] + mesh.names("executor")
    pids = [*map(mesh.pid, names), streaming.server.pid]
    before = list(map(resident_bytes, pids))
    largest = before.copy()

    async def watch() -> None:
        while True:
            for index, pid in enumerate(pids):
                largest[index] = max(largest[index], resident_bytes(pid))
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    try:
        yield
        queue = mesh.keys.work_queue("flood", "1")
        await eventually(lambda: not mesh.redis.exists(queue.meta), "the request is over")
    finally:
        watching.cancel()
    grown = [then - first for first, then in zip(before, largest, strict=True)]
    assert max(grown) < GROWN_BYTES, dict(zip([*names, "redis"], grown, strict=True))


async def others_are_served(mesh: RunningMesh) -> None:
    """By the same gateway and the same models."""
    other = Reader("other")
    await other.read(mesh.grpc(), other.step(0, sequence=False))
    assert list(range(1, VALUES[0] + 1)) == other.got


@pytest.mark.parametrize("size", [LARGE, SMALL])
async def test_a_grpc_stream_that_is_not_read_is_closed_and_costs_nobody_else_anything(
    streaming: Streaming, size: int
) -> None:
    pb: Any = service_pb2
    message = pb.ModelInferRequest(model_name="flood")
    message.inputs.add(name="INPUT", datatype="INT32", shape=[1, 1])
    message.raw_input_contents.append(np.array([[size]], np.int32).tobytes())
    mesh = streaming.mesh
    gateway = mesh.gateways[0].name
    async with bounded(streaming), grpc.aio.insecure_channel(mesh.grpc()) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer()
        await call.write(message)
        await others_are_served(mesh)
        # Nothing is read before this: the status comes although answers lie in between.
        async with asyncio.timeout(PATIENCE_S):
            assert grpc.StatusCode.UNAVAILABLE is await call.code()
    # Said at growing intervals.
    assert "answers are not taken" in mesh.log(gateway)
    await others_are_served(mesh)


@pytest.mark.parametrize("size", [LARGE, SMALL])
async def test_events_that_are_not_read_end_with_an_error_that_says_so(streaming: Streaming, size: int) -> None:
    mesh = streaming.mesh
    host, _, port = mesh.http().partition(":")
    body = json.dumps({"INPUT": size}).encode()
    head = f"POST /v2/models/flood/generate_stream HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as client:
        # Little fits into the connection itself.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        client.settimeout(PATIENCE_S)
        client.connect((host, int(port)))
        async with bounded(streaming):
            client.sendall(head.encode() + body)
            await others_are_served(mesh)
        content = b""
        while not content.endswith(b"0\r\n\r\n") and (more := await asyncio.to_thread(client.recv, 1 << 20)):
            content = content[-4096:] + more
    assert content.endswith(b"\r\n0\r\n\r\n"), content[-300:]
    last = re.findall(rb"data: (.*)", content)[-1]
    assert TOO_SLOW in json.loads(last)["error"]
    await others_are_served(mesh)


# -- Redis is restarted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dies", [False, True])
async def test_every_answer_comes_once_though_redis_is_restarted_in_the_middle_of_them(
    streaming: Streaming, *, dies: bool
) -> None:
    """Of sequences whose steps have request ids, and those that have not, and of requests without a sequence."""
    mesh, server = streaming.mesh, streaming.server
    named = [Reader(f"restarted {dies} {number}") for number in range(CLIENTS)]
    plain = [Reader(f"plain {dies} {number}") for number in range(2)]
    stateless = [Reader("") for _ in range(2)]
    readers = [*named, *plain, *stateless]
    async with asyncio.TaskGroup() as group:
        for reader in named:
            steps = [reader.step(index, sequence=True, request_id=f"r{index}") for index in range(len(VALUES))]
            group.create_task(reader.read(mesh.grpc(), *steps))
        for reader in plain:
            steps = [reader.step(index, sequence=True) for index in range(len(VALUES))]
            group.create_task(reader.read(mesh.grpc(1), *steps))
        for reader in stateless:
            group.create_task(reader.read(mesh.grpc(), reader.step(0, sequence=False)))
        await eventually(lambda: all(len(reader.got) > 10 for reader in readers), "answers come")
        (server.kill if dies else server.stop)()
        await asyncio.sleep(0.3)
        server.start()

    assert [COUNTS] * len(named) == [reader.got for reader in named]
    assert [COUNTS] * len(plain) == [reader.got for reader in plain]
    assert [COUNTS[: VALUES[0]]] * len(stateless) == [reader.got for reader in stateless]


# -- models that wait for answers -------------------------------------------------------------------------------------


async def told(mesh: RunningMesh, name: str) -> list[int]:
    """What the calling model was told, over all steps of a sequence."""
    numbers: list[int] = []
    async with grpc_aio.InferenceServerClient(mesh.grpc(1)) as known, asyncio.timeout(PATIENCE_S):
        # Typed loosely: the library says that sequence ids are numbers alone.
        client: Any = known
        for index, value in enumerate(VALUES):
            made = grpc_aio.InferInput("INPUT", [1, 1], "INT32")
            made.set_data_from_numpy(np.array([[value]], np.int32))
            result: Any = await client.infer(
                "teller",
                [made],
                sequence_id=name,
                sequence_start=index == 0,
                sequence_end=index == len(VALUES) - 1,
                request_id=f"r{index}",
            )
            numbers += map(int, result.as_numpy("OUTPUT").item().decode().split())
    return numbers


@pytest.mark.parametrize("service", ["executor", "gateway"])
async def test_a_model_that_calls_hears_every_answer_once_though_processes_die_in_the_middle(
    streaming: Streaming, service: str
) -> None:
    """All executors, so that the caller's and the called model's are among them; or the gateway between the two."""
    mesh = streaming.mesh
    names = [f"told {service} {number}" for number in range(CLIENTS)]

    def written(name: str) -> int:
        """Answers to the called step."""
        return int(mesh.record(sequence_id("streamed_sum", "", name)).get("an", "0 0").split()[1])

    async with asyncio.TaskGroup() as group:
        telling = [group.create_task(told(mesh, name)) for name in names]
        await eventually(lambda: any(written(name) > 10 for name in names), "answers come")
        for victim in mesh.names("executor") if service == "executor" else [mesh.gateways[0].name]:
            mesh.kill(victim)

    assert [COUNTS] * CLIENTS == [one.result() for one in telling]
    await eventually(lambda: len(mesh.alive()) == 2 and all(map(mesh.is_ready, (0, 1))), "all processes are back")
