"""`seqmesh seq ls`: how much of a long list is shown. The rest is tested in `tests/mesh/test_sequences.py`."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from deploy.operate import sequences
from shared.store.sequence_status import SequenceStatus
from shared.store.sequences import StateSizes
from tests.deploy.console.readings import status

COUNT = 150


class ManySequences:
    """Stands for the sequences of a mesh."""

    async def page(
        self, _model: str, _wanted: object, begin: int, end: int | None, *, without: object
    ) -> tuple[list[SequenceStatus], int]:
        return [status(number) for number in range(COUNT)][begin:end], COUNT

    async def foretold(self, statuses: list[SequenceStatus]) -> list[SequenceStatus]:
        return statuses


@pytest.mark.parametrize(
    ("words", "lines", "end"),
    [
        ([], 102, "150 sequences, 50 of them not shown: --limit 150 shows them"),
        (["--limit", "150"], 152, "150 sequences"),
        (["--json"], 150, '"id":149'),
        (["--json", "--limit", "2"], 2, '"id":1'),
    ],
)
def test_a_program_gets_all_sequences_and_a_person_hears_how_to_see_them(
    monkeypatch: pytest.MonkeyPatch, words: list[str], lines: int, end: str
) -> None:
    def found(*_: object) -> AbstractAsyncContextManager[Any]:
        return nullcontext(SimpleNamespace(sequences=ManySequences(), redis=None))

    def all_there(_: object) -> AbstractAsyncContextManager[tuple[()]]:
        return nullcontext(())

    async def now(_: object) -> int:
        return 0

    monkeypatch.setattr(sequences, "found_mesh", found)
    monkeypatch.setattr(sequences, "whole_or_told", all_there)
    monkeypatch.setattr(sequences, "redis_now_ms", now)

    shown = CliRunner().invoke(sequences.command, ["ls", "m", *words], catch_exceptions=False).output.splitlines()

    assert lines == len(shown)
    assert end in shown[-1]


def test_open_steps_and_what_is_left_of_the_idle_time_are_shown() -> None:
    one = msgspec.structs.replace(status(7), open_steps=2, idle_left_ms=61_000)

    _, row = sequences.table([one], 10_500).splitlines()
    lines = dict(sequences.described(one, StateSizes({}, 0), 10_500))

    assert ["7", "live", "a-1", "3", "2", "10.0s", "1m", "1s", "10.0s"] == row.split()
    assert ("3 since START, 2 of them open", "in 1m 1s") == (lines["steps"], lines["expires"])


def test_a_time_that_no_calendar_has_is_shown_as_it_is_kept() -> None:
    one = msgspec.structs.replace(status(7), begun_ms=10**21)

    lines = dict(sequences.described(one, StateSizes({}, 0), 10_500))

    assert f"at no time of a calendar ({10**21} ms), 0.0s ago" == lines["began"]


def test_what_the_models_own_method_gave_stands_beside_a_state_of_the_same_name() -> None:
    lines = sequences.described(status(1), StateSizes({"m": 2}, 4), 0)

    assert ["m, 2 bytes", "from the model's own method, 4 bytes"] == [
        text for name, text in lines if name == "checkpoint"
    ]
