"""The wire form of text tensors, and the form in which tensors are told in the log."""

from __future__ import annotations

import numpy as np
import pytest

from shared.contract.tensors import (
    ELEMENT_BYTES,
    FLOATS,
    Tensor,
    as_float,
    bytes_elements,
    described,
    float_bytes,
    from_numpy,
    pack_bytes,
    to_numpy,
)


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


@pytest.mark.parametrize("shape", [(0,), (3,), (2, 2)])
def test_a_text_tensor_with_another_number_of_elements_than_its_shape_is_refused(shape: tuple[int, ...]) -> None:
    """One element is not taken for as many as are missing."""
    with pytest.raises(ValueError, match="reshape"):
        to_numpy(Tensor("TEXT", "BYTES", shape, pack_bytes([b"a"])))


@pytest.mark.parametrize("datatype", sorted(FLOATS))
def test_numbers_with_a_fraction_become_a_tensor_of_each_such_datatype(datatype: str) -> None:
    numbers = np.array([[0.0, -1.5], [0.25, 96.0]])

    tensor = Tensor("NUMBERS", datatype, (2, 2), float_bytes(datatype, numbers))

    assert numbers.size * ELEMENT_BYTES[datatype] == len(tensor.raw)
    assert numbers.tolist() == as_float(tensor).tolist()


def test_the_log_tells_the_numbers_that_a_tensor_holds() -> None:
    told = {
        "A": from_numpy("A", np.array([[3.0, -4.0]], np.float32)),
        # Three, and minus four, without the lower half of their bits.
        "B": Tensor("B", "BF16", (2,), b"\x40\x40\x80\xc0"),
        "C": Tensor("C", "INT8", (0,), b""),
        "D": from_numpy("D", np.array(["ab"])),
    }

    assert (
        "A FP32 [1,2] mean -0.5 norm 5; B BF16 [2] mean -0.5 norm 5; C INT8 [0] mean 0 norm 0; D BYTES [1] 6 bytes"
        == described(told)
    )


def test_every_datatype_of_a_fixed_size_has_its_size() -> None:
    sizes = {f"{kind}{8 * size}": size for kind in ("INT", "UINT") for size in (1, 2, 4, 8)}

    assert {**sizes, "BOOL": 1, "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8} == ELEMENT_BYTES


def test_numbers_whose_bytes_stand_the_other_way_round_are_not_taken_for_others() -> None:
    """Whoever hands out an array of a model's turns it round first."""
    with pytest.raises(KeyError):
        from_numpy("N", np.array([1], ">i4"))
