"""The command line of chaos: makes the plan, starts or takes the mesh, runs, judges, reports."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import shlex
import shutil
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import click
import msgspec
import uvloop

from deploy.chaos.checker import Finding, Sort
from deploy.chaos.clients import GatewayAddresses
from deploy.chaos.faults import KINDS, PROCESSES, Fault, Victim, plan_faults
from deploy.chaos.given_mesh import given_mesh, host_and_port
from deploy.chaos.history import Strike, read_history
from deploy.chaos.mesh import TargetMesh
from deploy.chaos.models import write_repository
from deploy.chaos.own_mesh import Size, own_mesh
from deploy.chaos.own_redis import Fsync
from deploy.chaos.report import Judgement, Report, judge, markdown, report_of
from deploy.chaos.run import ChaosPlan, ChaosRun, NotReadyError, run

HELP = """Keeps a mesh under load while it is killed, frozen, cut off and filled up, and proves that nothing is lost.

Clients play sequences over HTTP, gRPC and gRPC streams; every step is numbered or named, and is sent again, through
another gateway, until it is answered. Every attempt goes into a history, and every answer is compared with an oracle:
one step that is lost, doubled or reordered shows in all later answers of its sequence. Errors are allowed only where a
fault explains them.

By default on a private mesh, whose processes are killed and started again. With --http and --grpc on yours: its
executors must serve the models that --write-models writes. Then clients drop their connections and fill slots, and
connections are cut by proxies in between; processes are struck only where you say so:

\b
  --pids gateway=4711,executor=4712,executor=4713
  --fault-command 'docker compose kill -s {signal} {service}'

The command runs without a shell, once per fault, and once more with CONT to wake what was frozen. {signal} is KILL,
TERM, STOP or CONT, {service} gateway, scheduler, executor or redis, {number} counts the faults. Something must start
again what was ended.

