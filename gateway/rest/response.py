"""Encodes an answer as a response's body. Pure; source: triton-spec 5.4.

Binary outputs are sent as the executor wrote them. Numbers in JSON are written from arrays, and exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from gateway.bounds.pieces import PIECE, pieces
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
            described["data"] = _writable(json_of_tensor(tensor))
        outputs.append(described)
    document: dict[str, Any] = {"id": answer.request_id} if answer.request_id else {}
    document |= {"model_name": config.name, "model_version": answer.version}
    if answer.parameters:
        document["parameters"] = answer.parameters
    document["outputs"] = outputs
    head = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    if not any(blobs):
        return head, None
    return b"".join((head, *blobs)), len(head)


def encode_generated(answer: Answer) -> bytes:
    """The body of an answer of `generate`: each output by its name, one of one element as a scalar (triton-spec 5.5).

    The response's parameters stand beside the outputs, and win over an output of the same name, as in Triton.

    raises  RequestError for an output that has no JSON form
    """
    document: dict[str, Any] = {}
    for output in answer.message.outputs:
        data = json_of_tensor(output)
        document[output.name] = _writable(data, is_scalar=len(data) == 1)
    document |= answer.parameters
    document |= {"id": answer.request_id} if answer.request_id else {}
    document |= {"model_name": answer.model.config.name, "model_version": answer.version}
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def _writable(data: NDArray[Any] | list[str], *, is_scalar: bool = False) -> Any:
    """Elements as what orjson is to write: an array, or its only element (is_scalar)."""
    if len(data) > PIECE:
        parts = [_written(data[piece])[1:-1] for piece in pieces(len(data))]
        parts[0], parts[-1] = b"[" + parts[0], parts[-1] + b"]"
        return orjson.Fragment(b",".join(parts))
    if _is_of_json(data):
        return data[0] if is_scalar else data
    text = _written(data)
    return orjson.Fragment(text[1:-1] if is_scalar else text)


def _is_of_json(data: NDArray[Any] | list[str]) -> bool:
    """Whether JSON has a form for every element: it has none for NaN and infinity."""
    return isinstance(data, list) or data.dtype.kind != "f" or bool(np.isfinite(data).all())


def _written(data: NDArray[Any] | list[str]) -> bytes:
    """Elements as an array.

    Triton writes `NaN` and `Infinity`, and clients read them. orjson would write null, so those are put in its place.
    """
    text = orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)
    if isinstance(data, list) or _is_of_json(data):
        return text
    odd = data[~np.isfinite(data)]
    words = np.where(np.isnan(odd), b"NaN", np.where(odd > 0, b"Infinity", b"-Infinity")).tolist()
    return text.replace(b"null", b"%b") % tuple(words)
