"""Ids that cross a boundary."""

from __future__ import annotations

import pytest

from shared.contract.ids import entry_key


def test_ids_of_entries_compare_in_the_order_of_the_stream() -> None:
    in_order = ["0", "0-1", "9-5", "10-0", "10-2", "10-10"]

    keys = [entry_key(one) for one in in_order]

    assert keys == sorted(set(keys))
    assert keys == [entry_key(one.encode()) for one in in_order]


@pytest.mark.parametrize("garbage", ["", "x", "1-x", b"\xff-1"])
def test_what_is_no_id_is_a_value_error(garbage: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|can.t decode"):
        entry_key(garbage)
