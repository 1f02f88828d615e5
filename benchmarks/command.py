"""The command line of the benchmark: starts the servers, goes through the cells, writes and shows the results."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import click
import msgspec
import uvloop

from benchmarks.clients import PROTOCOLS, ProtocolName, StepError, client_for
from benchmarks.dial import measure_dial
from benchmarks.load import DRAIN_TIMEOUT_S, LoadRun, Tally, new_sequence_ids, probe
from benchmarks.paging import measure_paging
from benchmarks.results import Cell, Result, comparison, result_of, summary, table
from benchmarks.servers import MeasuredServer, build_models, executions, running_mesh
from benchmarks.takeover import measure_takeovers
from benchmarks.triton import Triton, running_triton
from benchmarks.usage import Meter
from benchmarks.workloads import LstmScripts, RunningSums, is_lstm
from shared.settings import NumberRange

HELP = """Closed-loop load on a mesh that is started for it: throughput, latency, and what a step costs.

Goes through every combination of model, protocol and concurrency. As many sequences as the concurrency says are under
way at once, each sends its next step when the one before is answered. Every answer is checked: sums exactly, the LSTM
against a quiet probe. Exit code 1 if the mesh gave a wrong answer or an error.

Tells per cell: steps per second, median and 99th percentile, mean batch, CPU microseconds per step of each service and
of the client (client and servers share this machine), Redis commands and bytes per step. A `*` marks a throughput that
other processes disturbed. Writes results.json, results.md and plot.png.

--models accumulate,accumulate_process measures what a process for an instance costs; interpreter,interpreter_process
what it gains where two instances compute in Python.

--models device_direct,device_oldest measures what an accelerator bounds: 5 ms a batch of up to 4 rows, so 800 steps a
second and executor at most, if every batch is full.

With --triton, the same models (model.py) on a real Triton, alternating with the mesh cell by cell, in three rounds:
machines change from minute to minute, so only such figures can be compared.
"""
MODELS = ("accumulate", "lstm_512")
DEVICE_MODELS = ("device_direct", "device_oldest")
TRITON_MODELS = ("accumulate", "lstm_512_python", *DEVICE_MODELS)
"""Models that Triton can serve here: the wheel's Triton has the Python backend only."""
PROCESS_MODELS = ("accumulate_process", "interpreter", "interpreter_process")
ALL_MODELS = ("accumulate", "lstm_512", "lstm_512_python", *DEVICE_MODELS, *PROCESS_MODELS)
CONCURRENCIES = "1,8,32,128"
QUICK_CONCURRENCIES = "1,32"
PAGING_CALLERS = 512
FLUSH_S = 0.7
"""How long to wait before statistics are read: executors write theirs a few times a second."""
GIVE_UP_MARGIN_S = 30.0
"""A cell that takes this much longer than planned is given up, so that a hanging server cannot hang the benchmark."""


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """Which cells are measured, for how long and how often."""

    models: Sequence[str]
    protocols: Sequence[ProtocolName]
    concurrencies: Sequence[int]
    seconds: float
    warmup_s: float
    rounds: int

    def cells(self, servers: Sequence[MeasuredServer]) -> Iterator[tuple[MeasuredServer, Cell]]:
        """One round: cell by cell, the servers alternating. Triton has no pytorch backend here."""
        for model in self.models:
            for protocol in self.protocols:
                for concurrency in self.concurrencies:
                    for server in servers:
                        if server.label != Triton.label or model in TRITON_MODELS:
                            yield server, Cell(server.label, model, protocol, concurrency)


def numbers(text: str) -> list[int]:
    """Positive numbers with commas between them."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of positive numbers such as 1,8,32")
    return [int(part) for part in parts]


def choices(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Reads some of the known words, with commas between them."""

    def read(text: str) -> list[str]:
        chosen = text.split(",")
        for one in chosen:
            if one not in known:
                raise click.BadParameter(f"{one!r} is none of {', '.join(known)}")
        return chosen

    return read


