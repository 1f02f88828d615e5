"""Streams texts through a mesh with the ordinary `tritonclient`, one gRPC stream per text, all at once.

Answers on a stream come in the order of its requests. On a shared stream, a text that waits for its takeover would
delay the others; so each text has its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import aio as triton

from deploy.demo.screen import Screen, TextView, ViewT
from deploy.demo.transcript import AnsweredPiece

MODEL = "text_lstm"
OUTPUTS = ("NEXT", "CONTINUATION")
REDRAW_INTERVAL_S = 0.04
"""25 drawings a second are enough."""


class StepFailedError(Exception):
    """A piece of a text was answered with an error; the message says which and why."""


async def stream_texts(
    client: triton.InferenceServerClient,
    texts: Sequence[Sequence[bytes]],
    sequence_ids: Sequence[str],
    screen: Screen[TextView],
    *,
    pace_s: float,
    at_half: Callable[[], Awaitable[None]] | None = None,
) -> list[list[AnsweredPiece]]:
    """Streams all texts at once; returns every text's answers.

    texts    the pieces of each text
    pace_s   pause between an answer and the next piece of the same text
    at_half  called once, when half of all pieces are answered; the streams go on meanwhile
    raises   StepFailedError when a piece is answered with an error, InferenceServerException when the server is gone
    """
    progress = Progress(sum(map(len, texts)), at_half)
    try:
        async with asyncio.TaskGroup() as group:
            ticker = group.create_task(keep_drawing(screen), name="screen")
            halfway = group.create_task(progress.run_at_half(), name="half")
            streams = [
                group.create_task(stream_text(client, text, pieces, sequence_ids[text], screen, progress, pace_s))
                for text, pieces in enumerate(texts)
            ]
            await asyncio.wait([*streams, halfway])
            ticker.cancel()
    except ExceptionGroup as failures:
        # When the mesh fails, all streams mostly fail with the same error: the first one is enough.
        raise failures.exceptions[0] from failures
    screen.refresh()
    return [stream.result() for stream in streams]


class Progress:
    """Counts answers, and calls `at_half` when half of the pieces are answered."""

    def __init__(self, total: int, at_half: Callable[[], Awaitable[None]] | None) -> None:
        self._left = total - total // 2
        self._half = asyncio.Event()
        self._at_half = at_half

    def count(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self._half.set()

    async def run_at_half(self) -> None:
        """Waits until half of the pieces are answered, then calls `at_half`."""
        if self._at_half is not None:
            await self._half.wait()
            await self._at_half()


async def keep_drawing(screen: Screen[ViewT]) -> None:
    while True:
        await asyncio.sleep(REDRAW_INTERVAL_S)
        screen.refresh()


async def stream_text(
    client: triton.InferenceServerClient,
    text: int,
    pieces: Sequence[bytes],
    sequence_id: str,
    screen: Screen[TextView],
    progress: Progress,
    pace_s: float,
) -> list[AnsweredPiece]:
    """Streams one text: a piece, its answer, a pause, the next piece."""
    view = screen.views[text]
    may_send = asyncio.Semaphore(1)
    answers: list[AnsweredPiece] = []

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for index, piece in enumerate(pieces):
            await may_send.acquire()
            view.waiting_since_s = time.monotonic()
            yield request(piece, sequence_id, start=index == 0, end=index == len(pieces) - 1)

    # The library gives no type to what it yields: (result, None) or (None, error).
    stream = cast("AsyncIterator[tuple[triton.InferResult | None, Exception | None]]", client.stream_infer(requests()))
    async for result, error in stream:
        if error is not None or result is None:
            raise StepFailedError(f"text {text + 1}, piece {len(answers) + 1} of {len(pieces)}: {error}")
        assert view.waiting_since_s is not None
        answers.append(answer_of(result, view.waiting_since_s))
        view.waiting_since_s = None
        view.answered = len(answers)
        view.text += pieces[len(answers) - 1].decode()
        view.continuation = answers[-1].continuation.decode(errors="replace")
        if line := view.plain_line(text + 1):
            screen.plain(line)
        progress.count()
        await asyncio.sleep(pace_s)
        may_send.release()
    return answers


def request(piece: bytes, sequence_id: str, *, start: bool, end: bool) -> dict[str, Any]:
    """The arguments of one request of a stream."""
    array = np.frombuffer(piece, dtype=np.uint8)[None]  # [1, characters]
    tensor = triton.InferInput("TEXT", list(array.shape), "UINT8")
    tensor.set_data_from_numpy(array)
    return {
        "model_name": MODEL,
        "inputs": [tensor],
        "outputs": [triton.InferRequestedOutput(name) for name in OUTPUTS],
        "sequence_id": sequence_id,
        "sequence_start": start,
        "sequence_end": end,
    }


def answer_of(result: triton.InferResult, sent_s: float) -> AnsweredPiece:
    """The bytes of the outputs."""
    answered_s = time.monotonic()
    return AnsweredPiece(content(result, "NEXT"), content(result, "CONTINUATION"), sent_s, answered_s)


def content(result: triton.InferResult, name: str) -> bytes:
    array = cast("npt.NDArray[np.uint8] | None", result.as_numpy(name))
    if array is None:
        raise StepFailedError(f"the answer lacks the output {name}")
    return array.tobytes()
