"""Ensembles: what clients see of a graph of models, and which graphs are refused. Source: triton-spec 4 and 1.11;
Triton core, ensemble_scheduler.cc and ensemble_utils.cc.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException

from shared.contract.errors import Code
from tests.conformance.calls import Caller, Refused, Step, fresh_id, refused
from tests.conformance.conftest import MakeTarget, watched
from tests.conformance.repository import ModelText
from tests.conformance.targets import Target, running_target
from tests.conformance.test_decoupled import asked, streamed
from tests.executor.configuration.test_config_validation import step
from tests.mesh.streams import Got, with_empty_finals

SEEN = "output { name: 'SEEN' data_type: TYPE_STRING dims: [ 1 ] }"
NUMBER = "input { name: 'INPUT' data_type: TYPE_INT32 dims: [ 1 ] }"
RESULT = "output { name: 'OUTPUT' data_type: TYPE_INT32 dims: [ 1 ] }"
CPU = "instance_group [ { kind: KIND_CPU count: 1 } ]"
PLAIN = f"backend: 'python' max_batch_size: 4 {NUMBER} {RESULT} {SEEN} {CPU}"
SINGLE = PLAIN.replace("max_batch_size: 4", "max_batch_size: 0")
EXTRA = "input { name: 'EXTRA' data_type: TYPE_INT32 dims: [ 1 ] optional: true }"
EXTRA_ECHO = "output { name: 'EXTRA_ECHO' data_type: TYPE_INT32 dims: [ 1 ] }"
STATEFUL = f"""{PLAIN} sequence_batching {{
  max_sequence_idle_microseconds: 60000000
  oldest {{ max_candidate_sequences: 4 }}
  control_input [
    {{ name: "START" control [ {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }} ] }},
    {{ name: "END" control [ {{ kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] }} ] }},
    {{ name: "ID" control [ {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }} ] }}
  ]
}}"""


def ensemble(*steps: str, tensors: str = f"{NUMBER} {RESULT}", batch: int = 4) -> str:
    """The text of an ensemble."""
    scheduling = f"ensemble_scheduling {{ {' '.join(steps)} }}".replace("step {", "step { model_version: -1")
    return f"platform: 'ensemble' max_batch_size: {batch} {tensors} {scheduling}"


def output(name: str) -> str:
    return f"output {{ name: '{name}' data_type: TYPE_STRING dims: [ 1 ] }}"


TWO_STATES = ensemble(
    step("state_a", "INPUT=INPUT", "OUTPUT=sum SEEN=FIRST"),
    step("plain", "INPUT=sum", "OUTPUT=passed SEEN=BETWEEN"),
    step("state_b", "INPUT=passed", "OUTPUT=OUTPUT SEEN=SECOND"),
    tensors=f"{NUMBER} {RESULT} {output('FIRST')} {output('BETWEEN')} {output('SECOND')}",
)
MODELS = {
    "plain": PLAIN,
    "single": SINGLE,
    "state_a": STATEFUL,
    "state_b": STATEFUL,
    "echoing": f"{PLAIN} {EXTRA} {EXTRA_ECHO}",
    "two_states": TWO_STATES,
    "chain": ensemble(step("plain", "INPUT=INPUT", "OUTPUT=mid"), step("plain", "INPUT=mid", "OUTPUT=OUTPUT")),
    "outer": ensemble(step("plain", "INPUT=INPUT", "OUTPUT=mid"), step("chain", "INPUT=mid", "OUTPUT=OUTPUT")),
    "left_out": ensemble(
        step("echoing", "INPUT=INPUT EXTRA=EXTRA", "OUTPUT=mid EXTRA_ECHO=extra"),
        step("echoing", "INPUT=mid EXTRA=extra", "OUTPUT=OUTPUT EXTRA_ECHO=EXTRA_ECHO"),
        tensors=f"{NUMBER} {EXTRA} {RESULT} {EXTRA_ECHO}",
    ),
    "single_behind": ensemble(
        step("plain", "INPUT=INPUT", "OUTPUT=mid"), step("single", "INPUT=mid", "OUTPUT=OUTPUT"), batch=1
    ),
    "reshaping": ensemble(
        step("plain", "INPUT=INPUT", "OUTPUT=OUTPUT"),
        tensors=f"{NUMBER.replace('[ 1 ]', '[ 1, 1 ] reshape { shape: [ 1 ] }')} "
        f"{RESULT.replace('[ 1 ]', '[ 1, 1, 1 ] reshape { shape: [ 1 ] }')}",
    ),
    "around_reshaping": ensemble(
        step("reshaping", "INPUT=INPUT", "OUTPUT=OUTPUT"),
        tensors=f"{NUMBER.replace('[ 1 ]', '[ 1, 1 ]')} {RESULT.replace('[ 1 ]', '[ 1, 1, 1 ]')}",
    ),
    "passing": ensemble(
        step("plain", "INPUT=INPUT", "OUTPUT=OUTPUT"), tensors=f"{NUMBER} {RESULT} {RESULT.replace('OUTPUT', 'INPUT')}"
    ),
    "around_passing": ensemble(
        step("passing", "INPUT=INPUT", "INPUT=mid OUTPUT=again"),
        step("plain", "INPUT=mid", "OUTPUT=OUTPUT"),
        tensors=f"{NUMBER} {RESULT} {RESULT.replace('OUTPUT', 'again')}",
    ),
    "answers": ensemble(
        step("repeating", "INPUT=INPUT", "OUTPUT=mid"),
        step("single", "INPUT=mid", "OUTPUT=OUTPUT"),
        tensors=f"{NUMBER.replace('[ 1 ]', '[ -1 ]')} {RESULT}",
        batch=0,
    ),
}
WRONG_TYPE = PLAIN.replace("'INPUT' data_type: TYPE_INT32", "'INPUT' data_type: TYPE_FP32")
WRONG_SHAPE = PLAIN.replace("'INPUT' data_type: TYPE_INT32 dims: [ 1 ]", "'INPUT' data_type: TYPE_INT32 dims: [ 2, 2 ]")
FIRST = step("plain", "INPUT=INPUT", "OUTPUT=mid")
LAST = step("plain", "INPUT=mid", "OUTPUT=OUTPUT")
UNFIT = {
    "wrong_type": WRONG_TYPE,
    "wrong_shape": WRONG_SHAPE,
    "narrow": PLAIN.replace("max_batch_size: 4", "max_batch_size: 2"),
    "two_inputs": f"{PLAIN} {NUMBER.replace('INPUT', 'OTHER')}",
}
"""Models that do not fit into the ensembles below."""
BROKEN: dict[str, tuple[str, str]] = {
    "no_steps": (ensemble(), "must specify 'step' for ensemble 'no_steps'"),
    "no_input_map": (
        ensemble(step("plain", "", "OUTPUT=OUTPUT")),
        "must specify 'input_map' in step 0 of ensemble 'no_input_map'",
    ),
    "no_output_map": (
        ensemble(step("plain", "INPUT=INPUT", "")),
        "must specify 'output_map' in step 0 of ensemble 'no_output_map'",
    ),
    "no_model": (
        ensemble(step("", "INPUT=INPUT", "OUTPUT=OUTPUT")),
        "must specify 'model_name' in step 0 of ensemble 'no_model'",
    ),
    "written_twice": (
        ensemble(FIRST, LAST, step("plain", "INPUT=INPUT", "OUTPUT=OUTPUT")),
        "ensemble tensor 'OUTPUT' can appear in an output map only once for ensemble 'written_twice' step 2",
    ),
    "unused_input": (
        ensemble(FIRST, LAST, tensors=f"{NUMBER} {RESULT} {NUMBER.replace('INPUT', 'IDLE')}"),
        "ensemble input 'IDLE' for ensemble unused_input",  # 2.51 has a quote too many behind it
    ),
    "unwritten": (
        ensemble(
            step("two_inputs", "INPUT=INPUT OTHER=later", "OUTPUT=OUTPUT"),
            step("plain", "INPUT=OUTPUT", "OUTPUT=later"),
        ),
        "output 'OUTPUT' for ensemble 'unwritten' is not written",
    ),
    "unconnected": (
        ensemble(step("plain", "INPUT=z", "OUTPUT=OUTPUT"), step("two_inputs", "INPUT=INPUT OTHER=later", "OUTPUT=z")),
        (
            "output 'OUTPUT' for ensemble 'unconnected' is not written: at least one of its depending tensors, "
            "'later', is not connected"
        ),
    ),
    "idle_tensor": (
        ensemble(FIRST, LAST, step("plain", "INPUT=INPUT", "OUTPUT=idle")),
        "ensemble tensor 'idle' is unused in ensemble 'idle_tensor'",
    ),
    "instances": (
        ensemble(FIRST, LAST) + " instance_group { count: 1 kind: KIND_CPU }",
        "instance group should not be specified for ensemble 'instances'",
    ),
    "stranger": (
        ensemble(FIRST, step("nobody", "INPUT=mid", "OUTPUT=OUTPUT")),
        "ensemble stranger contains models that are not available or ambiguous: nobody",
    ),
    "of_another_type": (
        ensemble(FIRST, step("wrong_type", "INPUT=mid", "OUTPUT=OUTPUT")),
        (
            "in ensemble of_another_type, ensemble tensor mid: inconsistent data type: TYPE_INT32 is inferred from "
            "model plain while TYPE_FP32 is inferred from model wrong_type"
        ),
    ),
    "of_another_shape": (
        ensemble(FIRST, step("wrong_shape", "INPUT=mid", "OUTPUT=OUTPUT")),
        (
            "in ensemble of_another_shape, ensemble tensor mid: inconsistent shape: [-1,1] is inferred from model "
            "plain while [-1,2,2] is inferred from model wrong_shape"
        ),
    ),
    "too_wide": (
        ensemble(FIRST, step("narrow", "INPUT=mid", "OUTPUT=OUTPUT")),
        (
            "ensemble too_wide allows maximum batch size 4, but it contains model narrow which only allows maximum "
            "batch size to be 2"
        ),
    ),
    "unmapped": (
        ensemble(FIRST, step("two_inputs", "INPUT=mid", "OUTPUT=OUTPUT")),
        "in ensemble unmapped, input OTHER in model two_inputs is not mapped to any ensemble tensors",
    ),
    "no_such_input": (
        ensemble(FIRST, step("plain", "INPUT=mid WHAT=mid", "OUTPUT=OUTPUT")),
        "in ensemble no_such_input, ensemble tensor mid is mapping to non-existing input WHAT in model plain",
    ),
    "no_such_output": (
        ensemble(FIRST, step("plain", "INPUT=mid", "WHAT=OUTPUT")),
        "in ensemble no_such_output, ensemble tensor OUTPUT is mapped from non-existing output WHAT in model plain",
    ),
    "circle_a": (ensemble(step("circle_b", "INPUT=INPUT", "OUTPUT=OUTPUT")), "circular dependency between ensembles: "),
    "circle_b": (ensemble(step("circle_a", "INPUT=INPUT", "OUTPUT=OUTPUT")), "circular dependency between ensembles: "),
    "cached_answers": (
        f"{MODELS['answers']} response_cache {{ enable: true }}",
        (
            "Response Cache does not currently support model cached_answers with 'decoupled' transaction policy. "
            "Please disable the response cache."
        ),
    ),
    "two_sources": (
        ensemble(
            step("repeating", "INPUT=INPUT", "OUTPUT=one"),
            step("repeating", "INPUT=INPUT", "OUTPUT=two"),
            step("pairing", "INPUT=one OTHER=two", "OUTPUT=OUTPUT"),
            tensors=f"{NUMBER.replace('[ 1 ]', '[ -1 ]')} {RESULT}",
            batch=0,
        ),
        # 2.51 names the ensemble where the mesh names the step's model.
        "' receives inputs originated from different decoupled models",
    ),
}
"""Ensembles that cannot be served, and what is said of each."""
UNFIT["pairing"] = f"{SINGLE} {NUMBER.replace('INPUT', 'OTHER')}"


@pytest.fixture(scope="module")
def shared_ensembles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The server behind `ensembles`."""
    broken = {name: text for name, (text, _) in BROKEN.items()}
    models = [ModelText(name, text) for name, text in (MODELS | UNFIT | broken).items()]
    with running_target(tmp_path_factory.mktemp("ensembles"), [*models, "repeating"]) as target:
        yield target


