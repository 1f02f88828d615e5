"""The document of all HTTP routes, in OpenAPI 3.1. Made of the table of routes, so that it cannot say anything else.

A handler's docstring becomes the description, and `gateway.rest.operations` says the rest. Pure.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from gateway.rest.operations import ERROR, JSON_TYPE, Content, Operation, Schema, operation_of
from gateway.rest.reply import Handler, RouteEndpoint
from gateway.restrictions import Restriction
from shared.store.release import RELEASE

PATH = "/v2/openapi.json"
PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
ROUTE_WORDS = re.compile(r"^(?:GET|POST|DELETE) [^:]+: ")
"""How docstrings of handlers begin: they name their route to those who read the code."""
EVERYWHERE = (403, 405, 408, 500, 503)
"""Statuses of errors that every route may answer."""
PATH_PARAMETERS: Mapping[str, Schema] = {
    "model": {"type": "string", "description": "Name of a model."},
    "version": {"type": "string", "pattern": "^[0-9]+$", "description": "A version of the model."},
    "id": {
        "type": "string",
        "description": "Id of a sequence; it may have slashes. Digits are a number, unless `type` says otherwise.",
    },
    "region": {"type": "string", "description": "Name of a region of shared memory."},
    "repository": {"type": "string", "description": "Name of a repository. There is only one."},
}
ERRORS: Mapping[int, str] = {
    400: "The request is wrong.",
    403: "The route is restricted to those who send a header, or a web page of another origin asks.",
    404: "The model, the version, or what else the path names is not there.",
    405: "The path has other methods; `Allow` names them.",
    408: "The request came too slowly. The connection is closed.",
    429: "The gateway holds as many bytes of requests as it may.",
    500: "The model failed, the JSON is broken, or the gateway made a mistake.",
    501: "The request asks for something that is not served.",
    503: "The mesh cannot take the request now.",
}
Document = dict[str, Any]


def document(routes: Iterable[tuple[str, str, RouteEndpoint]]) -> Document:
    """The whole document. routes: category, path as Starlette writes it, and endpoint"""
    paths: Document = {}
    schemes: Document = {}
    for category, path, endpoint in routes:
        entry: Document = {"parameters": [_path_parameter(name) for name in PARAMETER.findall(path)]}
        for method, handler in endpoint.handlers.items():
            entry[method.lower()] = {
                "tags": [category],
                "operationId": _operation_id(method, path),
                **_text_of(handler),
                **_described(operation_of(handler)),
            }
            if endpoint.restriction is not None:
                schemes[category] = _scheme(endpoint.restriction)
                entry[method.lower()]["security"] = [{category: []}]
        paths[PARAMETER.sub(r"{\1}", path)] = entry
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "seqmesh",
            "version": RELEASE,
            "description": "The v2 inference protocol with Triton's extensions, and the routes about sequences.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR},
            "responses": {str(status): _response(text, ERROR_CONTENT) for status, text in ERRORS.items()},
            **({"securitySchemes": schemes} if schemes else {}),
        },
    }


def _text_of(handler: Handler) -> Document:
    whole = ROUTE_WORDS.sub("", inspect.getdoc(handler) or "")
    summary, _, rest = whole.partition("\n\n")
    return {"summary": summary[:1].upper() + summary[1:], **({"description": rest} if rest else {})}


def _described(operation: Operation) -> Document:
    parameters = [
        {"name": name, "in": "query", "schema": schema, "required": False} for name, schema in operation.query.items()
    ]
    parameters += [
        {"name": name, "in": "header", "description": text, "schema": {"type": "string"}, "required": False}
        for name, text in operation.headers.items()
    ]
    responses = {str(status): _response(HTTPStatus(status).phrase, each) for status, each in operation.answers.items()}
    for status in sorted({*EVERYWHERE, *operation.errors}):
        responses.setdefault(str(status), {"$ref": f"#/components/responses/{status}"})
    made: Document = {"parameters": parameters, "responses": responses}
    if operation.body is not None:
        made["requestBody"] = {"content": _content(operation.body), "required": not operation.optional_body}
    return made


def _response(text: str, content: Content) -> Document:
    return {"description": text, **({"content": _content(content)} if content else {})}


def _content(content: Content) -> Document:
    return {kind: {"schema": schema} for kind, schema in content.items()}


ERROR_CONTENT: Content = {JSON_TYPE: {"$ref": "#/components/schemas/Error"}}


def _path_parameter(name: str) -> Document:
    schema = dict(PATH_PARAMETERS[name])
    return {"name": name, "in": "path", "required": True, "description": schema.pop("description"), "schema": schema}


def _operation_id(method: str, path: str) -> str:
    return "_".join([method.lower(), *re.findall(r"\w+", PARAMETER.sub(r"\1", path))])


def _scheme(restriction: Restriction) -> Document:
    return {"type": "apiKey", "in": "header", "name": restriction.key}
