"""The python engine: Triton's `model.py` runs unchanged, and its declared state survives what its process does not."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from executor.engine.base import ChecksReadiness, Engine, Row, RowError, RowResult
from executor.engine.python import model, outputs
from executor.engine.python.engine import PythonEngine
from executor.engine.python.model import PACKAGE_PREFIX
from executor.workers.answers import answer
from executor.workers.engine_thread import EngineThread
from shared.contract.errors import Code, LoadError
from shared.contract.ids import ExecutorId
from shared.contract.messages import decode_reply, encode
from shared.contract.model_config import ModelConfig, StateSpec, TensorSpec
from shared.contract.tensors import ELEMENT_BYTES, Tensor, pack_bytes, to_numpy
from tests.executor.engine.model_workshop import (
    CONTROLS,
    Workshop,
    array,
    controls,
    error,
    fp32,
    plain_config,
    raws,
    results,
    sequence_config,
    wire,
)

SUM = """
    class TritonPythonModel:
        def execute(self, requests):
            responses = []
            for request in requests:
                value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
                if value.flat[0] == 13:
                    raise RuntimeError("unlucky")
                total = pb_utils.get_input_tensor_by_name(request, "SUM").as_numpy()
                total += value
                tensors = [pb_utils.Tensor("OUTPUT", total)]
                if value.flat[0] == 7:
                    tensors.append(pb_utils.Tensor("SUM_NEXT", total.astype(np.float32)))
                elif value.flat[0] == 8:
                    tensors.append(pb_utils.Tensor("SUM_NEXT", np.concatenate([total, total], 1)))
                elif value.flat[0] == 9:
                    error = pb_utils.TritonError("no nines", pb_utils.TritonError.INVALID_ARG)
                    responses.append(pb_utils.InferenceResponse(error=error))
                    continue
                elif value.flat[0] != 0:
                    tensors.append(pb_utils.Tensor("SUM_NEXT", total))
                responses.append(pb_utils.InferenceResponse(tensors))
            return responses
"""


def sum_config(*, direct: bool = False, max_batch_size: int = 8) -> ModelConfig:
    return sequence_config(
        "sum",
        "python",
        inputs=[TensorSpec("INPUT", "INT32", (1,))],
        outputs=[TensorSpec("OUTPUT", "INT32", (1,))],
        states=[StateSpec("SUM", "SUM_NEXT", "INT32", (1,))],
        direct=direct,
        max_batch_size=max_batch_size,
    )


def sum_row(slot: int, value: int, *, start: bool = False) -> Row:
    return Row({"INPUT": wire("INPUT", [[value]], "<i4")}, slot=slot, start=start)


def sums(engine: Engine, *rows: Row) -> list[int]:
    return [array(result, "OUTPUT").item() for result in results(engine, rows)]


def echo(body: str, name: str = "echo") -> str:
    """A model whose `execute` makes each response by `body`, from `value` (the array of input x) and `request`."""
    return f"""
    import json

    class TritonPythonModel:
        def execute(self, requests):
            responses = []
            for request in requests:
                x = pb_utils.get_input_tensor_by_name(request, "x")
                {body}
            return responses
    """


def echo_config(
    datatype: str = "FP32", dims: tuple[int, ...] = (2,), output: str = "FP32", max_batch_size: int = 8
) -> ModelConfig:
    return plain_config(
        "echo",
        "python",
        inputs=[TensorSpec("x", datatype, dims)],
        outputs=[TensorSpec("y", output, dims)],
        max_batch_size=max_batch_size,
    )


def test_declared_state_comes_as_an_input_and_moves_by_an_output(workshop: Workshop) -> None:
    workshop.python("sum", SUM)
    engine = workshop.load(sum_config())

    assert [1, 2] == sums(engine, sum_row(0, 1, start=True), sum_row(5, 2, start=True))
    assert [4, 4] == sums(engine, sum_row(5, 2), sum_row(0, 3))
    assert [1] == sums(engine, sum_row(5, 1, start=True))


def test_an_absent_state_output_leaves_the_state_and_a_start_makes_it_initial(workshop: Workshop) -> None:
    workshop.python("sum", SUM)
    engine = workshop.load(sum_config())
    sums(engine, sum_row(0, 5, start=True))

    assert [5] == sums(engine, sum_row(0, 0))
    assert [6] == sums(engine, sum_row(0, 1))
    sums(engine, sum_row(0, 0, start=True))
    assert [1] == sums(engine, sum_row(0, 1))


@pytest.mark.parametrize(("first", "told"), [(0, ["model 'sum' returned no 'SUM_NEXT'"]), (5, [])])
def test_the_log_names_a_state_that_the_first_answer_lacks(
    workshop: Workshop, caplog: pytest.LogCaptureFixture, first: int, told: list[str]
) -> None:
    workshop.python("sum", SUM)
    engine = workshop.load(sum_config())

    sums(engine, sum_row(0, first, start=True), sum_row(1, 0, start=True))

    assert told == [message.partition(" with its first answer")[0] for message in caplog.messages]


IN_PLACE = """
    class TritonPythonModel:
        def execute(self, requests):
            responses = []
            for request in requests:
                value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
                if value.flat[0] == 0:
                    responses.append(pb_utils.InferenceResponse([]))
                    continue
                total = pb_utils.get_input_tensor_by_name(request, "SUM").as_numpy()
                total += value
                text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
                text[0, 0] = text[0, 0] + b"x"
                if value.flat[0] == 13:
                    responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("unlucky")))
                    continue
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", total)]))
            return responses
