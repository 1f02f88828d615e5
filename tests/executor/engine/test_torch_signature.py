"""A configuration completed from the model's own signature, and contradictions told before anything is served."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from executor.engine.pytorch.signature import (
    Signature,
    StateSignature,
    TensorSignature,
    read_signature,
    save_with_signature,
)
from shared.contract.errors import ConfigError, LoadError
from tests.executor.engine import torch_modules
from tests.executor.engine.model_workshop import Workshop, find_backend, scripted

FOLDING = Signature(
    inputs=(TensorSignature("x", "FP32", (-1,)),),
    outputs=(TensorSignature("y", "FP32", (1,)),),
    states=(StateSignature("total", "total_next", "FP32", (1,)),),
    max_batch_size=8,
)
COMPLETE: dict[str, Any] = {
    "name": "folding",
    "max_batch_size": 8,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}],
    "sequence_batching": {
        "state": [{"input_name": "total", "output_name": "total_next", "data_type": "TYPE_FP32", "dims": [1]}]
    },
}


def completed(workshop: Workshop, config: dict[str, Any], name: str = "folding") -> dict[str, Any]:
    return json.loads(find_backend("pytorch").auto_complete(json.dumps(config), workshop.version_dir(name)))


def save_folding(workshop: Workshop, signature: Signature = FOLDING) -> None:
    path = workshop.version_dir("folding") / "model.pt"
    save_with_signature(scripted(torch_modules.Folding()), path, signature)


def exported_cell() -> torch.export.ExportedProgram:
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    example = tuple(torch.zeros(2, 3) for _ in range(3))
    return torch.export.export(torch_modules.Cell(), example, dynamic_shapes=(batch,) * 3)


@pytest.mark.parametrize("config", [{"name": "folding"}, {"name": "folding", "max_batch_size": 8, "input": []}])
def test_what_the_configuration_leaves_out_comes_from_the_signature(workshop: Workshop, config: dict[str, Any]) -> None:
    save_folding(workshop)

    assert completed(workshop, config) == COMPLETE


def test_what_the_configuration_says_stays(workshop: Workshop) -> None:
    save_folding(workshop)
    config: dict[str, Any] = {
        **COMPLETE,
        "max_batch_size": 4,
        "sequence_batching": {"oldest": {}, **COMPLETE["sequence_batching"]},
    }

    assert config == completed(workshop, config)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"input": [{"name": "x", "data_type": "TYPE_INT32", "dims": [-1]}]},
            r"input 'x' is configured as TYPE_INT32 \[-1\], but the model's signature says TYPE_FP32 \[-1\]",
        ),
        (
            {"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": ["2"]}]},
            r"output 'y' is configured as TYPE_FP32 \[2\], but the model's signature says TYPE_FP32 \[1\]",
        ),
        (
            {
                "sequence_batching": {
                    "state": [{"input_name": "total", "output_name": "t", "data_type": "TYPE_FP32", "dims": [1, 1]}]
                }
            },
            r"state 'total' is configured as TYPE_FP32 \[1,1\]",
        ),
        ({"max_batch_size": 16}, "max_batch_size is 16, but the model's signature allows 8"),
    ],
)
def test_a_contradiction_is_told_with_both_sides(workshop: Workshop, change: dict[str, Any], text: str) -> None:
    save_folding(workshop)

    with pytest.raises(ConfigError, match=text):
        completed(workshop, {**COMPLETE, **change})


def test_a_batch_dimension_that_the_configuration_spells_out_is_understood(workshop: Workshop) -> None:
    save_folding(workshop)
    config = {
        "name": "folding",
        "max_batch_size": 0,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1, -1]}],
    }

    assert [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1, 1]}] == completed(workshop, config)["output"]


def test_without_a_signature_the_error_says_how_to_give_one(workshop: Workshop) -> None:
    workshop.script("folding", torch_modules.Folding())

    with pytest.raises(
        ConfigError, match=r"declares no inputs or outputs.*config.pbtxt, or save it with its signature"
    ):
        completed(workshop, {"name": "folding", "max_batch_size": 8})


def test_a_complete_configuration_needs_no_signature(workshop: Workshop) -> None:
    workshop.script("folding", torch_modules.Folding())

    assert completed(workshop, COMPLETE) == COMPLETE


def test_an_exported_program_carries_a_signature_too(workshop: Workshop) -> None:
    signature = Signature(
        inputs=(TensorSignature("x", "FP32", (3,)),),
        outputs=(TensorSignature("y", "FP32", (3,)),),
        states=(StateSignature("h", "h_next", "FP32", (3,)), StateSignature("c", "c_next", "FP32", (3,))),
        max_batch_size=64,
    )
    path = workshop.version_dir("cell") / "model.pt2"

    save_with_signature(exported_cell(), path, signature)

    assert signature == read_signature(path)
    assert ["h", "c"] == [
        state["input_name"] for state in completed(workshop, {"name": "cell"}, "cell")["sequence_batching"]["state"]
    ]


def test_an_exported_program_without_one_is_read_from_its_graph(workshop: Workshop) -> None:
    """Declared states are no inputs and outputs; the batch dimension is none of the shape."""
    torch.export.save(exported_cell(), workshop.version_dir("cell") / "model.pt2")
    states = [
        {"input_name": "h", "output_name": "h_next", "data_type": "TYPE_FP32", "dims": [3]},
        {"input_name": "c", "output_name": "c_next", "data_type": "TYPE_FP32", "dims": [3]},
    ]
    config = {"name": "cell", "max_batch_size": 8, "sequence_batching": {"state": states}}

    assert {
        **config,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}],
        "output": [{"name": "OUTPUT__0", "data_type": "TYPE_FP32", "dims": [3]}],
    } == completed(workshop, config, "cell")


def test_a_program_s_dict_names_its_outputs_and_dynamic_sizes_are_variable(workshop: Workshop) -> None:
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    example = tuple(torch.zeros(2, 1) for _ in range(3))
    program = torch.export.export(torch_modules.CrossedStates(), example, dynamic_shapes=(batch,) * 3)
    torch.export.save(program, workshop.version_dir("crossed") / "model.pt2")

    config = completed(workshop, {"name": "crossed"}, "crossed")

    assert ["x", "alpha", "beta"] == [tensor["name"] for tensor in config["input"]]
    assert {"y", "zz_alpha", "aa_beta"} == {tensor["name"] for tensor in config["output"]}
    assert [-1, 1] == config["input"][0]["dims"]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (torch_modules.Nested(named=True), "forward returns a nested value as 'pair'"),
        (torch_modules.Nested(named=False), "forward returns a nested value as '1'"),
        (torch_modules.NoTensor(), "forward returns None as 'nothing'; declare"),
    ],
)
def test_a_program_that_returns_more_than_plain_tensors_is_not_read(
    workshop: Workshop, module: torch.nn.Module, text: str
) -> None:
    workshop.program("nested", module, (torch.zeros(2, 1),))

    with pytest.raises(LoadError, match=text):
        completed(workshop, {"name": "nested", "max_batch_size": 8}, "nested")


def test_a_damaged_archive_is_a_load_error(workshop: Workshop) -> None:
    (workshop.version_dir("folding") / "model.pt").write_bytes(b"PK\3\4 no archive")

    with pytest.raises(LoadError, match=r"cannot read .*model.pt: it is not as torch.jit.save or torch.export.save"):
        completed(workshop, COMPLETE)
