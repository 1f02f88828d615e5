"""Log lines: one per event, `event key=value ...`, as text or as JSON, on standard error.

Built on the standard library's logging, so that libraries' records come out in the same form. An event is a few words
in lower case that never change ("lease lost"); variable parts are fields. A disabled level costs one comparison.
Callers on a hot path that would have to build a field's value ask `enabled` first.

A warning or an error with the same fields is written again only at growing intervals, with the field `repeated`: how
often it came in between. So one cause does not fill a disk, or hide other events.

While nobody reads the log, its lines are lost, and then counted in a line `log lines lost`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Collection
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any, TextIO

import orjson

from shared.process.readers import PIECE_BYTES, Reader
from shared.process.repeats import Repeats


class MeshLogger(logging.Logger):
    """Goes on when the code of a model switches logging off (`logging.disable`), or configures it anew for itself and
    leaves out the loggers that there are.
    """

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name of the class above
        return level >= (self.level or self.getEffectiveLevel())

    def handle(self, record: logging.LogRecord) -> None:
        if self.filter(record):
            self.callHandlers(record)


def _mesh_logger() -> logging.Logger:
    before = logging.getLoggerClass()
    logging.setLoggerClass(MeshLogger)
    try:
        return logging.getLogger("seqmesh")
    finally:
        logging.setLoggerClass(before)


LOGGER = _mesh_logger()
LOUD_LIBRARIES = ("asyncio", "hypercorn", "grpc", "opentelemetry", "urllib3")
"""Libraries whose records below warning do not help an operator."""


class Level(IntEnum):
    """How much an event matters: DEBUG for developers, INFO for the record, WARNING to be looked at, ERROR broken,
    NOTICE written in any case.
    """

    DEBUG = logging.DEBUG
    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR
    NOTICE = logging.CRITICAL + 10


logging.addLevelName(Level.NOTICE, Level.NOTICE.name)


def enabled(level: Level) -> bool:
    """Whether `log` would write an event of this level."""
    return LOGGER.isEnabledFor(level)


def log(level: Level, event: str, exc: BaseException | None = None, /, **fields: object) -> None:
    """Writes one event.

    exc     its traceback follows (text: indented lines; JSON: the field `exception`)
    fields  written in the order given; values are turned into text only when the level is enabled
    """
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, event, exc_info=exc, extra={"fields": fields})


def debug(event: str, /, **fields: object) -> None:
    if LOGGER.isEnabledFor(Level.DEBUG):
        LOGGER.log(Level.DEBUG, event, extra={"fields": fields})


def info(event: str, /, **fields: object) -> None:
    log(Level.INFO, event, None, **fields)


def warning(event: str, /, exc: BaseException | None = None, **fields: object) -> None:
    log(Level.WARNING, event, exc, **fields)


def error(event: str, /, exc: BaseException | None = None, **fields: object) -> None:
    log(Level.ERROR, event, exc, **fields)


def notice(event: str, /, **fields: object) -> None:
    """Writes an event whatever levels are chosen, above all the change of the levels itself."""
    log(Level.NOTICE, event, None, **fields)


def configure(level: str, style: str, *, stream: TextIO | None = None, **bound: object) -> None:
    """Sends every record of this process to `stream` (standard error); called once, before anything is logged.

    level  debug, info, warning or error
    style  text or json
    bound  fields of every line, for instance the process's name
    """
    handler = logging.StreamHandler(stream or StandardError())
    handler.setFormatter(JsonLines(bound) if style == "json" else TextLines(bound))
    handler.addFilter(WithoutRepeats())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    # Its own, because a model may replace the root's (`logging.basicConfig(force=True)`).
    LOGGER.handlers[:] = [handler]
    LOGGER.propagate = False
    for library in LOUD_LIBRARIES:
        logging.getLogger(library).setLevel(logging.WARNING)
    LOGGER.setLevel(Level[level.upper()])
    logging.captureWarnings(capture=True)


class StandardError:
    """Standard error as it is now. Neither `sys.stderr` nor its descriptor: a model that closes one of them would end
    the log, and a connection that gets the same number would get the lines. And no file of Python's: that has a lock,
    which a process that a model forks may inherit from a thread that writes, and would wait for it for ever.
    """

    def __init__(self) -> None:
        self._descriptor = os.dup(2)
        self._encoding = sys.stderr.encoding
        self._reader = Reader(self._descriptor)
        self._lost = 0
        self._cut = False

    def write(self, text: str) -> None:
        """Writes a line. It is lost, or its end is, if nobody reads."""
        line = rest = text.encode(self._encoding, "backslashreplace")
        while rest and self._reader.is_reading():
            if self._lost:
                self._tell_of_lost()
            else:
                rest = rest[os.write(self._descriptor, rest[:PIECE_BYTES]) :]
        self._lost += bool(rest)
        self._cut |= 0 < len(rest) < len(line)

    def _tell_of_lost(self) -> None:
        if self._cut:
            os.write(self._descriptor, b"\n")
        lost, self._lost, self._cut = self._lost, 0, False
        warning("log lines lost", lines=lost, cause="nobody read the log")


def choose(levels: Collection[Level]) -> None:
    """From now on writes only events of these levels; warnings and errors of libraries too."""
    chosen = frozenset(int(level) for level in levels)
    LOGGER.setLevel(min(chosen, default=logging.CRITICAL))
    ours = [handler for handler in LOGGER.handlers if isinstance(handler.formatter, Lines)]
    for handler in ours:
        handler.filters[:] = [
            lambda record: record.levelno in chosen or record.levelno > Level.ERROR,
            *(each for each in handler.filters if isinstance(each, WithoutRepeats)),
        ]


AMOUNTS = frozenset(("calls", "connections", "waiting_bytes", "unread_bytes"))
"""Fields that say how much it was this time: lines that differ in nothing else are repeats. Without memory a gateway
writes twenty such lines a second."""


class WithoutRepeats(logging.Filter):
    """Lets a warning or an error pass if it is new; a repeated one only at intervals, with the number of those that
    were suppressed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repeats = Repeats()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < Level.WARNING:
            return True
        cause = record.exc_info[1] if record.exc_info else None
        try:
            about = [(name, str(value)) for name, value in fields_of(record).items() if name not in AMOUNTS]
            said = (record.name, record.levelno, event_of(record), str(about), f"{type(cause)} {cause}")
        except Exception:  # noqa: BLE001 - a library's or a model's, with wrong arguments: the handler tells of it
            # Raised from here, it would fail whoever logs: `logging` expects no filter to raise.
            return True
        # Not the texts: a model's error may hold megabytes, and hundreds of lines are remembered.
        suppressed = self._repeats.suppressed(hash(said))
        if suppressed:
            vars(record)["fields"] = {**fields_of(record), "repeated": suppressed}
        return suppressed is not None


