"""Triton's load tool drives sequences unchanged, over every protocol, and every answer that it got is right. NVIDIA's
Model Analyzer, which calls it, searches configurations on a mesh.

`make perf-analyzer` fetches both and names them in PERF_ANALYZER and MODEL_ANALYZER; without that these tests are left
out.
"""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from benchmarks.servers import BenchmarkMesh, build_models, running_mesh

PERF_ANALYZER = os.environ.get("PERF_ANALYZER", "")
MODEL_ANALYZER = os.environ.get("MODEL_ANALYZER", "")
pytestmark = [
    pytest.mark.skipif(not PERF_ANALYZER, reason="PERF_ANALYZER does not name the tool (make perf-analyzer)"),
    # The tool stops where its window ends, in the middle of sequences.
    pytest.mark.leaves_sequences,
]
RUN_TIMEOUT_S = 300
FIRST_MIN = 1000
"""The first summand of a sequence is at least this and no other one is: so a sequence's beginning shows in the data."""
WAYS = {
    "http": ["-i", "http"],
    "http, asynchronous": ["-i", "http", "--async"],
    "http, json": ["-i", "http", "--input-tensor-format=json", "--output-tensor-format=json"],
    "grpc": ["-i", "grpc"],
    "grpc, asynchronous": ["-i", "grpc", "--async"],
    "stream": ["-i", "grpc", "--streaming"],
    "stream, few ids in turn": ["-i", "grpc", "--streaming", "--sequence-id-range", "7:31"],
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BenchmarkMesh]:
    repository = tmp_path_factory.mktemp("models")
    build_models(repository)
    with running_mesh(repository, executors=2, settings={"SEQMESH_ALLOW_CLIENT_SHM": "true"}) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sequences of different lengths."""
    chance = random.Random(3)
    streams = [
        [
            {"INPUT": {"content": [chance.randint(FIRST_MIN, 2 * FIRST_MIN) if step == 0 else chance.randint(1, 99)]}}
            for step in range(chance.randint(4, 24))
        ]
        for _ in range(16)
    ]
    path = tmp_path_factory.mktemp("data") / "data.json"
    path.write_text(json.dumps({"data": streams}))
    return path


@pytest.mark.timeout(RUN_TIMEOUT_S + 120)
@pytest.mark.parametrize("way", WAYS)
def test_every_answer_to_perf_analyzer_is_the_running_sum(
    mesh: BenchmarkMesh, data: Path, way: str, tmp_path: Path
) -> None:
    profile = tmp_path / "profile.json"
    address = mesh.address.http.removeprefix("http://") if "http" in way else mesh.address.grpc
    command = [PERF_ANALYZER, "-m", "accumulate", "-u", address, *WAYS[way], f"--input-data={data}"]
    command += ["--concurrency-range=8", "--measurement-mode=count_windows", "--measurement-request-count=200"]
    command += ["--max-trials=3", "--stability-percentage=999", f"--profile-export-file={profile}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    requests = requests_of(profile)
    assert len(requests) >= 200
    assert wrong_sums(requests) == []


@pytest.mark.timeout(RUN_TIMEOUT_S + 120)
@pytest.mark.parametrize("way", ["http", "grpc, asynchronous", "stream"])
def test_perf_analyzer_places_inputs_and_outputs_in_shared_memory(
    mesh: BenchmarkMesh, data: Path, way: str, tmp_path: Path
) -> None:
    """The tool records nothing of outputs in shared memory; a request that is refused fails its run."""
    profile = tmp_path / "profile.json"
    address = mesh.address.http.removeprefix("http://") if "http" in way else mesh.address.grpc
    command = [PERF_ANALYZER, "-m", "accumulate", "-u", address, *WAYS[way], f"--input-data={data}"]
    command += ["--shared-memory=system", "--output-shared-memory-size=1024", "--concurrency-range=8"]
    command += ["--measurement-mode=count_windows", "--measurement-request-count=200"]
    command += ["--max-trials=3", "--stability-percentage=999", f"--profile-export-file={profile}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert len(requests_of(profile)) >= 200


@pytest.mark.skipif(not MODEL_ANALYZER, reason="MODEL_ANALYZER does not name the tool (make perf-analyzer)")
@pytest.mark.timeout(RUN_TIMEOUT_S + 120)
def test_model_analyzer_searches_configurations_in_remote_mode(tmp_path: Path) -> None:
    """It loads each configuration on request, has it measured, and unloads it."""
    repository = tmp_path / "models"
    build_models(repository)
    config = tmp_path / "analyzer.yaml"
    config.write_text("profile_models: {accumulate: {cpu_only: true}}\n")
    command = [MODEL_ANALYZER, "profile", "-f", str(config), "-m", str(repository), "--triton-launch-mode=remote"]
    command += ["--perf-analyzer-path", PERF_ANALYZER, "--run-config-search-mode=brute", "-c", "2", "-v"]
    command += ["--run-config-search-max-instance-count=2", "--run-config-search-max-model-batch-size=2"]
    command += ["--output-model-repository-path", str(tmp_path / "tried"), "-e", str(tmp_path / "report")]
    command += ["-s", str(tmp_path / "checkpoints")]
    explicit = {"SEQMESH_MODEL_CONTROL_MODE": "explicit", "SEQMESH_LOAD_MODEL": "accumulate"}
    with running_mesh(repository, executors=1, settings=explicit) as mesh:
        http = mesh.address.http.removeprefix("http://")
        command += ["--triton-http-endpoint", http, "--triton-grpc-endpoint", mesh.address.grpc]
        command += ["--triton-metrics-url", f"{mesh.address.http}/metrics"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "load failed" not in done.stdout + done.stderr
    with (tmp_path / "report" / "results" / "metrics-model-inference.csv").open() as file:
        rows = list(csv.DictReader(file))
    tried = {(row["Instance Group"], row["Max Batch Size"]) for row in rows}
    assert tried >= {("1:CPU", "1"), ("1:CPU", "2"), ("2:CPU", "1"), ("2:CPU", "2")}
    assert all(float(row["Throughput (infer/sec)"]) > 0 for row in rows)


def requests_of(profile: Path) -> list[dict[str, Any]]:
    """What the tool recorded. It writes the bytes of a binary tensor as characters."""
    document = json.loads(profile.read_bytes().decode("latin-1"), strict=False)
    return document["experiments"][0]["requests"]


def wrong_sums(requests: list[dict[str, Any]]) -> list[str]:
    """Answers that are not the sum of their sequence so far. What a sequence said before the recording began is not
    known, so judging starts with the first beginning of a sequence id. When the tool stops, it ends what is under way
    with one more request, whose summand is the first one again: the last request of an id is not taken for a START."""
    wrong: list[str] = []
    ordered = sorted(requests, key=lambda request: (request["sequence_id"], request["timestamp"]))
    for sequence, group in groupby(ordered, key=lambda request: request["sequence_id"]):
        steps = [step for step in group if step["response_outputs"]]
        total: int | None = None
        for step in steps:
            summand = number(step["request_inputs"]["INPUT"])
            answered = number(step["response_outputs"][0]["OUTPUT"])
            if summand >= FIRST_MIN and (step is not steps[-1] or answered == summand):
                total = 0
            if total is None:
                continue
            total += summand
            if answered != total:
                wrong.append(f"sequence {sequence}: {answered} instead of {total}")
    return wrong


def number(content: int | str) -> int:
    """An INT32, as a number or as its bytes."""
    return content if isinstance(content, int) else int.from_bytes(content.encode("latin-1"), sys.byteorder)
