"""gRPC calls against a gateway process with a Redis and an executor that answers: broken messages, and broken HTTP/2.

Each input is a call of one of the rpcs, or a connection of raw bytes. A message begins as a good one of its rpc; its
bytes are mutated, its fields put into one another, typed contents take the place of raw ones, it is compressed and
broken again. The bytes of a connection are those of a client in order, mutated frame by frame. An input passes when
the call ends with a status that somebody has chosen (never UNKNOWN), the connection with its client, and the gateway's
log shows no mistake.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
import struct
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import h2.config
import h2.connection
from grpc_health.v1 import health_pb2

from gateway.grpc.pb import pb
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from tests.embedded_redis import EmbeddedRedis
from tests.fuzz.mutations import NUMBERS, TEXTS, mutated_bytes
from tests.gateway.fake_executor import FakeExecutor, echo, running_sum, two_inputs
from tests.gateway.gateway_process import GatewayProcess, gateway_process

PREFIX = "fuzz"
MISTAKES = (b"unexpectedly", b"never retrieved", b"Unexpected [", b"Traceback")
"""In the log."""
LIVE = "/inference.GRPCInferenceService/ServerLive"
CALL_S = 30.0
"""After this the client leaves: the executor has no step that takes long, but some calls wait for what never comes."""
FRAME_HEAD_BYTES = 9
_health: Any = health_pb2
INT64 = (-(1 << 63), (1 << 63) - 1)
CONTENTS: dict[str, Callable[[random.Random], Any]] = {
    "bool_contents": lambda chance: chance.random() < 0.5,
    "int_contents": lambda chance: chance.randrange(-(1 << 31), 1 << 31),
    "int64_contents": lambda chance: chance.randrange(*INT64),
    "uint_contents": lambda chance: chance.randrange(1 << 32),
    "uint64_contents": lambda chance: chance.randrange(1 << 64),
    "fp32_contents": lambda chance: chance.choice((0.0, float("nan"), float("inf"), 1.5)),
    "fp64_contents": lambda chance: chance.random(),
    "bytes_contents": lambda chance: chance.randbytes(chance.randrange(8)),
}
DATATYPES = ("FP32", "INT32", "INT8", "BYTES", "BOOL", "UINT64", "FP16", "BF16", "", "FP33")
PARAMETERS = (
    *("sequence_id", "sequence_start", "sequence_end", "sequence_step", "priority", "timeout", "x"),
    *("triton_enable_empty_final_response", "triton_x", "classification", "shared_memory_region", "binary_data"),
)


def infer(chance: random.Random) -> Any:
    """An inference request, more or less in order."""
    model, datatype, size = chance.choice(
        (("echo", "FP32", 3), ("echo_text", "BYTES", 2), ("running_sum", "INT32", 1), ("add_sub", "INT32", 4))
    )
    made = pb.ModelInferRequest(model_name=model, id=chance.choice(("", "a", *TEXTS)))
    for index in range(2 if model == "add_sub" else 1):
        name = "INPUT" if model == "running_sum" else f"INPUT{index}"
        made.inputs.add(name=name, datatype=datatype, shape=[1, size])
        made.raw_input_contents.append(b"\x01\x00\x00\x00a" * size if datatype == "BYTES" else bytes(4 * size))
    if model == "running_sum":
        made.parameters["sequence_id"].int64_param = chance.randrange(1, 50)
        made.parameters["sequence_start"].bool_param = True
        made.parameters["sequence_end"].bool_param = chance.random() < 0.8
    for _ in range(chance.choice((0, 0, 0, 1, 3))):
        spoil(chance, made)
    return made


def spoil(chance: random.Random, made: Any) -> None:
    """Changes one thing about a request."""
    tensor = chance.choice(made.inputs) if made.inputs else made.inputs.add()
    match chance.randrange(9):
        case 0:
            tensor.shape[:] = [
                chance.randint(*INT64) if chance.random() < 0.3 else 2 for _ in range(chance.randrange(40))
            ]
        case 1:
            tensor.datatype = chance.choice(DATATYPES)
        case 2:
            del made.raw_input_contents[:]
            field = chance.choice(list(CONTENTS))
            getattr(tensor.contents, field).extend(
                [CONTENTS[field](chance) for _ in range(chance.choice((0, 1, 3, 4)))]
            )
        case 3:
            made.raw_input_contents.append(chance.randbytes(chance.choice((0, 3, 1000))))
        case 4:
            holder = chance.choice((made, tensor, made.outputs.add(name="OUTPUT0")))
            parameter(chance, holder.parameters[chance.choice(PARAMETERS)])
        case 5:
            made.outputs.add(name=chance.choice(("OUTPUT", "OUTPUT0", *TEXTS)))
        case 6:
            made.model_version = chance.choice(("1", "0", "01", "9" * 400, *TEXTS))
        case 7:
            made.inputs.add().CopyFrom(tensor)
        case _:
            made.model_name = chance.choice(TEXTS)


def parameter(chance: random.Random, target: Any) -> None:
    """A value of any kind."""
    match chance.randrange(5):
        case 0:
            target.bool_param = chance.random() < 0.5
        case 1:
            target.int64_param = chance.choice([number for number in NUMBERS if INT64[0] <= number <= INT64[1]])
        case 2:
            target.string_param = chance.choice(TEXTS)
        case 3:
            target.uint64_param = chance.choice([number for number in NUMBERS if 0 <= number < 1 << 64])
        case _:
            target.double_param = chance.random()


def plain(chance: random.Random, kind: Any) -> Any:
    """A message of another rpc: texts and flags in its fields."""
    made = kind()
    for field in kind.DESCRIPTOR.fields:
        if field.type == field.TYPE_STRING and not field.is_repeated:
            setattr(made, field.name, chance.choice(("", "echo", "1", *TEXTS)))
        elif field.type == field.TYPE_BOOL:
            setattr(made, field.name, chance.random() < 0.5)
    if kind is pb.RepositoryModelLoadRequest:
        made.parameters[chance.choice(("config", "file:1/model.py", "x"))].bytes_param = b"{}"
    if kind is pb.TraceSettingRequest:
        made.settings[chance.choice(("trace_level", "trace_rate", "log_frequency", "x"))].value.append("1")
    return made


@cache
def rpcs() -> dict[str, tuple[Any, bool]]:
    """Every rpc: the class of its request, and whether it streams."""
    services = (pb.DESCRIPTOR.services_by_name["GRPCInferenceService"], _health.DESCRIPTOR.services_by_name["Health"])
    modules = (pb, _health)
    return {
        f"/{service.full_name}/{method.name}": (
            getattr(module, method.input_type.name),
            method.client_streaming or method.server_streaming,
        )
        for service, module in zip(services, modules, strict=True)
        for method in service.methods
    }


def message(chance: random.Random, kind: Any) -> bytes:
    """A message's bytes, on the way broken once or more, or not."""
    made = infer(chance) if kind is pb.ModelInferRequest else plain(chance, kind)
    data = made.SerializeToString()
    if chance.random() < 0.4:
        data = mutated_bytes(chance, data)
    match chance.randrange(12):
        case 0:
            data = gzip.compress(data)
        case 1:
            data = zlib.compress(data)
        case 2:
            data = bomb()
        case 3:
            data = data[: chance.randrange(len(data) + 1)] * chance.choice((2, 300, 20_000))
        case _:
            return data
    return mutated_bytes(chance, data) if chance.random() < 0.3 else data


