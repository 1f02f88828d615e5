"""`seqmesh demo vad`: its pure parts, what it says without its packages, and once as the user would run it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from deploy.demo.showing import numbered
from deploy.demo.vad import packages
from deploy.demo.vad.command import spelled, tell_verdict, vad
from deploy.demo.vad.model_folder import CONFIG, write_repository
from deploy.demo.vad.picture import PAUSE, SPEECH, RecordingView
from deploy.demo.vad.segments import (
    CONTEXT,
    PAUSE_PIECES,
    PIECE,
    SHORTEST_PIECES,
    Segment,
    Segmenter,
    pieces_of,
    segments_of,
)
from deploy.demo.vad.speech import RATE_HZ, recordings
from deploy.demo.vad.streaming import heard_alone

PROBABILITIES = st.lists(st.sampled_from([0.0, 0.2, 0.4, 0.6, 0.9]), max_size=60)
LOW, HIGH = 0.1, 0.9


def test_speech_begins_at_once_and_ends_with_the_pause_that_was_long_enough() -> None:
    heard = [LOW] * 5 + [HIGH] * 20 + [LOW] * 10 + [HIGH] * 3 + [LOW] * 10

    assert [Segment(5, 25)] == segments_of(heard), "three pieces are no speech"


def test_a_short_pause_and_a_little_doubt_do_not_end_a_segment() -> None:
    heard = [HIGH] * 10 + [LOW] * (PAUSE_PIECES - 1) + [0.4] * 5 + [HIGH] * 10

    assert [Segment(0, len(heard))] == segments_of(heard)


@given(PROBABILITIES)
def test_segments_are_in_order_apart_and_long_enough(heard: list[float]) -> None:
    found = segments_of(heard)

    assert all(segment.end - segment.begin >= SHORTEST_PIECES for segment in found)
    assert all(0 <= segment.begin < segment.end <= len(heard) for segment in found)
    assert all(one.end + PAUSE_PIECES <= other.begin for one, other in pairwise(found))


@given(PROBABILITIES)
def test_what_is_told_while_it_is_heard_is_what_is_found_in_the_end(heard: list[float]) -> None:
    segmenter = Segmenter()
    told = [segmenter.hear(probability) for probability in heard]

    assert segments_of(heard) == [segment for segment in [*told, segmenter.end()] if segment is not None]


@pytest.mark.parametrize("samples", [1, PIECE - 1, PIECE, 3 * PIECE + 7])
def test_pieces_are_the_sound_each_with_the_end_of_the_one_before(samples: int) -> None:
    sound = np.arange(1, samples + 1, dtype=np.float32)

    pieces = pieces_of(sound)

    whole = np.concatenate([piece[0, CONTEXT:] for piece in pieces])
    assert sound.tolist() == whole[:samples].tolist()
    assert not whole[samples:].any()
    for before, after in pairwise(pieces):
        assert before[0, -CONTEXT:].tolist() == after[0, :CONTEXT].tolist()
    assert not pieces[0][0, :CONTEXT].any()


@pytest.mark.parametrize("columns", [10, 39, 60, 100, 300])
@pytest.mark.parametrize("waiting_since_s", [None, 0.0])
def test_a_live_line_fits_the_terminal(columns: int, waiting_since_s: float | None) -> None:
    view = RecordingView(375, owner="executor-with-a-long-name", waiting_since_s=waiting_since_s)
    view.probabilities += [HIGH] * 200

    line = re.sub(r"\x1b\[[0-9;]*m", "", view.line(1, columns, now_s=5.0))

    assert columns >= len(line)
    assert ("waits 5.0 s" in line) is (waiting_since_s is not None and columns >= 39)


def test_the_strip_shows_speech_pauses_and_what_is_still_to_come() -> None:
    view = RecordingView(8)
    view.probabilities += [HIGH, HIGH, LOW, LOW]

    assert SPEECH + PAUSE + "  " == view.strip(4)
    assert "#.  " == RecordingView(8, plain=True, probabilities=view.probabilities).strip(4)
    assert SPEECH * 4 + PAUSE * 4 + " " * 8 == view.strip(16), "a recording of fewer pieces than columns"


@pytest.mark.parametrize(("held", "words"), [((), "no recording"), ((2,), "recording 3"), ((0, 2), "recordings 1, 3")])
def test_recordings_are_counted_from_one_for_people(held: Sequence[int], words: str) -> None:
    assert words == numbered("recording", held)


def test_segments_are_told_in_seconds() -> None:
    assert "0.32-0.96 s" == spelled([Segment(10, 30)])
    assert "none" == spelled([])


def test_a_difference_is_told_with_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    heard = [LOW] * 10 + [HIGH] * 20

    assert not tell_verdict([[LOW] * 30], [heard])
    assert tell_verdict([heard], [heard])

    said = capsys.readouterr().out
    assert "recording 1: speech 0.32-0.96 s\n   DIFFERENT: onnxruntime alone finds none\n" in said
    assert "so are all 30 probabilities, bit for bit" in said


def test_without_its_packages_the_demo_says_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Any:
        return None if name == "silero_vad" else object()

    monkeypatch.setattr(packages, "find_spec", nothing)

    result = CliRunner().invoke(vad, [])

    assert 1 == result.exit_code
    assert "needs silero-vad, not installed here: `make vad`" in result.output
    assert "pip install 'seqmesh[executor,local,vad]'" in result.output


def test_the_repository_has_the_packages_file_and_the_pages_configuration(tmp_path: Path) -> None:
    write_repository(tmp_path)

    assert packages.model_bytes() == (tmp_path / "silero_vad" / "1" / "model.onnx").read_bytes()
    page = (Path(__file__).resolve().parents[2] / "docs" / "start" / "voice.md").read_text()
    lines = [line.partition("#")[0].strip() for line in CONFIG.splitlines()]
    shown = [line for line in lines if line and not line.startswith(("instance_group", "parameters"))]
    assert shown == [line for line in map(str.strip, page.splitlines()) if line in shown]


def test_a_recording_has_four_sentences_and_silence_around_them() -> None:
    (sound,) = recordings(1, seed=3)

    (probabilities,) = heard_alone([pieces_of(sound)])

    found = segments_of(probabilities)
    assert len(found) >= 4
    edge = int(0.5 * RATE_HZ / PIECE)
    assert max(probabilities[:edge] + probabilities[-edge:]) < 0.5
    assert 0.05 < np.abs(sound).max() <= 1


@pytest.mark.timeout(300)
def test_killing_an_executor_half_way_changes_no_segment() -> None:
    """The whole demo, with a mesh of its own: one kill, equal segments, exit code 0."""
    command = [sys.executable, "-m", "deploy.cli", "demo", "vad", "--recordings=3", "--pace-ms=0"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr
    assert "is killed; it held recording" in done.stdout
    assert "equal: all segments are those that onnxruntime finds alone" in done.stdout
    assert 3 == len(re.findall(r"^recording \d: speech \d", done.stdout, re.MULTILINE))