@pytest.fixture
def ensembles(request: pytest.FixtureRequest, shared_ensembles: Target) -> Iterator[Target]:
    """A server with `MODELS`, and with those that it cannot serve."""
    yield from watched(request, shared_ensembles)


@pytest.fixture(params=["http", "grpc"])
async def caller(request: pytest.FixtureRequest, ensembles: Target) -> AsyncIterator[Caller]:
    async with Caller(request.param, ensembles) as made:
        yield made


@pytest.mark.parametrize("name", BROKEN)
async def test_a_graph_that_cannot_be_served_is_told_with_its_fault(ensembles: Target, name: str) -> None:
    async with http_aio.InferenceServerClient(ensembles.http) as client:
        index: Any = await client.get_model_repository_index()
        assert not await client.is_model_ready(name)
    lines = {line["name"]: line for line in index}

    # A Triton tells the reasons of some in its log alone.
    told = lines[name]["reason"] if ensembles.is_mesh else ensembles.log()
    assert BROKEN[name][1] in told
    assert "READY" == lines["two_states"]["state"]


async def test_loading_a_graph_that_cannot_be_served_says_why(make_target: MakeTarget) -> None:
    """The error is of the ensemble that was to be loaded, whichever model is at fault."""
    around = {
        "stranger": BROKEN["stranger"],
        "of_another_type": BROKEN["of_another_type"],
        "circle_a": BROKEN["circle_a"],
        "of_no_such_version": (
            ensemble(step("plain", "INPUT=INPUT", "OUTPUT=OUTPUT")).replace("model_version: -1", "model_version: 7"),
            "ensemble 'of_no_such_version' depends on 'plain' whose required version 7 is not loaded.",
        ),
        "of_unlucky": (
            ensemble(step("unlucky", "INPUT=INPUT", "OUTPUT=OUTPUT")),
            (
                "ensemble 'of_unlucky' depends on 'unlucky' which has no loaded version. Model 'unlucky' loading "
                "failed with error: version 1 is at UNAVAILABLE state: "
            ),
        ),
    }
    models = {"plain": PLAIN, "wrong_type": WRONG_TYPE, "circle_b": BROKEN["circle_b"][0]}
    texts = [
        ModelText(name, text) for name, text in (models | {name: text for name, (text, _) in around.items()}).items()
    ]
    unlucky = ModelText("unlucky", PLAIN, {"1/model.py": "raise RuntimeError('no such luck')"})
    target = make_target([*texts, unlucky], options={"model-control-mode": "explicit"})

    async with http_aio.InferenceServerClient(target.http) as client:
        for name, (_, reason) in around.items():
            with pytest.raises(InferenceServerException) as caught:
                await client.load_model(name)
            told: Any = caught.value
            assert told.message().startswith(f"load failed for model '{name}': {reason}")
            assert "400" == told.status()
            assert ("no such luck" in told.message()) == (name == "of_unlucky")


