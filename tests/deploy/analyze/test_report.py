"""The report says what was tried, what was chosen and why; its plots are whole."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import click
import pytest

from deploy.analyze.inputs import Input
from deploy.analyze.load import AnswerTimes, summary
from deploy.analyze.notes import Circumstances, CurvePoint, Notes, measurement, read_notes, write_notes
from deploy.analyze.plots import nice
from deploy.analyze.report import Analysis, curve_plot, markdown, trials_plot
from deploy.analyze.search import Bounds, Knob, Measured, Setting

START: Setting = (("size", 4), ("copies", 1))
BEST: Setting = (("size", 8), ("copies", 1))
BROKEN: Setting = (("size", 16), ("copies", 1))
HERE = Circumstances("abc", "load", 2)


def notes(*extra: Setting) -> Notes:
    made = Notes(HERE, {"name": "m"}, [Input("X", "FP32", (1, -1))])
    made.trials = [
        measurement(START, "the given configuration", Measured(1000, 1, 4, 100 << 20, 0.02)),
        measurement(BEST, "size 4 -> 8", Measured(1500, 1, 6, 110 << 20, 0.04)),
        measurement(BROKEN, "size 8 -> 16", Measured(problem="failed to load: no | memory\nat all")),
    ]
    made.again = [measurement(one, "again", Measured(1400, 1, 6)) for one in extra]
    made.curve = [CurvePoint(dict(one), callers, 100.0 * callers, 1.0) for one in (START, BEST) for callers in (1, 2)]
    return made


def outcome(best: Setting, bounds: Bounds) -> Analysis:
    return Analysis(
        "m", START, best, [Knob("size", (4, 8, 16), "rows")], bounds, "No knob is left that helps.", "2 callers"
    )


def test_the_choice_is_told_with_its_reason_and_its_neighbours() -> None:
    text = markdown(outcome(BEST, Bounds(p99_ms=8)), notes(START, BEST))

    assert "Changed: size 4 -> 8. Throughput +50%; less than 4% is noise." in text
    assert " Measured once more" not in markdown(outcome(BEST, Bounds()), notes())
    assert "The choice keeps the bounds: p99 at most 8 ms." in text
    assert "| chosen, again | size 8, copies 1 | 1,400 |" in text
    assert "failed to load: no / memory at all" in text
    assert "| size: rows | 8 (chosen) | 1,500 |" in text
    assert "| chosen | 2 | 200 | 1.00 |" in text


def test_the_gain_is_also_that_of_the_last_two_measurements() -> None:
    made = notes(BEST)
    made.again.append(measurement(START, "again", Measured(1250, 1, 4)))

    text = markdown(outcome(BEST, Bounds()), made)

    assert "Throughput +50%; less than 4% is noise. Measured once more, one after the other: +12%." in text


def test_a_gain_that_was_not_seen_again_is_shown_and_is_why_the_given_configuration_stays() -> None:
    text = markdown(outcome(START, Bounds()), notes(START, BEST))

    assert "| given, again | size 4, copies 1 | 1,400 |" in text
    assert "| not chosen, again | size 8, copies 1 | 1,400 |" in text
    assert "what looked better was not, when both were measured once more" in text
    assert "nothing that was tried is better" not in text


def test_a_choice_beyond_the_bounds_says_so() -> None:
    text = markdown(outcome(START, Bounds(p99_ms=2, memory_bytes=50 << 20)), notes())

    assert "The given configuration stays: nothing that was tried is better by more than the noise (3%)." in text
    assert "**does not keep** the bounds: p99 at most 2 ms, memory at most 50 MiB" in text


def test_plots_are_xml_with_a_point_for_each_trial_that_worked() -> None:
    for drawn in (
        trials_plot(outcome(BEST, Bounds(p99_ms=5)), notes()),
        curve_plot(outcome(BEST, Bounds()), notes().curve),
    ):
        root = ET.fromstring(drawn)
        assert root.tag.endswith("svg")
    # Two points, and a spot for each of three titles.
    assert 2 + 3 == trials_plot(outcome(BEST, Bounds(p99_ms=5)), notes()).count("<circle")
    assert "bound" in trials_plot(outcome(BEST, Bounds(p99_ms=5)), notes())
    assert [1.0, 2.5, 100.0, 0.05] == [nice(value) for value in (0, 2.1, 81, 0.045)]


def test_notes_outlive_their_process_and_belong_to_their_circumstances(tmp_path: Path) -> None:
    assert read_notes(tmp_path, HERE) is None
    write_notes(tmp_path / "new", notes())

    known = read_notes(tmp_path / "new", HERE)

    assert known is not None
    assert [START, BEST, BROKEN] == list(known.found)
    assert notes().inputs == known.inputs
    assert notes().found == known.found
    with pytest.raises(click.UsageError, match="another model, load or machine"):
        read_notes(tmp_path / "new", Circumstances("other", "load", 2))
    (tmp_path / "new" / "measurements.json").write_text("{")
    with pytest.raises(click.UsageError, match="cannot be read"):
        read_notes(tmp_path / "new", HERE)


def test_rounds_become_medians_and_errors_a_problem() -> None:
    rounds = [AnswerTimes(1.0, [0.001] * count) for count in (90, 100, 140)]
    found = summary(rounds, 7)

    assert (100.0, 1.0, 1.0, 7) == (found.steps_per_s, found.p50_ms, found.p99_ms, memory := found.memory_bytes)
    assert 7 == memory
    assert pytest.approx(0.25) == found.noise
    rounds[0].errors["UNAVAILABLE: full"] += 2
    failed = summary(rounds, 7)
    assert ("2 steps failed, 2 of them with: UNAVAILABLE: full", 110.0) == (failed.problem, failed.steps_per_s)
    assert Measured(problem="no step was answered") == summary([AnswerTimes(1.0)], 7)
