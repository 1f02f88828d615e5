"""The containers of the chart, started by Docker as its pods say: command, variables, user, files, and what is closed.

No cluster is there; what is between the pods (Services, volumes, rights) is Docker's.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.kubernetes.chart import objects
from tests.e2e.compose_mesh import ComposeMesh, DockerError, docker, wait_for
from tests.mesh.model_repository import SAMPLES

pytest.importorskip("helm_python", reason="there is no wheel of Helm for this machine")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

WORKLOADS = {"Deployment", "StatefulSet"}
ASK = """
import json, sys, urllib.request
body = json.loads(sys.argv[2])
request = urllib.request.Request(sys.argv[1], json.dumps(body).encode() if body else None)
print(urllib.request.urlopen(request, timeout=30).read().decode() or "null")
"""
STEP = {
    "inputs": [{"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [7]}],
    "parameters": {"sequence_id": 1, "sequence_start": True, "sequence_end": True},
}


class Pods:
    """Pods of the chart on a network of their own, by the names of their workloads."""

    def __init__(self, folder: Path) -> None:
        self.network = f"seqmesh-pods-{secrets.token_hex(4)}"
        found = objects({"console": {"enabled": True}})
        self.workloads = {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] in WORKLOADS}
        password = secrets.token_hex(16)
        self._secrets = {
            "url": f"redis://:{password}@seqmesh-redis:6379/0",
            "password": password,
            "token": secrets.token_hex(16),
        }
        self._folder = folder

    def spec(self, workload: str) -> dict[str, Any]:
        """A workload's pod."""
        return self.workloads[workload]["template"]["spec"]

    def container(self, workload: str) -> dict[str, Any]:
        """Its only container."""
        return self.spec(workload)["containers"][0]

    def start(self, workload: str) -> None:
        """Runs its container, under the name of the workload on the network."""
        container, user = self.container(workload), self.spec(workload)["securityContext"]
        image = container["image"].rsplit(":", 1)[0] if workload != "seqmesh-redis" else container["image"]
        words = ["run", "--detach", "--name", self.name(workload), "--network", self.network]
        words += ["--network-alias", workload, "--user", f"{user['runAsUser']}:{user['runAsGroup']}"]
        words += ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true"]
        words += [word for variable in container.get("env", []) for word in ("-e", "{name}={value}".format(**variable))]
        words += [word for mount in container["volumeMounts"] for word in self.mount(workload, mount, user)]
        command = container.get("command", [])
        words += ["--entrypoint", command[0]] if command else []
        docker(*words, image, *command[1:], *container.get("args", []))

    def mount(self, workload: str, mount: dict[str, Any], user: dict[str, Any]) -> tuple[str, str]:
        """One of its volumes, as Docker takes it."""
        path, name = mount["mountPath"], mount["name"]
        if not mount.get("readOnly"):
            return "--tmpfs", f"{path}:uid={user['runAsUser']},mode=700"
        if name == "models":
            return "-v", f"{SAMPLES}:{path}:ro"
        (volume,) = [one for one in self.spec(workload)["volumes"] if one["name"] == name]
        folder = self._folder / f"{workload}-{name}"
        folder.mkdir()
        for item in volume["secret"]["items"]:
            (folder / item["path"]).write_text(self._secrets[item["key"]])
        return "-v", f"{folder}:{path}:ro"

    def name(self, workload: str) -> str:
        """The name of its container."""
        return f"{self.network}-{workload}"

    def run(self, workload: str, *command: str) -> str:
        """What a command in it prints. Raises DockerError where it fails."""
        return docker("exec", self.name(workload), *command)

    def passes(self, workload: str, probe: str) -> bool:
        """Whether a probe succeeds now."""
        said = self.container(workload)[f"{probe}Probe"]
        ports = {port["name"]: port["containerPort"] for port in self.container(workload).get("ports", [])}
        try:
            if "exec" in said:
                self.run(workload, *said["exec"]["command"])
            elif "httpGet" in said:
                asked = said["httpGet"]
                self.run(
                    workload, "python", "-c", ASK, f"http://127.0.0.1:{ports[asked['port']]}{asked['path']}", "null"
                )
            else:
                connect = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])))"
                self.run(workload, "python", "-c", connect, str(ports[said["tcpSocket"]["port"]]))
        except DockerError:
            return False
        return True

    def logs(self) -> list[tuple[str, str]]:
        """What all of them have said."""
        return [(workload, docker("logs", "--tail", "20", self.name(workload))) for workload in self.workloads]


@pytest.fixture
def pods(project: ComposeMesh, tmp_path: Path) -> Iterator[Pods]:
    """`project` has built the images."""
    made = Pods(tmp_path)
    # Others must be able to read the Secrets and the models: the containers' users are not ours.
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    docker("network", "create", made.network)
    try:
        yield made
    finally:
        for name in docker("ps", "-aq", "--filter", f"network={made.network}").split():
            docker("rm", "-fv", name)
        docker("network", "rm", made.network)


def test_the_containers_of_the_chart_become_ready_serve_and_end_by_themselves(pods: Pods) -> None:
    for workload in pods.workloads:
        pods.start(workload)
    for workload in pods.workloads:
        for probe in ("startup", "readiness", "liveness"):
            wait_for(lambda w=workload, p=probe: pods.passes(w, p), f"{workload} passes its {probe} probe")

    url = "http://127.0.0.1:8000/v2/models/running_sum/infer"
    answer = json.loads(pods.run("seqmesh-gateway", "python", "-c", ASK, url, json.dumps(STEP)))
    assert [7] == answer["outputs"][0]["data"]

    docker("stop", pods.name("seqmesh-redis"))
    for workload in ("seqmesh-scheduler", "seqmesh-executor"):
        assert pods.passes(workload, "liveness"), "nothing is started again because Redis is away"
        assert not pods.passes(workload, "readiness")
    docker("start", pods.name("seqmesh-redis"))
    for workload in pods.workloads:
        wait_for(lambda w=workload: pods.passes(w, "readiness"), f"{workload} is ready again")

    pods.run("seqmesh-gateway", *pods.container("seqmesh-gateway")["lifecycle"]["preStop"]["exec"]["command"])
    for workload in ("seqmesh-gateway", "seqmesh-executor", "seqmesh-scheduler", "seqmesh-console", "seqmesh-redis"):
        docker("stop", "--time", str(pods.spec(workload)["terminationGracePeriodSeconds"]), pods.name(workload))
        code = docker("inspect", "--format", "{{.State.ExitCode}}", pods.name(workload)).strip()
        assert "0" == code, f"{workload} {pods.logs()}"
