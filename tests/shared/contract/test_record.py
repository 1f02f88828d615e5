"""The record of a sequence has the fields that docs/reference/keys.md lists, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.contract import record
from tests.keys_page import FIELDS, STATES, RecordField

ROOT = Path(__file__).resolve().parents[3]
TREES = ("gateway", "scheduler", "executor", "shared", "deploy", "benchmarks")
SCRIPTS = {path.stem: re.sub(r"--.*", "", path.read_text()) for path in ROOT.glob("shared/store/lua/*.lua")}
MODULES = [path for tree in TREES for path in (ROOT / tree).rglob("*.py") if path.name != "record.py"]
NAMES = {field.name for field in FIELDS}
OTHERS = {"s:", "v:", "i:", "o:"}
"""Literals that look like a record's field and are none: `s:<version>` counts in a model's line, `v:<version>` has the
spare slots of an executor, `i:<n>` and `o:<n>` are a step's request and reply in a journal."""
HOMONYMS = {("shared/store/waiting_line.py", "in"), ("gateway/rest/openapi.py", "in")}
"""Literals that have a field's name and mean something else."""
KEYS_OF_RECORDS = {("lose", "KEYS[1]"), ("attempt", "KEYS[1]")}
"""By script: records that the script calls by their place alone."""


def literals(script: str) -> set[str]:
    """What stands in a script in the form of a record's field: two letters, or one and a colon."""
    return set(re.findall(r"'([a-z]{2}|[a-z]:)'", SCRIPTS[script])) - OTHERS


def arguments(text: str) -> list[str]:
    """The arguments of a call, from behind its opening parenthesis; nested ones stay whole."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            break
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [argument.strip() for argument in found]


def fields_in_commands(script: str) -> Iterator[str]:
    """Literals in the places of fields, in the commands on a record."""
    code = SCRIPTS[script]
    for found in re.finditer(r"call\('(HMGET|HGET|HSET|HSETNX|HDEL|HINCRBY)', ", code):
        key, *rest = arguments(code[found.end() :])
        if not re.search(r"\brecord\b|'seq:'", key) and (script, key) not in {
            ("lose", "KEYS[1]"),
            ("attempt", "KEYS[1]"),
        }:
            continue
        for place in rest[::2] if found[1] == "HSET" else rest[:1] if found[1] in ("HSETNX", "HINCRBY") else rest:
            yield from re.findall(r"^'([^']*)'", place)


def python_literals(path: Path) -> Iterator[str]:
    """Texts that are a field's name, or that stand behind a record's key among arguments or in a command's tuple."""
    place = str(path.relative_to(ROOT))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and node.value in NAMES and (place, node.value) not in HOMONYMS:
            yield f"{place}:{node.lineno} {node.value}"
        parts = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple) else []
        keys = [index for index, part in enumerate(parts) if isinstance(part, ast.Attribute) and part.attr == "record"]
        for part in parts[keys[0] + 1 :] if keys else ():
            for each in ast.walk(part):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield f"{place}:{each.lineno} {each.value}"


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_a_script_uses_no_field_that_is_not_named(script: str) -> None:
    assert set() == (literals(script) | set(fields_in_commands(script))) - NAMES, "see docs/reference/keys.md"


def test_every_named_field_is_used() -> None:
    used = {name for script in SCRIPTS for name in literals(script) | set(fields_in_commands(script))}

    assert set() == NAMES - used, "listed in docs/reference/keys.md, and used by no script"


def test_python_code_names_fields_by_their_constants() -> None:
    assert [] == [literal for path in MODULES for literal in python_literals(path)]


def test_every_constant_is_a_field_and_every_field_is_listed_once() -> None:
    constants = [value for name, value in vars(record).items() if name.isupper() and isinstance(value, str)]

    assert len(constants) == len(set(constants))
    assert set() == set(constants) - NAMES
    assert len(NAMES) == len(FIELDS)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_the_writers_of_a_field_mention_it(field: RecordField) -> None:
    """Themselves, or by a function that several scripts share."""
    writers = re.findall(r"`(\w+)`", field.writers)

    assert writers
    assert [] == [w for w in writers if field.name not in literals(w) | literals("common")]


def test_the_states_are_those_of_the_scripts() -> None:
    (known,) = re.findall(r"STATES = \{([^}]*)\}", SCRIPTS["common"])

    assert {state.decode() for state in STATES} == set(re.findall(r"(\w) = true", known))
    assert record.TOMBSTONES == {state for state in STATES if state not in b"wlmp"}
