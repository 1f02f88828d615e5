"""Ids for sequences whose client named none (the dialect of DESIGN 9)."""

from __future__ import annotations

import uuid

from gateway.admission import wants_integer_id
from shared.model_config.values import ModelConfig


def new_session(config: ModelConfig) -> int | str:
    """An id that no other sequence has: a UUID; for a model with an integer CORRID control a random positive int64."""
    fresh = uuid.uuid4()
    return (fresh.int >> 65) | 1 if wants_integer_id(config) else str(fresh)
