"""The console's HTTP on a mesh in a real Redis: the stream, lookups, who may act, browsers that do not read."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import aiohttp
import msgspec
import numpy as np
import pytest
from hypercorn.asyncio import serve as serve_http  # pyright: ignore[reportUnknownVariableType]
from redis.exceptions import ResponseError
from yarl import URL

from deploy.console import app as module
from deploy.console import live as live_module
from deploy.console.access import Access
from deploy.console.actions import Actions
from deploy.console.app import ConsoleRoutes, Lookups, build_app, page_files
from deploy.console.live import LiveMesh
from deploy.console.reader import FOLLOWED_MAX, MeshReader
from deploy.console.service import config_of, listen, serve
from deploy.console.settings import ConsoleSettings
from deploy.local.control import control_served
from shared.contract.errors import UnavailableError
from shared.contract.ids import ExecutorId, SequenceId
from shared.contract.messages import ExecutorRegistration, ServedModel, StepFlag
from shared.contract.record import CANCELLED, DURABLE, STATE
from shared.origins import Origins
from shared.process.lifecycle import Stop, Tasks
from shared.store.agreement import agree
from shared.store.commands import Redis
from shared.store.membership import Membership
from shared.store.sequence_status import SequenceStatus
from shared.store.sequences import Sequences
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
        async with asyncio.timeout(100), self.client.get(path, **options) as answer:
            assert "text/event-stream" == answer.headers["content-type"]
            while not found.keys() >= set(kinds):
                kind = (await answer.content.readuntil(b"\n")).decode().removeprefix("event: ").strip()
                found[kind] = json.loads((await answer.content.readuntil(b"\n\n")).decode().removeprefix("data: "))
        return found

    async def told(self, path: str) -> tuple[int, str]:
        """The status of an action by who is signed in, and what is said."""
        async with self.client.post(URL(path, encoded=True), headers=SIGNED_IN) as answer:
            said = await answer.json()
            return answer.status, said["said" if answer.ok else "error"]


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
    async with serving_console(redis_url=redis_url, key_prefix=key_prefix) as served:
        yield served


@asynccontextmanager
async def serving_console(**given: Any) -> AsyncGenerator[Served]:
    settings = ConsoleSettings(console_port=0, console_token=TOKEN, **given)
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
    assert {("42", False), (SCRIPT, True)} == {(one["id"], one["is_text"]) for one in view["sequences"]}
    assert [("sum", "sequences", 8, 2, 1)] == [
        (one["name"], one["kind"], one["slots"], one["used"], one["waiting"]) for one in view["models"]
    ]
    assert ("live", "42") == (found["story"]["sequence"]["state"], found["story"]["sequence"]["id"])
    assert not found["begin"]["can_kill"]


async def test_the_address_in_the_log_can_be_opened_though_the_console_listens_everywhere(
    mesh: ScriptedMesh, redis_url: str, key_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Browsers do not open 0.0.0.0, or not always."""
    caplog.set_level(logging.INFO, "seqmesh")
    async with serving_console(redis_url=redis_url, key_prefix=key_prefix, host="0.0.0.0") as served:
        (fields,) = [vars(record)["fields"] for record in caplog.records if record.message == "console ready"]
        assert f"http://127.0.0.1:{served.port}/" == fields["url"]


async def test_a_sequence_is_found_by_its_id_and_by_the_begin_of_it(console: Served) -> None:
    async def ids(query: str) -> list[Any]:
        async with console.client.get(f"/api/sequences?{query}") as answer:
            assert 200 == answer.status
            return [one["id"] for one in (await answer.json())["sequences"]]

    assert ["42"] == await ids("id=42")
    assert ["waits"] == await ids("id=waits")
    assert [] == await ids("id=nobody")
    assert ["waits"] == await ids("model=sum&prefix=wa")
    assert {"42", SCRIPT, "waits"} == set(await ids("model=sum"))


async def test_an_id_is_looked_for_in_all_models_however_many_there_are(console: Served, mesh: ScriptedMesh) -> None:
    versions = tuple(f"{number}" for number in range(1, 300))
    config = msgspec.structs.replace(RECORD.config, name="a")
    await Membership(mesh.redis, mesh.keys).publish(msgspec.structs.replace(RECORD, config=config, versions=versions))
    async with console.client.get("/api/sequences?id=42") as answer:
        found = await answer.json()

    assert (["42"], True) == ([one["id"] for one in found["sequences"]], found["are_all"])


