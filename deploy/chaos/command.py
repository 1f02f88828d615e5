"""The command line of chaos: makes the plan, starts or takes the mesh, runs, judges, reports."""

from __future__ import annotations

import os
import platform
import random
import shlex
import sys
import textwrap
import time
import zlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import click
import msgspec
import numpy as np
import uvloop

from deploy.chaos.checker import Sort
from deploy.chaos.clients import GatewayAddresses
from deploy.chaos.faults import KINDS, PROCESSES, ChaosPlan, Fault, Victim, plan_faults
from deploy.chaos.given_mesh import given_mesh, order_of
from deploy.chaos.history import ChaosRun, Strike, read_history
from deploy.chaos.mesh import TargetMesh
from deploy.chaos.models import write_repository
from deploy.chaos.own_mesh import own_mesh
from deploy.chaos.report import Report, count_failures, exit_code, failures_of, judge, markdown, report_of
from deploy.chaos.run import run
from deploy.local.endings import ending_by_verdict, results_in
from shared.process.addresses import host_and_port, is_number
from shared.process.machine import is_running
from shared.settings import NumberRange

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

Writes report.json, report.md and history.jsonl.gz. Exit code 0: all steps and faults, nothing broken. 1: a promise was
broken. 2: the run could not begin, or an error ended it. 3: nothing broken, but the run ended too soon (Ctrl-C,
--minutes), or faults were left out because no process of --pids was left.
"""
KINDS_HELP = "Faults, by name (kill-executor), act (kill) or victim (executor). [default: all that the mesh allows]"
SENTINELS_HELP = """Give the private mesh a primary, two replicas and three Sentinels. Faults of Redis hit the primary.
With the fault promote-replica a replica takes over that lacks the last writes; clients must be told which steps are
gone."""
CLUSTER_HELP = """Give the private mesh a Redis Cluster of three primaries with a replica each. Faults of Redis hit one
primary after the other. With the fault lose-node none takes its place; sequences at other nodes go on meanwhile."""
EPILOG = "\b\nFaults:\n" + "\n".join(
    textwrap.fill(kind.meaning, 78, initial_indent=f"  {kind.name:20} ", subsequent_indent=" " * 23)
    for kind in KINDS.values()
)
PID_MAX = (1 << 31) - 1
"""The largest process id that the system's calls take."""
COUNT = click.IntRange(1)
DIRECTORY = click.Path(path_type=Path, file_okay=False)

Wanted = Mapping[str, Sequence[str]]
"""The words of the option `--kinds`, each with the kinds of faults that it means."""


def kinds_of(text: str) -> Wanted:
    """The kinds that names, acts or victims with commas between them mean."""
    wanted: dict[str, list[str]] = {}
    for word in text.split(","):
        wanted[word] = [kind.name for kind in KINDS.values() if word in (kind.name, kind.act, kind.victim)]
        if not wanted[word]:
            raise click.BadParameter(f"{word!r} is no fault: {', '.join(KINDS)}, or an act or a victim of those")
    return wanted


def addresses_of(text: str) -> list[str]:
    """host:port with commas between them."""
    addresses = text.split(",")
    for address in addresses:
        try:
            host_and_port(address)
        except ValueError as problem:
            raise click.BadParameter(str(problem)) from problem
    return addresses


def pids_of(text: str) -> dict[Victim, list[int]]:
    """service=pid with commas between them."""
    pids: dict[Victim, list[int]] = {}
    for part in text.split(","):
        service, _, pid = part.partition("=")
        # A signal to 0 would go to this command and all that it has started.
        if service not in PROCESSES or not is_number(pid, 1, PID_MAX):
            raise click.BadParameter(f"{part!r} is not SERVICE=PID, with one of {', '.join(PROCESSES)}")
        pids.setdefault(Victim(service), []).append(int(pid))
    return pids