"""


def in_place_config(*, same_buffer: bool = True) -> ModelConfig:
    return sequence_config(
        "sum",
        "python",
        inputs=[TensorSpec("INPUT", "INT32", (1,))],
        outputs=[TensorSpec("OUTPUT", "INT32", (1,))],
        states=[
            StateSpec("SUM", "SUM_NEXT", "INT32", (1,), same_buffer=same_buffer),
            StateSpec("TEXT", "TEXT_NEXT", "BYTES", (1,), same_buffer=same_buffer),
        ],
    )


@pytest.mark.parametrize("same_buffer", [True, False])
def test_what_is_written_in_place_is_the_next_state_where_input_and_output_are_one_buffer(
    workshop: Workshop, same_buffer: bool
) -> None:
    workshop.python("sum", IN_PLACE)
    engine = workshop.load(in_place_config(same_buffer=same_buffer))
    sums(engine, sum_row(0, 5, start=True), sum_row(1, 7, start=True))
    results(engine, [sum_row(0, 0)])
    assert "unlucky" == error(engine, sum_row(0, 13)).message

    first, second = results(engine, [sum_row(0, 1), sum_row(1, 1)])

    assert ([6, 8] if same_buffer else [1, 1]) == [array(result, "OUTPUT").item() for result in (first, second)]
    texts = [to_numpy(result.states["TEXT"]).item() for result in (first, second)]
    assert ([b"xx", b"xx"] if same_buffer else [b"", b""]) == texts


def test_a_state_that_is_written_in_place_may_not_become_too_large(workshop: Workshop) -> None:
    """Redis would cut the connection at its commit, ever again."""
    workshop.python("sum", IN_PLACE)
    engine = workshop.load(in_place_config(), state_value_bytes_max=5)
    sums(engine, sum_row(0, 1, start=True))

    assert "wrong state 'TEXT_NEXT': it has 6 bytes" in error(engine, sum_row(0, 1)).message
    assert "TEXT BYTES [1] 5 bytes" in engine.describe_state(0)


def test_an_output_that_no_answer_takes_fails_its_row_and_leaves_the_state_as_it_was(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of an instance could not tell of it, and would end."""
    workshop.python("sum", SUM)
    engine = workshop.load(sum_config())
    sums(engine, sum_row(0, 5, start=True))
    monkeypatch.setattr(outputs, "OUTPUT_BYTES_MAX", 3)
    assert "4 bytes: no answer takes so many" in error(engine, sum_row(0, 1)).message
    monkeypatch.undo()

    assert [7] == sums(engine, sum_row(0, 2))


def test_a_batch_gives_every_row_what_it_gets_alone_and_resumes_from_a_checkpoint(workshop: Workshop) -> None:
    workshop.python("sum", SUM)
    together, alone, other = (workshop.load(sum_config()) for _ in range(3))

    ran: list[RowResult] = []
    for step in range(3):
        rows = [sum_row(slot, slot + step + 1, start=step == 0) for slot in (3, 1, 2)]
        expected = [results(alone, [row])[0] for row in rows]
        ran = results(together, rows)
        assert list(map(raws, expected)) == list(map(raws, ran))

    other.load_states([7], [ran[0].states])
    assert sums(together, sum_row(3, 4)) == sums(other, sum_row(7, 4))
    assert "SUM INT32 [1] mean 19 norm 19" == other.describe_state(7)


@pytest.mark.parametrize("direct", [False, True])
def test_when_execute_raises_only_the_guilty_row_fails_in_triton_s_words(workshop: Workshop, *, direct: bool) -> None:
    workshop.python("sum", SUM)
    engine = workshop.load(sum_config(direct=direct))
    sums(engine, sum_row(0, 1, start=True), sum_row(1, 2, start=True))

    fine, guilty = engine.run([sum_row(0, 1), sum_row(1, 13)], [True, True]).rows

    assert isinstance(fine, RowResult)
    assert isinstance(guilty, RowError)
    assert "INTERNAL" == guilty.code
    assert guilty.message.startswith(
        "Failed to process the request(s) for model 'sum_0_0', message: RuntimeError: unlucky\n\nAt:\n  "
    )
    assert "model.py(" in guilty.message
    assert [3, 3] == sums(engine, sum_row(0, 1), sum_row(1, 1))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "model 'sum' returned a wrong output 'SUM_NEXT': expected INT32 [1,1], got FP32 [1,1]"),
        (8, "model 'sum' returned a wrong output 'SUM_NEXT': expected INT32 [1,1], got INT32 [1,2]"),
    ],
)
def test_a_wrong_state_fails_its_row_alone(workshop: Workshop, value: int, text: str) -> None:
    workshop.python("sum", SUM)
    engine = workshop.load(sum_config())
    sums(engine, sum_row(0, 1, start=True), sum_row(1, 2, start=True))

    wrong, fine = engine.run([sum_row(0, value), sum_row(1, 1)], [True, True]).rows

    assert RowError("INTERNAL", text) == wrong
    assert isinstance(fine, RowResult)
    assert [2, 4] == sums(engine, sum_row(0, 1), sum_row(1, 1))


UNREADABLE = """
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    class TritonPythonModel:
        def execute(self, requests):
            responses = []
            for request in requests:
                value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
                total = pb_utils.get_input_tensor_by_name(request, "SUM").as_numpy() + value
                tensors = [pb_utils.Tensor("OUTPUT", total), pb_utils.Tensor("SUM_NEXT", total)]
                if value.item() == 13:
                    {body}
                else:
                    responses.append(pb_utils.InferenceResponse(tensors))
            return responses
"""


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("responses.append(pb_utils.InferenceResponse(tensors[0]))", "'Tensor' object is not iterable"),
        ("responses.append(pb_utils.InferenceResponse(1 / 0 for _ in tensors))", "ZeroDivisionError"),
        ("responses.append(pb_utils.InferenceResponse([pb_utils.Tensor(['OUTPUT'], total)]))", "unhashable type"),
        (
            "responses.append(pb_utils.InferenceResponse([pb_utils.Tensor('TEXT', np.array([[chr(0xd800)]]))]))",
            "tensor 'TEXT' is BYTES, but not all of its elements have a text: 'utf-8' codec can't encode",
        ),
        ("responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError('odd', ['no code'])))", "unhashable"),
        ("responses.append(pb_utils.InferenceResponse(error=Mute()))", "RuntimeError: no text"),
        ("raise Mute", "Mute: <its text cannot be made>"),
    ],
)
def test_a_response_that_cannot_be_read_fails_its_row_alone(workshop: Workshop, body: str, text: str) -> None:
    workshop.python("sum", UNREADABLE.format(body=body))
    config = sum_config()
    texts = TensorSpec("TEXT", "BYTES", (1,))
    engine = workshop.load(msgspec.structs.replace(config, outputs=(*config.outputs, texts)))
    sums(engine, sum_row(0, 1, start=True), sum_row(1, 2, start=True))

    fine, wrong = engine.run([sum_row(0, 1), sum_row(1, 13)], [True, True]).rows

    assert isinstance(fine, RowResult)
    assert 2 == array(fine, "OUTPUT").item()
    assert isinstance(wrong, RowError)
    assert "INTERNAL" == wrong.code
    assert text in wrong.message
    assert [3, 3] == sums(engine, sum_row(0, 1), sum_row(1, 1))