async def test_a_sequences_flags_and_id_reach_every_step(caller: Caller) -> None:
    of, identity = caller.of("two_states"), fresh_id()
    flags = [(True, False), (False, False), (False, True)]
    answers = [
        await of.infer(Step(identity, value, start=start, end=end, request_id=f"r{value}", parameters={"note": "n"}))
        for value, (start, end) in enumerate(flags, start=1)
    ]

    # The plain model sums by the correlation id too: it has it as well.
    assert [1, 5, 15] == [answer.total for answer in answers]
    assert ["r1", "r2", "r3"] == [answer.request_id for answer in answers]
    assert {("two_states", "1")} == {(answer.model, answer.version) for answer in answers}
    for answer, (start, end), value in zip(answers, flags, (1, 2, 3), strict=True):
        rows = [seen_in(answer, name) for name in ("FIRST", "BETWEEN", "SECOND")]
        assert {identity} == {row["correlation_id"] for row in rows}
        assert {f"r{value}"} == {row["request_id"] for row in rows}
        assert {(start, end)} == {(bool(row["flags"] & 1), bool(row["flags"] & 2)) for row in rows}
        assert [{"note": "n"}] * 3 == [row["parameters"] for row in rows]
        for row in (rows[0], rows[2]):
            controls = {name: np.array(row["tensors"][name]["data"]).item() for name in ("START", "END", "ID")}
            assert {"START": start, "END": end, "ID": identity} == controls
        assert {"sequence_id": identity, "sequence_start": start, "sequence_end": end} == dict(answer.parameters)


