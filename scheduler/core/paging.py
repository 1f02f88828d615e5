"""Virtual slots: while sequences wait, those that hold a slot and do nothing with it give it up.

Who does nothing only Redis knows. So holders are asked, one after the other and no more than wait: an idle one is paged
there and then, a busy one keeps its slot. When everybody is busy, `commit` is told how many slots are wanted, and pages
sequences as soon as their last step is done; then all are asked once more, for what became idle in between. Every tick
the asking begins anew. So nobody waits for longer than a tick beside a sequence that could be paged; and since paged
ones come back into the same line, by age, everybody gets a turn.
"""

from __future__ import annotations

from scheduler.core.actions import Action, Vacate, WantSlots
from scheduler.core.moves import move
from scheduler.core.state import LeaderState


def make_room(state: LeaderState, version: str, cause: str) -> list[Action]:
    """For those who wait beside full tables: asks for as many slots, or lets commits free them."""
    backlog, tenants = state.backlog(version), state.tenants(version)
    if not len(backlog) or not is_paged(state, version):
        return []
    actions: list[Action] = []
    while tenants.asked < len(backlog) and (asked := tenants.next_to_ask()) is not None:
        sequence = state.sequences[asked]
        assert sequence.place is not None
        move(state, sequence, "asked", cause)
        actions.append(Vacate(asked, sequence.place, sequence.epoch, cause))
    return actions if actions or tenants.asked else want_slots(state, version, cause)


def want_slots(state: LeaderState, version: str, cause: str) -> list[Action]:
    """Everybody is busy: who is done with a step gives its slot up."""
    tenants, count = state.tenants(version), len(state.backlog(version))
    if 2 * tenants.wanted >= count:
        return []
    is_news, tenants.wanted, tenants.told = not tenants.wanted, count, True
    actions: list[Action] = [WantSlots(version, count, cause)]
    if is_news:
        # Who was done before `commit` knew of it still holds its slot.
        tenants.busy = 0
        actions += make_room(state, version, cause)
    return actions


def look_again(state: LeaderState, cause: str) -> list[Action]:
    """Time has passed: everybody may be idle by now, and what `commit` was told is about to expire."""
    actions: list[Action] = []
    for version, tenants in sorted(state.holders.items()):
        count = len(state.backlog(version))
        tenants.busy = 0
        if tenants.told:
            tenants.wanted, tenants.told = count, count > 0
            actions.append(WantSlots(version, count, cause))
        if not state.ring(version).has_room():
            actions += make_room(state, version, cause)
    return actions


def is_paged(state: LeaderState, version: str) -> bool:
    """Whether sequences of the version give up their slots."""
    return any(table.served.pageable for table in state.ring(version).tables.values())
