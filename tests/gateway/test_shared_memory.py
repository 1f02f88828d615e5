"""Inputs and outputs in system shared memory, as tritonclient places them, over both protocols."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import uuid
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http_client
import tritonclient.http.aio as http_aio
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from gateway.settings import GatewaySettings
from shared.contract.ids import sequence_id
from tests.gateway.fake_executor import FakeExecutor, RunningGateway, gateway_running

INT_BYTES = 4
PARTS = 16 * INT_BYTES


class Memory:
    """A file of shared memory, registered under its own name, with the client's library."""

    def __init__(self, size: int = PARTS) -> None:
        self.key = f"/seqmesh-test-{uuid.uuid4().hex[:12]}"
        self.name = self.key[1:]
        self.size = size
        self._handle = shm.create_shared_memory_region(self.name, self.key, size)

    @property
    def path(self) -> Path:
        return Path("/dev/shm") / self.name

    def put(self, *numbers: int, offset: int = 0) -> None:
        shm.set_shared_memory_region(self._handle, [np.array(numbers, np.int32)], offset=offset)

    def get(self, count: int, offset: int = 0) -> list[int]:
        array: NDArray[Any] = shm.get_contents_as_numpy(self._handle, np.int32, [count], offset=offset)
        return array.tolist()

    def close(self) -> None:
        shm.destroy_shared_memory_region(self._handle)


@contextmanager
def memory(size: int = PARTS) -> Generator[Memory]:
    made = Memory(size)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def place() -> Iterator[Memory]:
    with memory() as made:
        yield made


@pytest.fixture
def result() -> Iterator[Memory]:
    with memory() as made:
        yield made


@pytest.fixture
async def gateway(gateway_settings: GatewaySettings, executor: FakeExecutor) -> AsyncIterator[RunningGateway]:
    settings = dataclasses.replace(gateway_settings, allow_client_shm=True, client_shm_prefix="seqmesh-test-")
    async with gateway_running(settings) as running:
        yield running


@dataclasses.dataclass
class Client:
    """tritonclient over one protocol. module: where its tensors are made."""

    module: Any
    service: Any

    async def register(self, *memories: Memory) -> None:
        for each in memories:
            await self.service.register_system_shared_memory(each.name, each.key, each.size)

    def given(self, name: str, region: Memory, count: int = 1, offset: int = 0, shape: list[int] | None = None) -> Any:
        tensor = self.module.InferInput(name, shape or [1, count], "INT32")
        tensor.set_shared_memory(region.name, count * INT_BYTES, offset)
        return tensor

    def sent(self, name: str, *numbers: int) -> Any:
        tensor = self.module.InferInput(name, [1, len(numbers)], "INT32")
        tensor.set_data_from_numpy(np.array([numbers], np.int32))
        return tensor

    def wanted(self, name: str, region: Memory | None = None, size: int = INT_BYTES, offset: int = 0) -> Any:
        output = self.module.InferRequestedOutput(name)
        if region is not None:
            output.set_shared_memory(region.name, size, offset)
        return output

    async def step(self, inputs: list[Any], outputs: list[Any], **rest: Any) -> Any:
        return await self.service.infer("running_sum", inputs, outputs=outputs, **rest)


@pytest.fixture(params=["http", "grpc"])
async def client(request: pytest.FixtureRequest, gateway: RunningGateway) -> AsyncIterator[Client]:
    if request.param == "http":
        async with http_aio.InferenceServerClient(gateway.url) as service:
            yield Client(http_client, service)
    else:
        async with grpc_aio.InferenceServerClient(f"127.0.0.1:{gateway.addresses.grpc_port}") as service:
            yield Client(grpc_client, service)


async def admitted(executor: FakeExecutor) -> None:
    """Waits until the START of sequence 3 has been accepted, which its executor leaves where it is."""
    record = executor.keys.sequence(sequence_id("running_sum", "", 3)).record
    async with asyncio.timeout(60):
        while not await executor.commands.exists(record):
            await asyncio.sleep(0.005)


def as_document(region: Any) -> dict[str, Any]:
    return {field: getattr(region, field) for field in ("name", "key", "offset", "byte_size")}


async def test_a_sequence_goes_through_shared_memory_both_ways(client: Client, place: Memory, result: Memory) -> None:
    await client.register(place, result)
    place.put(3, 4, 5)

    sums: list[int] = []
    for number in range(3):
        inputs = [client.given("INPUT", place, offset=number * INT_BYTES)]
        outputs = [client.wanted("OUTPUT", result, offset=number * INT_BYTES)]
        answer = await client.step(inputs, outputs, sequence_id=7, sequence_start=number == 0, sequence_end=number == 2)
        assert answer.get_output("OUTPUT") is not None
        sums += result.get(1, number * INT_BYTES)

    assert [3, 7, 12] == sums == result.get(3)


