"""Decodes the body of a request of `generate`. Pure: bytes and configuration in, `InferCall` or an error out.

The body is any JSON object. A key that is the name of an input becomes that tensor, any other a parameter of the
request. Source: triton-spec 5.5; observed answers of Triton 2.51.

Triton gives `sequence_id` and the other controls to the model as plain parameters, so its sequence models cannot be
asked in this way. Here they control the sequences of a model that has any, and are plain parameters for all others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from gateway.models.metadata import metadata_shape
from gateway.requests.infer_call import InferCall, error_about
from gateway.rest.json_tensors import tensor_of_json
from gateway.rest.json_values import JsonError, members, parse, text_of
from gateway.rest.long_arrays import LongArray
from gateway.rest.request import MESH_PARAMETERS, custom_parameter
from shared.contract.endpoints import Endpoint
from shared.contract.errors import RequestError
from shared.contract.model_config import ModelConfig, TensorSpec
from shared.contract.parameters import Parameter
from shared.contract.tensors import Tensor, element_count

NESTED = "parameters"
"""The one key whose value may be an object. Its members are read like those of the body itself."""


def decode_generate(body: bytes, call: InferCall, config: ModelConfig) -> InferCall:
    """The call in a body.

    call    what the path and the headers say of it
    raises  RequestError in Triton's words
    """
    document = members(parse(body))
    call = msgspec.structs.replace(call, request_id=text_of(document.get("id", ""), "id"))
    reading = _Reading(call, config)
    for key, value in document.items():
        if key != NESTED:
            reading.take(key, value)
            continue
        if NESTED in config.inputs_by_name:
            raise RequestError(f"Keyword '{NESTED}' for nested schema also given as input tensor name")
        if not isinstance(value, dict):
            raise JsonError(
                f"Expected JSON object for keyword: '{NESTED}': attempt to access JSON non-object as object"
            )
        try:
            for inner, nested in cast("dict[str, Any]", value).items():
                reading.take(inner, nested)
        except RequestError as error:
            raise error.within(f"Converting keyword: '{NESTED}': ") from error
    return msgspec.structs.replace(
        call,
        inputs=tuple(reading.tensors.values()),
        parameters=reading.parameters,
        endpoint=Endpoint.GENERATE,
        **reading.fields,
    )


@dataclass(slots=True)
class _Reading:
    """What has been read of a body so far. fields: of `InferCall`, by name"""

    call: InferCall
    config: ModelConfig
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    parameters: dict[str, Parameter] = field(default_factory=dict[str, Parameter])
    fields: dict[str, Any] = field(default_factory=dict[str, Any])

    def take(self, key: str, value: Any) -> None:
        """Reads one member of the body."""
        spec = self.config.inputs_by_name.get(key)
        if spec is not None:
            if key in self.tensors:
                raise error_about(self.call, f"input '{key}' already exists in request")
            self.tensors[key] = generated_tensor(spec, metadata_shape(self.config, spec), value)
        elif key in MESH_PARAMETERS and (self.config.sequence_batching is not None or self.config.ensemble):
            field, read = MESH_PARAMETERS[key]
            self.fields[field] = read(value, key)
        else:
            self.parameters[key] = custom_parameter(key, value)


def generated_tensor(spec: TensorSpec, shape: tuple[int, ...], value: Any) -> Tensor:
    """The tensor of a scalar or a flat list. shape: as the metadata give it"""
    if isinstance(value, LongArray):
        return tensor_of_json(spec.name, spec.datatype, fitted(spec.name, shape, value.count), value)
    elements = cast("list[Any]", value) if isinstance(value, list) else [value]
    return tensor_of_json(spec.name, spec.datatype, fitted(spec.name, shape, len(elements)), elements)


def fitted(name: str, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """A shape with `count` elements: the right-most -1 takes what the fixed dimensions leave, any other becomes 1.

    raises  RequestError in Triton's words if no such shape exists
    """
    fixed = element_count([dim for dim in shape if dim != -1])
    last = max((place for place, dim in enumerate(shape) if dim == -1), default=None)
    if not fixed or count % fixed or (last is None and count != fixed):
        raise RequestError(f"The schema can not convert input '{name}' to tensor with proper shape")
    return tuple(count // fixed if place == last else 1 if dim == -1 else dim for place, dim in enumerate(shape))