@cache
def bomb() -> bytes:
    """A little that unpacks to more than the gateway takes."""
    return gzip.compress(bytes(100 << 20), 9)


def conversation(chance: random.Random) -> bytes:
    """What a client sends over a connection, with its frames mutated."""
    client = h2.connection.H2Connection(h2.config.H2Configuration(validate_outbound_headers=False))
    client.initiate_connection()
    for _ in range(chance.choice((1, 2, 5))):
        path, (kind, _) = chance.choice(list(rpcs().items()))
        stream = client.get_next_available_stream_id()
        headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers")]
        headers += [("content-type", "application/grpc"), ("grpc-encoding", chance.choice(("gzip", "identity", "x")))]
        headers += [("grpc-timeout", chance.choice(("1S", "-1", "9" * 30 + "n", "")))] * chance.choice((0, 0, 1))
        headers += [(chance.choice(("x", "x-bin", "triton_grpc_error", "grpc-status")), "true")] * chance.choice((0, 1))
        chance.shuffle(headers[5:])
        client.send_headers(stream, headers)
        data = message(chance, kind)[:10_000]
        data = (
            struct.pack(">BI", chance.choice((0, 0, 0, 1, 9)), chance.choice((len(data), len(data), 1, 1 << 31))) + data
        )
        client.send_data(stream, data, end_stream=chance.random() < 0.8)
    if chance.random() < 0.3:
        client.ping(bytes(8))
        client.reset_stream(1)
    sent = client.data_to_send()
    begin = sent.index(b"SM\r\n\r\n") + 6
    frames = [mutated_frame(chance, frame) if chance.random() < 0.2 else frame for frame in frames_of(sent[begin:])]
    if chance.random() < 0.2:
        chance.shuffle(frames)
    return (sent[:begin] if chance.random() < 0.95 else mutated_bytes(chance, sent[:begin])) + b"".join(frames)


