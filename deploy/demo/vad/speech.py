"""Makes recordings: sentences spoken by eSpeak NG, with pauses between them in which a little noise goes on.

eSpeak NG is the library of the package espeakng-loader, called through its C interface. Its voices differ by gender,
pitch and speed. Its breath is random, so two recordings of one sentence are not equal: a run keeps its recordings.

Source: speak_lib.h of eSpeak NG.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RATE_HZ = 16_000
"""Samples a second of every recording."""
_RETRIEVE = 1
"""Mode of output: sound goes to the callback, not to a device."""
_UTF8 = 1
_SPEED, _PITCH = 1, 3
"""Parameters: words a minute, and 0 to 100."""
_NOISE = 0.002
_EDGE_S = 0.7

Sound = NDArray[np.float32]
"""Samples from -1 to 1."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """A voice of eSpeak NG, with words a minute, and a pitch from 0 to 100."""

    voice: str
    speed: int
    pitch: int


SPEAKERS = (
    Speaker("en-us", 165, 50),
    Speaker("en-gb-x-rp+f3", 150, 60),
    Speaker("en-us+m3", 185, 35),
    Speaker("en-gb-scotland", 160, 45),
    Speaker("en-us+f2", 175, 65),
    Speaker("en-gb-x-rp+m7", 140, 40),
)
SENTENCES = (
    "Good morning, this is the harbour office.",
    "The ferry to the islands leaves at a quarter past nine.",
    "Please keep to the left side of the pier.",
    "There is fog over the northern channel.",
    "Two fishing boats have asked for a tow.",
    "The lighthouse keeper wants his newspaper back.",
    "Low water is at half past four this afternoon.",
    "We expect strong wind from the south west before midnight.",
    "Your parcel was put ashore at the wrong jetty.",
    "Nobody has seen the cat since Tuesday.",
    "The crane will lift the mast tomorrow at noon.",
    "That is all for now, thank you for listening.",
)
"""Every recording says four of them."""


def recordings(count: int, seed: int) -> list[Sound]:
    """So many recordings, each by another speaker, with pauses of different lengths. Raises OSError without a voice."""
    voice = _Voice()
    chance = np.random.default_rng(seed)
    made: list[Sound] = []
    for number in range(count):
        speaker = SPEAKERS[number % len(SPEAKERS)]
        said = [SENTENCES[(4 * number + index) % len(SENTENCES)] for index in range(4)]
        made.append(_with_pauses([voice.say(speaker, sentence) for sentence in said], chance))
    return made


def _with_pauses(sentences: Sequence[Sound], chance: np.random.Generator) -> Sound:
    parts: list[Sound] = []
    for index, sentence in enumerate(sentences):
        pause_s = chance.uniform(0.6, 1.8) if index else _EDGE_S
        parts += [np.zeros(int(pause_s * RATE_HZ), np.float32), sentence]
    whole = np.concatenate([*parts, np.zeros(int(_EDGE_S * RATE_HZ), np.float32)])
    noise = chance.standard_normal(len(whole)).astype(np.float32) * _NOISE
    return np.clip(whole + noise, -1, 1).astype(np.float32)


class _Voice:
    """The library, which may be initialised once in a process."""

    _rate_hz = 0

    def __init__(self) -> None:
        import espeakng_loader  # noqa: PLC0415 - an extra: the demo says first if it is absent

        self._library: Any = ctypes.CDLL(espeakng_loader.get_library_path())
        if not _Voice._rate_hz:
            _Voice._rate_hz = self._library.espeak_Initialize(_RETRIEVE, 0, espeakng_loader.get_data_path().encode(), 0)
        if _Voice._rate_hz <= 0:
            raise OSError("eSpeak NG cannot be initialised")
        self._pieces: list[NDArray[np.int16]] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        # Kept, because the library calls it as long as it speaks.
        self._callback = kind(self._take)
        self._library.espeak_SetSynthCallback(self._callback)

    def say(self, speaker: Speaker, sentence: str) -> Sound:
        """The sentence as a sound of `RATE_HZ`. Raises OSError if the library refuses."""
        text = sentence.encode()
        self._pieces.clear()
        refused = (
            self._library.espeak_SetVoiceByName(speaker.voice.encode())
            or self._library.espeak_SetParameter(_SPEED, speaker.speed, 0)
            or self._library.espeak_SetParameter(_PITCH, speaker.pitch, 0)
            or self._library.espeak_Synth(text, len(text) + 1, 0, 1, 0, _UTF8, None, None)
            or self._library.espeak_Synchronize()
        )
        if refused or not self._pieces:
            raise OSError(f"eSpeak NG does not say {sentence!r} as {speaker.voice} (error {refused})")
        sound = np.concatenate(self._pieces).astype(np.float32) / (1 << 15)
        at = np.arange(0, len(sound), _Voice._rate_hz / RATE_HZ)
        return np.interp(at, np.arange(len(sound)), sound).astype(np.float32)

    def _take(self, samples: Any, count: int, _events: Any) -> int:
        """Keeps a piece of sound. Returns 0: go on."""
        if samples and count > 0:
            self._pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0
