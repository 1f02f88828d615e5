"""A home of a Cluster finds its node, whichever nodes are gone and however the others name themselves."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.store.cluster import ASKED_MAX, SLOTS, Node, Nodes, shards_of_cluster


class Cluster:
    """In place of its nodes. holders: what those that answer say of each range of slots; asked: who was asked last"""

    def __init__(self, holders: dict[Node, list[list[Any]]]) -> None:
        self.holders = holders
        self.asked: list[Node] = []

    def connect(self, node: Node) -> Connection:
        self.asked.append(node)
        return Connection(node, self.holders.get(node))


class Connection:
    """To a node; slots: its answer, None if it is gone"""

    def __init__(self, node: Node, slots: list[list[Any]] | None) -> None:
        self.host, self.port = node
        self._slots = slots

    async def connect(self) -> None:
        if self._slots is None:
            raise RedisConnectionError("refused")

    async def send_command(self, *_: str) -> None: ...

    async def read_response(self) -> list[list[Any]] | None:
        return self._slots

    async def disconnect(self, *, nowait: bool) -> None: ...


def everything(host: bytes | None, port: int, *about: bytes) -> list[list[Any]]:
    """The answer of a node that names one holder of all slots."""
    return [[0, SLOTS - 1, [host, port, b"id", list(about)]]]


async def test_other_nodes_tell_when_all_of_the_url_are_gone() -> None:
    named = [(f"named-{number}", 1) for number in range(ASKED_MAX)]
    answer = [[number, number, [b"later-%d" % number, 1, b"id"]] for number in range(SLOTS)][: 2 * ASKED_MAX]
    answer[-1][1] = SLOTS - 1
    cluster = Cluster({named[0]: answer})
    holder = Nodes(named, cluster.connect).holder("mesh")
    found = await holder.primary()

    cluster.holders = {(f"later-{number}", 1): answer for number in range(2 * ASKED_MAX)}
    for _ in range(100):
        # Chance may draw nodes that are gone, and whoever connects then tries again.
        try:
            assert found == await holder.primary()
        except RedisConnectionError:
            continue
        break
    else:
        pytest.fail("no node was found")
    assert len(cluster.asked) % ASKED_MAX == 0, "as many as are asked at once"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (everything(b"10.0.0.7", 7001), ("10.0.0.7", 7001)),
        (everything(b"fd00::7", 7001), ("fd00::7", 7001)),
        (everything(b"redis-7.example", 7001, b"ip", b"10.0.0.7"), ("redis-7.example", 7001)),
        (everything(b"?", 7001, b"ip", b"10.0.0.7"), ("10.0.0.7", 7001)),
        (everything(None, 7001, b"ip", b"10.0.0.7"), ("asked", 7001)),
        (everything(b"", 7001), ("asked", 7001)),
    ],
    ids=["address", "IPv6", "name", "no name", "no host", "own host unknown"],
)
async def test_the_holder_is_reached_however_its_host_is_told(answer: list[list[Any]], found: Node) -> None:
    assert found == await Nodes([("asked", 1)], Cluster({("asked", 1): answer}).connect).holder("0").primary()


NONSENSE: list[Any] = [
    [],
    [[]],
    [[0, SLOTS - 1]],
    [[0, SLOTS - 1, [b"a", 0]]],
    [[0, SLOTS - 1, [b"?", 1]]],
    [[0, SLOTS - 1, [b"?", 1, b"id", []]]],
    [[b"x", b"y", [b"a", 1]]],
    [[0, 0, [b"a", 1]]],
    7,
    b"OK",
]


@pytest.mark.parametrize("answer", NONSENSE)
async def test_a_node_that_answers_nonsense_is_no_reason_to_fail_while_another_one_answers(answer: Any) -> None:
    right = everything(b"right", 1)
    cluster = Cluster({("mad", 1): answer, ("right", 1): right})

    assert ("right", 1) == await Nodes([("mad", 1), ("right", 1)], cluster.connect).holder("0").primary()


async def test_a_new_mesh_has_a_shard_on_each_node_though_no_hosts_are_told() -> None:
    class Client:
        async def execute_command(self, *_: str) -> list[list[Any]]:
            third = SLOTS // 3
            starts = [0, third, 2 * third]
            return [[start, start + third, [None, 6379, b"node %d" % start, []]] for start in starts]

    client: Any = Client()

    assert 3 == len(await shards_of_cluster(client))