def frames_of(data: bytes) -> list[bytes]:
    """A connection's bytes, frame by frame."""
    frames: list[bytes] = []
    while data:
        size = FRAME_HEAD_BYTES + int.from_bytes(data[:3], "big")
        frames.append(data[:size])
        data = data[size:]
    return frames


def mutated_frame(chance: random.Random, frame: bytes) -> bytes:
    """Its length, kind, flags, stream or content changed; or it comes often."""
    head, content = bytearray(frame[:FRAME_HEAD_BYTES]), frame[FRAME_HEAD_BYTES:]
    match chance.randrange(6):
        case 0:
            head[:3] = chance.choice((0, 1, len(content) + 1, (1 << 24) - 1)).to_bytes(3, "big")
        case 1:
            head[3] = chance.randrange(256)
        case 2:
            head[4] = chance.randrange(256)
        case 3:
            head[5:9] = chance.choice((0, 1, 2, 7, (1 << 31) - 1, (1 << 32) - 1)).to_bytes(4, "big")
        case 4:
            return frame * chance.choice((2, 100))
        case _:
            content = mutated_bytes(chance, content)
            head[:3] = len(content).to_bytes(3, "big")
    return bytes(head) + content


MEMORY_MAX = 768 << 20
SLACK = 64 << 20
"""What arrives, and is decoded, between two looks at the memory."""


class GrpcMessages:
    """The fuzzer (`fuzzing.Fuzzer`).

    heard  calls by status, so that a run can be seen to have tried something
    """

    at_once = 8
    memory_bytes_max = MEMORY_MAX + SLACK
    """Messages that unpack to 100 MiB are among the inputs, eight at once."""
    health_s_max = 20.0
    """Of the machine's slowness: on a quiet one it takes milliseconds."""

    def __init__(self, gateway: GatewayProcess, channel: Any) -> None:
        self._gateway = gateway
        self._channel = channel
        self.heard: Counter[grpc.StatusCode] = Counter()

    def attacked(self) -> list[int]:
        return [self._gateway.process.pid]

    async def attack(self, chance: random.Random) -> None:
        if chance.random() < 0.3:
            await self._connect(chance)
            return
        path, (kind, streams) = chance.choice(list(rpcs().items()))
        if chance.random() < 0.4:
            path, streams = chance.choice(("ModelInfer", "ModelStreamInfer")), True
            kind, path = pb.ModelInferRequest, f"/inference.GRPCInferenceService/{path}"
        messages = [message(chance, kind) for _ in range(chance.choice((0, 1, 1, 1, 2, 5)) if streams else 1)]
        call = self._channel.stream_stream(path)(iter(messages), timeout=CALL_S)
        if chance.random() < 0.1 or path.endswith("/Watch"):
            await asyncio.sleep(0.01)
            call.cancel()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for _ in call:
                pass
        code, details = await call.code(), await call.details()
        self.heard[code] += 1
        assert code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED), f"{path}: {code} {details}"
        assert "internal error in the gateway" not in (details or ""), f"{path}: {details}"

    async def _connect(self, chance: random.Random) -> None:
        data = conversation(chance)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._gateway.ports["grpc"])
        # The other side may have ended the connection.
        with contextlib.suppress(OSError):
            size = max(chance.choice((len(data), 1000, 20)), len(data) // 200)
            for begin in range(0, len(data), size):
                writer.write(data[begin : begin + size])
                await writer.drain()
            if chance.random() < 0.8:
                writer.write_eof()
                await reader.read()
        writer.close()

    async def health(self) -> None:
        await self._channel.unary_unary(LIVE)(b"", timeout=60)
        for mistake in MISTAKES:
            if mistake in self._gateway.said:
                seen = bytes(self._gateway.said[-3000:]).decode(errors="replace")
                self._gateway.said.clear()
                raise AssertionError(f"in the log: {seen}")


@asynccontextmanager
async def fuzzer(folder: Path) -> AsyncGenerator[GrpcMessages]:
    """Starts Redis and a gateway; the executor runs in this process."""
    bomb()
    models = (echo(), echo("echo_text", "BYTES"), two_inputs(), running_sum())
    with EmbeddedRedis(folder / "redis") as server:
        redis = connect(server.url)
        executor = FakeExecutor(redis, Keyspace(PREFIX), models=models, control_mode="none")
        await executor.join()
        running = asyncio.create_task(executor.run())
        try:
            async with (
                gateway_process(server.url, PREFIX, f"--memory-max={MEMORY_MAX}") as gateway,
                grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ports['grpc']}") as channel,
            ):
                yield GrpcMessages(gateway, channel)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await redis.aclose()
