"""The diagrams in docs/design show what the code says. To draw them again: `python -m tests.design.draw`."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from executor.core.state import OwnedPhase
from scheduler.core.state import ExecutorPhase, SequencePhase
from shared.store import libraries
from tests.design.draw import DESIGN, hand_laid
from tests.design.references import PAGES, ROOT
from tests.design.states import DRAWINGS, NONE, OVER, RECORD_MOVES, Drawing, read_edges

DIAGRAMS = sorted(DESIGN.glob("*.svg"))


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda drawing: drawing.name)
def test_the_moves_in_the_diagram_are_those_of_the_code(drawing: Drawing) -> None:
    assert drawing.edges == read_edges((DESIGN / f"{drawing.name}.svg").read_text())


@pytest.mark.parametrize("name", sorted(hand_laid()))
def test_what_is_laid_by_hand_is_drawn_as_it_is_laid(name: str) -> None:
    assert hand_laid()[name] == (DESIGN / f"{name}.svg").read_text()


def test_a_diagram_without_one_of_the_moves_is_found() -> None:
    """The comparison itself: a label less, and an edge less."""
    drawing = DRAWINGS[0]
    text = (DESIGN / f"{drawing.name}.svg").read_text()

    assert drawing.edges != read_edges(re.sub(r"<text[^>]*>kept</text>", "", text))
    assert drawing.edges != read_edges(re.sub(r'<g id="edge1" class="edge">.*?</g>\n', "", text, flags=re.DOTALL))


def test_every_phase_is_in_its_diagram() -> None:
    drawn = {drawing.name: {state for ends in drawing.edges for state in ends} for drawing in DRAWINGS}

    assert set(SequencePhase) == drawn["sequence-states"]
    assert set(ExecutorPhase) == drawn["executor-states"]
    assert set(OwnedPhase) == drawn["owned-states"]


def test_the_states_and_scripts_of_a_record_are_those_of_the_scripts() -> None:
    common = (ROOT / "shared" / "store" / "lua" / "common.lua").read_text()
    line = re.search(r"^local STATES = \{(.*)\}$", common, re.MULTILINE)
    assert line is not None
    states = set(re.findall(r"(\w) = true", line[1]))
    (drawing,) = [drawing for drawing in DRAWINGS if drawing.name == "record-states"]
    tombstones = set(re.findall(r"\b(\w) \w", drawing.labels[OVER].removeprefix("over: ").replace("\\n", " ")))
    drawn = {state for before, _, after in RECORD_MOVES for state in (before, after)} - {NONE, OVER}

    assert states == drawn | tombstones
    assert {script for _, script, _ in RECORD_MOVES} <= {*libraries.NAMES, "TTL"}


@pytest.mark.parametrize("diagram", DIAGRAMS, ids=lambda diagram: diagram.name)
def test_every_diagram_is_shown_on_a_page_and_can_be_read(diagram: object) -> None:
    name = str(diagram).rpartition("/")[2]
    root = ET.parse(DESIGN / name).getroot()

    assert any(f"]({name})" in page.read_text() for page in PAGES)
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
