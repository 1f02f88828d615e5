"""The shape of a model's batches if a row's results must not depend on its batch (parameter `fixed_shape`).

Pure. Torch chooses kernels by a batch's shape, and most kernels treat every row of a batch alike. The others differ at
the end of their data: an elementwise kernel computes whole vectors, and then the remaining numbers one by one, by other
instructions with other rounding (sigmoid, gelu and softplus among them). So a batch is filled up with null rows to a
multiple of `ROWS_MULTIPLE`: then nothing remains, whatever the width of a row. On several threads a tensor is cut into
equal parts, whose ends may lie anywhere. There, and if shapes are not fixed, every row runs alone.
"""

from __future__ import annotations

from shared.contract.model_config import FixedShape, ModelConfig

ROWS_MULTIPLE = 64
"""Numbers in two of the longest vectors (512 bits) of the shortest type that kernels round in (BF16): they take two at
a time."""


def padded_rows(max_batch_size: int) -> int:
    return -(-max_batch_size // ROWS_MULTIPLE) * ROWS_MULTIPLE


def alone_because(config: ModelConfig, threads: int) -> str:
    """Why a model's rows must run one by one; "" if padded batches may do.

    threads  that compute one tensor; 1 for a GPU, where no tensor is cut
    """
    if config.fixed_shape is FixedShape.ROWS:
        return "so the parameter fixed_shape says"
    if config.max_batch_size <= 1:
        return "batches have one row"
    if threads > 1:
        return f"torch_threads is {threads}"
    if config.batch_inputs or config.batch_outputs:
        return "some of its tensors belong to the whole batch"
    for name, dims, loose in (
        *((spec.name, spec.dims, spec.allow_ragged_batch) for spec in config.inputs),
        *((state.input_name, state.dims, state.datatype == "BYTES") for state in config.states),
    ):
        if loose or -1 in dims:
            return f"the shape of '{name}' varies"
    return ""
