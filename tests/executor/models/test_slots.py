"""Slots by memory: how many sequences an instance holds."""

from __future__ import annotations

import pytest

from executor.models.slots import SLOTS_MAX, SPARE_MAX, slots_within, spare_slots
from shared.contract.model_config import Direct, ModelConfig, Oldest, SequenceBatching, StateSpec

STATES = (StateSpec("h", "h", "FP32", (2, 16)), StateSpec("n", "n", "INT64", (1,)))
"""136 bytes."""


def config(*states: StateSpec, strategy: Direct | Oldest | None = None, **parameters: str) -> ModelConfig:
    batching = SequenceBatching(strategy or Direct(), 1000, states=states)
    return ModelConfig("m", "python", "", 4, (), (), sequence_batching=batching, parameters=parameters)


@pytest.mark.parametrize("strategy", [Direct(), Oldest(4)])
def test_as_many_as_their_states_fit(strategy: Direct | Oldest) -> None:
    model = config(*STATES, strategy=strategy)

    assert [4, 4, 10, SLOTS_MAX] == [slots_within(model, size) for size in (0, 136 * 3, 136 * 10 + 135, 1 << 40)]


def test_a_state_of_bf16_takes_two_bytes_a_number() -> None:
    model = config(StateSpec("h", "h", "BF16", (2, 16)))

    assert 10 == slots_within(model, 64 * 10)


@pytest.mark.parametrize(
    "model",
    [
        config(),
        config(*STATES, virtual_slots="false"),
        config(*STATES, StateSpec("v", "v", "FP32", (-1,))),
        config(*STATES, StateSpec("t", "t", "BYTES", (1,))),
        ModelConfig("m", "python", "", 4, (), ()),
    ],
    ids=["own state", "virtual_slots", "variable shape", "strings", "stateless"],
)
def test_other_models_have_the_slots_of_their_configuration(model: ModelConfig) -> None:
    assert model.configured_slots == slots_within(model, 1 << 40)


def test_a_few_slots_are_kept_free_where_they_are_places_for_states_and_many() -> None:
    assert [0, 0, 2, SPARE_MAX] == [spare_slots(config(*STATES), slots) for slots in (4, 31, 64, SLOTS_MAX)]
    assert 0 == spare_slots(
        ModelConfig("m", "python", "", 64, (), (), sequence_batching=SequenceBatching(Direct(), 1)), 64
    )