@click.command("bench", help=HELP, context_settings={"max_content_width": 110})
@click.option("--quick", is_flag=True, help="A smoke test in about a minute: concurrency 1 and 32, a second each.")
@click.option("--models", type=choices(ALL_MODELS), metavar="A,B", help="Models. [default: accumulate,lstm_512]")
@click.option("--protocols", type=choices(PROTOCOLS), default=",".join(PROTOCOLS), show_default=True, metavar="A,B")
@click.option("--concurrency", type=numbers, metavar="N,N", help=f"Sequences at once. [default: {CONCURRENCIES}]")
@click.option("--seconds", type=NumberRange(0.1), metavar="S", help="Length of each cell's window. [default: 4]")
@click.option("--warmup", type=NumberRange(0), default=0.7, show_default=True, metavar="S", help="Load before it.")
@click.option("--rounds", type=click.IntRange(1), metavar="N", help="How often. [default: 1; with --triton 3]")
@click.option("--executors", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Of the mesh.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("build/bench"),
    show_default=True,
    help="Where the results go.",
)
@click.option(
    "--paging",
    type=click.IntRange(1),
    metavar="N",
    help="Measure steps by how many sequences are live instead, up to so many, e.g. 100000.",
)
@click.option("--slots", type=numbers, metavar="N,N", help="With --paging: slots. [default: enough, and a tenth]")
@click.option("--dial", is_flag=True, help="Measure what recovery costs instead, by checkpoint interval and otherwise.")
@click.option(
    "--engine",
    metavar="DEVICE",
    help="Measure an engine beside a bare loop over its module instead, without a mesh: cpu, or cuda:0.",
)
@click.option("--takeover", is_flag=True, help="Kill executors instead: takeover time by age and number of sequences.")
@click.option("--triton", is_flag=True, help="Also measure a Triton from the PyPI wheel nvidia-pytriton.")
@click.option(
    "--triton-python",
    default="",
    metavar="PYTHON",
    help="Python that runs Triton's models: the wheel, numpy and torch are installed there. [default: this one]",
)
@click.option(
    "--triton-wheel",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Directory that the wheel is unpacked in, when it is not installed.",
)
def bench(
    *,
    quick: bool,
    models: list[str] | None,
    protocols: list[ProtocolName],
    concurrency: list[int] | None,
    seconds: float | None,
    warmup: float,
    rounds: int | None,
    executors: int,
    out: Path,
    dial: bool,
    engine: str | None,
    paging: int | None,
    slots: list[int] | None,
    takeover: bool,
    triton: bool,
    triton_python: str,
    triton_wheel: Path | None,
) -> None:
    if paging is not None:
        callers = concurrency[0] if concurrency else PAGING_CALLERS
        window_s = seconds or (1.0 if quick else 10.0)
        measure_paging(most=paging, slots=slots or (), callers=callers, seconds=window_s, out=out)
        return
    if engine is not None:
        from benchmarks.engine import measure_engine  # noqa: PLC0415 -- torch takes seconds

        measure_engine(device=engine, quick=quick, out=out)
        return
    if takeover:
        measure_takeovers(rounds=rounds or (1 if quick else 3), quick=quick, out=out)
        return
    if dial:
        measure_dial(seconds=seconds or (1.0 if quick else 3.0), rounds=rounds or (1 if quick else 3), out=out)
        return
    plan = MeasurementPlan(
        models=models or (ALL_MODELS if triton else MODELS),
        protocols=protocols,
        concurrencies=concurrency or [int(n) for n in (QUICK_CONCURRENCIES if quick else CONCURRENCIES).split(",")],
        seconds=seconds or (1.0 if quick else 4.0),
        warmup_s=warmup,
        rounds=rounds or (3 if triton and not quick else 1),
    )
    with contextlib.ExitStack() as stack:
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="seqmesh-models-")))
        click.echo("making the models and starting the servers", err=True)
        build_models(repository)
        servers: list[MeasuredServer] = [stack.enter_context(running_mesh(repository, executors))]
        if triton or triton_python or triton_wheel:
            names = [name for name in TRITON_MODELS if name in plan.models]
            servers.append(stack.enter_context(running_triton(repository, names, triton_python, triton_wheel)))
        results = measure_all(plan, servers)
    write(results, plan, out)
    sys.exit(1 if any(r.cell.server != Triton.label and (r.wrong or r.errors) for r in results) else 0)


def measure_all(plan: MeasurementPlan, servers: Sequence[MeasuredServer]) -> list[Result]:
    """Measures all rounds, and prints each cell's outcome."""
    for server in servers:
        processes = ", ".join(f"{name} {' '.join(map(str, pids))}" for name, pids in server.groups.items())
        click.echo(
            f"{server.label}: {server.address.http}, grpc {server.address.grpc}; processes: {processes}", err=True
        )
    # All servers share one LSTM workload: each must give the answers of the first one probed, which is the mesh.
    sums, scripts = RunningSums(), LstmScripts()
    total = plan.rounds * len(list(plan.cells(servers)))
    results: list[Result] = []
    for round_number in range(1, plan.rounds + 1):
        for server, cell in plan.cells(servers):
            server.keep_running()
            result = measure(server, cell, round_number, plan, scripts if is_lstm(cell.model) else sums)
            results.append(result)
            click.echo(f"[{len(results)}/{total}] {one_line(result)}", err=True)
    return results


