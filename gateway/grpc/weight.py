"""Estimates how much memory decoding a message takes, from its fields. Pure.

A field of two bytes may become an object of a hundred (measured: an empty input 44 bytes in the message and 92 as
Python's object, a parameter 20, a number in typed contents 8). Only raw contents and files of a model are carried as
they are, and take as many bytes as in the message.

Source: protobuf's encoding, https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Iterator

from shared.contract.errors import RequestError

FIELDS_MAX = 10_000
"""Inputs, outputs, contents and parameters of one message."""
PART_FIELDS_MAX = 30_000
"""Fields of all inputs and outputs of one message, above all their parameters. Nothing else runs while protobuf decodes
them: 3 ms, and 100 for three times as many."""
EXPANSION = 24
"""Decoded bytes per byte of the message. Tiny fields take more; their number is bounded by FIELDS_MAX."""
CARRIED = {"ModelInferRequest": 7, "RepositoryModelLoadRequest": 3}
"""Per message: the number of the field whose bytes are carried as they are, raw contents or files."""
PARTS = {"ModelInferRequest": frozenset({5, 6})}
"""Per message: the numbers of the fields that have fields of their own, inputs and outputs."""
VARINT, FIXED64, LENGTH, GROUP, GROUP_END, FIXED32 = 0, 1, 2, 3, 4, 5
LENGTHS = {FIXED64: 8, FIXED32: 4, GROUP: 0, GROUP_END: 0}
VARINT_BITS_MAX = 70


def decoding_bytes(raw: bytes, kind: str) -> int:
    """The memory that decoding a message takes at most, besides the bytes that are carried as they are.

    kind    the message's name
    raises  RequestError for a message with too many fields
    """
    carried, parts = CARRIED.get(kind, 0), PARTS.get(kind, frozenset())
    payload = part_fields = 0
    for count, (number, begin, end) in enumerate(fields_of(raw, 0, len(raw)), 1):
        if count > FIELDS_MAX:
            raise RequestError(f"a request may have {FIELDS_MAX} inputs, outputs, contents and parameters, not more")
        if number == carried:
            payload += end - begin
        elif number in parts:
            for _ in fields_of(raw, begin, end):
                part_fields += 1
                if part_fields > PART_FIELDS_MAX:
                    raise RequestError(f"inputs and outputs may have {PART_FIELDS_MAX} fields together, not more")
    return (len(raw) - payload) * EXPANSION


def fields_of(raw: bytes, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The fields of the message between two positions: the number of each, and where its bytes begin and end. The
    beginning and the end of a group are fields without bytes.

    Ends at a field that is broken or not whole: protobuf decodes what stands before it, and refuses the message.
    """
    position = begin
    try:
        while position < end:
            tag, position = varint(raw, position)
            begin, form = position, tag & 7
            if form == VARINT:
                _, position = varint(raw, position)
            elif form == LENGTH:
                size, begin = varint(raw, position)
                position = begin + size
            else:
                position += LENGTHS[form]
            if position > end:
                return
            yield tag >> 3, begin, position
    except (KeyError, IndexError):
        return


def varint(raw: bytes, position: int) -> tuple[int, int]:
    """A number, and the position after it. Raises IndexError when it has no end."""
    value = shift = 0
    while True:
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift >= VARINT_BITS_MAX:
            raise IndexError("a number has no end")