Writes report.json, report.md, history.jsonl.gz and, where matplotlib is installed, timeline.png. Exit code 0: all steps
and faults, nothing broken. 1: a promise was broken. 2: the run could not begin. 3: nothing broken, but the run ended
too soon (Ctrl-C, --minutes).
"""
KINDS_HELP = "Faults, by name (kill-executor), act (kill) or victim (executor). [default: all that the mesh allows]"
EPILOG = "\b\nFaults:\n" + "\n".join(f"  {kind.name:20} {kind.meaning}" for kind in KINDS.values())
EXIT_FAILED_CHECK = 1


Wanted = Mapping[str, Sequence[str]]
"""The words of the option `--kinds`, each with the kinds of faults that it means."""


class KindList(click.ParamType[Wanted]):
    """Kinds of faults: names, acts or victims with commas between them."""

    name = "kinds"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Wanted:
        """The names of the kinds, by word."""
        wanted: dict[str, list[str]] = {}
        for word in str(value).split(","):
            wanted[word] = [kind.name for kind in KINDS.values() if word in (kind.name, kind.act, kind.victim)]
            if not wanted[word]:
                self.fail(f"{word!r} is no fault: {', '.join(KINDS)}, or an act or a victim of those", param, ctx)
        return wanted


class AddressList(click.ParamType[list[str]]):
    """host:port with commas between them."""

    name = "addresses"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        addresses = str(value).split(",")
        for address in addresses:
            try:
                host_and_port(address)
            except ValueError as problem:
                self.fail(str(problem), param, ctx)
        return addresses


class Pids(click.ParamType[dict[Victim, list[int]]]):
    """service=pid with commas between them."""

    name = "pids"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[Victim, list[int]]:
        pids: dict[Victim, list[int]] = {}
        for part in str(value).split(","):
            service, _, pid = part.partition("=")
            if service not in PROCESSES or not pid.isdigit():
                self.fail(f"{part!r} is not SERVICE=PID, with one of {', '.join(PROCESSES)}", param, ctx)
            pids.setdefault(Victim(service), []).append(int(pid))
        return pids


@click.command("chaos", help=HELP, epilog=EPILOG, context_settings={"max_content_width": 110})
@click.option("--seed", type=click.IntRange(0), metavar="N", help="Repeats the plan of a run. [default: a new one]")
@click.option(
    "--steps", type=click.IntRange(1), default=20_000, show_default=True, metavar="N", help="Steps to play, at least."
)
@click.option(
    "--faults", type=click.IntRange(0), default=40, show_default=True, metavar="N", help="Faults to bring about."
)
@click.option(
    "--minutes",
    type=click.FloatRange(0.05),
    default=30.0,
    show_default=True,
    metavar="M",
    help="Longest time of the run.",
)
@click.option("--kinds", type=KindList(), metavar="A,B", help=KINDS_HELP)
@click.option(
    "--clients",
    type=click.IntRange(1),
    default=48,
    show_default=True,
    metavar="N",
    help="Sequences that are played at once.",
)
@click.option(
    "--gateways",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    metavar="N",
    help="Gateways of the private mesh.",
)
@click.option(
    "--schedulers",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    metavar="N",
    help="Schedulers of the private mesh.",
)
@click.option(
    "--executors",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    metavar="N",
    help="Executors of the private mesh.",
)
@click.option(
    "--lease-ms",
    type=click.IntRange(200),
    default=2000,
    show_default=True,
    metavar="MS",
    help="Lease of executors and schedulers; freezing is planned by it.",
)
@click.option(
    "--fsync",
    type=click.Choice(["always", "everysec"]),
    default="always",
    show_default=True,
    help="appendfsync of the private mesh's Redis. It is killed only where that loses nothing: with always.",
)
@click.option(
    "--sentinels",
    is_flag=True,
    help="Give the private mesh a primary, two replicas and three Sentinels. Faults of Redis hit the primary. With the "
    "fault promote-replica a replica takes over that lacks the last writes; clients must be told which steps are gone.",
)
@click.option("--http", type=AddressList(), metavar="HOST:PORT,..", help="HTTP of your gateways, in order.")
@click.option("--grpc", type=AddressList(), metavar="HOST:PORT,..", help="gRPC of your gateways, in the same order.")
@click.option("--pids", type=Pids(), metavar="SERVICE=PID,..", help="Processes of yours that may be struck.")
@click.option(
    "--fault-command", default="", metavar="COMMAND", help="Command that strikes a service of yours; see above."
)
@click.option(
    "--recovery",
    type=click.FloatRange(0),
    default=15.0,
    show_default=True,
    metavar="S",
    help="How long errors are put down to a process of yours that was struck, and longer while a gateway is not ready.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("build/chaos"),
    show_default=True,
    help="Where the results go, and logs of a private mesh.",
)
@click.option(
    "--write-models",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Only write the models into that repository.",
)
@click.option(
    "--check",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Only judge a run again, by the history that it has left there.",
)
def chaos(
    *,
    seed: int | None,
    steps: int,
    faults: int,
    minutes: float,
    kinds: Wanted | None,
    clients: int,
    gateways: int,
    schedulers: int,
    executors: int,
    lease_ms: int,
    fsync: Fsync,
    sentinels: bool,
    http: list[str] | None,
    grpc: list[str] | None,
    pids: dict[Victim, list[int]] | None,
    fault_command: str,
    recovery: float,
    out: Path,
    write_models: Path | None,
    check: Path | None,
) -> None:
    """See HELP."""
    if write_models is not None:
        write_repository(write_models)
        click.echo(f"written: the models of chaos in {write_models}")
        return
    if check is not None:
        sys.exit(check_again(check))
    given = addresses(http, grpc)
    if not given and (pids or fault_command):
        raise click.UsageError("--pids and --fault-command are for a mesh of yours: give --http or --grpc")
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    out.mkdir(parents=True, exist_ok=True)
    size = Size(
        gateways=gateways,
        schedulers=schedulers,
        executors=executors,
        lease_ms=lease_ms,
        fsync=fsync,
        sentinels=sentinels,
    )
    click.echo(f"seed {seed}; starting", err=True)
    with mesh_for(given, pids or {}, fault_command, recovery, size, out) as mesh:
        plan = ChaosPlan(
            seed=seed,
            steps=steps,
            faults=plan_faults(seed, faults, allowed(kinds, mesh), lease_s=lease_ms / 1000),
            minutes=minutes,
            clients=clients,
            run=run_name(),
        )
        try:
            done = uvloop.run(run(plan, mesh, out, lambda text: click.echo(text, err=True)))
        except NotReadyError as late:
            raise click.UsageError(str(late)) from late
    report, judgement = conclude(plan, done, mesh.about, out)
    write(report, judgement, plan.faults, done.strikes, out)
    sys.exit(report.exit_code)


def addresses(http: Sequence[str] | None, grpc: Sequence[str] | None) -> list[GatewayAddresses]:
    """The user's gateways; empty for a private mesh."""
    if http and grpc and len(http) != len(grpc):
        raise click.UsageError("--http and --grpc must name the same gateways, in the same order")
    count = len(http or grpc or ())
    return [GatewayAddresses(one, other) for one, other in zip(http or [""] * count, grpc or [""] * count, strict=True)]


