"""Errors, tokens and tensors of the client, compared with what the mesh says and reads."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import seqmesh_client
from gateway.grpc.codec import decode_request, encode_stream_error
from gateway.grpc.metadata import CallMetadata
from gateway.requests.regions import NO_REGIONS
from seqmesh_client import REASONS, NeverSeen, NoAnswer, SeqmeshError, SequenceGone, StepRefused, TryLater, WrongToken
from seqmesh_client.token import Place
from seqmesh_client.wire import Array, StepOutputs, StepRequest, from_answer, message_of, pb, told_by
from shared.contract.errors import OUTCOMES, Code, Reason, Retry, SequenceError, UnavailableError


def test_every_reason_of_the_mesh_has_a_class_of_its_own_with_a_remedy() -> None:
    assert set(Reason) == REASONS.keys()
    assert len(set(REASONS.values())) == len(REASONS)
    for reason, kind in REASONS.items():
        assert kind.remedy
        assert kind.__name__ in seqmesh_client.__all__
        assert (OUTCOMES[reason].retry is Retry.START) == issubclass(kind, SequenceGone)
        # A late step, too, is repeated: it carries its number.
        assert (OUTCOMES[reason].retry is Retry.SAME or reason == Reason.LATE) == issubclass(kind, TryLater)


def test_every_error_has_a_remedy() -> None:
    kinds: list[type[SeqmeshError]] = list(SeqmeshError.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
        assert kind.remedy, kind
    assert "the model's text (Correct what" in str(StepRefused("the model's text\n"))


@pytest.mark.parametrize("reason", list(Reason))
def test_an_error_of_a_stream_becomes_the_class_of_its_reason(reason: Reason) -> None:
    told = told_by(encode_stream_error(SequenceError("so it is", reason, 7), "3", "model"))

    assert isinstance(told.content, REASONS[reason])
    assert ("3", True, "so it is", 7, False) == (
        told.request_id, told.final, told.content.text, told.content.last_step, told.content.counted
    )  # fmt: skip


def test_words_of_a_newer_mesh_are_judged_by_its_advice() -> None:
    later = told_by(encode_stream_error(SequenceError("", "tomorrow", 1, Code.UNAVAILABLE), "1", "m")).content
    never = told_by(encode_stream_error(SequenceError("", "tomorrow", 1, Code.INVALID_ARG), "1", "m")).content

    assert isinstance(later, TryLater)
    assert isinstance(never, StepRefused)
    assert not isinstance(never, TryLater)
    assert "tomorrow" == never.reason


def test_a_failure_of_an_accepted_request_counts_and_is_not_repeated() -> None:
    error = UnavailableError("the request's time is over")
    error.accepted = True
    told = told_by(encode_stream_error(error, "1", "m")).content

    assert isinstance(told, StepRefused)
    assert told.counted
    assert not isinstance(told, TryLater)


@pytest.mark.parametrize("error", [NoAnswer("nobody spoke"), NeverSeen("who?", code="INVALID_ARG", last_step=3)])
def test_an_error_is_the_same_behind_a_pool_of_processes(error: SeqmeshError) -> None:
    """Pools pickle what their workers raise."""
    read = pickle.loads(pickle.dumps(error))

    assert (str(error), vars(error)) == (str(read), vars(read))
    assert 1 == str(read).count(error.remedy)


# -- tokens -----------------------------------------------------------------------------------------------------------

NO_METADATA = CallMetadata({})
PLACES = st.builds(
    Place,
    st.text(max_size=50),
    st.text(max_size=5),
    st.integers(1, (1 << 64) - 1) | st.text(),
    st.integers(0, 1 << 40),
    st.from_regex(r"(\d+-\d+\.\d+)?", fullmatch=True),
    st.booleans(),
)


@given(PLACES)
def test_a_token_is_a_short_word_that_names_its_place(place: Place) -> None:
    token = place.token()

    assert place == Place.of_token(token)
    assert set(token) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


@given(PLACES, st.data())
def test_a_token_that_was_changed_or_cut_is_refused(place: Place, data: st.DataObject) -> None:
    token = place.token()
    at = data.draw(st.integers(0, len(token) - 1))
    # The last character may hold bits that mean nothing.
    other = data.draw(st.characters(codec="ascii").filter(lambda one: one != token[at]))
    spoilt = data.draw(st.sampled_from([token[:at], token[:at] + other + token[at + 1 :]]))
    try:
        read = Place.of_token(spoilt)
    except WrongToken:
        return
    assert (place, len(token) - 1) == (read, at)


@pytest.mark.parametrize(
    "token", ["", ".", "sm1.", "sm1", "sm2.AAAA", "sm1.AAAA", "sm1.ä", "sm1." + "A" * 4000, None, b"sm1.AAAA", 7]
)
def test_what_is_no_token_is_refused(token: Any) -> None:
    with pytest.raises(WrongToken, match="token"):
        Place.of_token(token)


@pytest.mark.parametrize(
    "text",
    ["5", "[[", "[" * 100_000, '["sum"]']
    + [json.dumps(["sum", "", sequence, 1, "", False]) for sequence in (None, 1.5, ["me"], 1 << 64)]
    + [json.dumps(["sum", "", "me", answered, "", False]) for answered in (None, "one", 1.5, [1], -1)]
    + ['[5, "", "me", 1, "", false]', '["sum", null, "me", 1, "", false]'],
)
def test_a_token_whose_checksum_is_right_and_that_names_no_place_is_refused_as_one(text: str) -> None:
    raw = zlib.crc32(text.encode()).to_bytes(4) + text.encode()

    with pytest.raises(WrongToken, match="the token cannot be read"):
        Place.of_token("sm1." + base64.urlsafe_b64encode(raw).decode().rstrip("="))


def test_a_token_that_was_read_from_a_file_with_its_line_s_end_is_as_good() -> None:
    place = Place("sum", "", "me", 1)

    assert place == Place.of_token(f"{place.token()}\r\n")


# -- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "datatype", "raw"),
    [
        (np.array([[1, 2]], np.int32), "INT32", b"\1\0\0\0\2\0\0\0"),
        (np.array([[1, 2]], ">i4"), "INT32", b"\1\0\0\0\2\0\0\0"),
        (np.array([[1, 2], [3, 4]], np.uint8).T, "UINT8", b"\1\3\2\4"),
        (np.array([True, False]), "BOOL", b"\1\0"),
        (np.array([1.0], ml_dtypes.bfloat16), "BF16", b"\x80\x3f"),
        (np.array([b"ab", b""], np.object_), "BYTES", b"\2\0\0\0ab\0\0\0\0"),
        (np.array(["ä"]), "BYTES", b"\2\0\0\0\xc3\xa4"),
        (np.array([], np.object_), "BYTES", b""),
        (np.zeros((0, 3), np.float32), "FP32", b""),
    ],
)
def test_tensors_are_read_by_the_mesh_as_they_are_meant(array: Array, datatype: str, raw: bytes) -> None:
    step = StepRequest({"X": array}, ("Y",), last=True)
    message = from_answer(message_of(step, model="m", version="3", sequence="me", number=2), 4)
    call = decode_request(message, NO_METADATA, NO_REGIONS)

    (tensor,) = call.inputs
    assert ("X", datatype, tuple(array.shape), raw) == (tensor.name, tensor.datatype, tensor.shape, bytes(tensor.raw))
    assert ("m", "3", "2", "me", False, True, 2, ("Y",), 4, True) == (
        call.model, call.version, call.request_id, call.correlation_id, call.start, call.end, call.expected_step,
        call.outputs, call.first_answer, call.wants_empty_final,
    )  # fmt: skip


def test_no_output_can_be_written_over() -> None:
    response = pb.ModelInferResponse()
    for name, datatype, raw in (
        ("numbers", "FP32", b"\0\0\0\0"),
        ("texts", "BYTES", b"\2\0\0\0hi"),
        ("none", "FP32", b""),
    ):
        response.outputs.add(name=name, datatype=datatype, shape=[1 if raw else 0])
        response.raw_output_contents.append(raw)

    outputs = StepOutputs(response)

    assert [b"hi"] == outputs["texts"].tolist()
    assert [False] * 3 == [array.flags.writeable for array in outputs.values()]


@pytest.mark.parametrize("number", [1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_an_id_of_64_bits_arrives_as_it_was_given_and_the_first_step_begins_the_sequence(number: int) -> None:
    step = StepRequest({"X": np.zeros(1, np.int32)}, (), last=False)
    call = decode_request(message_of(step, model="m", version="", sequence=number, number=1), NO_METADATA, NO_REGIONS)

    assert (number, True, False) == (call.correlation_id, call.start, call.end)


def test_an_array_without_a_type_of_the_protocol_is_refused() -> None:
    with pytest.raises(TypeError, match="complex128"):
        message_of(StepRequest({"X": np.zeros(1, complex)}), model="m", version="", sequence=1, number=1)
