"""The knobs of a model: which parts of its configuration may be turned, from and to its canonical JSON. Pure.

Which knobs there are depends on what the model is. A strategy is tried only where the mesh holds the state: a model
that keeps its own state by slot or by id was written for one of them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

from deploy.analyze.search import Knob, Setting

BATCHES_MAX = 1024
DELAYS_US = (0, 500, 1_000, 2_000, 5_000, 10_000)
CHECKPOINTS = (1, 2, 5, 10, 20)
INSTANCES_MAX = 8
DIRECT, OLDEST = "direct", "oldest"

Config = Mapping[str, Any]
"""Triton's JSON of a configuration."""


def setting_of(config: Config) -> Setting:
    """The knobs' values in a configuration."""
    # Of all groups together.
    instances = sum(max(1, int(group.get("count", 0))) for group in groups_of(config))
    values: dict[str, int | str] = {"instances": instances}
    if int(config.get("max_batch_size", 0)) > 0:
        values = {"max_batch_size": int(config["max_batch_size"]), **values}
    batching = config.get("sequence_batching")
    if batching:
        strategy = OLDEST if batching.get(OLDEST) is not None else DIRECT
        values["strategy"] = strategy
        values["delay_us"] = int(part(batching, strategy).get("max_queue_delay_microseconds", 0))
        candidates = int(part(batching, OLDEST).get("max_candidate_sequences", 0))
        values["candidates"] = candidates or max(1, int(config.get("max_batch_size", 0)))
        if batching.get("state"):
            interval = part(part(config, "parameters"), "checkpoint_interval")
            values["checkpoint_interval"] = int(interval.get("string_value", 1))
    elif config.get("dynamic_batching") is not None:
        values["delay_us"] = int(config["dynamic_batching"].get("max_queue_delay_microseconds", 0))
    return tuple(values.items())


def knobs_of(config: Config, *, cores: int, concurrency: int) -> list[Knob]:
    """The knobs of a model, those that matter most first, with the values that are worth a try.

    cores        of this machine: more instances than that only wait for each other
    concurrency  callers of the load: rows and places that none of them could fill are not tried
    """
    now = dict(setting_of(config))
    knobs: list[Knob] = []
    if "max_batch_size" in now:
        sizes = powers(min(BATCHES_MAX, max(int(now["max_batch_size"]), 2 * concurrency)))
        knobs.append(Knob("max_batch_size", ladder(sizes, now["max_batch_size"]), "rows of a batch"))
    if "strategy" in now and can_change_strategy(config):
        knobs.append(Knob("strategy", (DIRECT, OLDEST), "how steps of sequences are batched"))
    if "candidates" in now:
        counts = powers(4 * concurrency)
        knobs.append(
            Knob("candidates", ladder(counts, now["candidates"]), "max_candidate_sequences", ("strategy", OLDEST))
        )
    counts = powers(min(INSTANCES_MAX, cores))
    knobs.append(Knob("instances", ladder(counts, now["instances"]), "copies of the model in an executor"))
    if "delay_us" in now:
        knobs.append(Knob("delay_us", ladder(DELAYS_US, now["delay_us"]), "max_queue_delay_microseconds"))
    if "checkpoint_interval" in now:
        steps = ladder(CHECKPOINTS, now["checkpoint_interval"])
        knobs.append(Knob("checkpoint_interval", steps, "steps between two checkpoints"))
    return knobs


def applied(config: Config, setting: Setting) -> dict[str, Any]:
    """The configuration with the knobs turned to a setting. What a setting says already stays as it was written."""
    values, now = dict(setting), dict(setting_of(config))
    made: dict[str, Any] = copy.deepcopy(dict(config))
    if values.get("max_batch_size") != now.get("max_batch_size"):
        made["max_batch_size"] = values["max_batch_size"]
        for batching in (part(made, "dynamic_batching"), part(part(made, "sequence_batching"), OLDEST)):
            if "preferred_batch_size" in batching:
                sizes = [int(size) for size in batching["preferred_batch_size"]]
                batching["preferred_batch_size"] = [size for size in sizes if size <= int(values["max_batch_size"])]
    if values["instances"] != now["instances"]:
        # A second group of the same kind would count its own instances.
        made["instance_group"] = [{**groups_of(made)[0], "count": values["instances"]}]
    if "strategy" in values:
        turn_sequences(made["sequence_batching"], values)
    elif "delay_us" in values:
        made["dynamic_batching"]["max_queue_delay_microseconds"] = values["delay_us"]
    if values.get("checkpoint_interval") != now.get("checkpoint_interval"):
        text = {"string_value": str(values["checkpoint_interval"])}
        made["parameters"] = {**part(made, "parameters"), "checkpoint_interval": text}
    return made


def turn_sequences(batching: dict[str, Any], values: Mapping[str, int | str]) -> None:
    """Puts strategy, delay and candidates into a configuration's `sequence_batching`."""
    strategy = str(values["strategy"])
    kept = part(batching, strategy)
    for other in (DIRECT, OLDEST):
        batching.pop(other, None)
    batching[strategy] = {**kept, "max_queue_delay_microseconds": values["delay_us"]}
    if strategy == OLDEST:
        batching[strategy]["max_candidate_sequences"] = values["candidates"]


def has_sequences(config: Config) -> bool:
    return bool(config.get("sequence_batching"))


def part(config: Config, name: str) -> dict[str, Any]:
    """A message within a message; {} where there is none."""
    return cast("dict[str, Any]", config.get(name) or {})


def can_change_strategy(config: Config) -> bool:
    """Whether direct and oldest mean the same to a model: its state is the mesh's, and it is told of empty rows."""
    batching = config["sequence_batching"]
    kinds = [one.get("kind") for control in batching.get("control_input", []) for one in control.get("control", [])]
    has_own_strategy = any(name.startswith("TRITON_BATCH_STRATEGY") for name in part(config, "parameters"))
    return bool(batching.get("state")) and "CONTROL_SEQUENCE_READY" in kinds and not has_own_strategy


def groups_of(config: Config) -> list[dict[str, Any]]:
    """The instance groups; where there is none, one that says nothing."""
    return config.get("instance_group") or [{}]


def powers(last: int) -> tuple[int, ...]:
    """Powers of two from 1 to a number."""
    return tuple(1 << bit for bit in range(last.bit_length()))


def ladder(values: Sequence[int], given: int | str) -> tuple[int, ...]:
    """The values with the given one in its place."""
    return tuple(sorted({*values, int(given)}))
