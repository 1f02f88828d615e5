"""The faults that `make mutants` makes: what people get wrong, and nothing that means what stood there before."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.mutation.__main__ import Fault, changed, drawn, faults_of, is_another

SOURCE = '''
    COUNT_MAX = 3

    def told(rows: list[int] | None, free, taken):
        """Adds 1."""
        logs.info("told", rows=len(rows) + 1)
        self.wake.set()
        self.send(rows)
        if rows and all(rows):
            return free - taken
        name = free >= 2
        return zip(name, taken, strict=True)
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("module.py").write_text(textwrap.dedent(SOURCE))
    return "module.py"


def made(module: str) -> dict[str, set[str]]:
    """The lines as they are changed, by operator."""
    source = Path(module).read_text()
    found: dict[str, set[str]] = {}
    for fault in filter(is_another, faults_of(module)):
        lines = zip(changed(source, fault).splitlines(), source.splitlines(), strict=True)
        found.setdefault(fault.operator, set()).update(after.strip() for after, before in lines if after != before)
    return found


def test_an_effect_less_two_in_the_other_order_and_a_condition_that_is_not_asked(module: str) -> None:
    found = made(module)

    assert {"pass"} == found["DropEffect"]
    assert {"self.wake.set()", "self.send(rows)"} == found["SwapEffects"]
    assert {"if True:", "if False:"} == found["ForceCondition"]
    assert {"if rows:", "if all(rows):", "return free", "return taken"} == found["DropOperand"]
    assert {"if rows and any(rows):"} == found["Counterpart"]
    assert {"name = free > 2"} == found["ReplaceComparisonOperator_GtE_Gt"]


def test_constants_log_lines_and_annotations_stay(module: str) -> None:
    found = made(module)

    assert {"ReplaceBinaryOperator_Sub_Add"} == {name for name in found if name.startswith("ReplaceBinary")}
    assert 2 == len(found["NumberReplacer"])
    assert "ReplaceTrueWithFalse" not in found


def test_a_sample_is_the_same_for_the_same_seed_and_takes_a_line_once(module: str) -> None:
    faults = faults_of(module)

    sample = drawn(faults, 3, seed=7)

    assert sample == drawn(faults, 3, seed=7)
    assert 3 == len({fault.line for fault in sample})
    assert len(drawn(faults, 100, seed=7)) == len({fault.line for fault in faults if is_another(fault)})
    assert "3:DropEffect:0" == Fault("a.py", 3, "DropEffect", 0).name