async def test_charts_are_told_to_the_pages_that_show_them(console: Served) -> None:
    whole = await console.messages("/api/live?range=5m", "begin", "chart", "point", "view")
    model = await console.messages("/api/live?range=1h&chart=sum&chart_version=1", "chart", "point")
    none = await console.messages("/api/live", "view")

    assert (1000, 12_000) == (whole["chart"]["every_ms"], model["chart"]["every_ms"])
    assert [(1, {})] * 2 == [(one["point"]["waiting"], one["point"]["times"]) for one in (whole, model)]
    assert none.keys().isdisjoint(("chart", "point"))


async def test_configurations_are_shown(console: Served) -> None:
    async with console.client.get("/api/models/sum") as answer:
        assert {"name": "sum", "versions": ["1"], "config": {}} == await answer.json()


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/sequences?model=none", 404, "no model 'none' in this mesh"),
        ("/api/models/none", 404, "no model 'none' in this mesh"),
        ("/api/live?range=1y", 400, "'range' is one of: 5m, 1h"),
        (f"/api/sequences?id={'x' * 600}", 400, "'id' has more than 512 characters"),
    ],
)
async def test_what_is_not_there_is_an_error_with_words(console: Served, path: str, status: int, words: str) -> None:
    async with console.client.get(path) as answer:
        assert (status, {"error": words}) == (answer.status, await answer.json())


async def test_a_search_that_redis_refuses_is_an_error_with_words() -> None:
    async def refused() -> None:
        raise ResponseError("NOPERM this user may not run 'hgetall'")

    with pytest.raises(UnavailableError, match="Redis cannot be read: NOPERM"):
        await Lookups().carry_out(refused)


async def test_the_page_comes_with_headers_that_keep_foreign_content_out(console: Served) -> None:
    for path in ("/", "/api/health", "/api/models/none", "/nothing", "/api/live"):
        async with console.client.get(path) as answer:
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "'unsafe-inline'" not in answer.headers["content-security-policy"]
            assert "nosniff" == answer.headers["x-content-type-options"]
            assert "set-cookie" not in answer.headers


async def test_a_page_too_many_hears_why_it_is_not_served(console: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "PAGES_MAX", 0)

    async with console.client.get("/api/live") as answer:
        assert 503 == answer.status
        assert "close one" in (await answer.json())["error"]
        assert "default-src 'none'" in answer.headers["content-security-policy"]


ACTIONS = (
    "/api/sequences/end?model=sum&id=42",
    "/api/sequences/pause?model=sum&id=42&seconds=60",
    "/api/sequences/resume?model=sum&id=42",
    "/api/sequences/move?model=sum&id=42&leaving=alice-1",
    "/api/executors/alice/drain",
    "/api/executors/alice/undrain",
    "/api/executors/alice/kill",
)


@pytest.mark.parametrize("path", ACTIONS)
async def test_nothing_is_done_without_the_token_or_by_a_foreign_page(
    console: Served, mesh: ScriptedMesh, redis: Redis, path: str
) -> None:
    before = await redis.hgetall(mesh.keys.sequence(mesh.sequence(42)).record)
    for headers, words in (
        ({}, "sign in"),
        ({"authorization": "Bearer wrong"}, "sign in"),
        ({**SIGNED_IN, "origin": "https://evil.example"}, "web pages of other origins may not use this server"),
        ({**SIGNED_IN, "sec-fetch-site": "cross-site"}, "web pages of other sites"),
        ({**SIGNED_IN, "host": "evil.example:8003"}, "does not go by the name 'evil.example'"),
    ):
        async with console.client.post(path, headers=headers) as answer:
            assert 403 == answer.status
            assert words in (await answer.json())["error"]
    async with console.client.get(path, headers=SIGNED_IN) as answer:
        assert 405 == answer.status

    assert before == await redis.hgetall(mesh.keys.sequence(mesh.sequence(42)).record)
    assert [] == await Membership(redis, mesh.keys).drained()


async def test_a_kill_needs_a_launcher(console: Served) -> None:
    assert (403, "this console can kill nothing: only the one that `seqmesh up` starts can, in its own mesh") == (
        await console.told("/api/executors/alice/kill")
    )


async def test_an_executor_that_the_launcher_does_not_run_is_not_found(
    redis_url: str, key_prefix: str, tmp_path: Path
) -> None:
    control, killed = tmp_path / "control.sock", list[str]()

    def kill(name: str) -> str:
        killed.append(name)
        return ""

    async with (
        control_served(control, ["alice"], kill),
        serving_console(redis_url=redis_url, key_prefix=key_prefix, console_control=str(control)) as console,
    ):
        refused = await console.told("/api/executors/bob/kill")
        assert (404, "there is no executor 'bob' of this console's `seqmesh up`") == refused
        async with console.client.post("/api/executors/alice/kill", headers=SIGNED_IN) as answer:
            assert 200 == answer.status

    assert ["alice"] == killed


