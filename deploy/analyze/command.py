"""The command line of `seqmesh analyze`: describes the model, searches, and writes the report."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from deploy.analyze.inputs import Step, made_sequences, read_sequences
from deploy.analyze.knobs import applied, has_sequences, knobs_of, powers, setting_of
from deploy.analyze.load import LoadPlan
from deploy.analyze.notes import (
    FILE,
    Circumstances,
    CurvePoint,
    Notes,
    by_setting,
    hash_of,
    measurement,
    read_notes,
    write_notes,
)
from deploy.analyze.report import MIB, Analysis, curve_plot, markdown, said, trials_plot
from deploy.analyze.search import Bounds, Conclusion, Knob, Measured, Setting, Trial, follow, is_better
from deploy.analyze.trials import TrialMesh, text_of
from deploy.local.data_directory import LauncherError
from deploy.local.endings import EXIT_TOO_SOON, ending_by_verdict, results_in
from shared.settings import ByteCount, NumberRange

HELP = """Finds the configuration of a model that serves most steps a second within bounds.

MODEL: the model's folder. It is copied; the folder itself is not changed. Each trial runs on a private mesh of its own
on this machine, under a closed loop of callers. From the given configuration one knob at a time is turned (batch size,
strategy, candidates, instances, delay, checkpoint interval), as long as that helps by more than the noise.

