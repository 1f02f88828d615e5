"""Typed contents become the same bytes as numpy's, or an error in Triton's words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gateway.grpc.contents import FIELDS, pack_contents
from gateway.grpc.pb import pb
from shared.contract.errors import Code, RequestError
from shared.contract.tensors import NUMPY_TYPE, Tensor, to_numpy

NUMERIC = [(field, datatype) for field, carried in FIELDS.items() for datatype in carried if datatype != "BYTES"]


def contents(**fields: Any) -> Any:
    return pb.InferTensorContents(**fields)


@pytest.mark.parametrize(("field", "datatype"), NUMERIC)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_every_number_comes_out_as_numpy_would_write_it(field: str, datatype: str, data: st.DataObject) -> None:
    array = data.draw(arrays(NUMPY_TYPE[datatype], st.integers(1, 20)))

    raw = pack_contents(contents(**{field: array.tolist()}), datatype, "INPUT", "m")

    assert array.tobytes() == raw


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=20))
def test_byte_strings_get_their_length_prefix(elements: list[bytes]) -> None:
    raw = pack_contents(contents(bytes_contents=elements), "BYTES", "INPUT", "m")

    assert elements == to_numpy(Tensor("INPUT", "BYTES", (len(elements),), raw)).tolist()


@pytest.mark.parametrize("datatype", ["INT8", "UINT16", "FP16", "BF16", "FP64", "BYTES", "BOOL"])
def test_no_contents_are_an_empty_tensor(datatype: str) -> None:
    assert pack_contents(contents(), datatype, "INPUT", "m") == b""


@pytest.mark.parametrize(
    ("fields", "datatype", "message"),
    [
        ({"fp32_contents": [1.0]}, "INT32", "of type 'FP32', expected datatype 'INT32'"),
        ({"int_contents": [1]}, "UINT8", "of type 'INT32', expected datatype 'UINT8'"),
        ({"uint_contents": [1]}, "INT8", "of type 'UINT32', expected datatype 'INT8'"),
        ({"fp32_contents": [1.0]}, "FP16", "of type 'FP32', expected datatype 'FP16'"),
        ({"uint_contents": [1]}, "BF16", "of type 'UINT32', expected datatype 'BF16'"),
        ({"bytes_contents": [b"1"]}, "INT32", "of type 'BYTES', expected datatype 'INT32'"),
        ({"fp32_contents": [1.0], "int64_contents": [1]}, "INT32", "of type 'INT64', expected datatype 'INT32'"),
    ],
)
def test_a_field_of_another_type_is_refused(fields: dict[str, Any], datatype: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        pack_contents(contents(**fields), datatype, "INPUT", "m")

    assert caught.value.message == f"unexpected explicit tensor data for input tensor 'INPUT' for model 'm' {message}"
    assert caught.value.code is Code.INVALID_ARG


@pytest.mark.parametrize("second", [{"fp32_contents": [1.0]}, {"int64_contents": [1]}, {"bytes_contents": [b"1"]}])
def test_a_second_field_is_refused_whatever_its_type(second: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        pack_contents(contents(int_contents=[1], **second), "INT32", "INPUT", "m")

    assert caught.value.message == (
        "unexpected explicit tensor data for input tensor 'INPUT' for model 'm', binary data was already supplied."
    )


@pytest.mark.parametrize(
    ("field", "values", "datatype"),
    [
        ("int_contents", [1, 128], "INT8"),
        ("int_contents", [-129], "INT8"),
        ("int_contents", [40000], "INT16"),
        ("uint_contents", [256], "UINT8"),
        ("uint_contents", [1 << 16], "UINT16"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_rather_than_cut(field: str, values: list[int], datatype: str) -> None:
    with pytest.raises(RequestError, match=f"out of range for input tensor 'INPUT' .* '{datatype}'"):
        pack_contents(contents(**{field: values}), datatype, "INPUT", "m")
