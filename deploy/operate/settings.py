"""What the operators' commands have in common: the settings by which they find the running mesh."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click

from shared.settings import SettingsCommand, options, setting
from shared.store.keyspace import DEFAULT_PREFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """Which mesh a command of the operator works on."""

    redis_url: str = setting(
        "",
        help="Redis or Valkey of the mesh; by default that of the mesh which `seqmesh up` runs in --data-dir.",
        unit="url",
        group="Mesh",
        secret=True,
    )
    key_prefix: str = setting(
        "",
        help=f"Beginning of the mesh's keys; by default that of --data-dir, or {DEFAULT_PREFIX} with --redis-url.",
        unit="prefix",
    )
    data_dir: Path = setting(Path(".seqmesh"), help="Where `seqmesh up` keeps its data.", unit="dir")


JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON, one object a line.")


def operator_command(
    name: str, help: str, run: Callable[..., Coroutine[Any, Any, None]], params: Sequence[click.Parameter]
) -> click.Command:
    """A command with these parameters and the settings.

    run  carries it out: called with the settings, and the parameters by name. Raises click.ClickException with the
         remedy
    """
    settings = options(OperatorSettings)

    def callback(**values: Any) -> None:
        check_is_text(values)
        found = OperatorSettings(**{str(one.name): values.pop(str(one.name)) for one in settings})
        try:
            asyncio.run(run(found, **values))
        except click.UsageError:
            raise
        except click.ClickException as error:
            # A class of its own may have an exit code of its own.
            raise type(error)(escaped(error.message)) from error

    return SettingsCommand(
        name, params=[*params, *settings], callback=callback, help=help, context_settings={"max_content_width": 110}
    )


def check_is_text(values: Mapping[str, Any]) -> None:
    """Raises click.UsageError for an argument that is no UTF-8: no model, id or executor is called by other bytes."""
    for value in values.values():
        for text in cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise click.UsageError(f"{text!r} is no UTF-8 text")


def escaped(text: str) -> str:
    """A text with escapes in the place of what a terminal would obey. Errors quote files, names and other programs."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)
