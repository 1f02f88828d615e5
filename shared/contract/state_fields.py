"""The fields of a checkpoint that hold state tensors: how they are written and read.

A state is one field, `s:` and the name of its input, with the encoded tensor. A state that grows lies in parts, so that
a checkpoint need not write again what earlier checkpoints have written. Then the field `s:` holds `Parts`, and each
part has a field of its own, `g:`, its index, `:` and the name. A part holds the bytes of some positions along the axis
on which the state grows, with that axis first: so it is whole, whichever axis that is.

A release that knows no parts cannot read the field `s:` of such a state, and says so. It does not take a part of the
state for all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from shared.contract.tensors import ELEMENT_BYTES, Tensor, check_tensor, element_count

STATE_FIELD = "s:"
"""Begins the field of a state; the name of the state's input follows."""
PART_FIELD = "g:"
"""Begins the field of a part; its index, a colon and the name of the state's input follow."""
MODEL_FIELD = "m"
"""The field of what a model's own method gave. No state's name: a model may have a state that is called so."""

PART_BYTES = 1024
"""Bytes that a part has at least, but the last. Redis takes about 80 for each part beside its bytes. A step whose
positions are smaller writes one part again, so it writes at most so many bytes more than it added."""


class Parts(msgspec.Struct, frozen=True):
    """A state that lies in parts. Encoded as a map: no reader can take it for a tensor, which is an array.

    axis    along which it is cut
    length  positions of each part; the last part may have fewer
    shape   of the whole state, without the batch dimension
    """

    axis: int
    length: int
    datatype: str
    shape: tuple[int, ...]

    @classmethod
    def along(cls, axis: int, datatype: str, shape: tuple[int, ...]) -> Parts:
        """The parts of a state of this shape, as they are written today. A checkpoint may hold others."""
        positions = cls(axis, 1, datatype, shape)
        return msgspec.structs.replace(positions, length=-(-PART_BYTES // positions.position_bytes))

    @property
    def count(self) -> int:
        return -(-self.shape[self.axis] // self.length)

    @property
    def others(self) -> tuple[int, ...]:
        """The shape of one position along the axis."""
        return (*self.shape[: self.axis], *self.shape[self.axis + 1 :])

    @property
    def position_bytes(self) -> int:
        """Bytes of one position along the axis."""
        return element_count(self.others) * ELEMENT_BYTES[self.datatype]

    def cut(self, raw: bytes | memoryview) -> list[bytes]:
        """Parts of positions that lie one after the other, from the beginning of a part on."""
        size = self.length * self.position_bytes
        return [bytes(raw[at : at + size]) for at in range(0, len(raw), size)]


class TensorInParts(Tensor, frozen=True):
    """A state that was read from parts. parts: as they lie in Redis"""

    parts: Parts | None = None


class GrownState(msgspec.Struct, frozen=True):
    """What a checkpoint writes of a state in parts.

    first  index of the first part that is written; the parts before it are in Redis already, as they are now
    parts  the bytes of that part and of all behind it
    anew   nothing of earlier checkpoints may stay: they may hold more parts, or other states. All states of such a
           checkpoint are complete
    """

    name: str
    form: Parts
    first: int
    parts: Sequence[bytes]
    anew: bool

    @property
    def fields(self) -> list[tuple[str, bytes]]:
        """The fields of the checkpoint, with their values."""
        parts = [(f"{PART_FIELD}{index}:{self.name}", part) for index, part in enumerate(self.parts, self.first)]
        return [(STATE_FIELD + self.name, msgspec.msgpack.encode(self.form)), *parts]

    @property
    def added(self) -> Tensor:
        """The elements of the written parts, one after the other."""
        raw = b"".join(self.parts)
        return Tensor(self.name, self.form.datatype, (len(raw) // ELEMENT_BYTES[self.form.datatype],), raw)


_tensor_decoder = msgspec.msgpack.Decoder(Tensor)
_parts_decoder = msgspec.msgpack.Decoder(Parts)


def state_of_field(field: str) -> str | None:
    """The name of the state to which a field of a checkpoint belongs; None for a field that holds no state tensor."""
    if field.startswith(PART_FIELD):
        return field.split(":", 2)[-1]
    return field.removeprefix(STATE_FIELD) if field.startswith(STATE_FIELD) else None


def checkpointed_states(fields: Mapping[bytes, bytes]) -> dict[str, Tensor]:
    """The state tensors of a checkpoint (hash), by input name. Raises one of `shared.store.reading.FAILURES`."""
    prefix = STATE_FIELD.encode()
    return {
        (name := field.decode().removeprefix(STATE_FIELD)): _state(name, data, fields)
        for field, data in fields.items()
        if field.startswith(prefix)
    }


def _state(name: str, data: bytes, fields: Mapping[bytes, bytes]) -> Tensor:
    # The first byte of a map of few fields in msgpack is 0x80 to 0x8f.
    if data[:1] and data[0] >> 4 == 8:
        return _joined(name, _parts_decoder.decode(data), fields)
    return _tensor_decoder.decode(data)


def _joined(name: str, form: Parts, fields: Mapping[bytes, bytes]) -> TensorInParts:
    """A state of its parts. Raises ValueError or LookupError if one is missing, or has another size."""
    if not (0 <= form.axis < len(form.shape) and form.length > 0 and form.datatype in ELEMENT_BYTES):
        raise ValueError(f"state '{name}' cannot lie in such parts: {form}")
    size = form.length * form.position_bytes
    parts = [fields[f"{PART_FIELD}{index}:{name}".encode()] for index in range(form.count)]
    if any(len(part) != size for part in parts[:-1]):
        raise ValueError(f"a part of state '{name}' has another size than {size} bytes")
    raw = b"".join(parts)
    tensor = TensorInParts(name, form.datatype, form.shape, raw, form)
    # Before numpy is asked: it says less about what is wrong.
    check_tensor(tensor)
    if form.axis == 0 or not raw:
        return tensor
    positions = np.frombuffer(raw, dtype=f"V{ELEMENT_BYTES[form.datatype]}")
    whole = np.moveaxis(positions.reshape((form.shape[form.axis], *form.others)), 0, form.axis).tobytes()
    return msgspec.structs.replace(tensor, raw=whole)
