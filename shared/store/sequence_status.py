"""What is known of one sequence at one moment, and which sequences a list shows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shared.contract import record
from shared.contract.ids import CorrelationId, SequenceId, correlation_id_of, sequence_id
from shared.store.reading import text_of

STATES = {
    record.WAITING: "waiting",
    record.LIVE: "live",
    record.MOVING: "moving",
    record.PAGED: "paged",
    record.ENDED: "ended",
    record.EXPIRED: "expired",
    record.FAILED: "failed",
    record.LOST: "lost",
    record.CANCELLED: "cancelled",
}
"""The states of a record by their names (docs/reference/keys.md)."""
PAUSED = "paused"
"""What a sequence is called that moves nowhere, because an operator paused it."""
OPEN_STATES = ("waiting", "live", "moving", "paged", PAUSED)
"""States of sequences that are not over."""
IN_LINE = ("waiting", "moving")
"""States of sequences that wait for a slot."""
FIELDS_READ = (
    *(record.STATE, record.OWNER, record.INSTANCE, record.SLOT, record.EPOCH, record.VERSION, record.BIRTH),
    *(record.ACCEPTED, record.COMMITTED, record.CHECKPOINTED, record.START, record.CLOSED, record.DURABLE),
    *(record.LATEST, record.FIRST_EPOCH, record.WAIT_ENTRY, record.PAUSE, record.TENANT),
)


class SequenceStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the mesh holds of one sequence, at one moment. Steps count from the latest START, times are Redis' clock.

    requested_version  the version that the client names in its requests, "" if it names none
    version            the version that it runs on
    state              one of `STATES`, or `PAUSED`
    executor, instance, slot, epoch  of its owner; absent while it has none
    last_step          the last accepted step, as `sequence_step` counts
    open_steps         accepted steps that are not answered
    behind             answered steps since the last checkpoint: a takeover runs them again
    recoverable        whether a takeover finds the state
    closed             whether nothing but a START is accepted
    has_moved          whether it has changed its slot since it got the first one
    begun_ms, used_ms  when the sequence began, and when its last step was accepted; ms since 1970
    idle_left_ms       how much of its idle time is left; absent with open steps, in a pause, and when it is over
    paused_until_ms    end of the pause, ms since 1970; absent unless the sequence is paused
    tenant             whose it is, "" if nobody's in particular
    place              in the line of its version, from 1; absent unless it waits for a slot
    wait_ms            how long it will still wait, about; absent if nothing is known
    wait_low_ms, wait_high_ms  four of five such waits end between them; absent if nothing is known
    """

    model: str
    id: CorrelationId
    state: str
    version: str
    last_step: int
    open_steps: int
    behind: int
    recoverable: bool
    closed: bool
    begun_ms: int
    used_ms: int
    requested_version: str = ""
    executor: str = ""
    instance: int | None = None
    slot: int | None = None
    epoch: int | None = None
    idle_left_ms: int | None = None
    has_moved: bool = False
    paused_until_ms: int | None = None
    tenant: str = ""
    place: int | None = None
    wait_ms: int | None = None
    wait_low_ms: int | None = None
    wait_high_ms: int | None = None

    @property
    def sequence(self) -> SequenceId:
        """The name that the mesh gives the sequence."""
        return sequence_id(self.model, self.requested_version, self.id)


@dataclass(frozen=True, slots=True)
class SortKey:
    """What sequences are sorted by, and the fields of a record that tell it."""

    of: Callable[[SequenceStatus], Any]
    fields: tuple[str, ...]


