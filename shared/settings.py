"""Settings: frozen dataclasses, each field with meaning, unit and default; and how a command line is made from them.

A field `http_port` is the flag `--http-port` and the environment variable `SEQMESH_HTTP_PORT`. The flag wins over the
variable, the variable over the default. A variable that begins with SEQMESH_ and belongs to no service is refused, so
that a misspelt setting is an error and not a silent default. The same name means the same thing in every service.

Settings are read once, at the start of a process, and passed down. No other code reads the environment (except OTEL_*,
which the OpenTelemetry SDK reads).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import socket
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, cast

import click
from click.core import ParameterSource

from shared.contract.ids import UINT64_DIGITS
from shared.contract.locations import ModelLocation, is_utf8, parse_location, split_locations
from shared.process.cpu_policy import CpuPolicy
from shared.statistics.metrics_config import MetricsConfig, parse_metrics_config
from shared.store.connections.redis_url import RedisUrlError, has_password, parse_redis_url
from shared.store.keyspace import DEFAULT_PREFIX, SHARDS_MAX

ENVIRONMENT_PREFIX = "SEQMESH_"
ENTRY_POINTS = "seqmesh.settings"
"""Each program of the project names its settings class here, so that one program knows another's variables: they often
share one environment file, and services may not import each other."""
FILE_SUFFIX = "_FILE"
"""SEQMESH_REDIS_URL_FILE names a file that holds the value of SEQMESH_REDIS_URL; every secret has such a variable. The
variable itself wins.
"""
LIST_SEPARATOR = ","
NAME_BYTES_MAX = 128
"""Of a process: it is a part of its line in `shared.store.company`, and of its id in keys and entries."""
BYTE_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class SettingsClass(Protocol):
    """Any dataclass whose fields were made by `setting`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


T = TypeVar("T", bound=SettingsClass)


@dataclass(frozen=True, slots=True)
class Meaning:
    """The help text of a setting, and the checks of its value.

    unit      "ms", "s", "bytes" (may be written 64MiB), "url" (its password is never shown), "prefix" (of keys), ...
    group     heading in the help; "": that of the field before it
    minimum   smallest value allowed (numbers); None: no bound
    secret    never printed: not in repr, not in errors, not in the log (of a URL: its password)
    required  there is no default; the command line or the environment must give a value
    """

    help: str
    unit: str = ""
    group: str = ""
    minimum: float | None = None
    maximum: float | None = None
    secret: bool = False
    required: bool = False


def setting(
    default: Any,
    *,
    help: str,
    unit: str = "",
    group: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
    required: bool = False,
) -> Any:
    """A field of a settings class. The arguments are those of `Meaning`; `default` is the value if none is given."""
    meaning = Meaning(help, unit, group, minimum, maximum, secret, required)
    return dataclasses.field(default=default, repr=not secret, metadata={"meaning": meaning})


def lease_setting() -> Any:
    """The field `lease_ms` of each service that holds a lease."""
    return setting(
        3000,
        help="Lease of this process: others take over when it has not been renewed for so long.",
        unit="ms",
        group="Leases",
        minimum=100,
        maximum=3_600_000,
    )


