"""Hears recordings: on a mesh with the ordinary `tritonclient`, one gRPC stream each; or by onnxruntime alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import aio as triton

from deploy.demo.screen import Screen
from deploy.demo.streaming import Progress, StepFailedError, keep_drawing
from deploy.demo.transcript import AnsweredPiece
from deploy.demo.vad.model_folder import MODEL
from deploy.demo.vad.packages import model_bytes
from deploy.demo.vad.picture import RecordingView
from deploy.demo.vad.segments import Segment

Pieces = Sequence[NDArray[np.float32]]
"""The inputs of one recording's steps."""
RATE = np.array([16_000], np.int64)


@dataclass(frozen=True, slots=True)
class Listening:
    """A run. pace_s: pause between an answer and the next piece of the same recording"""

    client: triton.InferenceServerClient
    recordings: Sequence[Pieces]
    sequence_ids: Sequence[str]
    screen: Screen[RecordingView]
    pace_s: float

    async def run(self, at_half: Callable[[], Awaitable[None]] | None = None) -> list[list[AnsweredPiece]]:
        """Streams all recordings at once; the views have the probabilities afterwards.

        at_half  called once, when half of all pieces are answered; the streams go on meanwhile
        raises   StepFailedError when a piece is answered with an error
        """
        progress = Progress(sum(map(len, self.recordings)), at_half)
        try:
            async with asyncio.TaskGroup() as group:
                ticker = group.create_task(keep_drawing(self.screen), name="screen")
                halfway = group.create_task(progress.run_at_half(), name="half")
                streams = [group.create_task(self._one(number, progress)) for number in range(len(self.recordings))]
                await asyncio.wait([*streams, halfway])
                ticker.cancel()
        except ExceptionGroup as failures:
            # When the mesh fails, all streams mostly fail with the same error: the first one is enough.
            raise failures.exceptions[0] from failures
        self.screen.refresh()
        return [stream.result() for stream in streams]

    async def _one(self, number: int, progress: Progress) -> list[AnsweredPiece]:
        view, pieces = self.screen.views[number], self.recordings[number]
        may_send = asyncio.Semaphore(1)
        answers: list[AnsweredPiece] = []

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for index, piece in enumerate(pieces):
                await may_send.acquire()
                view.waiting_since_s = time.monotonic()
                yield self._request(number, piece, start=index == 0, end=index == len(pieces) - 1)

        # The library gives no type to what it yields: (result, None) or (None, error).
        stream = cast(
            "AsyncIterator[tuple[triton.InferResult | None, Exception | None]]", self.client.stream_infer(requests())
        )
        async for result, error in stream:
            if error is not None or result is None:
                raise StepFailedError(f"recording {number + 1}, piece {len(answers) + 1} of {len(pieces)}: {error}")
            assert view.waiting_since_s is not None
            probability = cast("NDArray[np.float32]", result.as_numpy("output"))
            answers.append(AnsweredPiece(b"", probability.tobytes(), view.waiting_since_s, time.monotonic()))
            view.waiting_since_s = None
            self._heard(number, view, float(probability.item()))
            progress.count()
            await asyncio.sleep(self.pace_s)
            may_send.release()
        return answers

    def _heard(self, number: int, view: RecordingView, probability: float) -> None:
        view.probabilities.append(probability)
        found = view.segmenter.hear(probability)
        self._tell(number, view, found)
        if len(view.probabilities) == view.total:
            self._tell(number, view, view.segmenter.end())

    def _tell(self, number: int, view: RecordingView, found: Segment | None) -> None:
        if found is not None:
            owner = f" on {view.owner}" if view.owner else ""
            self.screen.plain(f"  recording {number + 1}{owner}: speech {found}")

    def _request(self, number: int, piece: NDArray[np.float32], *, start: bool, end: bool) -> dict[str, Any]:
        """The arguments of one request of a stream."""
        sound = triton.InferInput("input", list(piece.shape), "FP32")
        sound.set_data_from_numpy(piece)
        rate = triton.InferInput("sr", [1], "INT64")
        rate.set_data_from_numpy(RATE)
        return {
            "model_name": MODEL,
            "inputs": [sound, rate],
            "sequence_id": self.sequence_ids[number],
            "sequence_start": start,
            "sequence_end": end,
        }


def heard_alone(recordings: Sequence[Pieces]) -> list[list[float]]:
    """The probabilities of every recording by onnxruntime alone, in this process."""
    import onnxruntime  # noqa: PLC0415 - an extra: the demo says first if it is absent

    ort = cast("Any", onnxruntime)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(model_bytes(), options, providers=["CPUExecutionProvider"])
    heard: list[list[float]] = []
    for pieces in recordings:
        state = np.zeros((2, 1, 128), np.float32)
        probabilities: list[float] = []
        for piece in pieces:
            probability, state = session.run(None, {"input": piece, "state": state, "sr": RATE.reshape(())})
            probabilities.append(float(probability.item()))
        heard.append(probabilities)
    return heard
