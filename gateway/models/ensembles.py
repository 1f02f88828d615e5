"""Which ensembles can be served: those whose steps' models are served, and whose tensors fit together. Pure.

No executor runs an ensemble, and the models of its steps may be on different executors. So an executor checks only what
the ensemble's own configuration tells, and a gateway checks the rest whenever it has read the mesh.

Messages and their order are Triton's. Source: Triton core, ensemble_utils.cc (ValidateEnsembleConfig),
model_repository_manager.cc (CheckNode, CircularDependencyCheck).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from shared.contract.errors import ConfigError
from shared.contract.limits import ENSEMBLE_DEPTH_MAX, ENSEMBLE_STEPS_MAX
from shared.contract.messages import ModelRecord
from shared.contract.model_config import EnsembleStep, ModelConfig, TensorSpec
from shared.contract.tensors import are_alike, config_type, shape_text

Versions = Mapping[str, Sequence[str]]
"""Model -> its versions that are served, ascending."""


class DeclaredTensor(msgspec.Struct, frozen=True):
    """Datatype and shape of an ensemble's tensor, as one of the models has it. dims: without the batch dimension"""

    model: str
    datatype: str
    dims: tuple[int, ...]
    batched: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """With the batch dimension, if the model has one."""
        return (-1, *self.dims) if self.batched else self.dims


def unavailable_ensembles(
    records: Mapping[str, ModelRecord], served: Versions, failed: Mapping[str, str]
) -> dict[str, str]:
    """Ensembles that cannot be served now -> why. Of ensembles that are not loaded nothing is said.

    served  versions that take requests; an ensemble counts as served while some executor announces it
    failed  models that could not be loaded -> why
    """
    ensembles = [name for name in served if name in records and records[name].config.ensemble]
    # An ensemble within an ensemble is judged first, by recursion. That ends, because circles and towers come first.
    problems = {name: problem for name in ensembles if (problem := _circle_or_tower(name, records))}
    asked = _Asked(records, served, failed, problems)
    for name in ensembles:
        _judge(name, asked)
    return {name: problem for name, problem in problems.items() if problem}


class _Asked(NamedTuple):
    """What ensembles are judged by. problems: those that were judged -> why they cannot be served, "" if they can"""

    records: Mapping[str, ModelRecord]
    served: Versions
    failed: Mapping[str, str]
    problems: dict[str, str]


class EnsembleJudge:
    """`unavailable_ensembles`, for who asks again and again: it looks only at what has changed."""

    def __init__(self) -> None:
        self._asked: tuple[Mapping[str, ModelRecord], Versions, Mapping[str, str]] | None = None
        self._problems: dict[str, str] = {}

    def problems(
        self, records: Mapping[str, ModelRecord], served: Versions, failed: Mapping[str, str]
    ) -> dict[str, str]:
        """As `unavailable_ensembles`. What is given must not change afterwards."""
        asked = records, served, failed
        if self._asked != asked:
            self._asked, self._problems = asked, unavailable_ensembles(*asked)
        return self._problems


def _circle_or_tower(start: str, records: Mapping[str, ModelRecord]) -> str:
    """Triton's message for an ensemble that is, over whatever steps, a step of itself, and ours for one with too many
    ensembles within each other; "" for any other.
    """
    level = {start}
    for _ in range(ENSEMBLE_DEPTH_MAX):
        below: set[str] = set()
        for name in sorted(level & records.keys()):
            below |= {step.model for step in records[name].config.ensemble}
            if start in below:
                return f"circular dependency between ensembles: {start} -> ... -> {name} -> {start}"
        level = below
    if not level:
        return ""
    return f"ensemble '{start}' has more than {ENSEMBLE_DEPTH_MAX} ensembles within each other"


def _judge(name: str, asked: _Asked) -> str:
    if name not in asked.problems:
        asked.problems[name] = _problem(name, asked)
    return asked.problems[name]


