"""Makes ids for sequences that the client did not name.

Such sequences exist in the mesh's dialect of implicit starts (docs/triton/dialect.md) and in iterative models
(triton-spec 1.10).
"""

from __future__ import annotations

import uuid

from gateway.requests.admission import wants_integer_id
from shared.contract.model_config import ModelConfig


def new_session(config: ModelConfig) -> int | str:
    """An id that no other sequence has: a UUID; for a model with an integer CORRID control a random positive int64.

    Triton's own ids of iterative sequences are integers: such a model gets one unless its control is a string.
    """
    fresh = uuid.uuid4()
    return (fresh.int >> 65) | 1 if wants_integer_id(config) or _is_iterative(config) else str(fresh)


def _is_iterative(config: ModelConfig) -> bool:
    batching = config.sequence_batching
    return batching is not None and batching.iterative and batching.correlation_id is None
