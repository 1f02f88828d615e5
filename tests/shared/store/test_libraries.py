"""Scripts are functions of libraries: there when called, of each release, and keeping nothing of a call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from redis.exceptions import OutOfMemoryError, ResponseError

from scheduler.service import forget_libraries
from shared.contract.ids import CorrelationId, Epoch, ExecutorId, StepNumber, sequence_id
from shared.contract.messages import ReplyMessage, StepFlag, encode
from shared.statistics.tally import ModelLoad
from shared.store import libraries
from shared.store.company import ServiceLine
from shared.store.connections.link import Link
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from shared.store.libraries import EACH_CALL, LIBRARIES, NAMES, PRELUDES, file_text, library
from shared.store.script_sender import Call
from shared.store.script_values import CommitCode, LedShard, StepCommit, StepOutcome
from shared.store.scripts import Scripts
from tests.embedded_redis import EmbeddedRedis
from tests.scripted_mesh import ScriptedMesh
from tests.simulation.lua_scripts import lua

ALICE = ExecutorId("alice-1")
ONE = {"INPUT": np.ones((1, 1), np.int32)}


def of_another_release(monkeypatch: pytest.MonkeyPatch, mesh: ScriptedMesh) -> Scripts:
    """The scripts as another release would have them."""

    def changed(name: str) -> str:
        return f"-- of another release\n{file_text(name)}"

    with monkeypatch.context() as patch:
        patch.setattr(libraries, "file_text", changed)
        return Scripts(mesh.redis, mesh.keys)


async def loaded(mesh: ScriptedMesh) -> set[str]:
    """The names of all libraries that the server has."""
    listed = await mesh.redis.function_list(f"{LIBRARIES}*")
    return {found[found.index(b"library_name") + 1].decode() for found in listed}


@pytest.mark.leaves_sequences
async def test_the_first_call_brings_every_script_so_that_none_is_missing_when_memory_is(mesh: ScriptedMesh) -> None:
    await mesh.redis.function_flush()

    await mesh.submit(mesh.submission(7, ONE, StepFlag.START))

    assert mesh.scripts.library.name in await loaded(mesh)


async def test_a_server_that_takes_no_library_refuses_the_calls_with_its_reason(private_server: EmbeddedRedis) -> None:
    redis, keys = connect(private_server.url), Keyspace()
    scripts, link = Scripts(redis, keys), Link(redis)
    await link.connect()
    await cast("Any", redis).config_set("maxmemory", 1)

    call = scripts.lose(sequence_id("sum", "", 1), ALICE, Epoch(1))
    outcomes = await scripts.run_all([call]) + await scripts.run_all([call], link)

    assert [OutOfMemoryError, OutOfMemoryError] == [type(outcome) for outcome in outcomes]
    await link.close()
    await redis.aclose()


async def test_a_call_that_is_refused_for_another_reason_is_made_once(redis: Any, key_prefix: str) -> None:
    """It may have run in part."""
    scripts, refusal, made = Scripts(redis, Keyspace(key_prefix)), ResponseError("ERR in the midst of the script"), 0

    class RefusingLink:
        async def exchange(self, commands: Sequence[object]) -> list[ResponseError]:
            nonlocal made
            made += len(commands)
            return [refusal]

    call = scripts.lose(sequence_id("sum", "", 1), ALICE, Epoch(1))
    outcomes = await scripts.run_all([call], cast("Link", RefusingLink()))

    assert ([refusal], 1) == (outcomes, made)


@pytest.mark.leaves_sequences
async def test_two_releases_call_their_own_until_one_removes_the_others(
    mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = mesh.scripts, of_another_release(monkeypatch, mesh)
    await mesh.submit(mesh.submission(7, ONE, StepFlag.START))
    mesh.scripts = theirs
    assert 2 == (await mesh.submit(mesh.submission(7, ONE))).step
    assert {ours.library.name, theirs.library.name} <= await loaded(mesh)

    assert 1 == await ours.forget_others()
    assert ours.library.name in await loaded(mesh)
    assert theirs.library.name not in await loaded(mesh)

    # A process of that release was still there: it goes on, and is not disturbed twice.
    assert 3 == (await mesh.submit(mesh.submission(7, ONE))).step
    assert theirs.library.name in await loaded(mesh)
    assert 1 == await ours.forget_others()
    assert 0 == await ours.forget_others()


async def test_a_scheduler_that_starts_removes_the_scripts_of_releases_that_have_left(
    mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = of_another_release(monkeypatch, mesh)
    sequence = [mesh.sequence(7)]
    await theirs.run(theirs.sweep(sequence, LedShard(mesh.keys.shard_of(sequence[0]), "sum", mesh.term)))
    seconds, _ = await mesh.redis.time()
    line = ServiceLine("executor", "executor-1", "9.9.9", "1.99", seconds * 1000)
    await mesh.redis.hset(mesh.keys.services, "other", msgspec.json.encode(line))

    await forget_libraries(mesh.redis, mesh.keys)
    assert theirs.library.name in await loaded(mesh)

    await mesh.redis.delete(mesh.keys.services)
    await forget_libraries(mesh.redis, mesh.keys)
    assert theirs.library.name not in await loaded(mesh)


async def test_the_scripts_of_a_release_stay_where_those_of_the_next_do_not_fit(
    private_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes back to that release could not load them again."""
    async with connect(private_server.url) as redis:
        mesh = ScriptedMesh(redis, Keyspace(), "sum")
        before = of_another_release(monkeypatch, mesh)
        await before.run(before.lose(mesh.sequence(7), ALICE, Epoch(1)))
        await cast("Any", redis).config_set("maxmemory", 1)

        assert 0 == await mesh.scripts.forget_others()
        assert {before.library.name} == await loaded(mesh)

        await cast("Any", redis).config_set("maxmemory", 0)
        assert 1 == await mesh.scripts.forget_others()
        assert {mesh.scripts.library.name} == await loaded(mesh)


