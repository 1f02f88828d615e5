"""What the core does when an executor serves a model anew, or no more: who keeps a slot, who is taken, who refused."""

from __future__ import annotations

import msgspec
import pytest

from scheduler.core import invariants
from scheduler.core.actions import Action, Forget, Publish, Reclaim, Reject
from scheduler.core.backlog import Entry
from scheduler.core.decide import decide, reclaimed_together
from scheduler.core.events import (
    Assigned,
    ContendersFound,
    Event,
    ExecutorLost,
    ExecutorSeen,
    ForecastAsked,
    IdleSeen,
    Reclaimed,
    SequenceFound,
    SequenceWaits,
    Tick,
    VersionsWithdrawn,
)
from scheduler.core.slots import OfferedVersion, SlotAddress
from scheduler.core.state import LeaderState
from scheduler.ingest import Poll
from shared.contract.ids import Epoch, ExecutorId, InstanceIndex, SequenceId, ShardId, SlotIndex
from shared.contract.messages import ExecutorRegistration, RepositoryEntry, ServedModel
from shared.store.membership import Member
from tests.scheduler.state_view import view

E1 = ExecutorId("e1")
V1, V2 = OfferedVersion("1", 1, 2), OfferedVersion("2", 1, 2)


def name(text: str) -> SequenceId:
    return SequenceId(f"m:{text}")


def entry(number: int) -> Entry:
    return Entry(100 + number, 0, ShardId(0))


def live(state: LeaderState, text: str, epoch: int, version: str = "1") -> None:
    """A sequence that was placed, as Redis has confirmed."""
    take(state, SequenceWaits(name(text), version, entry(epoch)))
    take(state, Assigned(name(text), entry(epoch), Epoch(epoch)))


def take(state: LeaderState, event: Event) -> list[Action]:
    actions = decide(state, event)
    invariants.check(state)
    return actions


def holders(state: LeaderState) -> list[SequenceId]:
    return [sequence for sequence, _, _ in view(state).live]


@pytest.mark.parametrize("slots", [1, 0])
def test_fewer_slots_move_those_that_have_none_now(slots: int) -> None:
    state = LeaderState()
    take(state, ExecutorSeen(E1, (V1,)))
    live(state, "old", 5)
    live(state, "new", 6)

    actions = take(state, ExecutorSeen(E1, (OfferedVersion("1", 1, slots),)))

    assert [Reclaim(E1)] == actions
    assert [] == holders(state)


def test_a_version_that_goes_takes_only_its_own_sequences() -> None:
    state = LeaderState()
    take(state, ExecutorSeen(E1, (V1, V2)))
    live(state, "a", 5, "1")
    live(state, "b", 6, "2")

    assert [Reclaim(E1, only=("1",))] == take(state, ExecutorSeen(E1, (V2,)))
    assert [name("b")] == holders(state)


def test_a_new_leader_takes_what_an_unloaded_version_has_left() -> None:
    state = LeaderState()
    take(state, ExecutorSeen(E1, (V1,)))
    gone = SlotAddress(E1, "9", InstanceIndex(0), SlotIndex(0))

    assert [Reclaim(E1, only=("9",))] == take(state, SequenceFound(name("left"), gone, Epoch(7)))
    assert [] == holders(state)


def test_a_new_leader_takes_what_a_version_has_left_that_keeps_no_sequences_any_more() -> None:
    state = LeaderState()
    take(state, ExecutorSeen(E1, (OfferedVersion("1", 1, 0),)))
    gone = SlotAddress(E1, "1", InstanceIndex(0), SlotIndex(0))

    assert [Reclaim(E1, only=(name("left"),))] == take(state, SequenceFound(name("left"), gone, Epoch(7)))


def test_a_new_leader_takes_only_those_that_cannot_have_the_slots_of_their_records() -> None:
    state = LeaderState()
    take(state, ExecutorSeen(E1, (V1,)))
    place, missing = (SlotAddress(E1, "1", InstanceIndex(0), SlotIndex(slot)) for slot in (0, 99))

    found = take(state, SequenceFound(name("sound"), place, Epoch(1)))
    found += take(state, SequenceFound(name("nowhere"), missing, Epoch(2)))
    found += take(state, ContendersFound(E1, (name("one"), name("other"))))

    assert [Reclaim(E1, only=(name("nowhere"), name("one"), name("other")))] == reclaimed_together(found)
    assert [name("sound")] == holders(state)


def test_of_an_executor_everything_is_taken_if_that_is_wanted_once() -> None:
    wanted = [Reclaim(E1, only=("1",)), Forget(E1), Reclaim(E1), Reclaim(E1, only=("2",)), Forget(E1)]
    assert [Reclaim(E1), Forget(E1)] == reclaimed_together(wanted)


