"""Moves sequences between living executors: to even out their load, or because an operator wishes it.

Both kinds of moves go the same way. `MoveOut` takes a sequence out of its slot if, in Redis, the sequence is between
two steps and its state is checkpointed; `MovedOut` says whether that was so. A sequence that was taken comes back
through the starts stream as a moving one, like a sequence of a lost executor, and gets a slot by the same rules. A
sequence that was not taken (it had an open step, or only its executor has its state) is tried again later, less and
less often.

Load is even when no executor is above its share (`Ring.share`). Placement keeps to the same share, so a sequence that
is moved away from an executor does not come back to it. Only the sequences above the share are moved, and only as many
as other executors have free slots for below it. Sequences that prefer another executor by the ring go first: when an
executor has just joined, these are the ones that it would have been given.
"""

from __future__ import annotations

from itertools import islice

from scheduler.core.actions import Action, Dismiss, MoveOut
from scheduler.core.backlog import Entry
from scheduler.core.placement import Ring
from scheduler.core.slots import SlotTable
from scheduler.core.state import NO_EPOCH, LeaderState, Sequence, SequencePhase, Wish
from shared.contract.ids import ExecutorId, SequenceId

UNEVEN_MS = 1000
"""Load must have been uneven for this long before a sequence is moved: ends and starts often even it out."""
MOVES_MAX = 64
"""Sequences of a version that may be underway at once: moving sequences get slots before all others, which wait."""
LOOKED_AT_MAX = 16 * MOVES_MAX
"""Sequences of an executor among which those to be moved are chosen: it may hold hundreds of thousands, and the leases
of all models wait meanwhile."""
UNDERWAY_MS = 5000
"""A sequence that was moved out and has not come back after this was ended on its way, for instance by its client."""
ASK_AGAIN_MS, ASK_AGAIN_MAX_MS = 100, 10_000
"""First and longest pause before a sequence that could not be taken is tried again; doubled after each attempt."""
WISH_MS = 30_000
"""How long a wish is pursued. A sequence that is never between two steps in that time stays where it is."""
WISHES_MAX = 1024
"""Wishes that are pursued at once; a wish beyond it is dismissed."""


def time_passed(state: LeaderState, cause: str) -> list[Action]:
    """The moves to be tried now, for wishes and for uneven load."""
    forget_lost(state)
    wished = [action for sequence in list(state.wishes) for action in pursue(state, sequence, cause)]
    return wished + level(state, cause)


def forget_lost(state: LeaderState) -> None:
    """Drops sequences from `underway` that were moved out so long ago that they will not come back."""
    for sequence, (_, since_ms) in list(state.underway.items()):
        if state.now_ms - since_ms >= UNDERWAY_MS:
            del state.underway[sequence]


# -- uneven load -----------------------------------------------------------------------------------------------------


def level(state: LeaderState, cause: str) -> list[Action]:
    """Takes sequences from executors above their share, as many as the executors below it have free slots for.

    Sequences that are underway count as arrived.
    """
    actions: list[Action] = []
    for version, ring in sorted(state.rings.items()):
        underway = sum(of_version == version for of_version, _ in state.underway.values())
        loads = ring.loads()
        share = ring.share(sum(loads.values()) + underway)
        surplus = {executor: load - share for executor, load in sorted(loads.items()) if load > share}
        if not surplus:
            state.uneven_since_ms.pop(version, None)
        elif state.now_ms - state.uneven_since_ms.setdefault(version, state.now_ms) >= UNEVEN_MS:
            room = sum(max(0, min(share, ring.tables[executor].size) - load) for executor, load in loads.items())
            count = min(room, MOVES_MAX) - underway
            if count > 0:
                actions += [move_out(sequence, cause) for sequence in chosen(state, ring, surplus)[:count]]
    return actions


