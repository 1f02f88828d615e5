"""What an operator hears of a sequence that was to move."""

from __future__ import annotations

from typing import Any

import pytest

from shared.contract.errors import NotDoneError
from shared.contract.ids import ExecutorId, sequence_id
from shared.contract.messages import ExecutorRegistration, ServedModel
from shared.store.keyspace import Keyspace
from shared.store.membership import Member
from shared.store.moving import NO_SLOT, _outcome, destination

SEQUENCE = sequence_id("m", "", 7)


@pytest.mark.leaves_sequences
@pytest.mark.parametrize(
    ("record", "owner", "to", "told"),
    [
        ({"st": "p"}, "a", "", NO_SLOT),
        ({"st": "p"}, None, "b", f"not done: {NO_SLOT}; b had none free for it"),
        ({"st": "e"}, "a", "", "the sequence has ended meanwhile"),
        ({"st": "l", "ow": "b"}, None, "b", "the sequence held no slot; it has one on b now"),
        ({"st": "l", "ow": "a"}, "a", "", "not done: the sequence is still on a: it was never between two steps"),
        ({"st": "l", "ow": "b"}, "a", "", "moved from a to b"),
    ],
)
async def test_the_record_tells_what_has_become_of_it(
    redis: Any, key_prefix: str, record: dict[str, str], owner: str | None, to: str, told: str
) -> None:
    keys = Keyspace(key_prefix)
    await redis.hset(keys.sequence(SEQUENCE).record, mapping=record)

    try:
        heard = await _outcome(redis, keys, SEQUENCE, owner, to)
    except NotDoneError as error:
        heard = f"not done: {error}"

    assert heard.startswith(told)


def member(executor: str, name: str, *, closing: bool = False) -> Member:
    served = (ServedModel("m", "1", 1, 4, closing=closing),)
    return Member(ExecutorRegistration(ExecutorId(executor), name, "host", 1, 1, served), alive=True)


@pytest.mark.parametrize(
    ("owner", "to", "told"),
    [
        ("a-1", "", ""),
        ("a-1", "b", "b-1"),
        (None, "b-1", "b-1"),
        ("a-1", "a", "not done: the sequence is on a-1 already"),
        ("a-1", "c", "not done: several executors are called 'c': name one by its id (c-1, c-2)"),
        ("a-1", "closing", "not done: no executor 'closing' serves 'm'; it is served by: a, b, c"),
    ],
)
def test_it_goes_to_one_executor_that_serves_its_model(owner: str | None, to: str, told: str) -> None:
    members = [
        *(member(f"{name}-1", name) for name in "abc"),
        member("c-2", "c"),
        member("d-1", "closing", closing=True),
    ]

    try:
        heard = destination(members, "m", owner, to)
    except NotDoneError as error:
        heard = f"not done: {error}"

    assert told == heard


def test_it_stays_where_nobody_else_serves_its_model() -> None:
    with pytest.raises(NotDoneError, match="no other executor serves 'm': start one, then move"):
        destination([member("a-1", "a"), member("d-1", "closing", closing=True)], "m", "a-1", "")
