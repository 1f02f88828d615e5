"""Steps and answers as messages of the v2 protocol. Pure.

The protobuf classes are those of `tritonclient`: protobuf allows one definition of a package in a process, so
classes of our own would keep programs from using both libraries.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tritonclient import utils
from tritonclient.grpc import InferResult, service_pb2

from seqmesh_client.errors import REASONS, StepRefused, TryLater, WrongAnswer

pb: Any = service_pb2
"""The message classes; they are made at run time and have no types."""
forms: Any = utils
"""The forms of tensors: tritonclient's functions have no types."""

Array = NDArray[Any]
NUMBERED = "sequence(step_numbers)"
"""The extension that a mesh names in its server metadata: a step with a number does not run twice."""
FINAL = "triton_final_response"
HOPELESS = frozenset(
    {"INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "UNIMPLEMENTED"}
)
"""Statuses of a call that another gateway would give as well. Any other end of a stream is a broken connection."""
OUT_OF_TIME = "DEADLINE_EXCEEDED"
"""The status of a call whose time is over."""
FULL = "Concurrent RPC limit exceeded!"
"""What gRPC's servers, and gateways, say of a call for which they have no room now. Its status is a hopeless one."""


class StepOutputs(Mapping[str, Array]):
    """The output tensors of one answer, by name.

    BYTES are arrays of `bytes` objects. The arrays are read-only; all others are views of the message.
    """

    def __init__(self, response: Any) -> None:
        try:
            for one in response.outputs:
                # tritonclient would read an unknown type as FP64, and a negative dimension as whatever fits.
                if forms.triton_to_np_dtype(one.datatype) is None or min(one.shape, default=0) < 0:
                    raise ValueError(f"'{one.name}' is said to be {one.datatype} {list(one.shape)}")
            read = InferResult(response)
            self._arrays: dict[str, Array] = {
                one.name: cast(Array, read.as_numpy(one.name)) for one in response.outputs
            }
        except (utils.InferenceServerException, ValueError, TypeError, IndexError, struct.error) as error:
            raise WrongAnswer(f"an output cannot be read: {error}") from None
        for array in self._arrays.values():
            array.flags.writeable = False

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"StepOutputs({self._arrays!r})"

    @property
    def single(self) -> Array:
        """The only output. Raises ValueError if there are more, or none."""
        if len(self._arrays) != 1:
            raise ValueError(f"the answer has the outputs {sorted(self._arrays)}: name one of them")
        return next(iter(self._arrays.values()))


@dataclass(frozen=True, slots=True)
class StepRequest:
    """A step before it is sent. inputs: by name; outputs: names asked for, all if empty."""

    inputs: Mapping[str, Array]
    outputs: Sequence[str] = ()
    last: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """What one message says about the step that it names ("" in a server's error that names none).

    content  an answer; None for a final message without one; or an error
    final    nothing more will be said about the step
    run      the name of the sequence's run; "" where the message does not tell it
    """

    request_id: str
    content: StepOutputs | StepRefused | None
    final: bool
    run: str = ""


def message_of(step: StepRequest, *, model: str, version: str, sequence: int | str, number: int) -> Any:
    """The ModelInferRequest of a step. It holds copies of the inputs.

    number  since the sequence's first step, which is 1 and begins it; also the request id, by which the mesh notices
            other inputs under the same number
    raises  TypeError for an array that has no Triton type, and for outputs that are one text; ValueError for a text
            that is no UTF-8
    """
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=str(number))
    for name, array in step.inputs.items():
        datatype = forms.np_to_triton_dtype(array.dtype.newbyteorder("=")) or (
            "BYTES" if array.dtype.kind in "SU" else None
        )
        if datatype is None:
            raise TypeError(f"input '{name}' has the type {array.dtype}, which Triton's protocol does not know")
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        try:
            message.raw_input_contents.append(raw_bytes(array, datatype))
        except UnicodeEncodeError as error:
            raise ValueError(f"input '{name}' has a text that is no UTF-8: {error}") from error
    if isinstance(step.outputs, str):
        raise TypeError(f"outputs is a list of names: [{step.outputs!r}]")
    for name in step.outputs:
        message.outputs.add(name=name)
    own = {
        "sequence_id": sequence,
        "sequence_start": number == 1,
        "sequence_end": step.last,
        "sequence_step": number,
        "sequence_run_info": True,
        "triton_enable_empty_final_response": True,
    }
    set_parameters(message, own)
    return message


