"""The routes of open sequences, where a client is slow."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from gateway.bounds.byte_budget import ByteBudget
from gateway.rest import sequences
from gateway.rest.body import BodyBounds
from gateway.rest.sequences import SequenceRoutes
from shared.contract.errors import Code, NotDoneError, RequestError, UnavailableError
from shared.contract.messages import ModelRecord
from shared.contract.model_config import EnsembleStep, ModelConfig
from shared.store.sequence_status import Wanted

STEP = EnsembleStep("halve", "", {"IN": "VALUE"}, {"OUT": "half"})


class OneState:
    """What the routes know of the catalog and of sequences: any model is served, and every state has 10 bytes."""

    def __init__(self, *steps: EnsembleStep) -> None:
        self._config = ModelConfig("m", "", "ensemble", 0, (), (), ensemble=steps)

    def record(self, *_: str) -> tuple[ModelRecord, tuple[str, ...]]:
        return ModelRecord(self._config, "{}", ("1",)), ("1",)

    async def export_bytes(self, _: str) -> int:
        return 10

    async def fork(self, sequence: str, copy: str) -> None:
        raise NotDoneError(f"{sequence} -> {copy}", Code.NOT_FOUND)

    async def page(self, model: str, wanted: Wanted, *_: Any, **__: Any) -> Any:
        raise NotDoneError(f"{model} {wanted.version}", Code.NOT_FOUND)

    async def export_when_idle(self, sequence: str) -> str:
        return sequence


def scope(sequence: str, host: str = "192.0.2.1") -> Any:
    return {
        "type": "http",
        "path": "/",
        "path_params": {"model": "m", "id": sequence},
        "query_string": b"action=export",
        "headers": [],
        "client": (host, 1),
    }


async def test_a_client_that_does_not_read_its_export_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "to_file", str.encode)
    known: Any = OneState()
    budget = ByteBudget(1 << 20)
    routes = SequenceRoutes(known, known, BodyBounds(1 << 20, budget), is_open=True)
    waits, reads = asyncio.Event(), asyncio.Event()
    sent: dict[str, bytes] = {}

    async def never() -> Any:
        raise AssertionError

    def client(name: str, *, is_slow: bool = False) -> asyncio.Task[None]:
        async def send(message: Any) -> None:
            if is_slow:
                waits.set()
                await reads.wait()
            sent[name] = sent.get(name, b"") + message.get("body", b"")

        return asyncio.create_task(routes.act(scope(name), never, send))

    async with asyncio.timeout(30):
        slow = client("slow", is_slow=True)
        await waits.wait()
        held = budget.taken
        await client("quick")
        assert sent == {"quick": b"m||squick"}

        assert held == budget.taken > 0, "the file that waits is counted"
        reads.set()
        await slow
    assert sent["slow"] == b"m||sslow"
    assert budget.taken == 0


async def test_clients_take_turns_in_which_sequences_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a busy sequence that takes a second: one client that asks for many keeps another one waiting for one."""
    monkeypatch.setattr(sequences, "to_file", str.encode)
    known: Any = OneState()
    routes = SequenceRoutes(known, known, BodyBounds(1 << 20, ByteBudget(1 << 20)), is_open=True)
    sent: list[bytes] = []

    async def never() -> Any:
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async with asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(routes.act(scope(f"a{number}"), never, send))
        tasks.create_task(routes.act(scope("b0", "192.0.2.2"), never, send))

    assert [b"a0", b"a1", b"b0", b"a2", b"a3"] == [body[-2:] for body in sent if body]


async def test_of_an_ensemble_the_models_are_named_that_keep_its_sequences() -> None:
    known: Any = OneState(STEP, msgspec.structs.replace(STEP, model="total"), STEP)
    routes = SequenceRoutes(known, known, BodyBounds(1 << 20, ByteBudget(1 << 20)), is_open=True)
    unused: Any = None

    with pytest.raises(RequestError, match=r"'m' is an ensemble: .* the models of its steps \(halve, total\)"):
        await routes.list({**scope("1"), "query_string": b""}, unused, unused)


async def test_a_version_is_read_as_a_number_as_where_sequences_begin() -> None:
    known: Any = OneState()
    routes = SequenceRoutes(known, known, BodyBounds(1 << 20, ByteBudget(1 << 20)), is_open=True)
    unused: Any = None
    path = {"model": "m", "version": "01", "id": "a"}

    with pytest.raises(RequestError, match=r"m\|1\|sa -> m\|1\|sb$"):
        await routes.act(scope("a") | {"path_params": path, "query_string": b"action=fork&as=b"}, unused, unused)
    with pytest.raises(NotDoneError, match=r"^m 1$"):
        await routes.list(scope("a") | {"path_params": path, "query_string": b""}, unused, unused)


class LostSequences:
    """Whatever is asked of them, Redis fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        async def ask(*_: object) -> Any:
            raise self._error

        return ask


@pytest.mark.parametrize("error", [RedisConnectionError("gone"), ResponseError("OOM"), OSError("reset")])
@pytest.mark.parametrize("route", ["list", "show", "end", "act", "open_exported"])
async def test_without_redis_every_route_says_so(route: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog, lost = cast("Any", OneState()), cast("Any", LostSequences(error))
    routes = SequenceRoutes(catalog, lost, BodyBounds(1 << 20, ByteBudget(1 << 20)), is_open=True)
    monkeypatch.setattr(sequences, "from_file", Mock(return_value=SimpleNamespace(model="m", id=7)))
    asked = scope("7") | ({} if route == "act" else {"query_string": b""})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_: Any) -> None:
        raise AssertionError

    with pytest.raises(UnavailableError, match="Redis, which holds the sequences, cannot be reached or refuses: "):
        await getattr(routes, route)(asked, receive, send)
