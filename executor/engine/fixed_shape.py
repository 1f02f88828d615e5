"""What shape a model's batches have when a row's results must not depend on its batch (parameter `fixed_shape`).

Pure. Torch's kernels are chosen by a batch's shape, and within a batch most treat every row alike. Those that do not
differ at the end of what they are given: an elementwise kernel computes whole vectors and then what is left over,
number by number, by other instructions with other rounding (sigmoid, gelu and softplus among them). So a batch is
filled up with null rows to a multiple of `ROWS_MULTIPLE`, which leaves nothing over whatever the width of a row. On
several threads a tensor is cut into equal parts, whose ends lie anywhere: there, and wherever shapes are not fixed,
every row runs alone.
"""

from __future__ import annotations

from shared.contract.model_config import FixedShape, ModelConfig

ROWS_MULTIPLE = 64
"""Numbers in two of the longest vectors (512 bits) of the shortest type that kernels round in (BF16): they take two at
a time."""


def padded_rows(max_batch_size: int) -> int:
    """Rows of every batch."""
    return -(-max_batch_size // ROWS_MULTIPLE) * ROWS_MULTIPLE


def alone_because(config: ModelConfig, threads: int) -> str:
    """Why a model's rows can only run one by one; "" when a padded batch may do.

    threads  that compute one tensor; 1 for a GPU, where none is cut
    """
    if config.fixed_shape is FixedShape.ROWS:
        return "so the parameter fixed_shape says"
    if config.max_batch_size <= 1:
        return "batches have one row"
    if threads > 1:
        return f"torch_threads is {threads}"
    if config.batch_inputs or config.batch_outputs:
        return "some of its tensors belong to the whole batch"
    states = config.sequence_batching.states if config.sequence_batching else ()
    for name, dims, loose in (
        *((spec.name, spec.dims, spec.allow_ragged_batch) for spec in config.inputs),
        *((state.input_name, state.dims, state.datatype == "BYTES") for state in states),
    ):
        if loose or -1 in dims:
            return f"the shape of '{name}' varies"
    return ""
