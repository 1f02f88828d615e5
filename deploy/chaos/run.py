"""One run: runs clients and director until all steps and faults are done, the time is over, or the user stops it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import click
from tritonclient.utils import InferenceServerException

from deploy.chaos.checker import Strikes, answer_findings
from deploy.chaos.clients import Gateway, GatewayAddresses
from deploy.chaos.director import Director
from deploy.chaos.faults import ChaosPlan
from deploy.chaos.history import ChaosRun, SequenceHistory, history_file
from deploy.chaos.library import LibraryPlayer, libraries_for
from deploy.chaos.load import BUDGET_S, ClientLoad, Clock, Player, Score
from deploy.chaos.mesh import TargetMesh
from deploy.chaos.models import VARIANTS
from deploy.chaos.scripts import PROTOCOL_WEIGHTS, ProtocolName, Script, script
from deploy.local.endings import stop_signals

TELL_EVERY_S = 10.0
LOOK_EVERY_S = 0.1
STUCK_S = BUDGET_S + 30.0
"""The run ends after this long without an answer: no fault lasts as long."""
DRAIN_S = 2 * BUDGET_S
SHORTEST_LONGEST = 6
LONGEST_SHARE = 20
"""No sequence has more than this part of a run's steps."""


def protocols_of(mesh: TargetMesh) -> list[ProtocolName]:
    """The protocols that every gateway of the mesh offers."""
    http = all(gateway.http for gateway in mesh.gateways)
    grpc = all(gateway.grpc for gateway in mesh.gateways)
    return [name for name in PROTOCOL_WEIGHTS if (http if name == "http" else grpc)]


async def run(plan: ChaosPlan, mesh: TargetMesh, out: Path) -> ChaosRun:
    """The whole run; its history goes into `out`. Raises click.UsageError for a mesh that is not ready in time, or
    lacks the models."""
    click.echo("waiting until the mesh is ready", err=True)
    try:
        await mesh.ready()
    except TimeoutError as late:
        raise click.UsageError(str(late)) from late
    await check_served(mesh.gateways)
    protocols = protocols_of(mesh)
    steps_max = max(SHORTEST_LONGEST, plan.steps // LONGEST_SHARE)
    gateways = [Gateway(addresses) for addresses in mesh.gateways]
    libraries = libraries_for(mesh.gateways)

    def make(index: int) -> Script:
        return script(plan.seed, index, run=plan.run, steps_max=steps_max, protocols=protocols)

    def player(script: Script, clock: Clock, score: Score) -> Player:
        if script.protocol == "client":
            return LibraryPlayer(script, libraries[script.index % len(libraries)], clock, score, plan.seed)
        return Player(script, gateways, clock, score, plan.seed)

    def keep(told: SequenceHistory) -> None:
        load.score.wrong += len(answer_findings(told, Strikes(director.strikes)))
        add(told)

    load = ClientLoad(player, Clock(), make, keep)
    director = Director(mesh, load, plan, protocols[-1])
    with history_file(out / "history.jsonl.gz") as add:
        try:
            return await played(director)
        finally:
            for client in (*gateways, *libraries):
                await client.close()


async def played(director: Director) -> ChaosRun:
    """Clients and director to their end, or until the user stops them. Raises what has ended one of them."""
    load, stop, hurry = director.load, asyncio.Event(), asyncio.Event()
    for expected in stop_signals():
        asyncio.get_running_loop().add_signal_handler(expected, asked_to_stop, stop, hurry)
    clients = [asyncio.create_task(load.client(), name="client") for _ in range(director.plan.clients)]
    directing = asyncio.create_task(director.direct(), name="director")
    try:
        told_s = 0.0
        while not (reason := reason_to_end(director, directing, clients, stop)):
            if load.clock.now() - told_s >= TELL_EVERY_S:
                told_s = load.clock.now()
                click.echo(progress(director), err=True)
            await asyncio.sleep(LOOK_EVERY_S)
        click.echo(f"{reason}; the sequences under way are ended", err=True)
        directing.cancel()
        await asyncio.gather(directing, return_exceptions=True)
        load.stop()
        hanging = await drained(clients, hurry)
        seconds = load.clock.now()
    finally:
        for task in (*clients, directing):
            task.cancel()
        await asyncio.gather(*clients, directing, return_exceptions=True)
    failures = list(director.failures)
    if hanging and not hurry.is_set():
        failures.append(f"{len(hanging)} clients did not come to an end within {DRAIN_S:.0f} s")
    for client in clients:
        if client not in hanging and not client.cancelled() and (error := client.exception()):
            raise error
    return ChaosRun(round(seconds, 3), director.strikes, failures, await director.mesh.refused_commits())


async def check_served(gateways: Sequence[GatewayAddresses]) -> None:
    """Raises click.UsageError for a gateway that does not serve all of chaos' models."""
    for number, addresses in enumerate(gateways, 1):
        gateway = Gateway(addresses)
        try:
            missing = await gateway.unserved(one.name for one in VARIANTS)
        except InferenceServerException as error:
            raise click.UsageError(f"gateway {number} does not answer: {error}") from error
        finally:
            await gateway.close()
        if missing:
            raise click.UsageError(
                f"no executor serves {', '.join(missing)}: --write-models DIR writes the models for executors' --models"
            )


def asked_to_stop(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    """Handles Ctrl-C and the like: the first stops the run in order, the second at once."""
    (hurry if stop.is_set() else stop).set()


async def drained(clients: Sequence[asyncio.Task[None]], hurry: asyncio.Event) -> set[asyncio.Task[None]]:
    """Waits until the clients' sequences are over, or the user stops at once. Returns the clients still running."""
    hurrying = asyncio.create_task(hurry.wait(), name="hurry")
    over = asyncio.gather(*clients, return_exceptions=True)
    await asyncio.wait((over, hurrying), timeout=DRAIN_S, return_when="FIRST_COMPLETED")
    hurrying.cancel()
    return {client for client in clients if not client.done()}


def reason_to_end(
    director: Director, directing: asyncio.Task[None], clients: Sequence[asyncio.Task[None]], stop: asyncio.Event
) -> str:
    """Why the run must end now; "" while it goes on. Raises what has ended the director."""
    plan, load = director.plan, director.load
    if directing.done() and (error := directing.exception()):
        raise error
    if any(client.done() for client in clients):
        return "a client failed"
    if load.score.answered >= plan.steps and directing.done():
        return "all steps and faults are done"
    if load.clock.now() >= plan.minutes * 60:
        return "time is over"
    if load.clock.now() - load.score.answered_s >= STUCK_S:
        return f"nothing was answered for {STUCK_S:.0f} s"
    return "stopped" if stop.is_set() else ""


def progress(director: Director) -> str:
    now, score = director.load.clock.now(), director.load.score
    going_on = [strike.kind for strike in director.strikes if strike.end_s == float("inf")]
    return (
        f"[{now:5.0f} s] {score.answered} steps ({score.answered / max(now, 1):.0f}/s), {score.sequences} sequences, "
        f"{len(director.strikes)}/{len(director.plan.faults)} faults, {score.wrong} sequences with wrong answers"
        + (f"; now {', '.join(going_on)}" if going_on else "")
    )