async def test_sequences_are_ended_whatever_they_are_called_and_by_two_people_at_once(
    console: Served, mesh: ScriptedMesh
) -> None:
    markup, waits = (f"/api/sequences/end?model=sum&id={quote(name)}" for name in (SCRIPT, "waits"))

    assert [(200, "ends behind its open steps")] * 2 == await asyncio.gather(console.told(markup), console.told(markup))
    assert (200, "ended before it had a slot") == await console.told(waits)
    assert {} == await mesh.record("waits")
    status, said = await console.told(waits)
    assert (404, "the mesh knows no such sequence: it may have ended meanwhile") == (status, said)
    told = await console.messages("/api/live", "begin")
    assert f"Sequence {SCRIPT} of sum: ends behind its open steps (told from the console)" in [
        line["text"] for line in told["begin"]["events"]
    ]


async def test_a_sequence_that_is_over_already_is_told_so(console: Served, mesh: ScriptedMesh, redis: Redis) -> None:
    await redis.hset(mesh.keys.sequence(mesh.sequence(42)).record, STATE, CANCELLED)

    assert (200, "was over already (cancelled)") == await console.told("/api/sequences/end?model=sum&id=42")
    for action in ("pause?seconds=60&", "resume?"):
        told = await console.told(f"/api/sequences/{action}model=sum&id=42")
        assert (404, "there is no such open sequence") == told
    assert CANCELLED.decode() == (await mesh.record(42))["st"]


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("end?model=sum&id=nobody", 404, "the mesh knows no such sequence"),
        ("end?model=gone&id=42", 404, "the mesh knows no such sequence"),
        ("end?model=sum&id=42&type=string", 404, "the mesh knows no such sequence"),
        ("end?model=sum%7C%7Cs&id=42", 404, "the mesh knows no such sequence"),
        (f"end?model=sum&id={'9' * 20}", 404, "the mesh knows no such sequence"),
        (f"end?model=sum&id={'9' * 500}", 404, "the mesh knows no such sequence"),
        (f"end?model=sum&id={'x' * 513}", 400, "'id' has more than 512 characters"),
        ("end?model=sum&id=%00%0a%ff%ed%a0%80", 404, "the mesh knows no such sequence"),
        ("end?model=sum", 400, "'model' and 'id' name the sequence"),
        ("pause?model=sum&id=nobody&seconds=60", 404, "there is no such open sequence"),
        ("pause?model=sum&id=waits&seconds=60", 400, "it waits for its first slot"),
        *(
            (f"pause?model=sum&id=42&seconds={each}", 400, "'seconds'")
            for each in ("", "-1", "1e3", "%D9%A3", "9" * 30)
        ),
        *((f"pause?model=sum&id=42&seconds={each}", 400, "a pause takes 1 to 604800 s") for each in ("0", "604801")),
        ("resume?model=gone&id=42", 404, "there is no such open sequence"),
        ("move?model=sum&id=42", 400, "'leaving' names the executor"),
        ("move?model=sum&id=nobody&leaving=alice-1", 404, "there is no such open sequence"),
        ("move?model=sum&id=waits&leaving=alice-1", 400, "the sequence waits for a slot"),
        ("move?model=sum&id=42&leaving=alice-1", 400, "no other executor serves 'sum'"),
        ("move?model=sum&id=42&leaving=alice-1&to=%3Cb%3E", 400, "no executor '<b>' serves 'sum'"),
        ("move?model=sum&id=42&leaving=bob-1", 200, "the sequence has left bob-1 already: it is on alice-1"),
        ("fork?model=sum&id=42", 404, "a sequence can be told to"),
    ],
)
async def test_what_cannot_be_done_is_told_and_changes_nothing(
    console: Served, mesh: ScriptedMesh, redis: Redis, query: str, status: int, words: str
) -> None:
    before = [await redis.hgetall(mesh.keys.sequence(mesh.sequence(name)).record) for name in (42, SCRIPT, "waits")]

    found, said = await console.told(f"/api/sequences/{query}")

    assert status == found
    assert words in said
    assert before == [
        await redis.hgetall(mesh.keys.sequence(mesh.sequence(name)).record) for name in (42, SCRIPT, "waits")
    ]


