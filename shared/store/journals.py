"""The journal of a sequence: what was asked and what was answered in each step since START.

A model keeps journals if its configuration says so (parameter `journal_steps`). `commit` writes a step into the journal
when it makes the step final, so a journal says nothing that the record does not say. It is always a beginning of the
run: it has every step from START to its last one. It stays as long as the record, with the tombstone.

The fields of the hash `journal:<sequence>`: docs/reference/keys.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shared.contract.errors import NotDoneError
from shared.contract.messages import InferMessage, ReplyMessage, decode_infer, read_reply
from shared.contract.record import BIRTH, START
from shared.store.reading import FAILURES, text_of

RUN, LAST, SIZE, ENDED = "run", "n", "b", "e"
REQUEST, REPLY = "i:", "o:"


class JournaledStep(msgspec.Struct, frozen=True):
    """A step that the model ran. has_end: the request had END"""

    request: InferMessage
    reply: ReplyMessage
    has_end: bool = False


class Journal(msgspec.Struct, frozen=True):
    """What can be run again of a sequence.

    model, version  on which it ran
    steps           all from START on that the journal holds
    answered        steps since START that are answered; more than `steps` where the journal was too small
    """

    model: str
    version: str
    steps: list[JournaledStep]
    answered: int


def journal_of(journal: Mapping[bytes, bytes], record: Mapping[bytes, bytes]) -> dict[str, bytes]:
    """The fields of a journal without `run`; none if it is that of a run before the record's present one."""
    run = b"%b.%b" % (record.get(BIRTH.encode(), b""), record.get(START.encode(), b""))
    if journal.get(RUN.encode()) != run:
        return {}
    return {text_of(name): value for name, value in journal.items() if name != RUN.encode()}


def read_journal(fields: Mapping[str, bytes], start: int) -> list[JournaledStep]:
    """The steps of a journal's fields (without `run`), the first one of which has this number.

    Raises NotDoneError if they are no journal of such a run.
    """
    if not fields:
        return []
    try:
        last, size = int(fields[LAST]), int(fields[SIZE])
        numbers, names = range(start, last + 1), fields.keys() - {LAST, SIZE, ENDED}
        # The numbers are counted first: they may be any.
        if len(names) != 2 * len(numbers) or names != {f"{kind}{n}" for n in numbers for kind in (REQUEST, REPLY)}:
            raise NotDoneError("its journal has other steps than it says")
        steps = [
            JournaledStep(
                decode_infer(fields[f"{REQUEST}{n}"]),
                read_reply(fields[f"{REPLY}{n}"]),
                has_end=n == last and ENDED in fields,
            )
            for n in numbers
        ]
    except FAILURES as error:
        raise NotDoneError(f"its journal cannot be read: {error}") from error
    if size != sum(len(fields[f"{kind}{n}"]) for n in numbers for kind in (REQUEST, REPLY)):
        raise NotDoneError("its journal has other bytes than it says")
    return steps