def fault_command_of(text: str) -> str:
    """A command line whose braces can be filled in."""
    try:
        order_of(text, signal="KILL", service="gateway", number=1)
    except (ValueError, LookupError, AttributeError) as problem:
        raise click.BadParameter(
            f"{text!r} is no command with {{signal}}, {{service}} and {{number}}: {problem}"
        ) from problem
    return text


@click.command("chaos", help=HELP, epilog=EPILOG, context_settings={"max_content_width": 110, "show_default": True})
@click.option("--seed", type=click.IntRange(0), metavar="N", help="Repeats the plan of a run. [default: a new one]")
@click.option("--steps", type=COUNT, default=20_000, metavar="N", help="Steps to play, at least.")
@click.option("--faults", type=click.IntRange(0), default=40, metavar="N", help="Faults to bring about.")
@click.option("--minutes", type=NumberRange(0.05), default=30.0, metavar="M", help="Longest time of the run.")
@click.option("--kinds", type=kinds_of, metavar="A,B", help=KINDS_HELP)
@click.option("--clients", type=COUNT, default=48, metavar="N", help="Sequences that are played at once.")
@click.option(
    "--lease-ms",
    type=click.IntRange(200),
    default=2000,
    metavar="MS",
    help="Lease of executors and schedulers; freezing is planned by it.",
)
@click.option("--sentinels", is_flag=True, help=SENTINELS_HELP)
@click.option("--cluster", is_flag=True, help=CLUSTER_HELP)
@click.option("--http", type=addresses_of, metavar="HOST:PORT,..", help="HTTP of your gateways, in order.")
@click.option("--grpc", type=addresses_of, metavar="HOST:PORT,..", help="gRPC of your gateways, in the same order.")
@click.option("--pids", type=pids_of, metavar="SERVICE=PID,..", help="Processes of yours that may be struck.")
@click.option(
    "--fault-command",
    type=fault_command_of,
    metavar="COMMAND",
    help="Command that strikes a service of yours; see above.",
)
@click.option(
    "--out", type=DIRECTORY, default=Path("build/chaos"), help="Where the results go, and logs of a private mesh."
)
@click.option("--write-models", type=DIRECTORY, metavar="DIR", help="Only write the models into that repository.")
@click.option("--check", type=DIRECTORY, metavar="DIR", help="Only judge a run again, by what it has left there.")
@ending_by_verdict()
def chaos(
    *,
    seed: int | None,
    steps: int,
    faults: int,
    minutes: float,
    kinds: Wanted | None,
    clients: int,
    lease_ms: int,
    sentinels: bool,
    cluster: bool,
    http: list[str] | None,
    grpc: list[str] | None,
    pids: dict[Victim, list[int]] | None,
    fault_command: str | None,
    out: Path,
    write_models: Path | None,
    check: Path | None,
) -> None:
    if write_models is not None:
        try:
            write_repository(write_models)
        except OSError as error:
            raise click.UsageError(f"{write_models} cannot be written: {error.strerror or error}") from error
        click.echo(f"written: the models of chaos in {write_models}")
        return
    if check is not None:
        sys.exit(check_again(check))
    given, victims, order = gateways_of(http, grpc), pids or {}, fault_command or ""
    check_victims(given, victims, order)
    if given and (sentinels or cluster):
        option = "--sentinels" if sentinels else "--cluster"
        raise click.UsageError(f"{option} is for a private mesh: leave it out, or --http and --grpc")
    if sentinels and cluster:
        raise click.UsageError("--sentinels and --cluster are two kinds of Redis: leave one out")
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    click.echo(f"seed {seed}; starting", err=True)
    with (
        results_in(out),
        given_mesh(given, victims, order)
        if given
        else own_mesh(out / "mesh", lease_ms=lease_ms, sentinels=sentinels, cluster=cluster) as mesh,
    ):
        plan = ChaosPlan(
            seed=seed,
            steps=steps,
            faults=plan_faults(seed, faults, allowed(kinds, mesh), lease_s=lease_ms / 1000),
            minutes=minutes,
            clients=clients,
            run=run_name(),
        )
        done = uvloop.run(run(plan, mesh, out))
    sys.exit(reported(plan, done, {**mesh.about, "versions": versions()}, out))


