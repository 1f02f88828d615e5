"""What a model adds to its configuration: missing things are filled in, contradictions refused in Triton's words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.configuration.completion import CompletableConfig, Fields
from shared.configuration.parse import parse_json

X: Fields = {"name": "X", "data_type": "TYPE_FP32", "dims": [4]}


def completable(config: Fields) -> CompletableConfig:
    return CompletableConfig(json.dumps(config))


def test_what_is_missing_is_filled_in() -> None:
    config = completable(
        {
            "name": "m",
            "max_batch_size": 0,
            "input": [{"name": "X", "data_type": "TYPE_INVALID", "dims": []}],
        }
    )

    config.set_max_batch_size(8)
    config.set_dynamic_batching()
    config.add_input(X)
    config.add_input({"name": "Y", "data_type": "TYPE_BOOL", "dims": (1, -1), "optional": True})
    config.add_output({"name": "Z", "data_type": "TYPE_STRING", "dims": [1]})
    config.set_model_transaction_policy({"decoupled": False})

    assert {
        "name": "m",
        "max_batch_size": 8,
        "input": [X, {"name": "Y", "data_type": "TYPE_BOOL", "dims": [1, -1], "optional": True}],
        "output": [{"name": "Z", "data_type": "TYPE_STRING", "dims": [1]}],
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": False},
    } == config.as_dict()


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
    config = completable({"name": "m", "max_batch_size": 4, "dynamic_batching": {"preserve_ordering": True}})
    for _ in range(2):
        for tensor in given_tensors:
            config.add_input(tensor)
        config.set_max_batch_size(4)
        config.set_dynamic_batching()

        assert given_tensors == config.as_dict().get("input", [])
        assert {"preserve_ordering": True} == config.as_dict()["dynamic_batching"]


WHERE = "in auto-complete-config function for model 'm'"


CONTRADICTIONS: list[tuple[Callable[[CompletableConfig], None], str]] = [
    (
        lambda config: config.set_max_batch_size(2),
        f"configuration specified max_batch_size 4, but {WHERE} specified max_batch_size 2",
    ),
    (
        lambda config: completable(config.as_dict() | {"sequence_batching": {}}).set_dynamic_batching(),
        (
            "Configuration specified scheduling_choice as 'sequence_batching', but auto-complete-config function "
            "for model 'm' tries to set scheduling_choice as 'dynamic_batching'"
        ),
    ),
    (
        lambda config: completable(config.as_dict() | {"ensemble_scheduling": {}}).set_dynamic_batching(),
        (
            "Configuration specified scheduling_choice as 'ensemble_scheduling', but auto-complete-config function "
            "for model 'm' tries to set scheduling_choice as 'dynamic_batching'"
        ),
    ),
    (
        lambda config: config.add_input(X | {"colour": 1}),
        f"input 'X' {WHERE} contains property other than 'name', 'data_type', 'dims' and 'optional'.",
    ),
    (
        lambda config: config.add_output(X | {"optional": True}),
        f"output 'X' {WHERE} contains property other than 'name', 'data_type' and 'dims'.",
    ),
    (
        lambda config: config.add_input({"data_type": "TYPE_FP32", "dims": [4]}),
        f"input {WHERE} is missing 'name' property.",
    ),
    (
        lambda config: config.add_output({"name": "X", "dims": [4]}),
        f"output 'X' {WHERE} is missing 'data_type' property.",
    ),
    (
        lambda config: config.add_input({"name": "X", "data_type": "TYPE_FP32"}),
        f"input 'X' {WHERE} is missing 'dims' property.",
    ),
    (
        lambda config: config.add_input(X | {"data_type": "TYPE_INT8"}),
        ("unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'X', model provides TYPE_INT8"),
    ),
    (
        lambda config: config.add_input(X | {"dims": [5]}),
        "model 'm', tensor 'X': the model expects dims [5] but the model configuration specifies dims [4]",
    ),
    (
        lambda config: config.add_input(X | {"optional": True}),
        ("model 'm', tensor 'X': the model expects optional True but the model configuration specifies optional False"),
    ),
    (
        lambda config: config.set_model_transaction_policy({"coupled": True}),
        f"model transaction property {WHERE} contains property other than 'decoupled'.",
    ),
    (
        lambda config: config.set_model_transaction_policy({"decoupled": True}),
        ("trying to change decoupled property in auto-complete-config for model 'm', which is already set to 'False'."),
    ),
]


@pytest.mark.parametrize("dims", [16, "16", np.int64(16), (16,), np.array([16])])
def test_one_dimension_needs_no_list(dims: Any) -> None:
    config = CompletableConfig('{"name": "m"}')

    config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": dims})

    assert [16] == list(parse_json(config.to_json()).output[0].dims)


@pytest.mark.parametrize(("add", "message"), CONTRADICTIONS)
def test_contradiction_is_refused_and_changes_nothing(add: Callable[[CompletableConfig], None], message: str) -> None:
    config = completable(
        {
            "name": "m",
            "max_batch_size": 4,
            "input": [X | {"optional": False}],
            "model_transaction_policy": {"decoupled": False},
        }
    )
    before = config.to_json()

    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        add(config)

    assert before == config.to_json()
