"""The programs in examples/ work as they stand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from deploy.local.embedded import free_port
from tests.client.grpc_serving import served
from tests.mesh.running_mesh import RunningMesh

pb: Any = service_pb2
services: Any = service_pb2_grpc
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TIMEOUT_S = 100
STEPS = 12


def test_many_streams_have_right_answers(victim: RunningMesh) -> None:
    finished = subprocess.run(
        [sys.executable, EXAMPLES / "many_streams.py", "--gateway", victim.grpc(), "--sequences", "8", "--steps", "10"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert 0 == finished.returncode, finished.stderr
    assert "80 steps of 8 sequences" in finished.stdout
    assert "0 wrong answers" in finished.stdout


def test_a_client_survives_the_kill_of_executors_and_of_a_gateway(victim: RunningMesh) -> None:
    program = [sys.executable, EXAMPLES / "survive.py", "--steps", str(STEPS), "--pause", "0.1"]
    gateways = ["--gateway", victim.grpc(0), "--gateway", victim.grpc(1)]
    with subprocess.Popen([*program, *gateways], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        lines: list[str] = []
        for line in client.stdout:
            lines.append(line.rsplit(" ", 1)[1].strip())
            if len(lines) == 3:
                victim.kill("executor-1")
                victim.kill("gateway-1")
            if len(lines) == 6:
                victim.kill("executor-2")
        code = client.wait(TIMEOUT_S)

    assert 0 == code
    assert [str(sum(range(1, number + 1))) for number in range(1, STEPS + 1)] == lines


class Drained(services.GRPCInferenceServiceServicer):
    """A gateway of a mesh in which nobody serves the model."""

    def ModelStreamInfer(self, requests: Any, _: Any) -> Iterator[Any]:  # noqa: N802  as in the service
        for _request in requests:
            yield pb.ModelStreamInferResponse(error_message="no executor serves model 'running_sum'")


def refused(program: str, *arguments: str) -> str:
    """The one line with which a program ends that cannot play its part."""
    finished = subprocess.run(
        [sys.executable, EXAMPLES / program, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert 1 == finished.returncode
    (said,) = finished.stderr.splitlines()
    return said


def test_programs_that_are_refused_end_with_one_line() -> None:
    with served(Drained()) as gateway:
        said = refused("many_streams.py", "--sequences", "8", "--gateway", gateway)

        other = refused("survive.py", "--gateway", gateway)

    assert said.startswith("no executor serves model 'running_sum'. `make run` starts a mesh")
    assert "UNIMPLEMENTED" in other
    assert "`make run` starts a mesh" in other


@pytest.mark.parametrize("program", [["survive.py", "--patience", "0.1"], ["many_streams.py", "--sequences", "8"]])
def test_without_a_mesh_they_end_with_one_line_that_names_the_remedy(program: list[str]) -> None:
    said = refused(*program, "--gateway", f"127.0.0.1:{free_port()}")

    assert "`make run` starts a mesh" in said
