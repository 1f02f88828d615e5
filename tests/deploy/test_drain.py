"""`seqmesh drain --list`: what it says of executors. Draining itself is tested in `tests/mesh/test_moving.py`."""

from __future__ import annotations

from typing import Any, cast

import click
import msgspec
import pytest
from click.testing import CliRunner

from deploy.operate.drain import ListedExecutor, alone, ask, command, lines_of, run, table, warnings_of, wish_name
from deploy.operate.operating import ExecutorHolding, OperatedMesh, holdings
from deploy.operate.settings import OperatorSettings
from shared.contract.ids import ExecutorId, ShardId
from shared.contract.messages import ExecutorRegistration, ServedModel
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.membership import Member, Membership

SERVED = ServedModel("sum", "1", 1, 4)
REGISTRATION = ExecutorRegistration(ExecutorId("executor-1-ab"), "executor-1", "host", 1, 1, models=(SERVED,))
CLOSING = msgspec.structs.replace(REGISTRATION, models=(msgspec.structs.replace(SERVED, closing=True),))
LEAVING = msgspec.structs.replace(REGISTRATION, leaving=True)


@pytest.mark.parametrize(
    ("registration", "alive", "drained", "state"),
    [
        (REGISTRATION, True, [], "serving"),
        (REGISTRATION, True, ["executor-2"], "serving"),
        (REGISTRATION, True, ["executor-1"], "asked"),
        (REGISTRATION, True, ["executor-1-ab"], "asked"),
        (CLOSING, True, ["executor-1"], "closing"),
        (LEAVING, True, ["executor-1"], "leaving"),
        (REGISTRATION, False, ["executor-1"], "dead"),
    ],
)
def test_an_executor_that_was_asked_is_shown_so_until_it_has_heard(
    registration: ExecutorRegistration, drained: list[str], state: str, *, alive: bool
) -> None:
    line, *_ = lines_of([ExecutorHolding(Member(registration, alive), {"sum": 3})], drained)
    _, row = table([line]).splitlines()

    assert ListedExecutor("executor-1", "executor-1-ab", state, {"sum": 3}) == line
    assert ["executor-1", "executor-1-ab", state, "3", "sum", "3"] == row.split()


def test_a_drained_name_without_an_executor_is_shown() -> None:
    """A process that is started under it takes nothing."""
    assert [ListedExecutor("executor-9", "", "drained", {})] == lines_of([], ["executor-9"])


@pytest.mark.parametrize("drained", ["executor-1", "executor-1-ab"])
def test_an_executor_is_shown_once_when_it_is_drained_and_its_registration_still_there(drained: str) -> None:
    gone = ExecutorHolding(Member(LEAVING, alive=True), {})

    assert [ListedExecutor(drained, "", "drained", {})] == lines_of([gone], [drained])


@pytest.mark.parametrize("also", ["executor-1", "--undo"])
def test_a_list_drains_nobody(also: str) -> None:
    result = CliRunner().invoke(command, ["--list", also])

    assert 2 == result.exit_code
    assert "--list shows every executor, and drains none" in result.output


@pytest.mark.parametrize(
    ("name", "alive", "kept_under"),
    [("executor-1", True, "executor-1-ab"), ("executor-1", False, "executor-1"), ("executor-2", True, "executor-1")],
)
def test_one_of_several_executors_of_a_name_is_drained_alone(name: str, kept_under: str, *, alive: bool) -> None:
    """Under its id. Otherwise under its name, which a restarted process has again."""
    other = msgspec.structs.replace(REGISTRATION, executor=ExecutorId(f"{name}-cd"), name=name)
    known = [ExecutorHolding(Member(REGISTRATION, alive=True), {}), ExecutorHolding(Member(other, alive), {})]

    assert kept_under == wish_name("executor-1-ab", known)


async def test_who_drains_a_name_that_several_executors_have_is_told_that_all_are_drained(
    redis: Redis, key_prefix: str
) -> None:
    mesh = OperatedMesh(redis, keys := Keyspace(key_prefix), membership := Membership(redis, keys))
    other = msgspec.structs.replace(REGISTRATION, executor=ExecutorId("executor-1-cd"))
    for registration in (REGISTRATION, other):
        await membership.register(registration, lease_ms=60_000)

    by_name, told = await ask(mesh, ["executor-1"])
    by_id, told_nothing = await ask(mesh, ["executor-1-cd"])

    assert (["executor-1"], ["executor-1-cd"]) == (by_name, by_id)
    assert "executor-1: 2 executors have this name, all are drained: executor-1-ab, executor-1-cd" in told[0]
    assert not told_nothing