Count = int | Literal["auto"]
"""A number, or as many as this machine is good for."""
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSettings:
    """Settings that all services of one mesh must share."""

    redis_url: str = setting(
        "redis://127.0.0.1:6379/0",
        help="Redis or Valkey of the mesh: redis://[user:password@]host[:port][/db], rediss:// over TLS, or "
        "unix:///path. Behind Sentinels: redis+sentinel://host,host,.../service[/db]; what is for the Sentinels alone "
        "follows as ?sentinel_username=, &sentinel_password=, &sentinel_tls=yes. A Redis Cluster: "
        "redis+cluster://host,host,... A user and a password stand before the first host of these, too "
        "(docs/guides/redis.md).",
        unit="url",
        group="Mesh",
        secret=True,
    )
    redis_timeout_ms: int = setting(
        10_000,
        help="How long Redis may take to answer. After that the connection counts as lost, and another one is made. "
        "Redis has one second more for each MiB that is sent.",
        unit="ms",
        minimum=100,
    )
    key_prefix: str = setting(
        DEFAULT_PREFIX,
        help="Beginning of every key, so that meshes can share a Redis. It has no braces.",
        unit="prefix",
    )
    shards: int = setting(
        0,
        help="Shards of the keys (Cluster hash tags). 0: as many as the mesh has in Redis; a new mesh begins with one, "
        "the fastest on one server, and on a Redis Cluster with one on each node. Any other number than the mesh's is "
        "refused; `seqmesh reshard` changes it.",
        minimum=0,
        maximum=SHARDS_MAX,
    )
    tombstone_seconds: int = setting(
        60,
        help="How long the mesh remembers a sequence that is over, so that late steps hear why.",
        unit="s",
        minimum=1,
        maximum=365 * 24 * 3600,
    )
    log_level: LogLevel = setting("info", help="Least level that is logged.", group="Log")
    log_format: LogFormat = setting("text", help="One line per event, as text or as JSON.")
    cpu_policy: CpuPolicy = setting(
        "batch",
        help="How the kernel shares processors. batch: a process that is woken waits until a processor is free, so "
        "steps travel in larger groups (Linux' SCHED_BATCH). normal: as the process was started; for processors on "
        "which other programs compute all the time.",
        group="Service",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonSettings(MeshSettings):
    name: str = setting(
        "",
        help="Name of this process in logs, metrics and ids; by default the service's and the host's. It has "
        f"{NAME_BYTES_MAX} bytes at most, all of them printable.",
        group="Mesh",
        unit="process",
    )

    def name_of(self, service: str) -> str:
        """The process's name: as given, else `<service>-<host>`."""
        return self.name or f"{service}-{socket.gethostname()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings(CommonSettings):
    """Settings of services that count what models do, or show it."""

    metrics_config: tuple[str, ...] = setting(
        (),
        help="Triton's option of that name: '<setting>=<value>'. Settings: counter_latencies, summary_latencies, "
        "histogram_latencies (true or false), summary_quantiles (<quantile>:<error>,...). May be repeated. Executors "
        "count what gateways show, so give it to both.",
        group="Metrics",
    )

    def __post_init__(self) -> None:
        """Raises click.UsageError for an item that is not understood."""
        try:
            _ = self.metrics
        except ValueError as error:
            raise click.UsageError(f"--metrics-config: {error}") from error

    @property
    def metrics(self) -> MetricsConfig:
        return parse_metrics_config(self.metrics_config)


class ByteCount(click.ParamType[int]):
    """A number of bytes: 1048576, 1024KiB, 1MiB."""

    name = "size"

    def __init__(self, minimum: float | None) -> None:
        self.minimum = minimum or 0

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip()
        digits = text.rstrip("BbKkMmGgIi ")
        factor = BYTE_UNITS.get(text[len(digits) :].strip().upper())
        if factor is None or not digits.isdecimal() or len(digits) > UINT64_DIGITS:
            self.fail(f"{text!r} is not a size; write for instance 67108864 or 64MiB", param, ctx)
        if int(digits) * factor < self.minimum:
            self.fail(f"{text!r} is less than {int(self.minimum)} bytes", param, ctx)
        return int(digits) * factor


class NumberRange(click.FloatRange):
    """A number within bounds. `nan` is in no bounds, though it compares as if."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number


class AutoCount(click.ParamType[Any]):
    """A number within bounds, or the word `auto`, which is kept as it is."""

    name = "count"

    def __init__(self, minimum: float | None, maximum: float | None) -> None:
        self._number = click.IntRange(whole(minimum), whole(maximum))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Count:
        if value == "auto":
            return "auto"
        try:
            return self._number.convert(value, param, ctx)
        except click.BadParameter as refused:
            self.fail(f"{refused.message.rstrip('.')}, nor the word auto.", param, ctx)


class NamedPath(click.Path):
    """A path that is not empty: that would be the working directory, which nobody has named."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


class Repository(click.ParamType[ModelLocation]):
    """A model repository: a folder, or a URL of an object store."""

    name = "repository"

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        """Several of them, separated by ':', which URLs contain too."""
        return split_locations(rv)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ModelLocation:
        try:
            location = value if isinstance(value, ModelLocation) else parse_location(str(value))
        except ValueError as wrong:
            self.fail(str(wrong), param, ctx)
        if isinstance(location, Path) and not is_utf8(location):
            self.fail(f"the path of {location} is no UTF-8: rename what is not", param, ctx)
        return location


class CommaList(click.ParamType[str]):
    """A text that may be given several times, or once with commas (in the environment)."""

    name = "text"
    envvar_list_splitter = LIST_SEPARATOR

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value).strip()


class RedisUrl(click.ParamType[str]):
    """A URL whose password stays out of every message."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The URL as given. "" is allowed where the default is ""."""
        url = str(value)
        try:
            if url or (param is not None and param.default):
                parse_redis_url(url)
        except RedisUrlError as wrong:
            self.fail(str(wrong), param, ctx)
        if (
            param is not None
            and ctx is not None
            and ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
            and has_password(url)
        ):
            said = f"everybody on this machine can read a command line, with its password: set {param.envvar} instead"
            click.echo(f"warning: {said}", err=True)
        return url


