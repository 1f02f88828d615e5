"""Where a mesh's keys live, by their hash tags."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from shared.store.connections.cluster_redis import ClusterRedis
from shared.store.connections.homes import in_order, out_of_reach, tag_of, tags_of, together, without_lost
from shared.store.connections.redis_client import connect
from shared.store.connections.redis_py import CONNECTION_LOST
from shared.store.connections.server_run import AnotherRunError, ServerRun
from shared.store.keyspace import Keyspace


@pytest.mark.parametrize(
    ("key", "tag"),
    [
        ("p:2:{3}:seq:m||i7", "3"),
        ("p:{mesh}:mesh", "mesh"),
        ("p:2:{12}:seq:{3}", "12"),
        ("no tag", "mesh"),
        ("{}a", "mesh"),
    ],
)
def test_the_first_braces_are_the_tag(key: str, tag: str) -> None:
    assert tag == tag_of(key)


def test_a_command_goes_where_its_keys_are_and_one_without_goes_along() -> None:
    commands = [
        ("TIME",),
        ("HGET", "p:{1}:a", "f"),
        ("FCALL", "f", 2, "p:{2}:a", "p:{2}:b", "x"),
        ("XREAD", "COUNT", 1, "BLOCK", 5, "STREAMS", b"p:{0}:a", b"p:{0}:b", "0", "0"),
        ("FCALL", "f", 0, "p:{3}:no key"),
        ("EVAL", "return { 1 }", 1, "p:{3}:a", "p:{4}:no key"),
    ]

    assert ["1", "1", "2", "0", "1", "3"] == tags_of(commands)
    assert ["mesh"] == tags_of([("PING",)])


def test_replies_are_put_in_order() -> None:
    assert ["a", 1, 2, "b"] == in_order(["x", "y", "y", "x"], {"x": ["a", "b"], "y": [1, 2]})


async def test_calls_to_several_homes_end_before_the_first_failure_is_told() -> None:
    ended = asyncio.Event()

    async def slow() -> None:
        await asyncio.sleep(0)
        ended.set()

    async def failing() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await together([failing(), slow()])
    assert ended.is_set()


async def ending(outcome: str | Exception) -> str:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def test_a_lost_home_hides_nothing_of_the_others_and_no_other_failure() -> None:
    lost, wrong = OSError("lost"), ValueError("wrong")

    assert ["a", lost] == await without_lost([ending("a"), ending(lost)])
    for outcomes, raised in ([lost], "lost"), ([lost, lost], "lost"), (["a", wrong], "wrong"), ([wrong, lost], "wrong"):
        with pytest.raises((OSError, ValueError), match=raised):
            await without_lost(map(ending, outcomes))


@pytest.mark.parametrize(("homes", "told"), [("+-+", {1}), ("+-!", AnotherRunError), ("---", CONNECTION_LOST)])
async def test_shards_are_out_of_reach_whose_server_is_away_and_a_restarted_one_is_told_first(
    redis_url: str, key_prefix: str, homes: str, told: Any
) -> None:
    """homes: + answers, - is away, ! was restarted"""

    def open_home(tag: str) -> Any:
        run, home = ServerRun(), homes[int(tag) if tag.isdecimal() else 0]
        if home == "!":
            run.hold_off("")
        return connect("redis://127.0.0.1:1" if home == "-" else redis_url, retries=0, run=run)

    async with ClusterRedis(open_home) as redis:
        looked = out_of_reach(cast("Any", redis), Keyspace(key_prefix, 3))
        if isinstance(told, set):
            assert told == (await looked).keys()
        else:
            with pytest.raises(told):
                await looked
