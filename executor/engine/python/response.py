"""The responses that a `model.py` makes, and gets to its calls (`pb_utils.InferenceResponse`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from executor.engine.python.tensor import ModelTensor
from executor.engine.python.texts import is_text, plain_text
from shared.contract.parameters import INT64_MAX, INT64_MIN, Parameter

NO_PARAMETERS: Mapping[str, Parameter] = {}


class WrongResponseError(Exception):
    """One row's response is wrong."""


class TritonError:
    """An error of one request, with a code of Triton's (class constants)."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"

    __slots__ = ("_code", "_message")

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        # Models often give the exception itself.
        self._message = str(message)
        self._code = code

    def code(self) -> str:
        return self._code

    def message(self) -> str:
        return self._message

    def __str__(self) -> str:
        return self._message


class InferenceResponse:
    """A request's outputs, or its error.

    given, failure, said  what the model passed as tensors, error and parameters (for the engine: a model uses the
                          methods)
    """

    __slots__ = ("failure", "given", "said")

    def __init__(
        self,
        output_tensors: Sequence[ModelTensor] | None = None,
        error: TritonError | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self.given: Sequence[ModelTensor] = [] if output_tensors is None else output_tensors
        self.failure = error
        self.said = parameters

    def as_it_is(self) -> InferenceResponse:
        """A copy: the model may go on to write to its arrays. What cannot be read is not copied."""
        if not isinstance(cast("object", self.given), list | tuple):
            return self
        tensors = [one.copied() if isinstance(cast("object", one), ModelTensor) else one for one in self.given]
        return InferenceResponse(tensors, self.failure, self.said)

    def output_tensors(self) -> list[ModelTensor]:
        return list(self.given)

    def has_error(self) -> bool:
        return self.failure is not None

    def error(self) -> TritonError | None:
        return self.failure

    def parameters(self) -> str:
        """The response's parameters as JSON."""
        return json.dumps(dict(self.said or {}))


def response_parameters(said: object) -> Mapping[str, Parameter]:
    """The parameters of a response. Raises WrongResponseError for a value that no protocol can carry."""
    if not said:
        return NO_PARAMETERS
    if not isinstance(said, Mapping):
        raise WrongResponseError(f"the parameters of a response must be a dict, not {type(said).__name__}")
    plain: dict[str, Parameter] = {}
    for key, value in cast("Mapping[object, object]", said).items():
        found = _plain(value)
        if not is_text(key) or found is None:
            raise WrongResponseError(
                f"response parameter {key!r} has invalid type: keys must be str, values str, int (of 64 bits), bool or "
                "float"
            )
        plain[plain_text(key)] = found
    return plain


def _plain(value: object) -> Parameter | None:
    """The value itself, without what a subclass adds to it (numpy's float64 is a float); None for another type."""
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and INT64_MIN <= value <= INT64_MAX:
        return int(value)
    return plain_text(value) if is_text(value) else None
