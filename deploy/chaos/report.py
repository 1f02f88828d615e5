"""The report of a run, as JSON and as a few lines of Markdown."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from deploy.chaos.checker import Finding, Sort, Strikes, check, longest_gap
from deploy.chaos.faults import ChaosPlan
from deploy.chaos.history import AttemptOutcome, ChaosRun, SequenceHistory, Strike
from deploy.local.endings import EXIT_TOO_SOON

EXIT_FAILED_CHECK = 1
GAP_AFTER_S = 10.0
"""How long after a fault's end the longest gap without an answer is looked for, if no other fault comes before."""
FINDINGS_MAX = 50
FINDINGS_SHOWN = 10
NO_STEP = 0
"""In the place of a step's number where a finding is about the run."""
PERCENTILES = (50.0, 90.0, 99.0, 99.9, 100.0)
CALM_AFTER_S = 2.0
"""A step counts as undisturbed when no fault was under way, or over for less than this, between sending and answer."""


class FaultLine(msgspec.Struct):
    """All faults of a kind. longest_gap_s: without an answer; back_s: longest time until a victim was back."""

    kind: str
    count: int
    longest_gap_s: float
    back_s: float


class Latencies(msgspec.Struct):
    """Milliseconds from the first sending of a step to its answer, by percentile; `steps` they were taken from."""

    steps: int
    ms: dict[str, float]


class Report(msgspec.Struct):
    """complete: whether all requested steps and faults were carried out."""

    verdict: str
    complete: bool
    seed: int
    command: str
    about: dict[str, str]
    seconds: float
    steps: int
    sequences: int
    attempts: dict[str, int]
    refusals: dict[str, int]
    broken: dict[str, int]
    forsaken: dict[str, int]
    faults: list[FaultLine]
    undisturbed: Latencies
    disturbed: Latencies
    refused_commits: int | None
    findings: list[Finding]

    @property
    def exit_code(self) -> int:
        """0: whole and complete. 1: a promise was broken. 3: nothing was broken, but the run is not complete."""
        return exit_code(self.broken, complete=self.complete)


@dataclass(slots=True)
class Judgement:
    """The result of checking a history.

    answers  every answered step, in order: when, s, and how long it took from its first sending, s
    """

    answers: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    sequences: int = 0
    attempts: Counter[str] = field(default_factory=Counter[str])
    refusals: Counter[str] = field(default_factory=Counter[str])
    forsaken: Counter[str] = field(default_factory=Counter[str])
    sorts: Counter[str] = field(default_factory=Counter[str])
    findings: list[Finding] = field(default_factory=list[Finding])


def judge(history: Iterable[SequenceHistory], strikes: Sequence[Strike]) -> Judgement:
    """Checks every sequence and gathers the figures."""
    by_time = Strikes(strikes)
    judgement = Judgement()
    for told in history:
        judgement.sequences += 1
        if told.forsaken:
            judgement.forsaken[told.forsaken] += 1
        for found in check(told, by_time):
            judgement.sorts[found.sort] += 1
            if len(judgement.findings) < FINDINGS_MAX:
                judgement.findings.append(found)
        judgement.answers += answered_steps(told)
        for attempt in told.attempts:
            judgement.attempts[attempt.outcome] += 1
            if attempt.outcome is AttemptOutcome.REFUSED:
                judgement.refusals[attempt.reason or "unavailable"] += 1
    judgement.answers.sort()
    return judgement


def count_failures(judgement: Judgement, failures: Iterable[str], at_s: float) -> None:
    """Adds what no history tells to the findings: faults that failed, and clients that came to no end."""
    for failure in failures:
        judgement.sorts[Sort.UNEXPLAINED] += 1
        judgement.findings.append(Finding(Sort.UNEXPLAINED, 0, "", NO_STEP, at_s, failure))


def failures_of(report: Report) -> list[str]:
    """What `count_failures` has added to the findings of a report."""
    return [found.story for found in report.findings if found.step == NO_STEP]


def answered_steps(told: SequenceHistory) -> list[tuple[float, float]]:
    """Per answered step: the time of its first answer, and the seconds since it was first sent."""
    first_sent: dict[int, float] = {}
    answered: dict[int, float] = {}
    for attempt in told.attempts:
        first_sent[attempt.step] = min(attempt.sent_s, first_sent.get(attempt.step, attempt.sent_s))
        if attempt.outcome is AttemptOutcome.ANSWERED:
            answered[attempt.step] = min(attempt.done_s, answered.get(attempt.step, attempt.done_s))
    return [(at, at - first_sent[step]) for step, at in answered.items()]


