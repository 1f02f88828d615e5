"""The command line of `seqmesh demo`: finds or starts a mesh, streams the texts twice, and compares the answers."""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack, contextmanager
from importlib import import_module
from pathlib import Path

import click
import numpy as np

from deploy.demo import showing
from deploy.demo.local_mesh import KilledExecutor, LocalMesh, joined
from deploy.demo.screen import Screen, TextView
from deploy.demo.streaming import Streams
from deploy.demo.texts import pieces_of, sample_texts
from deploy.demo.transcript import AnsweredPiece, Difference, FeltTakeover, felt, first_differences
from deploy.local.data_directory import LauncherError, MeshState, is_locked, read_state
from deploy.local.endings import errors_apart, terminated_as_interrupted
from deploy.local.private_mesh import past_proxies, private_mesh
from deploy.local.terminal import styled
from seqmesh_client import AsyncClient, StepOutputs
from shared.process.addresses import host_and_port
from shared.process.machine import is_running

MODEL = "text_lstm"
HELP = """Texts streamed through a mesh, while one of its executors is killed.

Streams the texts word by word, all at once, through the sample model text_lstm, which says after every word how the
text may go on; its memory of the text is the mesh's, the client sends words only. Does so twice: once undisturbed,
once killing (SIGKILL) an executor half way. Then compares both runs, bit for bit. Exit code 0: all answers are equal.
1: some differ. 2: nothing could be compared.

TEXT: your own texts, in quotes, instead of the sample texts.

`seqmesh demo vad --help`: another demo, in which speech is found in recordings.

Uses the mesh that `seqmesh up` runs in --data-dir. Where none runs, or one with a single executor, starts one of its
own with two executors, and stops it afterwards. Nobody is killed in a mesh that runs elsewhere (--url).
"""


@click.command("demo", help=HELP, context_settings={"max_content_width": 110})
@click.option("--url", default="", metavar="HOST:PORT", help="gRPC address of a running mesh's gateway.")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    default=Path(".seqmesh"),
    envvar="SEQMESH_DATA_DIR",
    show_default=True,
    show_envvar=True,
    help="Where `seqmesh up` runs, if it runs on this machine.",
)
@click.option("--private", is_flag=True, help="Start a mesh of its own even where one runs.")
@click.option(
    "--texts", "count", type=click.IntRange(1, 32), default=6, show_default=True, help="How many sample texts."
)
@click.option(
    "--pace-ms",
    type=click.IntRange(0),
    default=100,
    show_default=True,
    metavar="MS",
    help="Pause of each text after each answer, for people who read along.",
)
@click.option("--kill/--no-kill", default=True, show_default=True, help="Kill an executor in the second run.")
@click.argument("text", nargs=-1)
def demo(
    url: str, data_dir: Path, *, private: bool, count: int, pace_ms: int, kill: bool, text: tuple[str, ...]
) -> None:
    try:
        texts = [pieces_of(one) for one in text or sample_texts(count)]
    except ValueError as wrong:
        raise click.BadParameter(str(wrong), param_hint="TEXT") from wrong
    if url and private:
        raise click.UsageError("--url names a mesh that runs, --private starts one: give one of them")
    if url:
        try:
            host_and_port(url)
        except ValueError as wrong:
            raise click.BadParameter(f"{wrong} of a gateway's gRPC", param_hint="--url") from wrong
    running = None if private else running_mesh(data_dir)
    executors = [] if running is None else [child for child in running.children if child.service == "executor"]
    if running is not None and kill and not url and len(executors) < 2:
        click.echo(f"the mesh in {data_dir} has one executor only: nobody could take its texts over")
        running = None
    with terminated_as_interrupted(), target(url, running) as (address, mesh):
        same = asyncio.run(show(address, mesh, texts, pace_ms / 1000, kill=kill))
    sys.exit(0 if same else 1)


@contextmanager
def target(url: str, running: MeshState | None) -> Generator[tuple[str, MeshState | None]]:
    """Where to stream to, and the processes there if they run on this machine, within the block. Starts a private mesh
    if no URL was given and none runs.
    """
    if url:
        yield url, running if running is not None and is_gateway_of(running, url) else None
        return
    if running is not None:
        with past_proxies(running.host):
            yield running.grpc_address, running
        return
    click.echo("starting a mesh of its own: one gateway, one scheduler, two executors (this takes some seconds)")
    with private_mesh(executors=2) as mesh:
        yield mesh.grpc_address, mesh


def running_mesh(data_dir: Path) -> MeshState | None:
    """The mesh that a launcher runs in that directory; None when there is none (any more)."""
    try:
        mesh = read_state(data_dir)
    except LauncherError:
        return None
    # A launcher that was killed leaves its file, and its process id may be another program's by now. The lock is looked
    # at only then: to look at it where nobody holds it may be in the way of a launcher that starts.
    if not (is_running(mesh.pid) and is_locked(data_dir)):
        return None
    if not mesh.ready:
        raise LauncherError(f"the mesh in {data_dir} is not ready yet: try again in a moment")
    return mesh


def is_gateway_of(mesh: MeshState, url: str) -> bool:
    """Whether the address is one of the mesh's gateways, by whatever name of this machine."""
    host, _, port = url.rpartition(":")
    local = host in {mesh.host, "localhost", "127.0.0.1", "[::1]", socket.gethostname()}
    ports = {str(child.grpc_port) for child in mesh.children if child.service == "gateway"}
    return local and port in ports


