"""Sequences that change their executor though theirs lives: because load is uneven, or because an operator wishes it.

Both go the same way. `MoveOut` takes a sequence out of its slot if Redis finds it between two steps, and its state in
Redis; what became of that comes back as `MovedOut`. A sequence that was taken comes back through the starts stream,
moving, like one of a lost executor, and gets a slot by the same rules. One that was not (a step was in flight, or its
state is nowhere else) is asked again later, less and less often.

Load is even when nobody is above the share that placement itself keeps to (`Ring.share`), so nothing that is moved from
an executor comes back to it. What is moved is what lies above that share, and no more than there is room for below it:
the fewest that will do. Who prefers another executor by the ring goes first, because a newcomer is the one that they
would have been given to.
"""

from __future__ import annotations

from scheduler.core.actions import Action, Dismiss, MoveOut
from scheduler.core.backlog import Entry
from scheduler.core.placement import Ring
from scheduler.core.slots import SlotTable
from scheduler.core.state import NO_EPOCH, LeaderState, Sequence, SequencePhase, Wish
from shared.contract.ids import ExecutorId, SequenceId

UNEVEN_MS = 1000
"""Load must have been uneven for so long before anything is moved: ends and starts often make up for it."""
MOVES_MAX = 64
"""Sequences of a version that may be on their way at once: others' steps wait behind them for a moment."""
UNDERWAY_MS = 5000
"""A sequence that was moved out and has not come back by then was ended by somebody else on its way."""
ASK_AGAIN_MS, ASK_AGAIN_MAX_MS = 100, 10_000
"""After so long a sequence that could not be taken is asked for again; twice as long after each time."""
WISH_MS = 30_000
"""How long a wish is pursued: a sequence that is never between two steps stays where it is."""
WISHES_MAX = 1024
"""Wishes that are pursued at once; beyond it they are dismissed."""


def time_passed(state: LeaderState, cause: str) -> list[Action]:
    """What is to be taken out of its slot now."""
    forget_lost(state)
    wished = [action for sequence in list(state.wishes) for action in pursue(state, sequence, cause)]
    return wished + level(state, cause)


def forget_lost(state: LeaderState) -> None:
    """Sequences that were moved out so long ago that they will not come back."""
    for sequence, (_, since_ms) in list(state.underway.items()):
        if state.now_ms - since_ms >= UNDERWAY_MS:
            del state.underway[sequence]


# -- uneven load -----------------------------------------------------------------------------------------------------


def level(state: LeaderState, cause: str) -> list[Action]:
    """Takes from executors above their share what those below it have room for."""
    actions: list[Action] = []
    for version, ring in sorted(state.rings.items()):
        underway = sum(of_version == version for of_version, _ in state.underway.values())
        surplus = surplus_of(ring, underway)
        if not surplus:
            state.uneven_since_ms.pop(version, None)
        elif state.now_ms - state.uneven_since_ms.setdefault(version, state.now_ms) >= UNEVEN_MS:
            room = min(room_of(ring, underway), MOVES_MAX - underway)
            if room > 0:
                actions += [move_out(sequence, cause) for sequence in chosen(state, ring, surplus)[:room]]
    return actions


def surplus_of(ring: Ring, underway: int) -> dict[ExecutorId, int]:
    """By how many sequences executors are above their share, once those underway have arrived somewhere."""
    loads = ring.loads()
    share = ring.share(sum(loads.values()) + underway)
    return {executor: load - share for executor, load in sorted(loads.items()) if load > share}


def room_of(ring: Ring, underway: int) -> int:
    """How many sequences the executors below their share can take, beside those underway."""
    loads = ring.loads()
    share = ring.share(sum(loads.values()) + underway)
    free = sum(max(0, min(share, ring.tables[executor].size) - load) for executor, load in loads.items())
    return free - underway


def chosen(state: LeaderState, ring: Ring, surplus: dict[ExecutorId, int]) -> list[Sequence]:
    """Sequences to be taken: as many from each executor as it has too many."""
    taken: list[Sequence] = []
    for executor, count in surplus.items():
        held = [state.sequences[name] for _, name in ring.tables[executor].holders()]
        ready = [one for one in held if one.phase is SequencePhase.LIVE and state.now_ms >= one.ask_after_ms]
        ready.sort(key=lambda one: ring.prefers(one.sequence) == executor)
        taken += ready[:count]
    return taken


