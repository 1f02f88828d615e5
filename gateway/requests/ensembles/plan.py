"""The plan of an ensemble: its steps in one list, those of ensembles within it in place of these. Pure.

The ensemble's inputs and outputs keep their names in the plan. Every other tensor gets the place of its ensemble before
its name. The inputs and outputs of an ensemble within are the tensors that the outer step maps them to. Where an
ensemble reshapes one of them, its steps have a tensor of their own for it: each is a `TensorView` of the other one.

A plan with decoupled steps falls into *stages*, one behind the other. Each but the last ends with a decoupled step, and
the next one runs for each answer of that step. `gateway.models.ensembles` has checked that the steps have this form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import msgspec

from shared.contract.messages import ModelRecord
from shared.contract.model_config import ModelConfig

INSIDE = "\0"
"""Begins the name of a tensor that is neither an input nor an output of the whole ensemble."""

FindModel = Callable[[str, str], tuple[ModelRecord, str]]
"""(model, requested version or "") -> its record and the version that serves. Raises MeshError."""


class PlannedStep(msgspec.Struct, frozen=True):
    """A request to a model that is no ensemble.

    place      which step of the ensemble it is: `0`, or `1.0` for the first step of the ensemble that is the second
    ensembles  names of the ensembles that it is a step of, the outermost first
    requested  the version that its ensemble names, or ""
    version    the version that serves it
    inputs     (input of the model, tensor of the plan), in the model's order
    outputs    (output of the model, tensor of the plan)
    """

    place: str
    ensembles: tuple[str, ...]
    record: ModelRecord
    requested: str
    version: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]

    @property
    def config(self) -> ModelConfig:
        return self.record.config


class TensorView(msgspec.Struct, frozen=True):
    """A tensor of the plan that is another one in another shape: what an ensemble's input or output is on the other
    side of the ensemble.

    dims     the declared shape of the tensor that it is made of
    shape    its own declared shape
    batched  both have a batch dimension before that
    """

    tensor: str
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    batched: bool


Views = dict[str, list[TensorView]]
"""Tensor of the plan -> its views."""


class EnsemblePlan(msgspec.Struct, frozen=True, dict=True):
    """An ensemble's steps, in an order in which each step comes behind those that it needs.

    record   the ensemble's; an output without labels of its own has those of the step that writes it
    results  output of the ensemble -> tensor of the plan; {} for a stage that has another one behind it
    source   the decoupled step with which a stage ends; None for the last stage
    """

    record: ModelRecord
    version: str
    steps: tuple[PlannedStep, ...]
    results: Mapping[str, str]
    views: Views
    source: int | None = None

    @cached_property
    def stages(self) -> tuple[EnsemblePlan, ...]:
        """The stages of the whole plan; the plan itself, if no step is decoupled."""
        if not any(step.config.decoupled for step in self.steps):
            return (self,)
        # Tensor -> how many decoupled steps it comes behind. Steps stand behind those that they need.
        depths: dict[str, int] = {}
        stages: list[list[PlannedStep]] = []
        for step in self.steps:
            depth = max((depths.get(tensor, 0) for _, tensor in step.inputs), default=0)
            stages += [[] for _ in range(depth + 1 - len(stages))]
            stages[depth].append(step)
            depths.update((tensor, depth + step.config.decoupled) for tensor in written_by(step, self.views))
        last = max(depths.values())
        stages += [[] for _ in range(last + 1 - len(stages))]
        return tuple(
            msgspec.structs.replace(
                self,
                steps=tuple(steps),
                results=self.results if depth == last else {},
                source=next((index for index, step in enumerate(steps) if step.config.decoupled), None),
            )
            for depth, steps in enumerate(stages)
        )

    @cached_property
    def writers(self) -> Mapping[str, int]:
        """Tensor -> the step that writes it. The ensemble's inputs have none."""
        return {tensor: index for index, step in enumerate(self.steps) for tensor in written_by(step, self.views)}

    @cached_property
    def stateful(self) -> tuple[int, ...]:
        """The steps that belong to sequences. The first of them is the anchor: it accepts a step of the ensemble."""
        return tuple(index for index, step in enumerate(self.steps) if step.config.is_stateful)

    @property
    def anchor(self) -> int | None:
        return self.stateful[0] if self.stateful else None

    def needed(self, tensors: frozenset[str]) -> frozenset[int]:
        """The steps whose outputs these tensors are made of. Triton leaves out the others, too; but a stateful step
        always runs, so that all states of a sequence are at the same step; and so does the step that ends a stage.
        """
        ends = [self.source] if self.source is not None else []
        return self._with_those_before(
            [*(self.writers[tensor] for tensor in tensors if tensor in self.writers), *ends, *self.stateful]
        )

    @cached_property
    def owed(self) -> frozenset[int]:
        """The stateful steps, and the steps that they are made of."""
        return self._with_those_before(self.stateful)

    def _with_those_before(self, steps: Sequence[int]) -> frozenset[int]:
        found: set[int] = set()
        waiting = list(steps)
        while waiting:
            index = waiting.pop()
            if index not in found:
                found.add(index)
                waiting += [self.writers[tensor] for _, tensor in self.steps[index].inputs if tensor in self.writers]
        return frozenset(found)


