"""How many sequences an instance of a model holds at once.

Triton's slots are rows of a batch. Here a slot of a model whose state the mesh holds is a place for a state: a batch
takes its rows from any slots, so an instance has as many slots as their states fit into memory. A model that keeps its
state itself keeps Triton's slots, and so does one with the parameter `virtual_slots: "false"`.
"""

from __future__ import annotations

import math

from shared.contract.model_config import ModelConfig, StateSpec
from shared.contract.tensors import ELEMENT_BYTES

SLOTS_MAX = 1 << 18
"""Most slots of an instance, however small its states are."""
SPARE_OF, SPARE_MAX = 32, 256
"""One slot of so many is kept free, at most so many: as many sequences as come while others leave."""


def slots_within(config: ModelConfig, state_bytes_max: int) -> int:
    """The slots of one instance: those that the configuration sets or, for a model whose declared state has a fixed
    size and may be paged, as many as fit into so many bytes, if these are more.
    """
    batching = config.sequence_batching
    if batching is None or not (config.declares_state and config.pageable):
        return config.configured_slots
    sizes = [_bytes_of(spec) for spec in batching.states]
    if not all(sizes):
        return config.configured_slots
    return max(config.configured_slots, min(SLOTS_MAX, state_bytes_max // sum(sizes)))


def any_slot(config: ModelConfig, slots: int) -> bool:
    """Whether a batch takes its rows from any slots: there are more slots than the configuration sets, so a slot cannot
    be a row.
    """
    return slots > config.configured_slots


def spare_slots(config: ModelConfig, slots: int) -> int:
    """How many slots of an instance are to be free for sequences that come: the least recently used ones leave in time.
    None where slots are few, as in Triton: there, sequences give up their slots only when others wait.
    """
    return min(SPARE_MAX, slots // SPARE_OF) if any_slot(config, slots) else 0


def _bytes_of(spec: StateSpec) -> int:
    """Bytes of one sequence's state; 0 if its size varies."""
    if spec.datatype == "BYTES" or -1 in spec.dims:
        return 0
    return math.prod(spec.dims) * ELEMENT_BYTES[spec.datatype]
