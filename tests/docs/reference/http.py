"""http.md: every HTTP route, as the document at /v2/openapi.json tells it."""

from __future__ import annotations

from itertools import groupby
from typing import Any, cast
from unittest.mock import MagicMock

from gateway.rest.app import Answering, build_app
from gateway.rest.generate import Generate
from gateway.rest.infer import Infer
from gateway.rest.models import Models
from gateway.rest.observability import Observability
from gateway.rest.openapi import ERRORS, EVERYWHERE, PATH, PATH_PARAMETERS, document
from gateway.rest.sequences import SequenceRoutes
from gateway.rest.server import ServerRoutes
from gateway.rest.shared_memory import SystemSharedMemory
from tests.docs.reference.markdown import code, page, table, text

VERSION = "/versions/{version}"
FAILURES = 400
"""From here on statuses are errors."""
INTRODUCTION = f"""
Every gateway serves this page's content as a document in OpenAPI 3.1 at `GET {PATH}`, with the schema of each
body. Of a gateway with restricted categories it also names the headers that they ask for. A web page of another origin
is refused, so a viewer of such documents gets it as a file.

Paths about a model may name a version: `/v2/models/{{model}}{VERSION}/...`. Bodies are JSON, unless the table says
otherwise; an optional body is in brackets. Errors are JSON with the member `error`; what else they have stands in
[Errors](errors.md). Beside those in the tables, every route may answer {", ".join(map(str, EVERYWHERE))}.
"""


def http() -> str:
    """The page."""
    nobody = MagicMock()
    routes = build_app(
        Infer(nobody, nobody, nobody, nobody),
        Generate(nobody, nobody, nobody),
        Models(nobody, nobody, nobody, nobody),
        ServerRoutes(nobody, nobody, nobody, name="", shared_memory=False),
        Observability(nobody, nobody),
        SequenceRoutes(nobody, nobody, nobody, is_open=True),
        SystemSharedMemory(nobody, nobody),
        nobody,
        {},
    ).routes
    described = document(cast("Answering", route).described for route in routes)
    found = [
        (operation["tags"][0], method.upper(), path, operation)
        for path, entry in described["paths"].items()
        for method, operation in entry.items()
        if method != "parameters"
    ]
    # A path with a version says the same as the one without it, which stands before it.
    found = [each for each in found if VERSION not in each[2]]
    parts = [INTRODUCTION]
    for category, operations in groupby(sorted(found, key=lambda each: each[0]), lambda each: each[0]):
        rows = [_row(method, path, operation) for _, method, path, operation in operations]
        parts += [f"## {category}", table(("route", "what it does", "body", "answers", "errors"), rows)]
    return page(
        "HTTP routes",
        *parts,
        "## Parameters of paths",
        table(
            ("name", "meaning"), [(code(name), text(about["description"])) for name, about in PATH_PARAMETERS.items()]
        ),
        "## Parameters of queries and headers",
        table(("route", "name", "meaning"), [row for each in found for row in _parameters(*each[1:])]),
        "## Errors",
        table(("status", "meaning"), [(code(str(status)), text(about)) for status, about in ERRORS.items()]),
    )


def _row(method: str, path: str, operation: dict[str, Any]) -> tuple[str, ...]:
    asked = operation.get("requestBody")
    body = _kinds(asked["content"]) if asked else ""
    responses = {int(status): told for status, told in operation["responses"].items()}
    answers = [f"{status} {_kinds(told.get('content', {}))}" for status, told in responses.items() if status < FAILURES]
    errors = [f"{status}" for status in sorted(responses) if status >= FAILURES and status not in EVERYWHERE]
    about = " ".join(f"{operation['summary']} {operation.get('description', '')}".split())
    return (
        code(f"{method} {path}"),
        text(about),
        body if not asked or asked["required"] else f"[{body}]",
        "; ".join(answers).strip(),
        ", ".join(errors),
    )


def _kinds(content: dict[str, Any]) -> str:
    return ", ".join("JSON" if kind == "application/json" else code(kind) for kind in content)


def _parameters(method: str, path: str, operation: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            code(f"{method} {path}"),
            code(one["name"]),
            text(one.get("description") or one["schema"].get("description") or _range(one["schema"])),
        )
        for one in operation["parameters"]
    ]


def _range(schema: dict[str, Any]) -> str:
    return f"From {schema['minimum']} to {schema['maximum']}; {schema['default']} by default."
