"""Consistent hashing: stable, even, and few keys move."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shared.contract import hashing
from shared.contract.hashing import HashRing, bounded_capacity, stable_hash

names = st.text(alphabet="abcdefgh0123456789-", min_size=1, max_size=8)
node_sets = st.sets(names, min_size=1, max_size=8)
KEYS = [f"model||i{number}" for number in range(500)]


def ring_of(nodes: set[str] | list[str]) -> HashRing:
    return HashRing(nodes, virtual_nodes=32)


def owners(ring: HashRing) -> dict[str, str]:
    return {key: next(ring.walk(key)) for key in KEYS}


def test_hash_is_the_published_one() -> None:
    """xxhash64, seed 0: a value that must never change, or every placement of a running mesh would."""
    assert 0xEF46DB3751D8E999 == stable_hash("")
    assert 0x44BC2CF5AD770999 == stable_hash("abc")


@given(nodes=node_sets, key=st.text(max_size=20))
def test_walk_offers_every_node_once(nodes: set[str], key: str) -> None:
    offered = list(ring_of(nodes).walk(key))

    assert sorted(nodes) == sorted(offered)


@given(nodes=st.lists(names, min_size=1, max_size=8, unique=True), seed=st.randoms(use_true_random=False))
def test_ring_does_not_depend_on_the_order_of_arrival(nodes: list[str], seed: object) -> None:
    other = sorted(nodes, key=lambda node: (stable_hash(f"{seed}{node}"), node))

    assert owners(ring_of(nodes)) == owners(ring_of(other))


@given(nodes=node_sets, newcomer=names)
def test_newcomer_takes_keys_only_for_itself(nodes: set[str], newcomer: str) -> None:
    nodes -= {newcomer}
    before = owners(ring_of(nodes)) if nodes else dict.fromkeys(KEYS, newcomer)
    after = owners(ring_of(nodes | {newcomer}))

    assert {newcomer} >= {after[key] for key in KEYS if before[key] != after[key]}


@given(nodes=st.sets(names, min_size=2, max_size=8), data=st.data())
def test_leaver_moves_only_its_own_keys_and_each_to_its_next_choice(nodes: set[str], data: st.DataObject) -> None:
    leaver = data.draw(st.sampled_from(sorted(nodes)))
    ring = ring_of(nodes)
    expected = {key: next(node for node in ring.walk(key) if node != leaver) for key in KEYS}

    assert expected == owners(ring_of(nodes - {leaver}))


def test_one_of_ten_nodes_more_moves_about_a_tenth() -> None:
    before = owners(ring_of([f"e{number}" for number in range(10)]))
    after = owners(ring_of([f"e{number}" for number in range(11)]))
    moved = sum(before[key] != after[key] for key in KEYS)

    assert moved < len(KEYS) / 5


@given(nodes=st.integers(1, 20), keys=st.integers(0, 400), factor=st.floats(1.0, 3.0))
def test_bounded_loads_leave_room_for_every_key(nodes: int, keys: int, factor: float) -> None:
    """The bounds of all nodes together hold all keys, so that nobody is sent round in a circle."""
    assert bounded_capacity(keys, nodes, factor) * nodes >= keys


def test_bounded_loads_keep_every_node_below_its_share() -> None:
    ring = ring_of([f"e{number}" for number in range(7)])
    loads: Counter[str] = Counter()
    for key in KEYS:
        share = bounded_capacity(loads.total() + 1, 7, 1.25)
        loads[next(node for node in ring.walk(key) if loads[node] < share)] += 1

    assert max(loads.values()) <= 1.25 * len(KEYS) / 7


def test_adding_and_removing_twice_changes_nothing() -> None:
    ring = ring_of(["a", "b", "a"])

    assert ["a", "b"] == sorted(ring.walk("x"))
    assert list(ring.walk("x")) == list(ring_of(["b", "a"]).walk("x"))


def test_leaders_with_the_same_executors_share_a_ring() -> None:
    """A ring of two hundred takes a megabyte and some milliseconds, for each of hundreds of models."""
    shared = hashing.ring_of(frozenset({"a", "b"}))

    assert shared is hashing.ring_of(frozenset({"b", "a"}))
    assert owners(HashRing(["a", "b"])) == owners(shared)