def measure(
    server: MeasuredServer, cell: Cell, round_number: int, plan: MeasurementPlan, workload: RunningSums | LstmScripts
) -> Result:
    """Measures one cell. A server that fails or hangs gives a result that says so."""
    meter = Meter(server.groups, server.redis_url)
    tally = Tally()
    mean_batch: float | None = None
    try:
        before = executions(server.address, cell.model)
        tally = uvloop.run(load(server, cell, plan, workload, meter))
        time.sleep(FLUSH_S)
        mean_batch = executions(server.address, cell.model).mean_batch_since(before)
    except (StepError, TimeoutError, OSError) as error:
        tally.fail(StepError(f"given up: {error or type(error).__name__}"))
    finally:
        meter.close()
    return result_of(cell, round_number, tally, meter, mean_batch)


async def load(
    server: MeasuredServer, cell: Cell, plan: MeasurementPlan, workload: RunningSums | LstmScripts, meter: Meter
) -> Tally:
    """The load of one cell, after the probe where the model needs one."""
    ids = new_sequence_ids()
    if isinstance(workload, LstmScripts) and not workload.expected:
        await probe_once(server, cell.model, workload, ids)
    client = client_for(cell.protocol, server.address, cell.model, workload.form)
    try:
        async with asyncio.timeout(plan.warmup_s + plan.seconds + DRAIN_TIMEOUT_S + GIVE_UP_MARGIN_S):
            run = LoadRun(client, workload, ids)
            return await run.run(cell.concurrency, warmup_s=plan.warmup_s, seconds=plan.seconds, at_edge=meter.read)
    finally:
        await client.close()


async def probe_once(server: MeasuredServer, model: str, workload: LstmScripts, ids: Iterator[int]) -> None:
    """Asks the server, one step at a time, what the LSTM answers."""
    client = client_for("grpc", server.address, model, workload.form)
    try:
        await probe(await client.session(), workload, ids)
    finally:
        await client.close()


def one_line(result: Result) -> str:
    """A cell's outcome in a few words."""
    cell = result.cell
    cpu = ", ".join(f"{name} {us:.0f}" for name, us in result.cpu_us.items())
    batch = "?" if result.mean_batch is None else f"{result.mean_batch:.1f}"
    trouble = (
        f"; {result.wrong} WRONG, {result.errors} errors {result.examples}" if result.wrong or result.errors else ""
    )
    return (
        f"{cell.server} {cell.model} {cell.protocol} {cell.concurrency}: {result.steps_per_s:.0f} steps/s, "
        f"p50 {result.p50_ms:.2f} ms, p99 {result.p99_ms:.2f} ms, batch {batch}; CPU us: {cpu}; "
        f"others {result.other_cores:.2f} cores{trouble}"
    )


def write(results: Sequence[Result], plan: MeasurementPlan, out: Path) -> None:
    """The three files, and the tables on standard output."""
    from benchmarks.plot import draw  # noqa: PLC0415 -- matplotlib takes a second; not needed for --help

    out.mkdir(parents=True, exist_ok=True)
    middles = summary(results)
    document = {"about": about(), "plan": plan, "results": results}
    (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2))
    text = report(middles)
    (out / "results.md").write_text(text + "\n")
    draw(middles, out / "plot.png")
    click.echo(text)
    click.echo(f"\nwritten: {out}/results.json, results.md, plot.png")


def report(results: Sequence[Result]) -> str:
    """A table per server, and both side by side."""
    labels = list(dict.fromkeys(result.cell.server for result in results))
    parts = [f"{label}\n\n{table([r for r in results if r.cell.server == label])}" for label in labels]
    side_by_side = comparison(results, labels[0], Triton.label)
    if side_by_side:
        parts.append(f"side by side\n\n{side_by_side}")
    examples = {text for result in results for text in result.examples}
    parts.extend(f"error: {text}" for text in sorted(examples))
    return "\n\n".join(parts)


def about() -> dict[str, object]:
    """Which program on which machine."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "seqmesh": version("seqmesh"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
