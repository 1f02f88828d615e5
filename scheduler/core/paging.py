"""Virtual slots: while sequences wait for a slot, idle sequences give up theirs.

Only Redis knows whether a sequence is idle. So the leader asks the holders of slots, in turn, at most as many at a time
as sequences wait. Redis pages an idle holder at once; a busy one keeps its slot. When all holders are busy, the leader
tells `commit` how many slots are wanted: a commit then pages its sequence if it has no further step. After that all
holders are asked once more, because some may have become idle before `commit` knew.

Every tick the leader begins to ask from the start. So no sequence waits longer than a tick beside one that could be
paged. Paged sequences with a new step come back into the same backlog, by age, so every sequence gets its turn.
"""

from __future__ import annotations

from scheduler.core.actions import Action, Vacate, WantSlots
from scheduler.core.state import LeaderState


def ask_for_slots(state: LeaderState, version: str, cause: str) -> list[Action]:
    """Asks holders for their slots, one for each waiting sequence; if none can be asked, lets commits free slots.

    Call it only when every table of the version is full.
    """
    backlog, holders = state.backlogs[version], state.holders[version]
    if not len(backlog) or not is_paged(state, version):
        return []
    actions: list[Action] = []
    while holders.asked < len(backlog) and (asked := holders.next_to_ask()) is not None:
        sequence = state.sequences[asked]
        assert sequence.place is not None
        state.move(sequence, "asked", cause)
        actions.append(Vacate(asked, sequence.place, sequence.epoch, cause))
    return actions if holders.asked else want_slots(state, version, cause)


def want_slots(state: LeaderState, version: str, cause: str) -> list[Action]:
    """All holders are busy: tells commits how many slots to free."""
    holders, count = state.holders[version], len(state.backlogs[version])
    # Commits still have at least half of what is wanted to free. Telling them only then saves a command per wait.
    if 2 * holders.wanted >= count:
        return []
    is_news, holders.wanted, holders.told = not holders.wanted, count, True
    actions: list[Action] = [WantSlots(version, count, cause)]
    if is_news:
        # A step that was committed before `commit` was told has left its sequence idle in its slot: ask all once more.
        holders.busy = 0
        actions += ask_for_slots(state, version, cause)
    return actions


def look_again(state: LeaderState, cause: str) -> list[Action]:
    """At a tick: asks the holders again, who may be idle by now, and renews what `commit` was told, which expires."""
    actions: list[Action] = []
    for version, holders in sorted(state.holders.items()):
        count = len(state.backlogs[version])
        holders.busy = 0
        if holders.told:
            holders.wanted, holders.told = count, count > 0
            actions.append(WantSlots(version, count, cause))
        if not state.ring(version).has_free_slot():
            actions += ask_for_slots(state, version, cause)
    return actions


def is_paged(state: LeaderState, version: str) -> bool:
    """Whether the version has virtual slots: its sequences give up their slots while others wait."""
    return any(table.served.pageable for table in state.ring(version).tables.values())