def seen_in(answer: Any, name: str) -> Any:
    """What a step's model saw of its request."""
    (element,) = answer.outputs[name].reshape(-1)
    document = json.loads(element)
    return document["rows"][document["row"]]


async def test_sequences_side_by_side_keep_their_states_apart(caller: Caller) -> None:
    of, ids = caller.of("two_states"), [fresh_id() for _ in range(3)]
    for value in (1, 2, 3):
        for place, identity in enumerate(ids):
            answer = await of(identity, value + place, start=value == 1, end=value == 3)
            sums = [1 + place, 2 + place, 3 + place][:value]
            for _ in range(3):
                sums = list(itertools.accumulate(sums))
            assert sums[-1] == answer.total


async def test_what_a_sequence_lacks_is_told_with_the_ensembles_name(caller: Caller) -> None:
    of = caller.of("two_states")
    with refused(
        Code.INVALID_ARG,
        "in ensemble 'two_states', inference request to model 'state_a' must specify a non-zero or non-empty "
        "correlation ID",
    ):
        await of.infer(Step())
    identity = fresh_id()
    with refused(
        Code.INVALID_ARG,
        f"in ensemble 'two_states', inference request for sequence {identity} to model 'state_a' must specify the "
        "START flag on the first request of the sequence",
    ):
        await of(identity, 1)