def plan_of(record: ModelRecord, version: str, find: FindModel) -> EnsemblePlan:
    """The plan of an ensemble that can be served (`gateway.models.ensembles`). Raises what `find` raises."""
    config, views = record.config, Views()
    inputs = {spec.name: spec.name for spec in config.inputs}
    # An output that is an input as well may have another shape than the input.
    results = {spec.name: f"{INSIDE}{INSIDE}" * (spec.name in inputs) + spec.name for spec in config.outputs}
    names = _names_within(config, "", inputs, results, views)
    steps = _in_order(_flat(config, (config.name,), "", names, views, find), views)
    labels = {
        tensor: step.record.labels[output]
        for step in steps
        for output, written in step.outputs
        if output in step.record.labels
        for tensor in seen_as(written, views)
        if tensor in results
    }
    record = msgspec.structs.replace(record, labels={**labels, **record.labels})
    return EnsemblePlan(record, version, steps, results, views)


def seen_as(tensor: str, views: Views) -> list[str]:
    """The tensor, its views, and theirs."""
    return [tensor, *(name for view in views.get(tensor, ()) for name in seen_as(view.tensor, views))]


def written_by(step: PlannedStep, views: Views) -> list[str]:
    """The tensors that are there when a step has run."""
    return [name for _, tensor in step.outputs for name in seen_as(tensor, views)]


def _names_within(
    config: ModelConfig, prefix: str, inputs: Mapping[str, str], outputs: Mapping[str, str], views: Views
) -> dict[str, str]:
    """What an ensemble's steps have for its inputs and outputs -> tensor of the plan. Adds views of the others.

    inputs, outputs  input or output of the ensemble -> tensor of the plan that is outside; those that are not mapped
                     are left out
    """
    names: dict[str, str] = {}
    batched = config.max_batch_size > 0
    for spec in config.inputs:
        if spec.name not in inputs:
            continue
        outside = names[spec.name] = inputs[spec.name]
        if spec.reshape is not None:
            names[spec.name] = f"{INSIDE}{prefix}{spec.name}"
            views.setdefault(outside, []).append(TensorView(names[spec.name], spec.dims, spec.reshape, batched))
    for spec in config.outputs:
        if spec.name not in outputs:
            continue
        outside = outputs[spec.name]
        if spec.reshape is None and spec.name not in names:
            names[spec.name] = outside
            continue
        # It is reshaped, or it is an input as well.
        within = names.setdefault(spec.name, f"{INSIDE}{prefix}{spec.name}")
        views.setdefault(within, []).append(TensorView(outside, spec.reshape or spec.dims, spec.dims, batched))
    return names


def _flat(
    config: ModelConfig,
    ensembles: tuple[str, ...],
    prefix: str,
    names: Mapping[str, str],
    views: Views,
    find: FindModel,
) -> list[PlannedStep]:
    """The steps of an ensemble. names: its inputs and outputs -> tensors of the plan. Adds to the views."""
    steps: list[PlannedStep] = []
    for index, step in enumerate(config.ensemble):
        place = f"{prefix}{index}"
        record, version = find(step.model, step.version)
        inputs = {name: names.get(tensor, f"{INSIDE}{prefix}{tensor}") for name, tensor in step.inputs.items()}
        outputs = {name: names.get(tensor, f"{INSIDE}{prefix}{tensor}") for name, tensor in step.outputs.items()}
        if record.config.ensemble:
            within = _names_within(record.config, f"{place}.", inputs, outputs, views)
            steps += _flat(record.config, (*ensembles, step.model), f"{place}.", within, views, find)
            continue
        in_order = [spec.name for spec in record.config.inputs if spec.name in inputs]
        steps.append(
            PlannedStep(
                place,
                ensembles,
                record,
                step.version,
                version,
                tuple((name, inputs[name]) for name in in_order),
                tuple(outputs.items()),
            )
        )
    return steps


def _in_order(steps: Sequence[PlannedStep], views: Views) -> tuple[PlannedStep, ...]:
    """The steps with each behind those that it needs; otherwise in the configuration's order."""
    unwritten = {tensor for step in steps for tensor in written_by(step, views)}
    ordered: list[PlannedStep] = []
    remaining = list(steps)
    while remaining:
        ready = [step for step in remaining if not any(tensor in unwritten for _, tensor in step.inputs)]
        assert ready, "the executor has refused circles, and so has the catalog"
        ordered += ready
        unwritten -= {tensor for step in ready for tensor in written_by(step, views)}
        remaining = [step for step in remaining if step not in ready]
    return tuple(ordered)