class KeyPrefix(click.ParamType[str]):
    """A beginning of keys. Braces would take the place of the hash tag, by which the scripts know a key's shard."""

    name = "prefix"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if "{" in value or "}" in value:
            self.fail(f"{value!r} has a brace", param, ctx)
        return value


class ProcessName(click.ParamType[str]):
    """A name that fits into what a process tells of itself: others would leave out, and forget, what is longer."""

    name = "process"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value.isprintable() or len(value.encode()) > NAME_BYTES_MAX:
            self.fail(f"a name has {NAME_BYTES_MAX} bytes at most, all of them printable", param, ctx)
        return value


def settings_fields(settings_type: type[SettingsClass]) -> dict[str, Meaning]:
    """A settings class's fields in the order of their declaration, each with its meaning. One that names no group has
    that of the field before it; the first ones are of the service.
    """
    found: dict[str, Meaning] = {}
    group = "Service"
    for field in dataclasses.fields(settings_type):
        meaning: Meaning = field.metadata["meaning"]
        group = meaning.group or group
        found[field.name] = dataclasses.replace(meaning, group=group)
    return found


def variable_name(field: str) -> str:
    return ENVIRONMENT_PREFIX + field.upper()


def options(settings_type: type[SettingsClass]) -> list[SettingOption]:
    types = typing.get_type_hints(settings_type)
    defaults = {field.name: field.default for field in dataclasses.fields(settings_type)}
    return [
        option(name, types[name], defaults[name], meaning) for name, meaning in settings_fields(settings_type).items()
    ]


class SettingOption(click.Option):
    """A click option with its heading in the help."""

    group: str = "Service"
    secret: bool = False

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """The variable's value; for a secret also the content of the file that its `_FILE` variable names."""
        value = super().resolve_envvar_value(ctx)
        path = os.environ.get(f"{self.envvar}{FILE_SUFFIX}")
        if value is not None or not path or not self.secret:
            return value
        try:
            content = Path(path).read_text().strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no text"
            raise click.UsageError(f"{self.envvar}{FILE_SUFFIX}: cannot read {path} ({reason})", ctx) from None
        if not content:
            # Click would take the default, as if there were no secret.
            raise click.UsageError(f"{self.envvar}{FILE_SUFFIX}: {path} is empty", ctx)
        return content


def option(name: str, kind: Any, default: Any, meaning: Meaning) -> SettingOption:
    """The click option of one field, from its type: bool, number, choice, path, text, model
    repository, or a tuple of paths, texts or repositories.
    """
    flag = "--" + name.replace("_", "-")
    multiple = typing.get_origin(kind) is tuple
    made = SettingOption(
        [f"{flag}/--no-{flag[2:]}" if kind is bool else flag, name],
        type=None if kind is bool else parameter_type(kind, meaning),
        multiple=multiple,
        default=None if meaning.required else size_text(default) if meaning.unit == "bytes" else default,
        required=meaning.required,
        envvar=variable_name(name),
        show_envvar=True,
        show_default=not meaning.required and default not in ("", (), None),
        help=meaning.help,
        metavar=meaning.unit.upper() or {int: "N", float: "X", Count: "N|auto"}.get(kind),
    )
    made.group = meaning.group
    made.secret = meaning.secret
    return made


def parameter_type(kind: Any, meaning: Meaning) -> click.ParamType[Any]:
    """How one value of a field is read from text."""
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return CommaList() if members[0] is str else parameter_type(members[0], meaning)
    if kind == ModelLocation:
        return Repository()
    if kind == Count:
        return AutoCount(meaning.minimum, meaning.maximum)
    if origin is Literal:
        return click.Choice(members)
    if kind is int and meaning.unit == "bytes":
        return ByteCount(meaning.minimum)
    if kind is int:
        return click.IntRange(whole(meaning.minimum), whole(meaning.maximum))
    if kind is float:
        return NumberRange(meaning.minimum, meaning.maximum)
    if kind is Path:
        return NamedPath(path_type=Path)
    if kind is str:
        return {"url": RedisUrl(), "prefix": KeyPrefix(), "process": ProcessName()}.get(meaning.unit, click.STRING)
    raise TypeError(f"no command line form for a setting of type {kind!r}")


def whole(bound: float | None) -> int | None:
    """A bound of an integer setting, which is declared as a float."""
    return None if bound is None else int(bound)


def size_text(size_bytes: int) -> str:
    """A number of bytes as people write it: 64MiB, or the plain number."""
    return f"{size_bytes >> 20}MiB" if size_bytes and size_bytes % (1 << 20) == 0 else str(size_bytes)