def test_who_drains_the_last_one_hears_what_becomes_of_its_models() -> None:
    """Also where it holds no sequence: from then on everybody is refused."""
    stateless = msgspec.structs.replace(SERVED, model="stateless", slots=0)
    only = ExecutorHolding(
        Member(msgspec.structs.replace(REGISTRATION, models=(SERVED, stateless)), alive=True), {"sum": 3}
    )
    idle = ExecutorHolding(only.member, {})
    another = ExecutorHolding(
        Member(msgspec.structs.replace(REGISTRATION, executor=ExecutorId("b"), name="executor-2"), alive=True), {}
    )

    def told(*known: ExecutorHolding) -> list[str]:
        return warnings_of(alone(["executor-1"], list(known)))

    waiting = "3 sequences of it will wait for one, or end here if only the model knows their state"
    assert [
        f"no other executor serves 'sum': {waiting}",
        "no other executor serves 'stateless': requests are refused (503) until one does",
    ] == told(only)
    assert ["no other executor serves 'stateless', 'sum': requests are refused (503) until one does"] == told(idle)
    assert ["no other executor serves 'stateless': requests are refused (503) until one does"] == told(only, another)


async def test_who_waits_for_a_drain_asks_for_nothing_but_what_is_left_there(
    redis: Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks five times a second, of a mesh with hundreds of models and executors."""
    keys = Keyspace(key_prefix)
    membership = Membership(redis, keys)
    for number in (1, 2):
        one = msgspec.structs.replace(
            REGISTRATION, executor=ExecutorId(f"executor-{number}-ab"), name=f"executor-{number}"
        )
        await membership.register(one, lease_ms=60_000)
    await redis.hset(keys.models, "sum", b"a record that nobody needs to read")
    for number, sequences in ((1, ["a", "b"]), (2, ["c"])):
        await cast("Any", redis).sadd(keys.owned(ShardId(0), ExecutorId(f"executor-{number}-ab"), "sum"), *sequences)

    asked: list[str] = []
    owned = Keyspace.owned

    def noted(self: Keyspace, shard: ShardId, executor: ExecutorId, model: str) -> str:
        asked.append(executor)
        return owned(self, shard, executor, model)

    monkeypatch.setattr(Keyspace, "owned", noted)
    (one,) = await holdings(OperatedMesh(redis, keys, membership), ["executor-1"])

    assert ("executor-1", {"sum": 2}) == (one.registration.name, one.sequences)
    assert ["executor-1-ab"] == asked
    for number in (1, 2):
        await redis.delete(keys.owned(ShardId(0), ExecutorId(f"executor-{number}-ab"), "sum"))


async def test_a_drain_may_be_taken_back_twice_and_an_unknown_name_never(
    redis: Redis, redis_url: str, key_prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = Keyspace(key_prefix)
    await redis.hset(keys.mesh, "shards", 1)
    membership = Membership(redis, keys)
    await membership.register(REGISTRATION, lease_ms=60_000)
    await membership.drain("executor-1", 1)

    async def undo(*who: str) -> None:
        settings = OperatorSettings(redis_url=redis_url, key_prefix=key_prefix)
        await run(settings, who, show=False, as_json=False, undo=True, wait=True)

    await undo("executor-1", "executor-1")
    await undo("executor-1")
    with pytest.raises(click.ClickException, match="'executor-9' is not drained; drained are: none"):
        await undo("executor-9")
    await membership.drain("executor-1", 1)
    with pytest.raises(click.ClickException, match="'executor-9', 'executor-8' are not drained; drained are: none"):
        await undo("executor-9", "executor-1", "executor-8")

    assert [
        "executor-1: serves again",
        "executor-1: was not drained",
        "executor-1: serves again",
    ] == capsys.readouterr().out.splitlines()


async def test_who_drains_the_last_executor_is_told_and_waits_until_it_is_empty(
    redis: Redis, redis_url: str, key_prefix: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keyspace(key_prefix)
    await redis.hset(keys.mesh, "shards", 1)
    membership = Membership(redis, keys)
    await redis.hset(keys.models, "sum", b"a record that nobody needs to read")
    await membership.register(REGISTRATION, lease_ms=60_000)
    owned = keys.owned(ShardId(0), REGISTRATION.executor, "sum")
    commands = cast("Any", redis)
    await commands.sadd(owned, "a", "b")

    async def hand_over(_: float) -> None:
        if await commands.srem(owned, "a") == 0:
            await membership.remove(REGISTRATION.executor)

    settings = OperatorSettings(redis_url=redis_url, key_prefix=key_prefix)
    twice = ("executor-1", "executor-1-ab", "executor-1")
    await run(settings, twice, show=False, as_json=False, undo=False, wait=False)
    with monkeypatch.context() as patch:
        patch.setattr("deploy.operate.drain.asyncio.sleep", hand_over)
        await run(settings, ("executor-1",), show=False, as_json=False, undo=False, wait=True)

    warning, asked, *told = capsys.readouterr().out.splitlines()
    assert "no other executor serves 'sum': 2 sequences of it will wait for one" in warning
    assert asked.startswith("executor-1: asked to hand over all sequences")
    assert warning == told[0]
    assert ["executor-1: 2 sequences left", "executor-1: 1 sequence left", "executor-1: drained"] == told[1:]
    assert ["executor-1"] == await membership.drained()
    await redis.delete(owned)