@pytest.mark.parametrize(("prefix", "database"), [("another", 0), ("ours", 1)])
async def test_another_meshs_scripts_stay_there_whatever_its_release(
    prefix: str, database: int, private_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The databases of a server have one set of functions."""
    there = private_server.url.removesuffix("/0") + f"/{database}"
    async with connect(private_server.url) as redis, connect(there) as elsewhere:
        ours = ScriptedMesh(redis, Keyspace("ours", 1), "sum")
        theirs = ScriptedMesh(elsewhere, Keyspace(prefix, 1), "sum")
        theirs.scripts = of_another_release(monkeypatch, theirs)
        for mesh in (ours, theirs):
            await mesh.scripts.run(mesh.scripts.lose(mesh.sequence(7), ALICE, Epoch(1)))

        await forget_libraries(redis, ours.keys)

        assert {ours.scripts.library.name, theirs.scripts.library.name} == await loaded(ours)


@pytest.mark.leaves_sequences
async def test_a_call_that_fails_leaves_nothing_for_the_next_one(mesh: ScriptedMesh) -> None:
    """Its first step was final, and its caller was about to be told, when the call failed at its second step."""
    one, two, three = [await open_step(mesh, correlation_id) for correlation_id in (1, 2, 3)]
    whole = commit(mesh, one, two)
    with pytest.raises(ResponseError, match="arithmetic"):
        await mesh.scripts.run(Call("commit", whole.keys, whole.args[:-1], whole.read))
    assert "1" == (await mesh.record(1))["cm"]

    assert [CommitCode.COMMITTED] == await mesh.scripts.run(commit(mesh, three))

    await mesh.reply_to(three.token)
    assert [three.token] == mesh.heard


async def open_step(mesh: ScriptedMesh, correlation_id: CorrelationId) -> StepCommit:
    """The commit of the first step of a sequence with an owner."""
    step = mesh.submission(correlation_id, ONE, StepFlag.START)
    await mesh.submit(step)
    epoch = await mesh.assign(correlation_id, ALICE)
    reply = encode(ReplyMessage("1", step=1))
    return StepCommit(
        step.sequence, epoch, StepNumber(1), StepFlag.START, StepOutcome.DONE, step.gateway, step.token, reply
    )


def commit(mesh: ScriptedMesh, *steps: StepCommit) -> Call[list[CommitCode]]:
    shard, load = mesh.keys.shard_of(steps[0].sequence), ModelLoad(mesh.model, "", "")
    return mesh.scripts.commit(steps, shard=shard, executor=ALICE, load=load, idle_ms=60_000, tombstone_ms=10_000)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_call_changes_is_made_new_by_each_call(name: str) -> None:
    """What is declared above the line `-- each call` without a value is set below it, and what has a value keeps it."""
    texts = [file_text(part).rpartition(EACH_CALL) for part in ("common", *PRELUDES[name], name)]
    defined, called = "".join(text[0] for text in texts), "".join(text[2] for text in texts)
    declared = {one for line in re.findall(r"^local ([\w, ]+)$", defined, re.MULTILINE) for one in line.split(", ")}
    constant = {one for line in re.findall(r"^local ([\w, ]+) =", defined, re.MULTILINE) for one in line.split(", ")}
    # `on_removed = nil` is a declaration with a comment of its own.
    set_in_calls = {one for line in re.findall(r"^([\w, ]+) =", called, re.MULTILINE) for one in line.split(", ")}
    begin = r"(?:^ +|\b(?:then|else|do) )"
    set_at_once = re.findall(rf"{begin}(\w+(?:, \w+)*) = ", defined, re.MULTILINE)
    changed = {one for names in set_at_once for one in names.split(", ")}
    changed |= set(re.findall(rf"{begin}(\w+)(?:\[[^\n=]*\]|\.\w+) = ", defined, re.MULTILINE))
    changed |= set(re.findall(r"\b(?:append|table\.insert|table\.remove)\((\w+)", defined))

    assert set() == declared - set_in_calls
    assert set() == (changed & constant) - set_in_calls


@pytest.mark.parametrize("name", NAMES)
def test_a_script_uses_no_name_of_a_prelude_that_it_does_not_have(name: str) -> None:
    """In the library it could: the prelude stands there for other scripts, and keeps what the last call of them had."""
    own = ("common", *PRELUDES[name])
    others = {prelude for preludes in PRELUDES.values() for prelude in preludes}.difference(own)
    defined = "".join(file_text(prelude).rpartition(EACH_CALL)[0] for prelude in others)
    theirs = {one for names in re.findall(TOP_LEVEL, defined, re.MULTILINE) for one in names.split(", ")}

    text = "".join(file_text(part) for part in (*own, name))
    declared = {one for found in re.findall(DECLARED, text) for names in found for one in names.split(", ")}
    assert set() == (set(re.findall(NAME, text)) & theirs) - declared


TOP_LEVEL = r"^local (?:function )?(\w+(?:, \w+)*)"
DECLARED = r"\b(?:local (?:function )?|for |function)(\w+(?:, \w+)*)?(?:\(([\w, ]*)\))?"
"""Variables and functions, of loops too, and parameters."""
NAME = r"--[^\n]*|'[^'\n]*'|[.:]?\b[A-Za-z_]\w*"
"""Also comments, strings, and fields with what stands before them."""


def test_lua_takes_twenty_names_more_than_the_library_has() -> None:
    """It knows 200 at a time, and a function 60 of those around it; a library that has more is refused."""
    more = "local " + ", ".join(f"another_{number}" for number in range(20))

    lua.compile(f"local RELEASE\n{more}\n{library('m').source}")