def variables_of(option: SettingOption) -> list[str]:
    return [str(option.envvar), *([f"{option.envvar}{FILE_SUFFIX}"] if option.secret else [])]


class SettingsCommand(click.Command):
    """A command whose options are the fields of a settings class; the help lists them by subject."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuses unknown variables before anything else. Takes a switch as Triton's command line has it, too:
        `--allow-client-shm=true`.
        """
        if "--help" not in args:
            own = {name for one in self.params if isinstance(one, SettingOption) for name in variables_of(one)}
            refuse_unknown_variables(os.environ, own, ctx)
        switches = {one.opts[0]: one for one in self.params if isinstance(one, SettingOption) and one.is_flag}
        return super().parse_args(ctx, [_switch(word, switches, ctx) for word in args])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes one section per group, in the order in which the groups first appear.

        Arguments stand in the line of usage, and the text says what they are.
        """
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and not isinstance(parameter, click.Argument):
                group = parameter.group if isinstance(parameter, SettingOption) else "Options"
                sections.setdefault(group, []).append(record)
        for group, records in sections.items():
            with formatter.section(group):
                formatter.write_dl(records)


def _switch(word: str, switches: Mapping[str, SettingOption], ctx: click.Context) -> str:
    """A word of the command line, which click's pair of flags stands for if it gives a switch a value."""
    flag, equals, value = word.partition("=")
    switch = switches.get(flag) if equals else None
    if switch is None:
        return word
    return flag if click.BOOL.convert(value, switch, ctx) else switch.secondary_opts[0]


def refuse_unknown_variables(
    environment: Mapping[str, str], own: set[str], context: click.Context | None = None
) -> None:
    """Raises click.UsageError for a SEQMESH_ variable that neither this program nor another program of the project has.

    The other programs' classes are loaded only if `own` does not know every variable.
    """
    unknown = sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX) and name not in own)
    if not unknown:
        return
    known = own | installed_variables()
    wrong = [name for name in unknown if name not in known]
    if wrong:
        raise click.UsageError("; ".join(complaint(name, known) for name in wrong), context)


def complaint(name: str, known: Iterable[str]) -> str:
    # The prefix that all of them share makes any two alike.
    nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
    return f"unknown setting {name} in the environment" + (f"; did you mean {nearest[0]}?" if nearest else "")


def installed_variables() -> set[str]:
    """Variables of every settings class that an installed program has announced (entry points `seqmesh.settings`)."""
    classes = [entry.load() for entry in entry_points(group=ENTRY_POINTS)]
    return {name for settings_type in classes for one in options(settings_type) for name in variables_of(one)}


def settings_command(
    settings_type: type[T],
    run: Callable[[T], Any],
    *,
    name: str,
    help: str,
    epilog: str = "",
    kind: type[SettingsCommand] = SettingsCommand,
) -> click.Command:
    """A click command that reads `settings_type` and calls `run` with it.

    help    first line: what the command does
    epilog  text after the options
    kind    class of the command
    """

    def callback(**values: Any) -> Any:
        return run(settings_type(**values))

    return kind(
        name,
        params=[*options(settings_type)],
        callback=callback,
        help=help,
        epilog=epilog,
        context_settings={"max_content_width": 110},
    )


def parse_settings(
    settings_type: type[T],
    arguments: Sequence[str],
    *,
    program: str,
    help: str,
    spared: Collection[str] = (),
) -> T:
    """A service's settings from its command line and the environment.

    spared  required settings without which this program can do

    Exits as command lines do: with the help and code 0, or with a message and code 2.
    """
    found: list[T] = []
    command = settings_command(settings_type, found.append, name=program, help=help)
    for one in command.params:
        one.required &= one.name not in spared
    try:
        code = command.main(list(arguments), prog_name=program, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    if not found:
        sys.exit(code)
    return found[0]


def environment_of(settings: SettingsClass) -> dict[str, str]:
    """The environment variables that give a child process these settings. Lists are joined as they are split."""
    variables: dict[str, str] = {}
    for field in dataclasses.fields(settings):
        text = variable_text(getattr(settings, field.name))
        if text:
            variables[variable_name(field.name)] = text
    return variables


def variable_text(value: Any) -> str:
    """A setting as the environment carries it; "" for none."""
    if not isinstance(value, tuple):
        return "" if value is None else str(value)
    members = cast("tuple[object, ...]", value)
    separator = os.pathsep if any(isinstance(member, ModelLocation) for member in members) else LIST_SEPARATOR
    return separator.join(map(str, members))
