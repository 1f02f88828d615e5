"""The methods `checkpoint` and `restore`, by which a `model.py` hands out the state of sequences that it keeps itself.

    def checkpoint(self, correlation_id) -> dict[str, np.ndarray]: ...
    def restore(self, correlation_id, state): ...

`checkpoint` is called after a step of the sequence, on the thread that runs `execute`. Its result is copied at once, so
that the model may go on writing to its arrays. `restore` is given the same names and values, in arrays that the model
may write to, perhaps in another process, and at any time before the sequence's next step. Strings come back as `bytes`
in an array of objects, as in a BYTES input.

Triton knows no such methods. Methods of these names with another purpose are recognised by their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from executor.engine.error_texts import text_of_error
from executor.engine.python.model import CallBlock, error_text, takes
from executor.engine.python.texts import is_text, plain_text
from shared.contract.errors import ModelError
from shared.contract.ids import CorrelationId
from shared.contract.messages import encode
from shared.contract.tensors import DATATYPE_OF, TEXT_KINDS, Tensor, from_numpy, to_numpy

CHECKPOINT, RESTORE = "checkpoint", "restore"

_tensors = msgspec.msgpack.Decoder(list[Tensor])


def has_methods(model_class: type[Any]) -> bool:
    """Whether a model has both methods, with these parameters."""
    return takes(getattr(model_class, CHECKPOINT, None), 0) and takes(getattr(model_class, RESTORE, None), 0, {})


def unfit_methods(model_class: type[Any]) -> list[str]:
    """Which of the two a model has without being called: the other one is lacking, or the parameters are others."""
    if has_methods(model_class):
        return []
    return [name for name in (CHECKPOINT, RESTORE) if callable(getattr(model_class, name, None))]


class ModelState:
    """Calls one model's methods. An exception, or a wrong result, is a ModelError that names the model and the method.

    executing  a block in which the model is called, and may call other models itself
    bytes_max  largest state of one sequence
    """

    def __init__(self, model: Any, name: str, executing: CallBlock, bytes_max: int) -> None:
        self._model = model
        self._name = name
        self._executing = executing
        self._bytes_max = bytes_max

    def save(self, correlation_id: CorrelationId) -> bytes:
        """The present state of a sequence, in its form for Redis; never b"", even if the model's dict is empty."""
        given = self._call(CHECKPOINT, correlation_id)
        try:
            size = _bytes_of_numbers(given)
            # What is too large is not copied: that would keep the interpreter, and so the lease, for a second a GiB.
            tensors = _packed(given) if size <= self._bytes_max else ()
        except BaseException as wrong:  # what the model gave may have methods of the model's own
            raise self._error(CHECKPOINT, correlation_id, text_of_error(wrong)) from wrong
        size = max(size, sum(len(tensor.raw) for tensor in tensors))
        if size > self._bytes_max:
            text = f"returned {size} bytes, and no more than {self._bytes_max} are kept of a sequence"
            raise self._error(CHECKPOINT, correlation_id, text)
        return encode(tensors)

    def load(self, correlation_id: CorrelationId, state: bytes) -> None:
        """Gives the model a state that `save` returned."""
        try:
            arrays = {tensor.name: to_numpy(tensor).copy() for tensor in _tensors.decode(state)}
        except (ValueError, KeyError) as wrong:  # msgspec's errors are ValueErrors
            raise self._error(RESTORE, correlation_id, f"what was kept is not readable: {wrong}") from wrong
        self._call(RESTORE, correlation_id, arrays)

    def _call(self, method: str, correlation_id: CorrelationId, *arguments: object) -> object:
        call: Callable[..., object] = getattr(self._model, method)
        try:
            with self._executing():
                return call(correlation_id, *arguments)
        except BaseException as error:  # the model's own code: only this sequence is to suffer from it
            raise self._error(method, correlation_id, error_text(error)) from error

    def _error(self, method: str, correlation_id: CorrelationId, text: str) -> ModelError:
        return ModelError(f"model '{self._name}': {method} of sequence {correlation_id} failed: {text}")


def _bytes_of_numbers(given: object) -> int:
    """Bytes of the arrays of numbers. How long texts are is known only when they are encoded."""
    values = cast("Mapping[object, object]", given).values() if isinstance(given, Mapping) else ()
    arrays = [cast("NDArray[Any]", value) for value in values if isinstance(value, np.ndarray)]
    return sum(array.nbytes for array in arrays if array.dtype.kind not in TEXT_KINDS)


def _packed(given: object) -> Sequence[Tensor]:
    if not isinstance(given, Mapping):
        raise TypeError(f"expected a dict of numpy arrays, got {type(given).__name__}")
    return [_tensor(name, value) for name, value in cast("Mapping[object, object]", given).items()]


def _tensor(name: object, value: object) -> Tensor:
    if not is_text(name):
        raise TypeError(f"expected names that are text, got {name!r}")
    name = plain_text(name)
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"expected a numpy array as '{name}', got {type(value).__name__}")
    if np.ma.is_masked(cast("Any", value)):
        raise TypeError(f"'{name}' has masked elements, and a mask is not kept: hand out its data and its mask apart")
    array: NDArray[Any] = np.asarray(cast("Any", value))
    if array.dtype.kind in TEXT_KINDS:
        if not all(isinstance(element, str | bytes) for element in array.reshape(-1).tolist()):
            raise TypeError(f"expected str or bytes as elements of '{name}'")
        return from_numpy(name, array)
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if little.dtype not in DATATYPE_OF:
        raise TypeError(f"'{name}' has elements of a type that no tensor has: {array.dtype}")
    return from_numpy(name, little)
