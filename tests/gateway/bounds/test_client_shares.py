"""However much clients take of a bound, one that has nothing finds room, and all of them together keep within it."""

from __future__ import annotations

import random

import pytest

from gateway.bounds.client_shares import OTHERS_PART, SMALL_OTHERS_PART, ClientShares

ROOM = 100_000


def fill(shares: ClientShares, client: str, *, is_small: bool) -> int:
    """The client takes all that it can get. Returns how much that is."""
    size = max(0, shares.most(client, ROOM, is_small=is_small) - shares.of(client))
    shares.take(client, size)
    return size


@pytest.mark.parametrize(("is_small", "part"), [(False, OTHERS_PART), (True, SMALL_OTHERS_PART)])
def test_a_newcomer_finds_room_whoever_else_takes_all_it_can_get(part: int, *, is_small: bool) -> None:
    shares = ClientShares()
    for clients in range(1, 8):
        fill(shares, f"greedy {clients}", is_small=is_small)
        for _ in range(500):
            # As requests end, whoever has more than its part gets no more until it has less.
            for greedy in range(1, clients + 1):
                shares.take(f"greedy {greedy}", -shares.of(f"greedy {greedy}") // 50)
                fill(shares, f"greedy {greedy}", is_small=is_small)

        left = ROOM - shares.taken
        assert pytest.approx(ROOM / (1 + clients * (part - 1)), rel=0.1) == left
    assert fill(shares, "newcomer", is_small=is_small) > 0


def test_a_client_that_has_all_it_may_have_is_left_a_little_for_small_requests() -> None:
    shares = ClientShares()

    assert 87_500 == fill(shares, "greedy", is_small=False)
    assert 10_938 == fill(shares, "greedy", is_small=True)
    assert 0 == fill(shares, "greedy", is_small=True)
    assert 1367 + 171 == fill(shares, "other", is_small=False) + fill(shares, "other", is_small=True)
    assert 24 == fill(shares, "", is_small=False), "the gateway itself has all that is left"


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_kept_of_clients_that_have_given_all_back(seed: int) -> None:
    chance = random.Random(seed)
    shares, taken = ClientShares(), list[tuple[str, int]]()
    for _ in range(300):
        client, size = chance.choice("abc"), chance.randrange(3)
        shares.take(client, size)
        taken.append((client, size))
        if chance.random() < 0.4:
            client, size = taken.pop(chance.randrange(len(taken)))
            shares.take(client, -size)
        assert sum(size for _, size in taken) == shares.taken
    for client, size in taken:
        shares.take(client, -size)

    assert 0 == shares.taken
    assert not shares._of