def move_out(sequence: Sequence, cause: str) -> MoveOut:
    """The action for a live sequence."""
    assert sequence.place is not None
    return MoveOut(sequence.sequence, sequence.epoch, sequence.place.executor, cause)


def kept(state: LeaderState, sequence: Sequence) -> None:
    """It could not be taken."""
    sequence.ask_after_ms = state.now_ms + min(ASK_AGAIN_MAX_MS, ASK_AGAIN_MS << min(sequence.times_kept, 16))
    sequence.times_kept += 1


# -- wishes ----------------------------------------------------------------------------------------------------------


def wish(state: LeaderState, sequence: SequenceId, to: ExecutorId | None, entry: Entry, cause: str) -> list[Action]:
    """An operator wants a sequence elsewhere. A later wish takes the place of an earlier one."""
    earlier = state.wishes.pop(sequence, None)
    actions: list[Action] = [Dismiss(sequence, earlier.entry, cause)] if earlier and earlier.entry != entry else []
    if len(state.wishes) >= WISHES_MAX:
        return [*actions, Dismiss(sequence, entry, cause)]
    state.wishes[sequence] = Wish(entry, to, state.now_ms + WISH_MS)
    return actions + pursue(state, sequence, cause)


def pursue(state: LeaderState, sequence: SequenceId, cause: str) -> list[Action]:
    """One attempt: take it out of its slot, if there is another for it; or give the wish up."""
    wished = state.wishes[sequence]
    if state.now_ms >= wished.until_ms:
        return dismissed(state, sequence, cause)
    if sequence in state.underway:
        return []
    known = state.sequences.get(sequence)
    if known is None:
        return page_in(state, sequence, wished, cause)
    if known.phase is not SequencePhase.LIVE or state.now_ms < known.ask_after_ms:
        return []
    assert known.place is not None
    if wished.to == known.place.executor:
        return dismissed(state, sequence, cause)
    if target(state, known, wished, avoid=known.place.executor) is None:
        return []
    wished.left = known.place.executor
    return [move_out(known, cause)]


def page_in(state: LeaderState, sequence: SequenceId, wished: Wish, cause: str) -> list[Action]:
    """Who holds no slot is paged, or over: Redis knows. It gets one on the executor that the wish names; without a name
    there is nothing to do before its next step."""
    rings = state.rings.values()
    tables = [table for ring in rings if wished.to and (table := ring.tables.get(wished.to)) is not None]
    if not tables:
        return dismissed(state, sequence, cause)
    if all(table.full for table in tables):
        return []
    wished.left = wished.to
    state.underway[sequence] = ("", state.now_ms)
    return [MoveOut(sequence, NO_EPOCH, None, cause)]


def dismissed(state: LeaderState, sequence: SequenceId, cause: str) -> list[Action]:
    """A wish that came true, or cannot."""
    state.underway.pop(sequence, None)
    wished = state.wishes.pop(sequence, None)
    return [Dismiss(sequence, wished.entry, cause)] if wished is not None else []


def target(state: LeaderState, sequence: Sequence, wished: Wish, *, avoid: ExecutorId | None) -> SlotTable | None:
    """Where a wish leads: the executor that it names, if that has room, or any other with room."""
    ring = state.ring(sequence.version)
    if wished.to is None:
        found = ring.choose(sequence.sequence, avoid=avoid)
        return found if found is not None and found.executor != avoid else None
    table = ring.tables.get(wished.to)
    return table if table is not None and not table.full else None


def placement(state: LeaderState, sequence: Sequence) -> tuple[SlotTable | None, list[Action]]:
    """The slots from which a sequence in line gets one, as it is wished if it is; and what that wish's end asks for."""
    wished = state.wishes.get(sequence.sequence)
    if wished is not None and wished.left is not None:
        table = target(state, sequence, wished, avoid=wished.left)
        if table is not None:
            del state.wishes[sequence.sequence]
            return table, [Dismiss(sequence.sequence, wished.entry, "wish")]
    return state.ring(sequence.version).choose(sequence.sequence), []
