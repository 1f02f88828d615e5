"""System shared memory as tritonclient uses it (triton-spec 5.9): what goes through it, and what is refused how.

Triton 2.51 has it always on; a mesh with `--allow-client-shm`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from tests.conformance.calls import fresh_id
from tests.conformance.targets import Target

SIZE = 64
PAGE = 4096
MODEL = "direct"


@pytest.fixture
def key() -> Iterator[str]:
    """A file of shared memory; its key."""
    name = f"/seqmesh-conformance-{uuid.uuid4().hex[:12]}"
    handle = shm.create_shared_memory_region(name, name, PAGE + SIZE)
    shm.set_shared_memory_region(handle, [np.arange(1, 17, dtype=np.int32)])
    shm.set_shared_memory_region(handle, [np.arange(17, 33, dtype=np.int32)], offset=PAGE)
    yield name
    shm.destroy_shared_memory_region(handle)


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, target: Target) -> Iterator[Any]:
    module: Any = http_client if request.param == "http" else grpc_client
    with module.InferenceServerClient(target.http if request.param == "http" else target.grpc) as made:
        made.module = module
        yield made
        made.unregister_system_shared_memory()


def contents(key: str, count: int, offset: int) -> list[int]:
    numbers = np.frombuffer(Path(f"/dev/shm{key}").read_bytes(), np.int32)
    return numbers[offset // 4 :][:count].tolist()


def infer(client: Any, *, given: tuple[str, int, int], wanted: tuple[str, int, int] | None = None, **rest: Any) -> Any:
    tensor = client.module.InferInput("INPUT", [1, 1], "INT32")
    tensor.set_shared_memory(given[0], given[1], given[2])
    output = client.module.InferRequestedOutput("OUTPUT")
    if wanted is not None:
        output.set_shared_memory(wanted[0], wanted[1], wanted[2])
    return client.infer(
        MODEL, [tensor], outputs=[output], **({"sequence_id": fresh_id(), "sequence_start": True} | rest)
    )


def refused(client: Any, text: str, **request: Any) -> None:
    with pytest.raises(InferenceServerException) as caught:
        infer(client, **request)
    assert caught.value.message() == text


def test_a_sequence_goes_through_a_region(client: Any, key: str) -> None:
    sequence = fresh_id()
    client.register_system_shared_memory("r", key, SIZE)

    for number in range(3):
        infer(
            client,
            given=("r", 4, 4 * number),
            wanted=("r", 4, 32 + 4 * number),
            sequence_id=sequence,
            sequence_start=number == 0,
            sequence_end=number == 2,
        )

    assert [1, 3, 6] == contents(key, 3, 32)


@pytest.mark.mesh_only("2.51 reads other memory of its process where a region does not begin with its file")
def test_a_region_may_be_a_part_of_its_file(client: Any, key: str) -> None:
    """Offsets of requests count from the region's beginning."""
    client.register_system_shared_memory("part", key, 8, offset=PAGE)

    answer = infer(client, given=("part", 4, 4), sequence_end=True)

    assert [[18]] == answer.as_numpy("OUTPUT").tolist()


def test_registering_in_tritons_words(client: Any, key: str) -> None:
    client.register_system_shared_memory("r", key, SIZE)

    for arguments, text in (
        (("r", key, SIZE), "shared memory region 'r' already in manager"),
        (("s", "/nowhere", SIZE), "Unable to open shared memory region: '/nowhere'"),
        (("s", "/../etc/hostname", 4), "Unable to open shared memory region: '/../etc/hostname'"),
    ):
        with pytest.raises(InferenceServerException) as caught:
            client.register_system_shared_memory(*arguments)
        assert text == caught.value.message()
    client.unregister_system_shared_memory("s")
    client.unregister_system_shared_memory("r")
    with pytest.raises(InferenceServerException, match="Unable to find system shared memory region: 'r'"):
        client.get_system_shared_memory_status("r")


NO_TEXT = "attempt to access JSON non-string as string"
NO_UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"byte_size": SIZE}, 400, "Shared memory register request has no 'key' field"),
        ({"key": "/k", "offset": 0}, 400, "Shared memory register request has no 'byte_size' field"),
        ({"key": None, "offset": -1}, 500, NO_TEXT),
        ({"key": "/k", "offset": "0"}, 500, NO_UNSIGNED),
        ({"key": "/k", "byte_size": 1.5}, 500, NO_UNSIGNED),
        ("", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
    ],
)
async def test_a_wrong_registration_is_refused_by_its_first_mistake(
    target: Target, body: Any, status: int, message: str
) -> None:
    url = f"http://{target.http}/v2/systemsharedmemory/region/r/register"
    data = json.dumps(body) if body else b""
    async with aiohttp.ClientSession() as session, session.post(url, data=data) as response:
        assert (status, {"error": message}) == (response.status, await response.json(content_type=None))


def test_requests_in_tritons_words(client: Any, key: str) -> None:
    client.register_system_shared_memory("r", key, SIZE)

    refused(client, "Unable to find shared memory region: 'x'", given=("x", 4, 0))
    refused(client, "Invalid offset + byte size for shared memory region: 'r'", given=("r", SIZE + 4, 0))
    refused(client, "Invalid offset + byte size for shared memory region: 'r'", given=("r", 0, 0))
    refused(client, "Invalid offset for shared memory region: 'r'", given=("r", 4, SIZE))


def test_an_output_that_does_not_fit(client: Any, key: str) -> None:
    client.register_system_shared_memory("r", key, SIZE)

    with pytest.raises(InferenceServerException) as caught:
        infer(client, given=("r", 4, 0), wanted=("r", 2, 0), sequence_end=True)

    assert (
        "shared memory size specified with the request for output 'OUTPUT' (2 bytes) should be at least 4 bytes to "
        "hold the results"
    ) in caught.value.message()