@pytest.mark.starts_processes
@pytest.mark.parametrize("own_process", [False, True])
def test_a_process_that_the_model_forks_answers_nothing(workshop: Workshop, own_process: bool) -> None:
    body = """
                import os
                if x.as_numpy().item() == 13 and os.fork() == 0:
                    raise OSError("no such program")
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x.as_numpy())]))"""
    initialize = """
        def initialize(self, args):
            import os
            os.fork()
    """
    workshop.python("echo", echo(body) + initialize)
    workshop.own_process = own_process
    engine = workshop.load(echo_config(dims=(1,)))

    values = [
        array(results(engine, [Row({"x": wire("x", [[value]])})])[0], "y").item() for value in (1, 13, 2, 13, 3, 4)
    ]

    assert [1, 13, 2, 13, 3, 4] == values


def test_a_model_may_take_the_requests_out_of_the_list(workshop: Workshop) -> None:
    workshop.python("echo", echo("responses.append(pb_utils.InferenceResponse([pb_utils.Tensor('y', x.as_numpy())]))"))
    path = workshop.version_dir("echo") / "model.py"
    taking = "while requests:\n            request = requests.pop(0)"
    path.write_text(path.read_text().replace("for request in requests:", taking))

    first, second = results(
        workshop.load(echo_config()), [Row({"x": wire("x", [[1, 2]])}), Row({"x": wire("x", [[3, 4]])})]
    )

    assert ([[1, 2]], [[3, 4]]) == (array(first, "y").tolist(), array(second, "y").tolist())


def test_an_element_of_bytes_that_is_neither_bytes_nor_a_string_is_its_text(workshop: Workshop) -> None:
    body = """
                given = np.array([["a", b"b", 5, None, 0.5]], dtype=np.object_)
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", given)]))"""
    workshop.python("echo", echo(body))
    engine = workshop.load(echo_config(dims=(-1,), output="BYTES"))

    (result,) = results(engine, [Row({"x": wire("x", [[1]])})])

    assert [[b"a", b"b", b"5", b"None", b"0.5"]] == array(result, "y").tolist()


@pytest.mark.parametrize("kind", ["np.object_", "'S2'", "'U2'", "np.dtypes.StringDType()"])
def test_an_array_of_strings_is_bytes_whichever_of_numpy_s_types_it_has(workshop: Workshop, kind: str) -> None:
    body = f"""
                given = np.array([["a", "bc"]], {kind})
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", given)]))"""
    workshop.python("echo", echo(body))
    engine = workshop.load(echo_config(dims=(-1,), output="BYTES"))

    (result,) = results(engine, [Row({"x": wire("x", [[1]])})])

    assert [[b"a", b"bc"]] == array(result, "y").tolist()


def test_a_response_with_an_error_fails_its_row_alone_with_its_code(workshop: Workshop) -> None:
    workshop.python("sum", SUM)
    engine = workshop.load(sum_config())
    sums(engine, sum_row(0, 1, start=True), sum_row(1, 2, start=True))

    wrong, fine = engine.run([sum_row(0, 9), sum_row(1, 1)], [True, True]).rows

    assert RowError("INVALID_ARG", "no nines") == wrong
    assert isinstance(fine, RowResult)
    assert [2] == sums(engine, sum_row(0, 1))


def test_a_model_without_batch_dimension_gets_state_without_one(workshop: Workshop) -> None:
    workshop.python("sum", SUM)
    engine = workshop.load(sum_config(max_batch_size=0), slots=1)
    rows = [Row({"INPUT": wire("INPUT", [4], "<i4")}, slot=0, start=start) for start in (True, False)]

    ran = [results(engine, [row])[0] for row in rows]

    assert [[4], [8]] == [array(result, "OUTPUT").tolist() for result in ran]
    assert (1,) == ran[1].states["SUM"].shape


def test_null_rows_are_requests_whose_responses_count_for_nothing(workshop: Workshop) -> None:
    """READY false, flags 0, correlation id 0, inputs of zeros in the shape of the others; the position is the slot."""
    workshop.python(
        "probe",
        """
        import json

        class TritonPythonModel:
            def execute(self, requests):
                seen = []
                for request in requests:
                    get = lambda name: pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1).tolist()
                    seen.append([get("INPUT"), get("READY"), get("START"), get("END"), get("CORRID"), request.flags(),
                                 request.correlation_id()])
                text = np.array([[json.dumps(seen)]], dtype=np.object_)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", text)]) for _ in requests]
        """,
    )
    config = sequence_config(
        "probe",
        "python",
        inputs=[TensorSpec("INPUT", "INT32", (-1,))],
        outputs=[TensorSpec("SEEN", "BYTES", (1,))],
        controls=CONTROLS,
        direct=True,
    )
    value = {"INPUT": wire("INPUT", [[5, 6]], "<i4")}
    real = Row(value, controls(start=True, end=True, corrid=42), slot=1, start=True, end=True, correlation_id=42)
    ready_false = Row({}, controls(ready=False), null=True)

    (result,) = results(workshop.load(config), [Row({}, null=True), real, ready_false])

    null = [[0, 0], [0], [0], [0], [0], 0, 0]
    assert [null, [[5, 6], [1], [1], [1], [42], 3, 42], null] == json.loads(array(result, "SEEN").item())


def test_a_bad_input_is_its_row_s_error_and_the_model_never_sees_it(workshop: Workshop) -> None:
    workshop.python("sum", SUM)
    engine = workshop.load(sum_config(direct=True))
    bad = Row({"INPUT": Tensor("INPUT", "INT32", (1, 1), b"\0")}, slot=0, start=True)

    failed, fine = engine.run([bad, sum_row(1, 1, start=True)], [True, True]).rows

    assert (
        RowError("INVALID_ARG", "input 'INPUT' of model 'sum' has 1 bytes of data, but its shape asks for 4") == failed
    )
    assert isinstance(fine, RowResult)


def test_broken_bytes_elements_are_their_row_s_error(workshop: Workshop) -> None:
    workshop.python("echo", echo("responses.append(pb_utils.InferenceResponse([pb_utils.Tensor('y', x.as_numpy())]))"))
    engine = workshop.load(echo_config("BYTES", (1,), "BYTES"))
    good = Row({"x": Tensor("x", "BYTES", (1, 1), pack_bytes(["a"]))})

    for raw, text in [(b"\5\0\0\0ab", "incomplete string element"), (pack_bytes(["a", "b"]), "has 2 elements")]:
        failed, fine = engine.run([Row({"x": Tensor("x", "BYTES", (1, 1), raw)}), good], [False] * 2).rows
        assert isinstance(failed, RowError)
        assert text in failed.message
        assert isinstance(fine, RowResult)


