"""The trace settings of Triton's trace extension, of the mesh and of single models. Pure. (triton-spec 5.8)

Tracing here is OpenTelemetry's, so `trace_mode` is "opentelemetry", and the environment decides where traces go. The
unit of `trace_rate` is a trace: one in so many sequences, each as a whole, or one in so many requests of no sequence.
`trace_count` counts requests, as in Triton.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from shared.contract.errors import Code, RequestError
from shared.contract.ids import UINT64_DIGITS
from shared.traces.context import ALWAYS, Sampler

OFF, TIMESTAMPS, TENSORS = "OFF", "TIMESTAMPS", "TENSORS"
LEVELS = (OFF, TIMESTAMPS, TENSORS)
"""TENSORS is recorded as TIMESTAMPS: a span has no place for a tensor."""
MODE = "opentelemetry"
UNLIMITED = -1
UINT32_MAX = (1 << 32) - 1
INT32_MAX = (1 << 31) - 1
NUMBERS = ("trace_rate", "trace_count", "log_frequency")
NAMES = ("trace_level", *NUMBERS)
TRACE_FILE_REFUSAL = "trace file location can not be updated through network protocol"
NO_EXPORTER = (
    "Attempting to set invalid trace setting :no exporter is given (start the services with "
    "OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_TRACES_EXPORTER)"
)
LEADING_NUMBER = re.compile(r"\s*([+-]?)0*([0-9]+)")


class TraceSettings(msgspec.Struct, frozen=True):
    """The trace settings of one scope.

    trace_rate     one trace in so many
    trace_count    requests still to be traced, -1 for all
    log_frequency  only kept: it has no meaning without a trace file
    """

    trace_level: tuple[str, ...] = (OFF,)
    trace_rate: int = 1000
    trace_count: int = UNLIMITED
    log_frequency: int = 0

    @property
    def on(self) -> bool:
        """Whether anything is to be traced."""
        return self.trace_level != (OFF,) and self.trace_rate > 0 and self.trace_count != 0

    @property
    def bound(self) -> int:
        return ALWAYS // self.trace_rate if self.trace_rate else 0

    def texts(self) -> dict[str, list[str]]:
        """Every setting as the protocols show it, in Triton's order."""
        return {
            "trace_level": list(self.trace_level),
            "trace_rate": [str(self.trace_rate)],
            "trace_count": [str(self.trace_count)],
            "log_frequency": [str(self.log_frequency)],
            "trace_file": [""],
            "trace_mode": [MODE],
        }


Overrides = Mapping[str, tuple[str, ...] | int]
"""Settings that were given for a scope; the others are those of the next wider scope."""


def of_sampler(sampler: Sampler, *, exporting: bool) -> TraceSettings:
    """The settings by the environment of the processes, before any change."""
    if not exporting or sampler.bound == 0:
        return TraceSettings()
    return TraceSettings((TIMESTAMPS,), max(1, round(ALWAYS / sampler.bound)))


def overridden(settings: TraceSettings, overrides: Overrides) -> TraceSettings:
    """The settings of a narrower scope."""
    return msgspec.structs.replace(settings, **overrides)


def parse(given: Mapping[str, list[str] | None], *, exporting: bool) -> dict[str, tuple[str, ...] | int | None]:
    """The changes that a request asks for; None takes a setting back. Unknown names are ignored, as in Triton.

    given      texts as they came; None or [] takes a setting back
    exporting  whether the mesh can send traces anywhere
    raises     RequestError with Triton's words
    """
    if "trace_file" in given:
        raise RequestError(TRACE_FILE_REFUSAL, Code.UNSUPPORTED)
    changes: dict[str, tuple[str, ...] | int | None] = {}
    if "trace_level" in given:
        changes["trace_level"] = _level(given["trace_level"])
    for name in NUMBERS:
        if name in given:
            changes[name] = _number(name, given[name])
    if not exporting and changes.get("trace_level") not in (None, (OFF,)):
        raise RequestError(NO_EXPORTER)
    return changes


def _level(words: list[str] | None) -> tuple[str, ...] | None:
    if not words:
        return None
    if OFF in words and len(words) > 1:
        raise RequestError("Expect only one trace level 'OFF' is specified")
    known = tuple(dict.fromkeys(word for word in words if word in LEVELS))
    return known or (OFF,)


def _number(name: str, words: list[str] | None) -> int | None:
    if not words:
        return None
    if len(words) > 1:
        raise RequestError(f"expect only 1 value for '{name}'")
    match = LEADING_NUMBER.match(words[0])
    if match is None:
        raise RequestError(f"Unable to parse '{name}', got: {words[0]}")
    # A longer one is out of any range, however long it is; Python reads no number of thousands of digits.
    number = int(match[1] + match[2][: UINT64_DIGITS + 1])
    if name == "trace_count":
        if number < UNLIMITED:
            raise RequestError(f"Unable to parse '{name}'. Expecting value >= -1, got: {number}")
        low, high = UNLIMITED, INT32_MAX
    else:
        low, high = 0, UINT32_MAX
    if not low <= number <= high:
        raise RequestError(f"Unable to parse '{name}', value is out of range [ {low}, {high} ], got: {words[0]}")
    return number
