"""A sequence outside of the mesh: a file that holds its state, its numbers, its last replies and its journal.

The file is a line with the format, the SHA-256 of what follows, and an `ExportedSequence` in msgpack. Only an operator
reads and writes such files: a state may be whatever a model's own method makes of it.
"""

from __future__ import annotations

import hashlib

import msgspec

from shared.contract.errors import NotDoneError
from shared.contract.ids import CorrelationId
from shared.contract.record import KEPT_REPLIES, MARK, OLDER_IDS, RECENT_IDS, REPLY, TENANT
from shared.contract.state_fields import checkpointed_states
from shared.store.journals import read_journal
from shared.store.reading import FAILURES

HEAD = b"seqmesh sequence, format 1\n"
DIGEST_BYTES = hashlib.sha256().digest_size
STEPS_MAX = 10**14
"""Steps have lower numbers: from here on the scripts of Redis would write them with an exponent."""
OF_STATE = frozenset((MARK, TENANT))
"""What belongs to the sequence under any id."""
REPLY_FIELDS = frozenset((KEPT_REPLIES, RECENT_IDS, OLDER_IDS))
"""What a retry of an answered step needs, beside the replies themselves."""


class ExportedSequence(msgspec.Struct, frozen=True):
    """A sequence between two steps, with all of its state.

    version      the version of the model that it ran on
    last_step    number of the last step in the record, and of its checkpoint; start_step: of the latest START
    record       other fields of its record, by their names in docs/reference/keys.md: `mk`, `tn`, and what retries need
    checkpoint   its checkpoint's fields, without `n`
    journal      its journal's fields, without `run`; empty if its model keeps none
    exported_ms  when, Redis' clock; release: of the program that wrote it
    """

    model: str
    version: str
    id: CorrelationId
    last_step: int
    start_step: int
    record: dict[str, bytes]
    checkpoint: dict[str, bytes]
    exported_ms: int
    release: str
    journal: dict[str, bytes] = {}

    @property
    def steps(self) -> int:
        """How many steps it has accepted since START: its client goes on with the next number."""
        return self.last_step - self.start_step + 1

    def without_replies(self) -> ExportedSequence:
        """The same for another id: its steps are other clients' than those who retry."""
        return msgspec.structs.replace(
            self, record={name: self.record[name] for name in self.record if name in OF_STATE}
        )


def is_portable(field: str) -> bool:
    """Whether a record's field goes with an exported sequence."""
    return field in OF_STATE or field in REPLY_FIELDS or field.startswith(REPLY)


def to_file(exported: ExportedSequence) -> bytes:
    body = msgspec.msgpack.encode(exported)
    return HEAD + hashlib.sha256(body).digest() + body


def from_file(data: bytes) -> ExportedSequence:
    """Raises NotDoneError for anything that `to_file` has not written, or that was changed since."""
    if not data.startswith(HEAD):
        raise NotDoneError("it is no exported sequence of this format")
    digest, body = data[len(HEAD) :][:DIGEST_BYTES], data[len(HEAD) + DIGEST_BYTES :]
    if hashlib.sha256(body).digest() != digest:
        raise NotDoneError("it is damaged: its checksum is another one")
    try:
        exported = msgspec.msgpack.decode(body, type=ExportedSequence)
    except msgspec.MsgspecError as error:
        raise NotDoneError(f"it cannot be read: {error}") from error
    check(exported)
    return exported


def check(exported: ExportedSequence) -> None:
    """Raises NotDoneError for a sequence that no record could be made of."""
    if not 1 <= exported.start_step <= exported.last_step < STEPS_MAX:
        raise NotDoneError("its step numbers are impossible")
    foreign = [name for name in exported.record if not is_portable(name)]
    if foreign or "n" in exported.checkpoint:
        raise NotDoneError(f"it has fields that do not belong into it: {', '.join(foreign) or 'n'}")
    if len(read_journal(exported.journal, exported.start_step)) > exported.steps:
        raise NotDoneError("its journal has more steps than the sequence")
    try:
        checkpointed_states({name.encode(): value for name, value in exported.checkpoint.items()})
    except FAILURES as error:
        raise NotDoneError(f"its state cannot be read: {error}") from error