async def show(
    url: str, running: MeshState | None, texts: list[tuple[bytes, ...]], pace_s: float, *, kill: bool
) -> bool:
    """Both runs, on the server at that address, and the verdict: whether all answers were equal."""
    words = sum(map(len, texts))
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(showing.client_of(url))
        mesh = await stack.enter_async_context(joined(running, MODEL)) if running is not None else None
        await refuse_drained(mesh)
        await showing.await_model(url, MODEL)
        click.echo(f"{len(texts)} texts of together {words} words, streamed at once to {MODEL} at {url}\n")
        mercy = await reason_for_mercy(mesh) if kill else "as you wish"
        click.echo("first run, undisturbed: the text so far, and how the model thinks it goes on")
        undisturbed, _ = await run(client, mesh, texts, pace_s, kill=False)
        happens = f"nobody is killed ({mercy})" if mercy else "an executor is killed half way"
        click.echo(f"\nsecond run: {happens}")
        disturbed, victim = await run(client, mesh, texts, pace_s, kill=not mercy)
    click.echo("")
    if victim is not None:
        tell_takeover(victim, felt(disturbed, victim.held, victim.killed_s))
    differences = first_differences(undisturbed, disturbed)
    tell_verdict(differences, words)
    return not differences


async def refuse_drained(mesh: LocalMesh | None) -> None:
    """Raises click.ClickException for a mesh of this machine whose executors are all drained."""
    if mesh is not None and len(drained := await mesh.drained()) == mesh.executors:
        raise click.ClickException(
            f"every executor is drained, so that nobody serves: `seqmesh drain --undo {' '.join(drained)}` takes it "
            "back, and --private starts another mesh"
        )


async def reason_for_mercy(mesh: LocalMesh | None) -> str:
    """Why no executor can be killed; "" if one can."""
    if mesh is None:
        return "the mesh does not run on this machine, or not in --data-dir"
    if mesh.executors < 2:
        return "the mesh has one executor only: start it with `seqmesh up --executors 2`"
    if drained := await mesh.drained():
        return f"drained: {', '.join(drained)}; `seqmesh drain --undo` takes it back"
    if not await mesh.executors_ready():
        return "some executors are still not ready"
    return ""


async def run(
    client: AsyncClient, mesh: LocalMesh | None, texts: list[tuple[bytes, ...]], pace_s: float, *, kill: bool
) -> tuple[list[list[AnsweredPiece]], KilledExecutor | None]:
    """Streams all texts once, as new sequences. Returns each text's answers, and the executor that was killed."""
    nonce = secrets.token_hex(4)
    ids = [f"demo-{nonce}-{number}" for number in range(1, len(texts) + 1)]
    screen = Screen([TextView(len(text)) for text in texts])
    inputs = [[{"TEXT": np.frombuffer(piece, np.uint8)[None]} for piece in text] for text in texts]

    def take(text: int, answer: StepOutputs) -> None:
        view = screen.views[text]
        view.text += texts[text][view.answered].decode()
        view.continuation = answer["CONTINUATION"].tobytes().decode(errors="replace")
        view.answered += 1
        if line := view.plain_line(text + 1):
            screen.plain(line)

    outputs = ("NEXT", "CONTINUATION")
    streams = Streams(client, MODEL, inputs, ids, outputs, pace_s, mesh, "text")
    return await streams.run(screen, take, kill=kill)


def tell_takeover(victim: KilledExecutor, takeover: FeltTakeover) -> None:
    """Prints how long clients waited."""
    waits = ", ".join(f"text {text + 1} {wait_s:.2f} s" for text, wait_s in takeover.longest_wait_s.items())
    if waits:
        click.echo(f"takeover: the callers of {victim.name} waited once for their answer: {waits}")
    else:
        click.echo(f"takeover: {victim.name} held none of the texts")
    if takeover.others_wait_s is not None:
        click.echo(f"          the others waited at most {takeover.others_wait_s:.2f} s for theirs")
    click.echo(f"          before the kill an answer took {takeover.usual_wait_s:.3f} s (median)")


def tell_verdict(differences: Sequence[Difference], words: int) -> None:
    """Prints that both runs are equal, or where they differ."""
    if not differences:
        click.echo(
            styled(f"equal: all {words} answers of the second run are those of the first, bit for bit", fg="green")
        )
        return
    click.echo(styled("DIFFERENT:", fg="red", bold=True))
    for difference in differences:
        click.echo(
            f"  text {difference.text + 1} from word {difference.piece + 1} on: "
            f"first run {difference.expected}, second run {difference.got}"
        )


def main(arguments: Sequence[str]) -> None:
    """Runs the demo that the arguments name: that of texts, unless the first one is `vad`."""
    command, name, rest = demo, "seqmesh demo", arguments
    if arguments[:1] == ("vad",):
        command, name, rest = import_module("deploy.demo.vad.command").vad, "seqmesh demo vad", arguments[1:]
    # Not by the command's own `main`, by which Ctrl-C ends with 1: that says that answers differ.
    with errors_apart(), command.make_context(name, list(rest)) as ctx:
        command.invoke(ctx)