def chosen(state: LeaderState, ring: Ring, surplus: dict[ExecutorId, int]) -> list[Sequence]:
    """The sequences to be taken: from each executor as many as its surplus."""
    taken: list[Sequence] = []
    for executor, count in surplus.items():
        held = map(state.sequences.__getitem__, ring.tables[executor].sequences())
        ready = (
            sequence
            for sequence in held
            if sequence.phase is SequencePhase.LIVE and state.now_ms >= sequence.ask_after_ms
        )
        looked_at = islice(ready, LOOKED_AT_MAX)
        taken += sorted(looked_at, key=lambda sequence: ring.prefers(sequence.sequence) == executor)[:count]
    return taken


def move_out(sequence: Sequence, cause: str) -> MoveOut:
    assert sequence.place is not None
    return MoveOut(sequence.sequence, sequence.epoch, sequence.place.executor, cause)


def stayed(state: LeaderState, sequence: Sequence) -> None:
    """A sequence could not be taken: notes when to try again."""
    sequence.ask_after_ms = state.now_ms + min(ASK_AGAIN_MAX_MS, ASK_AGAIN_MS << min(sequence.times_stayed, 16))
    sequence.times_stayed += 1


# -- wishes ----------------------------------------------------------------------------------------------------------


def wish(state: LeaderState, sequence: SequenceId, to: ExecutorId | None, entry: Entry, cause: str) -> list[Action]:
    """Takes in an operator's wish. It replaces an earlier wish for the same sequence."""
    earlier = state.wishes.pop(sequence, None)
    actions: list[Action] = [Dismiss(sequence, earlier.entry, cause)] if earlier and earlier.entry != entry else []
    if len(state.wishes) >= WISHES_MAX:
        return [*actions, Dismiss(sequence, entry, cause)]
    state.wishes[sequence] = Wish(entry, to, state.now_ms + WISH_MS)
    return actions + pursue(state, sequence, cause)


def pursue(state: LeaderState, sequence: SequenceId, cause: str) -> list[Action]:
    """One attempt at a wish: takes the sequence out of its slot if there is another slot for it.

    Dismisses a wish that took too long, or whose sequence is already on the wished executor.
    """
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
    """One attempt at a wish for a sequence that holds no slot.

    Such a sequence is paged or over; only Redis knows which. If the wish names an executor, the sequence is to be paged
    in there. If it names none, the wish is dismissed: the sequence gets a slot with its next step anyway.
    """
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
    """Removes a wish that was fulfilled or cannot be."""
    state.underway.pop(sequence, None)
    wished = state.wishes.pop(sequence, None)
    return [Dismiss(sequence, wished.entry, cause)] if wished is not None else []


def target(state: LeaderState, sequence: Sequence, wished: Wish, *, avoid: ExecutorId | None) -> SlotTable | None:
    """The slots that fulfil a wish: those of the executor that it names, or else of any but `avoid`. None if full."""
    ring = state.ring(sequence.version)
    if wished.to is None:
        found = ring.choose(sequence.sequence, avoid=avoid) if ring.has_free_slot() else None
        return found if found is not None and found.executor != avoid else None
    table = ring.tables.get(wished.to)
    return table if table is not None and not table.full else None


def placement(state: LeaderState, sequence: Sequence) -> SlotTable:
    """The table from which a waiting sequence gets its slot. There must be a free one.

    A wish that has moved the sequence out decides, if its target has a free slot.
    """
    wished = state.wishes.get(sequence.sequence)
    if wished is not None and wished.left is not None:
        table = target(state, sequence, wished, avoid=wished.left)
        if table is not None:
            return table
    return state.ring(sequence.version).choose(sequence.sequence)


def fulfilled(state: LeaderState, sequence: SequenceId, executor: ExecutorId) -> list[Action]:
    """A sequence has got a slot there: the wish that has moved it out is over, if that is where it was to go."""
    wished = state.wishes.get(sequence)
    if wished is None or wished.left is None:
        return []
    is_there = executor != wished.left if wished.to is None else executor == wished.to
    return dismissed(state, sequence, "wish") if is_there else []
