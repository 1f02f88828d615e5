"""A module that keeps state in its attributes has one state per sequence; what cannot be kept apart is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import psutil
import pytest
import torch

from executor.engine.base import Row, RowError, RowResult
from executor.engine.pytorch import loading
from executor.engine.pytorch.engine import TorchEngine
from executor.engine.pytorch.signature import script_deprecation_ignored
from executor.engine.pytorch.weights import share_weights, weights_file
from shared.contract.errors import ConfigError, LoadError
from shared.contract.model_config import ControlKind, ControlSpec, ModelConfig, StateSpec, TensorSpec
from tests.executor.engine import keeping_modules
from tests.executor.engine.model_workshop import (
    Workshop,
    array,
    find_backend,
    fp32,
    plain_config,
    results,
    scripted,
    sequence_config,
    wire,
)

X3, Y4 = fp32("x", 3), fp32("y", 4)
X1, Y1 = fp32("x", 1), fp32("y", 1)


def completed_states(
    workshop: Workshop, name: str, inputs: Sequence[TensorSpec], batch: int = 8, states: Sequence[dict[str, Any]] = ()
) -> list[StateSpec]:
    """The states that the completion declares, beside those that are declared already."""
    config: dict[str, Any] = {
        "name": name,
        "max_batch_size": batch,
        "input": [
            {"name": spec.name, "data_type": f"TYPE_{spec.datatype}", "dims": list(spec.dims)} for spec in inputs
        ],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}],
        "sequence_batching": {"state": list(states)} if states else {},
    }
    found = json.loads(find_backend("pytorch").auto_complete(json.dumps(config), workshop.version_dir(name)))
    return [
        StateSpec(each["input_name"], each["output_name"], each["data_type"].removeprefix("TYPE_"), tuple(each["dims"]))
        for each in found["sequence_batching"].get("state", [])
    ]


def kept(
    workshop: Workshop,
    module: torch.nn.Module,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    **choices: Any,
) -> tuple[TorchEngine, ModelConfig]:
    """The module, saved as people save it and served with the states that the completion finds."""
    workshop.script("kept", module)
    states = completed_states(workshop, "kept", inputs, choices.get("max_batch_size", 8))
    config = sequence_config("kept", "pytorch", inputs=inputs, outputs=outputs, states=states, **choices)
    return cast("TorchEngine", workshop.load(config)), config


def alone(module: torch.nn.Module, steps: Sequence[Sequence[float]]) -> list[Any]:
    """What a fresh module of its own answers to a sequence of steps."""
    module.eval()
    with torch.inference_mode():
        return [module(torch.tensor([step])).clone().numpy() for step in steps]


def step(values: Sequence[float], slot: int, *, start: bool = False) -> Row:
    return Row({"x": wire("x", [list(values)])}, slot=slot, start=start)


STEPS = [[0.5, -1.0, 2.0], [1.5, 0.25, -0.5], [-2.0, 1.0, 0.75]]
OTHERS = [[-1.0, 0.5, 0.5], [0.125, 2.0, -1.5], [1.0, 1.0, -1.0]]


@pytest.mark.parametrize("direct", [False, True])
def test_sequences_that_share_batches_do_not_share_the_buffer(workshop: Workshop, *, direct: bool) -> None:
    engine, _ = kept(workshop, keeping_modules.Rnn(), [X3], [Y4], direct=direct)

    one: list[Any] = []
    other: list[Any] = []
    for number, (mine, given) in enumerate(zip(STEPS, OTHERS, strict=True)):
        first = number == 0
        found = results(engine, [step(mine, 0, start=first), step(given, 1, start=first)])
        one.append(array(found[0], "y"))
        other.append(array(found[1], "y"))

    assert not engine.alone_because
    np.testing.assert_allclose(alone(keeping_modules.Rnn(), STEPS), one, rtol=1e-5)
    np.testing.assert_allclose(alone(keeping_modules.Rnn(), OTHERS), other, rtol=1e-5)


def test_a_state_begins_with_what_the_file_holds_in_every_sequence(workshop: Workshop) -> None:
    engine, _ = kept(workshop, keeping_modules.Rnn(), [X3], [Y4])

    first = [array(results(engine, [step(STEPS[0], 0, start=True)])[0], "y") for _ in range(2)]

    np.testing.assert_array_equal(first[0], first[1])
    np.testing.assert_allclose(alone(keeping_modules.Rnn(), STEPS[:1])[0], first[0], rtol=1e-5)


def test_a_sequence_goes_on_elsewhere_from_its_checkpoint(workshop: Workshop) -> None:
    engine, config = kept(workshop, keeping_modules.Rnn(), [X3], [Y4])
    results(engine, [step(STEPS[0], 0, start=True)])
    (middle,) = results(engine, [step(STEPS[1], 0)])

    other = cast("TorchEngine", workshop.load(config))
    results(other, [step(OTHERS[0], 5, start=True)])
    other.load_states([5], [middle.states])
    (last,) = results(other, [step(STEPS[2], 5)])

    assert ["hidden_state"] == [*middle.states]
    np.testing.assert_allclose(alone(keeping_modules.Rnn(), STEPS)[2], array(last, "y"), rtol=1e-5)


def test_a_change_in_place_inside_of_a_submodule_is_found(workshop: Workshop) -> None:
    engine, config = kept(workshop, keeping_modules.InPlace(), [X1], [Y1])

    results(engine, [step([1], 0, start=True), step([10], 1, start=True)])
    found = results(engine, [step([2], 0), step([20], 1)])

    assert config.sequence_batching is not None
    assert [StateSpec("inner.total", "inner.total", "FP32", (1,))] == [*config.sequence_batching.states]
    assert [3, 30] == [array(result, "y").item() for result in found]


def test_a_table_that_is_only_read_is_no_state(workshop: Workshop) -> None:
    """Torch takes a tensor among indices, which is inside of a list, for one that may be written to."""
    workshop.script("kept", keeping_modules.LookedUp())

    assert ["total"] == [state.input_name for state in completed_states(workshop, "kept", [X3])]


@pytest.mark.parametrize("way", ["slice", "list", "view"])
def test_a_write_by_another_name_is_found(workshop: Workshop, way: str) -> None:
    """Kept apart, or refused by the buffer's name: never taken for something that is only read."""
    workshop.script("kept", keeping_modules.WrittenThroughAView(way))

    try:
        found = [state.input_name for state in completed_states(workshop, "kept", [X3])]
    except ConfigError as refusal:
        found = ["total"] if "total" in refusal.message else []
    assert ["total"] == found


