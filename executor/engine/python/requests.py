"""The requests of a batch, as a model sees them."""

from __future__ import annotations

import json

from executor.engine.base import Row
from executor.engine.python import calls
from executor.engine.python import triton_python_backend_utils as interface
from executor.engine.python.columns import Columns
from executor.engine.python.response_senders import ResponseSender, SoleSender
from executor.engine.python.tensor import ModelTensor


class RowRequest(interface.InferenceRequest):
    """A row, as the model sees it."""

    __slots__ = ("_row", "sole_sender")

    def __init__(self, row: Row, columns: Columns, position: int) -> None:  # what the base keeps is in the row
        self._row = row
        self.columns: Columns = columns  # pyright: ignore[reportIncompatibleVariableOverride]  (those of its batch)
        self.position = position
        self.release_flags = interface.TRITONSERVER_REQUEST_RELEASE_ALL
        self.sole_sender: SoleSender | None = None
        """Once the model has asked for it."""

    def inputs(self) -> list[ModelTensor]:
        tensors = [self.columns[name][self.position] for name in self.columns.sources.names]
        return [tensor for tensor in tensors if tensor is not None]

    def model_name(self) -> str:
        return self.columns.sources.model

    def model_version(self) -> int:
        return self.columns.sources.version

    def preferred_memory(self) -> None:
        return None

    def trace(self) -> calls.RequestTrace:
        """For a call that belongs to this request, whatever else is in the batch, and for spans of the model's own."""
        return calls.RequestTrace(calls.execution.get(), self._row.origin)

    def request_id(self) -> str:
        return self._row.request_id

    def correlation_id(self) -> int | str:
        return self._row.correlation_id

    def flags(self) -> int:
        row = self._row
        return (interface.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if row.start else 0) | (
            interface.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if row.end else 0
        )

    def set_flags(self, flags: int) -> None:
        """Refused: the flags of a step are the client's."""
        raise interface.TritonModelException("the flags of a request that is being executed cannot be changed")

    def timeout(self) -> int:
        return self._row.timeout_us

    def parameters(self) -> str:
        return json.dumps(dict(self._row.parameters))

    def is_cancelled(self) -> bool:
        return (self.sole_sender or self._sender()).is_cancelled()

    def get_response_sender(self) -> interface.InferenceResponseSender:
        self.sole_sender = self.sole_sender or self._sender()
        return self.sole_sender

    def _sender(self) -> SoleSender:
        row, unwanted = self._row, self.columns.sources.unwanted
        # Without this request: the sender is to go as soon as the model lets go of it.
        return SoleSender(lambda: row in unwanted)

    def requested_output_names(self) -> set[str]:
        """What the caller asked for; all outputs when he named none, as in Triton."""
        return set(self._row.outputs or self.columns.sources.outputs)


class DecoupledRequest(RowRequest):
    """A request to a decoupled model, with its sender."""

    __slots__ = ("sender",)

    sender: ResponseSender

    def get_response_sender(self) -> ResponseSender:
        return self.sender

    def is_cancelled(self) -> bool:
        return self.sender.is_cancelled()
