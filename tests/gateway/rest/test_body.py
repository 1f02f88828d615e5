"""Reading bodies: what takes long is done beside the event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import pytest

from gateway.bounds.byte_budget import ByteBudget
from gateway.rest import body
from gateway.rest.json_values import Json, parse_object
from shared.contract.errors import RequestError


@pytest.mark.parametrize(("size", "is_beside"), [(100, False), (body.BULKY_BYTES, True)])
async def test_a_bulky_document_does_not_hold_up_the_loop(
    size: int, is_beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def noticed(text: bytes) -> Json:
        threads.append(threading.get_ident())
        return parse_object(text)

    async def receive() -> Any:
        return {"type": "http.request", "body": b'{"a": "' + b"x" * size + b'"}'}

    monkeypatch.setattr(body, "parse_object", noticed)
    bounds = body.BodyBounds(2 * body.BULKY_BYTES, ByteBudget(4 * body.BULKY_BYTES))
    document = await body.read_object({"type": "http", "headers": [], "client": ("127.0.0.1", 1)}, receive, bounds)

    assert {"a": "x" * size} == document
    assert [is_beside] == [thread != threading.get_ident() for thread in threads]


async def test_clients_take_turns_in_which_bulky_documents_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with hundreds of them does not keep another one waiting for all."""
    read: list[str] = []

    def noticed(text: bytes) -> Json:
        document = parse_object(text)
        read.append(document["name"])
        return document

    monkeypatch.setattr(body, "parse_object", noticed)
    bounds = body.BodyBounds(2 * body.BULKY_BYTES, ByteBudget(99 * body.BULKY_BYTES))

    async def send(name: str, host: str) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b'{"name": "%b"}' % name.encode() + b" " * body.BULKY_BYTES}

        await body.read_object({"type": "http", "headers": [], "client": (host, 1)}, receive, bounds)

    async with asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(send(f"a{number}", "192.0.2.1"))
        tasks.create_task(send("b", "192.0.2.2"))

    assert ["a0", "a1", "b", "a2", "a3"] == read


@pytest.mark.parametrize("name", ["Inference-Session-Id", "Inference-Header-Content-Length"])
def test_a_header_with_two_values_is_refused(name: str) -> None:
    one, other = [(name.lower().encode(), value) for value in (b"12", b"13")]

    given = body.read_headers({"headers": [one, one]})
    assert "12" == str(given.session_id or given.header_length)
    with pytest.raises(RequestError, match=f"'{name}' has two values, '12' and '13': send one"):
        body.read_headers({"headers": [one, one, other]})


def test_two_tenants_of_one_request_are_refused() -> None:
    acme, rival = (b"seqmesh-tenant", b"acme"), (b"seqmesh-tenant", b"rival")

    assert "acme" == body.read_headers({"headers": [acme, acme]}).tenant
    with pytest.raises(RequestError, match="two tenants, 'acme' and 'rival'"):
        body.read_headers({"headers": [acme, rival]})


def test_headers_that_came_before_are_not_read_again_and_refused_ones_are_refused_again() -> None:
    known = ((b"content-length", b"12"), (b"inference-header-content-length", b"8"))
    broken = (*known, (b"inference-header-content-length", b"9"))

    headers = body.read_headers({"headers": known})
    assert headers is body.read_headers({"headers": (known[0], known[1])})
    assert headers == body.read_headers({"headers": list(known)})
    with pytest.raises(dataclasses.FrozenInstanceError):
        headers.header_length = None  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(2):
        with pytest.raises(RequestError, match="has two values"):
            body.read_headers({"headers": broken})
