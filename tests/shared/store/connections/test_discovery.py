"""A home of a Cluster finds its node, whichever nodes are gone and however the others name themselves."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.store.connections import discovery
from shared.store.connections.cluster import ASKED_MAX, SLOTS, Node, Nodes, shards_on, slot_of
from shared.store.connections.discovery import NoAnswerError


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


async def test_an_answer_counts_though_most_of_those_that_are_asked_never_say_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "PATIENCE_S", 0.01)
    said = asyncio.Event()
    cluster = Cluster({("right", 1): everything(b"right", 1)})

    def connect(node: Node) -> Connection:
        connection = cluster.connect(node)
        if node not in cluster.holders:
            monkeypatch.setattr(connection, "connect", said.wait)
        return connection

    nodes = Nodes([("silent", 1), ("right", 1), ("silent", 2)], connect)
    async with asyncio.timeout(60):
        assert ("right", 1) == await nodes.holder("0").primary()


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("each", [1, 3])
def test_shards_lie_on_all_nodes_alike_though_no_hosts_are_told(nodes: int, each: int) -> None:
    width = SLOTS // nodes
    ends = [*(at * width - 1 for at in range(1, nodes)), SLOTS - 1]
    told: Any = [[end - width, end, [None, 6379, b"node %d" % at, []]] for at, end in enumerate(ends)]
    count = each * nodes if each > 1 else 0

    shards = shards_on(told, count)

    held = Counter(min(slot_of(str(shard)) // width, nodes - 1) for shard in shards)
    assert dict.fromkeys(range(nodes), each) == held
    assert len(set(shards)) == len(shards)


def test_of_more_shards_than_nodes_none_has_two_more_than_another() -> None:
    told = [[0, 99, [b"h", 1, b"few"]], [100, SLOTS - 1, [b"h", 2, b"many"]]]

    assert 5 == len(shards_on(told, 5))
    assert sum(slot_of(str(shard)) < 100 for shard in shards_on(told, 5)) in (2, 3)


def test_a_slot_is_what_the_specification_says() -> None:
    assert 0x31C3 == slot_of("123456789")
    assert [13907, 9842, 5649, 1584] == [slot_of(str(shard)) for shard in range(4)]


def answer(*holders: tuple[int, int, bytes | None, int]) -> list[Any]:
    return [[first, last, [host, port, b"id"], [b"10.0.0.9", 1, b"a replica"]] for first, last, host, port in holders]


def test_a_node_is_named_by_the_range_that_has_the_slot() -> None:
    nodes = Nodes([("10.0.0.1", 6379)], lambda node: SimpleNamespace(host=node[0]))
    reply = answer((0, 5000, b"10.0.0.1", 1), (5001, 9841, b"10.0.0.2", 2), (9842, 16383, b"10.0.0.3", 3))

    found = nodes.holder("1")._read(reply, SimpleNamespace(host="10.0.0.1"))

    assert ("10.0.0.3", 3, 0) == found
    assert {"10.0.0.1", "10.0.0.2", "10.0.0.3"} == {made.host for made in nodes.holder("1")._connections()}


@pytest.mark.parametrize("host", [None, b""])
def test_a_node_that_does_not_know_its_address_is_where_it_was_asked(host: bytes | None) -> None:
    nodes = Nodes([("n", 1)], lambda node: SimpleNamespace(host=node[0]))

    assert "asked" == nodes.holder("1")._read(answer((0, 16383, host, 7)), SimpleNamespace(host="asked")).host


@pytest.mark.parametrize(
    "nonsense",
    [None, b"OK", 5, [], [[0, 16383]], [[0, 16383, [b"h"]]], [[0, 16383, [b"h", b"port"]]], [[0, 16383, [b"h", 0]]],
     [[b"a", b"b", [b"h", 1]]], answer((0, 100, b"h", 1))],
)  # fmt: skip
def test_nonsense_is_no_answer(nonsense: Any) -> None:
    nodes = Nodes([("n", 1)], lambda node: SimpleNamespace(host=node[0]))

    with pytest.raises(NoAnswerError):
        nodes.holder("1")._read(nonsense, SimpleNamespace(host="n"))
