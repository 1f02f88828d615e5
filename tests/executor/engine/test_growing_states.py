"""States that grow: a checkpoint writes what was added, and what all checkpoints have written is the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from executor.engine.base import MeasuresMemory, Row, RowResult
from shared.contract import state_fields
from shared.contract.model_config import ModelConfig, StateSpec, TensorSpec
from shared.contract.state_fields import checkpointed_states
from shared.contract.tensors import ELEMENT_BYTES, Tensor
from tests.executor.engine import onnx_models, torch_modules
from tests.executor.engine.model_workshop import Workshop, array, error, raws, results, sequence_config, wire
from tests.executor.kept_checkpoint import Kept

STATE = "seen"
OTHERS = 6
"""Elements of one position."""


def edited(axis: int, datatype: str = "FP32", *, growable: bool = True) -> ModelConfig:
    """Positions of 2 x 3 elements, with the axis before, between or behind them."""
    dims = (2, 3)
    state = StateSpec(STATE, "seen_next", datatype, (*dims[:axis], -1, *dims[axis:]), growable=growable)
    return sequence_config(
        f"edited_{axis}",
        "pytorch",
        inputs=[TensorSpec("keep", "INT32", (1,)), TensorSpec("x", datatype, state.dims)],
        outputs=[TensorSpec("y", "INT64", (1,))],
        states=[state],
        max_batch_size=1,
    )


def step(
    axis: int, keep: int, added: int, fill: int, *, slot: int = 0, datatype: str = "FP32", start: bool = False
) -> Row:
    """Keeps so many positions, and adds some, all of whose bytes are `fill`."""
    shape = [2, 3]
    shape.insert(axis, added)
    raw = bytes([fill]) * (added * OTHERS * ELEMENT_BYTES[datatype])
    return Row(
        {"keep": wire("keep", [[keep]], "<i4"), "x": Tensor("x", datatype, (1, *shape), raw)}, slot=slot, start=start
    )


def same(whole: RowResult, kept: Kept) -> bool:
    mine, theirs = whole.states[STATE], kept.states[STATE]
    return (mine.shape, mine.datatype, mine.raw) == (theirs.shape, theirs.datatype, theirs.raw)


@pytest.mark.parametrize("part_bytes", [1, 100, 1024])
@pytest.mark.parametrize(("axis", "datatype"), [(0, "FP32"), (1, "BF16"), (2, "INT8"), (1, "FP64"), (2, "UINT16")])
def test_what_checkpoints_have_written_is_the_state(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, axis: int, datatype: str, part_bytes: int
) -> None:
    """Whatever the model does to it: beside an engine that writes the whole state with each checkpoint; with steps that
    are not checkpointed, steps that fail, takeovers, and bytes that are no numbers."""
    monkeypatch.setattr(state_fields, "PART_BYTES", part_bytes)
    workshop.script(f"edited_{axis}", torch_modules.Edited(axis))
    plain, config = workshop.load(edited(axis, datatype, growable=False)), edited(axis, datatype)
    engine, kept, length = workshop.load(config), Kept(), 1
    chance = np.random.default_rng((axis, part_bytes))
    for number in range(150):
        start = number == 0 or chance.random() < 0.03
        length = 1 if start else length
        keep = length if chance.random() < 0.7 else int(chance.integers(0, length + 1))
        added = int(chance.choice([0, 1, 1, 1, 2, 40]))
        fill = int(chance.choice([0x00, 0x80, 0xFF, 0x41]))
        row = step(axis, keep, added, fill, datatype=datatype, start=start)
        (expected,) = results(plain, [row])
        saves = start or chance.random() < 0.7
        (result,) = results(engine, [row], want_state=saves)
        length = keep + added
        assert raws(expected)[0] == raws(result)[0]
        if not saves:
            continue
        kept.write(result)

        assert same(expected, kept)
        if chance.random() < 0.1:
            assert "nothing is kept" in error(engine, step(axis, -1, 0, 0, datatype=datatype)).message
        if chance.random() < 0.1:
            engine = workshop.load(config)
            engine.load_states([0], [kept.states])


def test_a_step_writes_no_more_in_a_long_sequence(workshop: Workshop) -> None:
    workshop.script("edited_1", torch_modules.Edited(1))
    engine, kept = workshop.load(edited(1)), Kept()
    written = [
        kept.write(results(engine, [step(1, length, 1, length % 256, start=length == 1)])[0])
        for length in range(1, 3000)
    ]

    assert max(written[:100]) == max(written)
    assert max(written) < state_fields.PART_BYTES + 2 * OTHERS * 4
    assert np.mean(written[:1000]) == pytest.approx(np.mean(written[-1000:]), rel=0.1)


def test_a_state_becomes_larger_than_its_dims_as_in_tritons_suite(workshop: Workshop) -> None:
    """`dims: [1024, 1024]`: each step adds as many positions, all of them 1, then 2 (L0_implicit_state)."""
    workshop.script("edited_0", torch_modules.Edited(0))
    state = StateSpec(STATE, "seen_next", "INT8", (-1, 1024), (1024, 1024), growable=True)
    inputs = (TensorSpec("keep", "INT32", (1,)), TensorSpec("x", "INT8", (-1, 1024)))
    batching = edited(0).sequence_batching
    assert batching is not None
    config = msgspec.structs.replace(
        edited(0), inputs=inputs, sequence_batching=msgspec.structs.replace(batching, states=(state,))
    )
    engine, kept = workshop.load(config), Kept()
    for number, added in enumerate((0, 1024, 1024)):
        keep = wire("keep", [[max(1024, 1024 * number)]], "<i4")
        x = Tensor("x", "INT8", (1, added, 1024), bytes([number]) * (added * 1024))
        written = kept.write(results(engine, [Row({"keep": keep, "x": x}, slot=0, start=number == 0)])[0])

        assert 1024 * 1024 == written
        expected = b"".join(bytes([value]) * (1024 * 1024) for value in range(number + 1))
        assert (1024 * (number + 1), 1024) == kept.states[STATE].shape
        assert expected == kept.states[STATE].raw


def test_after_a_takeover_too_only_what_is_added_is_written(workshop: Workshop) -> None:
    workshop.script("edited_0", torch_modules.Edited(0))
    first, second, kept = workshop.load(edited(0)), workshop.load(edited(0)), Kept()
    whole = kept.write(results(first, [step(0, 1, 999, 7, start=True)])[0])

    second.load_states([3], [kept.states])
    added = kept.write(results(second, [step(0, 1000, 1, 8, slot=3)])[0])

    assert 1000 * OTHERS * 4 == whole
    assert added <= state_fields.PART_BYTES + OTHERS * 4


def test_a_state_that_was_not_in_parts_is_written_in_parts_once(workshop: Workshop) -> None:
    """The configuration had no `use_growable_memory`, or a release cut other parts."""
    workshop.script("edited_0", torch_modules.Edited(0))
    plain, engine, kept = workshop.load(edited(0, growable=False)), workshop.load(edited(0)), Kept()
    kept.write(results(plain, [step(0, 1, 999, 7, start=True)])[0])
    for number in (1000, 1001):
        expected = results(plain, [step(0, number, 1, 8)])[0]
        if number == 1000:
            engine.load_states([0], [kept.states])
        kept.write(results(engine, [step(0, number, 1, 8)])[0])

        assert same(expected, kept)


def growing_script(workshop: Workshop) -> str:
    workshop.script("growing", torch_modules.Growing())
    return "pytorch"


def growing_program(workshop: Workshop) -> str:
    sizes = [{0: torch.export.Dim("batch"), 1: torch.export.Dim(name)} for name in ("added", "before")]
    example = (torch.zeros(2, 3), torch.zeros(2, 4))
    program = torch.export.export(torch_modules.Growing(), example, dynamic_shapes=tuple(sizes))
    torch.export.save(program, workshop.version_dir("growing") / "model.pt2")
    return "pytorch"


def growing_onnx(workshop: Workshop) -> str:
    value, node, batch = onnx_models.value, onnx_models.node, onnx_models.BATCH
    onnx_models.save(
        workshop.version_dir("growing") / "model.onnx",
        [node("Concat", [STATE, "x"], ["seen_next"], axis=1), node("ReduceSum", ["seen_next", "axes"], ["y"])],
        [value("x", onnx_models.FLOAT, [batch, "added"]), value(STATE, onnx_models.FLOAT, [batch, "before"])],
        [value("y", onnx_models.FLOAT, [batch, 1]), value("seen_next", onnx_models.FLOAT, [batch, "after"])],
        [onnx_models.constant("axes", onnx_models.INT64, [1], [1])],
    )
    return "onnxruntime"


@pytest.mark.parametrize("make", [growing_script, growing_program, growing_onnx])
def test_sequences_of_one_length_share_a_batch_and_keep_their_own_states(
    workshop: Workshop, make: Callable[[Workshop], str]
) -> None:
    config = sequence_config(
        "growing",
        make(workshop),
        inputs=[TensorSpec("x", "FP32", (-1,))],
        outputs=[TensorSpec("y", "FP32", (1,))],
        states=[StateSpec(STATE, "seen_next", "FP32", (-1,), growable=True)],
    )
    engine, kept = workshop.load(config), [Kept() for _ in range(4)]
    for number in range(5):
        rows = [
            Row({"x": wire("x", [[slot + 10.0 * number] * (1 + (slot == 2))])}, slot=slot, start=number == 0)
            for slot in range(4)
        ]
        for one, result in zip(kept, results(engine, rows), strict=True):
            one.write(result)

    expected = [
        [0.0, *(slot + 10.0 * number for number in range(5) for _ in range(1 + (slot == 2)))] for slot in range(4)
    ]
    assert expected == [np.frombuffer(one.states[STATE].raw, "<f4").tolist() for one in kept]
    assert [sum(values) for values in expected] == [
        array(result, "y").item() for result in results(engine, [nothing_added(slot) for slot in range(4)])
    ]


def nothing_added(slot: int) -> Row:
    return Row({"x": Tensor("x", "FP32", (1, 0), b"")}, slot=slot)


def test_beside_a_state_that_begins_anew_all_are_written(workshop: Workshop) -> None:
    """What replaces a checkpoint replaces all of its fields: the other states must be complete too."""
    states = [StateSpec(name, f"{name}_next", "FP32", (-1,), growable=True) for name in "ab"]
    module = torch_modules.TwoEdited()
    workshop.script("two", module)
    config = sequence_config(
        "two",
        "pytorch",
        inputs=[TensorSpec("keep", "INT32", (1,)), TensorSpec("x", "FP32", (-1,))],
        outputs=[TensorSpec("y", "INT64", (1,))],
        states=states,
        max_batch_size=1,
    )
    engine, kept = workshop.load(config), Kept()

    def run(keep: int, count: int, *, start: bool = False) -> None:
        row = {"keep": wire("keep", [[keep]], "<i4"), "x": wire("x", [[1.0] * count])}
        kept.write(results(engine, [Row(row, slot=0, start=start)])[0])

    run(1, 999, start=True)
    run(1000, 1)
    run(10, 1)

    assert {"a": (11,), "b": (1002,)} == {name: state.shape for name, state in kept.states.items()}
    assert len(kept.fields) == 2 + 1 + 4


def test_a_state_beyond_the_bound_fails_its_step_and_stays(workshop: Workshop) -> None:
    workshop.script("edited_0", torch_modules.Edited(0))
    engine, kept = workshop.load(edited(0), state_value_bytes_max=10 * OTHERS * 4), Kept()
    kept.write(results(engine, [step(0, 1, 9, 7, start=True)])[0])

    refusal = error(engine, step(0, 10, 1, 8)).message

    assert "it has 264 bytes, and the mesh keeps no more than 240 of one state (proto-max-bulk-len)" in refusal
    assert "have the model drop its oldest positions, or begin anew with START sooner" in refusal
    kept.write(results(engine, [step(0, 9, 1, 9)])[0])
    assert (10, 2, 3) == kept.states[STATE].shape


def test_memory_of_growing_states_is_counted_and_free_after_the_end(workshop: Workshop) -> None:
    workshop.script("edited_0", torch_modules.Edited(0))
    engine = workshop.load(edited(0))
    assert isinstance(engine, MeasuresMemory)
    before = sum(use.byte_size for use in engine.memory_usage())
    results(engine, [step(0, 1, 999, 7, start=True)])

    assert before + 1000 * OTHERS * 4 == sum(use.byte_size for use in engine.memory_usage())

    last = msgspec.structs.replace(step(0, 1000, 1, 7), end=True)
    assert 1001 == array(results(engine, [last], want_state=False)[0], "y").item()
    assert before == sum(use.byte_size for use in engine.memory_usage())


def test_the_state_in_parts_is_described(workshop: Workshop) -> None:
    workshop.script("edited_0", torch_modules.Edited(0))
    engine = workshop.load(edited(0))
    results(engine, [step(0, 0, 4, 0, start=True)])

    assert "seen FP32 [4,2,3] mean 0 norm 0" == engine.describe_state(0)


def damaged(kept: Kept, **changes: Any) -> dict[bytes, bytes]:
    head = msgspec.msgpack.decode(kept.fields[b"s:seen"])
    return kept.fields | {b"s:seen": msgspec.msgpack.encode(head | changes)}


def test_a_damaged_checkpoint_is_refused(workshop: Workshop) -> None:
    """It is never taken for a shorter state."""
    workshop.script("edited_0", torch_modules.Edited(0))
    kept = Kept()
    kept.write(results(workshop.load(edited(0)), [step(0, 1, 999, 7, start=True)])[0])
    without = {name: value for name, value in kept.fields.items() if name != b"g:3:seen"}
    shorter = kept.fields | {b"g:3:seen": b"x" * 24}
    cases: Sequence[dict[bytes, bytes]] = [
        without,
        shorter,
        damaged(kept, length=0),
        damaged(kept, length=1 << 40),
        damaged(kept, axis=3),
        damaged(kept, shape=(1001, 2, 3)),
        damaged(kept, shape=(-5, 2, 3)),
        damaged(kept, shape=(1 << 60, 2, 3)),
        damaged(kept, datatype="BYTES"),
    ]
    for fields in cases:
        with pytest.raises((ValueError, LookupError)):
            checkpointed_states(fields)


def test_a_reader_of_whole_tensors_refuses_a_state_in_parts(workshop: Workshop) -> None:
    """An older release must not take the field `s:` for all of the state."""
    workshop.script("edited_0", torch_modules.Edited(0))
    kept = Kept()
    kept.write(results(workshop.load(edited(0)), [step(0, 1, 9, 7, start=True)])[0])

    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(kept.fields[b"s:seen"], type=Tensor)
