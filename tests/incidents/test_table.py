"""The README's table names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
NAMED = re.findall(r"`([\w/]+\.py)::(?:\w+::)?(\w+)`", (TESTS / "incidents" / "README.md").read_text())


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_every_test_that_the_table_names_exists(path: str, name: str) -> None:
    assert f"def {name}(" in (TESTS / path).read_text()
