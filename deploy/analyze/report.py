"""The report of a search, in Markdown, with its plots. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deploy.analyze.notes import CurvePoint, Notes, by_setting
from deploy.analyze.plots import Series, plot
from deploy.analyze.search import Bounds, Knob, Measured, Setting, change, noise_of

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Analysis:
    """What a report is about. ending: how the search ended"""

    model: str
    start: Setting
    best: Setting
    knobs: Sequence[Knob]
    bounds: Bounds
    ending: str
    load: str


def markdown(outcome: Analysis, notes: Notes) -> str:
    """The report of a finished run, in Markdown, with its plots linked."""
    parts = [f"# {outcome.model}: the configuration that serves most", *choice(outcome, notes)]
    parts += ["## What was tried", outcome.load, outcome.ending, "![all trials](trials.svg)"]
    parts += [trial_table(outcome, notes), "## Each knob around the choice", "All other knobs are as chosen."]
    parts.append(knob_table(outcome, notes.found))
    if notes.curve:
        parts += ["## Throughput and latency by the number of callers", "![the curve](curve.svg)"]
        parts.append(curve_table(outcome, notes.curve))
    files = "The chosen configuration is `config.pbtxt` beside this page; the measurements are `measurements.json`."
    parts += [f"{files}\n"]
    return "\n\n".join(parts)


def choice(outcome: Analysis, notes: Notes) -> list[str]:
    """What was chosen and why, in paragraphs."""
    given, best = notes.found[outcome.start], notes.found[outcome.best]
    noise = noise_of(given, best)
    names = {outcome.best: "chosen", outcome.start: "given"}
    rows = [("given", outcome.start, given), ("chosen", outcome.best, best)]
    again = by_setting(notes.again)
    rows += [(f"{names.get(setting, 'not chosen')}, again", setting, one) for setting, one in again.items()]
    parts = [table(["", "setting", *FIGURES], [[name, said(setting), *figures(one)] for name, setting, one in rows])]
    if best.problem:
        return [*parts, f"**Nothing that was tried works**: {best.problem}"]
    if outcome.start == outcome.best and again.keys() - {outcome.start}:
        why = "The given configuration stays: what looked better was not, when both were measured once more."
    elif outcome.start == outcome.best:
        why = f"The given configuration stays: nothing that was tried is better by more than the noise ({noise:.0%})."
    elif given.problem:
        why = f"The given configuration does not work under this load: {given.problem}"
    else:
        changed, by = change(outcome.start, outcome.best), gain(given, best)
        why = f"Changed: {changed}. Throughput {by}; less than {noise:.0%} is noise."
        last = [again[one] for one in (outcome.start, outcome.best) if one in again and not again[one].problem]
        if len(last) == 2:
            # The best of many trials was lucky, too, and the first trial had a machine that was not warm.
            why += f" Measured once more, one after the other: {gain(*last)}."
    parts.append(why)
    if said_bounds := bounds_text(outcome.bounds):
        kept = "keeps" if not outcome.bounds.excess(best) else "**does not keep**"
        parts.append(f"The choice {kept} the bounds: {said_bounds}.")
    if dict(outcome.best).get("checkpoint_interval", 1) != dict(outcome.start).get("checkpoint_interval", 1):
        price = "the next owner runs the steps since the last checkpoint again."
        parts.append(f"A larger `checkpoint_interval` makes takeovers longer: {price}")
    return parts


def gain(old: Measured, new: Measured) -> str:
    """By what share a setting serves more."""
    return f"{new.steps_per_s / old.steps_per_s - 1:+.0%}"


def bounds_text(bounds: Bounds) -> str:
    """The bounds, as a text; "" if there are none."""
    parts = [f"p99 at most {bounds.p99_ms:g} ms"] if bounds.p99_ms else []
    parts += [f"memory at most {bounds.memory_bytes / MIB:,.0f} MiB"] if bounds.memory_bytes else []
    return ", ".join(parts)


def trial_table(outcome: Analysis, notes: Notes) -> str:
    rows: list[list[str]] = []
    for number, one in enumerate(notes.trials, 1):
        if one.problem:
            verdict = one.problem.replace("|", "/").replace("\n", " ")
        elif outcome.bounds.excess(one):
            verdict = "beyond the bounds"
        else:
            verdict = "chosen" if tuple(one.setting.items()) == outcome.best else ""
        rows.append([str(number), one.why, *figures(one), f"{one.noise:.0%}", verdict])
    return table(["trial", "what", *FIGURES, "noise", ""], rows)


def knob_table(outcome: Analysis, found: Mapping[Setting, Measured]) -> str:
    """The trials that differ from the choice in one knob."""
    rows: list[list[str]] = []
    for knob in outcome.knobs:
        for value in knob.values:
            setting = tuple((name, value if name == knob.name else old) for name, old in outcome.best)
            if setting in found:
                mark = " (chosen)" if setting == outcome.best else ""
                rows.append([f"{knob.name}: {knob.meaning}", f"{value}{mark}", *figures(found[setting])])
    return table(["knob", "value", *FIGURES], rows)


def curve_table(outcome: Analysis, curve: Sequence[CurvePoint]) -> str:
    """The given and the chosen setting by callers."""
    names = {outcome.start: "given", outcome.best: "chosen"}
    settings = [names.get(tuple(one.setting.items()), "") for one in curve]
    rows = [
        [setting, str(one.concurrency), f"{one.steps_per_s:,.0f}", f"{one.p99_ms:.2f}"]
        for setting, one in zip(settings, curve, strict=True)
    ]
    return table(["setting", "callers", "steps/s", "p99 ms"], rows)


def trials_plot(outcome: Analysis, notes: Notes) -> str:
    """p99 over throughput, a point for each trial."""
    found = {setting: one for setting, one in notes.found.items() if not one.problem}
    others = [
        (one.steps_per_s, one.p99_ms) for setting, one in found.items() if setting not in (outcome.best, outcome.start)
    ]
    series = [Series("tried", others)]
    for title, setting in (("given", outcome.start), ("chosen", outcome.best)):
        if setting in found:
            series.append(Series(title, [(found[setting].steps_per_s, found[setting].p99_ms)]))
    return plot(f"{outcome.model}: all trials", "steps per second", "p99, ms", series, outcome.bounds.p99_ms)


def curve_plot(outcome: Analysis, curve: Sequence[CurvePoint]) -> str:
    """p99 over throughput by the number of callers, for the given and the chosen setting."""
    series: list[Series] = []
    for title, setting in {"given": outcome.start, "chosen": outcome.best}.items():
        points = [one for one in curve if tuple(one.setting.items()) == setting]
        if points and not (title == "chosen" and outcome.start == outcome.best):
            places = [(one.steps_per_s, one.p99_ms) for one in points]
            series.append(Series(title, places, [str(one.concurrency) for one in points], is_line=True))
    title = f"{outcome.model}: by the number of callers"
    return plot(title, "steps per second", "p99, ms", series, outcome.bounds.p99_ms)


def said(setting: Setting) -> str:
    """A setting as the report names it: `knob value, knob value`."""
    return ", ".join(f"{name} {value}" for name, value in setting)


FIGURES = ("steps/s", "p50 ms", "p99 ms", "memory MiB")


def figures(found: Measured) -> list[str]:
    """A measurement in the columns of `FIGURES`."""
    if found.problem:
        return [""] * len(FIGURES)
    memory = f"{found.memory_bytes / MIB:,.0f}"
    return [f"{found.steps_per_s:,.0f}", f"{found.p50_ms:.2f}", f"{found.p99_ms:.2f}", memory]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))
