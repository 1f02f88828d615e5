"""Models that no server should serve: each breaks one rule of the configuration, and the repository index says which.

The rules are those of `tests/shared/model_config/test_config_validation.py`, seen from outside (triton-spec 1.1, 1.2,
2, 3.1, 4).
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio

from tests.conformance.conftest import MakeTarget
from tests.conformance.repository import ModelText
from tests.shared.model_config import test_config_validation as rules

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
    *((f"{rules.IO} dynamic_batching {{ {body} }}", message) for body, message in rules.DYNAMIC),
    *(
        (f"{rules.IO} {text}", f"model 'm' sets '{path}', which is not supported: {why}")
        for text, path, why in rules.NOT_SERVED
    ),
]
SOUND = f'{rules.IO.replace("FP32", "INT32")} backend: "python"'


def named(message: str, model: str) -> str:
    """The message about a model that is not called m."""
    return re.sub(r"\bm(?=\b|_0)", model, message)


@pytest.mark.mesh_only("a Triton tells these reasons in its log alone")
async def test_the_index_says_which_rule_a_model_breaks(make_target: MakeTarget) -> None:
    broken = {f"broken{number}": case for number, case in enumerate(CASES)}
    target = make_target(
        [ModelText("sound", SOUND), *(ModelText(name, text) for name, (text, _) in broken.items())],
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
        if line["state"] != "UNAVAILABLE" or not line["reason"].endswith(named(broken[name][1], name))
    }
    assert not wrong, "\n".join(f"expected {broken[name][1]!r}, found {line}" for name, line in wrong.items())
