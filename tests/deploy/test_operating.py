"""How the commands that operate a running mesh find it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import uuid
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import click
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from redis import Redis

from deploy import cli
from deploy.chaos.node import until
from deploy.console.reader import MeshReader
from deploy.local.data_directory import ChildState, MeshState, state_path
from deploy.local.embedded import free_port
from deploy.operate import doctor, runtime_settings, tenants
from deploy.operate.diagnoses import Severity
from deploy.operate.doctor import of_gateways
from deploy.operate.operating import OperatedMesh, connected, found_mesh, holdings
from deploy.operate.settings import OperatorSettings
from deploy.operate.texts import aligned, duration, id_text
from shared.contract.ids import ExecutorId, ShardId, sequence_id
from shared.contract.messages import ExecutorRegistration, ModelRecord, ServedModel, StepFlag
from shared.contract.model_config import Direct, EnsembleStep, ModelConfig, SequenceBatching
from shared.contract.tenants import TenantLimits
from shared.store.agreement import join_mesh
from shared.store.commands import Redis as AsyncRedis
from shared.store.connections.homes import MESH_TAG, tag_of
from shared.store.connections.redis_client import connect
from shared.store.keyspace import SCHEMA_VERSION, Keyspace
from shared.store.membership import Membership
from shared.store.script_values import EndCode
from shared.store.sequence_status import Wanted
from shared.store.tenants import StoredTenants
from shared.stored_settings import StoredSettings
from tests.embedded_cluster import EmbeddedCluster, ask
from tests.embedded_redis import EmbeddedRedis
from tests.scripted_mesh import IDLE_MS, ScriptedMesh


@pytest.mark.parametrize("by", ["data_dir", "redis_url"])
async def test_a_mesh_is_found_by_the_prefix_that_is_given_or_by_its_own(
    redis: AsyncRedis, redis_url: str, key_prefix: str, tmp_path: Path, by: str
) -> None:
    """Meshes may share a Redis: what is asked of one must never reach the other."""
    own, other = Keyspace(f"{key_prefix}a"), Keyspace(f"{key_prefix}b")
    for keys, shards in ((own, 2), (other, 3)):
        await redis.hset(keys.mesh, "shards", shards)
    state = MeshState(1, "127.0.0.1", redis_url, ready=True, children=[], key_prefix=own.prefix)
    (tmp_path / "mesh.json").write_bytes(msgspec.json.encode(state))

    async def found(**given: Any) -> tuple[str, int]:
        given[by] = tmp_path if by == "data_dir" else redis_url
        async with found_mesh(OperatorSettings(**given)) as mesh:
            return mesh.keys.prefix, len(mesh.keys.shards)

    assert (own.prefix, 2) == await found(key_prefix=own.prefix)
    assert (other.prefix, 3) == await found(key_prefix=other.prefix)
    with pytest.raises(click.ClickException, match="no mesh 'nobody'"):
        await found(key_prefix="nobody")
    if by == "data_dir":
        assert (own.prefix, 2) == await found()
        gone = msgspec.structs.replace(state, redis_url=f"unix://{tmp_path}/gone.sock")
        (tmp_path / "mesh.json").write_bytes(msgspec.json.encode(gone))
        with pytest.raises(click.ClickException, match="does `seqmesh up` still run in "):
            await found()
    await redis.delete(own.mesh, other.mesh)


async def test_a_message_that_cannot_be_written_is_no_failure_of_redis(redis_url: str) -> None:
    async def tells() -> None:
        async with connected(redis_url):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        await tells()


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"shards": "2", "schema": str(SCHEMA_VERSION + 1)}, "start a newer release"),
        ({"shards": "2", "schema": str(SCHEMA_VERSION - 1)}, "which are older"),
        ({"shards": "many"}, "cannot be read"),
    ],
)
async def test_a_mesh_that_this_release_does_not_understand_is_left_alone(
    redis: AsyncRedis, redis_url: str, key_prefix: str, record: dict[str, str], told: str
) -> None:
    keys = Keyspace(key_prefix)
    for field, value in record.items():
        await redis.hset(keys.mesh, field, value)

    with pytest.raises(click.ClickException, match=told):
        async with found_mesh(OperatorSettings(redis_url=redis_url, key_prefix=key_prefix)):
            pass


async def test_of_an_ensemble_the_models_are_named_that_keep_its_sequences(
    redis: AsyncRedis, redis_url: str, key_prefix: str
) -> None:
    keys = Keyspace(key_prefix)
    await redis.hset(keys.mesh, "shards", 1)
    steps = (EnsembleStep("total", "", {"IN": "VALUE"}, {"OUT": "TOTAL"}),)
    config = ModelConfig("smooth", "", "ensemble", 0, (), (), ensemble=steps)
    await Membership(redis, keys).publish(ModelRecord(config, "{}", ("1",)))

    with pytest.raises(click.ClickException, match=r"'smooth' is an ensemble: .* \(total\); `seqmesh seq ls`"):
        async with found_mesh(OperatorSettings(redis_url=redis_url, key_prefix=key_prefix), "smooth"):
            pass


async def test_of_an_unknown_model_those_are_named_that_are_served(
    redis: AsyncRedis, redis_url: str, key_prefix: str
) -> None:
    """The record of one that was unloaded stays."""
    keys = Keyspace(key_prefix)
    await redis.hset(keys.mesh, "shards", 1)
    membership = Membership(redis, keys)
    await membership.publish(ModelRecord(ModelConfig("unloaded", "", "python", 0, (), ()), "{}", ("1",)))
    served = (ServedModel("sum", "1", 1, 4), ServedModel("plain", "1", 1, 0))
    await membership.register(ExecutorRegistration(ExecutorId("a-1"), "a", "", 1, 0, served), lease_ms=60_000)

    with pytest.raises(click.ClickException, match=r"no model 'wrong' in this mesh; there are: plain, sum$"):
        async with found_mesh(OperatorSettings(redis_url=redis_url, key_prefix=key_prefix), "wrong"):
            pass


async def test_a_model_without_a_name_is_unknown_as_well(redis: AsyncRedis, redis_url: str, key_prefix: str) -> None:
    """A variable of a shell that is not set."""
    await redis.hset(Keyspace(key_prefix).mesh, "shards", 1)

    with pytest.raises(click.ClickException, match="no model '' in this mesh"):
        async with found_mesh(OperatorSettings(redis_url=redis_url, key_prefix=key_prefix), ""):
            pass


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-1, "0.0s"), (8.4, "8.4s"), (60, "1m 0s"), (3600, "1h 0m"), (86_399, "23h 59m"), (86_400, "1d 0h")],
)
def test_a_time_is_shown_in_its_two_largest_units(seconds: float, shown: str) -> None:
    assert shown == duration(round(seconds * 1000))


@pytest.mark.parametrize(
    ("correlation_id", "shown"),
    [
        (42, "42"),
        ("42", "'42'"),
        ("'42'", "\"'42'\""),
        ("customer-7/é", "customer-7/é"),
        ("<b class='x'>", "<b class='x'>"),
        ("two  spaces", "'two  spaces'"),
        ("", "''"),
        ("  begins late", "'  begins late'"),
        ("\x1b[2J", r"'\x1b[2J'"),
        ("\u202eback", r"'\u202eback'"),
    ],
)
def test_no_two_ids_look_the_same_and_none_is_obeyed_by_a_terminal(correlation_id: int | str, shown: str) -> None:
    assert shown == id_text(correlation_id)


def test_columns_stand_below_each_other_whatever_their_letters() -> None:
    rows = [("ID", "STATE"), ("日本語", "live"), ("e\u0301", "live")]

    assert ["ID      STATE", "日本語  live", "e\u0301       live"] == aligned(rows).splitlines()


async def test_settings_are_taken_back_by_a_user_whom_the_system_does_not_know(
    redis: AsyncRedis, redis_url: str, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a container that is given a number for its user."""
    stored = StoredSettings(redis, await join_mesh(redis, key_prefix, 1))
    await stored.change_traces("", {"trace_rate": 5})
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)

    await runtime_settings.run(OperatorSettings(redis_url=redis_url, key_prefix=key_prefix), reset=True, as_json=False)

    changes = await stored.read()
    assert {} == changes.traces
    assert changes.by["traces"].startswith("user 54321 on ")


