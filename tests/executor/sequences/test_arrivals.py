"""Sequences come to an executor while a node of a Cluster is away."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from executor.connections import RedisConnections
from executor.core.events import CheckpointFetched
from executor.core.state import OwnedPhase
from executor.sequences import inbox as inboxes
from executor.sequences.arrivals import fetch_checkpoints
from shared.contract.ids import Epoch, ExecutorId, SequenceId, sequence_id
from shared.store.agreement import join_mesh
from shared.store.commands import Redis
from shared.store.connections.homes import MESH_TAG, tag_of
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from tests.embedded_cluster import EmbeddedCluster
from tests.executor.patience import until


class Model:
    """In place of a model: sequences whose checkpoints it wants."""

    model = "sum"

    def __init__(self, sequences: list[SequenceId]) -> None:
        self.wanted = [
            SimpleNamespace(sequence=name, epoch=Epoch(1), phase=OwnedPhase.FETCHING) for name in sorted(sequences)
        ]
        self.fetched: list[SequenceId] = []
        self.reads: list[int] = []
        self.fetch_due = asyncio.Event()
        self.fetch_due.set()
        self.state = self

    def next_fetches(self, waited_for: int, idle: int) -> list[Any]:
        taken, self.wanted = self.wanted[:waited_for], self.wanted[waited_for:]
        if taken:
            self.reads.append(len(taken))
        return taken

    def fetch(self, owned: Any) -> None:
        self.wanted.append(owned)

    def handle(self, event: CheckpointFetched) -> list[bytes]:
        assert event.checkpoint is not None
        self.fetched.append(event.owned.sequence)
        return []


async def test_checkpoints_of_other_nodes_are_fetched_at_once_and_those_of_one_that_is_away_when_it_is_back(
    private_cluster: EmbeddedCluster,
) -> None:
    async with connect(private_cluster.url) as redis:
        keys = await join_mesh(redis, "m")
        names = [sequence_id("sum", "", number) for number in range(1, 30)]
        for name in names:
            for field, value in {"st": "l", "ep": "1", "du": "1", "ck": "0"}.items():
                await redis.hset(keys.sequence(name).record, field, value)
    tags = {name: tag_of(keys.sequence(name).record) for name in names}
    node = next(
        one for one in map(private_cluster.holder, tags.values()) if one is not private_cluster.holder(MESH_TAG)
    )
    here = {name for name in names if private_cluster.holder(tags[name]) is not node}
    assert 0 < len(here) < len(names)
    model: Any = Model(names)
    connections = RedisConnections(lambda run: connect(private_cluster.url, retries=0, run=run), keys)
    node.kill()
    inbox: Any = None  # nothing is removed from it
    fetching = asyncio.create_task(fetch_checkpoints(model, connections, inbox, ExecutorId("e1")))

    await until(lambda: here == set(model.fetched))
    await asyncio.to_thread(private_cluster.revive)
    await until(lambda: sorted(names) == sorted(model.fetched))

    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    await connections.close()


@pytest.mark.parametrize(("size", "reads"), [(10, [1, 4, 16, 9]), (1000, [1, 2, 2, 2])])
async def test_a_read_of_checkpoints_is_bounded_in_bytes(
    redis: Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch, size: int, reads: list[int]
) -> None:
    """What takes the event loop longer than the lease would take every owner's lease, one after the other."""
    monkeypatch.setattr(inboxes, "READ_BYTES", 2000)
    keys = Keyspace(key_prefix, 1)
    names = [sequence_id("sum", "", number) for number in range(30)]
    for name in names:
        own = keys.sequence(name)
        for field, value in {"st": "l", "ep": "1", "du": "1", "cm": "1", "ck": "1"}.items():
            await redis.hset(own.record, field, value)
        await redis.hset(own.checkpoint, "m", bytes(size))
    model: Any = Model(names)
    connections: Any = SimpleNamespace(commands=redis, keys=keys, scripts=None)
    inbox: Any = None  # nothing is removed from it

    fetching = asyncio.create_task(fetch_checkpoints(model, connections, inbox, ExecutorId("e1")))
    await until(lambda: sorted(names) == sorted(model.fetched))
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)

    assert reads == model.reads[:4]
    await redis.delete(*[key for name in names for key in (keys.sequence(name).record, keys.sequence(name).checkpoint)])