@pytest.mark.parametrize(("model", "around"), [("chain", "in ensemble 'chain', "), ("outer", "in ensemble 'outer', ")])
async def test_a_steps_error_has_the_names_of_the_ensembles_around_it(caller: Caller, model: str, around: str) -> None:
    with refused(Code.INTERNAL, f"{around}no, thanks"):
        await caller.of(model).infer(Step(parameters={"fail": "no, thanks"}))


async def test_an_error_of_an_ensemble_within_an_ensemble_names_both(ensembles: Target) -> None:
    async with Caller("grpc", ensembles, "outer") as caller:
        with refused(Code.INVALID_ARG, "unexpected inference output 'WHAT' for model 'outer'"):
            await caller.infer(Step(outputs=("WHAT",)))


async def test_a_request_is_checked_against_the_ensembles_own_configuration(caller: Caller) -> None:
    of = caller.of("chain")
    two = np.array([[1, 2]], np.int32)
    many = np.zeros((5, 1), np.int32)
    for request, message in (
        (Step(inputs={}), "expected 1 inputs but got 0 inputs for model 'chain'"),
        (Step(inputs={"WHAT": two[:, :1]}), "unexpected inference input 'WHAT' for model 'chain'"),
        (
            Step(inputs={"INPUT": two}),
            "unexpected shape for input 'INPUT' for model 'chain'. Expected [-1,1], got [1,2]",
        ),
        (Step(inputs={"INPUT": many}), "inference request batch-size must be <= 4 for 'chain'"),
        (
            Step(inputs={"INPUT": many[:1].astype(np.float32)}),
            "inference input 'INPUT' data-type is 'FP32', but model 'chain' expects 'INT32'",
        ),
        (Step(outputs=("WHAT",)), "unexpected inference output 'WHAT' for model 'chain'"),
    ):
        with pytest.raises(Refused) as caught:
            await of.infer(request)
        assert message in caught.value.message
        assert caught.value.is_code(Code.INVALID_ARG), caught.value


async def test_batches_go_through_and_outputs_are_those_asked_for(caller: Caller) -> None:
    three = np.array([[1], [2], [3]], np.int32)
    whole = await caller.of("chain").infer(Step(inputs={"INPUT": three}))
    few = await caller.of("two_states").infer(Step(fresh_id(), start=True, end=True, outputs=("SECOND", "OUTPUT")))

    assert [[1], [2], [3]] == whole.outputs["OUTPUT"].tolist()
    assert {"SECOND", "OUTPUT"} == set(few.outputs)


async def test_a_batch_dimension_is_taken_away_and_added_again(caller: Caller) -> None:
    answer = await caller.of("single_behind").infer(Step(value=7))

    assert [[7]] == answer.outputs["OUTPUT"].tolist()


@pytest.mark.parametrize("model", ["reshaping", "around_reshaping"])
async def test_the_steps_see_the_shapes_that_their_ensemble_makes_and_clients_the_declared_ones(
    caller: Caller, model: str
) -> None:
    answer = await caller.of(model).infer(Step(inputs={"INPUT": np.array([[[4]], [[5]]], np.int32)}))

    assert [[[[4]]], [[[5]]]] == answer.outputs["OUTPUT"].tolist()


