"""Which stateless requests may share a batch."""

from __future__ import annotations

from typing import Any

from shared.contract.batch_shape import ShapeKeys, rows_of
from shared.contract.model_config import ModelConfig, TensorSpec
from shared.contract.tensors import Tensor

FIXED, VARIABLE = TensorSpec("FIXED", "INT8", (2,)), TensorSpec("VARIABLE", "INT8", (-1,))


def config(*inputs: TensorSpec, max_batch_size: int = 4) -> ModelConfig:
    return ModelConfig("m", "python", "", max_batch_size, inputs, ())


def given(**shapes: tuple[int, ...]) -> list[Tensor]:
    return [Tensor(name, "INT8", shape, b"") for name, shape in shapes.items()]


def test_where_all_shapes_are_fixed_all_share_one() -> None:
    keys = ShapeKeys(config(FIXED))

    assert (None, "") == (keys.of(given(FIXED=(1, 2))), keys.text_of(given(FIXED=(3, 2))))


def test_variable_shapes_have_to_be_equal_but_for_their_rows_and_in_any_order() -> None:
    keys = ShapeKeys(config(FIXED, VARIABLE))
    key = keys.of(given(FIXED=(1, 2), VARIABLE=(1, 5)))

    assert key is not None
    assert key == keys.of(given(VARIABLE=(3, 5), FIXED=(3, 2)))
    assert key != keys.of(given(FIXED=(1, 2), VARIABLE=(1, 6)))
    texts = {keys.text_of(given(FIXED=(1, 2), VARIABLE=(rows, size))) for rows in (1, 2) for size in (5, 6)}
    assert 2 == len(texts - {""})


def test_without_a_batch_dimension_the_first_one_counts() -> None:
    keys = ShapeKeys(config(VARIABLE, max_batch_size=0))

    assert keys.of(given(VARIABLE=(1,))) != keys.of(given(VARIABLE=(2,)))
    assert 1 == rows_of(config(VARIABLE, max_batch_size=0), given(VARIABLE=(7,)))
    assert 7 == rows_of(config(VARIABLE), given(VARIABLE=(7, 2)))
    # Admitted for another load of the model: the engine refuses it.
    assert 1 == rows_of(config(VARIABLE), given(VARIABLE=()))


def test_ragged_inputs_may_differ_and_where_some_are_optional_all_bring_the_same() -> None:
    def spec(name: str, **rest: Any) -> TensorSpec:
        return TensorSpec(name, "INT8", (-1,), **rest)

    ragged = ShapeKeys(config(spec("VARIABLE", allow_ragged_batch=True)))
    assert ragged.of(given(VARIABLE=(1, 5))) is None
    optional = ShapeKeys(config(FIXED, TensorSpec("MORE", "INT8", (2,), optional=True)))
    assert optional.of(given(FIXED=(1, 2))) == optional.of(given(FIXED=(3, 2)))
    assert optional.of(given(FIXED=(1, 2))) != optional.of(given(FIXED=(1, 2), MORE=(1, 2)))
