"""A report says what was done and what was found, and its exit code is the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from deploy.chaos.command import Document, chaos
from deploy.chaos.faults import ChaosPlan, plan_faults
from deploy.chaos.history import ChaosRun, SequenceHistory, Strike, history_file, read_history
from deploy.chaos.report import Latencies, Report, judge, markdown, merged, report_of, split
from tests.chaos.histories import history, refused

STRIKES = [Strike(0, "kill-executor", 2.0, 3.5, "executor-1"), Strike(1, "restart-redis", 30.0, 31.0, "redis")]


def wrong() -> SequenceHistory:
    told = history([4, 5, 6])
    told.attempts[1].length = 7
    return told


def reported(
    histories: list[SequenceHistory], *, steps_wanted: int = 1, faults_wanted: int = 2, failures: Sequence[str] = ()
) -> Report:
    faults = plan_faults(11, faults_wanted, ["kill-executor"], lease_s=1.0)
    plan = ChaosPlan(seed=11, steps=steps_wanted, faults=faults, minutes=1.0, clients=1, run="")
    done = ChaosRun(40.0, STRIKES, failures, None)
    judgement = judge(histories, STRIKES)
    return report_of(judgement, plan, done, command="seqmesh chaos --seed 11", about={"redis": "Valkey"})


def test_the_exit_code_is_the_verdict() -> None:
    assert (0, "whole") == (reported([history([1, 2])]).exit_code, reported([history([1, 2])]).verdict)
    assert 1 == reported([history([1, 2]), wrong()]).exit_code
    assert "BROKEN: 1 wrong" == reported([history([1, 2]), wrong()]).verdict
    assert 3 == reported([history([1, 2])], steps_wanted=3).exit_code
    assert 3 == reported([history([1, 2])], faults_wanted=3).exit_code
    assert 1 == reported([history([1, 2])], failures=["executor-1 did not serve again"]).exit_code


def test_the_gaps_and_latencies_are_those_of_the_answers() -> None:
    late = history([1, 2, 3])
    late.attempts[2].done_s = 9.0
    report = reported([late])

    assert {"kill-executor": (1, 6.5, 1.5), "restart-redis": (1, 0.0, 1.0)} == {
        line.kind: (line.count, line.longest_gap_s, line.back_s) for line in report.faults
    }
    assert (1, 500.0) == (report.undisturbed.steps, report.undisturbed.ms["p50"])
    assert (2, 6000.0) == (report.disturbed.steps, report.disturbed.ms["p100"])


def test_a_step_is_timed_from_its_first_sending_and_is_disturbed_when_a_fault_touches_that_time() -> None:
    told = history([1, 2])
    told.attempts.insert(0, refused(1, at_s=0.25))
    judgement = judge([told], [])

    assert [1.25, 0.5] == [took_s for _, took_s in judgement.answers]
    assert ([1.25], [0.5]) == split(judgement.answers, [Strike(0, "kill-redis", 2.1, 2.2)])
    assert [(1, 5), (6, 7)] == merged([(6, 7), (1, 3), (2, 5)])


def test_what_no_step_was_is_left_out_of_the_latencies() -> None:
    """A run without faults."""
    report = msgspec.structs.replace(reported([history([1, 2])]), disturbed=Latencies(0, {}))

    assert "| during and after faults |" not in markdown(report)


def test_the_report_can_be_read_by_people() -> None:
    text = markdown(reported([history([1, 2]), wrong()]))

    assert text.startswith("# Chaos: BROKEN: 1 wrong\n")
    for expected in (
        "5 steps of 2 sequences and 2 faults",
        "seed: 11",
        "redis: Valkey",
        "| kill-executor | 1 |",
        "## Findings",
        "step 2",
    ):
        assert expected in text


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    histories = [history([1, 2]), wrong()]
    with history_file(tmp_path / "history.jsonl.gz") as add:
        for told in histories:
            add(told)

    assert histories == list(read_history(tmp_path / "history.jsonl.gz"))


@pytest.mark.parametrize(("histories", "code"), [([history([1, 2])], 0), ([history([1]), wrong()], 1)])
def test_a_run_can_be_judged_again_by_its_files(tmp_path: Path, histories: list[SequenceHistory], code: int) -> None:
    with history_file(tmp_path / "history.jsonl.gz") as add:
        for told in histories:
            add(told)
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(Document(reported(histories), [], STRIKES)))

    result = CliRunner().invoke(chaos, ["--check", str(tmp_path)])

    assert code == result.exit_code, result.output
    assert f"{code} wrong" in result.output


@pytest.mark.parametrize(
    ("failures", "faults_wanted", "code"), [(["executor-1 did not serve again"], 2, 1), ([], 3, 3), ([], 2, 0)]
)
def test_a_run_that_is_judged_again_has_the_exit_code_that_it_had(
    tmp_path: Path, failures: list[str], faults_wanted: int, code: int
) -> None:
    """Faults that failed, clients that came to no end, and a run that ended too soon are in no history."""
    with history_file(tmp_path / "history.jsonl.gz") as add:
        add(history([1, 2]))
    report = reported([history([1, 2])], faults_wanted=faults_wanted, failures=failures)
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(Document(report, [], STRIKES)))

    result = CliRunner().invoke(chaos, ["--check", str(tmp_path)])

    assert (code, code) == (report.exit_code, result.exit_code), result.output
    assert all(failure in result.output for failure in failures)


@pytest.mark.parametrize(("kept", "behind"), [(-20, b""), (30, b"\xff" * 99)])
def test_a_damaged_history_is_no_broken_promise(tmp_path: Path, kept: int, behind: bytes) -> None:
    with history_file(tmp_path / "history.jsonl.gz") as add:
        add(history(list(range(50))))
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(Document(reported([history([1])]), [], STRIKES)))
    path = tmp_path / "history.jsonl.gz"
    path.write_bytes(path.read_bytes()[:kept] + behind)

    result = CliRunner().invoke(chaos, ["--check", str(tmp_path)])

    assert 2 == result.exit_code, result.output
    assert "is not what a run has left" in result.output


def test_a_directory_without_a_run_is_no_broken_promise(tmp_path: Path) -> None:
    result = CliRunner().invoke(chaos, ["--check", str(tmp_path)])

    assert 2 == result.exit_code, result.output
    assert "is not what a run has left" in result.output
