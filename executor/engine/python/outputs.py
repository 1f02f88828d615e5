"""Reads the responses of a `model.py`: outputs and states, once they are what the configuration says."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from executor.engine import shapes
from executor.engine.base import Row, RowError, RowResult
from executor.engine.python.model import error_text
from executor.engine.python.model_metrics import TritonModelException
from executor.engine.python.response import InferenceResponse, TritonError, WrongResponseError, response_parameters
from executor.engine.python.slot_states import States
from executor.engine.python.tensor import ModelTensor, datatype_of, raw_content
from executor.engine.python.texts import plain_text
from executor.engine.state_tensors import size_problem
from shared.contract.errors import Code, code_of
from shared.contract.limits import VALUE_BYTES_MAX
from shared.contract.model_config import ModelConfig, TensorSpec
from shared.contract.tensors import Tensor, shape_text

OUTPUT_BYTES_MAX = (1 << 32) - 1
"""Of one output. The process of an instance tells its results in msgpack, which has no form for more. Redis takes less,
but the caller of a step with an answer beyond that hears so, and the step is done."""


class ResponseReader:
    """One per engine. Threads of the model that send responses share it. state_bytes_max: of one sequence"""

    def __init__(self, config: ModelConfig, state_bytes_max: int) -> None:
        self._model = config.name
        self._batched = config.max_batch_size > 0
        self._state_bytes_max = state_bytes_max
        self._outputs = [OutputCheck(config.name, spec, batched=self._batched) for spec in config.outputs]
        returned = [TensorSpec(state.output_name, state.datatype, state.dims) for state in config.states]
        checks = [OutputCheck(config.name, spec, batched=self._batched) for spec in returned]
        self._states = list(zip(config.states, checks, strict=True))
        self._known = {check.name for check in (*self._outputs, *checks)}
        # The checks keep what was right last time.
        self._reading = threading.Lock()

    def read(
        self, row: Row, count: int, response: InferenceResponse, before: States | None
    ) -> tuple[RowResult, States | None] | RowError:
        """A row's result, and the states after it: those before it, but for what the response has. Does not raise.

        count   rows that the request brings
        before  None if the model declares no states
        """
        try:
            if (failure := _reported(response)) is not None:
                return failure
            given = self._given(response)
            with self._reading:
                outputs = self._row_outputs(row, count, given)
                result = RowResult(outputs, parameters=response_parameters(response.said))
                return result, None if before is None else self._next_states(before, given)
        except (WrongResponseError, TritonModelException) as wrong:
            return RowError(Code.INTERNAL, str(wrong))
        except BaseException as error:  # noqa: BLE001 - a response has objects of the model's own: a generator, say
            return RowError(
                Code.INTERNAL, f"model '{self._model}' returned a response that cannot be read: {error_text(error)}"
            )

    def _given(self, response: InferenceResponse) -> dict[str, ModelTensor]:
        given: dict[str, ModelTensor] = {}
        for tensor in response.given:
            if not isinstance(cast("object", tensor), ModelTensor):
                raise WrongResponseError(
                    f"model '{self._model}' returned a {type(tensor).__name__} among its output tensors"
                )
            name = tensor.name()
            if name not in self._known:
                raise WrongResponseError(
                    f"model '{self._model}' returned output '{name}', which its configuration does not declare; it "
                    f"declares {', '.join(sorted(self._known))}"
                )
            if name in given:
                raise WrongResponseError(f"model '{self._model}' returned output '{name}' twice in one response")
            given[name] = tensor
        return given

    def _row_outputs(self, row: Row, count: int, given: Mapping[str, ModelTensor]) -> list[Tensor]:
        """The declared outputs that the caller wants and the model has given: Triton lets models leave some out."""
        outputs: list[Tensor] = []
        asked = row.outputs
        for check in self._outputs:
            if asked and check.name not in asked:
                continue
            tensor = given.get(check.name)
            if tensor is not None:
                outputs.append(output := check.wire(tensor, count))
                if len(output.raw) > OUTPUT_BYTES_MAX:
                    what = f"output '{check.name}' of {len(output.raw)} bytes: no answer takes so many"
                    raise WrongResponseError(f"model '{self._model}' returned {what}")
        return outputs

    def _next_states(self, before: States, given: Mapping[str, ModelTensor]) -> States:
        following = dict(before)
        for state, check in self._states:
            tensor = given.get(state.output_name)
            if tensor is not None:
                output = check.wire(tensor, 1)
                self.check_size(state.output_name, output.raw)
                shape = output.shape[1:] if self._batched else output.shape
                following[state.input_name] = Tensor(state.input_name, state.datatype, shape, output.raw)
        return following

    def check_size(self, name: str, state: bytes) -> None:
        """Raises WrongResponseError for a state that is too large to be kept. name: the output's"""
        problem = size_problem(len(state), self._state_bytes_max)
        if problem is not None:
            raise WrongResponseError(f"model '{self._model}' returned a wrong state '{name}': {problem}")


def _reported(response: InferenceResponse) -> RowError | None:
    """The error that a model made a response of; by Triton's habit it may also be a plain message."""
    failure = cast("object", response.failure)
    if failure is None:
        return None
    if not isinstance(failure, TritonError):
        return RowError(Code.INTERNAL, plain_text(failure))
    return RowError(code_of(failure.code()), plain_text(failure.message()))


class OutputCheck:
    """Turns one declared output of a row into its wire form, once it is what the configuration says.

    The shape and type that were right last time are right at once.
    """

    def __init__(self, model: str, spec: TensorSpec, *, batched: bool) -> None:
        self.name = spec.name
        self._model = model
        self._spec = spec
        self._batched = batched
        self._seen_shape: shapes.Shape | None = None
        self._seen_type: np.dtype[Any] | None = None
        self._seen_count = 0
        self._client_shape: shapes.Shape = ()

    def wire(self, tensor: ModelTensor, count: int) -> Tensor:
        """count: rows of the request. Raises WrongResponseError that tells what was expected and returned."""
        array = tensor.array
        if array.dtype is not self._seen_type or array.shape != self._seen_shape or count != self._seen_count:
            self._check(tensor, count)
            array = tensor.array
            # Arrays of BF16 are of uint16: they do not tell one from the other.
            if self._spec.datatype not in ("BYTES", "BF16", "UINT16"):
                self._seen_type, self._seen_shape, self._seen_count = array.dtype, array.shape, count
        if self._spec.datatype == "BYTES":
            return Tensor(self.name, "BYTES", self._client_shape, raw_content(tensor))
        raw = array.tobytes() if array.nbytes <= VALUE_BYTES_MAX else _lent(array)
        return Tensor(self.name, self._spec.datatype, self._client_shape, raw)

    def _check(self, tensor: ModelTensor, count: int) -> None:
        datatype, shape = datatype_of(tensor), tensor.array.shape
        dims = shapes.declared_by_model(self._spec)
        leading = (count,) if self._batched else ()
        row_shape = shape[len(leading) :]
        expected = (*leading, *dims)
        if datatype != self._spec.datatype or not shapes.fits(shape, expected):
            raise WrongResponseError(
                f"model '{self._model}' returned a wrong output '{self.name}': expected {self._spec.datatype} "
                f"{shape_text(expected)}, got {datatype} {shape_text(shape)}"
            )
        self._client_shape = (*leading, *shapes.for_client(self._spec, row_shape))


def _lent(array: NDArray[Any]) -> Any:
    """An array's bytes, for what is refused by its size: a copy would keep the interpreter, and so the lease, for a
    second a GiB.
    """
    return np.ascontiguousarray(array).reshape(-1).data.cast("B")
