"""HTTP requests byte by byte, for what no client library would send."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Response:
    """What came back. headers: by lower-case name."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The text of a refusal."""
        return str(self.document["error"])


def send(
    address: str, method: str, path: str, body: bytes | str = b"", headers: Mapping[str, str] | None = None
) -> Response:
    """One request on a connection of its own. Blocks."""
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Response(response.status, found, response.read())
    finally:
        connection.close()


def get(address: str, path: str) -> Response:
    """GET. Blocks."""
    return send(address, "GET", path)


def post(address: str, path: str, document: Any, headers: Mapping[str, str] | None = None) -> Response:
    """POST of a JSON document. Blocks."""
    return send(address, "POST", path, json.dumps(document), headers)


async def posted(address: str, path: str, document: Any, headers: Mapping[str, str] | None = None) -> Response:
    """`post`, while the loop runs on."""
    return await asyncio.to_thread(post, address, path, document, headers)


def infer_document(value: int, **parameters: Any) -> dict[str, Any]:
    """An inference request for a running sum."""
    return {
        "parameters": parameters,
        "inputs": [{"name": "INPUT", "shape": [1, 1], "datatype": "INT32", "data": [value]}],
    }


def answer(response: Response) -> int:
    """The sum in a response."""
    assert response.status == http.HTTPStatus.OK, response.body
    (output,) = response.document["outputs"]
    (value,) = output["data"]
    return int(value)
