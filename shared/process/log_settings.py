"""The log settings of Triton's logging extension: what they are, and what a change may say. Pure. (triton-spec 5.8)"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shared.contract.errors import Code, RequestError
from shared.process.logs import Level

LOG_FILE_REFUSAL = "log file location can not be updated through network protocol"
FORMATS = ("default", "ISO8601")
VERBOSE_LEVEL_MAX = (1 << 32) - 1
"""The largest that the gRPC extension can say."""


class LogSettings(msgspec.Struct, frozen=True):
    """Which lines are written, under Triton's names and in Triton's order.

    log_verbose_level  above 0: lines for developers too
    log_format         kept and returned for the clients' sake: a mesh's lines begin with an ISO 8601 time in either
                       case
    """

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = "default"

    def levels(self) -> frozenset[Level]:
        """The levels whose lines are written."""
        chosen = {Level.INFO: self.log_info, Level.WARNING: self.log_warning, Level.ERROR: self.log_error}
        chosen[Level.DEBUG] = self.log_verbose_level > 0
        return frozenset(level for level, written in chosen.items() if written)


Changes = Mapping[str, bool | int | str]


def of_level(level: Level) -> LogSettings:
    """The settings of a process that was started with a log level."""
    return LogSettings(
        log_info=level <= Level.INFO, log_warning=level <= Level.WARNING, log_verbose_level=int(level <= Level.DEBUG)
    )


def check(changes: Changes) -> None:
    """Refuses the changes that Triton refuses; the protocol has checked the types. Raises RequestError."""
    if "log_file" in changes:
        raise RequestError(LOG_FILE_REFUSAL, Code.UNSUPPORTED)
    chosen = changes.get("log_format", FORMATS[0])
    if chosen not in FORMATS:
        raise RequestError(f"invalid argument for log_format, got: {chosen}")
    level = changes.get("log_verbose_level", 0)
    if isinstance(level, int) and level > VERBOSE_LEVEL_MAX:
        raise RequestError(f"invalid argument for log_verbose_level, got: {level}")
