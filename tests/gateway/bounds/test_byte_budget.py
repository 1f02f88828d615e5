"""The gateway's room: what was taken is given back, and nobody gets more than there is, unless it is alone."""

from __future__ import annotations

import random

import pytest

from gateway.bounds.byte_budget import SMALL_BYTES, ByteBudget, Reservation
from shared.contract.errors import UnavailableError


def test_a_body_takes_what_it_needs_and_gives_all_of_it_back() -> None:
    budget = ByteBudget(100)
    with budget.reserve() as reservation:
        reservation.hold(60)
        reservation.hold(40)
        assert 60 == budget.taken
        reservation.hold(70)
        assert 70 == budget.taken
    assert 0 == budget.taken


def test_beyond_the_bound_whoever_comes_is_refused_and_keeps_what_it_has() -> None:
    budget = ByteBudget(100)
    budget.take(50)
    reservation = budget.reserve()
    reservation.hold(50)

    with pytest.raises(UnavailableError, match="requests of 50 bytes in flight, of at most 100, and this one has 51"):
        reservation.hold(51)
    with pytest.raises(UnavailableError):
        budget.take(1)

    assert 100 == budget.taken
    budget.give_back(50)
    reservation.hold(51)


def test_what_must_be_held_counts_and_is_never_refused() -> None:
    budget = ByteBudget(100)
    budget.take(60)
    budget.add(60)

    assert 120 == budget.taken
    with pytest.raises(UnavailableError):
        budget.take(1)
    budget.give_back(60)
    budget.take(40)


def test_one_that_is_larger_than_the_room_is_taken_when_it_is_alone() -> None:
    budget = ByteBudget(100)
    reservation = budget.reserve()
    for size in (60, 120, 180):
        reservation.hold(size)

    with pytest.raises(UnavailableError):
        budget.take(1)

    reservation.leave()
    budget.take(200)


def test_large_ones_leave_room_for_small_ones() -> None:
    """Bodies are counted when they are announced: else a few that never come would keep out the steps of sequences."""
    budget = ByteBudget(80 * SMALL_BYTES)
    announced = [budget.reserve() for _ in range(45)]
    for reservation in announced[:35]:
        reservation.hold(2 * SMALL_BYTES)

    with pytest.raises(UnavailableError, match="of at most 1146880, and this one has 16385"):
        budget.take(SMALL_BYTES + 1)
    for reservation in announced[35:45]:
        reservation.hold(SMALL_BYTES)
    with pytest.raises(UnavailableError, match="of at most 1310720, and this one has 1"):
        budget.take(1)


def test_a_client_with_many_requests_leaves_room_to_others() -> None:
    budget = ByteBudget(640 * SMALL_BYTES)

    def takes_all(client: str, size: int) -> str:
        while True:
            try:
                budget.take(size, client)
            except UnavailableError as refusal:
                return refusal.message

    assert "this client has requests of 8011776 bytes in flight, of at most 8028160, " in takes_all("greedy", 49152)
    budget.take(4 * 49152, "other")
    budget.give_back(4 * 49152, "other")
    assert "this client has requests of 10321920 bytes " in takes_all("greedy", SMALL_BYTES)
    assert "this client has requests of 147456 bytes " in takes_all("other", SMALL_BYTES)


def test_the_only_request_of_a_client_may_be_larger_than_its_part() -> None:
    budget = ByteBudget(640 * SMALL_BYTES)
    budget.take(100, "other")
    budget.take(520 * SMALL_BYTES, "client")

    with pytest.raises(UnavailableError, match="this client has"):
        budget.take(2 * SMALL_BYTES, "client")
    budget.take(2 * SMALL_BYTES, "other")


@pytest.mark.parametrize("seed", range(20))
def test_nobody_gets_more_than_there_is(seed: int) -> None:
    chance = random.Random(seed)
    budget, places = ByteBudget(100), dict[Reservation, int]()
    for _ in range(500):
        reservation = chance.choice([*places, budget.reserve()])
        size = chance.randrange(1, 60)
        try:
            reservation.hold(size)
            places[reservation] = max(size, places.get(reservation, 0))
        except UnavailableError:
            assert size - places.get(reservation, 0) + sum(places.values()) > 100
        if places and chance.random() < 0.3:
            gone = chance.choice([*places])
            gone.leave()
            del places[gone]

        assert sum(places.values()) == budget.taken <= 100