@pytest.mark.parametrize("datatype", [*(name for name in ELEMENT_BYTES if name != "BF16"), "BYTES"])
def test_every_datatype_passes_through_input_state_and_output_bit_by_bit(workshop: Workshop, datatype: str) -> None:
    workshop.python(
        "identity",
        """
        class TritonPythonModel:
            def execute(self, requests):
                responses = []
                for request in requests:
                    x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
                    s = pb_utils.get_input_tensor_by_name(request, "s").as_numpy()
                    responses.append(pb_utils.InferenceResponse(
                        [pb_utils.Tensor("y", s), pb_utils.Tensor("s_next", x)]))
                return responses
        """,
    )
    config = sequence_config(
        "identity",
        "python",
        inputs=[TensorSpec("x", datatype, (2,))],
        outputs=[TensorSpec("y", datatype, (2,))],
        states=[StateSpec("s", "s_next", datatype, (2,))],
    )
    engine = workshop.load(config)
    size = 2 * ELEMENT_BYTES.get(datatype, 0)
    if datatype == "BYTES":
        contents = [pack_bytes([b"", b"\xff\0"]), pack_bytes(["ab", "c"])]
    else:
        contents = [bytes([1, 0] * size)[:size] if datatype == "BOOL" else bytes(range(k, k + size)) for k in (1, 40)]
    inputs = [{"x": Tensor("x", datatype, (1, 2), raw)} for raw in contents]

    first = results(engine, [Row(given, slot=slot, start=True) for slot, given in enumerate(inputs)])
    second = results(engine, [Row(given, slot=slot) for slot, given in enumerate(inputs)])

    assert [Tensor("s", datatype, (2,), raw) for raw in contents] == [result.states["s"] for result in first]
    assert [Tensor("y", datatype, (1, 2), raw) for raw in contents] == [result.outputs[0] for result in second]


def test_bf16_goes_through_dlpack(workshop: Workshop) -> None:
    workshop.python(
        "echo",
        """
        import torch

        class TritonPythonModel:
            def execute(self, requests):
                responses = []
                for request in requests:
                    x = pb_utils.get_input_tensor_by_name(request, "x")
                    assert x.triton_dtype() == 14
                    doubled = torch.from_dlpack(x) * 2
                    responses.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("y", doubled)]))
                return responses
        """,
    )
    values = torch.tensor([[1.5, -3.25]], dtype=torch.bfloat16)
    row = Row({"x": Tensor("x", "BF16", (1, 2), values.view(torch.int16).numpy().tobytes())})

    (result,) = results(workshop.load(echo_config("BF16", (2,), "BF16")), [row])

    assert (values * 2).view(torch.int16).numpy().tobytes() == result.outputs[0].raw


def test_bf16_is_no_uint16_behind_one_either(workshop: Workshop) -> None:
    """Both are arrays of uint16 in the engine, which remembers what was right last time."""
    body = """
                import torch
                made = pb_utils.Tensor('y', x.as_numpy().astype(np.uint16))
                if x.as_numpy().item():
                    made = pb_utils.Tensor.from_dlpack('y', torch.ones((1, 1), dtype=torch.bfloat16))
                responses.append(pb_utils.InferenceResponse([made]))"""
    workshop.python("echo", echo(body))
    engine = workshop.load(echo_config(dims=(1,), output="UINT16"))

    results(engine, [Row({"x": wire("x", [[0]])})])

    assert "expected UINT16 [1,1], got BF16 [1,1]" in error(engine, Row({"x": wire("x", [[1]])})).message


def test_bf16_as_numpy_is_refused_with_the_remedy(workshop: Workshop) -> None:
    workshop.python("echo", echo("responses.append(pb_utils.InferenceResponse([pb_utils.Tensor('y', x.as_numpy())]))"))

    failed = error(workshop.load(echo_config("BF16")), Row({"x": Tensor("x", "BF16", (1, 2), bytes(4))}))

    assert "tensor 'x' is BF16, which numpy does not have; use to_dlpack()" in failed.message


def test_requests_of_several_rows_and_of_different_shapes_keep_their_own(workshop: Workshop) -> None:
    workshop.python(
        "echo", echo("responses.append(pb_utils.InferenceResponse([pb_utils.Tensor('y', x.as_numpy() * 2)]))")
    )
    contents = [[[1, 2], [3, 4]], [[5]], [[6, 7, 8]]]
    rows = [Row({"x": wire("x", content)}) for content in contents]

    ran = results(workshop.load(echo_config(dims=(-1,))), rows)

    assert [(np.array(content) * 2).tolist() for content in contents] == [array(row, "y").tolist() for row in ran]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("responses = None", "Expected a list in the execute return, found type '<class 'NoneType'>'."),
        ("pass", "objects. InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0\n"),
        ("responses.append(None)", "in the execute function return list, found type '<class 'NoneType'>'."),
        (
            "responses.append('text')",
            "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'str'>'.",
        ),
        ("responses.append(pb_utils.InferenceResponse([x.as_numpy()]))", "returned a ndarray among its output tensors"),
        (
            "responses.append(pb_utils.InferenceResponse([pb_utils.Tensor('q', x.as_numpy())]))",
            "model 'echo' returned output 'q', which its configuration does not declare; it declares y",
        ),
        (
            "responses.append(pb_utils.InferenceResponse([pb_utils.Tensor('y', x.as_numpy()) for _ in range(2)]))",
            "model 'echo' returned output 'y' twice in one response",
        ),
        (
            "responses.append(pb_utils.InferenceResponse([pb_utils.Tensor('y', x.as_numpy().astype(np.int8))]))",
            "model 'echo' returned a wrong output 'y': expected FP32 [1,2], got INT8 [1,2]",
        ),
        (
            "responses.append(pb_utils.InferenceResponse([pb_utils.Tensor('y', x.as_numpy()[0])]))",
            "model 'echo' returned a wrong output 'y': expected FP32 [1,2], got FP32 [2]",
        ),
        (
            "responses.append(pb_utils.InferenceResponse([pb_utils.Tensor('y', x.as_numpy().astype(complex))]))",
            "Unsupported numpy type complex128 of tensor 'y'",
        ),
        ("raise pb_utils.TritonModelException('my reason')", "message: TritonModelException: my reason"),
        (
            "pb_utils.get_input_tensor_by_name(request, 'z').as_numpy()",
            "The model asked for 'z'. Its configuration has 'x' alone.",
        ),
        ("request.exec()", "calls to other models are made within a mesh only"),
        ("pb_utils.load_model('other')", "(load_model) is not supported by seqmesh"),
        (
            "pb_utils.InferenceRequest().get_response_sender()",
            "Unable to send response. Response sender has no reference to the decoupled state of the model",
        ),
    ],
)
def test_a_wrong_response_is_a_clear_error(workshop: Workshop, body: str, text: str) -> None:
    workshop.python("echo", echo(body))

    failed = error(workshop.load(echo_config()), Row({"x": wire("x", [[1, 2]])}))

    assert "INTERNAL" == failed.code
    assert text in failed.message