@contextmanager
def mesh_for(
    given: Sequence[GatewayAddresses],
    pids: Mapping[Victim, list[int]],
    command: str,
    recovery_s: float,
    size: Size,
    out: Path,
) -> Generator[TargetMesh]:
    """The mesh to be driven, as long as the block."""
    if given:
        with given_mesh(given, pids, command, recovery_s=recovery_s) as mesh:
            yield mesh
        return
    directory = out / "mesh"
    shutil.rmtree(directory, ignore_errors=True)
    with own_mesh(size, directory) as mesh:
        yield mesh


def allowed(wanted: Wanted | None, mesh: TargetMesh) -> list[str]:
    """The kinds of faults of this run, in their usual order.

    Kinds that are not possible in this mesh are left out, with a message. Raises click.UsageError for a word without
    any possible kind.
    """
    if wanted is None:
        return list(mesh.kinds)
    chosen = {name for names in wanted.values() for name in names}
    for word, names in wanted.items():
        if not chosen.intersection(names, mesh.kinds):
            raise click.UsageError(f"not possible on this mesh: {word} (see --fsync, --sentinels, --pids)")
    left_out = [name for name in KINDS if name in chosen and name not in mesh.kinds]
    if left_out:
        click.echo(f"left out, because they are not possible on this mesh: {', '.join(left_out)}", err=True)
    return [name for name in KINDS if name in chosen and name in mesh.kinds]


def run_name() -> str:
    """A unique name of letters and digits."""
    number, letters = int(time.time()), ""
    while number:
        number, digit = divmod(number, 36)
        letters = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + letters
    return letters


def conclude(plan: ChaosPlan, done: ChaosRun, about: Mapping[str, str], out: Path) -> tuple[Report, Judgement]:
    """Judges the history that a run has left."""
    judgement = judge(read_history(out / "history.jsonl.gz"), done.strikes)
    for failure in done.failures:
        judgement.sorts[Sort.UNEXPLAINED] += 1
        judgement.findings.append(Finding(Sort.UNEXPLAINED, 0, "", 0, done.seconds, failure))
    options = [argument for argument in sys.argv[1:] if argument != "chaos"]
    if "--seed" not in options:
        options = ["--seed", str(plan.seed), *options]
    report = report_of(
        judgement,
        done.strikes,
        seed=plan.seed,
        command=shlex.join(["seqmesh", "chaos", *options]),
        about={**about, "versions": versions()},
        seconds=done.seconds,
        steps_wanted=plan.steps,
        faults_wanted=len(plan.faults),
        refused_commits=done.refused_commits,
    )
    return report, judgement


def versions() -> str:
    """The versions of the tested mesh's parts and of the client libraries."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("seqmesh", "tritonclient", "grpcio"))
    return f"{packages}, Python {platform.python_version()}, {os.cpu_count()} cores"


class Document(msgspec.Struct):
    """What report.json holds."""

    report: Report
    plan: list[Fault]
    strikes: list[Strike]


def write(report: Report, judgement: Judgement, plan: Sequence[Fault], strikes: Sequence[Strike], out: Path) -> None:
    """The files, and the report on standard output."""
    document = Document(report, list(plan), list(strikes))
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2))
    text = markdown(report)
    (out / "report.md").write_text(text)
    click.echo(text)
    click.echo(f"written: {out}/report.json, report.md, history.jsonl.gz" + plotted(report, judgement, strikes, out))


def plotted(report: Report, judgement: Judgement, strikes: Sequence[Strike], out: Path) -> str:
    """Draws the timeline. Returns the line of output about it."""
    with contextlib.suppress(ModuleNotFoundError):
        # Not needed for --help, takes a second, and is no part of an installation that only serves.
        from deploy.chaos.plot import draw  # noqa: PLC0415

        draw(report, judgement.timeline, strikes, out / "timeline.png")
        return ", timeline.png"
    return ". No timeline.png: it needs matplotlib (pip install matplotlib)"


def check_again(directory: Path) -> int:
    """Judges a history by the present rules; returns the exit code. Raises click.UsageError where there is none."""
    try:
        document = msgspec.json.decode((directory / "report.json").read_bytes(), type=Document)
        judgement = judge(read_history(directory / "history.jsonl.gz"), document.strikes)
    except (OSError, msgspec.MsgspecError) as problem:
        raise click.UsageError(f"--check: {directory} is not what a run has left ({problem})") from problem
    for found in judgement.findings:
        click.echo(f"{found.sort}: sequence {found.sequence}, step {found.step}, {found.at_s:.2f} s: {found.story}")
    click.echo(
        f"{len(judgement.timeline.answered_s)} steps of {judgement.sequences} sequences: "
        + ", ".join(f"{judgement.sorts[sort]} {sort}" for sort in Sort)
    )
    return EXIT_FAILED_CHECK if judgement.findings else 0


def main(arguments: Sequence[str]) -> None:
    chaos(args=list(arguments), prog_name="seqmesh chaos")
