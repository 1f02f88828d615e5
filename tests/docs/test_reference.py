"""docs/reference says what the code says."""

from __future__ import annotations

import re
from typing import Any

import pytest

from executor.configuration.parameters import PARAMETERS, For
from shared.contract.model_config import Direct, ModelConfig, SequenceBatching
from shared.store.keyspace import DEFAULT_PREFIX, SCHEMA_VERSION, TYPES, Keyspace, kind_of
from tests.docs.reference.pages import FOLDER, PAGES
from tests.every_key import every_key
from tests.keys_page import ENTRY_KINDS, KINDS
from tests.markdown_pages import ROOT

SCRIPTS = {path.stem for path in (ROOT / "shared" / "store" / "lua").glob("*.lua")}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_the_code_makes_it(name: str) -> None:
    written = FOLDER / name

    assert written.is_file() and written.read_text() == PAGES[name](), f"docs/reference/{name} is old: make reference"


def test_every_metric_of_a_gateway_stands_in_the_page_of_metrics() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "gateway" / "models").glob("*.py"))
    names = set(re.findall(r'"(seqmesh_\w+)"', sources))

    assert "seqmesh_executors" in names
    assert set() == {name for name in names if f"`{name}`" not in PAGES["metrics.md"]()}


def test_there_are_no_other_pages() -> None:
    assert set(PAGES) | {"keys.md"} == {path.name for path in FOLDER.iterdir()}


def test_the_defaults_of_parameters_are_the_configurations() -> None:
    config = ModelConfig("m", "pytorch", "", 8, (), (), sequence_batching=SequenceBatching(Direct(), 1))
    # These go to a runtime as they are.
    others = (For.ONNX, For.OPENVINO, For.TENSORFLOW)
    numbers = {each.name: each.default for each in PARAMETERS if each.default.isdigit() and each.of not in others}

    assert "0" == numbers.pop("orphan_grace_microseconds") == str(config.orphan_grace_ms)
    assert numbers == {name: str(getattr(config, name)) for name in numbers}
    assert {"checkpoint_interval", "retry_replies", "retry_reply_bytes", "sequence_log_steps"} < set(numbers)


def test_the_page_of_keys_lists_every_key_under_its_name_with_its_type() -> None:
    names = ("model", "version", "generation", "load", "executor", "gateway", "name", "sequence", "tenant")
    arguments: dict[str, Any] = {name: f"<{name}>" for name in names} | {"shard": 0}
    base = f"{DEFAULT_PREFIX}:{SCHEMA_VERSION}:"
    made = (key.removeprefix(base).replace("{0}", "{<shard>}") for key in every_key(Keyspace(shards=1), arguments))

    assert {kind_of(key): key for key in made} == {kind: about.key for kind, about in KINDS.items()}
    assert {kind: about.type for kind, about in KINDS.items()} == TYPES


def test_the_scripts_that_are_said_to_write_and_read_keys_exist() -> None:
    named = {
        script
        for kind in KINDS.values()
        for inside in re.findall(r"\(([^)]*)\)", f"{kind.writers} {kind.readers}")
        for script in re.findall(r"`(\w+)`", inside)
    }

    assert named
    assert set() == named - SCRIPTS


def test_every_kind_of_entry_that_a_script_writes_is_explained() -> None:
    folder = ROOT / "shared" / "store" / "lua"
    told = r"'k',\s*'(\w+)'|line_up\([\w.]+, '(\w)'"
    found = [pair for path in folder.glob("*.lua") for pair in re.findall(told, path.read_text())]
    written = {kind for pair in found for kind in pair if kind}

    assert {"w", "owned", "p"} <= written
    assert set() == written - ENTRY_KINDS
