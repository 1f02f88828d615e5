"""Control tensors: START, END, READY and CORRID as the model asked for them (triton-spec 1.2)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shared.contract.ids import CorrelationId
from shared.contract.model_config import ControlKind, ControlSpec, ModelConfig
from shared.contract.tensors import NUMPY_TYPE, Tensor, pack_bytes

_MASK = {"UINT64": (1 << 64) - 1, "INT64": (1 << 64) - 1, "UINT32": (1 << 32) - 1, "INT32": (1 << 32) - 1}


class ControlTensors:
    """Makes a model's control tensors. The few possible combinations of flags are made once.

    null_row  the tensors of a row without a step: every flag false; correlation id 0, or "" for a string
    """

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._shape = (1, 1) if config.max_batch_size > 0 else (1,)
        self._flags = [control for control in config.controls if control.kind is not ControlKind.CORRID]
        self._correlation = next((c for c in config.controls if c.kind is ControlKind.CORRID), None)
        self._takes_strings = self._correlation is not None and self._correlation.datatype == "BYTES"
        self._made = {
            (start, end): self._flag_tensors(start=start, end=end, ready=True)
            for start in (False, True)
            for end in (False, True)
        }
        unset = self._flag_tensors(start=False, end=False, ready=False)
        self.null_row: Mapping[str, Tensor] = {**self.of_nobody(start=False, end=False), **unset}

    def of(self, *, start: bool, end: bool, correlation_id: CorrelationId) -> Mapping[str, Tensor]:
        """Control tensors of a step's row. The correlation id must have passed `problem`."""
        flags = self._made[start, end]
        if self._correlation is None:
            return flags
        return {**flags, self._correlation.name: self._correlation_tensor(self._correlation, correlation_id)}

    def of_nobody(self, *, start: bool, end: bool, number: int = 0) -> Mapping[str, Tensor]:
        """Control tensors of a step of no sequence. number: its correlation id, if the model takes no strings there"""
        return self.of(start=start, end=end, correlation_id="" if self._takes_strings else number)

    def problem(self, correlation_id: CorrelationId) -> str:
        """Why the model cannot take this correlation id, in Triton's words; "" if it can, or does not ask for it.

        Triton itself lets some strings pass as the integer 0, which mixes up the sequences of a model that uses the id.
        """
        control = self._correlation
        if control is None or (control.datatype == "BYTES") is isinstance(correlation_id, str):
            return ""
        given = "BYTES" if isinstance(correlation_id, str) else "UINT64"
        return (
            f"sequence batching control '{control.name}' data-type is '{given}', but model '{self._model}' "
            f"expects '{control.datatype}'"
        )

    def _flag_tensors(self, *, start: bool, end: bool, ready: bool) -> dict[str, Tensor]:
        on = {ControlKind.START: start, ControlKind.END: end, ControlKind.READY: ready}
        return {control.name: self._flag(control, on=on[control.kind]) for control in self._flags}

    def _flag(self, control: ControlSpec, *, on: bool) -> Tensor:
        false_true = control.false_true or (0, 1)
        value = np.array(false_true[on], dtype=NUMPY_TYPE[control.datatype])
        return Tensor(control.name, control.datatype, self._shape, value.tobytes())

    def _correlation_tensor(self, control: ControlSpec, correlation_id: CorrelationId) -> Tensor:
        if isinstance(correlation_id, str):
            assert control.datatype == "BYTES", f"{control.name} of {self._model} is no string"
            return Tensor(control.name, "BYTES", self._shape, pack_bytes([correlation_id]))
        # 32-bit controls get the low-order half, as in Triton.
        number = correlation_id & _MASK[control.datatype]
        size = NUMPY_TYPE[control.datatype].itemsize
        return Tensor(control.name, control.datatype, self._shape, number.to_bytes(size, "little"))
