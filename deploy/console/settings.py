"""What a console can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from deploy.local.settings import TOKEN_LENGTH_MIN, check_console_token
from deploy.operate.settings import OperatorSettings
from shared.origins import parse_origin
from shared.settings import LogFormat, LogLevel, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSettings(OperatorSettings):
    """The settings of one console, beside those by which it finds its mesh."""

    host: str = setting("127.0.0.1", help="Address to listen on; 0.0.0.0 for every interface.", group="Console")
    console_port: int = setting(8003, help="Port of the page; 0 picks a free one.", minimum=0, maximum=65535)
    console_token: str = setting(
        "",
        help="Who gives it may act: end, pause and move sequences, drain and kill executors. On an address beyond "
        f"loopback it is asked for before anything is shown, too. At least {TOKEN_LENGTH_MIN} characters; by default "
        "one is made at random, and logged with the console's address.",
        secret=True,
    )
    console_allowed_origin: tuple[str, ...] = setting(
        (), help="Origin under which a proxy shows the page, for instance https://mesh.example.com. May be repeated."
    )
    console_control: str = setting(
        "", help="Socket of the launcher that kills executors on request; `seqmesh up` gives it to its console."
    )
    log_level: LogLevel = setting("info", help="Least level that is logged.", group="Log")
    log_format: LogFormat = setting("text", help="One line per event, as text or as JSON.")

    def __post_init__(self) -> None:
        """Raises click.UsageError for a token that could be guessed, and for what is no origin."""
        check_console_token(self.console_token)
        try:
            for origin in self.console_allowed_origin:
                parse_origin(origin)
        except ValueError as error:
            raise click.UsageError(f"--console-allowed-origin: {error}") from error

    @property
    def control(self) -> Path | None:
        """The launcher's socket; None without a launcher."""
        return Path(self.console_control) if self.console_control else None
