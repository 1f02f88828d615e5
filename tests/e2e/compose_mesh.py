"""The mesh of compose.yaml for a test: a Compose project of its own, on free ports, driven as an operator drives it.

Everything goes through the `docker` command; every call has a time limit. What the mesh holds is read from its Redis by
the redis-cli of that container, so that no port of it need be published.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shared.contract.messages import ExecutorRegistration
from shared.store.keyspace import Keyspace

ROOT = Path(__file__).resolve().parents[2]
COMMAND_TIMEOUT_S = 180
BUILD_TIMEOUT_S = 1500
"""Of all images from nothing: torch is large, and with CUDA it is gigabytes."""
HEALTHY_TIMEOUT_S = 240
"""Until a whole mesh is healthy: executors import torch, all at once, on a machine that may be small."""
LOG_LINES = 80
SERVICES = ("redis", "scheduler", "executor", "gateway", "console", "collector")

_registration = msgspec.json.Decoder(ExecutorRegistration)


class DockerError(Exception):
    """A docker command failed; the message is what it said."""


def docker(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    given: str | None = None,
    timeout_s: float = COMMAND_TIMEOUT_S,
) -> str:
    """What a docker command prints; of `logs`, on both streams. `given` is its standard input."""
    done = subprocess.run(
        ["docker", *arguments],
        cwd=ROOT,
        env=environment,
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if arguments[0] == "logs" else subprocess.PIPE,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        raise DockerError(f"docker {' '.join(arguments)}: code {done.returncode}\n{(done.stderr or '')[-4000:]}")
    return done.stdout


class ComposeMesh:
    """One project. Containers are named by their ids, as `docker` takes them.

    variables  of compose.yaml: ports, models
    """

    def __init__(self, project: str, variables: Mapping[str, str]) -> None:
        self.project = project
        self.keys = Keyspace()
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("SEQMESH_")}
        self._environment |= variables

    def compose(self, *arguments: str, given: str | None = None, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """What a `docker compose` command of this project prints."""
        return docker(
            *("compose", "--ansi", "never", "--profile", "console", "-p", self.project),
            *arguments,
            environment=self._environment,
            given=given,
            timeout_s=timeout_s,
        )

    def build(self) -> None:
        """Builds the images."""
        self.compose("build", timeout_s=BUILD_TIMEOUT_S)

    def up(self, *, gateway: int = 1, scheduler: int = 1, executor: int = 2) -> None:
        """Starts what does not run, with so many of each, and returns when every health check succeeds."""
        replicas = {"gateway": gateway, "scheduler": scheduler, "executor": executor}
        self.compose(
            *("up", "--detach", "--no-build", "--no-recreate"),
            *(word for service, count in replicas.items() for word in ("--scale", f"{service}={count}")),
            *("--wait", "--wait-timeout", str(HEALTHY_TIMEOUT_S)),
            timeout_s=HEALTHY_TIMEOUT_S + COMMAND_TIMEOUT_S,
        )

    def down(self) -> None:
        """Removes everything, the volume too."""
        self.compose("down", "--volumes", "--remove-orphans")

    # -- containers -------------------------------------------------------------------------------------------------

    def containers(self, service: str) -> list[str]:
        """The containers of a service, stopped ones too."""
        return self.compose("ps", "--all", "--quiet", service).split()

    def container(self, service: str) -> str:
        """The only container of a service."""
        (found,) = self.containers(service)
        return found

    def inspect(self, container: str) -> dict[str, Any]:
        """All that Docker knows of a container."""
        return json.loads(docker("inspect", container))[0]

    def is_healthy(self, container: str) -> bool:
        """Whether it runs and its health check has succeeded."""
        state = self.inspect(container)["State"]
        return state["Running"] and state["Health"]["Status"] == "healthy"

    def host_of(self, container: str) -> str:
        """The container's host name, as its service sees it."""
        return self.inspect(container)["Config"]["Hostname"]

    def kill_process(self, container: str) -> None:
        """Kills a container's process from outside, as the kernel does when memory runs out.

        `docker kill` would be a wish of the operator, after which Docker does not start the container again.
        """
        pid = self.inspect(container)["State"]["Pid"]
        try:
            os.kill(pid, signal.SIGKILL)
        except PermissionError:
            subprocess.run(["sudo", "-n", "kill", "-9", str(pid)], check=True, timeout=COMMAND_TIMEOUT_S)

    def python(self, service: str, program: str) -> Any:
        """Runs a Python program inside a service's container; what it prints, read as JSON."""
        return json.loads(self.compose("exec", "-T", service, "python", "-c", program))

    def address(self, port: int, container: str = "") -> str:
        """host:port where a port of a container, by default of the only gateway, is published."""
        return docker("port", container or self.container("gateway"), str(port)).strip()

    def logs(self, service: str, *, lines: int | None = None) -> str:
        """What a service has printed, one container after the other; `lines`: the last of each container."""
        limit = [] if lines is None else ["--tail", str(lines)]
        return "".join(docker("logs", *limit, container) for container in self.containers(service))

    def diagnosis(self) -> list[tuple[str, str]]:
        """What a person wants to see when a test has failed: (title, text) each."""
        sections = [("containers", self.compose("ps", "--all"))]
        return sections + [(f"log of {service}", self.logs(service, lines=LOG_LINES)) for service in SERVICES[:-1]]

    # -- what the mesh holds ----------------------------------------------------------------------------------------

    def redis(self, *commands: str) -> list[str]:
        """The answers to Redis commands, each a word or a number on one line."""
        client = "REDISCLI_AUTH=$(cut -d ' ' -f 2 /secret/redis.conf) exec redis-cli"
        return self.compose("exec", "-T", "redis", "sh", "-c", client, given="\n".join(commands)).splitlines()

    def executors(self) -> list[ExecutorRegistration]:
        """The executors that have registered and not gone, dead ones too."""
        return [_registration.decode(line) for line in self.redis(f"HVALS {self.keys.executors}") if line]

    def sequences_of(self, model: str) -> dict[str, int]:
        """How many sequences of a model each executor owns, by container host name."""
        owned: dict[str, int] = {}
        for executor in self.executors():
            keys = [self.keys.owned(shard, executor.executor, model) for shard in self.keys.shards]
            count = sum(map(int, self.redis(*(f"SCARD {key}" for key in keys))))
            owned[executor.host] = owned.get(executor.host, 0) + count
        return owned

    def wait_until_healthy(self, container: str) -> None:
        """Returns when a container that was started again is healthy."""
        wait_for(lambda: self.is_healthy(container), f"container {container[:12]} is healthy")


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Returns when the condition is true; fails, saying what did not happen. Looks rarely: a look starts programs."""
    deadline = time.monotonic() + HEALTHY_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {HEALTHY_TIMEOUT_S} s: {what}"
        time.sleep(1.0)
