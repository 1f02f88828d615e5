"""The console's HTTP on a mesh in a real Redis: the stream, lookups, who may act, browsers that do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import numpy as np
import pytest
from hypercorn.asyncio import serve as serve_http  # pyright: ignore[reportUnknownVariableType]

from deploy.console import app as module
from deploy.console import live as live_module
from deploy.console.access import Access
from deploy.console.app import ConsoleRoutes, Lookups, build_app, page_files
from deploy.console.live import LiveMesh
from deploy.console.reader import FOLLOWED_MAX, MeshReader
from deploy.console.service import config_of, listen, serve
from deploy.console.settings import ConsoleSettings
from shared.contract.ids import ExecutorId
from shared.contract.messages import ExecutorRegistration, ServedModel, StepFlag
from shared.origins import Origins
from shared.process.lifecycle import Stop, Tasks
from shared.store.commands import Redis
from shared.store.membership import Membership
from shared.store.redis_client import agree
from tests.deploy.console.readings import RECORD, executor, reading, status
from tests.scripted_mesh import ScriptedMesh

TOKEN = "a-token-of-some-length"
SIGNED_IN = {"authorization": f"Bearer {TOKEN}"}
ALICE = ExecutorId("alice-1")
SCRIPT = "<img src=x onerror=alert(1)>"
ONE = {"INPUT": np.ones((1, 1), np.int32)}
pytestmark = pytest.mark.leaves_sequences


@dataclass
class Served:
    """A console that runs, and a client of it."""

    client: aiohttp.ClientSession
    port: int
    live: LiveMesh

    async def messages(self, path: str, *kinds: str, **options: Any) -> dict[str, Any]:
        """The messages of a stream until all of these kinds have come."""
        found: dict[str, Any] = {}
        async with asyncio.timeout(30), self.client.get(path, **options) as answer:
            assert "text/event-stream" == answer.headers["content-type"]
            while not found.keys() >= set(kinds):
                kind = (await answer.content.readuntil(b"\n")).decode().removeprefix("event: ").strip()
                found[kind] = json.loads((await answer.content.readuntil(b"\n\n")).decode().removeprefix("data: "))
        return found


@pytest.fixture
async def mesh(redis: Redis, key_prefix: str) -> ScriptedMesh:
    """Two sequences in slots of one executor, and one that waits."""
    mesh = ScriptedMesh(redis, await agree(redis, key_prefix, 3), "sum")
    await mesh.open()
    membership = Membership(redis, mesh.keys)
    served = ServedModel("sum", "1", instances=1, slots=8, idle_ms=60_000)
    about = ExecutorRegistration(ALICE, "alice", host="h", pid=1, started_ms=0, models=(served,))
    await membership.register(about, lease_ms=60_000)
    await membership.publish(RECORD)
    for name in (42, SCRIPT, "waits"):
        await mesh.submit(mesh.submission(name, ONE, StepFlag.START))
    for name in (42, SCRIPT):
        await mesh.assign(name, ALICE)
    return mesh


@pytest.fixture
async def console(mesh: ScriptedMesh, redis_url: str, key_prefix: str) -> AsyncIterator[Served]:
    settings = ConsoleSettings(redis_url=redis_url, key_prefix=key_prefix, console_port=0, console_token=TOKEN)
    stop = Stop()
    ready: asyncio.Future[tuple[int, LiveMesh]] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        tasks = Tasks(group)
        serving = group.create_task(
            serve(settings, tasks, stop, on_ready=lambda port, live: ready.set_result((port, live)))
        )
        port, live = await ready
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            yield Served(client, port, live)
        stop.request("the test is over")
        await serving
        await tasks.end_all()


async def test_a_page_is_told_of_executors_models_and_sequences(console: Served) -> None:
    found = await console.messages("/api/live?model=sum&id=42", "begin", "view", "story")

    view = found["view"]
    assert [("alice", "serving", False)] == [(one["name"], one["state"], one["killable"]) for one in view["executors"]]
    assert {42, SCRIPT} == {one["id"] for one in view["sequences"]}
    assert [("sum", "sequences", 8, 2, 1)] == [
        (one["name"], one["kind"], one["slots"], one["used"], one["waiting"]) for one in view["models"]
    ]
    assert ("live", 42) == (found["story"]["sequence"]["state"], found["story"]["sequence"]["id"])
    assert not found["begin"]["can_kill"]


async def test_a_sequence_is_found_by_its_id_and_by_the_begin_of_it(console: Served) -> None:
    async def ids(query: str) -> list[Any]:
        async with console.client.get(f"/api/sequences?{query}") as answer:
            assert 200 == answer.status
            return [one["id"] for one in (await answer.json())["sequences"]]

    assert [42] == await ids("id=42")
    assert ["waits"] == await ids("id=waits")
    assert [] == await ids("id=nobody")
    assert ["waits"] == await ids("model=sum&prefix=wa")
    assert {42, SCRIPT, "waits"} == set(await ids("model=sum"))


async def test_configurations_are_shown(console: Served) -> None:
    async with console.client.get("/api/models/sum") as answer:
        assert {"name": "sum", "versions": ["1"], "config": {}} == await answer.json()


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/sequences?model=none", 404, "no model 'none' in this mesh"),
        ("/api/models/none", 404, "no model 'none' in this mesh"),
        (f"/api/sequences?id={'x' * 600}", 400, "'id' has more than 512 characters"),
    ],
)
async def test_what_is_not_there_is_an_error_with_words(console: Served, path: str, status: int, words: str) -> None:
    async with console.client.get(path) as answer:
        assert (status, {"error": words}) == (answer.status, await answer.json())


async def test_the_page_comes_with_headers_that_keep_foreign_content_out(console: Served) -> None:
    for path in ("/", "/api/health", "/api/models/none", "/nothing"):
        async with console.client.get(path) as answer:
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "'unsafe-inline'" not in answer.headers["content-security-policy"]
            assert "nosniff" == answer.headers["x-content-type-options"]
            assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "sign in"),
        ({"authorization": "Bearer wrong"}, "sign in"),
        (SIGNED_IN, "this console can kill nothing"),
        ({**SIGNED_IN, "origin": "https://evil.example"}, "web pages of other origins may not use this server"),
        ({**SIGNED_IN, "sec-fetch-site": "cross-site"}, "web pages of other sites"),
        ({**SIGNED_IN, "host": "evil.example:8003"}, "does not go by the name 'evil.example'"),
    ],
)
async def test_a_kill_needs_the_token_a_launcher_and_a_page_of_our_own(
    console: Served, headers: dict[str, str], words: str
) -> None:
    async with console.client.post("/api/executors/alice/kill", headers=headers) as answer:
        assert 403 == answer.status
        assert words in (await answer.json())["error"]


async def test_a_kill_is_no_get(console: Served) -> None:
    async with console.client.get("/api/executors/alice/kill", headers=SIGNED_IN) as answer:
        assert 405 == answer.status


async def test_a_name_that_was_made_to_lead_here_reads_nothing(console: Served) -> None:
    async with console.client.get("/api/live", headers={"host": "evil.example"}) as answer:
        assert 403 == answer.status


async def test_a_mesh_with_more_sequences_than_are_followed_is_shown_in_numbers(
    mesh: ScriptedMesh, redis: Redis, key_prefix: str
) -> None:
    shard = mesh.keys.shard_ids()[0]
    members = [f"sum||i{number}" for number in range(1000, 1000 + FOLLOWED_MAX)]
    await cast("Any", redis).sadd(mesh.keys.owned(shard, ALICE, "sum"), *members)
    reader = MeshReader(redis, key_prefix)
    before = await calls(redis)

    now = await reader.read([mesh.sequence(42)])

    assert (False, (), FOLLOWED_MAX + 2) == (now.is_complete, tuple(now.sequences), now.executors[0].total)
    watched = now.watched[mesh.sequence(42)]
    assert watched is not None
    assert "live" == watched.state
    # However many sequences there are.
    assert await calls(redis) - before < 60


async def calls(redis: Redis) -> int:
    """Commands that the server has run."""
    return int((await redis.info("stats"))["total_commands_processed"])


async def test_a_browser_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNREAD_S", 0.5)
    monkeypatch.setattr(live_module, "READ_EVERY_S", 0.001)
    many = tuple(status(f"{number} {'x' * 5000}") for number in range(100))

    class Readings:
        async def read(self, watched: object = ()) -> Any:
            await asyncio.sleep(0)
            return reading(1000, executor("a"), sequences=many)

    reader = cast("MeshReader", Readings())
    live = LiveMesh(reader, "0")
    access = Access(TOKEN, Origins(is_loopback=True), is_loopback=True)
    app = build_app(ConsoleRoutes(access, live, reader, Lookups(), None), page_files())
    listening = listen("127.0.0.1", 0)
    port: int = listening.getsockname()[1]
    stop = asyncio.Event()
    serving = asyncio.create_task(serve_http(cast("Any", app), config_of(listening), shutdown_trigger=stop.wait))
    reading_task = asyncio.create_task(live.run())

    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.sendall(b"GET /api/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        async with asyncio.timeout(30):
            while not live.pages:
                await asyncio.sleep(0.01)
            while live.pages:
                await asyncio.sleep(0.05)

    reading_task.cancel()
    stop.set()
    await serving
