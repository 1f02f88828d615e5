"""Hears recordings: on a mesh, or by onnxruntime alone."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from deploy.demo.local_mesh import KilledExecutor, LocalMesh
from deploy.demo.screen import Screen
from deploy.demo.streaming import Streams
from deploy.demo.transcript import AnsweredPiece
from deploy.demo.vad.model_folder import MODEL
from deploy.demo.vad.packages import model_bytes
from deploy.demo.vad.picture import RecordingView
from deploy.demo.vad.segments import Segment
from seqmesh_client import AsyncClient, StepOutputs

Pieces = Sequence[NDArray[np.float32]]
"""The inputs of one recording's steps."""
RATE = np.array([16_000], np.int64)


async def heard(
    client: AsyncClient,
    mesh: LocalMesh,
    recordings: Sequence[Pieces],
    screen: Screen[RecordingView],
    pace_s: float,
    *,
    kill: bool,
) -> tuple[list[list[AnsweredPiece]], KilledExecutor | None]:
    """Streams all recordings at once (`Streams.run`); the views have the probabilities afterwards."""

    def take(number: int, answer: StepOutputs) -> None:
        view, probability = screen.views[number], float(answer["output"].item())
        view.probabilities.append(probability)
        tell(number, view.segmenter.hear(probability))
        if len(view.probabilities) == view.total:
            tell(number, view.segmenter.end())

    def tell(number: int, found: Segment | None) -> None:
        if found is not None:
            owner = f" on {view.owner}" if (view := screen.views[number]).owner else ""
            screen.plain(f"  recording {number + 1}{owner}: speech {found}")

    ids = [f"recording-{secrets.token_hex(4)}-{number}" for number in range(1, len(recordings) + 1)]
    inputs = [[{"input": piece, "sr": RATE} for piece in pieces] for pieces in recordings]
    streams = Streams(client, MODEL, inputs, ids, ("output",), pace_s, mesh, "recording")
    return await streams.run(screen, take, kill=kill)


def heard_alone(recordings: Sequence[Pieces]) -> list[list[float]]:
    """The probabilities of every recording by onnxruntime alone, in this process."""
    import onnxruntime  # noqa: PLC0415 - an extra: the demo says first if it is absent

    ort = cast("Any", onnxruntime)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(model_bytes(), options, providers=["CPUExecutionProvider"])
    found: list[list[float]] = []
    for pieces in recordings:
        state = np.zeros((2, 1, 128), np.float32)
        probabilities: list[float] = []
        for piece in pieces:
            probability, state = session.run(None, {"input": piece, "state": state, "sr": RATE.reshape(())})
            probabilities.append(float(probability.item()))
        found.append(probabilities)
    return found
