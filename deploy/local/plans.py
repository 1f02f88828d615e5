"""How each process of a mesh on this machine is run: command line, environment and ports."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.local.data_directory import ChildState, LauncherError
from deploy.local.embedded import family_of, held_port, on_socket, server_command, socket_url
from deploy.local.private_files import PRIVATE_UMASK
from deploy.local.settings import UpSettings
from shared.contract.limits import GATEWAY_MEMORY_MIN
from shared.process.addresses import PORT_MAX, is_foreign
from shared.process.machine import available_bytes
from shared.settings import MeshSettings, environment_of, variable_name

PORT_STEP = 10
"""Distance between the ports of one gateway and those of the next, where they do not share them."""
BUSY_GATEWAYS = 4
"""As many gateways as keep one Redis busy: a small step takes a gateway two to three times as long as Redis."""
MODULES = {"console": "deploy.console"}
"""Modules of services that are not packages of their own."""
CONSOLE_TOKEN, CONSOLE_CONTROL = variable_name("console_token"), variable_name("console_control")
IN_TIME = {variable_name("exit_timeout_secs"): "10"}
"""A gateway's drain ends before the launcher's patience does (`deploy.local.supervision.GRACE_MS`), so that it still
tells those who wait. Its own default is for orchestrators, which wait for 30 s."""
NO_PORTS: Mapping[str, int] = {}
SAMPLE_MODELS = Path(__file__).parents[1] / "models"


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


def plan(
    settings: UpSettings, commands: ServiceCommand, server: Path | None, umask: int, control: Path
) -> list[ChildPlan]:
    """Every child of the mesh, in the order in which they start.

    server   socket of the embedded server; None if the user gave a URL of Redis
    umask    umask of the services
    control  socket of this launcher, for the console
    """
    redis_url = socket_url(server) if server else settings.redis_url
    agreed = {**inherited_environment(), **environment_of(mesh_settings(settings, redis_url))}
    plans = [server_plan(settings, server)] if server else []

    def add(
        name: str, flags: Sequence[str], ports: Mapping[str, int] = NO_PORTS, environment: Mapping[str, str] = agreed
    ) -> None:
        service = name.partition("-")[0]
        state = child_state(settings.data_dir, service, name, ports)
        plans.append(ChildPlan(state, [*commands(service), *flags], environment, umask))

    for number in range(1, settings.schedulers + 1):
        add(f"scheduler-{number}", [f"--name=scheduler-{number}"])
    models = [f"--models={repository}" for repository in settings.models or (SAMPLE_MODELS,)]
    for number in range(1, settings.executors + 1):
        add(f"executor-{number}", [f"--name=executor-{number}", *models])
    gateways = gateway_ports(settings)
    for number, ports in enumerate(gateways, 1):
        flags = [f"--name=gateway-{number}", f"--host={settings.host}"]
        flags += [f"--{name.replace('_', '-')}={port}" for name, port in ports.items()]
        flags += ["--reuse-port"] if settings.share_ports and len(gateways) > 1 else []
        add(f"gateway-{number}", flags, ports, {**IN_TIME, **shares_of_memory(len(gateways)), **agreed})
    if settings.console:
        port = settings.console_port or held_port(settings.host)
        private = {**agreed, CONSOLE_TOKEN: settings.console_token, CONSOLE_CONTROL: str(control)}
        add("console", [f"--host={settings.host}", f"--console-port={port}"], {"http_port": port}, private)
    return plans


def inherited_environment() -> dict[str, str]:
    """This process's environment without the console's token, which is for the console alone: executors run models'
    code."""
    return {name: value for name, value in os.environ.items() if not name.startswith(CONSOLE_TOKEN)}


def refuse_foreign_host(host: str) -> None:
    """Raises `LauncherError` if nothing here can listen on the host, whatever the port; or for none, which nobody could
    ask for its readiness."""
    if not host:
        raise LauncherError("there is no host to listen on: give another --host, 0.0.0.0 for every interface")
    try:
        socket.create_server((host, 0), family=family_of(host)).close()
    except OSError as refused:
        # What else may be wrong is told of the ports.
        if is_foreign(refused):
            raise LauncherError(f"{host} is no address of this machine: give another --host") from refused


def refuse_taken_ports(host: str, plans: Sequence[ChildPlan]) -> None:
    """Raises `LauncherError` for a port that is to serve two purposes, that there is not, or on which another process
    listens: its answers would pass for ours. Gateways may share a port for one purpose."""
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
            if port > PORT_MAX:
                raise LauncherError(
                    f"the {name} port of {child.name} would be {port}, and the last one is {PORT_MAX}: give a lower "
                    f"--{name}-port"
                )
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
            return [first or held_port(settings.host)] * count
        return [first + PORT_STEP * number if first else held_port(settings.host) for number in range(count)]

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


def child_state(data_dir: Path, service: str, name: str, ports: Mapping[str, int] = NO_PORTS) -> ChildState:
    """The state of a child that does not run yet."""
    return ChildState(name, service, 0, str(data_dir / "logs" / f"{name}.log"), **ports)