SORT_KEYS: Mapping[str, SortKey] = {
    "id": SortKey(lambda one: (isinstance(one.id, str), one.id, one.requested_version), ()),
    "begun": SortKey(lambda one: one.begun_ms, (record.BIRTH,)),
    "used": SortKey(lambda one: one.used_ms, (record.LATEST,)),
    "steps": SortKey(lambda one: one.last_step, (record.ACCEPTED, record.START)),
    "open": SortKey(lambda one: one.open_steps, (record.ACCEPTED, record.COMMITTED)),
}
"""What a list may be sorted by."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which sequences a list shows.

    states    their states; empty: every one
    executor  the owner's name or id; "": any
    version   the version that they run on; "": any
    tenant    whose they are; "": anybody's
    prefix    the begin of the id, written as text
    sort      one of `SORT_KEYS`; with `-` before it the other way round
    """

    states: frozenset[str] = frozenset()
    executor: str = ""
    version: str = ""
    tenant: str = ""
    prefix: str = ""
    sort: str = "id"

    @property
    def fields(self) -> list[str]:
        """Of a record, what decides whether its sequence is shown, and where."""
        asked = {record.VERSION: self.version, record.TENANT: self.tenant, record.OWNER: self.executor}
        return [record.STATE, record.WAIT_ENTRY, record.PAUSE, *self._sort_key.fields, *filter(asked.get, asked)]

    @property
    def _sort_key(self) -> SortKey:
        return SORT_KEYS[self.sort.removeprefix("-")]

    def shows(self, one: SequenceStatus) -> bool:
        if one.state not in (self.states or OPEN_STATES) or (self.version and one.version != self.version):
            return False
        if self.tenant and one.tenant != self.tenant:
            return False
        # An executor's id is its name and a random part.
        return not self.executor or self.executor in (one.executor, one.executor.rpartition("-")[0])

    def sorted(self, found: Iterable[SequenceStatus]) -> list[SequenceStatus]:
        by_id = sorted(found, key=SORT_KEYS["id"].of)
        return sorted(by_id, key=self._sort_key.of, reverse=self.sort.startswith("-"))


def status_of(
    sequence: SequenceId, fields: Sequence[str], values: Sequence[bytes | None], *, idle_left_ms: int
) -> SequenceStatus | None:
    """The status of a sequence by these fields of its record; None if it has none. Raises one of `FAILURES` for a
    record that cannot be read.

    fields        of FIELDS_READ; what the others tell is left out
    idle_left_ms  what is left of the idle marker, -1 or less if there is none
    """
    found = dict.fromkeys(FIELDS_READ) | dict(zip(fields, values, strict=True))
    if (state := found[record.STATE]) is None:
        return None

    def count(field: str) -> int:
        return int(found[field] or 0)

    def text(field: str) -> str:
        return text_of(found[field] or b"")

    epochs = found[record.EPOCH], found[record.FIRST_EPOCH]
    accepted, committed = count(record.ACCEPTED), count(record.COMMITTED)
    is_live, is_paused = state == record.LIVE, found[record.WAIT_ENTRY] == record.NO_ENTRY
    model, requested, _ = sequence.split("|", 2)
    return SequenceStatus(
        model=model,
        id=correlation_id_of(sequence),
        state=PAUSED if is_paused else STATES[state],
        version=text(record.VERSION),
        last_step=max(0, accepted - count(record.START) + 1),
        open_steps=accepted - committed,
        behind=max(0, committed - count(record.CHECKPOINTED)),
        recoverable=found[record.DURABLE] == b"1",
        closed=found[record.CLOSED] == b"1",
        begun_ms=int((text(record.BIRTH) or "0").partition("-")[0]),
        used_ms=int((text(record.LATEST) or "0").split()[0]),
        requested_version=requested,
        executor=text(record.OWNER) if is_live else "",
        instance=count(record.INSTANCE) if is_live else None,
        slot=count(record.SLOT) if is_live else None,
        epoch=count(record.EPOCH) if is_live else None,
        idle_left_ms=idle_left_ms if idle_left_ms >= 0 and not is_paused else None,
        has_moved=None not in epochs and epochs[0] != epochs[1],
        paused_until_ms=int(text(record.PAUSE).split()[0]) if is_paused else None,
        tenant=text(record.TENANT),
    )
