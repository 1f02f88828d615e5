"""One run: runs clients and director until all steps and faults are done, the time is over, or the user stops it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.chaos.checker import Strikes, answer_findings
from deploy.chaos.clients import Gateway
from deploy.chaos.director import Director
from deploy.chaos.faults import Fault
from deploy.chaos.history import HistoryFile, SequenceHistory, Strike
from deploy.chaos.load import BUDGET_S, ClientLoad, Clock
from deploy.chaos.mesh import TargetMesh
from deploy.chaos.scripts import PROTOCOL_WEIGHTS, ProtocolName, Script, script

TELL_EVERY_S = 10.0
LOOK_EVERY_S = 0.1
STUCK_S = BUDGET_S + 30.0
"""The run ends after this long without an answer: no fault lasts as long."""
DRAIN_S = 2 * BUDGET_S
SHORTEST_LONGEST = 6
LONGEST_SHARE = 20
"""No sequence has more than this part of a run's steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """The plan of a run. run: its name, part of every correlation id."""

    seed: int
    steps: int
    faults: Sequence[Fault]
    minutes: float
    clients: int
    run: str


@dataclass(frozen=True, slots=True)
class ChaosRun:
    """Facts about a finished run; all else is in its history."""

    seconds: float
    strikes: Sequence[Strike]
    failures: Sequence[str]
    refused_commits: int | None


class NotReadyError(Exception):
    """The mesh was not ready in time; nothing was done to it."""


def protocols_of(mesh: TargetMesh) -> list[ProtocolName]:
    """The protocols that every gateway of the mesh offers."""
    http = all(gateway.http for gateway in mesh.gateways)
    grpc = all(gateway.grpc for gateway in mesh.gateways)
    return [name for name in PROTOCOL_WEIGHTS if (http if name == "http" else grpc)]


async def run(plan: ChaosPlan, mesh: TargetMesh, out: Path, tell: Callable[[str], None]) -> ChaosRun:
    """The whole run; its history goes into `out`. Raises NotReadyError."""
    tell("waiting until the mesh is ready")
    try:
        await mesh.ready()
    except TimeoutError as late:
        raise NotReadyError(str(late)) from late
    protocols = protocols_of(mesh)
    steps_max = max(SHORTEST_LONGEST, plan.steps // LONGEST_SHARE)
    wrong = 0

    def make(index: int) -> Script:
        return script(plan.seed, index, run=plan.run, steps_max=steps_max, protocols=protocols)

    def keep(told: SequenceHistory) -> None:
        nonlocal wrong
        wrong += len(answer_findings(told, Strikes(director.strikes)))
        history.add(told)

    gateways = [Gateway(addresses) for addresses in mesh.gateways]
    clock = Clock()
    load = ClientLoad(gateways, clock, plan.seed, make, keep)
    director = Director(mesh, load, plan.faults, plan.steps, plan.seed, plan.run, protocols[-1], tell)
    stop, hurry = asyncio.Event(), asyncio.Event()
    with HistoryFile(out / "history.jsonl.gz") as history:
        for expected in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(expected, asked_to_stop, stop, hurry)
        clients = [asyncio.create_task(load.client(), name="client") for _ in range(plan.clients)]
        directing = asyncio.create_task(director.direct(), name="director")
        try:
            reason = await watched(plan, load, directing, clients, stop, lambda: tell(progress(load, director, wrong)))
            tell(f"{reason}; the sequences under way are ended")
            directing.cancel()
            await asyncio.gather(directing, return_exceptions=True)
            load.stop()
            hanging = await drained(clients, hurry)
            seconds = clock.now()
        finally:
            for task in (*clients, directing):
                task.cancel()
            await asyncio.gather(*clients, directing, return_exceptions=True)
            for gateway in gateways:
                await gateway.close()
    failures = list(director.failures)
    if hanging and not hurry.is_set():
        failures.append(f"{len(hanging)} clients did not come to an end within {DRAIN_S:.0f} s")
    for client in clients:
        if client not in hanging and not client.cancelled() and (error := client.exception()):
            raise error
    return ChaosRun(round(seconds, 3), director.strikes, failures, await mesh.refused_commits())


def asked_to_stop(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    """Handles Ctrl-C: the first stops the run in order, the second at once."""
    (hurry if stop.is_set() else stop).set()


async def drained(clients: Sequence[asyncio.Task[None]], hurry: asyncio.Event) -> set[asyncio.Task[None]]:
    """Waits until the clients' sequences are over, or the user stops at once. Returns the clients still running."""
    hurrying = asyncio.create_task(hurry.wait(), name="hurry")
    over = asyncio.gather(*clients, return_exceptions=True)
    await asyncio.wait((over, hurrying), timeout=DRAIN_S, return_when="FIRST_COMPLETED")
    hurrying.cancel()
    return {client for client in clients if not client.done()}


async def watched(
    plan: ChaosPlan,
    load: ClientLoad,
    directing: asyncio.Task[None],
    clients: Sequence[asyncio.Task[None]],
    stop: asyncio.Event,
    tell: Callable[[], None],
) -> str:
    """Waits for the end of the run; returns why it ends."""
    told_s = progress_s = 0.0
    answered = 0
    while True:
        now = load.clock.now()
        if load.score.answered > answered:
            answered, progress_s = load.score.answered, now
        if now - told_s >= TELL_EVERY_S:
            told_s = now
            tell()
        if directing.done() and (error := directing.exception()):
            raise error
        if any(client.done() for client in clients):
            return "a client failed"
        if answered >= plan.steps and directing.done():
            return "all steps and faults are done"
        if now >= plan.minutes * 60:
            return "time is over"
        if now - progress_s >= STUCK_S:
            return f"nothing was answered for {STUCK_S:.0f} s"
        if stop.is_set():
            return "stopped"
        await asyncio.sleep(LOOK_EVERY_S)


def progress(load: ClientLoad, director: Director, wrong: int) -> str:
    """The run's progress as a line."""
    now, score = load.clock.now(), load.score
    going_on = [strike.kind for strike in director.strikes if strike.end_s == float("inf")]
    return (
        f"[{now:5.0f} s] {score.answered} steps ({score.answered / max(now, 1):.0f}/s), {score.sequences} sequences, "
        f"{len(director.strikes)}/{len(director.faults)} faults, {wrong} sequences with wrong answers"
        + (f"; now {', '.join(going_on)}" if going_on else "")
    )
