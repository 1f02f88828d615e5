"""docs/triton/dialect.md says what the parser does: each configuration of the page, its notes and its refusals.

Under a heading stand a configuration in the dialect, the same in Triton's fields, and the notes of the first one. The
page's Python is run by tests/mesh/test_seed_documents.py.
"""

from __future__ import annotations

import re
from itertools import groupby

import pytest
from msgspec.structs import replace

from shared.contract.errors import ConfigError
from shared.contract.model_config import ModelConfig
from tests.executor.configuration.conftest import IO, LoadText
from tests.markdown_pages import ROOT, Block, blocks_of, rows_below

PAGE = ROOT / "docs" / "triton" / "dialect.md"
CONFIGURATIONS = {
    heading: list(blocks)
    for heading, blocks in groupby(blocks_of(PAGE), lambda block: block.heading)
    if heading != "Sessions"
}


def texts(blocks: list[Block], language: str) -> list[str]:
    return [block.text for block in blocks if block.language == language]


def loaded(load_text: LoadText, text: str) -> ModelConfig:
    """A configuration of the page, as an executor without GPUs loads it."""
    named = re.search(r'^name: "(\w+)"$', text, re.MULTILINE)
    assert named is not None, text
    return load_text(text, name=named[1], files=["model.py" if 'backend: "python"' in text else "model.pt"]).config


def said_by_triton(config: ModelConfig) -> ModelConfig:
    """A configuration without what the dialect alone can say, and without its notes."""
    batching = config.sequence_batching
    if batching is not None:
        batching = replace(batching, implicit_start=False, describe_on_expiry=False)
    dynamic = config.dynamic_batching and replace(config.dynamic_batching, own_timeouts=False)
    return replace(config, sequence_batching=batching, dynamic_batching=dynamic, notes=())


@pytest.mark.parametrize("heading", CONFIGURATIONS)
def test_a_configuration_means_what_stands_beside_it(load_text: LoadText, heading: str) -> None:
    blocks = CONFIGURATIONS[heading]
    configs = [loaded(load_text, text) for text in texts(blocks, "pbtxt")]

    assert 1 <= len(configs) <= 2
    assert 1 == len({str(said_by_triton(config)) for config in configs})
    assert all(config.notes == () for config in configs[1:])
    assert "".join(texts(blocks, "text")) == "".join(f"{note}\n" for note in configs[0].notes)


@pytest.mark.parametrize("heading", [heading for heading, blocks in CONFIGURATIONS.items() if len(blocks) == 3])
def test_in_the_dialect_a_sequence_begins_without_start(load_text: LoadText, heading: str) -> None:
    dialect, own = (loaded(load_text, text).sequence_batching for text in texts(CONFIGURATIONS[heading], "pbtxt"))

    assert (dialect is None) == (own is None)
    if dialect is not None and own is not None:
        assert (True, False) == (dialect.implicit_start, own.implicit_start)


def test_what_contradicts_itself_is_refused_in_the_words_of_the_page(load_text: LoadText) -> None:
    rows = rows_below(PAGE, "### Contradictions")

    assert rows
    for batching, message in rows:
        with pytest.raises(ConfigError) as refusal:
            load_text(f"{IO} sequence_batching {{ {batching.strip('`')} }}")
        assert message.strip("`") == refusal.value.message
    policy = "default_queue_policy { timeout_action: DELAY }"
    with pytest.raises(ConfigError, match="contradict each other"):
        load_text(f"{IO} dynamic_batching {{ timeout_action: TIMEOUT_REJECT {policy} }}")


def test_each_parameter_of_the_page_is_one_of_the_mesh(load_text: LoadText) -> None:
    """A parameter that the mesh reads is noted on a stateless model; one that it does not know is the model's own."""
    names = [name for _, cell in rows_below(PAGE, "### Of a model") for name in re.findall(r"`(\w+)`", cell)]
    values = {"sequence_recovery": "none", "fixed_shape": "true", "virtual_slots": "true", "batch_gathering": "on"}
    given = [f'parameters {{ key: "{key}" value {{ string_value: "{values.get(key, 1)}" }} }}' for key in names]

    notes = load_text(" ".join([IO, *given])).config.notes

    assert 10 == len(names)
    assert {f"parameter '{name}' has no effect on a stateless model" for name in names} == {*notes}
