"""What a model adds to its configuration: missing things are filled in, contradictions refused in Triton's words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.configuration.completion import (
    add_tensor,
    set_dynamic_batching,
    set_max_batch_size,
    set_transaction_policy,
)

Fields = dict[str, Any]
X: Fields = {"name": "X", "data_type": "TYPE_FP32", "dims": [4]}


def test_what_is_missing_is_filled_in() -> None:
    config: Fields = {
        "name": "m",
        "max_batch_size": 0,
        "input": [{"name": "X", "data_type": "TYPE_INVALID", "dims": []}],
    }

    set_max_batch_size(config, 8)
    set_dynamic_batching(config)
    add_tensor(config, "input", X)
    add_tensor(config, "input", {"name": "Y", "data_type": "TYPE_BOOL", "dims": (1, -1), "optional": True})
    add_tensor(config, "output", {"name": "Z", "data_type": "TYPE_STRING", "dims": [1]})
    set_transaction_policy(config, {"decoupled": False})

    assert {
        "name": "m",
        "max_batch_size": 8,
        "input": [X, {"name": "Y", "data_type": "TYPE_BOOL", "dims": [1, -1], "optional": True}],
        "output": [{"name": "Z", "data_type": "TYPE_STRING", "dims": [1]}],
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": False},
    } == config


tensors = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["a", "b", "c"]),
        "data_type": st.sampled_from(["TYPE_FP32", "TYPE_STRING"]),
        "dims": st.lists(st.integers(-1, 3), min_size=1, max_size=2),
    },
    optional={"optional": st.booleans()},
)


@given(st.lists(tensors, max_size=5, unique_by=lambda tensor: tensor["name"]))
def test_repeating_what_is_there_changes_nothing(given_tensors: list[Fields]) -> None:
    config: Fields = {"name": "m", "max_batch_size": 4, "dynamic_batching": {"preserve_ordering": True}}
    for _ in range(2):
        for tensor in given_tensors:
            add_tensor(config, "input", tensor)
        set_max_batch_size(config, 4)
        set_dynamic_batching(config)

        assert given_tensors == config.get("input", [])
        assert {"preserve_ordering": True} == config["dynamic_batching"]


WHERE = "in auto-complete-config function for model 'm'"


CONTRADICTIONS: list[tuple[Callable[[Fields], None], str]] = [
    (
        lambda config: set_max_batch_size(config, 2),
        f"configuration specified max_batch_size 4, but {WHERE} specified max_batch_size 2",
    ),
    (
        lambda config: set_dynamic_batching(config | {"sequence_batching": {}}),
        (
            "Configuration specified scheduling_choice as 'sequence_batching', but auto-complete-config function "
            "for model 'm' tries to set scheduling_choice as 'dynamic_batching'"
        ),
    ),
    (
        lambda config: set_dynamic_batching(config | {"ensemble_scheduling": {}}),
        (
            "Configuration specified scheduling_choice as 'ensemble_scheduling', but auto-complete-config function "
            "for model 'm' tries to set scheduling_choice as 'dynamic_batching'"
        ),
    ),
    (
        lambda config: add_tensor(config, "input", X | {"colour": 1}),
        f"input 'X' {WHERE} contains property other than 'name', 'data_type', 'dims' and 'optional'.",
    ),
    (
        lambda config: add_tensor(config, "output", X | {"optional": True}),
        f"output 'X' {WHERE} contains property other than 'name', 'data_type' and 'dims'.",
    ),
    (
        lambda config: add_tensor(config, "input", {"data_type": "TYPE_FP32", "dims": [4]}),
        f"input {WHERE} is missing 'name' property.",
    ),
    (
        lambda config: add_tensor(config, "output", {"name": "X", "dims": [4]}),
        f"output 'X' {WHERE} is missing 'data_type' property.",
    ),
    (
        lambda config: add_tensor(config, "input", {"name": "X", "data_type": "TYPE_FP32"}),
        f"input 'X' {WHERE} is missing 'dims' property.",
    ),
    (
        lambda config: add_tensor(config, "input", X | {"data_type": "TYPE_INT8"}),
        ("unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'X', model provides TYPE_INT8"),
    ),
    (
        lambda config: add_tensor(config, "input", X | {"dims": [5]}),
        "model 'm', tensor 'X': the model expects dims [5] but the model configuration specifies dims [4]",
    ),
    (
        lambda config: add_tensor(config, "input", X | {"optional": True}),
        ("model 'm', tensor 'X': the model expects optional True but the model configuration specifies optional False"),
    ),
    (
        lambda config: set_transaction_policy(config, {"coupled": True}),
        f"model transaction property {WHERE} contains property other than 'decoupled'.",
    ),
    (
        lambda config: set_transaction_policy(config, {"decoupled": True}),
        ("trying to change decoupled property in auto-complete-config for model 'm', which is already set to 'False'."),
    ),
]


@pytest.mark.parametrize(("add", "message"), CONTRADICTIONS)
def test_contradiction_is_refused_and_changes_nothing(add: Callable[[Fields], None], message: str) -> None:
    config: Fields = {
        "name": "m",
        "max_batch_size": 4,
        "input": [X | {"optional": False}],
        "model_transaction_policy": {"decoupled": False},
    }
    before = repr(config)

    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        add(config)

    assert before == repr(config)