def test_a_model_may_leave_an_output_out_though_the_caller_named_it(workshop: Workshop) -> None:
    workshop.python("echo", echo("responses.append(pb_utils.InferenceResponse())"))
    engine = workshop.load(echo_config())
    inputs = {"x": wire("x", [[1, 2]])}

    for result in results(engine, [Row(inputs), Row(inputs, outputs=("y",))]):
        assert [] == list(result.outputs)


def test_the_request_tells_the_model_what_the_client_said(workshop: Workshop) -> None:
    workshop.python(
        "echo",
        echo(
            "said = [request.request_id(), request.timeout(), json.loads(request.parameters()), "
            "list(request.requested_output_names() & {'y'}), request.model_name(), request.is_cancelled(), "
            "[t.name() for t in request.inputs()], x.shape(), x.is_cpu(), pb_utils.get_model_dir()]; "
            "text = np.array([json.dumps(said)], dtype=np.object_); "
            "responses.append(pb_utils.InferenceResponse([pb_utils.Tensor('y', text)]))"
        ),
    )
    row = Row({"x": wire("x", [1, 2])}, request_id="r1", timeout_us=5, parameters={"a": 1, "b": "c"}, outputs=("y",))
    config = plain_config(
        "echo", "python", inputs=[fp32("x", 2)], outputs=[TensorSpec("y", "BYTES", (1,))], max_batch_size=0
    )

    engine = workshop.load(config)
    (result,) = results(engine, [row])
    (of_all,) = results(engine, [Row({"x": wire("x", [1, 2])})])

    assert ["r1", 5, {"a": 1, "b": "c"}, ["y"], "echo", False, ["x"], [2], True] == json.loads(
        array(result, "y").item()
    )[:-1]
    assert ["y"] == json.loads(array(of_all, "y").item())[3]
    assert str(workshop.version_dir("echo")) == json.loads(array(result, "y").item())[-1]


@pytest.mark.parametrize("said", ["{'a': [1]}", "{1: 'a'}", "{'a': 2 ** 63}", "{'a': chr(0xd800)}", "'text'"])
def test_parameters_of_a_response_that_no_protocol_carries_fail_the_row(workshop: Workshop, said: str) -> None:
    workshop.python("echo", echo(f"responses.append(pb_utils.InferenceResponse([], parameters={said}))"))

    failed = error(workshop.load(echo_config()), Row({"x": wire("x", [[1, 2]])}))

    assert "INTERNAL" == failed.code
    assert "parameter" in failed.message


def test_parameters_of_a_response_are_handed_on(workshop: Workshop) -> None:
    told = {"a": "b", "c": -1, "d": True, "e": 0.5}
    workshop.python("echo", echo(f"responses.append(pb_utils.InferenceResponse([], parameters={told}))"))

    (result,) = results(workshop.load(echo_config()), [Row({"x": wire("x", [[1, 2]])})])

    assert told == result.parameters


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("parameters={np.str_('a'): np.float64(0.5), 'b': np.str_('c')}", ""),
        ("error=pb_utils.TritonError(ValueError('\\udc80 is no text'))", "\\udc80 is no text"),
        ("error='\\udc80'", "\\udc80"),
    ],
)
def test_whatever_a_model_says_can_be_answered(workshop: Workshop, said: str, heard: str) -> None:
    workshop.python("echo", echo(f"responses.append(pb_utils.InferenceResponse([], {said}))"))

    (result,) = workshop.load(echo_config()).run([Row({"x": wire("x", [[1, 2]])})], [False]).rows
    assert result is not None
    reply = decode_reply(answer(result, version="1", executor=ExecutorId("e")))

    assert heard == reply.error
    assert ({} if heard else {"a": 0.5, "b": "c"}) == reply.parameters


def test_reshape_holds_between_client_and_model_both_ways(workshop: Workshop) -> None:
    workshop.python(
        "echo",
        echo(
            "assert x.shape() == [1, 1, 3], x.shape(); "
            "responses.append(pb_utils.InferenceResponse([pb_utils.Tensor('y', x.as_numpy())]))"
        ),
    )
    config = plain_config(
        "echo", "python", inputs=[fp32("x", -1, reshape=(1, -1))], outputs=[fp32("y", -1, reshape=(1, -1))]
    )

    (result,) = results(workshop.load(config), [Row({"x": wire("x", [[1, 2, 3]])})])

    assert [[1, 2, 3]] == array(result, "y").tolist()


def test_arrays_are_the_model_s_own_to_write_to(workshop: Workshop) -> None:
    """SUM adds in place to the state it is given: a step that then fails must not have moved anything."""
    workshop.python("sum", SUM)
    engine = workshop.load(sum_config())
    row = sum_row(0, 5, start=True)
    sums(engine, row)
    error(engine, sum_row(0, 9))

    assert [6] == sums(engine, sum_row(0, 1))
    assert [5] == sums(engine, row)


INSTANCE = """
    import counting

    calls = 0

    class TritonPythonModel:
        def initialize(self, args):
            self.args = args

        def execute(self, requests):
            import late
            global calls
            calls += 1
            counting.calls += 1
            said = np.array([[calls * 100 + counting.calls * 10 + late.ONE]], np.int32)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", said)]) for _ in requests]

        def finalize(self):
            print("finalized", self.args["model_instance_name"])

        def is_ready(self):
            return calls < 2
"""


def instance_config() -> ModelConfig:
    return plain_config("echo", "python", inputs=[fp32("x", 2)], outputs=[TensorSpec("y", "INT32", (1,))])


