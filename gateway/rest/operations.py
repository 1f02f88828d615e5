"""What the document of the HTTP routes says of a handler, beside its docstring.

`described` keeps it with the handler, so that a route is described where it is written. `gateway.rest.openapi` makes
the document of it. Schemas are JSON Schema of the dialect of OpenAPI 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from shared.contract.errors import Retry
from shared.contract.tensors import NUMPY_TYPE

Schema = Mapping[str, Any]
H = TypeVar("H", bound=Callable[..., Any])
JSON_TYPE, BINARY_TYPE, EVENTS_TYPE = "application/json", "application/octet-stream", "text/event-stream"

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
BYTES: Schema = {"type": "string", "format": "binary"}
ANY_OBJECT: Schema = {"type": "object"}


def members(required: str = "", **properties: Schema) -> Schema:
    """An object. required: names of members that are always there; others may be"""
    return {"type": "object", "properties": properties, "required": required.split()}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def one_of(words: Any) -> Schema:
    return {"type": "string", "enum": [str(word) for word in words]}


Content = Mapping[str, Schema]
"""A body: media type -> schema; empty for one without bytes."""
NOTHING: Content = {}


def json_content(schema: Schema) -> Content:
    return {JSON_TYPE: schema}


@dataclass(frozen=True, slots=True)
class Operation:
    """One handler.

    answers        status -> body of every answer that is no error
    errors         statuses of its errors, beside those that every route may answer
    body           None: the request's body is not read
    optional_body  the body may be empty
    query          parameters behind the path's question mark: name -> schema with a description
    headers        the request's headers with a meaning for this route: name -> description
    """

    answers: Mapping[int, Content]
    errors: tuple[int, ...] = ()
    body: Content | None = None
    optional_body: bool = False
    query: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


def described(*answers: tuple[int, Content] | Schema, **about: Any) -> Callable[[H], H]:
    """Describes a handler.

    answers  (status, body), or the schema of a JSON body of status 200
    about    the other fields of `Operation`
    """
    by_status = dict(each if isinstance(each, tuple) else (200, json_content(each)) for each in answers)

    def mark(handler: H) -> H:
        handler.__dict__["operation"] = Operation(by_status, **about)
        return handler

    return mark


def operation_of(handler: Callable[..., Any]) -> Operation:
    """What was said of a handler. Raises TypeError if nothing was."""
    operation = getattr(handler, "operation", None)
    if not isinstance(operation, Operation):
        raise TypeError(f"{handler} answers a route and is not described")
    return operation


# -- statuses ---------------------------------------------------------------------------------------------------------

OF_BODY = (400, 501)
"""Errors of a route that reads a body: it is wrong, or packed in a way that is not served."""
OF_MODEL = (400, 404)
"""Errors of a route about a model: its version is no number, or it is not there."""
OF_INFERENCE = (400, 404, 429, 501)

ERROR = members(
    "error",
    error={"type": "string", "description": "What is wrong, in Triton's words where Triton has them."},
    reason={"type": "string", "description": "Of a step of a sequence: why, in one word."},
    last_step={"type": "integer", "description": "The last step that the mesh has accepted of the sequence."},
    retry=one_of(retry.value for retry in Retry),
)

SESSION_TEXT = "Id of a session (docs/triton/dialect.md). Where the gateway makes one, the answer has it."

# -- bodies -----------------------------------------------------------------------------------------------------------

DATATYPE = one_of((*NUMPY_TYPE, "BF16", "BYTES"))
PARAMETERS: Schema = {"type": "object", "additionalProperties": {"type": ["string", "integer", "boolean", "number"]}}
SHAPE = array(WHOLE)
TENSOR_METADATA = members("name datatype shape", name=TEXT, datatype=DATATYPE, shape=SHAPE)
TENSOR = members(
    "name datatype shape", name=TEXT, datatype=DATATYPE, shape=SHAPE, data=array({}), parameters=ANY_OBJECT
)
INFER_REQUEST = members(
    "inputs",
    id=TEXT,
    inputs=array(TENSOR),
    outputs=array(members("name", name=TEXT, parameters=ANY_OBJECT)),
    parameters=PARAMETERS,
)
INFER_RESPONSE = members(
    "model_name model_version outputs",
    id=TEXT,
    model_name=TEXT,
    model_version=TEXT,
    parameters=PARAMETERS,
    outputs=array(TENSOR),
)
GENERATE_REQUEST: Schema = {
    **members(id=TEXT, parameters=PARAMETERS),
    "additionalProperties": {"description": "A tensor, if the key is the name of an input; else a parameter."},
}
GENERATE_RESPONSE: Schema = {
    **members("model_name model_version", id=TEXT, model_name=TEXT, model_version=TEXT),
    "additionalProperties": {"description": "An output, or a parameter of the response."},
}
EVENTS: Schema = {"type": "string", "description": "Events `data: {...}`: a response of `generate` each, or an error."}
LIVE = members("live", live=FLAG)
READY = members("ready", ready=FLAG)
NOT_READY = members("ready error", ready=FLAG, error=TEXT)
MODEL_READY = members("name ready", name=TEXT, ready=FLAG)
SERVER_METADATA = members("name version extensions", name=TEXT, version=TEXT, extensions=array(TEXT))
MODEL_METADATA = members(
    "name versions platform inputs outputs",
    name=TEXT,
    versions=array(TEXT),
    platform=TEXT,
    inputs=array(TENSOR_METADATA),
    outputs=array(TENSOR_METADATA),
)
MODEL_CONFIG: Schema = {"type": "object", "description": "Triton's message `ModelConfig`, normalised, as JSON."}
STATISTICS = members(
    "model_stats",
    model_stats=array(
        members(
            "name version last_inference inference_count execution_count inference_stats batch_stats memory_usage",
            name=TEXT,
            version=TEXT,
            last_inference=COUNT,
            inference_count=COUNT,
            execution_count=COUNT,
            inference_stats={"type": "object", "additionalProperties": members("count ns", count=COUNT, ns=COUNT)},
            response_stats=ANY_OBJECT,
            batch_stats=array(ANY_OBJECT),
            memory_usage=array(members("type id byte_size", type=TEXT, id=WHOLE, byte_size=COUNT)),
        )
    ),
)
INDEX = array(members("name", name=TEXT, version=TEXT, state=TEXT, reason=TEXT))
LOAD: Schema = members(
    parameters={
        "type": "object",
        "properties": {"config": {"type": "string", "description": "The configuration, as JSON."}},
        "additionalProperties": {"type": "string", "description": "A file `file:<version>/<name>`, in base64."},
    }
)
UNLOAD = members(parameters=members(unload_dependents=FLAG))
TRACE_SETTINGS: Schema = {**members(trace_level=array(TEXT)), "additionalProperties": {"type": "string"}}
TRACE_CHANGES: Schema = {
    **members(trace_level={"type": ["array", "null"], "items": TEXT}),
    "additionalProperties": {"type": ["string", "null"], "description": "null takes the setting back."},
}
REGIONS = array(members("name key offset byte_size", name=TEXT, key=TEXT, offset=COUNT, byte_size=COUNT))
REGION = members("key byte_size", key=TEXT, offset=COUNT, byte_size=COUNT)


def of_struct(kind: type[msgspec.Struct], **more: Schema) -> Schema:
    """The schema of a struct of its own, with further members.

    It has no title: generators of clients make a type of each, and fail where two schemas share one.
    """
    (schema,) = msgspec.json.schema(kind)["$defs"].values()
    del schema["title"]
    return {**schema, "properties": {**schema["properties"], **more}}