def check_victims(
    gateways: Sequence[GatewayAddresses], pids: Mapping[Victim, Sequence[int]], fault_command: str
) -> None:
    """Raises click.UsageError for victims of no mesh of the user's, and for those that are not there."""
    if not gateways and (pids or fault_command):
        raise click.UsageError("--pids and --fault-command are for a mesh of yours: give --http or --grpc")
    if gone := [str(pid) for named in pids.values() for pid in named if not is_running(pid)]:
        raise click.UsageError(f"--pids: no process has the id {', '.join(gone)}")


def reported(plan: ChaosPlan, done: ChaosRun, about: Mapping[str, str], out: Path) -> int:
    """Judges a run, and writes and prints the report. Returns the exit code."""
    judgement = judge(read_history(out / "history.jsonl.gz"), done.strikes)
    report = report_of(judgement, plan, done, command=command_again(plan.seed), about=about)
    document = Document(report, list(plan.faults), list(done.strikes))
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2))
    (out / "report.md").write_text(markdown(report))
    click.echo(markdown(report))
    click.echo(f"written: {out}/report.json, report.md, history.jsonl.gz")
    return report.exit_code


def gateways_of(http: Sequence[str] | None, grpc: Sequence[str] | None) -> list[GatewayAddresses]:
    """The user's gateways; empty for a private mesh."""
    if http and grpc and len(http) != len(grpc):
        raise click.UsageError("--http and --grpc must name the same gateways, in the same order")
    count = len(http or grpc or ())
    return [GatewayAddresses(one, other) for one, other in zip(http or [""] * count, grpc or [""] * count, strict=True)]


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
            raise click.UsageError(f"not possible on this mesh: {word} (see --sentinels, --cluster, --pids)")
    left_out = [name for name in KINDS if name in chosen and name not in mesh.kinds]
    if left_out:
        click.echo(f"left out, because they are not possible on this mesh: {', '.join(left_out)}", err=True)
    return [name for name in KINDS if name in chosen and name in mesh.kinds]


def run_name() -> str:
    """A unique name of letters and digits."""
    return np.base_repr(int(time.time()), 36).lower()


def command_again(seed: int) -> str:
    """The command line that repeats this run. This one's options stand behind the names of program and command."""
    options = sys.argv[2:]
    if not any(option.partition("=")[0] == "--seed" for option in options):
        options = ["--seed", str(seed), *options]
    return shlex.join(["seqmesh", "chaos", *options])


def versions() -> str:
    """The versions of the tested mesh's parts and of the client libraries."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("seqmesh", "tritonclient", "grpcio"))
    return f"{packages}, Python {platform.python_version()}, {os.cpu_count()} cores"


class Document(msgspec.Struct):
    """What report.json holds: all that `--check` needs to judge a run again."""

    report: Report
    plan: list[Fault]
    strikes: list[Strike]


def check_again(directory: Path) -> int:
    """Judges a history by the present rules; returns the exit code. Raises click.UsageError where there is none."""
    try:
        document = msgspec.json.decode((directory / "report.json").read_bytes(), type=Document)
        judgement = judge(read_history(directory / "history.jsonl.gz"), document.strikes)
        count_failures(judgement, failures_of(document.report), document.report.seconds)
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError) as problem:
        raise click.UsageError(f"--check: {directory} is not what a run has left ({problem})") from problem
    for found in judgement.findings:
        click.echo(f"{found.sort}: sequence {found.sequence}, step {found.step}, {found.at_s:.2f} s: {found.story}")
    click.echo(
        f"{len(judgement.answers)} steps of {judgement.sequences} sequences: "
        + ", ".join(f"{judgement.sorts[sort]} {sort}" for sort in Sort)
    )
    return exit_code(judgement.sorts, complete=document.report.complete)