def test_instances_share_no_module_not_even_siblings(workshop: Workshop) -> None:
    workshop.python("echo", INSTANCE, counting="calls = 0", late="ONE = 1")
    first, second = workshop.load(instance_config()), workshop.load(instance_config())
    row = Row({"x": wire("x", [[1, 2]])})

    assert [111, 221, 111] == [array(results(engine, [row])[0], "y").item() for engine in (first, first, second)]
    assert isinstance(first, PythonEngine)
    assert isinstance(second, PythonEngine)
    assert [False, True] == [first.is_ready(), second.is_ready()]


def test_a_model_imports_what_lies_beside_its_versions(workshop: Workshop) -> None:
    """Its own, where others have a file of that name."""
    for name in ("echo", "other"):
        workshop.python(
            name,
            """
            import of_all_versions

            class TritonPythonModel:
                def execute(self, requests):
                    of_all_versions.NUMBER += 1
                    said = np.array([[of_all_versions.NUMBER]], np.int32)
                    return [pb_utils.InferenceResponse([pb_utils.Tensor("y", said)]) for _ in requests]
            """,
        )
        (workshop.directory / name / "of_all_versions.py").write_text(f"NUMBER = {len(name) * 100}")
    other = msgspec.structs.replace(instance_config(), name="other")
    engines = [workshop.load(config) for config in (instance_config(), other, other)]
    row = Row({"x": wire("x", [[1, 2]])})

    assert [401, 501, 501] == [array(results(engine, [row])[0], "y").item() for engine in engines]
    for engine in engines:
        engine.close()
    workshop.engines.clear()
    assert not [path for path in sys.path if path.startswith(str(workshop.directory))]
    assert "of_all_versions" not in sys.modules


def packages() -> set[str]:
    """Those that models' folders are at present; models of other tests may not be closed yet."""
    return {name for name in sys.modules if name.startswith(PACKAGE_PREFIX)}


def test_a_model_that_changes_torch_s_default_datatype_is_named(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the whole process's: another model's file may then return another datatype than it is configured for."""
    workshop.python(
        "echo",
        """
        import torch

        class TritonPythonModel:
            def initialize(self, args):
                torch.set_default_dtype(torch.float64)

            def execute(self, requests): ...
        """,
    )
    try:
        for _ in range(2):
            workshop.load(instance_config())
        assert 1 == caplog.text.count("model 'echo' sets torch's default datatype to torch.float64 for all models")
    finally:
        torch.set_default_dtype(torch.float32)


def test_files_of_a_model_import_each_other_relatively(workshop: Workshop) -> None:
    """Each instance has its own, whatever the file is called; those that a method imports are shared."""
    before = packages()
    workshop.python(
        "echo",
        """
        import pickle
        from . import queue
        from .parts.deep import Deep

        class TritonPythonModel:
            def execute(self, requests):
                from .late import ONE
                queue.calls += 1
                assert isinstance(pickle.loads(pickle.dumps(Deep())), Deep)
                said = np.array([[queue.calls * 100 + Deep.two * 10 + ONE]], np.int32)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("y", said)]) for _ in requests]
        """,
        queue="calls = 0",
        other="TWO = 2",
        late="ONE = 1",
    )
    parts = workshop.version_dir("echo") / "parts"
    parts.mkdir()
    (parts / "__init__.py").touch()
    (parts / "deep.py").write_text("from ..other import TWO\nclass Deep:\n    two = TWO\n")
    first, second = workshop.load(instance_config()), workshop.load(instance_config())
    row = Row({"x": wire("x", [[1, 2]])})

    assert [121, 221, 121] == [array(results(engine, [row])[0], "y").item() for engine in (first, first, second)]
    for engine in (first, second):
        engine.close()
    workshop.engines.clear()
    assert packages() <= before


def test_a_model_that_is_not_asynchronous_finds_an_event_loop_too(workshop: Workshop) -> None:
    """Which it runs itself: Triton calls models on a main thread, which has one."""
    workshop.python(
        "echo",
        """
        import asyncio

        loop = asyncio.get_event_loop()

        async def one():
            return 1

        class TritonPythonModel:
            def initialize(self, args):
                self.one = loop.run_until_complete(one())

            def execute(self, requests):
                total = np.array([[self.one + asyncio.get_event_loop().run_until_complete(one())]], np.int32)
                assert asyncio.get_event_loop() is loop
                return [pb_utils.InferenceResponse([pb_utils.Tensor("y", total)]) for _ in requests]
        """,
    )
    thread = EngineThread("echo")
    engine = thread.run(workshop.load, instance_config())

    (result,) = thread.run(results, engine, [Row({"x": wire("x", [[1, 2]])})])
    thread.end_now(engine.close)

    assert 2 == array(result, "y").item()


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ("def is_ready(self): return True", True),
        ("def is_ready(self): return 'ready'", False),
        ("def is_ready(self): return None", False),
        ("async def is_ready(self): return await self.said(True)", True),
        ("async def is_ready(self): return await self.said(False)", False),
    ],
)
def test_a_model_is_ready_if_it_says_so_at_once_or_later(workshop: Workshop, check: str, *, expected: bool) -> None:
    """On the event loop of its batches, where its connections are."""
    workshop.python(
        "echo",
        f"""
        import asyncio

        class TritonPythonModel:
            async def execute(self, requests):
                self.loop = asyncio.get_running_loop()
                return [pb_utils.InferenceResponse() for _ in requests]

            async def said(self, value):
                assert asyncio.get_running_loop() is self.loop
                return value

            {check}
        """,
    )
    engine = workshop.load(instance_config())
    results(engine, [Row({"x": wire("x", [[1, 2]])})])

    assert isinstance(engine, ChecksReadiness)
    assert expected is engine.is_ready()


def test_modules_that_vanish_or_are_forbidden_meanwhile_fail_no_load(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads import too: what fails there is dropped, as is the batch strategy of a model that is unloaded."""
    monkeypatch.setitem(sys.modules, "forbidden", None)
    workshop.python("echo", INSTANCE, counting="calls = 0", late="ONE = 1")

    assert workshop.load(instance_config())
    assert {} == model._siblings(workshop.directory, {"gone"})


