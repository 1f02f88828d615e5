"""Where a mesh's keys live, by their hash tags."""

from __future__ import annotations

import asyncio

import pytest

from shared.store.connections.homes import in_order, tag_of, tags_of, together, without_lost


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
    ]

    assert ["1", "1", "2", "0", "1"] == tags_of(commands)
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