def from_answer(message: Any, first: int) -> Any:
    """A step's message for a decoupled model that has answered before. first: the first answer that is wanted"""
    if first == 1:
        return message
    rest = pb.ModelInferRequest()
    rest.CopyFrom(message)
    set_parameters(rest, {"sequence_answer": first})
    return rest


def end_message(*, model: str, version: str, sequence: int | str, run: str) -> Any:
    """The ModelInferRequest that ends a run of a sequence without a step. The mesh does nothing if it is over."""
    message = pb.ModelInferRequest(model_name=model, model_version=version)
    set_parameters(message, {"sequence_id": sequence, "sequence_close": run})
    return message


def set_parameters(message: Any, values: Mapping[str, int | str | bool]) -> None:
    for name, value in values.items():
        field = message.parameters[name]
        if isinstance(value, bool):
            field.bool_param = value
        elif isinstance(value, str):
            field.string_param = value
        else:
            # An id of 64 bits without a sign goes as the signed number of the same bits, as in Triton.
            field.int64_param = value if value < 1 << 63 else value - (1 << 64)


def raw_bytes(array: Array, datatype: str) -> bytes:
    """A tensor's bytes, row-major, little-endian."""
    if datatype != "BYTES":
        return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    # tritonclient makes an object of the elements, and an empty array of none.
    written = forms.serialize_byte_tensor(array.astype(np.object_) if array.dtype.kind == "U" else array)
    return bytes(written.item()) if written.size else b""


def told_by(message: Any) -> Told:
    """What a ModelStreamInferResponse says. Raises WrongAnswer if its tensors cannot be read."""
    response = message.infer_response
    said = {
        name: getattr(value, value.WhichOneof("parameter_choice") or "", None)
        for name, value in response.parameters.items()
    }
    final = bool(said.get(FINAL, True))
    if not message.error_message:
        empty = not response.outputs and FINAL in response.parameters
        run = str(said.get("sequence_run", ""))
        return Told(response.id, None if empty else StepOutputs(response), final, run)
    last_step = said.get("last_step", -1)
    error = refusal(
        message.error_message,
        reason=str(said.get("reason", "")),
        code=str(said.get("code", "")),
        last_step=last_step if isinstance(last_step, int) else -1,
        # The mesh names the model of a request that it had accepted.
        counted=bool(response.model_name),
        retry=str(said.get("retry", "")),
    )
    return Told(response.id, error, final)


def refusal(text: str, *, reason: str, code: str, last_step: int, counted: bool, retry: str) -> StepRefused:
    """The error of its reason's class. Words of a newer mesh are judged by its advice, `retry`."""
    unavailable = not reason and not counted and code == "UNAVAILABLE"
    kind = REASONS.get(reason) or (TryLater if retry == "same" or unavailable else StepRefused)
    return kind(text, reason=reason, code=code, last_step=last_step, counted=counted)


class LinkBroken(Exception):
    """A connection did not do what was asked of it; another gateway may."""


def broken_by(error: Exception | None) -> LinkBroken | StepRefused:
    """What the end of a call means; StepRefused if no other gateway would do better. error: None for an orderly end"""
    if error is None:
        return LinkBroken("the server ended the stream")
    status, details = cast(Any, error).code().name, cast(Any, error).details()
    if status in HOPELESS and details != FULL:
        return StepRefused(f"{status}: {details}", code=status)
    return LinkBroken(f"{status}: {details}")
