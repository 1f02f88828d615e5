"""docs/reference says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from executor.configuration.parameter_rules import PARAMETERS
from shared.contract.model_config import Direct, ModelConfig, SequenceBatching
from shared.store.key_kinds import FEED_KINDS, INBOX_KINDS, KINDS, STARTS_KINDS
from tests.docs.reference.pages import FOLDER, PAGES

SCRIPTS = {path.stem for path in (Path(__file__).resolve().parents[2] / "shared" / "store" / "lua").glob("*.lua")}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_the_code_makes_it(name: str) -> None:
    written = FOLDER / name

    assert written.is_file() and written.read_text() == PAGES[name](), f"docs/reference/{name} is old: make reference"


def test_there_are_no_other_pages() -> None:
    assert set(PAGES) == {path.name for path in FOLDER.iterdir()}


def test_the_defaults_of_parameters_are_the_configurations() -> None:
    config = ModelConfig("m", "pytorch", "", 8, (), (), sequence_batching=SequenceBatching(Direct(), 1))
    numbers = {each.name: each.default for each in PARAMETERS if each.default.isdigit()}

    assert "0" == numbers.pop("orphan_grace_microseconds") == str(config.orphan_grace_ms)
    assert numbers == {name: str(getattr(config, name)) for name in numbers}
    assert {"checkpoint_interval", "retry_replies", "retry_reply_bytes", "sequence_log_steps"} < set(numbers)


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
    folder = Path(__file__).resolve().parents[2] / "shared" / "store" / "lua"
    written = {kind for path in folder.glob("*.lua") for kind in re.findall(r"'k',\s*'(\w+)'", path.read_text())}

    assert {"w", "owned", "p"} <= written
    assert set() == written - {*INBOX_KINDS, *STARTS_KINDS, *FEED_KINDS}
