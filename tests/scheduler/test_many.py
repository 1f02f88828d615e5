"""What a scheduler does per model and per sequence: it shares what would grow with both, and holds up nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

import scheduler.leader
from scheduler.core.actions import Action, Forget
from scheduler.core.events import Event, Tick
from scheduler.core.state import LeaderState, Policy
from scheduler.effects import EffectPerformer
from scheduler.leader import REBUILT_AT_ONCE, Leader
from scheduler.mesh import MeshAccess, Polls
from shared.contract.ids import ExecutorId, ShardId, Term
from shared.store.connections.link import LINKS_MAX, Link
from shared.store.membership import Member, Membership
from shared.store.scripts import Scripts
from shared.traces.tracing import Tracing
from tests.scheduler.stage import MODEL, Stage

MANY = 100


class Held(Membership):
    """Looks that are answered when the test says so, and counted."""

    looks = 0

    async def look(self) -> tuple[list[Member], int]:
        self.looks += 1
        await asyncio.sleep(0)
        return await super().look()


async def test_those_who_ask_while_a_poll_is_under_way_share_the_next_one(stage: Stage) -> None:
    """A poll that was under way may be older than the question; the next one is not."""
    membership = Held(stage.redis, stage.keys)
    polls = Polls(membership)
    first = asyncio.create_task(polls.next())
    await asyncio.sleep(0)
    await stage.join("e1")
    found = await asyncio.gather(*(polls.next() for _ in range(MANY)))
    await first

    assert 2 == membership.looks
    assert {("e1",)} == {tuple(one.registration.executor for one in poll.members) for poll, _ in found}
    assert 1 == len({id(poll) for poll, _ in [*found, await polls.next()]}), "nothing has changed"


async def test_a_poll_that_fails_is_made_again_for_those_who_wait(stage: Stage) -> None:
    class Failing(Membership):
        looks = 0

        async def look(self) -> tuple[list[Member], int]:
            self.looks += 1
            if self.looks == 1:
                await asyncio.sleep(0)
                raise ConnectionError
            return await super().look()

    await stage.join("e1")
    polls = Polls(Failing(stage.redis, stage.keys))
    failed, *found = await asyncio.gather(*(polls.next() for _ in range(3)), return_exceptions=True)

    assert isinstance(failed, ConnectionError)
    for one in found:
        assert not isinstance(one, BaseException)
        assert ["e1"] == [member.registration.executor for member in one[0].members]


async def test_many_leaders_share_a_few_connections(stage: Stage) -> None:
    """Each of them has rebuilt and looked for idle sequences."""
    used: set[Link] = set()

    class Noting(Link):
        async def exchange(self, commands: Sequence[Iterable[Any]], *, blocking_s: float = 0.0) -> list[Any]:
            used.add(self)
            return await super().exchange(commands, blocking_s=blocking_s)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("shared.store.connections.link.Link", Noting)
        mesh = MeshAccess(stage.redis, stage.keys, stage.scripts, stage.membership, Tracing())
    leaders = [Leader(mesh, f"m{number}", Term(1), policy=Policy(), tombstone_ms=1000) for number in range(MANY)]
    leading = [asyncio.create_task(leader.run()) for leader in leaders]

    async def have_looked() -> bool:
        poll, now_ms = await mesh.polls.next()
        for leader in leaders:
            leader.observe(poll, now_ms, asyncio.get_running_loop().time())
        return all(leader.state.look_ms for leader in leaders)

    await stage.until(have_looked)
    for task in leading:
        task.cancel()
    await asyncio.gather(*leading, return_exceptions=True)
    await mesh.links.close()

    assert 0 < len(used) <= LINKS_MAX


@pytest.mark.parametrize("models", [1, MANY])
async def test_forgetting_an_executor_takes_as_many_commands_however_many_models_there_are(
    stage: Stage, models: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(models):
        await stage.publish(f"m{number}")
    e1 = await stage.join("e1")
    await stage.kill(e1)
    performer = EffectPerformer(stage.mesh, MODEL, await stage.term(), shards=stage.keys.shards, tombstone_ms=1000)
    asked: list[tuple[Any, ...]] = []
    ask = stage.mesh.links.ask

    async def noting(commands: Sequence[Iterable[Any]]) -> list[Any]:
        asked.extend(map(tuple, commands))
        return await ask(commands)

    monkeypatch.setattr(stage.mesh.links, "ask", noting)
    await performer.perform([Forget(e1)])
    first = len(asked)
    assert [] == await stage.membership.members()
    await performer.perform([Forget(e1)])

    left = 1 + len(stage.keys.shards)  # its registration, and its inbox in each shard
    assert left + 1 + len(stage.keys.shards) == first, "also its lease, and what it owns in each shard"
    assert first + left == len(asked), "nothing is left"


@pytest.mark.leaves_sequences
async def test_leaders_begin_beside_the_drain_of_an_inbox_which_is_one_for_all(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An inbox may hold very many steps that are kept for a replay, of every model."""
    models = [MODEL, *(f"m{number}" for number in range(20))]
    for model in models:
        await stage.publish(model)
    await stage.join("e1")
    drained, goes_on = list[ExecutorId](), asyncio.Event()

    async def drain_whole(_: Scripts, executor: ExecutorId, **where: Any) -> None:
        drained.append(executor)
        await goes_on.wait()

    monkeypatch.setattr(Scripts, "drain_whole", drain_whole)
    async with stage.scheduler(spare_slots=0) as scheduler:

        async def all_lead() -> bool:
            return [*map(bool, (one.positions() for one in scheduler.leaders.values()))] == [True] * len(models)

        async def drained_again() -> bool:
            return len(drained) == 2

        await stage.until(all_lead)
        await stage.begin(7)
        assert ["e1"] == drained
        goes_on.set()
        await stage.until(drained_again)


async def test_other_tasks_have_their_turn_while_many_sequences_are_rebuilt(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a lease is renewed in time."""
    decided, most = 0, 0

    def decide(state: LeaderState, event: Event) -> list[Action]:
        nonlocal decided
        decided += 1
        return []

    async def rebuilt(*_: Any) -> list[Event]:
        return [Tick(0, "rebuild")] * (10 * REBUILT_AT_ONCE)

    async def renew() -> None:
        nonlocal decided, most
        while True:
            most, decided = max(most, decided), 0
            await asyncio.sleep(0)

    monkeypatch.setattr(scheduler.leader, "decide", decide)
    monkeypatch.setattr(scheduler.leader, "rebuilt", rebuilt)
    renewing = asyncio.create_task(renew())
    await Leader(stage.mesh, MODEL, Term(1), policy=Policy(), tombstone_ms=1000)._rebuild()
    renewing.cancel()

    assert REBUILT_AT_ONCE == most


async def test_the_streams_of_a_leader_are_read_on_when_it_has_taken_in_what_was_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler.leader, "MAILBOX_MAX", 2)
    leader = Leader(stage.mesh, MODEL, Term(1), policy=Policy(), tombstone_ms=1000)
    leading = asyncio.create_task(leader.run())

    async def is_read() -> bool:
        return bool(leader.positions())

    await stage.until(is_read)
    feed = stage.keys.feed(ShardId(0), MODEL)
    seen: list[str] = []
    for number in (1, 2, 3):
        leader.deliver(feed, [(b"%d-0" % number, {b"q": b"sum||i9", b"e": b"1", b"k": b"e"})])
        seen.append(leader.positions().get(feed, ""))
    await stage.until(is_read)
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)

    assert ["1-0", "", ""] == seen
    assert "3-0" == leader.positions()[feed]
