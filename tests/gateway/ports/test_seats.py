"""Who gets a connection when there are more clients than seats."""

from __future__ import annotations

import pytest

from gateway.ports.seats import SETTLED_S, Seat, Share, client_of

PATIENCE_S = 30.0
LATER = 2 * SETTLED_S


def taken(share: Share, client: str = "a", now: float = 0.0) -> Seat | None:
    """A new connection's seat, which it leaves when it has to make room."""
    return share.take(client, now, PATIENCE_S)


def test_the_connection_that_has_waited_for_longest_makes_room() -> None:
    share = Share(3, 3)
    gone: list[str] = []
    seats: list[Seat] = []
    for name, client in (("first", "a"), ("second", "b"), ("third", "c")):
        seat = taken(share, client)
        assert seat is not None
        seat.end = lambda name=name: gone.append(name)
        seats.append(seat)
    seats[0].work()
    seats[1].work()
    seats[1].wait(0.5, PATIENCE_S)

    assert taken(share, "d", LATER) is not None
    assert ["third"] == gone
    assert taken(share, "d", LATER) is not None
    assert ["third", "second"] == gone
    assert (3, 0) == (share.taken, share.refused)


def test_connections_with_a_request_and_new_ones_stay() -> None:
    share = Share(2, 2)
    working = taken(share)
    assert working is not None
    working.work()
    assert taken(share, "b", LATER) is not None

    assert taken(share, "c", LATER) is None
    assert (2, 1) == (share.taken, share.refused)

    working.leave()
    working.leave()
    assert taken(share, "c", LATER) is not None


def test_a_client_makes_room_for_itself_alone() -> None:
    share = Share(10, 2)
    others = taken(share, "a")
    assert others is not None
    others.end = lambda: pytest.fail("another client's connection was closed")
    own = [taken(share, "b", 0.1), taken(share, "b", 0.2)]

    assert taken(share, "b", LATER) is not None
    assert 3 == share.taken
    for seat in own:
        assert seat is not None
        seat.work()
    assert taken(share, "b", 2 * LATER) is not None
    assert taken(share, "b", 2 * LATER) is None


def test_of_the_client_that_has_most_idle_connections_some_are_ended_for_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.ports.seats.FEW", 1)
    share = Share(20, 20)
    gone: list[str] = []
    for client, count in (("a", 2), ("b", 5), ("c", 3)):
        for number in range(count):
            seat = taken(share, client, LATER)
            assert seat is not None
            seat.end = lambda name=f"{client}{number}": gone.append(name)
            if client == "a":
                seat.work()

    assert 0 == share.relieve_memory(LATER + SETTLED_S / 2, 100)
    assert [1, 3, 2, 0] == [share.relieve_memory(2 * LATER, count) for count in (1, 100, 100, 100)]
    assert ["b0", "b1", "b2", "b3", "c0", "c1"] == gone
    assert 4 == share.taken


def test_a_connection_that_made_room_is_counted_no_more() -> None:
    share = Share(1, 1)
    first = taken(share)
    second = taken(share, now=LATER)
    assert first is not None
    assert second is not None
    first.wait(LATER, PATIENCE_S)
    first.work()
    first.leave()

    assert [second] == list(share.waiting)
    assert 1 == share.taken


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_an_ipv6_client_has_a_whole_network(host: str, client: str) -> None:
    assert client == client_of(host)
