"""The launcher of `seqmesh up`: starts a mesh's processes on this machine, watches them, and shows what happens.

`supervision.py` makes the decisions. This module owns the data directory:

    lock             held while a launcher runs, so that two launchers never share a directory
    mesh.json        the mesh's processes and ports (`MeshState`); replaced after every start of a child, removed at
                     the end
    control.sock     by which the console asks for an executor to be killed (`control.py`)
    redis/           the embedded server's data and its socket
    logs/<name>.log  a child's output; its warnings and errors also go to the terminal. Cut at 32 MiB, with one old file

Only the owner may read these files. The services themselves run with the user's own umask, so files that a model writes
have the permissions that the user expects.

Children are tied to this process (`tether.py`): if it is killed, they are killed too. The embedded server gets SIGTERM
instead, so that it can write out its file.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import click
import msgspec

from deploy.local.control import control_served
from deploy.local.embedded import family_of, free_port, on_socket, server_command, serves, socket_path, socket_url
from deploy.local.private_files import PRIVATE_UMASK, make_private, private_files
from deploy.local.settings import UpSettings
from deploy.local.supervision import (
    Action,
    Event,
    Exited,
    Finish,
    MeshEvent,
    Send,
    ShowLog,
    Start,
    Supervision,
    UserNotice,
)
from deploy.local.tether import tethered
from shared.contract.limits import GATEWAY_MEMORY_MIN
from shared.process.cpu_policy import schedule_by
from shared.process.logs import Level, level_of_line
from shared.process.machine import available_bytes, available_cores
from shared.process.repeats import Repeats
from shared.settings import MeshSettings, environment_of, variable_name
from shared.store.keyspace import DEFAULT_PREFIX
from shared.store.redis_url import url_without_password

PORT_STEP = 10
"""Distance between the ports of one gateway and those of the next, where they do not share them."""
BUSY_GATEWAYS = 4
"""As many gateways as keep one Redis busy: a small step takes a gateway two to three times as long as Redis."""
PROBE_INTERVAL_S = 0.1
PROBE_TIMEOUT_S = 2.0
PROGRESS_INTERVAL_S = 5.0
"""Pause between two messages about gateways that are not ready."""
NO_EXECUTOR = "no executor has loaded its models yet"
"""Why a gateway that answers is not ready."""
LOG_INTERVAL_S = 0.2
LOG_BYTES_MAX = 32 << 20
LOG_TAIL_LINES = 20
CONTROL_SOCKET = "control.sock"
TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
MODULES = {"console": "deploy.console"}
"""Modules of services that are not packages of their own."""
CONSOLE_TOKEN, CONSOLE_CONTROL = variable_name("console_token"), variable_name("console_control")
SAMPLE_MODELS = Path(__file__).parents[1] / "models"


class ChildState(msgspec.Struct):
    """One process of the mesh. Only gateways have ports, and the console has an `http_port`; `pid` is 0 between two
    runs."""

    name: str
    service: str
    pid: int
    log: str
    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0


class MeshState(msgspec.Struct):
    """The content of mesh.json: the mesh that runs in a data directory."""

    pid: int
    host: str
    redis_url: str
    ready: bool
    children: list[ChildState]
    key_prefix: str = DEFAULT_PREFIX


class LauncherError(click.ClickException):
    """The mesh cannot be started; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """How one child is run.

    umask         umask of the child
    death_signal  signal that the child gets when the launcher dies
    """

    state: ChildState
    command: Sequence[str]
    environment: Mapping[str, str]
    umask: int
    death_signal: signal.Signals = signal.SIGKILL


ServiceCommand = Callable[[str], list[str]]
"""From a service's name to the command line that its flags are appended to."""


def service_command(service: str) -> list[str]:
    """Runs an installed service under this interpreter. -P: Python must not import a folder of that name from the
    current directory."""
    return [sys.executable, "-P", "-m", MODULES.get(service, service)]


def check_repository(repository: Path) -> None:
    """Says what is odd about a model repository. Raises LauncherError if there is none."""
    if not repository.is_dir():
        raise LauncherError(f"no model repository at {repository}: --models names a directory of models")
    if (repository / "config.pbtxt").is_file() and not any(repository.glob("*/config.pbtxt")):
        raise LauncherError(f"{repository} is a model: --models names the directory of models that it is in")
    if not any(found.is_dir() for found in repository.iterdir()):
        say(f"{repository} holds no model: `seqmesh new NAME --models {repository}` writes one")