async def test_memory_and_message_mix_in_one_request(client: Client, place: Memory, result: Memory) -> None:
    await client.register(place, result)
    place.put(1, 2, 3, 4, offset=8)
    inputs = [client.given("INPUT0", place, 4, offset=8), client.sent("INPUT1", 10, 20, 30, 40)]
    first = await client.service.infer(
        "add_sub", inputs, outputs=[client.wanted("OUTPUT0", result, 16), client.wanted("OUTPUT1")]
    )
    second = await client.service.infer(
        "add_sub", inputs[::-1], outputs=[client.wanted("OUTPUT0"), client.wanted("OUTPUT1", result, 16, offset=16)]
    )

    # The fake executor takes the second input from the first.
    assert [11, 22, 33, 44, 9, 18, 27, 36] == result.get(8)
    assert [[-9, -18, -27, -36]] == first.as_numpy("OUTPUT1").tolist()
    assert [[11, 22, 33, 44]] == second.as_numpy("OUTPUT0").tolist()


async def test_regions_are_shown_and_put_away(client: Client, place: Memory, result: Memory) -> None:
    async def shown(name: str = "") -> set[tuple[str, str, int, int]]:
        status: Any = await client.service.get_system_shared_memory_status(name)
        # JSON over HTTP, messages over gRPC.
        regions: Any = status if client.module is http_client else map(as_document, status.regions.values())
        return {(one["name"], one["key"], int(one["offset"]), int(one["byte_size"])) for one in regions}

    await client.register(place)
    await client.service.register_system_shared_memory("half", result.key, 8, offset=4)
    own, half = (place.name, place.key, 0, PARTS), ("half", result.key, 4, 8)

    assert {own, half} == await shown()
    assert {half} == await shown("half")
    with pytest.raises(InferenceServerException, match="shared memory region 'half' already in manager"):
        await client.service.register_system_shared_memory("half", place.key, 4)
    await client.service.unregister_system_shared_memory("half")
    assert {own} == await shown()
    with pytest.raises(InferenceServerException, match="Unable to find system shared memory region: 'half'"):
        await shown("half")
    await client.service.unregister_system_shared_memory()
    assert set() == await shown()
    metadata: Any = await client.service.get_server_metadata()
    extensions: Any = metadata["extensions"] if client.module is http_client else metadata.extensions
    assert "system_shared_memory" in extensions


async def test_cuda_memory_is_refused_in_tritons_words(client: Client) -> None:
    with pytest.raises(
        InferenceServerException, match="failed to register CUDA shared memory region: 'r', GPUs not supported"
    ):
        await client.service.register_cuda_shared_memory("r", b"aGFuZGxl", 0, 8)
    await client.service.unregister_cuda_shared_memory()
    assert not getattr(await client.service.get_cuda_shared_memory_status(), "regions", [])


async def test_what_a_request_names_is_copied_when_it_is_admitted(
    client: Client, executor: FakeExecutor, place: Memory
) -> None:
    """The client may use the memory again, or give it back, before the answer comes."""
    await client.register(place)
    place.put(5)
    await executor.pause()
    answer = asyncio.create_task(
        client.step([client.given("INPUT", place)], [client.wanted("OUTPUT")], sequence_id=3, sequence_start=True)
    )
    await admitted(executor)
    place.put(9)
    os.truncate(place.path, 0)
    executor.paused.clear()

    assert [[5]] == (await answer).as_numpy("OUTPUT").tolist()


async def test_a_region_that_is_put_away_meanwhile_gets_its_answer(
    client: Client, executor: FakeExecutor, place: Memory, result: Memory
) -> None:
    await client.register(place, result)
    place.put(6)
    await executor.pause()
    given, wanted = [client.given("INPUT", place)], [client.wanted("OUTPUT", result)]
    answer = asyncio.create_task(client.step(given, wanted, sequence_id=3, sequence_start=True))
    await admitted(executor)
    await client.service.unregister_system_shared_memory()
    executor.paused.clear()
    await answer

    assert [6] == result.get(1)


async def test_a_retry_is_answered_into_the_region_that_it_names(
    client: Client, executor: FakeExecutor, place: Memory, result: Memory
) -> None:
    """The reply that is stored has the tensors; where they go is each request's own."""
    with memory() as other:
        await client.register(place, result, other)
        place.put(8)
        for region in (result, other, None):
            answer = await client.step(
                [client.given("INPUT", place)],
                [client.wanted("OUTPUT", region)],
                sequence_id=3,
                sequence_start=True,
                request_id="once",
            )

        assert ([8], [8]) == (result.get(1), other.get(1))
        assert [[8]] == answer.as_numpy("OUTPUT").tolist()
    assert 1 == len(executor.received)


