"""When a connection is pinged, and when a client pings too often."""

from __future__ import annotations

from dataclasses import replace

from gateway.grpc.wire.pings import WITHOUT_CALLS_S, PingRules, Pings

RULES = PingRules(time_s=10, timeout_s=2, without_rpcs=False, without_data=2, client_pause_s=5, strikes_max=2)


def test_a_quiet_connection_is_pinged_and_a_dead_one_ends() -> None:
    pings = Pings(RULES, 0)

    assert not pings.is_due(9, has_rpcs=True)
    assert pings.is_due(10, has_rpcs=True)
    assert not pings.is_due(11, has_rpcs=True), "one ping at a time"
    assert not pings.is_dead(12)
    assert pings.is_dead(12.1)
    pings.heard(12.5)
    assert not pings.is_dead(30)
    assert pings.is_due(22.5, has_rpcs=True)


def test_pings_without_data_between_them_are_bounded() -> None:
    pings = Pings(RULES, 0)
    for now in (10, 20):
        assert pings.is_due(now, has_rpcs=True)
        pings.heard(now)

    assert not pings.is_due(30, has_rpcs=True)
    pings.wrote()
    assert pings.is_due(31, has_rpcs=True)
    unbounded = Pings(replace(RULES, without_data=0), 0)
    for now in range(10, 100, 10):
        assert unbounded.is_due(now, has_rpcs=True)
        unbounded.heard(now)


def test_a_connection_without_calls_is_pinged_where_that_is_allowed() -> None:
    assert not Pings(RULES, 0).is_due(100, has_rpcs=False)
    assert Pings(replace(RULES, without_rpcs=True), 0).is_due(100, has_rpcs=False)


def test_a_client_may_ping_too_early_a_few_times() -> None:
    pings = Pings(RULES, 0)

    assert [False, False, False, True] == [pings.are_too_many(now, has_rpcs=True) for now in (0, 1, 2, 3)]


def test_what_is_sent_to_a_client_allows_its_next_ping() -> None:
    pings = Pings(RULES, 0)
    for now in range(10):
        assert not pings.are_too_many(now, has_rpcs=True)
        pings.wrote()


def test_a_client_that_keeps_the_pause_may_ping_for_ever() -> None:
    pings = Pings(RULES, 0)

    assert not any(pings.are_too_many(now, has_rpcs=True) for now in range(0, 100, 5))


def test_without_calls_the_pause_is_long_unless_such_pings_are_allowed() -> None:
    refused, allowed = Pings(RULES, 0), Pings(replace(RULES, without_rpcs=True), 0)
    times = [0, 5, 10, 15]

    assert [False, False, False, True] == [refused.are_too_many(now, has_rpcs=False) for now in times]
    assert not any(allowed.are_too_many(now, has_rpcs=False) for now in times)
    assert not refused.are_too_many(15 + WITHOUT_CALLS_S, has_rpcs=False) or refused


def test_no_number_of_strikes_may_be_too_many() -> None:
    pings = Pings(replace(RULES, strikes_max=0), 0)

    assert not any(pings.are_too_many(0, has_rpcs=True) for _ in range(100))
