"""Ids that cross a boundary."""

from __future__ import annotations

import pytest

from shared.contract.ids import (
    CORRELATION_ID_CHARS_MAX,
    ShardId,
    correlation_id_from,
    correlation_id_of,
    entry_key,
    first_shards,
    follows_another,
    is_nameable,
    model_of,
    sequence_id,
    shard_of,
)


def test_ids_of_entries_compare_in_the_order_of_the_stream() -> None:
    in_order = ["0", "0-1", "9-5", "10-0", "10-2", "10-10"]

    keys = [entry_key(one) for one in in_order]

    assert keys == sorted(set(keys))
    assert keys == [entry_key(one.encode()) for one in in_order]


@pytest.mark.parametrize("garbage", ["", "x", "1-x", b"\xff-1"])
def test_what_is_no_id_is_a_value_error(garbage: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|can.t decode"):
        entry_key(garbage)


@pytest.mark.parametrize("given", [1, 42, (1 << 64) - 1, "42", "a|b", "|", "i7"])
def test_the_name_of_a_sequence_tells_its_clients_id_and_its_type(given: int | str) -> None:
    for version in ("", "3"):
        named = sequence_id("m", version, given)
        assert ("m", given) == (model_of(named), correlation_id_of(named))


@pytest.mark.parametrize(
    ("requested", "expected"),
    [("", False), ("2", False), ("@e//1", False), ("@e#2//1", False), ("@e//2#5-0.1", True), ("3@e#2/1/2#5-0.1", True)],
)
@pytest.mark.parametrize("given", [7, "#7", "@e//2#5-0.1|"])
def test_the_name_of_a_sequence_tells_whether_it_follows_another(
    requested: str, given: int | str, *, expected: bool
) -> None:
    assert expected is follows_another(sequence_id("m", requested, given))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7", 7), ("18446744073709551615", (1 << 64) - 1), ("1" * 21, "1" * 21), ("7a", "7a"), ("٣", "٣"), ("", "")],
)
def test_an_id_that_was_typed_is_a_number_where_it_looks_like_one(text: str, expected: int | str) -> None:
    assert expected == correlation_id_from(text, string=False)
    assert text == correlation_id_from(text, string=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *((0, False), (1, True), ((1 << 64) - 1, True), (1 << 64, False)),
        *(("", False), ("é" * (CORRELATION_ID_CHARS_MAX // 2), True), ("é" * CORRELATION_ID_CHARS_MAX, False)),
    ],
)
def test_an_id_that_names_a_sequence_is_within_its_bounds(given: int | str, *, expected: bool) -> None:
    assert expected is is_nameable(given)


def test_a_sequence_has_a_shard_of_those_that_there_are() -> None:
    names = [sequence_id("m", "", number) for number in range(1, 100)]

    assert {0} == {shard_of(name, first_shards(1)) for name in names}
    assert {0, 1, 2} == {shard_of(name, first_shards(3)) for name in names}
    assert {2, 7} == {shard_of(name, (ShardId(2), ShardId(7))) for name in names}