def test_a_traced_module_keeps_what_it_changes_in_place(workshop: Workshop) -> None:
    with script_deprecation_ignored():
        traced: Any = cast("Any", torch.jit).trace(keeping_modules.InPlace().eval(), torch.zeros(1, 1))
        torch.jit.save(traced, str(workshop.version_dir("kept") / "model.pt"))
    states = completed_states(workshop, "kept", [X1])
    engine = workshop.load(sequence_config("kept", "pytorch", inputs=[X1], outputs=[Y1], states=states))

    results(engine, [step([1], 0, start=True), step([10], 1, start=True)])
    found = results(engine, [step([2], 0), step([20], 1)])

    assert [3, 30] == [array(result, "y").item() for result in found]


def test_an_exported_program_keeps_the_buffers_that_it_changes(workshop: Workshop) -> None:
    workshop.program("kept", keeping_modules.InPlace(), (torch.zeros(1, 1),), dynamic=False)
    states = completed_states(workshop, "kept", [X1], batch=1)
    config = sequence_config("kept", "pytorch", inputs=[X1], outputs=[Y1], states=states, max_batch_size=1)
    engine = workshop.load(config)

    results(engine, [step([1], 0, start=True)])
    results(engine, [step([10], 1, start=True)])
    found = [results(engine, [step([2], 0)])[0], results(engine, [step([20], 1)])[0]]

    assert [3, 30] == [array(result, "y").item() for result in found]


