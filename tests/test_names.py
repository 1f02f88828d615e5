"""The check of names finds what it is there for."""

from __future__ import annotations

from pathlib import Path

from tests.names import ROOT, repeated


def test_a_public_class_is_defined_once() -> None:
    assert not repeated(ROOT)


def test_a_second_definition_is_found(tmp_path: Path) -> None:
    for package in ("gateway", "executor"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "one.py").write_text("class Place: ...\nclass _Own: ...\n")
    model = tmp_path / "deploy" / "models" / "sum"
    model.mkdir(parents=True)
    (model / "model.py").write_text("class Place: ...\n")

    assert {"Place": ["gateway/one.py:1", "executor/one.py:1"]} == repeated(tmp_path)