@pytest.mark.parametrize(("model", "passed"), [("passing", "INPUT"), ("around_passing", "again")])
async def test_an_input_may_be_an_output_too(caller: Caller, model: str, passed: str) -> None:
    answer = await caller.of(model).infer(Step(value=7))

    assert {"OUTPUT": 7, passed: 7} == {name: array.item() for name, array in answer.outputs.items()}


async def test_an_output_that_a_step_leaves_out_is_left_out(caller: Caller) -> None:
    number = np.array([[5]], np.int32)
    of = caller.of("left_out")
    whole = await of.infer(Step(inputs={"INPUT": number, "EXTRA": number + 1}))
    without = await of.infer(Step(inputs={"INPUT": number}))

    assert {"OUTPUT": 5, "EXTRA_ECHO": 6} == {name: array.item() for name, array in whole.outputs.items()}
    assert {"OUTPUT": 5} == {name: array.item() for name, array in without.outputs.items()}


async def test_an_ensemble_is_described_as_any_model(ensembles: Target) -> None:
    async with http_aio.InferenceServerClient(ensembles.http) as client:
        metadata: Any = await client.get_model_metadata("chain")
        config: Any = await client.get_model_config("chain")
        decoupled: Any = await client.get_model_config("answers")

    assert "ensemble" == metadata["platform"]
    assert [{"name": "INPUT", "datatype": "INT32", "shape": [-1, 1]}] == metadata["inputs"]
    assert ("ensemble", "", 4) == (config["platform"], config["backend"], config["max_batch_size"])
    assert {
        "model_name": "plain",
        "model_version": -1,
        "input_map": {"INPUT": "INPUT"},
        "output_map": {"OUTPUT": "mid"},
        "model_namespace": "",
    } == config["ensemble_scheduling"]["step"][0]
    assert {"decoupled": True} == decoupled["model_transaction_policy"]


# -- decoupled steps ------------------------------------------------------------------------------------------------


@pytest.fixture
async def client(ensembles: Target) -> AsyncIterator[Any]:
    async with grpc_aio.InferenceServerClient(ensembles.grpc) as client:
        yield client


def counted(*values: int, **said: Any) -> dict[str, Any]:
    """A request to the ensemble with a decoupled step."""
    return {**asked(*values, **said), "model_name": "answers"}


@pytest.mark.parametrize("thread", [False, True])
async def test_each_answer_of_a_decoupled_step_is_one_of_the_ensemble(client: Any, *, thread: bool) -> None:
    requests = [counted(*range(count), name=f"r{count}", thread=thread) for count in (0, 1, 5)]

    got = await streamed(client, requests)

    assert [[], [0], [0, 1, 2, 3, 4]] == [got.of(name) for name in ("r0", "r1", "r5")]


async def test_the_final_flag_comes_once_and_last(ensembles: Target) -> None:
    def finals(got: Got) -> tuple[list[Any], int, bool | None]:
        return [content for _, content in got if content is not None], sum(map(bool, got.finals)), got.finals[-1]

    assert ([7, 8], 1, True) == finals(with_empty_finals(ensembles.grpc, counted(7, 8)))
    assert ([7, 8], 1, True) == finals(with_empty_finals(ensembles.grpc, counted(7, 8, flag=True)))
    assert ([], 1, True) == finals(with_empty_finals(ensembles.grpc, counted()))


async def test_unary_calls_of_a_decoupled_ensemble_are_refused(ensembles: Target) -> None:
    numbers = {"INPUT": np.array([1], np.int32)}
    for protocol, text in (("grpc", "ModelInfer RPC"), ("http", "HTTP end point")):
        async with Caller(protocol, ensembles, "answers") as caller:
            with pytest.raises(Refused) as caught:
                await caller.infer(Step(inputs=numbers))
        assert f"{text} doesn't support models with decoupled transaction policy" == caught.value.message
        assert caught.value.is_code(Code.UNSUPPORTED)


@pytest.mark.differs("2.51 drops an answer that is in the steps behind when the error comes")
async def test_an_error_of_a_decoupled_step_is_the_ensembles_last_answer(ensembles: Target, client: Any) -> None:
    got = await streamed(client, [counted(1, 2, 3, fail_at=1)])

    assert ("", "in ensemble 'answers', answer 1 failed") == got[-1]
    assert [1] == [content for _, content in got[:-1]] or not ensembles.is_mesh