def test_buffers_without_a_batch_dimension_and_plain_numbers_are_kept_row_by_row(workshop: Workshop) -> None:
    x, y = fp32("x", 2), fp32("y", 6)
    engine, config = kept(workshop, keeping_modules.Vector(), [x], [y])

    results(engine, [step([1, 2], 0, start=True), step([10, 20], 1, start=True)])
    found = results(engine, [step([3, 4], 0), step([30, 40], 1)])
    fresh = results(engine, [step([5, 5], 2, start=True)])

    assert config.sequence_batching is not None
    assert {"total": "FP32", "last": "FP32", "steps": "INT64", "factor": "FP64", "odd": "BOOL"} == {
        state.input_name: state.datatype for state in config.sequence_batching.states
    }
    assert "has no batch dimension" in engine.alone_because
    assert [4, 6, 3, 12, 2, 0] == array(found[0], "y")[0].tolist()
    assert [40, 60, 30, 12, 2, 0] == array(found[1], "y")[0].tolist()
    assert [5, 5, 5, 11, 1, 1] == array(fresh[0], "y")[0].tolist()


def test_rows_that_would_mix_run_alone(workshop: Workshop) -> None:
    two = [fp32("x", 2)], [fp32("y", 2)]
    engine, _ = kept(workshop, keeping_modules.MeanOfBatch(), *two)

    found = results(engine, [step([2, 4], 0, start=True), step([20, 40], 1, start=True)])

    assert "change each other's results" in engine.alone_because
    assert [[2, 4], [20, 40]] == [array(result, "y")[0].tolist() for result in found]