async def test_a_wish_that_no_scheduler_fulfils_is_told_and_a_pause_is_taken_back(
    console: Served, mesh: ScriptedMesh, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.store.sequences.LEADER_S", 0.2)
    await redis.hset(mesh.keys.sequence(mesh.sequence(42)).record, DURABLE, 1)
    await Membership(redis, mesh.keys).register(
        ExecutorRegistration(
            ExecutorId("bob-1"), "bob", host="h", pid=2, started_ms=0, models=(ServedModel("sum", "1", 1, 8),)
        ),
        lease_ms=60_000,
    )
    starts = mesh.keys.starts(mesh.keys.shard_of(mesh.sequence(42)), "sum")
    before = len(await redis.xrange(starts))

    paused = await console.told("/api/sequences/pause?model=sum&id=42&seconds=60")
    assert (503, "no scheduler leads its model now: try again") == paused
    assert before == len(await redis.xrange(starts))
    monkeypatch.setattr("deploy.console.actions.ANSWER_S", 1.0)
    status, said = await console.told("/api/sequences/move?model=sum&id=42&leaving=alice-1&to=bob")
    assert 503 == status
    assert "not done after 1 s, and it may still be" in said


async def test_an_executor_is_drained_and_serves_again_however_often_it_is_told(
    console: Served, mesh: ScriptedMesh, redis: Redis
) -> None:
    membership = Membership(redis, mesh.keys)
    drained = (
        "hands over its sequences, and takes none; no other executor serves 'sum': 2 sequences of it will wait for "
        "one, or end here if only the model knows their state"
    )

    for _ in range(2):
        assert (200, drained) == await console.told("/api/executors/alice-1/drain")
        assert ["alice"] == await membership.drained()
    assert (200, "serves again") == await console.told("/api/executors/alice-1/undrain")
    assert (200, "was not drained") == await console.told("/api/executors/alice/undrain")
    nobody = "the mesh knows no such executor: it may have ended meanwhile"
    assert (404, nobody) == await console.told("/api/executors/nobody/undrain")
    assert [] == await membership.drained()
    status, said = await console.told("/api/executors/%3Cimg%20src=x%3E/drain")
    assert 400 == status
    assert "no executor '<img src=x>' in this mesh; there are: alice" in said
    assert (404, "an executor can be told to: drain, undrain") == await console.told("/api/executors/alice/stop")


async def test_actions_at_once_are_bounded(console: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.console.actions.AT_ONCE_MAX", 0)

    assert (503, "too many actions at once: try again in a moment") == await console.told(
        "/api/sequences/resume?model=sum&id=42"
    )


async def test_a_name_that_was_made_to_lead_here_reads_nothing(console: Served) -> None:
    async with console.client.get("/api/live", headers={"host": "evil.example"}) as answer:
        assert 403 == answer.status


async def test_a_mesh_with_more_sequences_than_are_followed_is_shown_in_numbers(
    mesh: ScriptedMesh, redis: Redis, key_prefix: str
) -> None:
    shard = mesh.keys.shards[0]
    members = [f"sum||i{number}" for number in range(1000, 1000 + FOLLOWED_MAX)]
    reader = MeshReader(redis, key_prefix)
    assert (await reader.read()).sequences, "followed while they were few"
    await cast("Any", redis).sadd(mesh.keys.owned(shard, ALICE, "sum"), *members)
    before = await calls(redis)

    now = await reader.read([mesh.sequence(42)])

    assert (False, (), FOLLOWED_MAX + 2) == (now.is_complete, tuple(now.sequences), now.executors[0].total)
    watched = now.watched[mesh.sequence(42)]
    assert watched is not None
    assert "live" == watched.state
    # However many sequences there are.
    assert await calls(redis) - before < 60


async def test_an_executor_that_is_lost_while_the_mesh_is_read_is_gone_for_the_sequences_that_were_read(
    mesh: ScriptedMesh, redis: Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the story of one that was taken over from it would say that it was moved."""
    statuses = Sequences.statuses

    async def late(stored: Sequences, sequences: Sequence[SequenceId]) -> list[SequenceStatus | None]:
        await mesh.redis.delete(mesh.keys.executor_lease(ALICE))
        return await statuses(stored, sequences)

    reader = MeshReader(redis, key_prefix)
    assert ALICE in (await reader.read([mesh.sequence(42)])).usable
    monkeypatch.setattr(Sequences, "statuses", late)

    assert ALICE not in (await reader.read([mesh.sequence(42)])).usable


async def calls(redis: Redis) -> int:
    """Commands that the server has run."""
    return int((await redis.info("stats"))["total_commands_processed"])


async def test_a_console_that_stops_ends_the_streams_of_open_pages(
    mesh: ScriptedMesh, redis_url: str, key_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Hypercorn cancelled them after a second, which asyncio logged as an error with twenty lines of traceback."""
    async with (
        aiohttp.ClientSession() as browser,
        serving_console(redis_url=redis_url, key_prefix=key_prefix) as served,
    ):
        stream = await browser.get(f"http://127.0.0.1:{served.port}/api/live")
        await stream.content.readuntil(b"\n\n")

    assert [] == [record.message for record in caplog.records if record.name == "asyncio"]


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
    app = build_app(ConsoleRoutes(access, live, reader, Lookups(), Actions(reader), None, Stop()), page_files())
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
