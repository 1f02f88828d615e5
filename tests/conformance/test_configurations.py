"""Files `config.pbtxt` as protobuf's own parser takes them, and how the config endpoint shows what was read."""

from __future__ import annotations

import aiohttp

from tests.conformance.conftest import MakeTarget
from tests.conformance.repository import ModelText

TENSORS = """
backend: "python" max_batch_size: 4 instance_group [ { kind: KIND_CPU count: 1 } ]
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] } ]
"""


def parameter(literal: str) -> str:
    """A configuration with a parameter. literal: its value, as the file has it"""
    return f'{TENSORS} parameters {{ key: "k" value {{ string_value: {literal} }} }}'


READ = {
    "comment": TENSORS.encode() + "# Größe".encode("latin-1"),
    "escape": parameter(r""" "\"#\?" '\'\x41\101\u00e9' """).encode(),
    "floats": (
        f'{TENSORS} sequence_batching {{ control_input {{ name: "C" control {{ kind: CONTROL_SEQUENCE_START '
        "fp32_false_true: [ 1, 0.5 ] } } }"
    ).encode(),
}
REFUSED = {"backslash": parameter(r'"C:\models\deep"').encode()}


async def test_a_configuration_file_is_read_as_protobuf_reads_it(make_target: MakeTarget) -> None:
    texts = READ | REFUSED
    target = make_target([ModelText(name, "", {"config.pbtxt": text}) for name, text in texts.items()])
    shown: dict[str, str] = {}
    async with aiohttp.ClientSession(f"http://{target.http}") as http:
        for name in texts:
            async with http.get(f"/v2/models/{name}/config") as response:
                if response.status == 200:
                    shown[name] = await response.text()

    assert READ.keys() == shown.keys()
    assert '"k":{"string_value":"\\"#?\'AAé"}' in shown["escape"]
    assert '"fp32_false_true":[1,0.5]' in shown["floats"]
