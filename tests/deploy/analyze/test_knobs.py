"""Which knobs a configuration has, and that a setting becomes a configuration that loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.analyze.knobs import applied, knobs_of, setting_of
from deploy.analyze.search import Setting
from deploy.analyze.trials import text_of
from executor.configuration.load import load_model_config
from tests.mesh.model_repository import SAMPLES


def unchanged(config_json: str, version_dir: Path) -> str:
    return config_json


def canonical(folder: Path) -> dict[str, Any]:
    backends = {"python": unchanged, "pytorch": unchanged}
    return json.loads(load_model_config(folder, backends=backends, gpu_count=0).json)


def turned(config: dict[str, Any], **values: int | str) -> Setting:
    return tuple((name, values.get(name, value)) for name, value in setting_of(config))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("running_sum", ["max_batch_size", "strategy", "candidates", "instances", "delay_us", "checkpoint_interval"]),
        ("text_lstm", ["max_batch_size", "candidates", "instances", "delay_us", "checkpoint_interval"]),
        ("add_sub", ["max_batch_size", "instances", "delay_us"]),
    ],
)
def test_a_model_has_the_knobs_that_mean_something_to_it(model: str, names: list[str]) -> None:
    config = canonical(SAMPLES / model)
    knobs = knobs_of(config, cores=4, concurrency=16)

    assert names == [knob.name for knob in knobs]
    values = dict(setting_of(config))
    assert all(values[knob.name] in knob.values for knob in knobs)
    assert all(list(knob.values) == sorted(knob.values) for knob in knobs)


def test_the_given_setting_changes_nothing(tmp_path: Path) -> None:
    for model in ("running_sum", "text_lstm", "add_sub"):
        config = canonical(SAMPLES / model)
        assert canonical_of(config, model, tmp_path) == canonical_of(
            applied(config, setting_of(config)), model, tmp_path
        )


def canonical_of(config: dict[str, Any], model: str, folder: Path) -> dict[str, Any]:
    """A configuration after its way through a file."""
    version = folder / model / "1"
    version.mkdir(parents=True, exist_ok=True)
    for file in ("model.py", "model.pt"):
        (version / file).touch()
    (folder / model / "config.pbtxt").write_text(text_of(config))
    return canonical(folder / model)


def test_every_knob_arrives_in_the_file(tmp_path: Path) -> None:
    config = canonical(SAMPLES / "running_sum")
    setting = turned(
        config, max_batch_size=8, strategy="oldest", candidates=64, instances=2, delay_us=500, checkpoint_interval=5
    )

    made = canonical_of(applied(config, setting), "running_sum", tmp_path)

    assert setting == setting_of(made)
    assert "direct" not in made["sequence_batching"]
    assert config["sequence_batching"]["state"] == made["sequence_batching"]["state"]
    assert setting_of(config) == setting_of(applied(made, setting_of(config)))


def test_preferred_sizes_beyond_the_batch_are_left_out(tmp_path: Path) -> None:
    config = canonical(SAMPLES / "add_sub")
    config["dynamic_batching"] = {"preferred_batch_size": [4, 8], "max_queue_delay_microseconds": 100}

    made = applied(config, turned(config, max_batch_size=4, delay_us=0))

    assert [4] == made["dynamic_batching"]["preferred_batch_size"]
    assert [4, 8] == config["dynamic_batching"]["preferred_batch_size"]
    assert 4 == canonical_of(made, "add_sub", tmp_path)["max_batch_size"]
