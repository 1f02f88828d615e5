"""The wire form of text tensors."""

from __future__ import annotations

import numpy as np
import pytest

from shared.contract.tensors import bytes_elements, from_numpy, pack_bytes, to_numpy


def test_arrays_of_strings_of_any_rank_become_bytes_row_by_row() -> None:
    array = np.array([["a", "bc"], ["", "d"]], np.object_)

    tensor = from_numpy("TEXT", array)

    assert ("BYTES", (2, 2)) == (tensor.datatype, tuple(tensor.shape))
    assert [b"a", b"bc", b"", b"d"] == list(bytes_elements(bytes(tensor.raw)))
    assert [[b"a", b"bc"], [b"", b"d"]] == to_numpy(tensor).tolist()


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 6])
def test_a_text_tensor_that_ends_inside_an_element_is_refused(cut: int) -> None:
    """The last element's length says more than is there, though not more than the whole tensor has."""
    raw = pack_bytes([b"abcdefgh", b"xyz"])

    with pytest.raises(ValueError, match="incomplete string"):
        list(bytes_elements(raw[:-cut]))
