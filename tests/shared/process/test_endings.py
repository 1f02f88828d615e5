"""How a process ended, in words."""

from __future__ import annotations

import signal

import pytest

from shared.process.endings import ending


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited with code 0"),
        (70, "exited with code 70"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-(signal.SIGRTMIN + 1), f"was killed by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_every_end_of_a_process_has_words(code: int, words: str) -> None:
    assert words == ending(code)
