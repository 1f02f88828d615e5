"""The models that chaos drives: one fold under the settings that matter for recovery."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).with_name("model")


@dataclass(frozen=True, slots=True)
class Variant:
    """One model.

    weight    its share of the sequences
    slots     of one executor
    recovery  `sequence_recovery` of a model that keeps its state itself; "": the mesh keeps the state
    process   whether its instance is a process of its own
    """

    name: str
    weight: int
    slots: int
    direct: bool = False
    idle_s: float = 60.0
    checkpoint_interval: int = 1
    recovery: str = ""
    process: bool = False


VARIANTS: Sequence[Variant] = (
    # A checkpoint with every step.
    Variant("chaos_oldest", weight=9, slots=64),
    # A new owner runs the steps since the last checkpoint again.
    Variant("chaos_replay", weight=5, slots=64, checkpoint_interval=5),
    # State in the model itself, which hands it out, or learns it again from all inputs since START.
    Variant("chaos_methods", weight=3, slots=64, recovery="methods"),
    Variant("chaos_inputs", weight=3, slots=64, recovery="replay"),
    # The same in a process beside the executor, which can die alone.
    Variant("chaos_process", weight=3, slots=64, process=True),
    Variant("chaos_process_methods", weight=3, slots=64, recovery="methods", process=True),
    # Few slots: sequences that find none wait.
    Variant("chaos_direct", weight=4, slots=8, direct=True),
    # Sequences that are silent for longer expire.
    Variant("chaos_brief", weight=2, slots=64, idle_s=3.0),
)
FILLED = "chaos_direct"
"""Whose slots the fault `fill-slots` takes."""


def variant(name: str) -> Variant:
    return next(one for one in VARIANTS if one.name == name)


def write_repository(directory: Path) -> None:
    """Writes all models into a model repository; files of these names are overwritten."""
    for one in VARIANTS:
        (directory / one.name / "1").mkdir(parents=True, exist_ok=True)
        program = PROGRAMS / ("own.py" if one.recovery else "declared.py")
        shutil.copyfile(program, directory / one.name / "1" / "model.py")
        (directory / one.name / "config.pbtxt").write_text(config(one))


def config(one: Variant) -> str:
    name, value = (
        ("sequence_recovery", one.recovery) if one.recovery else ("checkpoint_interval", one.checkpoint_interval)
    )
    strategy = "direct { }" if one.direct else f"oldest {{ max_candidate_sequences: {one.slots} }}"
    return f"""# Written by `seqmesh chaos`.
name: "{one.name}"
backend: "python"
max_batch_size: {one.slots}

input [ {{ name: "INPUT", data_type: TYPE_INT64, dims: [ 1 ] }} ]
output [ {{ name: "OUTPUT", data_type: TYPE_INT64, dims: [ 2 ] }} ]

sequence_batching {{
  max_sequence_idle_microseconds: {int(one.idle_s * 1e6)}
  {strategy}
  control_input [
    {{ name: "START", control [ {{ kind: CONTROL_SEQUENCE_START, int32_false_true: [ 0, 1 ] }} ] }}
  ]
{"" if one.recovery else STATE}}}

instance_group [ {{ count: 1, kind: KIND_CPU }} ]

parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}
parameters {{ key: "instance_process" value: {{ string_value: "{str(one.process).lower()}" }} }}
"""


STATE = """  state [
    {
      input_name: "STATE_IN", output_name: "STATE_OUT", data_type: TYPE_INT64, dims: [ 2 ]
      initial_state: { name: "nothing yet", data_type: TYPE_INT64, dims: [ 2 ], zero_data: true }
    }
  ]
"""
