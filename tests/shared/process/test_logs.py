"""Log lines: one per event, in a form that reads back, and nothing spent on a disabled level."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import suppress

import pytest

from shared.process import logs
from shared.process.logs import Level, level_of_line
from shared.process.readers import PIECE_BYTES
from shared.process.repeats import Repeats
from tests.shared.conftest import Configure


def test_a_text_line_is_time_level_event_and_fields_in_order(configured: Configure) -> None:
    stream = configured(name="gateway-1")

    logs.info("model ready", model="sum", version=3, note="two words", empty="", tricky='a="b"\n')

    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO    model ready name=gateway-1 model=sum version=3 "
        r'note="two words" empty="" tricky="a=\\"b\\"\\n"\n',
        stream.getvalue(),
    )


def test_a_json_line_is_one_object_with_the_same_content(configured: Configure) -> None:
    stream = configured(style="json", name="gateway-1")

    logs.warning("lease lost", exc=ValueError("why\nnot"), shard=3, path=Level)

    entry = json.loads(stream.getvalue())
    assert entry["level"] == "warning"
    assert entry["event"] == "lease lost"
    assert entry["name"] == "gateway-1"
    assert entry["shard"] == 3
    assert "ValueError: why" in entry["exception"]
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("style", ["text", "json"])
def test_what_a_terminal_would_obey_is_escaped_and_reads_back(configured: Configure, style: str) -> None:
    """Clients choose ids and names that stand in the log."""
    chosen = "é\x1b[31m\x9b2J\u202egnol\U000e0001"
    stream = configured(style=style)

    logs.info("sequence expired", sequence=chosen)
    logging.getLogger("library").warning("refused %s", chosen)
    logs.error("broken", ValueError(chosen))

    lines = stream.getvalue().split("\n")
    assert all(line.isprintable() for line in lines)
    read_back = json.loads(lines[0].partition("sequence=" if style == "text" else '"sequence":')[2].rstrip("}"))
    assert chosen == read_back
    if style == "json":
        assert [f"library: refused {chosen}", "broken"] == [json.loads(line)["event"] for line in lines[1:3]]


@pytest.mark.parametrize("style", ["text", "json"])
def test_what_is_no_text_or_no_number_of_json_does_not_cost_the_line(configured: Configure, style: str) -> None:
    """The name of a file that is no UTF-8 has half of a surrogate pair, and a model's error may quote it."""
    stream = configured(style=style)

    logs.info("model found", path="caf\udce9", size=1 << 64)
    logging.getLogger("library").warning("no caf\udce9")
    logs.error("step failed", FileNotFoundError("caf\udce9"))

    lines = stream.getvalue().splitlines()
    assert [Level.INFO, Level.WARNING, Level.ERROR] == [level for line in lines if (level := level_of_line(line))]
    assert 3 == stream.getvalue().count(r"\udce9")
    assert str(1 << 64) in lines[0]


def test_the_lines_of_a_text_traceback_are_indented_below_their_event(configured: Configure) -> None:
    stream = configured()

    try:
        raise ValueError("broken")
    except ValueError as failure:
        logs.error("step failed", exc=failure)

    first, *rest = stream.getvalue().splitlines()
    assert "ERROR   step failed" in first
    assert rest
    assert all(line.startswith("    ") for line in rest)


def test_a_disabled_level_writes_nothing_and_never_looks_at_its_fields(configured: Configure) -> None:
    class Untouchable:
        def __str__(self) -> str:
            raise AssertionError("a disabled event's field was turned into text")

    stream = configured("warning")

    logs.info("quiet", value=Untouchable())
    logs.debug("quiet", value=Untouchable())

    assert stream.getvalue() == ""
    assert not logs.enabled(Level.INFO)
    assert logs.enabled(Level.WARNING)


def test_an_error_that_comes_again_is_written_at_growing_intervals_with_a_count(
    configured: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100_000))
    monkeypatch.setattr("shared.process.logs.Repeats", lambda: Repeats(lambda: next(clock) / 5))
    stream = configured()

    for _ in range(5 * 62):
        logs.error("redis out of reach", loop="watch", exc=OSError("refused"))

    lines = [line for line in stream.getvalue().splitlines() if "ERROR" in line]
    # Five a second for 62 seconds: at once, and after 2, 6, 14, 30 and 62 s.
    assert ["", "9", "19", "39", "79"] == [line.partition(" repeated=")[2] for line in lines]


def test_of_a_line_that_is_remembered_its_text_is_not_kept(configured: Configure) -> None:
    """The text of a model's error may be megabytes, and another one each time."""
    stream = configured()
    tracemalloc.start()
    try:
        for number in range(64):
            logs.error("batch failed", exc=ValueError(f"{number} {'x' * (1 << 20)}"))
            stream.seek(0)
            stream.truncate()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert kept < 8 << 20


def test_what_differs_in_a_field_is_no_repeat_and_infos_are_never_held_back(configured: Configure) -> None:
    stream = configured()

    for model in ("a", "b"):
        logs.warning("model not loaded", model=model)
        logs.info("model loaded")

    assert 4 == len(stream.getvalue().splitlines())


