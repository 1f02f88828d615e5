"""What Silero VAD is given, and what its answers mean. No I/O.

The model takes 32 ms of sound, with the last 4 ms of the piece before in front, and its state. It answers with the
probability that there is speech. Speech begins where that is high, and ends where it was low for a while.

Source: the package silero-vad, utils_vad.py (OnnxWrapper, get_speech_timestamps).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

PIECE = 512
"""Samples of a step."""
CONTEXT = 64
"""Samples of the piece before that are given again."""
PIECE_S = PIECE / 16_000
BEGINS, ENDS = 0.5, 0.35
"""Probabilities above which speech begins, and below which it may end."""
PAUSE_PIECES = 4
"""Pieces without speech that end a segment: 128 ms."""
SHORTEST_PIECES = 8
"""A shorter segment is no speech: 256 ms."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Pieces of speech: the first one, and the one behind the last."""

    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.begin * PIECE_S:.2f}-{self.end * PIECE_S:.2f} s"


@dataclass(slots=True)
class Segmenter:
    """Finds segments while the probabilities come in."""

    segments: list[Segment] = field(default_factory=list[Segment])
    heard: int = 0
    _begin: int | None = None
    _low_since: int | None = None

    @property
    def speaks(self) -> bool:
        """Whether a segment is open."""
        return self._begin is not None

    def hear(self, probability: float) -> Segment | None:
        """The next piece's probability. Returns the segment that has just ended, if it was long enough."""
        piece, self.heard = self.heard, self.heard + 1
        if self._begin is None:
            if probability >= BEGINS:
                self._begin, self._low_since = piece, None
            return None
        if probability >= ENDS:
            self._low_since = None
            return None
        self._low_since = piece if self._low_since is None else self._low_since
        return self._close(self._low_since) if piece - self._low_since + 1 >= PAUSE_PIECES else None

    def end(self) -> Segment | None:
        """Closes the segment that is open when the recording is over."""
        return None if self._begin is None else self._close(self.heard if self._low_since is None else self._low_since)

    def _close(self, end: int) -> Segment | None:
        assert self._begin is not None
        segment = Segment(self._begin, end)
        self._begin = self._low_since = None
        if segment.end - segment.begin < SHORTEST_PIECES:
            return None
        self.segments.append(segment)
        return segment


def pieces_of(sound: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """The inputs of a recording's steps, each [1, CONTEXT + PIECE]; the last one is filled up with silence."""
    count = -(-len(sound) // PIECE)
    padded = np.zeros(CONTEXT + count * PIECE, np.float32)
    padded[CONTEXT : CONTEXT + len(sound)] = sound
    return [padded[None, at : at + CONTEXT + PIECE] for at in range(0, count * PIECE, PIECE)]


def segments_of(probabilities: Sequence[float]) -> list[Segment]:
    segmenter = Segmenter()
    for probability in probabilities:
        segmenter.hear(probability)
    segmenter.end()
    return segmenter.segments