def test_a_configuration_that_the_module_does_not_keep_is_told_at_load(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    kept(workshop, keeping_modules.Rnn(), [X3], [fp32("y", 5)])

    assert (
        "model 'kept' failed on a made-up step at load: "
        "model 'kept' returned a wrong output 'y': expected FP32 [1,5], got FP32 [1,4]"
    ) in caplog.messages


def test_a_model_without_batch_dimension_keeps_its_buffers_whole(workshop: Workshop) -> None:
    x, y = fp32("x", 1, 1), fp32("y", 1, 1)
    engine, config = kept(workshop, keeping_modules.InPlace(), [x], [y], max_batch_size=0)

    results(engine, [step([1], 0, start=True)])
    results(engine, [step([10], 1, start=True)])
    (found,) = results(engine, [step([2], 0)])

    assert config.sequence_batching is not None
    assert (1, 1) == config.sequence_batching.states[0].dims
    assert 3 == array(found, "y").item()


def test_what_is_none_before_the_first_step_is_none_in_every_sequence(workshop: Workshop) -> None:
    engine, config = kept(workshop, keeping_modules.FromNone(), [X3], [fp32("y", 3)])

    first = results(engine, [step(STEPS[0], 0, start=True), step(OTHERS[0], 1, start=True)])
    second = results(engine, [step(STEPS[1], 0), step(OTHERS[1], 1)])
    other = cast("TorchEngine", workshop.load(config))
    other.load_states([0], [second[0].states])
    (third,) = results(other, [step(STEPS[2], 0)])

    mine = [array(first[0], "y"), array(second[0], "y"), array(third, "y")]
    np.testing.assert_allclose(alone(keeping_modules.FromNone(), STEPS), mine)
    np.testing.assert_allclose(alone(keeping_modules.FromNone(), OTHERS[:2])[1], array(second[1], "y"))


def test_an_empty_buffer_is_empty_in_every_sequence(workshop: Workshop) -> None:
    engine, _ = kept(workshop, keeping_modules.FromEmpty(), [X3], [fp32("y", 3)])

    results(engine, [step([1, 1, 1], 0, start=True), step([5, 5, 5], 1, start=True)])
    found = results(engine, [step([2, 2, 2], 0), step([6, 6, 6], 1)])

    assert [[3, 3, 3], [11, 11, 11]] == [array(result, "y")[0].tolist() for result in found]


# The first batch on a GPU finds them so (`pytorch.recurrent`).
@pytest.mark.filterwarnings("ignore:RNN module weights:UserWarning")
def test_a_pair_of_states_that_begins_as_none_is_kept(workshop: Workshop) -> None:
    engine, config = kept(workshop, keeping_modules.LstmFromNone(), [X3], [Y4])

    found = [
        results(engine, [step(mine, 0, start=number == 0), step(given, 1, start=number == 0)])
        for number, (mine, given) in enumerate(zip(STEPS, OTHERS, strict=True))
    ]

    assert config.sequence_batching is not None
    assert ["hidden.0", "hidden.1"] == [state.input_name for state in config.sequence_batching.states]
    for place, steps in enumerate((STEPS, OTHERS)):
        expected = alone(keeping_modules.LstmFromNone(), steps)
        np.testing.assert_allclose(expected, [array(each[place], "y") for each in found], rtol=1e-5)


def test_a_failed_step_leaves_the_state_as_it_was(workshop: Workshop) -> None:
    engine, _ = kept(workshop, keeping_modules.Fails(), [X1], [Y1])
    results(engine, [step([1], 0, start=True), step([10], 1, start=True)])

    failed = engine.run([step([-5], 0), step([20], 1)], [True, True]).rows
    found = results(engine, [step([2], 0), step([30], 1)])

    assert isinstance(failed[0], RowError)
    assert isinstance(failed[1], RowResult)
    assert [3, 60] == [array(result, "y").item() for result in found]


def test_two_instances_with_shared_weights_keep_their_states_apart(workshop: Workshop) -> None:
    engine, config = kept(workshop, keeping_modules.Rnn(), [X3], [Y4], parameters={"ENABLE_WEIGHT_SHARING": "true"})
    other = cast("TorchEngine", workshop.load(config))

    results(engine, [step(STEPS[0], 0, start=True)])
    results(other, [step(OTHERS[0], 0, start=True)])
    (found,) = results(engine, [step(STEPS[1], 0)])

    np.testing.assert_allclose(alone(keeping_modules.Rnn(), STEPS)[1], array(found, "y"), rtol=1e-5)
    assert weights_of(engine) == weights_of(other)


def test_a_second_instance_with_shared_weights_takes_no_memory_for_its_own(workshop: Workshop) -> None:
    """Nor does what was asked of the file leave a copy behind."""
    workshop.script("wide", torch.nn.Linear(3200, 3200, bias=False))  # 41 MB: such memory goes back at once
    x, y = fp32("input", 3200), fp32("y", 3200)
    config = plain_config("wide", "pytorch", inputs=[x], outputs=[y])
    config = msgspec.structs.replace(config, parameters={"ENABLE_WEIGHT_SHARING": "true"})
    workshop.load(config)
    before = psutil.Process().memory_info().rss

    for _ in range(4):
        workshop.load(config)

    assert psutil.Process().memory_info().rss - before < 41_000_000


def test_the_weights_of_a_module_that_others_share_are_not_read_while_it_runs(tmp_path: Path) -> None:
    """TorchScript sets attributes without Python's lock: who reads them meanwhile may read memory that is freed."""

    class Running(torch.nn.Linear):
        runs = False

        def named_buffers(self, *arguments: Any, **named: Any) -> Any:
            assert not self.runs
            return super().named_buffers(*arguments, **named)

    path = tmp_path / "model.pt"
    path.touch()
    first, second = Running(1, 1), Running(1, 1)
    share_weights(first, weights_file(path, torch.device("cpu")), ())
    first.runs = True

    share_weights(second, weights_file(path, torch.device("cpu")), ())

    assert first.weight.data_ptr() == second.weight.data_ptr()


def test_a_file_that_changes_while_it_is_loaded_does_not_get_the_weights_of_the_one_before(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_script = loading.load_script

    def changing(path: Path, device: torch.device) -> Any:
        module = load_script(path, device)
        workshop.script("line", torch.nn.Linear(1, 1))
        return module

    workshop.script("line", torch.nn.Linear(1, 1))
    x, y = fp32("input", 1), fp32("y", 1)
    config = plain_config("line", "pytorch", inputs=[x], outputs=[y])
    config = msgspec.structs.replace(config, parameters={"ENABLE_WEIGHT_SHARING": "true"})
    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_script", changing)
        before = cast("TorchEngine", workshop.load(config))

    assert not weights_of(before) & weights_of(cast("TorchEngine", workshop.load(config)))


def test_without_weight_sharing_each_instance_has_weights_of_its_own(workshop: Workshop) -> None:
    engine, config = kept(workshop, keeping_modules.Rnn(), [X3], [Y4])

    assert not weights_of(engine) & weights_of(cast("TorchEngine", workshop.load(config)))


def weights_of(engine: TorchEngine) -> set[int]:
    module = engine._forward
    assert isinstance(module, torch.nn.Module)
    return {parameter.data_ptr() for parameter in module.parameters()}


# --- what is refused


def test_every_attribute_whose_shape_nothing_tells_is_named_and_the_rest_of_them_where_some_are_declared(
    workshop: Workshop,
) -> None:
    workshop.script("kept", keeping_modules.TwoFromNone())
    remedy = "which forward changes, is unknown.*takes no made-up input.*Declare each as a state"
    declared = {"input_name": "total", "output_name": "total", "data_type": "TYPE_FP32", "dims": [-1]}

    with pytest.raises(ConfigError, match=f"the shape of 'total', 'last', {remedy}"):
        completed_states(workshop, "kept", [X1])
    with pytest.raises(ConfigError, match=f"the shape of 'last', {remedy}"):
        completed_states(workshop, "kept", [X1], states=[declared])


def test_no_made_up_input_is_larger_than_is_needed_or_than_memory(workshop: Workshop) -> None:
    """Of 512 in each dimension it would have 256 GiB."""
    four = TensorSpec("x", "FP32", (-1,) * 4)
    workshop.script("kept", keeping_modules.FromNone())
    workshop.script("refuses", keeping_modules.TwoFromNone())

    (state,) = completed_states(workshop, "kept", [four])
    assert (-1,) * 5 == state.dims
    with pytest.raises(ConfigError, match="one of 'x' with dimensions of 512 is too large"):
        completed_states(workshop, "refuses", [four])


def test_a_state_of_a_type_that_no_state_has_is_named(workshop: Workshop) -> None:
    workshop.script("kept", keeping_modules.Complex())

    with pytest.raises(LoadError, match=r"tensor 'phase' of the model is a torch\.complex64"):
        completed_states(workshop, "kept", [X1])


@pytest.mark.parametrize("field", ["output_name", "data_type"])
def test_what_a_declaration_lacks_is_named(workshop: Workshop, field: str) -> None:
    workshop.script("kept", keeping_modules.TwoFromNone())
    declared = {"input_name": "total", "output_name": "total", "data_type": "TYPE_FP32", "dims": [-1]}
    del declared[field]

    with pytest.raises(ConfigError, match=f"must specify '{field}': .*total"):
        completed_states(workshop, "kept", [X1], states=[declared])


def test_states_that_are_written_in_place_and_returned_together_are_kept(workshop: Workshop) -> None:
    """Neither a loop, a list that an operator reads, nor what forward returns makes one memory of two."""
    engine, _ = kept(workshop, keeping_modules.PairInPlace(), [X3], [fp32("hidden_out", 4), fp32("cell_out", 4)])

    found = [
        results(engine, [step(mine, 0, start=number == 0), step(given, 1, start=number == 0)])
        for number, (mine, given) in enumerate(zip(STEPS, OTHERS, strict=True))
    ]

    assert not engine.alone_because
    for row, steps in enumerate([STEPS, OTHERS]):
        module = keeping_modules.PairInPlace().eval()
        for given, answers in zip(steps, found, strict=True):
            for name, expected in zip(["hidden_out", "cell_out"], module(torch.tensor([given])), strict=True):
                np.testing.assert_allclose(expected.detach().numpy(), array(answers[row], name), rtol=1e-5)


def test_the_states_of_a_whole_layer_that_are_written_in_place_are_kept(workshop: Workshop) -> None:
    engine, _ = kept(workshop, keeping_modules.LayersInPlace(), [X3], [Y4])

    found = [
        results(engine, [step(mine, 0, start=number == 0), step(given, 1, start=number == 0)])
        for number, (mine, given) in enumerate(zip(STEPS, OTHERS, strict=True))
    ]

    for row, steps in enumerate([STEPS, OTHERS]):
        expected = alone(keeping_modules.LayersInPlace(), steps)
        np.testing.assert_allclose(expected, [array(answers[row], "y") for answers in found], rtol=1e-5)


@pytest.mark.parametrize("exported", [False, True])
def test_a_parameter_that_forward_changes_is_kept(workshop: Workshop, *, exported: bool) -> None:
    if exported:
        workshop.program("kept", keeping_modules.Learns(), (torch.zeros(1, 1),), dynamic=False)
    else:
        workshop.script("kept", keeping_modules.Learns())
    states = completed_states(workshop, "kept", [X1], 1)
    config = sequence_config("kept", "pytorch", inputs=[X1], outputs=[Y1], states=states, max_batch_size=1)
    engine = workshop.load(config)

    found = [
        array(results(engine, [step([value], slot, start=start)])[0], "y").item()
        for value, slot, start in [(1, 0, True), (10, 1, True), (2, 0, False), (20, 1, False)]
    ]

    assert [StateSpec("weight", "weight", "FP32", (1,))] == states
    assert [1, 10, 3, 30] == found


@pytest.mark.parametrize(
    ("way", "exported"),
    [
        *itertools.product(["batch_norm", "instance_norm", "dropout", "type_as"], [False, True]),
        *itertools.product(["fork", "dictionary"], [False]),
    ],
)
def test_a_write_that_torch_does_not_tell_is_kept_or_refused(workshop: Workshop, way: str, *, exported: bool) -> None:
    module = keeping_modules.WrittenUnknownToTorch(way).eval()
    if exported:
        workshop.program("kept", module, (torch.zeros(1, 3),), dynamic=False)
    else:
        workshop.script("kept", module)

    try:
        states = completed_states(workshop, "kept", [X3], 1)
    except ConfigError as refusal:
        assert "forward writes to" in refusal.message  # noqa: PT017 - either is right
        return
    config = sequence_config("kept", "pytorch", inputs=[X3], outputs=[Y1], states=states, max_batch_size=1)
    engine = workshop.load(config)
    found = [
        [array(results(engine, [step(values, slot, start=not number)])[0], "y") for slot, values in enumerate(pair)]
        for number, pair in enumerate(zip(STEPS, OTHERS, strict=True))
    ]

    mine, given = zip(*found, strict=True)
    fresh = partial(keeping_modules.WrittenUnknownToTorch, way)
    np.testing.assert_allclose(alone(scripted(fresh().eval()), STEPS), mine, rtol=1e-5)
    np.testing.assert_allclose(alone(scripted(fresh().eval()), OTHERS), given, rtol=1e-5)


@pytest.mark.parametrize(("way", "reason"), [("branch", "by a number of a tensor"), ("where", "change each other's")])
def test_rows_that_mix_by_rare_numbers_alone_run_alone(workshop: Workshop, way: str, reason: str) -> None:
    engine, _ = kept(workshop, keeping_modules.Forgets(way), [X3], [Y1])

    assert reason in engine.alone_because


def test_hooks_of_the_module_itself_are_refused_with_a_remedy(workshop: Workshop) -> None:
    """They run with each call, and are no part of the code of forward."""
    workshop.script("kept", keeping_modules.Hooked())

    with pytest.raises(ConfigError, match="the module itself has hooks"):
        completed_states(workshop, "kept", [X3])


def test_a_program_whose_buffers_share_memory_is_refused_with_a_remedy(workshop: Workshop) -> None:
    """Torch itself cannot tell what it changes."""
    workshop.program("kept", keeping_modules.TwoNames(), (torch.zeros(1, 1),), dynamic=False)

    with pytest.raises(ConfigError, match=r"cannot be told \(buffers may share memory\): .*Remedy: make it a tensor"):
        completed_states(workshop, "kept", [X1], 1)


def test_a_tensor_that_grows_is_kept_where_its_state_is_declared_so(workshop: Workshop) -> None:
    engine, _ = kept(workshop, keeping_modules.Grows(), [X1], [Y1])
    (failed,) = engine.run([step([1], 0, start=True)], [True]).rows

    assert isinstance(failed, RowError)
    assert "got FP32 [1,2,1]; a size that varies is declared as -1 in the state's dims" in failed.message

    states = [StateSpec("cache", "cache", "FP32", (-1, 1))]
    config = sequence_config("kept", "pytorch", inputs=[X1], outputs=[Y1], states=states)
    engine = cast("TorchEngine", workshop.load(config))
    results(engine, [step([1], 0, start=True), step([10], 1, start=True)])
    found = results(engine, [step([2], 0), step([20], 1)])

    assert not engine.alone_because
    assert [3, 30] == [array(result, "y").item() for result in found]


def test_a_write_to_what_an_operator_put_into_a_list_is_found(workshop: Workshop) -> None:
    engine, _ = kept(workshop, keeping_modules.InAMadeList(), [X1], [Y1])

    results(engine, [step([1], 0, start=True), step([10], 1, start=True)])
    found = results(engine, [step([2], 0), step([20], 1)])

    assert [3, 30] == [array(result, "y").item() for result in found]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (keeping_modules.ListOfStates(), r"forward changes the attribute 'cache', a List\[Tensor\] of the module"),
        (keeping_modules.InAList(), r"forward writes to 'totals' of the module in place \(add_\)"),
        (keeping_modules.Tied(), r"apart for each sequence: forward writes in place to 'whole', [a-z ]+ 'part'\."),
        (keeping_modules.OneOfTwo(), r"in place \(add_\) to memory that 'even' and 'odd' may share"),
    ],
)
def test_what_cannot_be_kept_apart_is_refused_by_name_with_a_remedy(
    workshop: Workshop, module: torch.nn.Module, text: str
) -> None:
    workshop.script("kept", module)

    with pytest.raises(ConfigError, match=text + r".*Remedy: make it a tensor"):
        completed_states(workshop, "kept", [X1])
    with pytest.raises(ConfigError, match=text):
        workshop.load(sequence_config("kept", "pytorch", inputs=[X1], outputs=[Y1]))


