"""What becomes of the results of a model's requests, beside their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from executor.engine.base import NO_TIME, RowError, RowResult
from executor.reporting.statistics import StatisticsRecorder
from shared.contract.errors import Code
from shared.contract.limits import ERROR_CHARACTERS_MAX
from shared.process.repeats import Repeats
from shared.statistics.tally import ModelLoad


def answer(recorder: StatisticsRecorder, *rows: RowResult | RowError) -> None:
    for row in rows:
        recorder.answered(row, rows=1, arrived_ns=0, began_ns=0, ended_ns=1, timings=NO_TIME)


def told(caplog: pytest.LogCaptureFixture) -> Sequence[dict[str, Any]]:
    """The fields of the lines about failures."""
    return [vars(record)["fields"] for record in caplog.records if record.getMessage() == "model failed"]


def test_the_first_failure_of_a_load_is_logged_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    recorder = StatisticsRecorder(ModelLoad("sums", "3", "0"))

    answer(recorder, RowResult(()), RowError(Code.INTERNAL, "ValueError: bad step"), RowError(Code.INTERNAL, "another"))
    answer(recorder.of(ModelLoad("sums", "3", "1")), RowError(Code.UNKNOWN, "ValueError: anew"))

    assert [
        {"model": "sums", "version": "3", "cause": "ValueError: bad step"},
        {"model": "sums", "version": "3", "cause": "ValueError: anew"},
    ] == told(caplog)
    assert {"WARNING"} == {record.levelname for record in caplog.records}


def test_failures_that_go_on_are_counted_at_growing_intervals_though_each_has_a_text_of_its_own(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter(range(100_000))
    monkeypatch.setattr("executor.reporting.statistics.Repeats", lambda: Repeats(lambda: next(steps) / 1000))
    recorder = StatisticsRecorder(ModelLoad("sums", "1", "0"))

    answer(recorder, *(RowError(Code.INTERNAL, f"step {number} is bad") for number in range(100_000)))

    assert [0, 2000, 6000, 14000, 30000, 62000] == [int(line["cause"].split()[1]) for line in told(caplog)]
    assert [0, 1999, 3999, 7999, 15999, 31999] == [line.get("repeated", 0) for line in told(caplog)]


def test_a_lost_state_is_told_among_other_failures_and_a_cause_has_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    recorder = StatisticsRecorder(ModelLoad("sums", "1", "0"))
    failed = RowError(Code.INTERNAL, "bad step")
    lost = RowError(Code.INTERNAL, "\ud800" + "x" * 2 * ERROR_CHARACTERS_MAX, lost=True)

    answer(recorder, failed, lost, failed, lost)

    causes = [line["cause"] for line in told(caplog)]
    assert ["bad step", "\\ud800xxx"] == [cause[:9] for cause in causes]
    assert len(causes[1]) < ERROR_CHARACTERS_MAX + 100


def test_a_request_that_is_wrong_is_no_failure_of_the_model(caplog: pytest.LogCaptureFixture) -> None:
    recorder = StatisticsRecorder(ModelLoad("sums", "1", "0"))

    answer(recorder, RowError(Code.INVALID_ARG, "wrong shape"), RowError(Code.NOT_FOUND, "the model knows no such id"))

    assert [] == told(caplog)
