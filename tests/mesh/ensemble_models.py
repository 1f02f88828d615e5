"""Ensembles for a test's mesh, and what their sequences are to answer."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mesh.model_repository import ROOT, add_sum_model
from tests.mesh.traffic import Plan

EXAMPLE = ROOT / "examples" / "ensemble" / "models"

FAILING_MODEL = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Passes a number on, but fails with 13, and leaves 14 without an answer tensor."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        number = pb_utils.get_input_tensor_by_name(request, "NUMBER").as_numpy()
        if number.item() == 13:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("thirteen"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("NEXT", number)])
'''

SOUR_MODEL = '''
import time

import triton_python_backend_utils as pb_utils
from running_sum_model import TritonPythonModel as RunningSum


class TritonPythonModel(RunningSum):
    """The running sum, but each batch takes {seconds} s, and one with 13 fails."""

    def execute(self, requests):
        time.sleep({seconds})
        if any(13 in pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests):
            raise pb_utils.TritonModelException("thirteen")
        return super().execute(requests)
'''

LATE_MODEL = """
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    # Passes a number on, one at a time, after a while.

    def execute(self, requests):
        time.sleep({seconds})
        return [self.answer(request) for request in requests]

    def answer(self, request):
        number = pb_utils.get_input_tensor_by_name(request, "NUMBER").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("NEXT", number)])
"""
LATE_POLICY = """dynamic_batching {
  default_queue_policy { default_timeout_microseconds: 60000000 allow_timeout_override: true }
}"""


@dataclass(frozen=True)
class SumOfSums(Plan):
    """A sequence of the example `sum_of_sums`."""

    @property
    def sums(self) -> list[int]:
        """The right answers."""
        return list(itertools.accumulate(itertools.accumulate(value + 1 for value in self.values)))


def add_example(repository: Path) -> None:
    """Puts the example's models into a repository."""
    for model in ("plus_one", "sum_of_sums"):
        shutil.copytree(EXAMPLE / model, repository / model, ignore=shutil.ignore_patterns("__pycache__"))


def add_failing_model(repository: Path, name: str = "moody") -> str:
    """A stateless model that fails with one number; returns its name."""
    shutil.copytree(EXAMPLE / "plus_one", repository / name, ignore=shutil.ignore_patterns("__pycache__"))
    config = repository / name / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "plus_one"', f'name: "{name}"'))
    (repository / name / "1" / "model.py").write_text(FAILING_MODEL)
    return name


def add_sour_sum(repository: Path, name: str = "sour_sum", *, seconds: float) -> None:
    """A running sum that fails with one number."""
    add_sum_model(repository, name, batch_s=seconds)
    (repository / name / "1" / "model.py").write_text(SOUR_MODEL.format(seconds=seconds))


def add_late_model(repository: Path, name: str = "late", *, seconds: float) -> str:
    """A stateless model that takes one request after the other, each for so long, and lets requests say how long they
    may wait in its queue; returns its name.
    """
    add_failing_model(repository, name)
    config = repository / name / "config.pbtxt"
    text = config.read_text().replace("dynamic_batching { }", LATE_POLICY)
    config.write_text(text.replace("max_batch_size: 32", "max_batch_size: 1"))
    (repository / name / "1" / "model.py").write_text(LATE_MODEL.format(seconds=seconds))
    return name


@dataclass(frozen=True)
class EnsembleSource:
    """The text of an ensemble of INT32 numbers.

    steps  (model, input map, output map)
    """

    name: str
    steps: Sequence[tuple[str, Mapping[str, str], Mapping[str, str]]]
    inputs: Sequence[str] = ("INPUT",)
    outputs: Sequence[str] = ("OUTPUT",)
    max_batch_size: int = 1
    datatype: str = "TYPE_INT32"
    dims: str = "1"

    @property
    def config(self) -> str:
        """As `config.pbtxt`."""

        def tensors(kind: str, names: Sequence[str]) -> str:
            return "".join(
                f'{kind} {{ name: "{name}" data_type: {self.datatype} dims: [ {self.dims} ] }}\n' for name in names
            )

        def maps(kind: str, names: Mapping[str, str]) -> str:
            return " ".join(f'{kind} {{ key: "{key}" value: "{value}" }}' for key, value in names.items())

        steps = "".join(
            f'step {{ model_name: "{model}" model_version: -1 {mapped} }}\n'
            for model, given, made in self.steps
            for mapped in [f"{maps('input_map', given)} {maps('output_map', made)}"]
        )
        return (
            f'name: "{self.name}"\nplatform: "ensemble"\nmax_batch_size: {self.max_batch_size}\n'
            f"{tensors('input', self.inputs)}{tensors('output', self.outputs)}ensemble_scheduling {{ {steps} }}\n"
        )

    def add(self, repository: Path) -> str:
        """Puts it into a repository; returns its name."""
        (repository / self.name / "1").mkdir(parents=True)
        (repository / self.name / "config.pbtxt").write_text(self.config)
        return self.name