def test_a_change_is_seen_though_size_and_time_of_the_files_are_the_same(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in repositories whose files have no times of their own: bytecode would be that of the code before."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    answers: list[int] = []
    for digit in (1, 2):
        path = workshop.python(
            "echo", INSTANCE.replace("100", f"{digit}00"), counting=f"calls = {digit}", late="ONE = 1"
        )
        for file in path.parent.glob("*.py"):
            os.utime(file, (1, 1))
        engine = workshop.load(instance_config())
        answers.append(array(results(engine, [Row({"x": wire("x", [[1, 2]])})])[0], "y").item())

    assert [121, 231] == answers


PACKAGED = """
    from folder import digit as plain
    from package import digit as proper

    class TritonPythonModel:
        def execute(self, requests):
            from package.inner import late
            said = np.array([[plain.VALUE * 100 + proper.VALUE * 10 + late.VALUE]], np.int32)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", said)]) for _ in requests]
"""


def test_a_change_in_a_package_of_the_model_is_seen_too(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a package, in a folder that is none by its files, and in what a method imports later."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    before = set(sys.modules)
    answers: list[int] = []
    for digit in (1, 2):
        directory = workshop.python("echo", PACKAGED).parent
        (directory / "package" / "inner").mkdir(parents=True, exist_ok=True)
        (directory / "folder").mkdir(exist_ok=True)
        (directory / "package" / "__init__.py").touch()
        for file in ("folder/digit.py", "package/digit.py", "package/inner/late.py"):
            (directory / file).write_text(f"VALUE = {digit}")
            os.utime(directory / file, (1, 1))
        engine = workshop.load(instance_config())
        answers.append(array(results(engine, [Row({"x": wire("x", [[1, 2]])})])[0], "y").item())
        engine.close()
        workshop.engines.clear()
        assert not list(directory.rglob("*.pyc"))

    assert [111, 222] == answers
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] in ("folder", "package")}


def test_a_closed_instance_leaves_nothing_behind_in_the_process(workshop: Workshop) -> None:
    path = workshop.python("echo", INSTANCE, counting="calls = 0", late="ONE = 1")
    before = (list(sys.path), set(sys.modules))
    engines = [workshop.load(instance_config()) for _ in range(2)]
    for engine in engines:
        results(engine, [Row({"x": wire("x", [[1, 2]])})])

    assert str(path.parent) in sys.path
    assert "late" in sys.modules
    for engine in engines:
        engine.close()
    workshop.engines.clear()

    assert before == (list(sys.path), set(sys.modules) - {"triton_python_backend_utils"} | before[1])


