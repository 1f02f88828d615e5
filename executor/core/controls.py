"""Control tensors: START, END, READY and CORRID as the model asked for them (triton-spec 1.2)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shared.ids import CorrelationId
from shared.model_config.values import ControlKind, ControlSpec, ModelConfig
from shared.tensors import NUMPY_TYPE, Tensor, pack_bytes

_MASK = {"UINT64": (1 << 64) - 1, "INT64": (1 << 64) - 1, "UINT32": (1 << 32) - 1, "INT32": (1 << 32) - 1}


class ControlTensors:
    """Makes a model's control tensors; the few possible START/END/READY combinations are made once."""

    def __init__(self, config: ModelConfig) -> None:
        self._shape = (1, 1) if config.max_batch_size > 0 else (1,)
        controls = config.sequence_batching.controls if config.sequence_batching else ()
        self._flags = [control for control in controls if control.kind is not ControlKind.CORRID]
        self._correlation = next((c for c in controls if c.kind is ControlKind.CORRID), None)
        self._made: dict[tuple[bool, bool, bool], dict[str, Tensor]] = {}

    def of(self, *, start: bool, end: bool, ready: bool, correlation_id: CorrelationId) -> Mapping[str, Tensor]:
        """Control tensors of one row; `ready` False is a null row, whose correlation id is 0."""
        key = (start, end, ready)
        flags = self._made.get(key)
        if flags is None:
            flags = self._made[key] = {c.name: self._flag(c, start=start, end=end, ready=ready) for c in self._flags}
        if self._correlation is None:
            return flags
        return {**flags, self._correlation.name: self._correlation_tensor(self._correlation, correlation_id)}

    def _flag(self, control: ControlSpec, *, start: bool, end: bool, ready: bool) -> Tensor:
        on = {ControlKind.START: start, ControlKind.END: end, ControlKind.READY: ready}[control.kind]
        false_true = control.false_true or (0, 1)
        value = np.array(false_true[on], dtype=NUMPY_TYPE[control.datatype])
        return Tensor(control.name, control.datatype, self._shape, value.tobytes())

    def _correlation_tensor(self, control: ControlSpec, correlation_id: CorrelationId) -> Tensor:
        if control.datatype == "BYTES":
            text = correlation_id if isinstance(correlation_id, str) else ""
            return Tensor(control.name, "BYTES", self._shape, pack_bytes([text]))
        # 32-bit controls get the low-order half, as in Triton; the gateway has refused ids of the wrong kind.
        number = (correlation_id if isinstance(correlation_id, int) else 0) & _MASK[control.datatype]
        size = NUMPY_TYPE[control.datatype].itemsize
        return Tensor(control.name, control.datatype, self._shape, number.to_bytes(size, "little"))
