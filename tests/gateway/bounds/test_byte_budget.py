"""The gateway's room: what was taken is given back, and nobody gets more than there is, unless it is alone."""

from __future__ import annotations

import random

import pytest

from gateway.bounds.byte_budget import Place, Room
from shared.contract.errors import UnavailableError


def test_a_body_takes_what_it_needs_and_gives_all_of_it_back() -> None:
    room = Room(100)
    with room.place() as place:
        place.hold(60)
        place.hold(40)
        assert 60 == room.taken
        place.hold(70)
        assert 70 == room.taken
    assert 0 == room.taken


def test_beyond_the_bound_whoever_comes_is_refused_and_keeps_what_it_has() -> None:
    room = Room(100)
    room.take(50)
    place = room.place()
    place.hold(50)

    with pytest.raises(UnavailableError, match="requests of 50 bytes in flight, of at most 100, and this one has 51"):
        place.hold(51)
    with pytest.raises(UnavailableError):
        room.take(1)

    assert 100 == room.taken
    room.give_back(50)
    place.hold(51)


def test_one_that_is_larger_than_the_room_is_taken_when_it_is_alone() -> None:
    room = Room(100)
    place = room.place()
    for size in (60, 120, 180):
        place.hold(size)

    with pytest.raises(UnavailableError):
        room.take(1)

    place.leave()
    room.take(200)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_gets_more_than_there_is(seed: int) -> None:
    chance = random.Random(seed)
    room, places = Room(100), dict[Place, int]()
    for _ in range(500):
        place = chance.choice([*places, room.place()])
        size = chance.randrange(1, 60)
        try:
            place.hold(size)
            places[place] = max(size, places.get(place, 0))
        except UnavailableError:
            assert size - places.get(place, 0) + sum(places.values()) > 100
        if places and chance.random() < 0.3:
            gone = chance.choice([*places])
            gone.leave()
            del places[gone]

        assert sum(places.values()) == room.taken <= 100