def _problem(name: str, asked: _Asked) -> str:
    records, served, failed, _ = asked
    config = records[name].config
    unknown = sorted({step.model for step in config.ensemble} - records.keys() - failed.keys())
    if unknown:
        return f"ensemble {name} contains models that are not available or ambiguous: {', '.join(unknown)}"
    for step in config.ensemble:
        about = f"ensemble '{name}' depends on '{step.model}'"
        # A model may be served whose record cannot be read.
        if step.model not in records or not served.get(step.model):
            why = failed.get(step.model)
            told = "" if why is None else f" Model '{step.model}' loading failed with error: {why}"
            return f"{about} which has no loaded version.{told}"
        if records[step.model].config.ensemble and (inner := _judge(step.model, asked)):
            return f"{about} which is not valid. Model '{step.model}' failed with error: {inner}"
        if step.version and step.version not in served[step.model]:
            return f"{about} whose required version {step.version} is not loaded."
    if config.response_cache and any_model(name, records, lambda inner: inner.decoupled):
        return (
            f"Response Cache does not currently support model {name} with 'decoupled' transaction policy. Please "
            "disable the response cache."
        )
    if _size(name, records) > ENSEMBLE_STEPS_MAX:
        return f"ensemble '{name}' has more than {ENSEMBLE_STEPS_MAX} steps, those of its ensembles included"
    try:
        _check_tensors(config, records)
        _check_answers(config, records)
        _check_handed_out_states(config, records)
    except ConfigError as error:
        return error.message
    return ""


def _size(name: str, records: Mapping[str, ModelRecord], sizes: dict[str, int] | None = None) -> int:
    """Steps of an ensemble without circles, those of its ensembles in place of these."""
    sizes = {} if sizes is None else sizes
    if name not in sizes:
        steps = records[name].config.ensemble if name in records else ()
        sizes[name] = sum(_size(step.model, records, sizes) for step in steps) if steps else 1
    return sizes[name]


def with_decoupled_ensembles(records: Mapping[str, ModelRecord]) -> dict[str, ModelRecord]:
    """The records; those of ensembles say whether they are decoupled, which is so if one of their steps is.

    Whatever an ensemble's own configuration says does not count, as in Triton (ensemble_utils.cc,
    ValidateEnsembleConfig).
    """
    return {
        name: _told_decoupled(record, decoupled=any_model(name, records, lambda config: config.decoupled))
        if record.config.ensemble
        else record
        for name, record in records.items()
    }


def _told_decoupled(record: ModelRecord, *, decoupled: bool) -> ModelRecord:
    if record.config.decoupled == decoupled:
        return record
    text = record.config_json
    # What another version has written is shown as it is.
    with suppress(msgspec.DecodeError):
        told = msgspec.json.decode(text, type=dict[str, Any])
        text = msgspec.json.encode({**told, "model_transaction_policy": {"decoupled": decoupled}}).decode()
    config = msgspec.structs.replace(record.config, decoupled=decoupled)
    return msgspec.structs.replace(record, config=config, config_json=text)


def any_model(name: str, records: Mapping[str, ModelRecord], holds: Callable[[ModelConfig], bool]) -> bool:
    """Whether something holds for the model, or, if it is an ensemble, for a model of its steps, however deep."""
    configs = [records[one].config for one in (name, *models_below(name, records)) if one in records]
    return any(holds(config) for config in configs if not config.ensemble)


def models_below(name: str, records: Mapping[str, ModelRecord]) -> set[str]:
    """The models of an ensemble's steps, those of ensembles within it included; none for another model."""
    found, waiting = set[str](), [name]
    while waiting:
        record = records.get(waiting.pop())
        new = {step.model for step in record.config.ensemble} - found if record is not None else set[str]()
        found |= new
        waiting += new
    return found


class AnswerSource(NamedTuple):
    """The decoupled step whose answers a tensor is made of. number: 0 for none"""

    number: int = 0
    model: str = ""


def _check_answers(config: ModelConfig, records: Mapping[str, ModelRecord]) -> None:
    """Checks that each step's inputs are made of the answers of one decoupled step, or of none.

    So the decoupled steps of an ensemble come one behind the other.
    """
    sources = {spec.name: AnswerSource() for spec in config.inputs}
    waiting = dict(enumerate(config.ensemble, start=1))
    while waiting:
        number = next((n for n, step in waiting.items() if sources.keys() >= set(step.inputs.values())), 0)
        if not number:
            raise ConfigError(f"in ensemble {config.name}, the tensors of {len(waiting)} steps are never written")
        step = waiting.pop(number)
        source = _one_source(config.name, step.model, {sources[tensor] for tensor in step.inputs.values()})
        if source.number and any_model(step.model, records, lambda inner: inner.is_stateful):
            raise ConfigError(
                f"in ensemble {config.name}, step of model '{step.model}' keeps state and comes behind the decoupled "
                f"model '{source.model}': one request would be any number of steps of its sequence. Keep that state in "
                f"'{source.model}', or in a step before it"
            )
        if any_model(step.model, records, lambda inner: inner.decoupled):
            source = AnswerSource(number, step.model)
        sources.update(dict.fromkeys(step.outputs.values(), source))
    _one_source(config.name, config.name, {sources[spec.name] for spec in config.outputs if spec.name in sources})