Writes report.md with its plots, the chosen config.pbtxt, and measurements.json, with which an interrupted search goes
on when the command is given again. Ctrl-C or SIGTERM: the report of what is known so far. Exit code 0: a configuration
within the bounds was found. 1: none was. 2: the search could not begin, or an error ended it. 3: it ended too soon
(Ctrl-C, --trials).
"""
EXIT_NONE_FITS = 1
REMEDY = "give steps that the model takes (--input-data, --shape), a longer --window-s, or another configuration"
CURVE_WINDOW_SHARE = 0.5
"""A point of the curve is measured for one round of half a window: it is drawn, nothing is decided by it."""


@dataclass(frozen=True, slots=True)
class Search:
    """One search. sequences: what is sent"""

    mesh: TrialMesh
    sequences: Sequence[Sequence[Step]]
    plan: LoadPlan
    bounds: Bounds
    trials_max: int
    output: Path
    notes: Notes

    @property
    def start(self) -> Setting:
        """The given configuration, where the search begins."""
        return setting_of(self.notes.config)

    @property
    def knobs(self) -> list[Knob]:
        return knobs_of(self.notes.config, cores=os.cpu_count() or 1, concurrency=self.plan.concurrency)

    def run(self, say: Callable[[str], None]) -> Conclusion:
        """Measures until the search is over; every trial is noted at once. Raises LauncherError if the given
        configuration answers no step: then no other one is likely to.
        """
        while True:
            found = self.notes.found
            move = follow(self.start, self.knobs, found, self.bounds, self.trials_max)
            if isinstance(move, Conclusion):
                return move
            say(f"trial {len(found) + 1} of at most {self.trials_max}: {move.why}")
            (measured,) = self.measure(move.setting, [self.plan])
            if move.setting == self.start and measured.problem and not measured.steps_per_s:
                raise LauncherError(f"the given configuration serves nothing: {measured.problem}: {REMEDY}")
            self.notes.trials.append(measurement(move.setting, move.why, measured))
            write_notes(self.output, self.notes)
            say(f"  {shown(measured, self.bounds)}")

    def confirmed(self, verdict: Conclusion, say: Callable[[str], None]) -> Conclusion:
        """The verdict, if the choice is better once more, on new meshes; else that the given configuration stays."""
        if verdict.best == self.start:
            return verdict
        for setting, name in ((self.start, "given"), (verdict.best, "chosen")):
            if setting not in by_setting(self.notes.again):
                say(f"once more: the {name} configuration")
                (measured,) = self.measure(setting, [self.plan])
                self.notes.again.append(measurement(setting, f"{name}, again", measured))
                write_notes(self.output, self.notes)
                say(f"  {shown(measured, self.bounds)}")
        if not self.is_refuted(verdict.best):
            return verdict
        say("the gain was not seen again: the given configuration stays")
        return Conclusion(self.start, verdict.complete)

    def is_refuted(self, best: Setting) -> bool:
        """Whether a choice was measured once more, and was not better then."""
        again = by_setting(self.notes.again)
        return {best, self.start} <= again.keys() and not is_better(again[best], again[self.start], self.bounds)

    def draw_curve(self, best: Setting, say: Callable[[str], None]) -> None:
        """Measures the given and the chosen setting with fewer and more callers, unless that is known."""
        counts = powers(2 * self.plan.concurrency)
        plans = [
            LoadPlan(count, 1, self.plan.warmup_s, max(0.5, self.plan.window_s * CURVE_WINDOW_SHARE))
            for count in counts
        ]
        known = [one.setting for one in self.notes.curve]
        self.notes.curve = [one for one in self.notes.curve if tuple(one.setting.items()) in (self.start, best)]
        for setting in dict.fromkeys((self.start, best)):
            if dict(setting) in known:
                continue
            name = "given" if setting == self.start else "chosen"
            say(f"the {name} configuration: the curve over {counts[0]} to {counts[-1]} callers")
            points = zip(counts, self.measure(setting, plans), strict=True)
            self.notes.curve += [
                CurvePoint(dict(setting), count, one.steps_per_s, one.p99_ms)
                for count, one in points
                if not one.problem
            ]
            write_notes(self.output, self.notes)

    def measure(self, setting: Setting, plans: Sequence[LoadPlan]) -> list[Measured]:
        """What a setting gives under these loads."""
        return self.mesh.measure(applied(self.notes.config, setting), self.sequences, plans)

    def write_report(self, model: str, verdict: Conclusion, ending: str) -> None:
        """Writes the report, its plots and the chosen configuration."""
        plan = self.plan
        load = (
            f"{plan.concurrency} callers, each with one step outstanding, over gRPC from this machine; {plan.rounds} "
            f"round{'s' * (plan.rounds > 1)} of {plan.window_s:g} s after {plan.warmup_s:g} s of warm-up, of which the "
            "medians count. One gateway, one scheduler, one executor and an embedded server on "
            f"{os.cpu_count()} cores, started anew for each trial. Memory is what the executor has resident, and the "
            "model's on GPUs."
        )
        outcome = Analysis(model, self.start, verdict.best, self.knobs, self.bounds, ending, load)
        (self.output / "report.md").write_text(markdown(outcome, self.notes))
        (self.output / "trials.svg").write_text(trials_plot(outcome, self.notes))
        if self.notes.curve:
            (self.output / "curve.svg").write_text(curve_plot(outcome, self.notes.curve))
        (self.output / "config.pbtxt").write_text(text_of(applied(self.notes.config, verdict.best)))


@click.command("analyze", help=HELP, context_settings={"max_content_width": 110})
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--p99-ms", type=NumberRange(0), default=0.0, metavar="MS", help="Bound of the 99th percentile.")
@click.option("--memory", type=ByteCount(0), default=0, metavar="BYTES", help="Bound of the executor's memory (2GiB).")
@click.option("--concurrency", type=click.IntRange(1, 4096), default=32, show_default=True, help="Callers.")
@click.option("--trials", "trials_max", type=click.IntRange(1), default=40, show_default=True, help="Most trials.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Rounds of a trial.")
@click.option("--window-s", type=NumberRange(0.1), default=3.0, show_default=True, help="Length of a round.")
@click.option("--warmup-s", type=NumberRange(0.0), default=2.0, show_default=True, help="Load before them.")
@click.option(
    "--sequence-length", type=click.IntRange(1), default=20, show_default=True, help="Steps of made sequences."
)
@click.option("--shape", "shapes", multiple=True, metavar="NAME:N,...", help="Shape of an input of any size.")
@click.option(
    "--input-data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What is sent, in perf_analyzer's form; by default it is made from the model's metadata.",
)
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), help="Folder of the report.  [default: analyze-MODEL]"
)
@click.option("--anew", is_flag=True, help="Forget what an earlier search has left in that folder.")
@ending_by_verdict()
def analyze(
    model: Path,
    *,
    p99_ms: float,
    memory: int,
    concurrency: int,
    trials_max: int,
    rounds: int,
    window_s: float,
    warmup_s: float,
    sequence_length: int,
    shapes: tuple[str, ...],
    input_data: Path | None,
    output: Path | None,
    anew: bool,
) -> None:
    if shapes and input_data:
        raise click.UsageError("--shape is for inputs that are made: write those of --input-data into the file")
    given = dict(parsed_shape(shape) for shape in shapes)
    model = model.resolve()
    refuse_a_repository(model)
    output = output or Path(f"analyze-{model.name}")
    if output.resolve().is_relative_to(model):
        raise click.UsageError(f"{output} is in the model's folder, which it would change: give another --output")
    plan = LoadPlan(concurrency, rounds, warmup_s, window_s)
    sent = input_data.read_text(errors="replace") if input_data else f"{shapes} {sequence_length}"
    circumstances = Circumstances(hash_of(model), f"{plan} {sent}", os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="seqmesh-analyze-") as workspace, results_in(output):
        if anew:
            # Not the folder, which may hold other things: --output names any.
            (output / FILE).unlink(missing_ok=True)
        mesh = TrialMesh(model, Path(workspace))
        notes = read_notes(output, circumstances) or begun(mesh, circumstances)
        if notes.trials:
            click.echo(f"going on with {len(notes.trials)} trials of {output}")
        if input_data:
            sequences = read_sequences(input_data, notes.inputs)
        else:
            length = sequence_length if has_sequences(notes.config) else 1
            sequences = made_sequences(notes.inputs, given, length)
        search = Search(mesh, sequences, plan, Bounds(p99_ms, memory), trials_max, output, notes)
        code = carried_out(search, model.name)
    raise SystemExit(code)


def refuse_a_repository(folder: Path) -> None:
    """Raises click.UsageError for a repository in the place of a model, with its models."""
    models = sorted(config.parent.name for config in folder.glob("*/config.pbtxt"))
    if models and not (folder / "config.pbtxt").is_file():
        raise click.UsageError(f"{folder} is a repository: give one of its models, {', '.join(models)}")


def begun(mesh: TrialMesh, circumstances: Circumstances) -> Notes:
    """The notes of a search that begins. Raises click.ClickException if the model cannot be analyzed."""
    click.echo("loading the model with its given configuration")
    config, inputs = mesh.describe()
    if config.get("platform") == "ensemble":
        raise LauncherError("an ensemble has no knobs of its own: analyze the models of its steps")
    return Notes(circumstances, config, inputs)


def carried_out(search: Search, model: str) -> int:
    """Searches, reports, and returns the exit code. Ctrl-C ends the search; the report is of what is known."""
    try:
        verdict = search.run(click.echo)
        ending = "No knob is left that helps." if verdict.complete else "The number of trials was used up."
        sought, verdict = verdict, search.confirmed(verdict, click.echo)
        if sought.best != verdict.best:
            ending += f" The best of them was not better when measured once more: {said(sought.best)}."
        search.draw_curve(verdict.best, click.echo)
    except KeyboardInterrupt:
        if search.start not in search.notes.found:
            raise
        known = search.notes.found
        move = follow(search.start, search.knobs, known, search.bounds, len(known))
        assert not isinstance(move, Trial), "no trial is left to be made"
        verdict = Conclusion(search.start if search.is_refuted(move.best) else move.best, complete=False)
        ending = "The search was interrupted: this is what was known then."
    search.write_report(model, verdict, ending)
    best = search.notes.found[verdict.best]
    click.echo(f"{ending}\nchosen: {said(verdict.best)}")
    click.echo(f"  {shown(best, search.bounds)}\nreport: {search.output / 'report.md'}")
    return exit_code(complete=verdict.complete, fits=not (best.problem or search.bounds.excess(best)))


def exit_code(*, complete: bool, fits: bool) -> int:
    """Of a search. One that ended too soon does not say that nothing fits."""
    if not complete:
        return EXIT_TOO_SOON
    return 0 if fits else EXIT_NONE_FITS


def shown(found: Measured, bounds: Bounds) -> str:
    """A measurement as a line of the progress."""
    if found.problem:
        return f"does not work: {found.problem}"
    beyond = ", beyond the bounds" if bounds.excess(found) else ""
    memory = f"{found.memory_bytes / MIB:,.0f} MiB"
    return f"{found.steps_per_s:,.0f} steps/s, p99 {found.p99_ms:.2f} ms, {memory}, noise {found.noise:.0%}{beyond}"


def parsed_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """`NAME:3,4`. Raises click.UsageError for anything else."""
    name, _, sizes = text.rpartition(":")
    # isdecimal: int() takes signs, and no dimension has one.
    if not all(size.isascii() and size.isdecimal() for size in sizes.split(",")):
        raise click.UsageError(f"--shape {text}: write NAME:3,4")
    return name, tuple(int(size) for size in sizes.split(","))