def report_of(
    judgement: Judgement, plan: ChaosPlan, done: ChaosRun, *, command: str, about: Mapping[str, str]
) -> Report:
    """The report. command: how the run is repeated; about: facts about the mesh."""
    count_failures(judgement, done.failures, done.seconds)
    steps = len(judgement.answers)
    broken = {str(sort): judgement.sorts[sort] for sort in Sort}
    complete = steps >= plan.steps and len(done.strikes) >= len(plan.faults)
    calm, disturbed = split(judgement.answers, done.strikes)
    return Report(
        verdict=verdict(broken, complete=complete),
        complete=complete,
        seed=plan.seed,
        command=command,
        about=dict(about),
        seconds=round(done.seconds, 1),
        steps=steps,
        sequences=judgement.sequences,
        attempts=dict(sorted(judgement.attempts.items())),
        refusals=dict(sorted(judgement.refusals.items())),
        broken=broken,
        forsaken=dict(sorted(judgement.forsaken.items())),
        faults=fault_lines(done.strikes, [at for at, _ in judgement.answers]),
        undisturbed=latencies(calm),
        disturbed=latencies(disturbed),
        refused_commits=done.refused_commits,
        findings=judgement.findings,
    )


def exit_code(broken: Mapping[str, int], *, complete: bool) -> int:
    return EXIT_FAILED_CHECK if any(broken.values()) else 0 if complete else EXIT_TOO_SOON


def verdict(broken: Mapping[str, int], *, complete: bool) -> str:
    if any(broken.values()):
        return "BROKEN: " + ", ".join(f"{count} {sort}" for sort, count in broken.items() if count)
    return "whole" if complete else "whole so far, but the run was not complete"


def split(answers: Iterable[tuple[float, float]], strikes: Sequence[Strike]) -> tuple[list[float], list[float]]:
    """The durations of undisturbed steps and of all others, in seconds."""
    spans = merged([(strike.begin_s, strike.end_s + CALM_AFTER_S) for strike in strikes])
    ends = [end for _, end in spans]
    calm: list[float] = []
    disturbed: list[float] = []
    for answered_s, took_s in answers:
        # The first span that ends after the step was sent.
        index = bisect_left(ends, answered_s - took_s)
        touched = index < len(spans) and spans[index][0] <= answered_s
        (disturbed if touched else calm).append(took_s)
    return calm, disturbed


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times without overlaps, in order."""
    result: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((begin, end))
    return result


def latencies(took_s: Sequence[float]) -> Latencies:
    """Percentiles by nearest rank."""
    ordered = sorted(took_s)
    if not ordered:
        return Latencies(0, {})
    ranks = {f"p{rank:g}": min(len(ordered) - 1, int(len(ordered) * rank / 100)) for rank in PERCENTILES}
    return Latencies(len(ordered), {name: round(ordered[rank] * 1000, 2) for name, rank in ranks.items()})


def fault_lines(strikes: Sequence[Strike], answered_s: Sequence[float]) -> list[FaultLine]:
    begins = sorted(strike.begin_s for strike in strikes)
    lines: dict[str, FaultLine] = {}
    for strike in sorted(strikes, key=lambda strike: strike.kind):
        following = bisect_left(begins, strike.end_s)
        until_s = strike.end_s + GAP_AFTER_S
        if following < len(begins):
            until_s = min(until_s, begins[following])
        line = lines.setdefault(strike.kind, FaultLine(strike.kind, 0, 0.0, 0.0))
        line.count += 1
        line.longest_gap_s = max(line.longest_gap_s, round(longest_gap(answered_s, strike.begin_s, until_s), 3))
        line.back_s = max(line.back_s, round(strike.end_s - strike.begin_s, 3))
    return list(lines.values())


def markdown(report: Report) -> str:
    about = "\n".join(f"* {name}: {value}" for name, value in report.about.items())
    faults = "\n".join(f"| {f.kind} | {f.count} | {f.longest_gap_s:.2f} | {f.back_s:.1f} |" for f in report.faults)
    names = list(report.disturbed.ms or report.undisturbed.ms)
    rows = [("no fault near", report.undisturbed), ("during and after faults", report.disturbed)]
    latency = "\n".join(
        f"| {name} | {one.steps} | " + " | ".join(f"{one.ms[p]:.1f}" for p in names) + " |"
        for name, one in rows
        if one.steps
    )
    findings = "\n".join(
        f"* {f.sort}: sequence {f.sequence} ({f.correlation_id!r}), at {f.at_s:.2f} s: {f.story}"
        for f in report.findings[:FINDINGS_SHOWN]
    )
    refused = "not counted here" if report.refused_commits is None else str(report.refused_commits)
    return f"""# Chaos: {report.verdict}

{report.steps} steps of {report.sequences} sequences and {sum(f.count for f in report.faults)} faults in \
{report.seconds:.0f} s: {counts(report.broken)}. Again: `{report.command}`

* seed: {report.seed}
{about}
* attempts: {counts(report.attempts)}
* refusals: {counts(report.refusals)}
* given up by their clients: {counts(report.forsaken)}
* commits refused by epoch: {refused}

| fault | how often | longest gap without any answer, s | back after at most, s |
|---|---|---|---|
{faults}

| ms from first sending to answer | steps | {" | ".join(names)} |
|---|---|{"---|" * len(names)}
{latency}
{f"{chr(10)}## Findings{chr(10)}{chr(10)}{findings}{chr(10)}" if findings else ""}"""


def counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in numbers.items()) or "none"