class Lines(logging.Formatter):
    """bound: fields of every line"""

    def __init__(self, bound: dict[str, object]) -> None:
        super().__init__()
        self._bound = bound


class TextLines(Lines):
    """`2026-01-31T12:00:00.123Z WARNING lease lost executor=a1 shard=3`, tracebacks indented below."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, or more when there is a traceback."""
        fields = {**self._bound, **fields_of(record)}
        words = [timestamp(record), f"{record.levelname:<7}", as_seen(event_of(record))]
        line = " ".join([*words, *(f"{name}={text_value(value)}" for name, value in fields.items())])
        if record.exc_info and record.exc_info[0] is not None:
            parts = self.formatException(record.exc_info).splitlines()
            line += "\n" + "\n".join("    " + as_seen(part) for part in parts)
        return line


class JsonLines(Lines):
    """One JSON object per line: time, level, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Line ends within a text are escaped, so that one record is one line."""
        entry: dict[str, object] = {
            "time": timestamp(record),
            "level": record.levelname.lower(),
            "event": event_of(record),
            **self._bound,
            **fields_of(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            entry["exception"] = self.formatException(record.exc_info)
        try:
            line = orjson.dumps(entry, default=str, option=orjson.OPT_NON_STR_KEYS)
        except TypeError:
            # An integer beyond 64 bits, or half of a surrogate pair, as in the name of a file that is no UTF-8.
            line = orjson.dumps(
                {name: str(value).encode(errors="backslashreplace").decode() for name, value in entry.items()}
            )
        return as_seen(line.decode())


def timestamp(record: logging.LogRecord) -> str:
    """The time of a line in UTC, ISO 8601 with milliseconds."""
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{int(record.msecs):03d}Z"


def event_of(record: logging.LogRecord) -> str:
    """The event; a library's message on one line, with the library's name."""
    message = " ".join(record.getMessage().split())
    return message if record.name == LOGGER.name else f"{record.name}: {message}"


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that `log` was given; empty for a library's record."""
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def text_value(value: object) -> str:
    """The value as it is, or in quotes if it would not read back as one value."""
    text = str(value)
    if text and text.isprintable() and not any(character in ' ="' for character in text):
        return text
    return as_seen(json.dumps(text, ensure_ascii=False))


def as_seen(text: str) -> str:
    """The text with JSON's escapes in the place of what is not seen. A line has ids and names that clients have chosen,
    and a terminal may obey some of their characters, or show others in another order (U+009B, U+202E).
    """
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() else json.dumps(one)[1:-1] for one in text])


def level_of_line(line: str) -> Level | None:
    """The level of a line that this module wrote, in either form; None for anything else (a traceback, a print).
    Reads what `TextLines.format` and `JsonLines.format` write: all three change together.
    """
    if line.startswith("{"):
        try:
            named = str(orjson.loads(line).get("level", ""))
        except orjson.JSONDecodeError:
            return None
    else:
        words = line.split(maxsplit=2)
        named = words[1] if len(words) > 1 and words[0].endswith("Z") else ""
    return Level.__members__.get(named.upper())