def test_initialize_is_given_triton_s_arguments_and_close_calls_finalize(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    workshop.python(
        "args",
        """
        import json

        class TritonPythonModel:
            def initialize(self, args):
                print(json.dumps(args))

            def execute(self, requests):
                return []

            def finalize(self):
                print("finalized")
        """,
    )
    config = plain_config("args", "python", inputs=[], outputs=[])

    engine = workshop.load(config, config_json='{"name": "args"}')
    engine.close()
    workshop.engines.clear()

    said, finalized = capsys.readouterr().out.splitlines()
    assert {
        "model_config": '{"name": "args"}',
        "model_instance_kind": "CPU" if workshop.device == "cpu" else "GPU",
        "model_instance_device_id": "0",
        "model_instance_name": "args_0_0",
        "model_repository": str(workshop.directory / "args"),
        "model_version": "1",
        "model_name": "args",
    } == json.loads(said)
    assert "finalized" == finalized


ENDS_A_LOOP = ["SystemExit(3)", "KeyboardInterrupt()", "GeneratorExit()", "asyncio.CancelledError()"]
"""What a model may raise that is no Exception. In an event loop each would end the executor, or a task of it."""

RAISING = """
    import asyncio

    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def answer(self, request):
            value = pb_utils.get_input_tensor_by_name(request, "INPUT")
            if value.as_numpy().item() == 13:
                raise RAISED
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value.as_numpy())])

        def is_ready(self):
            raise RAISED

        def finalize(self):
            raise RAISED
"""


STOPPING = """
    import asyncio

    class TritonPythonModel:
        async def execute(self, requests):
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0.01)
            values = [pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests]
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value)]) for value in values]
"""


def test_a_model_that_stops_its_loop_goes_on(workshop: Workshop) -> None:
    workshop.python("stopping", STOPPING)
    specs = [fp32("INPUT", 1)], [fp32("OUTPUT", 1)]
    engine = workshop.load(plain_config("stopping", "python", inputs=specs[0], outputs=specs[1]))

    for value in (1.0, 2.0):
        (result,) = engine.run([Row({"INPUT": wire("INPUT", [[value]], "<f4")})], [False]).rows
        assert isinstance(result, RowResult)
        assert value == array(result, "OUTPUT").item()
    engine.close()


LEAVING = """
    import asyncio

    class TritonPythonModel:
        async def execute(self, requests):
            self.left = asyncio.create_task(self.leaves())
            await asyncio.sleep(0)
            return []

        async def leaves(self):
            try:
                await asyncio.sleep(600)
            finally:
                for task in asyncio.all_tasks():
                    task.cancel()
                await asyncio.sleep(600)
"""


def test_a_task_that_cancels_all_others_when_it_ends_does_not_keep_its_instance_from_closing(
    workshop: Workshop,
) -> None:
    path = workshop.python("leaving", LEAVING)
    engine = workshop.load(plain_config("leaving", "python", inputs=[fp32("x", 1)], outputs=[]))
    engine.run([Row({"x": wire("x", [[1]])})], [False])

    engine.close()

    assert str(path.parent) not in sys.path


def test_a_model_that_stops_its_loop_at_its_end_does_not_keep_its_instance_from_closing(workshop: Workshop) -> None:
    """The loop may be closed before the instance stops it."""
    loop_stops = "loop = asyncio.get_running_loop(); loop.call_later(0.01, loop.stop)"
    source = LEAVING.partition("for task in")[0] + loop_stops
    path = workshop.python("leaving", source)
    engine: Any = workshop.load(plain_config("leaving", "python", inputs=[fp32("x", 1)], outputs=[]))
    engine.run([Row({"x": wire("x", [[1]])})], [False])
    loop = engine._coroutines._loop
    given = loop.call_soon_threadsafe

    def late(callback: Any, *arguments: Any, **named: Any) -> Any:
        while callback == loop.stop and not loop.is_closed():
            time.sleep(0.001)
        return given(callback, *arguments, **named)

    loop.call_soon_threadsafe = late
    engine.close()

    assert str(path.parent) not in sys.path


ODD_ERRORS = """
    class Odd(pb_utils.TritonError):
        def message(self):
            return {"not": "a text"}

    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse(error=ERROR) for _ in requests]
"""


@pytest.mark.parametrize(
    ("made", "code", "message"),
    [
        ("pb_utils.TritonError(np.str_('gone'), np.str_('NOT_FOUND'))", Code.NOT_FOUND, "gone"),
        ("pb_utils.TritonError('gone', 'no such code')", Code.INTERNAL, "gone"),
        ("Odd('gone')", Code.INTERNAL, "{'not': 'a text'}"),
        ("np.str_('gone')", Code.INTERNAL, "gone"),
    ],
)
def test_a_model_s_error_is_a_text_and_a_code_whatever_it_is_made_of(
    workshop: Workshop, made: str, code: Code, message: str
) -> None:
    workshop.python("odd", ODD_ERRORS.replace("ERROR", made))
    specs = [fp32("INPUT", 1)], [fp32("OUTPUT", 1)]
    engine = workshop.load(plain_config("odd", "python", inputs=specs[0], outputs=specs[1]))

    (result,) = engine.run([Row({"INPUT": wire("INPUT", [[1]], "<f4")})], [False]).rows

    assert isinstance(result, RowError)
    assert (code, message) == (result.code, result.message)
    assert encode(result), "no message takes a subclass of str"


@pytest.mark.parametrize("raised", ENDS_A_LOOP)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_no_exception_fails_its_row_alone_and_neither_readiness_nor_the_end_raises_it(
    workshop: Workshop, raised: str, *, asynchronous: bool
) -> None:
    source = RAISING.replace("RAISED", raised)
    if asynchronous:
        source = source.replace("def execute", "async def execute")
    workshop.python("raising", source)
    specs = [fp32("INPUT", 1)], [fp32("OUTPUT", 1)]
    config = plain_config("raising", "python", inputs=specs[0], outputs=specs[1])
    engine = workshop.load(config)
    rows = [Row({"INPUT": wire("INPUT", [[value]], "<f4")}) for value in (1.0, 13.0, 2.0)]

    first, guilty, last = engine.run(rows, [False] * 3).rows

    assert isinstance(first, RowResult)
    assert isinstance(last, RowResult)
    assert isinstance(guilty, RowError)
    kind = raised.partition("(")[0].rpartition(".")[2]
    assert f"Failed to process the request(s) for model 'raising_0_0', message: {kind}" in guilty.message
    assert isinstance(engine, ChecksReadiness)
    assert not engine.is_ready()
    engine.close()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("def broken(:", "SyntaxError"),
        ("x = 1", "has no class TritonPythonModel"),
        ("class TritonPythonModel:\n    pass", "has no method execute"),
        (
            "class TritonPythonModel:\n    def execute(self, r): ...\n    def initialize(self, args): 1 / 0",
            "Failed to initialize model instance 'broken_0_0', message: ZeroDivisionError: division by zero",
        ),
        ("import sys\nsys.exit(3)", "model.py: SystemExit: 3"),
        (
            "class TritonPythonModel:\n    def execute(self): ...\n    def initialize(self, a): raise SystemExit",
            "Failed to initialize model instance 'broken_0_0', message: SystemExit: ",
        ),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(workshop: Workshop, source: str, text: str) -> None:
    workshop.python("broken", source)

    with pytest.raises(LoadError) as caught:
        workshop.load(plain_config("broken", "python", inputs=[], outputs=[]))

    assert text in caught.value.message
    assert "importlib" not in caught.value.message, "the place is one of the model's"
    assert "executor/engine" not in caught.value.message


def test_a_model_that_cannot_be_asked_for_its_methods_leaves_nothing_behind(workshop: Workshop) -> None:
    """It raises another error than AttributeError, which is all that `hasattr` takes."""
    asked = "def __getattr__(self, name):\n        if name == 'is_ready': 1 / 0\n        raise AttributeError(name)"
    workshop.python("odd", f"class TritonPythonModel:\n    def execute(self, r): ...\n    {asked}")
    before = list(sys.path)

    with pytest.raises(LoadError, match="Failed to initialize model instance 'odd_0_0', message: ZeroDivisionError"):
        workshop.load(plain_config("odd", "python", inputs=[], outputs=[]))

    assert before == sys.path


def bench_config(name: str, datatype: str, inputs: int, outputs: int) -> ModelConfig:
    return sequence_config(
        name,
        "python",
        inputs=[TensorSpec("INPUT", datatype, (inputs,))],
        outputs=[TensorSpec("OUTPUT", datatype, (outputs,))],
        controls=CONTROLS,
        direct=True,
    )


def test_the_running_sum_written_for_triton_runs_unchanged(workshop: Workshop, fixture_models: Path) -> None:
    engine = workshop.load(bench_config("accumulate", "INT32", 1, 1), model_dir=fixture_models / "accumulate")

    def row(slot: int, value: int, *, start: bool = False, end: bool = False) -> Row:
        given = controls(start=start, end=end, corrid=slot + 1)
        return Row({"INPUT": wire("INPUT", [[value]], "<i4")}, given, slot=slot, start=start, end=end)

    null = Row({}, controls(ready=False), null=True)

    assert [1, 2, 3] == sums(engine, *(row(slot, slot + 1, start=True) for slot in range(3)))
    assert [13] == sums(engine, null, null, row(2, 10))
    assert [2, 4] == sums(engine, row(0, 1, end=True), row(1, 2))


def test_the_lstm_written_for_triton_runs_unchanged_and_batches_equal_single_rows(
    workshop: Workshop, fixture_models: Path
) -> None:
    config = bench_config("lstm", "FP32", 128, 10)
    together = workshop.load(config, model_dir=fixture_models / "lstm")
    alone = workshop.load(config, model_dir=fixture_models / "lstm")
    numbers = np.random.default_rng(0).standard_normal((2, 3, 1, 128)).astype("<f4")

    for step in range(2):
        rows = [
            Row(
                {"INPUT": wire("INPUT", numbers[step, slot])},
                controls(start=step == 0, corrid=slot + 1),
                slot=slot,
                start=step == 0,
            )
            for slot in range(3)
        ]
        one_by_one = [
            results(alone, [*[Row({}, controls(ready=False), null=True)] * slot, row])[0]
            for slot, row in enumerate(rows)
        ]
        for expected, actual in zip(one_by_one, results(together, rows), strict=True):
            np.testing.assert_allclose(array(expected, "OUTPUT"), array(actual, "OUTPUT"), rtol=1e-4, atol=1e-5)