async def test_a_file_that_is_cut_short_fails_its_own_requests_alone(
    client: Client, place: Memory, result: Memory
) -> None:
    await client.register(place, result)
    os.truncate(place.path, 2)
    given, wanted = [client.given("INPUT", place)], [client.wanted("OUTPUT", result)]

    with pytest.raises(InferenceServerException, match="is shorter than when it was registered"):
        await client.step(given, wanted, sequence_id=3, sequence_start=True)
    os.truncate(result.path, 2)
    with pytest.raises(InferenceServerException, match="is shorter than when it was registered"):
        await client.step([client.sent("INPUT", 4)], wanted, sequence_id=3, sequence_start=True, request_id="a")
    answer = await client.step([client.sent("INPUT", 4)], [], sequence_id=3, sequence_start=True, request_id="a")
    assert [[4]] == answer.as_numpy("OUTPUT").tolist()


async def test_what_names_no_memory_is_refused_before_anything_runs(
    client: Client, executor: FakeExecutor, place: Memory
) -> None:
    await client.register(place)
    one = [client.sent("INPUT", 1)]
    for inputs, outputs, text in (
        (one, [client.wanted("OUTPUT", place, PARTS + 1)], "Invalid offset \\+ byte size for shared memory region"),
        (one, [client.wanted("OUTPUT", place, 1, PARTS)], "Invalid offset for shared memory region"),
        ([client.given("INPUT", place, 2)], [], "input byte size mismatch|unexpected shape"),
        ([client.given("INPUT", place, 2, shape=[1, 1])], [], "Expected 4, got 8"),
    ):
        with pytest.raises(InferenceServerException, match=text):
            await client.step(inputs, outputs, sequence_id=3, sequence_start=True)
    with pytest.raises(InferenceServerException, match="Unable to open shared memory region"):
        await client.service.register_system_shared_memory("r", "/../etc/passwd", 4)
    with pytest.raises(InferenceServerException, match="--client-shm-prefix"):
        await client.service.register_system_shared_memory("r", "/psm_other", 4)
    await client.service.unregister_system_shared_memory()
    with pytest.raises(InferenceServerException, match=f"Unable to find shared memory region: '{place.name}'"):
        await client.step([client.given("INPUT", place)], [], sequence_id=3, sequence_start=True)

    assert [] == executor.received


async def test_an_output_too_large_for_its_part_says_how_much_it_needs(client: Client, place: Memory) -> None:
    await client.register(place)

    with pytest.raises(InferenceServerException, match="\\(3 bytes\\) should be at least 4 bytes to hold the results"):
        await client.step(
            [client.sent("INPUT", 1)], [client.wanted("OUTPUT", place, 3)], sequence_id=3, sequence_start=True
        )


async def test_a_stream_goes_through_shared_memory(gateway: RunningGateway, place: Memory, result: Memory) -> None:
    place.put(*range(1, 9))
    module = Client(grpc_client, None)

    async def steps() -> AsyncIterator[dict[str, Any]]:
        for number in range(8):
            yield {
                "model_name": "running_sum",
                "inputs": [module.given("INPUT", place, offset=number * INT_BYTES)],
                "outputs": [module.wanted("OUTPUT", result, offset=number * INT_BYTES)],
                "sequence_id": 5,
                "sequence_start": number == 0,
                "sequence_end": number == 7,
            }

    async with grpc_aio.InferenceServerClient(f"127.0.0.1:{gateway.addresses.grpc_port}") as service:
        await Client(grpc_client, service).register(place, result)
        stream: Any = service.stream_infer(steps())
        async for answer, error in stream:
            assert error is None, error
            assert answer is not None

    assert [1, 3, 6, 10, 15, 21, 28, 36] == result.get(8)


async def test_by_default_there_is_none(gateway_settings: GatewaySettings, executor: FakeExecutor) -> None:
    refusal = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
    async with gateway_running(gateway_settings) as running, http_aio.InferenceServerClient(running.url) as service:
        with memory() as place:
            client = Client(http_client, service)
            with pytest.raises(InferenceServerException, match=refusal):
                await client.register(place)
            with pytest.raises(InferenceServerException, match=refusal):
                await client.step([client.given("INPUT", place)], [], sequence_id=3, sequence_start=True)
        assert [] == await service.get_system_shared_memory_status()
        await service.unregister_system_shared_memory()
        assert "system_shared_memory" not in (await service.get_server_metadata())["extensions"]
