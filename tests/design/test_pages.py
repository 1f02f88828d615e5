"""The pages of docs/design and docs/decisions name what there is, and leave out nothing that they claim to list."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from executor.core.state import OWNED_MOVES
from scheduler.core.state import EXECUTOR_MOVES, SEQUENCE_MOVES
from shared.store import libraries
from tests.design.references import FOLDERS, PAGES, ROOT, named
from tests.design.states import RECORD_MOVES, table_moves
from tests.design.step import LEGS
from tests.markdown_pages import anchors_of, rows_below
from tests.symbols import symbols

DESIGN, DECISIONS = ROOT / "docs" / "design", ROOT / "docs" / "decisions"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
PACKAGES = ("gateway", "scheduler", "executor", "shared", "deploy")


def page_id(page: Path) -> str:
    return f"{page.parent.name}/{page.name}"


def words(cell: str) -> tuple[str, ...]:
    """What stands in backquotes in a cell."""
    return tuple(re.findall(r"`([^`]+)`", cell))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_file_and_symbol_that_a_page_names_exists(page: Path) -> None:
    missing: list[str] = []
    for path, symbol in named(page):
        if not (ROOT / path).is_file():
            missing.append(path)
        elif symbol and symbol.replace("::", ".") not in symbols(path):
            missing.append(f"{path}::{symbol}")
    missing += [folder for folder in FOLDERS.findall(page.read_text()) if not (ROOT / folder).is_dir()]

    assert [] == missing


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_and_diagram_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.is_file() or (anchor and anchor not in anchors_of(file)):
            broken.append(target)

    assert [] == broken


# -- architecture ---------------------------------------------------------------------------------------------------


def layers_of(package: str) -> list[list[str]]:
    (contract,) = [one for one in CONTRACTS if one.get("containers") == [package]]
    return [[room.strip() for room in layer.split("|")] for layer in contract["layers"]]


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_and_what_they_may_import_are_those_of_the_contracts(package: str) -> None:
    layers = layers_of(package)
    expected: list[tuple[str, tuple[str, ...]]] = []
    for index, layer in enumerate(layers):
        below = tuple(room for lower in layers[index + 1 :] for room in lower)
        expected += [(room, below) for room in layer]
    told: list[tuple[str, tuple[str, ...]]] = []
    for room, _, knows in rows_below(DESIGN / "architecture.md", f"### {package}"):
        (name,) = words(room)
        (told_below,) = [below for room, below in expected if room == name] or [()]
        told.append((name, told_below if knows == "all below" else words(knows)))

    assert expected == told


def test_every_script_is_called_by_the_services_that_are_said_to() -> None:
    listed = {
        service.split()[0]: (*words(of_sequences), *words(of_work))
        for service, of_sequences, of_work in rows_below(DESIGN / "architecture.md", "## Who calls which script")
    }
    through_shared = "".join((ROOT / "shared" / "store" / name).read_text() for name in ("totals.py", "sequences.py"))
    uncalled = [
        (service, script)
        for service, called in listed.items()
        for script in called
        if f".{script.removeprefix('work_')}(" not in source_of(service) + through_shared
    ]

    assert set(libraries.NAMES) == {script for called in listed.values() for script in called}
    assert [] == uncalled


def source_of(package: str) -> str:
    return "".join(path.read_text() for path in sorted((ROOT / package).rglob("*.py")))


# -- states and steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heading", "moves"),
    [
        ("## In the leader state", table_moves(SEQUENCE_MOVES)),
        ("## An executor in the leader state", table_moves(EXECUTOR_MOVES)),
        ("## In Redis", RECORD_MOVES),
        ("## At its executor", table_moves(OWNED_MOVES)),
    ],
)
def test_every_move_has_its_cause(heading: str, moves: Any) -> None:
    told = [
        (before, move.strip("`"), after)
        for before, move, after, _ in rows_below(DESIGN / "sequence-states.md", heading)
    ]

    assert sorted(moves) == sorted(told)


def test_the_numbers_of_the_step_s_text_are_those_of_its_diagram() -> None:
    text = (DESIGN / "step.md").read_text()
    told = {int(number): rest for number, rest in re.findall(r"^(\d+)\. \*\*(.+?)\*\*", text, re.MULTILINE)}

    assert [leg.number for leg in LEGS] == sorted(told)
    for leg in LEGS:
        assert leg.script in told[leg.number]
        assert not leg.script or leg.script in libraries.NAMES


# -- failures, decisions, words ---------------------------------------------------------------------------------------


def test_every_failure_has_a_test() -> None:
    tables = re.findall(r"^\| (.*) \|$", (DESIGN / "failures.md").read_text(), re.MULTILINE)
    tests = [cells.split(" | ")[-1] for cells in tables if not cells.startswith(("what fails", "---"))]

    assert tests
    assert [] == [cell for cell in tests if not words(cell) or "::" not in words(cell)[0]]


def test_every_decision_has_its_parts_and_a_line_in_the_index() -> None:
    index = (DECISIONS / "index.md").read_text()
    pages = sorted(DECISIONS.glob("[0-9]*.md"))

    numbers = [page.name[:4] for page in pages]
    # Numbers are given before pages are written, so there may be gaps.
    assert len(numbers) == len({*numbers})
    for page in pages:
        text = page.read_text()
        parts = re.findall(r"^## (.+)$", text, re.MULTILINE)
        title = text.splitlines()[0].removeprefix("# ")
        assert ["Context", "Decision", "Price", "Proof"] == parts, page.name
        assert f"[{title}]({page.name})" in index, page.name


def test_the_glossary_is_in_order_and_each_word_has_its_place() -> None:
    listed = rows_below(DESIGN / "glossary.md", "# Glossary")

    assert [word for word, *_ in listed] == sorted((word for word, *_ in listed), key=str.lower)
    assert [] == [word for word, _, place in listed if not words(place)]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_fence_names_its_language(page: Path) -> None:
    fences = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)

    assert [] == [fence for fence in fences[::2] if not fence.strip()]
