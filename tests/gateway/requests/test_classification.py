"""Classes of an output: the largest values first, each with its index and label."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from gateway.requests.classification import CLASSES_BYTES_MAX, ELEMENTS_MAX, classified, classify
from shared.contract.errors import RequestError
from shared.contract.messages import ModelRecord
from shared.contract.tensors import Tensor, bytes_elements, from_numpy
from tests.gateway.fake_executor import running_sum


def classes(tensor: Tensor) -> list[str]:
    return [element.decode() for element in bytes_elements(tensor.raw)]


def test_equal_values_come_by_index_and_what_is_no_number_comes_last() -> None:
    floats = from_numpy("OUTPUT", np.array([1.0, np.nan, 2.0, 1.0], np.float32))

    assert ["2.000000:2", "1.000000:0", "1.000000:3", "nan:1"] == classes(classify(floats, 9, batched=False))


def test_integers_are_ordered_to_the_end_of_their_range() -> None:
    signed = from_numpy("OUTPUT", np.array([0, -128, 127, 0], np.int8))

    assert ["127:2", "0:0", "0:3", "-128:1"] == classes(classify(signed, 4, batched=False))


def test_each_row_of_a_batch_is_classified_by_itself_and_labels_may_be_few() -> None:
    rows = from_numpy("OUTPUT", np.array([[1, 5], [7, 2]], np.int32))

    found = classify(rows, 1, batched=True, labels=("cat",))

    assert ((2, 1), ["5:1", "7:0:cat"]) == (tuple(found.shape), classes(found))


@pytest.mark.parametrize(("max_batch_size", "shape"), [(0, (1,)), (1, (1, 1))])
def test_the_first_dimension_is_a_batch_if_the_model_has_batches(max_batch_size: int, shape: tuple[int, ...]) -> None:
    config = msgspec.structs.replace(running_sum(), max_batch_size=max_batch_size)
    output = from_numpy("OUTPUT", np.array([[1, 5]], np.int32))

    assert shape == tuple(classified(output, 1, ModelRecord(config, "", ("1",))).shape)


def test_a_few_bytes_of_numbers_become_no_endless_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight MiB of the largest doubles took 630 MiB; as many of the largest floats still have room."""
    assert ELEMENTS_MAX * len(f"{np.finfo(np.float32).min:f}:{ELEMENTS_MAX}") < CLASSES_BYTES_MAX
    monkeypatch.setattr("gateway.requests.classification.CLASSES_BYTES_MAX", 1000)
    largest = from_numpy("OUTPUT", np.full(4, np.finfo(np.float64).max))

    assert 3 == len(classes(classify(largest, 3, batched=False)))
    with pytest.raises(RequestError, match="classification output tensor too large"):
        classify(largest, 4, batched=False)


def test_texts_are_not_classified() -> None:
    with pytest.raises(RequestError, match="unsupported type 'BYTES'"):
        classify(from_numpy("OUTPUT", np.array(["a"])), 1, batched=False)