async def test_changed_settings_are_shown_as_json(
    redis: AsyncRedis, redis_url: str, key_prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = StoredSettings(redis, await join_mesh(redis, key_prefix, 1))
    await stored.change_logs({"log_verbose_level": 1})
    await stored.change_traces("counter", {"trace_rate": 5})

    await runtime_settings.run(OperatorSettings(redis_url=redis_url, key_prefix=key_prefix), reset=False, as_json=True)

    shown = json.loads(capsys.readouterr().out)
    assert {"logs": {"log_verbose_level": 1}, "traces": {"counter": {"trace_rate": 5}}, "by": {}} == shown


@pytest.fixture
def server_of_a_mesh(private_server: EmbeddedRedis) -> EmbeddedRedis:
    """A server with a mesh of one shard, in which nobody is."""
    with Redis.from_url(private_server.url) as client:
        client.hset(Keyspace().mesh, mapping={"shards": 1, "schema": SCHEMA_VERSION})
    return private_server


async def test_a_doctor_finds_what_a_mesh_lacks(server_of_a_mesh: EmbeddedRedis) -> None:
    """A server with the wrong policy, and a mesh without services; then a server that is gone."""

    async def told(code: int) -> dict[str, str]:
        arguments = ["doctor", "--json", f"--redis-url={server_of_a_mesh.url}"]
        result = await asyncio.to_thread(CliRunner().invoke, cli.main, arguments, catch_exceptions=False)
        assert code == result.exit_code, result.output
        return {one["text"]: one["remedy"] for one in json.loads(result.stdout) if one["severity"] == Severity.FAIL}

    with Redis.from_url(server_of_a_mesh.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")

    found = await told(1)
    server_of_a_mesh.kill()
    gone = await told(1)

    assert {"maxmemory-policy allkeys-lru may drop live sequences", "no gateway runs", "no scheduler runs"} < set(found)
    assert [True] == ["cannot be reached" in text for text in gone]


@pytest.mark.parametrize("is_led", [False, True])
async def test_a_doctor_asks_for_executors_where_they_would_help(
    redis: AsyncRedis, key_prefix: str, *, is_led: bool
) -> None:
    keys = Keyspace(key_prefix)
    membership = Membership(redis, keys)
    served = ServedModel("sum", "1", 1, 4)
    await membership.register(
        ExecutorRegistration(ExecutorId("one-a"), "one", "host", 1, 1, models=(served,)), lease_ms=60_000
    )
    config = ModelConfig("sum", "python", "", 4, (), (), sequence_batching=SequenceBatching(Direct(), 1))
    await membership.publish(ModelRecord(config, "{}", ("1",)))
    await redis.hset(keys.line(ShardId(0), "sum"), "w", 3)
    if is_led:
        await redis.set(keys.leader("sum"), "someone", px=60_000)

    found = await doctor.of_members(OperatedMesh(redis, keys, membership), are_all_there=True)

    assert [(Severity.WARN if is_led else Severity.FAIL)] == [
        one.severity for one in found if one.subject == "model sum" and one.severity is not Severity.OK
    ]


async def test_a_doctor_takes_nobody_for_dead_where_redis_takes_no_writes(server_of_a_mesh: EmbeddedRedis) -> None:
    """Whoever lives cannot say so there. A command that fails sends to the doctor, not to a server that runs."""
    with Redis.from_url(server_of_a_mesh.url) as client:
        client.config_set("min-replicas-to-write", 1)

    async def told(*command: str) -> str:
        environment = {"SEQMESH_REDIS_URL": server_of_a_mesh.url}
        invoked = partial(CliRunner().invoke, cli.main, command, env=environment, catch_exceptions=False)
        result = await asyncio.to_thread(invoked)
        assert 1 == result.exit_code
        return result.output

    found = json.loads(await told("doctor", "--json"))
    assert ["takes no writes: 0 of 1 replicas keep up (min-replicas-to-write)"] == [
        one["text"] for one in found if one["severity"] == Severity.FAIL
    ]
    assert "does not serve now (NOREPLICAS Not enough good replicas to write.): `seqmesh doctor`" in await told(
        *("tenants", "set", "acme", "--share=2")
    )


async def test_a_doctor_takes_nobody_for_dead_where_a_snapshot_has_failed(server_of_a_mesh: EmbeddedRedis) -> None:
    with Redis.from_url(server_of_a_mesh.url) as client:
        settings = cast("dict[str, str]", client.config_get("dir", "dbfilename"))
        (Path(settings["dir"]) / settings["dbfilename"]).mkdir()
        client.config_set("save", "3600 1")
        client.bgsave()
        async with asyncio.timeout(60):
            while cast("dict[str, str]", client.info("persistence"))["rdb_last_bgsave_status"] == "ok":
                await asyncio.sleep(0.01)
    environment = {"SEQMESH_REDIS_URL": server_of_a_mesh.url}
    invoked = partial(CliRunner().invoke, cli.main, ["doctor", "--json"], env=environment, catch_exceptions=False)

    found = json.loads((await asyncio.to_thread(invoked)).stdout)

    assert ["takes no writes: rdb_last_bgsave_status is err (stop-writes-on-bgsave-error)"] == [
        one["text"] for one in found if one["severity"] == Severity.FAIL
    ]


@pytest.mark.parametrize("reply", [b"-LOADING dataset in memory\r\n", b"-BUSY running a script\r\n"])
async def test_a_doctor_does_not_ask_to_start_a_redis_that_says_that_it_cannot_serve_now(reply: bytes) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            writer.write(reply)
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        arguments = ["doctor", "--json", f"--redis-url=redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"]
        result = await asyncio.to_thread(CliRunner().invoke, cli.main, arguments, catch_exceptions=False)

    (found,) = [one for one in json.loads(result.stdout) if one["severity"] == Severity.FAIL]
    assert "does not serve now" in found["text"]
    assert "start it" not in found["remedy"]
    assert "wait until it has read its file; BUSY: redis-cli SCRIPT KILL" in found["remedy"]


async def test_a_doctor_tells_that_redis_takes_no_more_clients() -> None:
    """It says so before anything is sent, and has gone when something is."""

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"-ERR max number of clients reached\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        arguments = ["doctor", "--json", f"--redis-url=redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"]
        results = [
            await asyncio.to_thread(CliRunner().invoke, cli.main, arguments, catch_exceptions=False) for _ in range(5)
        ]

    for result in results:
        (found,) = [one for one in json.loads(result.stdout) if one["severity"] == Severity.FAIL]
        assert "max number of clients reached" in found["text"]


@pytest.mark.parametrize(
    ("status", "told"), [(b"200 OK", []), (b"400 Bad Request", []), (b"", ["does not listen yet"])]
)
async def test_a_doctor_asks_the_gateways_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, status: bytes, told: list[str]
) -> None:
    """In Redis one whose port was taken would live for a minute. 400: no executor serves, which is told elsewhere."""
    monkeypatch.setattr("deploy.local.readiness.PROBE_TIMEOUT_S", 60.0)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 " + status + b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port: int = server.sockets[0].getsockname()[1]
        gateway = ChildState("gateway-1", "gateway", 1, "g.log", metrics_port=port if status else free_port())
        found = await of_gateways(MeshState(1, "127.0.0.1", "", ready=True, children=[gateway]))

    assert told == [one.text for one in found]


def every_node(cluster: EmbeddedCluster, *command: str) -> None:
    for node in cluster.nodes:
        ask(node, *command)


async def test_a_doctor_looks_at_each_node_of_a_cluster(private_cluster: EmbeddedCluster) -> None:
    """A mesh of one shard leaves a node unused; then the shard's node is gone."""
    cluster = private_cluster

    async def told() -> list[tuple[str, str, str]]:
        arguments = ["doctor", "--json", f"--redis-url={cluster.url}"]
        result = await asyncio.to_thread(CliRunner().invoke, cli.main, arguments, catch_exceptions=False)
        return [(one["severity"], one["subject"], one["text"]) for one in json.loads(result.stdout)]

    async with connect(cluster.url) as redis:
        (shard,) = (await join_mesh(redis, "seqmesh", 1)).shards
    names = {f"redis 127.0.0.1:{node.port}" for node in cluster.nodes}
    every_node(cluster, "CONFIG", "SET", "cluster-require-full-coverage", "no")
    whole = await told()
    every_node(cluster, "CONFIG", "SET", "cluster-require-full-coverage", "yes")
    warned = await told()
    lost = cluster.holder(str(shard))
    idle = next(node for node in cluster.nodes if node not in (lost, cluster.holder("mesh")))
    lost.kill()
    alive = [node for node in cluster.nodes if node is not lost]
    until(lambda: all(b"state:fail" in ask(one, "CLUSTER", "INFO") for one in alive), "the node is missed", 60.0)
    without = await told()
    for node in alive:
        ask(node, "CONFIG", "SET", "cluster-require-full-coverage", "no")
    until(lambda: all(b"state:ok" in ask(one, "CLUSTER", "INFO") for one in alive), "the others serve", 60.0)
    serving = await told()

    assert names == {subject for _, subject, text in whole if text.startswith("keeps what")}
    assert names == {subject for _, subject, text in warned if text == "stops with any of its nodes"}
    assert (Severity.OK, "cluster", "3 nodes with slots") in whole
    unused = [subject for _, subject, text in whole if text == "holds no key of this mesh"]
    assert [f"redis 127.0.0.1:{idle.port}"] == unused
    failed = [(subject, text) for severity, subject, text in without if severity == Severity.FAIL]
    assert [True] == ["cannot be reached" in text for subject, text in failed if subject.endswith(f":{lost.port}")]
    assert [True] == ["is down, as" in text for subject, text in failed if subject == "cluster"]
    assert {f"redis 127.0.0.1:{lost.port}", "services", "models"} == {
        subject for severity, subject, _ in serving if severity == Severity.FAIL
    }, "what the mesh lacks is told though a node is away"


async def test_what_lies_on_a_node_that_is_away_is_left_out_and_told(private_cluster: EmbeddedCluster) -> None:
    """Executors with what they own, and sequences, of the other nodes; as JSON, too."""
    cluster, names = private_cluster, [sequence_id("sum", "", number) for number in range(1, 20)]
    async with connect(cluster.url) as redis:
        keys, commands = await join_mesh(redis, "seqmesh"), cast("Any", redis)
        mesh = OperatedMesh(redis, keys, Membership(redis, keys))
        await mesh.membership.publish(ModelRecord(ModelConfig("sum", "python", "", 4, (), ()), "{}", ("1",)))
        registration = ExecutorRegistration(ExecutorId("e-1"), "e", "host", 1, 0, (ServedModel("sum", "1", 1, 64),))
        await mesh.membership.register(registration, lease_ms=600_000)
        for name in names:
            await commands.sadd(mesh.keys.owned(mesh.keys.shard_of(name), ExecutorId("e-1"), "sum"), name)
            await redis.hset(mesh.keys.sequence(name).record, "st", "l")
    holders = {name: cluster.holder(tag_of(mesh.keys.sequence(name).record)) for name in names}
    lost = next(node for node in holders.values() if node is not cluster.holder(MESH_TAG))
    here = [name for name in names if holders[name] is not lost]
    lost.kill()

    async def listed(*arguments: str) -> list[dict[str, Any]]:
        command = [*arguments, "--json", f"--redis-url={cluster.url}"]
        result = await asyncio.to_thread(CliRunner().invoke, cli.main, command, catch_exceptions=False)
        assert 1 == result.exit_code
        assert f"127.0.0.1:{lost.port}" in result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    assert 0 < len(here) < len(names)
    assert len(here) == len(await listed("seq", "ls", "sum"))
    assert [{"sum": len(here)}] == [executor["sequences"] for executor in await listed("drain", "--list")]


@pytest.mark.parametrize(
    ("login", "told"), [(":wrong@", "invalid username-password"), ("quiet:secret@", "has no permissions")]
)
def test_a_user_that_redis_refuses_is_no_redis_that_cannot_be_reached(
    private_server: EmbeddedRedis, login: str, told: str
) -> None:
    with Redis.from_url(private_server.url) as client:
        client.acl_setuser("quiet", enabled=True, passwords=["+secret"], categories=["+@connection"])
    url = f"redis://{login}127.0.0.1:{private_server.port}/0"

    def run(*command: str) -> Result:
        return CliRunner().invoke(cli.main, command, env={"SEQMESH_REDIS_URL": url}, catch_exceptions=False)

    result, diagnosed = run("drain", "--list"), run("doctor")

    assert 1 == result.exit_code
    assert "refuses the user of SEQMESH_REDIS_URL, or its password" in result.output
    assert told in result.output
    assert 1 == diagnosed.exit_code
    assert "-> correct the URL's user and password, or give that user its rights" in diagnosed.output
    assert "start it" not in diagnosed.output


def test_a_redis_that_is_not_there_is_told_with_the_remedy() -> None:
    url = f"redis://127.0.0.1:{free_port()}"

    result = CliRunner().invoke(cli.main, ["seq", "ls", "sum", f"--redis-url={url}"], catch_exceptions=False)

    assert 1 == result.exit_code
    assert f"Redis at {url} cannot be reached" in result.output
    assert "start it, or give another --redis-url" in result.output


def test_what_a_full_redis_does_not_take_is_told(server_of_a_mesh: EmbeddedRedis) -> None:
    with Redis.from_url(server_of_a_mesh.url) as client:
        client.config_set("maxmemory", 1)

    result = CliRunner().invoke(
        cli.main, ["tenants", "set", "acme", "--share=2"], env={"SEQMESH_REDIS_URL": server_of_a_mesh.url}
    )

    assert 1 == result.exit_code
    assert "is full: raise its maxmemory" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["acme", "--live-max=-5"], "are whole numbers"),
        (["acme", "--share=0"], "is a whole number"),
        (["a b", "--share=2"], "is no name of a tenant"),
        (["acme", "--burst=9"], "give --steps-per-s, too"),
        (["acme", "--burst=9", "--steps-per-s=0"], "give --steps-per-s, too"),
    ],
)
def test_limits_that_cannot_be_set_are_a_wrong_command_line(
    server_of_a_mesh: EmbeddedRedis, words: list[str], said: str
) -> None:
    result = CliRunner().invoke(cli.main, ["tenants", "set", *words], env={"SEQMESH_REDIS_URL": server_of_a_mesh.url})

    assert 2 == result.exit_code
    assert said in result.output