def test_what_differs_in_its_amounts_alone_is_a_repeat(configured: Configure) -> None:
    stream = configured()

    for given in (5, 6, 7):
        logs.warning("memory is short, calls are ended", calls=given, waiting_bytes=given << 20)
        logs.error("calls failed", what="a" if given == 5 else "b", calls=given)

    assert 3 == len(stream.getvalue().splitlines())


def test_levels_that_are_chosen_at_run_time_leave_repeats_held_back(configured: Configure) -> None:
    stream = configured()
    logs.choose([Level.WARNING])

    for _ in range(3):
        logs.warning("lease renewal delayed")
        logs.error("not chosen")

    assert 1 == len(stream.getvalue().splitlines())


def test_records_and_warnings_of_libraries_come_out_in_the_same_form(configured: Configure) -> None:
    stream = configured(name="executor-1")

    logging.getLogger("hypercorn.error").info("Running on ...")
    logging.getLogger("hypercorn.error").error("port %d\nin use", 80)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)

    first, second = stream.getvalue().splitlines()
    assert first.endswith("ERROR   hypercorn.error: port 80 in use name=executor-1")
    assert "py.warnings" in second


class MuteError(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_record_that_cannot_be_written_does_no_harm_to_whoever_logs_it(
    configured: Configure, style: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As everywhere in Python: a model, or a library, that logs with wrong arguments goes on."""
    stream, library = configured(style=style), logging.getLogger("library")

    library.error("%d ports in use", "three")
    library.error("failed", exc_info=MuteError())
    library.error("goes on")

    assert ["library: failed", "library: goes on"] == re.findall("library: (?:failed|goes on)", stream.getvalue())
    assert "MuteError" in stream.getvalue()
    assert "'three'" in capsys.readouterr().err


@pytest.mark.parametrize("style", ["text", "json"])
@pytest.mark.parametrize("level", list(Level))
def test_the_level_of_a_line_reads_back(configured: Configure, style: str, level: Level) -> None:
    stream = configured("debug", style)

    logs.log(level, "something happened", key="value")

    assert level_of_line(stream.getvalue()) is level


@pytest.mark.parametrize(
    "line", ["", "Traceback (most recent call last):", "    raise ValueError", "{broken", "1 ERROR x"]
)
def test_lines_that_this_module_did_not_write_have_no_level(line: str) -> None:
    assert level_of_line(line) is None


@pytest.mark.usefixtures("configured")
def test_code_that_closes_standard_error_does_not_end_the_log(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", open(2, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - as Python opens it
    logs.configure("info", "text")
    sys.stderr.close()
    kept = os.dup(2)
    os.close(2)
    try:
        logs.info("goes on")
    finally:
        os.dup2(kept, 2)
        os.close(kept)

    assert "goes on" in capfd.readouterr().err


def test_code_that_configures_logging_for_itself_does_not_end_the_log(
    configured: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As models do, and the libraries that they import."""
    stream = configured()
    logging.basicConfig(force=True)
    monkeypatch.setattr(logs.LOGGER, "disabled", True)  # as `dictConfig` does with those that there are
    try:
        logging.disable(logging.CRITICAL)
        logs.info("goes on", where="here")
    finally:
        logging.disable(logging.NOTSET)

    assert re.search("INFO +goes on where=here", stream.getvalue())


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A pipe in the place of standard error, into which not a byte more fits; its reader's end."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write, b"." * PIECE_BYTES)
    os.set_blocking(write, True)
    monkeypatch.setattr(sys, "stderr", open(2, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - as Python opens it
    kept = os.dup(2)
    os.dup2(write, 2)
    os.close(write)
    logs.configure("info", "text")
    try:
        yield read
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(read)


def emptied(read: int) -> bytes:
    return os.read(read, 1 << 20)


@pytest.mark.usefixtures("configured")
@pytest.mark.timeout(20)  # without the bound it waits for ever
def test_nobody_waits_for_a_reader_who_does_not_read_the_log(unread: int) -> None:
    """Ctrl-S in a terminal, or a collector that hangs: a service that stood still would lose its leases."""
    for number in range(100):
        logs.info("unread", number=number)
    emptied(unread)
    logs.info("read again")

    lost, read_again = emptied(unread).decode().splitlines()
    assert "WARNING log lines lost lines=100" in lost
    assert "read again" in read_again


@pytest.mark.usefixtures("configured")
@pytest.mark.timeout(20)
def test_a_long_line_whose_reader_stops_ends_before_the_next_line(unread: int) -> None:
    os.read(unread, PIECE_BYTES)
    logs.info("long", text="x" * 3 * PIECE_BYTES)
    emptied(unread)
    logs.info("read again")

    end, lost, read_again = emptied(unread).decode().splitlines()
    assert "" == end
    assert "log lines lost lines=1" in lost
    assert "read again" in read_again
