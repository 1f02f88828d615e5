"""The configuration message as Triton's JSON, for the config endpoint and for python models.

Protobuf's own JSON printer in Python is not used, because Triton's form differs from it in four ways: fields come in
the order of their declaration, every scalar without presence is printed even at its default, 64-bit integers are
numbers, and a float that is whole is an integer.

Source: triton-spec section 4, "config as JSON".
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from shared.configuration.schema import ConfigMessage

_STRING_FIELDS = frozenset(
    {
        "inference.ModelSequenceBatching.InitialState.dims",
        "inference.ModelInstanceGroup.SecondaryDevice.device_id",
        "inference.ModelOptimizationPolicy.Cuda.GraphSpec.Shape.dim",
    }
)
"""64-bit integers that Triton leaves as strings: its conversion looks for the first in the wrong object, and does not
know the others. Model code may rely on it.
"""


LARGEST_SINGLE = float.fromhex("0x1.fffffep+127")


def to_json(config: ConfigMessage) -> str:
    """Triton's JSON of a configuration, compact; the dialect's fields stand in it where they were given."""
    return json.dumps(_members(config), separators=(",", ":"), ensure_ascii=False)


def _members(message: Message) -> dict[str, Any]:
    # Scalars that need not be there, those of a choice, stand behind the others.
    fields = sorted(message.DESCRIPTOR.fields, key=lambda field: field.has_presence and field.message_type is None)
    return {
        field.name: _field(message, field)
        for field in cast("list[FieldDescriptor]", fields)
        if not field.has_presence or message.HasField(field.name)
    }


def _field(message: Message, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    if not field.is_repeated:
        return _scalar(value, field)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name["value"]
        return {str(key): _scalar(value[key], entry) for key in sorted(value)}
    return [_scalar(element, field) for element in value]


def _scalar(value: Any, field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        return _members(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    if isinstance(value, float):
        return _number(value, single=field.type == FieldDescriptor.TYPE_FLOAT)
    return str(value) if field.full_name in _STRING_FIELDS else value


def _number(value: float, *, single: bool) -> float | str:
    """The number with the digits that protobuf's C++ printer gives it; a whole number is an integer, unless it is
    written with an exponent. JSON has no infinities, so protobuf writes them as strings.
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    texts = (f"{value:.{digits}g}" for digits in ((6, 9) if single else (15, 17)))
    text = next((text for text in texts if _reads_back(float(text), value, single=single)), repr(value))
    return int(text) if text.removeprefix("-").isdecimal() else float(text)


def _reads_back(number: float, value: float, *, single: bool) -> bool:
    if not single:
        return number == value
    # The largest single, rounded up, would pack to itself, but protobuf's JSON parser refuses it as too large.
    return abs(number) <= LARGEST_SINGLE and struct.pack("<f", number) == struct.pack("<f", value)
