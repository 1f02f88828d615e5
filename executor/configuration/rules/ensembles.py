"""Rules of an ensemble that its own configuration can tell, with Triton's messages.

Whether the models of its steps exist, and whether their tensors fit, changes with every load of one of them: gateways
check that (`gateway.models.ensembles`).

Source: triton-spec section 4, "ensemble_scheduling"; Triton core, model_config_utils.cc
(ValidateEnsembleSchedulingConfig, BuildEnsembleGraph).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError
from shared.contract.limits import ENSEMBLE_STEPS_MAX

PLATFORM = "ensemble"
NEWEST = -1
"""The `model_version` of a step that takes the newest version. A step that gives none has 0, which is no version."""


def is_ensemble(config: ConfigMessage) -> bool:
    """Whether the configuration means an ensemble, right or wrong."""
    return config.platform == PLATFORM or config.HasField("ensemble_scheduling")


@dataclass(slots=True)
class _Node:
    """A tensor of the ensemble. before, after: the tensors that it is made of, and that are made of it"""

    is_output: bool = False
    before: set[str] = field(default_factory=set[str])
    after: set[str] = field(default_factory=set[str])


def check_ensemble(config: ConfigMessage) -> list[str]:
    """Checks the ensemble's fields, and that its tensors form a graph that leads from its inputs to its outputs.

    returns  notes on fields without effect
    raises   ConfigError for the first broken rule
    """
    name = config.name
    if config.platform != PLATFORM:
        raise ConfigError(f"ensemble scheduling cannot be set for model '{name}' whose platform is not {PLATFORM}")
    _check_no_others(config)
    steps = config.ensemble_scheduling.step
    if not steps:
        raise ConfigError(f"must specify 'step' for ensemble '{name}'")
    if len(steps) > ENSEMBLE_STEPS_MAX:
        raise ConfigError(f"ensemble '{name}' has {len(steps)} steps, more than {ENSEMBLE_STEPS_MAX}")
    nodes = _graph(config)
    written = _reached(config, nodes)
    for output in config.output:
        if output.name not in nodes:
            raise ConfigError(f"ensemble output '{output.name}' for ensemble {name} is not used")
        if output.name not in written:
            loose = _unconnected(output.name, nodes, written)
            cause = f": at least one of its depending tensors, '{loose}', is not connected" if loose else ""
            raise ConfigError(f"output '{output.name}' for ensemble '{name}' is not written{cause}")
    outputs = {output.name for output in config.output}
    for tensor, node in nodes.items():
        if tensor not in outputs and (tensor not in written or not node.after):
            raise ConfigError(f"ensemble tensor '{tensor}' is unused in ensemble '{name}'")
    if config.response_cache.enable:
        return ["'response_cache' has no effect: the answers of the steps' models are cached, where they enable it"]
    return []


def _unconnected(output: str, nodes: Mapping[str, _Node], written: set[str]) -> str:
    """A tensor of which the output is made and that no step writes; "" where steps wait for each other."""
    missing = {output}
    while more := {before for tensor in missing for before in nodes[tensor].before} - written - missing:
        missing |= more
    return min((tensor for tensor in missing if not nodes[tensor].is_output), default="")


def _check_no_others(config: ConfigMessage) -> None:
    """Nothing that says how a model is run."""
    name = config.name
    if config.backend:
        raise ConfigError(f"ensemble '{name}' must not specify 'backend', which is '{config.backend}'")
    for other in ("sequence_batching", "dynamic_batching"):
        if config.HasField(other):
            raise ConfigError(f"ensemble '{name}' must not specify '{other}': its steps' models have their own")
    if config.instance_group:
        raise ConfigError(f"instance group should not be specified for ensemble '{name}'")
    if config.HasField("optimization"):
        raise ConfigError(f"optimization should not be specified for ensemble '{name}'")
    if config.model_warmup:
        raise ConfigError(f"model_warmup can not be specified for ensemble '{name}'")
    if config.batch_input or config.batch_output:
        raise ConfigError(f"batch input and batch output should not be specified for ensemble '{name}'")


def _graph(config: ConfigMessage) -> dict[str, _Node]:
    name = config.name
    nodes: dict[str, _Node] = defaultdict(_Node)
    for index, step in enumerate(config.ensemble_scheduling.step):
        for given, what in ((step.model_name, "model_name"), (step.input_map, "input_map")):
            if not given:
                raise ConfigError(f"must specify '{what}' in step {index} of ensemble '{name}'")
        if not step.output_map:
            raise ConfigError(f"must specify 'output_map' in step {index} of ensemble '{name}'")
        if step.model_version < NEWEST:
            raise ConfigError(
                f"'model_version' must be positive, or -1 for the newest, in step {index} of ensemble '{name}'"
            )
        inputs = set(step.input_map.values())
        for output in step.output_map.values():
            if nodes[output].is_output:
                raise ConfigError(
                    f"ensemble tensor '{output}' can appear in an output map only once for ensemble '{name}' step "
                    f"{index}"
                )
            nodes[output].is_output = True
            nodes[output].before |= inputs
            for tensor in inputs:
                nodes[tensor].after.add(output)
    return dict(nodes)


def _reached(config: ConfigMessage, nodes: dict[str, _Node]) -> set[str]:
    """The tensors that are there when all steps that can run have run. Tensors of a cycle are not among them."""
    queue: list[str] = []
    for tensor in config.input:
        if tensor.name not in nodes:
            raise ConfigError(f"ensemble input '{tensor.name}' for ensemble {config.name} is not used")
        if nodes[tensor.name].is_output:
            raise ConfigError(
                f"ensemble input '{tensor.name}' for ensemble '{config.name}' is written by one of its steps"
            )
        queue.append(tensor.name)
    reached = set(queue)
    while queue:
        for follower in nodes[queue.pop()].after:
            if follower not in reached and nodes[follower].before <= reached:
                reached.add(follower)
                queue.append(follower)
    return reached
