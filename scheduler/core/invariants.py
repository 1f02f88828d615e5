"""What must be true of a `LeaderState` between two events. Tests check it always, a scheduler if a setting says so."""

from __future__ import annotations

from collections import Counter

from scheduler.core.slots import SlotAddress, SlotTable
from scheduler.core.state import CONFIRMED, IN_LINE, WITH_SLOT, ExecutorPhase, LeaderState, SequencePhase
from shared.contract.ids import SequenceId


class BrokenInvariantError(AssertionError):
    """The state contradicts itself."""


def check(state: LeaderState) -> None:
    """Raises BrokenInvariantError with the first contradiction found."""
    check_slots(state)
    check_sequences(state)
    check_backlogs(state)
    check_slot_holders(state)
    check_executors(state)


def demand(claim: object, complaint: str) -> None:
    if not claim:
        raise BrokenInvariantError(complaint)


def check_slots(state: LeaderState) -> None:
    """A sequence holds at most one slot, and every taken slot is the place of the sequence that holds it."""
    holders: dict[SequenceId, SlotAddress] = {}
    for version, ring in state.rings.items():
        for executor, table in ring.tables.items():
            demand((executor, version) == (table.executor, table.served.version), f"{executor}: table of another")
            check_table(table)
            for place, sequence in table.holders():
                demand(sequence not in holders, f"'{sequence}' holds {holders.get(sequence)} and {place}")
                holders[sequence] = place
    placed = {s.sequence: s.place for s in state.sequences.values() if s.place is not None}
    demand(placed == holders, f"sequences believe {placed}, slots say {holders}")


def check_table(table: SlotTable) -> None:
    """Every slot is free, spare, taken or withheld, and only one of these. The load is the number of the last two."""
    for index, instance in enumerate(table.instances):
        everything = sorted([*instance.free(), *instance.spare, *instance.taken, *instance.withheld])
        demand(everything == list(range(instance.size)), f"{table.executor} instance {index}: slots {everything}")
    held = sum(len(instance.taken) + len(instance.withheld) for instance in table.instances)
    demand(table.load == held, f"{table.executor}: load {table.load}, but {held} slots are held")


def check_sequences(state: LeaderState) -> None:
    """A sequence holds a slot or is in the backlog, never both. Exactly a confirmed sequence has an epoch."""
    for sequence in state.sequences.values():
        name = f"'{sequence.sequence}' ({sequence.phase})"
        in_line = sequence.phase in IN_LINE
        demand(sequence.phase is not SequencePhase.ABSENT, f"{name} is still there")
        demand(in_line == (sequence.place is None), f"{name} has place {sequence.place}")
        demand(in_line == (sequence.sequence in state.backlogs[sequence.version]), f"{name} and the backlog disagree")
        demand((sequence.epoch != 0) == (sequence.phase in CONFIRMED), f"{name} has epoch {sequence.epoch}")
        demand(not in_line or sequence.entry is not None, f"{name} has no place in the starts stream")


def check_backlogs(state: LeaderState) -> None:
    """No sequence waits while a slot is free, unless spare slots are recalled for it. Every one that waits is known."""
    for version, backlog in state.backlogs.items():
        for waiting in backlog.in_order():
            demand(waiting.sequence in state.sequences, f"'{waiting.sequence}' waits, and nobody knows it")
        is_recalled = any(state.executors[executor].recalls for executor in state.ring(version).tables)
        is_idle = state.ring(version).has_free_slot() and not is_recalled
        demand(not len(backlog) or not is_idle, f"version {version}: a free slot is idle")


def check_slot_holders(state: LeaderState) -> None:
    """Of a version exactly the LIVE sequences can be asked for their slots, `asked` is the number of YIELDING ones, and
    `by_tenant` counts all that have a slot."""
    for version, holders in state.holders.items():
        phases = [s.phase for s in state.sequences.values() if s.version == version]
        live = [s.sequence for s in state.sequences.values() if s.version == version and s.phase is SequencePhase.LIVE]
        demand(len(live) == len(holders), f"version {version}: {len(holders)} can be asked, {len(live)} are live")
        demand(all(sequence in holders for sequence in live), f"version {version}: somebody live cannot be asked")
        asked = phases.count(SequencePhase.YIELDING)
        demand(asked == holders.asked, f"version {version}: {asked} are yielding, {holders.asked} were asked")
        slots = Counter(s.tenant for s in state.sequences.values() if s.version == version and s.phase in WITH_SLOT)
        demand(slots == holders.by_tenant, f"version {version}: tenants hold {slots}, not {holders.by_tenant}")


def check_executors(state: LeaderState) -> None:
    """Only serving executors have slot tables, and they are those of the versions that they offer."""
    for ring in state.rings.values():
        for executor in ring.tables:
            known = state.executors.get(executor)
            demand(known is not None and known.phase is ExecutorPhase.SERVING, f"{executor} has slots")
    for executor in state.executors.values():
        offered = sorted(served for served in executor.versions if served.slots > 0)
        demand(offered == [table.served for table in state.tables(executor.executor)], f"{executor.executor} offers")
