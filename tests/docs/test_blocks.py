"""Every code block of README and docs is run or checked: programs by tests/mesh/test_documents.py, all others here."""

from __future__ import annotations

import json
import re
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from redis import Redis

from executor.configuration.load import load_model_config
from tests.docs import commands
from tests.embedded_redis import EmbeddedRedis
from tests.markdown_pages import (
    HOLDER,
    OUTPUT,
    QUOTED,
    STORY,
    Block,
    all_blocks,
    code_spans,
    name_of,
    pages,
    story_names,
)

KINDS = {"python", "sh", "pbtxt", "yaml", "toml", "json", "conf"}
"""Languages whose blocks a test runs or parses."""
PAGES = pytest.mark.parametrize("page", pages(), ids=name_of)
FOREIGN_OPTIONS = {
    # of Triton, on the pages that compare with it
    *("--model-repository", "--response-cache-byte-size", "--trace-config", "--log-verbose"),
    *("--rate-limit", "--reuse-http-port", "--reuse-grpc-port"),
    # of its load tool
    *("--shared-memory", "--profile-models", "--reload-model-disable", "--run-config-search-disable"),
    # of pip, docker and pytest
    *("--require-hashes", "--build", "--wait", "--scale", "--profile", "--extra-index-url", "--shm-size"),
}


def in_language(language: str) -> pytest.MarkDecorator:
    """A test for each block in a language."""
    blocks = [block for block in all_blocks() if block.language == language and not block.is_excused]
    return pytest.mark.parametrize("block", blocks, ids=[block.where for block in blocks])


def test_every_block_is_run_or_checked_or_says_why_not() -> None:
    unknown = [block.where for block in all_blocks() if not is_looked_after(block)]

    assert [] == unknown, "blocks of no known language need a mark: <!-- not run: REASON -->"


def is_looked_after(block: Block) -> bool:
    """Whether some test has an eye on a block, or a mark says why none has."""
    return block.is_excused or block.language in KINDS or (block.language == "text" and OUTPUT in block.marks)


def test_every_mark_means_something() -> None:
    known = [
        mark in (OUTPUT, HOLDER) or mark.startswith((STORY, "not run: ", *QUOTED))
        for block in all_blocks()
        for mark in block.marks
    ]

    assert all(known), [block.where for block in all_blocks() if block.marks]


def test_files_with_titles_stand_on_pages_that_use_them() -> None:
    assert [] == [block.where for block in all_blocks() if block.title and block.page not in story_names()]


@in_language("sh")
def test_what_is_to_be_typed_can_be_typed(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(commands.ROOT)
    lines = list(commands.lines_of(block.text))

    assert lines
    for line in lines:
        commands.check(line)


def test_what_cannot_be_typed_is_found() -> None:
    for wrong in (
        "make nothing",
        "make chaos CHAOS=--nothing",
        "make sim SIM=--nothing",
        "seqmesh nothing",
        "seqmesh up --nothing",
        "seqmesh drain --lst",
        "nothing at all",
        "docker compose up --nothing",
        "docker compose logs nobody",
        "SEQMESH_NOTHING=1 seqmesh up",
    ):
        with pytest.raises((AssertionError, KeyError, IndexError, commands.click.ClickException)):
            commands.check(next(commands.lines_of(wrong)))


@in_language("pbtxt")
def test_configurations_load(block: Block, tmp_path: Path) -> None:
    name = re.search(r'^name: "(\w+)"', block.text, re.MULTILINE)
    assert name, "a whole configuration: the first thing that readers copy"
    model = tmp_path / name[1]
    (model / "1").mkdir(parents=True)
    for file in ("model.py", "model.pt"):
        (model / "1" / file).touch()
    (model / "config.pbtxt").write_text(block.text)

    loaded = load_model_config(model, backends={"python": unchanged, "pytorch": unchanged}, gpu_count=0)

    assert name[1] == loaded.config.name


def unchanged(config_json: str, version_dir: Path) -> str:
    """A backend that has nothing to complete."""
    return config_json


@in_language("yaml")
def test_yaml_can_be_read(block: Block) -> None:
    assert yaml.safe_load(block.text)


@in_language("toml")
def test_toml_can_be_read(block: Block) -> None:
    assert tomllib.loads(block.text)


@in_language("json")
def test_json_can_be_read(block: Block) -> None:
    json.loads(block.text)


@in_language("conf")
def test_redis_takes_its_settings(block: Block, private_server: EmbeddedRedis) -> None:
    with Redis.from_url(private_server.url) as client:
        for line in block.text.splitlines():
            name, value = line.split(" ", 1)
            # A user is given to a running server by a command of its own.
            if name == "user":
                assert cast("Any", client).execute_command("ACL", "SETUSER", *value.split())
            else:
                assert client.config_set(name, value)


# What stands in the text


@PAGES
def test_options_that_a_page_names_exist(page: Path) -> None:
    named = {one for span in code_spans(page) for one in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", span)}

    assert set() == named - commands.every_option() - FOREIGN_OPTIONS


@PAGES
def test_variables_that_a_page_names_exist(page: Path) -> None:
    named = {one for span in code_spans(page) for one in re.findall(r"\bSEQMESH_[A-Z_]+[A-Z]\b(?!_?<)", span)}

    assert [] == [one for one in sorted(named) if not commands.is_known(one)]


@pytest.mark.parametrize("file", commands.COMPOSE_FILES)
def test_the_head_of_a_compose_file_and_the_guide_name_every_variable_that_it_reads(file: str) -> None:
    text = (commands.ROOT / file).read_text()
    environments = [one.get("environment", {}) for one in yaml.safe_load(text)["services"].values()]
    handed_on = {name for variables in environments for name, value in variables.items() if value is None}
    head = "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    guide = (commands.ROOT / "docs/start/containers.md").read_text()

    for page in (head, guide):
        assert set() == (handed_on | set(re.findall(r"\$\{(\w+)", text))) - set(re.findall(r"[A-Z_]+", page))


@PAGES
def test_metrics_that_a_page_names_exist(page: Path) -> None:
    source = "".join(
        path.read_text() for folder in ("gateway", "shared") for path in (commands.ROOT / folder).rglob("*.py")
    )
    named = {
        one.removesuffix("_total")
        for span in code_spans(page)
        for one in re.findall(r"(?<![./\w])seqmesh_[a-z_]+[a-z](?![\w.*])", span)
    }

    # A volume of the compose file and the client's module have such names, too.
    assert [] == sorted(one for one in named - {"seqmesh_secret", "seqmesh_client"} if one not in source)


@PAGES
def test_targets_of_make_that_a_page_names_exist(page: Path) -> None:
    for span in code_spans(page):
        for line in commands.lines_of(span) if span.startswith("make ") and "..." not in span else ():
            commands.check(line)