def up(settings: UpSettings, commands: ServiceCommand = service_command) -> int:
    """Runs a mesh until it is told to stop. Returns the exit code; raises `LauncherError` if it cannot start."""
    for repository in settings.models:
        if isinstance(repository, Path):
            check_repository(repository)
    settings = dataclasses.replace(
        settings,
        console_token=settings.console_token or secrets.token_urlsafe(16),
        gateways=number_of_gateways(settings, available_cores()),
    )
    if settings.share_ports and settings.gateways != 1 and sys.platform != "linux":
        raise LauncherError("only on Linux can several gateways share a port: give --no-share-ports")
    with (
        private_files() as umask,
        locked(settings.data_dir),
        server_socket(settings) as server,
        socket_path(settings.data_dir, CONTROL_SOCKET) as control,
    ):
        plans = plan(settings, commands, server, umask, control)
        refuse_taken_ports(settings.host, plans)
        # The embedded server inherits it; the services set it themselves.
        schedule_by(settings.cpu_policy)
        return asyncio.run(Launcher(settings, plans, server, control).run())


@contextmanager
def locked(data_dir: Path) -> Generator[None]:
    """Holds the data directory. Raises `LauncherError` if it cannot be written, or another launcher holds it, or
    another user owns it."""
    try:
        open_to_others = make_private(data_dir)
        opened = (data_dir / "lock").open("a+")
    except OSError as refused:
        raise LauncherError(f"no data can be kept in {data_dir} ({refused}): give another --data-dir") from refused
    if open_to_others:
        say(f"warning: {open_to_others}")
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise LauncherError(
                f"{data_dir} is in use by another launcher (process {lock.read().strip() or 'unknown'}); "
                "stop it, or give another --data-dir"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


@contextmanager
def server_socket(settings: UpSettings) -> Generator[Path | None]:
    """The socket on which the embedded server is to listen; None if the user gave a URL of Redis."""
    if settings.redis_url:
        yield None
        return
    directory = settings.data_dir / "redis"
    make_private(directory)
    with socket_path(directory) as path:
        yield path


def plan(
    settings: UpSettings, commands: ServiceCommand, server: Path | None, umask: int, control: Path
) -> list[ChildPlan]:
    """Every child of the mesh, in the order in which they start.

    server   socket of the embedded server; None if the user gave a URL of Redis
    umask    umask of the services
    control  socket of this launcher, for the console
    """
    plans = [server_plan(settings, server)] if server else []
    redis_url = socket_url(server) if server else settings.redis_url
    environment = {**inherited_environment(), **environment_of(mesh_settings(settings, redis_url))}
    gateways = gateway_ports(settings)
    models = [f"--models={repository}" for repository in settings.models or (SAMPLE_MODELS,)]
    for service, count in (("scheduler", settings.schedulers), ("executor", settings.executors)):
        for number in range(1, count + 1):
            state = child_state(settings.data_dir, service, f"{service}-{number}")
            flags = [f"--name={state.name}", *(models if service == "executor" else [])]
            plans.append(ChildPlan(state, [*commands(service), *flags], environment, umask))
    shares = {**shares_of_memory(len(gateways)), **environment}
    plans.extend(
        gateway_plan(settings, number, ports, commands, shares, umask) for number, ports in enumerate(gateways, 1)
    )
    if settings.console:
        private = {**environment, CONSOLE_TOKEN: settings.console_token, CONSOLE_CONTROL: str(control)}
        plans.append(console_plan(settings, commands, private, umask))
    return plans


def inherited_environment() -> dict[str, str]:
    """This process's environment without the console's token, which is for the console alone: executors run models'
    code."""
    return {name: value for name, value in os.environ.items() if not name.startswith(CONSOLE_TOKEN)}


def refuse_taken_ports(host: str, plans: Sequence[ChildPlan]) -> None:
    """Raises `LauncherError` if a port is to serve two purposes, or another process listens on it: its answers would
    pass for ours. Gateways may share a port for one purpose."""
    users: dict[int, tuple[str, str]] = {}
    for child in (child.state for child in plans):
        ports = {"http": child.http_port, "grpc": child.grpc_port, "metrics": child.metrics_port}
        if child.service == "console":
            ports = {"console": child.http_port}
        for name, port in ports.items():
            if not port:
                continue
            first, user = users.setdefault(port, (name, f"the {name} port of {child.name}"))
            if first != name:
                ours = f"the {name} port of {child.name}"
                raise LauncherError(f"{user} and {ours} are both {port}: give another --{name}-port")
            try:
                socket.create_server((host, port), family=family_of(host)).close()
            except OSError as refused:
                # What stands behind it is Python's, and names the address again.
                reason = str(refused.strerror).partition(" (while")[0]
                raise LauncherError(
                    f"{child.name} cannot listen on {host}:{port} ({reason}): "
                    f"stop what runs there, or give another --{name}-port"
                    + (", or --no-console" if name == "console" else "")
                ) from refused


def mesh_settings(settings: UpSettings, redis_url: str) -> MeshSettings:
    """The settings that all children must share."""
    agreed: dict[str, Any] = {field.name: getattr(settings, field.name) for field in dataclasses.fields(MeshSettings)}
    agreed["redis_url"] = redis_url
    return MeshSettings(**agreed)


def server_plan(settings: UpSettings, listening: Path) -> ChildPlan:
    """The embedded server. It keeps its socket when it is restarted."""
    return ChildPlan(
        child_state(settings.data_dir, "redis", "redis"),
        server_command((settings.data_dir / "redis").resolve(), on_socket(listening), settings.appendfsync),
        inherited_environment(),
        PRIVATE_UMASK,
        death_signal=signal.SIGTERM,
    )


def number_of_gateways(settings: UpSettings, cores: int) -> int:
    """How many gateways run. auto: one for each core that executors and an embedded Redis leave, at least one.

    A scheduler takes a few hundredths of a core, which is not counted.
    """
    if settings.gateways != "auto":
        return settings.gateways
    others = settings.executors + (0 if settings.redis_url else 1)
    return max(1, min(BUSY_GATEWAYS, cores - others))


def gateway_ports(settings: UpSettings) -> list[dict[str, int]]:
    """The ports of each gateway. What they share is the same for all of them, and the metrics' port never is."""
    assert settings.gateways != "auto"

    def ports(first: int, *, are_shared: bool = False) -> list[int]:
        if are_shared:
            return [first or free_port(settings.host)] * count
        return [first + PORT_STEP * number if first else free_port(settings.host) for number in range(count)]

    count = settings.gateways
    http = ports(settings.http_port, are_shared=settings.share_ports)
    grpc = ports(settings.grpc_port, are_shared=settings.share_ports)
    of_each = zip(http, grpc, ports(settings.metrics_port), strict=True)
    return [dict(zip(("http_port", "grpc_port", "metrics_port"), each, strict=True)) for each in of_each]


def shares_of_memory(gateways: int) -> dict[str, str]:
    """The bound of each gateway's memory as a variable: together half of the machine's, which is the default of one."""
    if gateways == 1:
        return {}
    return {variable_name("memory_max"): str(max(GATEWAY_MEMORY_MIN, available_bytes() // 2 // gateways))}


def gateway_plan(
    settings: UpSettings,
    number: int,
    ports: Mapping[str, int],
    commands: ServiceCommand,
    environment: Mapping[str, str],
    umask: int,
) -> ChildPlan:
    """The gateway with that number, counted from 1."""
    state = child_state(settings.data_dir, "gateway", f"gateway-{number}", ports)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ports.items()]
    if settings.share_ports and settings.gateways != 1:
        flags.append("--reuse-port")
    command = [*commands("gateway"), f"--name={state.name}", f"--host={settings.host}", *flags]
    return ChildPlan(state, command, environment, umask)


def console_plan(
    settings: UpSettings, commands: ServiceCommand, environment: Mapping[str, str], umask: int
) -> ChildPlan:
    port = settings.console_port or free_port(settings.host)
    state = child_state(settings.data_dir, "console", "console", {"http_port": port})
    command = [*commands("console"), f"--host={settings.host}", f"--console-port={port}"]
    return ChildPlan(state, command, environment, umask)


def child_state(data_dir: Path, service: str, name: str, ports: Mapping[str, int] | None = None) -> ChildState:
    """The state of a child that does not run yet."""
    return ChildState(name, service, 0, str(data_dir / "logs" / f"{name}.log"), **(ports or {}))


def reachable(host: str) -> str:
    """The address at which a listener on `host` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 -- compared, not bound


class Launcher:
    """Runs the children.

    server   socket of the embedded server; None if the user gave a URL of Redis
    control  socket on which the console is heard
    """

    def __init__(self, settings: UpSettings, plans: Sequence[ChildPlan], server: Path | None, control: Path) -> None:
        self._settings = settings
        self._control = control
        self._server = server
        self._redis_url = socket_url(server) if server else settings.redis_url
        self._plans = {child.state.name: child for child in plans}
        self._supervision = Supervision(
            [(child.state.name, child.state.service) for child in plans],
            longest_pause_ms=settings.restart_pause_max_ms,
        )
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._log_files = {name: LogFile(Path(child.state.log)) for name, child in self._plans.items()}
        self._exit_code: int | None = None
        self._ready = False

    async def run(self) -> int:
        """Starts the children, watches them, and stops them in order. Returns the exit code when all have ended."""
        loop = asyncio.get_running_loop()
        for expected in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(expected, self._events.put_nowait, MeshEvent.STOP_REQUESTED)
        try:
            async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
                if self._settings.console:
                    executors = [name for name, child in self._plans.items() if child.state.service == "executor"]
                    await stack.enter_async_context(control_served(self._control, executors, self._kill))
                logs = tasks.create_task(self._relay_logs(), name="logs")
                progress = tasks.create_task(self._show_progress(), name="progress")
                await self._supervise(tasks, progress)
                logs.cancel()
        finally:
            self._relay_new_lines()
            self._state_path.unlink(missing_ok=True)
        assert self._exit_code is not None
        return self._exit_code

    async def _supervise(self, tasks: asyncio.TaskGroup, progress: asyncio.Task[None]) -> None:
        """Handles events until the end. progress: what shows a mesh that starts or runs; ends when the mesh stops"""
        self._events.put_nowait(MeshEvent.BEGIN)
        while self._exit_code is None:
            event = await self._next_event()
            if event is MeshEvent.STOP_REQUESTED and not self._supervision.stopping:
                say("stopping")
            for action in self._supervision.handle(event, now_ms()):
                await self._perform(action, tasks)
            if self._supervision.stopping:
                progress.cancel()

    async def _next_event(self) -> Event:
        wake_ms = self._supervision.wake_ms()
        if wake_ms is None:
            return await self._events.get()
        try:
            async with asyncio.timeout(max(0, wake_ms - now_ms()) / 1000):
                return await self._events.get()
        except TimeoutError:
            return MeshEvent.TIME_PASSED

    async def _perform(self, action: Action, tasks: asyncio.TaskGroup) -> None:
        match action:
            case Start(name):
                process = await self._spawn(self._plans[name])
                tasks.create_task(self._watch(name, process), name=f"watch {name}")
            case Send(name, with_signal):
                process = self._processes[name]
                if process.returncode is None:
                    process.send_signal(with_signal)
            case UserNotice(text):
                say(text)
            case ShowLog(name):
                say(f"the end of {self._plans[name].state.log}:\n{self._log_files[name].tail()}")
            case Finish(code):
                self._exit_code = code

    async def _spawn(self, child: ChildPlan) -> asyncio.subprocess.Process:
        with self._log_files[child.state.name].open_for_child() as log:
            # Its own session: Ctrl-C on the terminal must reach only the launcher, which then stops the children in
            # order.
            process = await asyncio.create_subprocess_exec(
                *tethered(list(child.command), child.death_signal),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child.environment,
                umask=child.umask,
                start_new_session=True,
            )
        self._processes[child.state.name] = process
        child.state.pid = process.pid
        self._write_state()
        return process

    def _kill(self, name: str) -> str:
        """Kills an executor, as a crash would. Returns why it does not, "" if it does."""
        child, process = self._plans.get(name), self._processes.get(name)
        if child is None or child.state.service != "executor":
            return f"there is no executor '{name}' in this mesh"
        if process is None or process.returncode is not None:
            return f"{name} does not run at the moment"
        say(f"{name} is killed, as the console asks")
        process.kill()
        return ""

    async def _watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        self._plans[name].state.pid = 0
        self._write_state()
        self._events.put_nowait(Exited(name, code))

    @property
    def _state_path(self) -> Path:
        return self._settings.data_dir / "mesh.json"

    def _write_state(self) -> None:
        """Replaces mesh.json atomically. Only its owner may read it, because the URL may hold a password."""
        state = MeshState(
            pid=os.getpid(),
            host=reachable(self._settings.host),
            redis_url=self._redis_url,
            ready=self._ready,
            children=[child.state for child in self._plans.values()],
            key_prefix=self._settings.key_prefix,
        )
        new = self._state_path.with_suffix(".new")
        new.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2))
        new.replace(self._state_path)

    async def _show_progress(self) -> None:
        await self._announce_readiness()
        consoles = self._of("console")
        if not (self._settings.live and consoles and sys.stdout.isatty()):
            return
        # Imported here: a mesh that runs without a terminal needs neither package.
        try:
            live_view = import_module("deploy.local.live_view")
        except ModuleNotFoundError as missing:
            say(f"no live view without {missing.name}: pip install 'seqmesh[local]', or give --no-live")
            return
        url = f"http://{reachable(self._settings.host)}:{consoles[0].http_port}"
        try:
            await live_view.shown(url, self._settings.console_token)
        except Exception as failure:  # noqa: BLE001 -- a picture must not end the mesh that it shows
            say(f"the live view has ended ({type(failure).__name__}: {failure}); the mesh runs on")

    async def _announce_readiness(self) -> None:
        """Lets the services start when the server takes commands, and announces when every gateway is ready."""
        if self._server is not None:
            redis = self._plans["redis"].state
            # Another process is waited for: nothing here could set an event.
            while not (redis.pid and await asyncio.to_thread(serves, self._server, redis.pid)):  # noqa: ASYNC110
                await asyncio.sleep(PROBE_INTERVAL_S / 2)
            self._events.put_nowait(MeshEvent.SERVER_READY)
        said_at = time.monotonic()
        while waiting := await self._not_ready():
            if time.monotonic() - said_at >= PROGRESS_INTERVAL_S:
                said_at = time.monotonic()
                say("waiting for " + "; ".join(waiting))
            await asyncio.sleep(PROBE_INTERVAL_S)
        self._ready = True
        self._write_state()
        self._events.put_nowait(MeshEvent.MESH_READY)
        say(self._ready_text())

    async def _not_ready(self) -> list[str]:
        """Gateways that are not ready, each with the reason and the log that tells more. Each is asked on the port that
        it shares with nobody.
        """
        host, gateways = reachable(self._settings.host), self._of("gateway")
        reasons = await asyncio.gather(*(unreadiness(host, gateway.metrics_port) for gateway in gateways))
        loading = self._of("executor")[0].log
        return [
            f"{gateway.name} ({reason}; {loading if reason == NO_EXECUTOR else gateway.log})"
            for gateway, reason in zip(gateways, reasons, strict=True)
            if reason
        ]

    def _of(self, service: str) -> list[ChildState]:
        return [child.state for child in self._plans.values() if child.state.service == service]

    def _ready_text(self) -> str:
        """Where the mesh is found: one line, which a program may read; on a terminal a line for each place."""
        host, gateways = reachable(self._settings.host), self._of("gateway")
        # Those who share their ports are one place.
        where = "; ".join(dict.fromkeys(f"http://{host}:{g.http_port}, grpc {host}:{g.grpc_port}" for g in gateways))
        if self._settings.share_ports and len(gateways) > 1:
            where += f" ({len(gateways)} gateways)"
        metrics = ", ".join(f"http://{host}:{g.metrics_port}/metrics" for g in gateways)
        consoles = [
            f"console http://{host}:{console.http_port}/#token={self._settings.console_token}"
            for console in self._of("console")
        ]
        places = [where, *consoles, f"metrics {metrics}", f"redis {url_without_password(self._redis_url)}"]
        advice = f"Try, in another terminal: {self._demo_command()}"
        if sys.stdout.isatty():
            return "\n    ".join(["ready:", *places, advice])
        return f"ready: {'; '.join(places)}. {advice}"

    def _demo_command(self) -> str:
        """The command line of the demo, beginning as this program was called, so that it can be pasted."""
        if self._settings.models:
            first, *_ = self._of("gateway")
            return f"curl -X POST http://{reachable(self._settings.host)}:{first.http_port}/v2/repository/index"
        program = Path(sys.argv[0])
        called = os.path.relpath(program) if program.is_absolute() and program.name == "seqmesh" else "seqmesh"
        is_default = self._settings.data_dir == UpSettings().data_dir
        return f"{called} demo" + ("" if is_default else f" --data-dir {self._settings.data_dir}")

    async def _relay_logs(self) -> None:
        while True:
            await asyncio.sleep(LOG_INTERVAL_S)
            self._relay_new_lines()

    def _relay_new_lines(self) -> None:
        for name, log in self._log_files.items():
            for line in log.new_important_lines():
                click.echo(f"{name} | {line}", file=sys.stderr)


class LogFile:
    """A child's log file. The child writes it; the launcher reads it and keeps it short.

    Lines from an earlier launcher's children are kept, and not shown again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen_bytes = path.stat().st_size if path.exists() else 0
        self._important = False
        self._repeats = Repeats()

    def open_for_child(self) -> BinaryIO:
        """The file to hand to a new process."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.path.open("ab")

    def new_important_lines(self) -> list[str]:
        """Warnings and errors since the last call, with the indented lines (tracebacks) that follow them.

        A line that repeats is returned at growing intervals.
        """
        important: list[str] = []
        for line in self._new_lines():
            level = level_of_line(line)
            if level is not None:
                # A process that ends again and again logs the same line each time, but for the time in it.
                said = TIME.sub("", line, count=1)
                self._important = level >= Level.WARNING and self._repeats.suppressed(said) is not None
            elif not line.startswith(" "):
                self._important = False
            if self._important:
                important.append(line)
        return important

    def tail(self) -> str:
        text = self.path.read_text(errors="replace") if self.path.exists() else ""
        return "\n".join("    " + line for line in text.splitlines()[-LOG_TAIL_LINES:]) or "    (empty)"

    def _new_lines(self) -> list[str]:
        """Whole lines since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._seen_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._seen_bytes += len(whole)
        if self._seen_bytes > LOG_BYTES_MAX:
            self._cut()
        return whole.decode(errors="replace").splitlines()

    def _cut(self) -> None:
        """Copies the file to `.1` and empties it in place, because the child has it open for appending.

        Lines that are written between the two calls are lost. In return a child need not reopen its log.
        """
        shutil.copyfile(self.path, self.path.with_suffix(".log.1"))
        os.truncate(self.path, 0)
        self._seen_bytes = 0


async def unreadiness(host: str, port: int) -> str:
    """Why a gateway is not ready, in a few words; "" if it is ready."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(
                    f"GET /v2/health/ready HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n\r\n".encode()
                )
                status = (await reader.readline()).split(maxsplit=2)
            finally:
                writer.close()
    except TimeoutError:
        return "does not answer"
    except OSError:
        return "does not listen yet"
    if status[1:2] == [b"200"]:
        return ""
    return NO_EXECUTOR


def read_state(data_dir: Path) -> MeshState:
    """The state of the mesh that runs in a data directory. Raises `LauncherError` if none runs."""
    path = data_dir / "mesh.json"
    if not path.exists():
        raise LauncherError(f"no mesh runs in {data_dir}: start one with `seqmesh up`, or give its --data-dir")
    try:
        return msgspec.json.decode(path.read_bytes(), type=MeshState)
    except msgspec.MsgspecError as error:
        raise LauncherError(f"{path} cannot be read ({error}): start the mesh again with `seqmesh up`") from error


def now_ms() -> int:
    """Milliseconds of a monotonic clock."""
    return time.monotonic_ns() // 1_000_000


def say(text: str) -> None:
    # With the file named: click has its own way to standard output, past the live view, which stands in its place.
    click.echo(f"seqmesh: {text}", file=sys.stdout)
