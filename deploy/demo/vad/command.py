"""The command line of `seqmesh demo vad`: makes recordings, streams them, and compares what was found."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from deploy.demo import showing
from deploy.demo.local_mesh import KilledExecutor, joined
from deploy.demo.screen import Screen
from deploy.demo.transcript import FeltTakeover, felt
from deploy.demo.vad.model_folder import MODEL, write_repository
from deploy.demo.vad.packages import require_packages
from deploy.demo.vad.picture import PAUSE, SPEECH, RecordingView
from deploy.demo.vad.segments import PIECE_S, Segment, pieces_of, segments_of
from deploy.demo.vad.speech import recordings
from deploy.demo.vad.streaming import Pieces, heard, heard_alone
from deploy.local.data_directory import MeshState
from deploy.local.endings import terminated_as_interrupted
from deploy.local.private_mesh import private_mesh
from deploy.local.terminal import styled

HELP = """Speech and pauses, found in recordings while an executor is killed.

Lets eSpeak NG speak some recordings, and streams them all at once, 32 ms a step, through a mesh that serves Silero
VAD, as its package ships it, with onnxruntime. The model's memory of a recording is a state, which the mesh keeps.
Draws speech and pauses as they are found, a line for each recording. Half way an executor is killed (SIGKILL); another
one goes on. Then compares the segments with those that onnxruntime finds alone, in this process. Exit code 0: they are
equal. 1: they differ. 2: nothing could be compared.

Starts a mesh of its own with two executors, and stops it afterwards. Needs the extra `vad`: the packages silero-vad and
espeakng-loader.
"""


@click.command("vad", help=HELP, context_settings={"max_content_width": 110})
@click.option(
    "--recordings", "count", type=click.IntRange(1, 16), default=6, show_default=True, help="How many recordings."
)
@click.option(
    "--pace-ms",
    type=click.IntRange(0),
    default=8,
    show_default=True,
    metavar="MS",
    help="Pause of each recording after each answer. 32: at least as slow as the speaker.",
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Of the lengths of the pauses.")
@click.option("--kill/--no-kill", default=True, show_default=True, help="Kill an executor half way.")
def vad(count: int, pace_ms: int, seed: int, *, kill: bool) -> None:
    require_packages()
    try:
        sounds = recordings(count, seed)
    except OSError as mute:
        raise click.ClickException(str(mute)) from mute
    pieces = [pieces_of(sound) for sound in sounds]
    seconds = sum(map(len, pieces)) * PIECE_S
    click.echo(f"{count} recordings, together {seconds:.0f} s of sound; onnxruntime alone hears them first, to compare")
    alone = heard_alone(pieces)
    click.echo("starting a mesh of its own: one gateway, one scheduler, two executors (this takes some seconds)")
    with terminated_as_interrupted(), tempfile.TemporaryDirectory(prefix="seqmesh-vad-") as directory:
        repository = write_repository(Path(directory))
        with private_mesh(executors=2, models=(repository,)) as mesh:
            same = asyncio.run(show(mesh, pieces, alone, pace_ms / 1000, kill=kill))
    sys.exit(0 if same else 1)


async def show(
    state: MeshState, recordings: Sequence[Pieces], alone: Sequence[Sequence[float]], pace_s: float, *, kill: bool
) -> bool:
    """The run on that mesh, and the verdict: whether all segments are those that onnxruntime finds alone.

    alone  the probabilities that onnxruntime finds by itself
    """
    screen = Screen([RecordingView(len(pieces), plain=not shows(SPEECH + PAUSE)) for pieces in recordings])
    async with showing.client_of(state.grpc_address) as client, joined(state, MODEL) as mesh:
        if not await mesh.executors_ready():
            raise click.ClickException("the executors do not become ready: look at their logs with `seqmesh up`")
        click.echo("an executor is killed half way\n" if kill else "nobody is killed, as you wish\n")
        answers, victim = await heard(client, mesh, recordings, screen, pace_s, kill=kill)
    click.echo("")
    if victim is not None:
        tell_takeover(victim, felt(answers, victim.held, victim.killed_s))
    return tell_verdict(alone, [view.probabilities for view in screen.views])


def shows(characters: str) -> bool:
    """Whether standard output can show them."""
    try:
        characters.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def tell_takeover(victim: KilledExecutor, takeover: FeltTakeover) -> None:
    """Prints how long the recordings of the killed executor waited."""
    waits = ", ".join(f"{recording + 1}: {wait_s:.2f} s" for recording, wait_s in takeover.longest_wait_s.items())
    held = showing.numbered("recording", victim.held)
    click.echo(f"takeover: {victim.name} held {held}; waits for one answer: {waits or 'none'}")
    click.echo(f"          before the kill an answer took {takeover.usual_wait_s:.3f} s (median)")


def tell_verdict(alone: Sequence[Sequence[float]], heard: Sequence[Sequence[float]]) -> bool:
    """Prints the segments of each recording, and whether they are those of onnxruntime alone; returns that."""
    same = True
    for number, (expected, got) in enumerate(zip(alone, heard, strict=True), 1):
        segments, others = segments_of(got), segments_of(expected)
        click.echo(f"recording {number}: speech {spelled(segments)}")
        if segments != others:
            same = False
            click.echo(styled(f"   DIFFERENT: onnxruntime alone finds {spelled(others)}", fg="red", bold=True))
    pairs = [pair for expected, got in zip(alone, heard, strict=True) for pair in zip(expected, got, strict=True)]
    apart = max(abs(one - other) for one, other in pairs)
    if same:
        told = f"{len(pairs)} probabilities differ by {apart:.1g} at most"
        if not apart:
            told = f"so are all {len(pairs)} probabilities, bit for bit"
        click.echo(styled(f"equal: all segments are those that onnxruntime finds alone; {told}", fg="green"))
    return same


def spelled(segments: Sequence[Segment]) -> str:
    return ", ".join(map(str, segments)) or "none"