async def test_a_burst_may_follow_its_rate_and_outlast_it(
    server_of_a_mesh: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left out stays as it is: a rate that is taken away for a while finds its burst again."""
    monkeypatch.setattr(tenants, "KNOWN_S", 0)
    settings, keys = OperatorSettings(redis_url=server_of_a_mesh.url), Keyspace()
    async with connect(server_of_a_mesh.url, retries=0) as redis:
        for changes in ({"steps_per_s": 5.0}, {"burst": 9}, {"steps_per_s": 0.0}, {"share": 2}, {"burst": 0}):
            await tenants.set_limits(settings, "acme", **changes)
            if "share" in changes:
                assert TenantLimits(burst=9, share=2) == (await StoredTenants(redis, keys).read()).of("acme")

        assert TenantLimits(share=2) == (await StoredTenants(redis, keys).read()).of("acme")


async def test_tenants_are_listed_with_what_they_may_do(
    server_of_a_mesh: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tenants, "KNOWN_S", 0)
    settings = OperatorSettings(redis_url=server_of_a_mesh.url)
    await tenants.set_limits(settings, "bounded", live_max=7, steps_per_s=2.5, burst=9)
    await tenants.set_limits(settings, "preferred", share=2)
    capsys.readouterr()
    await tenants.list_tenants(settings, as_json=False)

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["bounded", "0", "7", "2.5", "9", "1"] in lines
    assert ["preferred", "0", "any", "any", "any", "2"] in lines


async def test_a_sentinel_that_is_given_as_the_server_is_asked_for_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Sentinel:
        async def info(self) -> dict[str, str]:
            return {"redis_mode": "sentinel", "redis_version": "7.0.15"}

    def connected_to_it(*_: object, **__: object) -> nullcontext[Sentinel]:
        return nullcontext(Sentinel())

    monkeypatch.setattr(doctor, "connected", connected_to_it)

    (only,) = await doctor.of_mesh(OperatorSettings(redis_url="redis://sentinel:26379"))

    assert Severity.FAIL == only.severity
    assert "give its URL as redis+sentinel://" in only.text


def test_a_doctor_without_a_mesh_looks_at_the_machine(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.main, ["doctor", f"--data-dir={tmp_path}"], catch_exceptions=False)

    assert 0 == result.exit_code
    assert f"none runs in {tmp_path}: start one with `seqmesh up`" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_here", [False, True])
def test_a_doctor_of_a_mesh_elsewhere_asks_for_no_room_on_this_disk(tmp_path: Path, *, is_here: bool) -> None:
    """A container has a small /tmp and nothing else to write to, and no Redis of its own."""
    if is_here:
        state_path(tmp_path).touch()
    arguments = ["doctor", "--json", f"--data-dir={tmp_path}", f"--redis-url=redis://127.0.0.1:{free_port()}"]

    result = CliRunner().invoke(cli.main, arguments, catch_exceptions=False)

    assert is_here == ("disk" in {one["subject"] for one in json.loads(result.stdout)})


@pytest.mark.parametrize("below", ["", "data"])
def test_a_doctor_says_that_no_data_can_be_kept(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()

    result = CliRunner().invoke(cli.main, ["doctor", f"--data-dir={tmp_path / 'file' / below}"], catch_exceptions=False)

    assert 1 == result.exit_code
    assert "no data can be kept there" in result.output
    assert "give another --data-dir" in result.output


def test_a_doctor_looks_at_the_ports_that_up_would_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the environment has them. 0 is any free port, and no console needs none."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {"HTTP_PORT": port, "GRPC_PORT": 0, "METRICS_PORT": 0, "CONSOLE": False}.items():
            monkeypatch.setenv(f"SEQMESH_{name}", str(value))

        result = CliRunner().invoke(cli.main, ["doctor", "--json", f"--data-dir={tmp_path}"], catch_exceptions=False)

    texts = [one["text"] for one in json.loads(result.stdout) if one["subject"] == "ports"]
    assert [f"{port}: address already in use"] == texts


async def test_on_a_cluster_an_operator_sees_and_changes_sequences_of_all_nodes(redis_cluster: EmbeddedCluster) -> None:
    """With a client that has met no node before."""
    async with connect(redis_cluster.url) as redis:
        keys = await join_mesh(redis, f"t{uuid.uuid4().hex[:12]}")
        mesh, membership = ScriptedMesh(redis, keys, "sum"), Membership(redis, keys)
        served = ServedModel("sum", "1", instances=1, slots=64, pageable=True, idle_ms=IDLE_MS)
        about = ExecutorRegistration(ExecutorId("a-1"), "a", host="", pid=1, started_ms=0, models=(served,))
        await membership.register(about, lease_ms=60_000)
        config = ModelConfig("sum", "python", "", 8, (), (), sequence_batching=SequenceBatching(Direct(), 1))
        await membership.publish(ModelRecord(config, "{}", ("1",)))
        for number in range(1, 13):
            start = mesh.submission(number, {"INPUT": np.ones((1, 1), np.int32)}, StepFlag.START | StepFlag.PAGEABLE)
            await mesh.submit(msgspec.structs.replace(start, tenant="acme"))
            await mesh.assign(number, ExecutorId("a-1"), slot=number)
            await mesh.commit(number, ExecutorId("a-1"))
        await StoredTenants(redis, keys).set("acme", TenantLimits(live_max=99))
    assert len(keys.shards) == len({mesh.keys.shard_of(mesh.sequence(number)) for number in range(1, 13)})

    async with connect(redis_cluster.url, retries=0) as redis:
        reader = MeshReader(redis, keys.prefix)
        operated = await reader.operated()
        assert [{"sum": 12}] == [one.sequences for one in await holdings(operated)]
        assert {"acme": 12} == await StoredTenants(redis, keys).sequences()
        for number in range(1, 13):
            exported = await operated.sequences.export(mesh.sequence(number))
            assert EndCode.ENDS == await operated.sequences.end(mesh.sequence(number))
            await operated.sequences.reopen(mesh.sequence(100 + number), exported)
        shown = await reader.read()
        page, _ = await operated.sequences.page("sum", Wanted())

    # Nobody leads the model, so those that end now are still there.
    assert [*range(1, 13), *range(101, 113)] == [one.id for one in page]
    assert ({"sum": 24}, 12) == (shown.live, sum(one.total for one in shown.executors))