def test_who_waits_for_an_unloaded_version_is_refused_new_moving_or_returning() -> None:
    state = LeaderState()
    take(state, SequenceWaits(name("new"), "1", entry(1)))
    take(state, SequenceWaits(name("moving"), "1", entry(2), moving=True))
    take(state, SequenceWaits(name("returning"), "1", entry(3), returning=True))
    take(state, SequenceWaits(name("other"), "2", entry(4)))

    actions = take(state, VersionsWithdrawn("m", ("1",)))

    message = "Request for unknown model: 'm' version 1 is not at ready state"
    assert {name("new"), name("moving"), name("returning")} == {a.sequence for a in actions if isinstance(a, Reject)}
    assert {message} == {a.message for a in actions if isinstance(a, Reject)}
    assert [name("other")] == [sequence for _, sequence, _ in view(state).waiting]
    assert [] == take(state, VersionsWithdrawn("m", ("1",)))


def test_who_moves_is_refused_only_when_no_takeover_goes_on() -> None:
    """Until then steps of it may lie in the inbox of the executor that is lost."""
    state = LeaderState()
    take(state, ExecutorSeen(E1, (V2,)))
    take(state, SequenceWaits(name("new"), "1", entry(1)))
    take(state, SequenceWaits(name("moving"), "1", entry(2), moving=True))
    take(state, ExecutorLost(E1))
    withdrawn = VersionsWithdrawn("m", ("1",))

    during = [action.sequence for action in take(state, withdrawn) if isinstance(action, Reject)]
    take(state, Reclaimed(E1, is_all=True))
    after = [action.sequence for action in take(state, withdrawn) if isinstance(action, Reject)]

    assert ([name("new")], [name("moving")]) == (during, after)


def test_nothing_is_kept_of_versions_that_are_gone_unless_somebody_waits_for_them() -> None:
    state = LeaderState()
    for number in range(1, 21):
        take(state, ExecutorSeen(E1, (OfferedVersion(str(number), 1, 2),)))
        live(state, f"of {number}", number, str(number))
    take(state, SequenceWaits(name("waits"), "7", entry(30)))
    take(state, ForecastAsked(name("waits"), entry(31)))

    take(state, Tick(1000))

    of_versions = state.rings, state.backlogs, state.holders, state.freed, state.used
    assert [{"7", "20"}] * len(of_versions) == [set(known) for known in of_versions]
    (told,) = [one for one in take(state, IdleSeen(())) if isinstance(one, Publish)]
    assert ["20", "7"] == [line.version for line in told.lines]
    take(state, VersionsWithdrawn("m", ("7",)))
    take(state, Tick(2000))
    assert [{"20"}] * len(of_versions) == [set(known) for known in of_versions]


UNLOADED = RepositoryEntry("m", "1", "UNAVAILABLE", "unloaded")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([[UNLOADED]], ("1",)),
        ([[RepositoryEntry("m", "", "UNAVAILABLE", "unloaded")]], ("1", "2")),
        ([[UNLOADED], [RepositoryEntry("m", "1", "READY")]], ()),
        ([[UNLOADED], [RepositoryEntry("m", "1", "UNLOADING")]], ()),
        ([[UNLOADED], [RepositoryEntry("m", "", "LOADING")]], ()),
        ([[UNLOADED], [RepositoryEntry("m")]], ("1",)),
        ([[RepositoryEntry("m", "1", "UNAVAILABLE", "Internal: broken")]], ()),
        ([[RepositoryEntry("other", "1", "UNAVAILABLE", "unloaded")]], ()),
        ([], ()),
    ],
)
def test_a_version_is_withdrawn_when_it_was_unloaded_and_nobody_serves_or_loads_it(
    lines: list[list[RepositoryEntry]], expected: tuple[str, ...]
) -> None:
    members = [Member(registration(str(number), *each), alive=True) for number, each in enumerate(lines)]

    assert expected == Poll(members).withdrawn("m", ["1", "2"])
    serves = msgspec.structs.replace(
        registration("x"), models=(ServedModel("m", "1", 1, 1), ServedModel("m", "2", 1, 1))
    )
    assert () == Poll([*members, Member(serves, alive=True)]).withdrawn("m", ["1", "2"])
    assert expected == Poll([*members, Member(serves, alive=False)]).withdrawn("m", ["1", "2"])


def registration(executor: str, *lines: RepositoryEntry) -> ExecutorRegistration:
    return ExecutorRegistration(ExecutorId(executor), executor, "host", 1, 1, repository=lines)
