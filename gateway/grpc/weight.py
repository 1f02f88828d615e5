"""Estimates how much memory decoding a message takes, from its fields. Pure.

A field of two bytes may become an object of a hundred (measured: an empty input 44 bytes in the message and 92 as
Python's object, a parameter 20, a number in typed contents 8). Only raw contents and files of a model are carried as
they are, and take as many bytes as in the message.

Source: protobuf's encoding, https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from shared.contract.errors import RequestError

FIELDS_MAX = 10_000
"""Inputs, outputs, contents and parameters of one message."""
EXPANSION = 24
"""Decoded bytes per byte of the message. Tiny fields take more; their number is bounded by FIELDS_MAX."""
CARRIED = {"ModelInferRequest": 7, "RepositoryModelLoadRequest": 3}
"""Per message: the number of the field whose bytes are carried as they are, raw contents or files."""
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
LENGTHS = {FIXED64: 8, FIXED32: 4}
VARINT_BITS_MAX = 70


def decoding_bytes(raw: bytes, kind: str) -> int:
    """The memory that decoding a message takes at most, besides the bytes that are carried as they are.

    kind    the message's name
    raises  RequestError for a message with too many fields
    """
    carried = CARRIED.get(kind, 0)
    position, fields, payload = 0, 0, 0
    end = len(raw)
    try:
        while position < end:
            fields += 1
            if fields > FIELDS_MAX:
                raise RequestError(
                    f"a request may have {FIELDS_MAX} inputs, outputs, contents and parameters, not more"
                )
            tag, position = varint(raw, position)
            form = tag & 7
            if form == VARINT:
                _, position = varint(raw, position)
            elif form == LENGTH:
                size, position = varint(raw, position)
                position += size
                if tag >> 3 == carried:
                    payload += size
            else:
                position += LENGTHS[form]
    except (KeyError, IndexError):
        pass  # groups, or an end in the middle of a field: protobuf will refuse the message
    return (end - payload) * EXPANSION


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
