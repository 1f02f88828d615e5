"""Encodes an answer as a response's body. Pure; source: triton-spec 5.4.

Binary outputs are sent as the executor wrote them. Numbers in JSON are written from arrays, and exactly.
"""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import orjson
from numpy.typing import NDArray

from gateway.requests.classification import classified
from gateway.requests.waiting import Answer
from gateway.rest.json_tensors import json_of_tensor
from gateway.rest.request import OutputForms


def encode_answer(answer: Answer, forms: OutputForms) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON if binary data follows (else None).

    Outputs that the client wants in shared memory are written there.

    raises  RequestError for an output that cannot be sent in the requested form
    """
    config = answer.model.config
    outputs: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    finite = True
    for output in answer.message.outputs:
        form = forms.of(output.name)
        tensor = classified(output, form.classes, answer.model) if form.classes else output
        described: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if form.part is not None:
            form.part.write(tensor.name, tensor.raw)
        elif form.binary:
            described["parameters"] = {"binary_data_size": len(tensor.raw)}
            blobs.append(tensor.raw)
        else:
            data = described["data"] = json_of_tensor(tensor)
            finite = finite and (isinstance(data, list) or _is_finite(data))
        outputs.append(described)
    document: dict[str, Any] = {"id": answer.request_id} if answer.request_id else {}
    document |= {"model_name": config.name, "model_version": answer.version}
    if answer.parameters:
        document["parameters"] = answer.parameters
    document["outputs"] = outputs
    head = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY) if finite else _with_non_finite(document)
    if not any(blobs):
        return head, None
    return b"".join((head, *blobs)), len(head)


def encode_generated(answer: Answer) -> bytes:
    """The body of an answer of `generate`: each output by its name, one of one element as a scalar (triton-spec 5.5).

    The response's parameters stand beside the outputs, and win over an output of the same name, as in Triton.

    raises  RequestError for an output that has no JSON form
    """
    document: dict[str, Any] = {}
    finite = True
    for output in answer.message.outputs:
        data = json_of_tensor(output)
        finite = finite and (isinstance(data, list) or _is_finite(data))
        document[output.name] = data[0] if len(data) == 1 else data
    document |= answer.parameters
    document |= {"id": answer.request_id} if answer.request_id else {}
    document |= {"model_name": answer.model.config.name, "model_version": answer.version}
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY) if finite else _with_non_finite(document)


def _is_finite(data: NDArray[Any]) -> bool:
    return data.dtype.kind != "f" or bool(np.isfinite(data).all())


def _with_non_finite(document: dict[str, Any]) -> bytes:
    """JSON with `NaN` and `Infinity`, which Triton writes and clients read. orjson would write null."""
    return json.dumps(document, default=_plain, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return cast("NDArray[Any]", value).tolist()
    return dict(value)
