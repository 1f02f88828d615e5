"""The configuration that a load request brings: JSON, and what Triton's parser reads beyond it."""

from __future__ import annotations

import aiohttp

from tests.conformance.conftest import MakeTarget

INPUT = '"input": [{"name": "INPUT", "data_type": "TYPE_INT32", "dims": [1]}]'
OUTPUT = (
    '"output": [{"name": "OUTPUT", "data_type": "TYPE_INT32", "dims": [1]}, '
    '{"name": "SEEN", "data_type": "TYPE_STRING", "dims": [1]}]'
)
REST = f'"backend": "python", {INPUT}, {OUTPUT}'
# REST stands for what every configuration has.
READ = {
    "strict": '{"max_batch_size": 3, REST}',
    "trailing commas": '{"max_batch_size": 3, "instance_group": [{"count": 1, "kind": "KIND_CPU",},], REST,}',
    "bare keys": "{max_batch_size: 3, REST}",
    "texts for bools": '{"max_batch_size": 3, "response_cache": {"enable": "False"}, REST}',
    "dashes in enums": '{"max_batch_size": 3, "instance_group": [{"kind": "kind-cpu"}], REST}',
    "single quotes": "{'max_batch_size': 3, 'parameters': {'a': {'string_value': 'it\\'s'}}, REST}",
}
REFUSED = {
    "a lone comma": "{,}",
    "two commas": '{"max_batch_size": 3,, REST}',
    "no colon": '{"max_batch_size" 3, REST}',
    "a keyword as key": '{"max_batch_size": 3, "parameters": {true: {"string_value": "x"}}, REST}',
    "a bare value": '{"max_batch_size": three, REST}',
    "a fraction for an enum": '{"max_batch_size": 3, "instance_group": [{"kind": 2.5}], REST}',
    "a bool for an enum": '{"max_batch_size": 3, "instance_group": [{"kind": true}], REST}',
    "a comment": '{"max_batch_size": 3 /* rows */, REST}',
}


async def test_an_override_is_read_as_loosely_as_protobuf_does(make_target: MakeTarget) -> None:
    target = make_target(["stateless"], options={"model-control-mode": "explicit"})
    sizes: dict[str, int] = {}
    refused: dict[str, int] = {}
    async with aiohttp.ClientSession(f"http://{target.http}") as http:
        for name, config in (READ | REFUSED).items():
            load = {"parameters": {"config": config.replace("REST", REST)}}
            async with http.post("/v2/repository/models/stateless/load", json=load) as response:
                if response.status != 200:
                    refused[name] = response.status
                    continue
            async with http.get("/v2/models/stateless/config") as response:
                sizes[name] = (await response.json())["max_batch_size"]

    assert (dict.fromkeys(READ, 3), {*REFUSED}) == (sizes, {*refused})