def _check_handed_out_states(config: ModelConfig, records: Mapping[str, ModelRecord]) -> None:
    """Checks that no model which hands its states out by correlation id is in two steps: it would mix their states."""
    for model, steps in _uses(config, records).items():
        if steps > 1 and records[model].config.state_methods:
            raise ConfigError(
                f"in ensemble {config.name}, model '{model}' is in {steps} steps, and hands its states out by "
                "correlation id, which is the same in all of them. Declare its state in its configuration, or give "
                "each step a copy of the model under another name"
            )


def _uses(config: ModelConfig, records: Mapping[str, ModelRecord]) -> Counter[str]:
    """Model -> in how many steps it is, those of ensembles within it included."""
    uses = Counter[str]()
    for step in config.ensemble:
        inner = records[step.model].config
        uses += _uses(inner, records) if inner.ensemble else Counter([step.model])
    return uses


def _one_source(ensemble: str, model: str, sources: set[AnswerSource]) -> AnswerSource:
    if len(sources) > 1:
        raise ConfigError(
            f"in ensemble {ensemble}, step of model '{model}' receives inputs originated from different decoupled "
            "models"
        )
    return next(iter(sources), AnswerSource())


def _check_tensors(config: ModelConfig, records: Mapping[str, ModelRecord]) -> None:
    forms = {
        spec.name: DeclaredTensor(
            config.name, spec.datatype, spec.dims if spec.reshape is None else spec.reshape, config.max_batch_size > 0
        )
        for spec in (*config.inputs, *config.outputs)
    }
    for step in config.ensemble:
        inner = records[step.model].config
        # An ensemble with batches may have models without: then the whole shapes must fit.
        if 0 < inner.max_batch_size < config.max_batch_size:
            raise ConfigError(
                f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it contains model "
                f"{step.model} which only allows maximum batch size to be {inner.max_batch_size}"
            )
        _check_inputs(config.name, step, inner, forms)
        _check_outputs(config.name, step, inner, forms)


def _check_inputs(ensemble: str, step: EnsembleStep, inner: ModelConfig, forms: dict[str, DeclaredTensor]) -> None:
    specs = inner.inputs_by_name
    for name, tensor in step.inputs.items():
        if name not in specs:
            raise ConfigError(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapping to non-existing input {name} in model "
                f"{step.model}"
            )
    for spec in inner.inputs:
        if spec.name in step.inputs:
            _fit(ensemble, step.inputs[spec.name], spec, inner, forms)
        elif not spec.optional:
            raise ConfigError(
                f"in ensemble {ensemble}, input {spec.name} in model {inner.name} is not mapped to any ensemble tensors"
            )


def _check_outputs(ensemble: str, step: EnsembleStep, inner: ModelConfig, forms: dict[str, DeclaredTensor]) -> None:
    specs = inner.outputs_by_name
    for name, tensor in step.outputs.items():
        if name not in specs:
            raise ConfigError(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapped from non-existing output {name} in model "
                f"{step.model}"
            )
        _fit(ensemble, tensor, specs[name], inner, forms)


def _fit(ensemble: str, tensor: str, spec: TensorSpec, inner: ModelConfig, forms: dict[str, DeclaredTensor]) -> None:
    """Compares a model's tensor with what is known of the ensemble's; the first model that has it decides."""
    form = DeclaredTensor(inner.name, spec.datatype, spec.dims, inner.max_batch_size > 0)
    known = forms.setdefault(tensor, form)
    where = f"in ensemble {ensemble}, ensemble tensor {tensor}: "
    if known.datatype != form.datatype:
        raise ConfigError(
            f"{where}inconsistent data type: {config_type(known.datatype)} is inferred from model {known.model} while "
            f"{config_type(form.datatype)} is inferred from model {form.model}"
        )
    if not (are_alike(known.dims, form.dims) or are_alike(known.shape, form.shape)):
        raise ConfigError(
            f"{where}inconsistent shape: {shape_text(known.shape)} is inferred from model {known.model} while "
            f"{shape_text(form.shape)} is inferred from model {form.model}"
        )
