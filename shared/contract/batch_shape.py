"""How a stateless request waits, and which requests may share a batch (triton-spec 1.9, 3.1-3.3). Pure.

A gateway writes this beside a stateless request, so that batches can be formed without reading the request itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec
import xxhash

from shared.contract.model_config import ModelConfig
from shared.contract.tensors import Tensor


class Queueing(msgspec.Struct, frozen=True):
    """How a stateless request waits for its batch (triton-spec 3.1-3.3); zeros mean none.

    level        priority level, lower first; 0 where the model has none
    level_bound  requests that its level may hold
    timeout_us   how long the request may wait
    delays       at the timeout the request goes behind all others of its level, instead of being refused
    rows         rows of a batch that it takes
    shape        equal for requests that may share a batch; no spaces
    ordered      answers leave in the order of arrival
    """

    level: int = 0
    level_bound: int = 0
    timeout_us: int = 0
    delays: bool = False
    rows: int = 1
    shape: str = ""
    ordered: bool = False


class ShapeKeys:
    """What two requests of a model must have in common to share a batch (triton-spec 1.9): the same inputs, if some are
    optional; and the same shapes of inputs with variable dimensions that are not ragged.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._variable = {spec.name for spec in config.inputs if -1 in spec.dims and not spec.allow_ragged_batch}
        self._optional = any(spec.optional for spec in config.inputs)
        self._batch_dims = 1 if config.max_batch_size > 0 else 0

    def of(self, inputs: Sequence[Tensor]) -> Hashable:
        """Equal for requests that may run together; None for every request of a model whose shapes are all fixed."""
        if not self._variable and not self._optional:
            return None
        return tuple(
            sorted(
                (tensor.name, tensor.shape[self._batch_dims :] if tensor.name in self._variable else ())
                for tensor in inputs
                if self._optional or tensor.name in self._variable
            )
        )

    def text_of(self, inputs: Sequence[Tensor]) -> str:
        """As `of`, as a short word that is equal in every process; "" if all shapes are fixed."""
        key = self.of(inputs)
        return "" if key is None else xxhash.xxh64_hexdigest(repr(key).encode())


def rows_of(config: ModelConfig, inputs: Sequence[Tensor]) -> int:
    """A request's own batch size; 1 for a model without batch dimension, and for a tensor without one, which the engine
    refuses.
    """
    if config.max_batch_size == 0 or not inputs or not inputs[0].shape:
        return 1
    return inputs[0].shape[0]
