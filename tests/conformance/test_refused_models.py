"""Models that no server should serve: each breaks one rule of the configuration, and the repository index says which.

The rules are those of `tests/executor/configuration/test_config_validation.py`, seen from outside (triton-spec 1.1,
1.2, 2, 3.1, 4).
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio

from tests.conformance.conftest import MakeTarget
from tests.conformance.repository import ModelText
from tests.executor.configuration import test_config_validation as rules

CASES = [
    *rules.TENSORS,
    *rules.CONTROLS,
    *rules.SEQUENCES,
    *rules.STATES,
    *rules.INSTANCES,
    *rules.PARAMETERS,
    *rules.BATCH_IO,
    *rules.METRICS,
    *rules.WARMUP,
    *rules.ENSEMBLES,
    *((f"{rules.IO} dynamic_batching {{ {body} }}", message) for body, message in rules.DYNAMIC),
    *(
        (f"{rules.IO} {text}", f"model 'm' sets '{path}', which is not supported: {why}")
        for text, path, why in rules.NOT_SERVED
    ),
]
UNREADABLE = f"{rules.IO} sequence_batching {{ generative_sequence: true }}"
STATE_FILE = rules.state(rules.ZERO.replace("zero_data: true", 'data_file: "h0"'))
WARM_UP_FILE = rules.warmup('data_type: TYPE_FP32 dims: 4 input_data_file: "x"')
ON_DISK: list[tuple[str, dict[str, str | bytes], str]] = [
    (
        "",
        {"config.pbtxt": f'name: "other" {rules.IO}'},
        "unexpected directory name 'm' for model 'other', directory name must equal model name",
    ),
    (
        f"{rules.IO} version_policy {{ specific {{ versions: 7 }} }}",
        {},
        "at least one version must be available under the version policy of model 'm'",
    ),
    (
        rules.IO,
        {"1/weights.bin": b""},
        (
            "Invalid model name: Could not determine backend for model 'm' with no backend in model configuration. "
            "Expected model name of the form 'model.<backend_name>'."
        ),
    ),
    (
        STATE_FILE,
        {"initial_state/h0": bytes(23)},
        "initial_state setting expects 24 bytes, but the data provided from h0only has 23 bytes.",
    ),
    (
        WARM_UP_FILE,
        {"warmup/x": bytes(15)},
        "[request id: <id_unknown>] warmup setting expects 16 bytes, but the data provided from xonly has 15 bytes",
    ),
    (
        f"{rules.IO} dynamic_batching {{ }}",
        {"1/model.py": "", "batchstrategy.so": b""},
        "batchstrategy.so is not supported for m: a batch strategy is a Python file here",
    ),
    (UNREADABLE, {}, 'Message type "inference.ModelSequenceBatching" has no field named "generative_sequence"'),
]
"""Configuration, further files, and what is said of them."""
SOUND = f'{rules.IO.replace("FP32", "INT32")} backend: "python"'


def named(message: str, model: str) -> str:
    """The message about a model that is not called m."""
    return re.sub(r"\bm(?=\b|_0)", model, message)


@pytest.mark.mesh_only("a Triton tells these reasons in its log alone")
async def test_the_index_says_which_rule_a_model_breaks(make_target: MakeTarget) -> None:
    cases = [*((text, dict[str, str | bytes](), message) for text, message in CASES), *ON_DISK]
    broken = {f"broken{number}": case for number, case in enumerate(cases)}
    target = make_target(
        [ModelText("sound", SOUND), *(ModelText(name, text, files) for name, (text, files, _) in broken.items())],
        env={"SEQMESH_GPU": "none"},
    )

    async with http_aio.InferenceServerClient(target.http) as web, grpc_aio.InferenceServerClient(target.grpc) as far:
        rpc: Any = far
        over_http: Any = await web.get_model_repository_index()
        over_grpc = await rpc.get_model_repository_index(as_json=True)
        with pytest.raises(Exception, match="Request for unknown model: 'broken0' has no available versions"):
            await rpc.get_model_metadata("broken0")

    assert over_http == over_grpc["models"]
    lines = {line["name"]: line for line in over_http}
    assert "READY" == lines.pop("sound")["state"]
    assert broken.keys() == lines.keys()
    wrong = {
        name: line
        for name, line in lines.items()
        if line["state"] != "UNAVAILABLE" or named(broken[name][-1], name) not in line["reason"]
    }
    assert not wrong, "\n".join(f"expected {broken[name][-1]!r}, found {line}" for name, line in wrong.items())
