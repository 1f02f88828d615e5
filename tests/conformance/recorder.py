# The module of the Python API exists only where a server runs the model.
# pyright: basic, reportMissingImports=false
"""A model that answers with what it saw. It is the `1/model.py` of every model here that brings none of its own.

Which tensors it has, its configuration says. It fills each configured output by its name:

    OUTPUT      INT32, shaped like INPUT: what the sequence has sent as INPUT so far, summed up (kept by correlation id,
                or by `instance` name and position for a null row); without a sequence, INPUT itself
    SEEN        BYTES [1] or [1, 1]: JSON of the whole call of `execute`, see `seen`
    <X>_ECHO    the input X as it came; left out when X was
    <state>     the output of a declared state: the state that came in, plus one (numbers) or the element "+" (strings)

Parameters of a request make it do things:

    hold   path of a file: the call goes on when the file is gone; beside it `<path>.entered` says that it has begun
    fail   this request's response is an error with this text
    raise  `execute` raises with this text
    tell   JSON of the response's parameters; Triton 2.51 has none
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

HOLD_MAX_S = 60.0


class TritonPythonModel:
    """One instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Reads which tensors there are."""
        self.config = json.loads(args["model_config"])
        self.instance = args.get("model_instance_name", "")
        batching = self.config.get("sequence_batching") or {}
        self.states = {state["output_name"]: state["input_name"] for state in batching.get("state", [])}
        self.names = [tensor["name"] for tensor in self.config["input"]]
        self.names += [control["name"] for control in batching.get("control_input", [])]
        self.names += self.states.values()
        self.tells = any(output["name"] == "SEEN" for output in self.config["output"])
        self.calls = 0
        self.sums: dict[Any, Any] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request."""
        self.calls += 1
        parameters = [json.loads(request.parameters() or "{}") for request in requests]
        for wishes in parameters:
            if "hold" in wishes:
                wait_until_gone(Path(wishes["hold"]))
            if "raise" in wishes:
                raise RuntimeError(wishes["raise"])
        rows = [self.row(request, wishes) for request, wishes in zip(requests, parameters, strict=True)]
        return [self.answer(index, request, rows) for index, request in enumerate(requests)]

    def row(self, request: Any, parameters: dict[str, Any]) -> dict[str, Any]:
        """What one request brought."""
        tensors = {}
        for name in self.names:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is not None:
                array = tensor.as_numpy()
                # Large tensors are sent to models that do not tell of them.
                tensors[name] = {"shape": list(array.shape), "data": plain(array) if self.tells else None}
        return {
            "request_id": request.request_id(),
            "correlation_id": request.correlation_id(),
            "flags": request.flags(),
            "parameters": parameters,
            "outputs": sorted(request.requested_output_names()),
            "tensors": tensors,
        }

    def answer(self, index: int, request: Any, rows: list[dict[str, Any]]) -> Any:
        """The response to one request."""
        text = rows[index]["parameters"].get("fail")
        if text is not None:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))
        outputs = [output["name"] for output in self.config["output"]]
        names = [*outputs, *(name for name in self.states if name not in outputs)]
        told = json.loads(rows[index]["parameters"].get("tell", "{}"))
        given = rows[index]["tensors"]
        names = [name for name in names if not name.endswith("_ECHO") or name[: -len("_ECHO")] in given]
        made = [self.output(name, index, request, rows) for name in names]
        return pb_utils.InferenceResponse(made, parameters=told) if told else pb_utils.InferenceResponse(made)

    def output(self, name: str, index: int, request: Any, rows: list[dict[str, Any]]) -> Any:
        """One output tensor."""
        if name in self.states:
            state = pb_utils.get_input_tensor_by_name(request, self.states[name]).as_numpy()
            return pb_utils.Tensor(name, state + (b"+" if state.dtype == object else state.dtype.type(1)))
        if name.endswith("_ECHO"):
            return pb_utils.Tensor(name, pb_utils.get_input_tensor_by_name(request, name[: -len("_ECHO")]).as_numpy())
        if name == "SEEN":
            shape = [1, 1] if self.config["max_batch_size"] > 0 else [1]
            return pb_utils.Tensor(name, np.array([self.seen(index, rows)], dtype=object).reshape(shape))
        return pb_utils.Tensor(name, self.sum(request, rows[index]))

    def seen(self, index: int, rows: list[dict[str, Any]]) -> bytes:
        """The call: its instance, how many calls came before it, which row this request was, and all rows."""
        return json.dumps({"instance": self.instance, "call": self.calls, "row": index, "rows": rows}).encode()

    def sum(self, request: Any, row: dict[str, Any]) -> Any:
        """The sum of the request's sequence, this request included."""
        value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
        sequence = row["correlation_id"]
        if not sequence:
            return value
        started = row["flags"] & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        self.sums[sequence] = value if started else self.sums.get(sequence, 0) + value
        return self.sums[sequence].astype(np.int32)


def plain(array: Any) -> Any:
    """An array as JSON can say it: nested lists, texts for BYTES."""
    if array.dtype == object:
        return [element.decode("utf-8", "replace") for element in array.reshape(-1).tolist()]
    return array.tolist()


def wait_until_gone(path: Path) -> None:
    """Returns when the file has been removed; after a minute in any case, so that nothing hangs for ever."""
    Path(f"{path}.entered").touch()
    deadline = time.monotonic() + HOLD_MAX_S
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