def test_a_module_that_keeps_its_sequences_apart_itself_may_say_so(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    workshop.script("kept", keeping_modules.ByCorrelationId())
    controls = [
        ControlSpec("START", ControlKind.START, "INT32", (0, 1)),
        ControlSpec("CORRID", ControlKind.CORRID, "INT64"),
    ]
    choices: dict[str, Any] = {"inputs": [X1], "outputs": [Y1], "controls": controls}

    def row(value: float, sequence: int, *, start: bool = False) -> Row:
        told = {
            "START": wire("START", [[int(start)]], "<i4", "INT32"),
            "CORRID": wire("CORRID", [[sequence]], "<i8", "INT64"),
        }
        return Row({"x": wire("x", [[value]])}, told, slot=sequence, start=start)

    with pytest.raises(ConfigError, match=r"'totals', a Dict\[int, Tensor\].*so by the parameter sequence_recovery"):
        workshop.load(sequence_config("kept", "pytorch", **choices))
    parameters = {"sequence_recovery": "none"}
    engine = workshop.load(sequence_config("kept", "pytorch", parameters=parameters, **choices))
    results(engine, [row(1, 1, start=True), row(10, 2, start=True)])
    found = results(engine, [row(20, 2), row(2, 1)])

    assert [30, 3] == [array(result, "y").item() for result in found]
    assert "says that it keeps its sequences apart" in caplog.text


def test_a_state_that_no_completion_declared_is_refused_by_name(workshop: Workshop) -> None:
    workshop.script("kept", keeping_modules.InPlace())

    with pytest.raises(LoadError, match=r"changes the attribute 'inner.total'.*declares no state 'inner.total'"):
        workshop.load(sequence_config("kept", "pytorch", inputs=[X1], outputs=[Y1]))


def test_a_declaration_that_does_not_fit_the_attribute_is_refused(workshop: Workshop) -> None:
    workshop.script("kept", keeping_modules.InPlace())
    states = [StateSpec("inner.total", "inner.total", "FP32", (7,))]

    with pytest.raises(LoadError, match=r"declared as FP32 \[7\], but the module's attribute is FP32 \[1,1\]"):
        workshop.load(sequence_config("kept", "pytorch", inputs=[X1], outputs=[Y1], states=states))


def test_a_model_without_sequences_is_served_and_told_what_its_requests_share(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    workshop.script("kept", keeping_modules.InPlace())
    engine = workshop.load(plain_config("kept", "pytorch", inputs=[X1], outputs=[Y1]))

    found = [results(engine, [Row({"x": wire("x", [[1]])})])[0] for _ in range(2)]

    assert [1, 2] == [array(result, "y").item() for result in found]
    assert "shared by all requests to an instance ('inner.total')" in caplog.text


# --- files without a signature


def test_a_dictionary_of_tensors_is_given_by_name(workshop: Workshop) -> None:
    workshop.script("kept", keeping_modules.Dictionary())
    inputs = [fp32("right", 1), fp32("left", 1)]
    engine = workshop.load(plain_config("kept", "pytorch", inputs=inputs, outputs=[fp32("OUT__0", 1)]))

    (result,) = results(engine, [Row({"right": wire("right", [[2]]), "left": wire("left", [[9]])})])

    assert 7 == array(result, "OUT__0").item()


def test_an_absent_optional_input_is_not_in_the_dictionary(workshop: Workshop) -> None:
    workshop.script("kept", keeping_modules.OpenDictionary())
    inputs = [fp32("left", 1), fp32("right", 1, optional=True)]
    engine = workshop.load(plain_config("kept", "pytorch", inputs=inputs, outputs=[fp32("OUT__0", 1)]))
    left = {"left": wire("left", [[9]])}

    ran = results(engine, [Row(left), Row({**left, "right": wire("right", [[2]])})])

    assert [9, 7] == [array(result, "OUT__0").item() for result in ran]


def test_the_input_of_an_ordinary_file_is_found_by_trial_and_told(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    workshop.script("kept", keeping_modules.Numbers())
    config: dict[str, Any] = {"name": "kept", "max_batch_size": 8, "sequence_batching": {"oldest": {}}}

    found = json.loads(find_backend("pytorch").auto_complete(json.dumps(config), workshop.version_dir("kept")))

    assert [{"name": "sequence", "data_type": "TYPE_INT32", "dims": [-1]}] == found["input"]
    assert [{"name": "OUTPUT__0", "data_type": "TYPE_FP32", "dims": [4]}] == found["output"]
    assert ["hidden_state"] == [state["input_name"] for state in found["sequence_batching"]["state"]]
    assert "By trial, input 'sequence' is INT32 [-1], output 'OUTPUT__0' is FP32 [4]" in caplog.text


def test_a_size_that_the_weights_fix_is_found_by_trial(workshop: Workshop) -> None:
    workshop.script("kept", keeping_modules.Rnn())
    config: dict[str, Any] = {"name": "kept", "max_batch_size": 8, "sequence_batching": {"oldest": {}}}

    found = json.loads(find_backend("pytorch").auto_complete(json.dumps(config), workshop.version_dir("kept")))

    assert [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}] == found["input"]


def test_scripting_the_modules_leaves_them_as_they_were() -> None:
    assert torch.equal(torch.full((1, 4), 0.125), scripted(keeping_modules.Rnn()).hidden_state)


def test_the_voice_detector_of_silero_keeps_two_recordings_apart(workshop: Workshop) -> None:
    """A file that others publish, as it is: two attributes are empty before the first step, two are numbers."""
    source = files("silero_vad") / "data" / "silero_vad.jit"
    (workshop.version_dir("kept") / "model.pt").write_bytes(source.read_bytes())
    config = sequence_config(
        "kept",
        "pytorch",
        inputs=[fp32("x", 1, 512), TensorSpec("sr", "INT64", (1,))],
        outputs=[fp32("OUTPUT__0", 1, 1)],
        states=[
            StateSpec("_last_sr", "_last_sr", "INT64", (1,)),
            StateSpec("_state", "_state", "FP32", (-1, -1, -1)),
            StateSpec("_context", "_context", "FP32", (-1, -1)),
            StateSpec("_last_batch_size", "_last_batch_size", "INT64", (1,)),
        ],
        max_batch_size=0,
    )
    chance = np.random.default_rng(0)
    recordings = [chance.standard_normal((4, 1, 512)).astype(np.float32) / 10 for _ in range(2)]

    engine = workshop.load(config)
    said: list[list[Any]] = [[], []]
    for number, slot in itertools.product(range(4), range(2)):
        inputs = {"x": wire("x", recordings[slot][number]), "sr": wire("sr", [16000], "<i8", "INT64")}
        (result,) = results(engine, [Row(inputs, slot=slot, start=number == 0)])
        said[slot].append(array(result, "OUTPUT__0"))

    for recording, answers in zip(recordings, said, strict=True):
        with script_deprecation_ignored():
            own = cast("Any", torch.jit).load(str(source))
        expected = [own(torch.from_numpy(piece), 16000).detach().numpy() for piece in recording]
        np.testing.assert_allclose(expected, answers, rtol=1e-4)
