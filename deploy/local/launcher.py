"""The launcher of `seqmesh up`: starts a mesh's processes on this machine, watches them, and shows what happens.

`supervision.py` makes the decisions, and `plans.py` says how each process is run. The data directory holds:

    lock             held while a launcher runs, so that two launchers never share a directory
    mesh.json        the mesh's processes and ports (`MeshState`); replaced after every start of a child, removed at
                     the end
    control.sock     by which the console asks for an executor to be killed (`control.py`)
    redis/           the embedded server's data and its socket
    logs/<name>.log  a child's output; its warnings and errors also go to the terminal, but for warnings while
                     the embedded server is away. Cut at 32 MiB, with one old file

Only the owner may read these files. The services themselves run with the user's own umask, so files that a model writes
have the permissions that the user expects.

Children are tied to this process (`tether.py`): if it is killed, they are killed too. The embedded server gets SIGTERM
instead, so that it can write out its file.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from urllib.parse import quote

from deploy.local.child_logs import LogFile
from deploy.local.control import control_served
from deploy.local.data_directory import (
    ChildState,
    LauncherError,
    MeshState,
    keeping_data,
    locked,
    state_path,
    write_state,
)
from deploy.local.embedded import ending_remedy, serves, socket_path, socket_url, vacant_socket
from deploy.local.endings import stop_signals
from deploy.local.plans import (
    ChildPlan,
    ServiceCommand,
    number_of_gateways,
    plan,
    refuse_foreign_host,
    refuse_taken_ports,
    service_command,
)
from deploy.local.private_files import make_private, private_files
from deploy.local.readiness import NO_EXECUTOR, reachable, unreadiness
from deploy.local.settings import UpSettings
from deploy.local.supervision import (
    SERVER,
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
from deploy.local.terminal import say, show
from deploy.local.tether import tethered
from shared.contract.errors import FAILED
from shared.process.addresses import authority
from shared.process.cpu_policy import schedule_by
from shared.process.logs import Level
from shared.process.machine import available_cores
from shared.settings import variable_name
from shared.store.connections.redis_url import url_without_password

PROBE_INTERVAL_S = 0.1
PROGRESS_INTERVAL_S = 5.0
"""Pause between two messages about gateways that are not ready."""
LOG_INTERVAL_S = 0.2
ECHO_S = 1.0
"""For so long after the embedded server is back services may still say that it was away."""
CONTROL_SOCKET = "control.sock"


def refuse_a_model(repository: Path) -> None:
    """Raises LauncherError for the folder of one model in the place of a repository."""
    if (repository / "config.pbtxt").is_file() and not any(repository.glob("*/config.pbtxt")):
        raise LauncherError(f"{repository} is a model: --models names the directory of models that it is in")


def check_repository(repository: Path) -> None:
    """Says what is odd about a model repository. Raises LauncherError if there is none, or it may not be read."""
    try:
        if not repository.is_dir():
            raise LauncherError(f"no model repository at {repository}: --models names a directory of models")
        refuse_a_model(repository)
        if not any(found.is_dir() for found in repository.iterdir()):
            say(f"{repository} holds no model: `seqmesh new NAME --models {shlex.quote(str(repository))}` writes one")
    except OSError as refused:
        raise LauncherError(
            f"the model repository {repository} cannot be read ({refused.strerror}): let this user read and enter it, "
            "or give other --models"
        ) from refused


def up(settings: UpSettings, commands: ServiceCommand = service_command) -> int:
    """Runs a mesh until it is told to stop. Returns the exit code; raises `LauncherError` if it cannot start."""
    for repository in settings.models:
        if isinstance(repository, Path):
            check_repository(repository)
    refuse_foreign_host(settings.host)
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
def server_socket(settings: UpSettings) -> Generator[Path | None]:
    """The socket on which the embedded server is to listen; None if the user gave a URL of Redis."""
    if settings.redis_url:
        yield None
        return
    directory = settings.data_dir / "redis"
    with keeping_data(directory):
        make_private(directory)
    with vacant_socket(directory) as path:
        yield path


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
            [(child.state.name, child.state.service) for child in plans], longest_pause_ms=settings.restart_pause_max_ms
        )
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._log_files = {name: LogFile(Path(child.state.log)) for name, child in self._plans.items()}
        self._exit_code: int | None = None
        self._ready = False
        self._server_away = False
        """Whether the embedded server has ended, or takes no commands. Every service warns of that, again and again."""

    async def run(self) -> int:
        """Starts the children, watches them, and stops them in order. Returns the exit code when all have ended."""
        loop = asyncio.get_running_loop()
        for expected in stop_signals():
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
            state_path(self._settings.data_dir).unlink(missing_ok=True)
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
                try:
                    process = await self._spawn(self._plans[name])
                except OSError as error:  # too many processes or open files, above all: the others run on
                    say(f"{name} cannot be started: {error}")
                    self._events.put_nowait(Exited(name, FAILED))
                    return
                tasks.create_task(self._watch(name, process), name=f"watch {name}")
            case Send(name, with_signal):
                process = self._processes.get(name)
                if process is not None and process.returncode is None:
                    process.send_signal(with_signal)
            case UserNotice(text):
                say(text)
            case ShowLog(name):
                end = self._log_files[name].tail()
                say(f"the end of {self._plans[name].state.log}:\n{end}")
                if self._plans[name].state.service == SERVER and (remedy := ending_remedy(end)):
                    say(remedy)
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
        # A process that a model has forked holds the memory of a service that is gone, and its connections to Redis.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        self._plans[name].state.pid = 0
        self._server_away |= self._plans[name].state.service == SERVER
        self._write_state()
        self._events.put_nowait(Exited(name, code))

    def _write_state(self) -> None:
        state = MeshState(
            pid=os.getpid(),
            host=reachable(self._settings.host),
            redis_url=self._redis_url,
            ready=self._ready,
            children=[child.state for child in self._plans.values()],
            key_prefix=self._settings.key_prefix,
        )
        try:
            write_state(self._settings.data_dir, state)
        except OSError as error:  # a full disk, above all: no reason to end the mesh
            say(f"mesh.json cannot be written ({error.strerror}): what it says of processes is out of date")

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
        url = f"http://{authority(reachable(self._settings.host), consoles[0].http_port)}"
        try:
            await live_view.shown(url, self._settings.console_token)
        except Exception as failure:  # noqa: BLE001 -- a picture must not end the mesh that it shows
            say(f"the live view has ended ({type(failure).__name__}: {failure}); the mesh runs on")

    async def _announce_readiness(self) -> None:
        """Lets the services start when the server takes commands, and announces when every gateway is ready."""
        if self._server is not None:
            # Another process is waited for: nothing here could set an event.
            while not await self._server_answers(self._server):  # noqa: ASYNC110
                await asyncio.sleep(PROBE_INTERVAL_S / 2)
            self._events.put_nowait(MeshEvent.SERVER_READY)
        said_at = time.monotonic()
        while waiting := await self._not_ready():
            if time.monotonic() - said_at >= PROGRESS_INTERVAL_S:
                said_at = time.monotonic()
                doctor = command_line("seqmesh", "doctor", self._settings)
                say(f"waiting for {'; '.join(waiting)}. `{doctor}` says what is not well")
            await asyncio.sleep(PROBE_INTERVAL_S)
        self._ready = True
        self._write_state()
        self._events.put_nowait(MeshEvent.MESH_READY)
        say(self._ready_text())

    async def _server_answers(self, server: Path) -> bool:
        """Whether the embedded server takes commands."""
        pid = self._plans[SERVER].state.pid
        return bool(pid) and await asyncio.to_thread(serves, server, pid)

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
        # Gateways take their settings from this process's environment.
        scheme = "https" if os.environ.get(variable_name("http_server_cert")) else "http"
        addresses = [
            f"{scheme}://{authority(host, gateway.http_port)}, grpc {authority(host, gateway.grpc_port)}"
            for gateway in gateways
        ]
        # Those who share their ports are one place.
        where = "; ".join(dict.fromkeys(addresses))
        if self._settings.share_ports and len(gateways) > 1:
            where += f" ({len(gateways)} gateways)"
        metrics = ", ".join(f"http://{authority(host, g.metrics_port)}/metrics" for g in gateways)
        consoles = [
            f"console http://{authority(host, console.http_port)}/#token={quote(self._settings.console_token, safe='')}"
            for console in self._of("console")
        ]
        places = [where, *consoles, f"metrics {metrics}", f"redis {url_without_password(self._redis_url)}"]
        advice = f"Try, in another terminal: {next_command(Path(sys.argv[0]), self._settings)}"
        if sys.stdout.isatty():
            return "\n    ".join(["ready:", *places, advice])
        return f"ready: {'; '.join(places)}. {advice}"

    async def _relay_logs(self) -> None:
        while True:
            await asyncio.sleep(LOG_INTERVAL_S)
            told = self._relay_new_lines()
            # Asked only when a service complains, and while it is away.
            if self._server is None or not (told or self._server_away):
                continue
            if not await self._server_answers(self._server):
                if not self._server_away:
                    doctor = command_line("seqmesh", "doctor", self._settings)
                    say(f"redis takes no commands; `{doctor}` says more, and so does {self._plans[SERVER].state.log}")
                self._server_away = True
            elif self._server_away:
                say("redis takes commands again; what the services said of its absence is in their logs")
                await asyncio.sleep(ECHO_S)
                self._relay_new_lines()
                self._server_away = False

    def _relay_new_lines(self) -> bool:
        """Shows what children have logged that matters. Returns whether there was anything."""
        least = Level.ERROR if self._server_away else Level.WARNING
        lines = [(name, line) for name, log in self._log_files.items() for line in log.new_important_lines(least)]
        for name, line in lines:
            show(f"{name} | {line}", sys.stderr)
        return bool(lines)


def next_command(program: Path, settings: UpSettings) -> str:
    """A command line that works with any settings: the demo of the sample models, or what says how the given ones are.
    It begins as `program` was called, so that it can be pasted.
    """
    called = min(os.path.relpath(program), str(program), key=len) if program.name == "seqmesh" else "seqmesh"
    return command_line(called, "doctor" if settings.models else "demo", settings)


def command_line(program: str, command: str, settings: UpSettings) -> str:
    """A command of the program that is about the mesh of these settings, as it is typed in the same folder."""
    is_default = settings.data_dir == UpSettings().data_dir
    return shlex.join([program, command, *([] if is_default else ["--data-dir", str(settings.data_dir)])])


def now_ms() -> int:
    """Milliseconds of a monotonic clock."""
    return time.monotonic_ns() // 1_000_000
