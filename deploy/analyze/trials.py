"""Measures settings of a model, each on a mesh of its own with a copy of the model: nothing of one trial reaches the
next, memory least of all.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
from google.protobuf import text_format

from deploy.analyze.inputs import Input, Step
from deploy.analyze.knobs import Config, has_sequences
from deploy.analyze.load import ClosedLoop, LoadPlan
from deploy.analyze.search import Measured
from deploy.local.data_directory import LauncherError, MeshState
from deploy.local.private_mesh import private_mesh
from shared.configuration.parse import parse_json
from shared.process.addresses import authority

PROBLEM_LINES = 6
HTTP_TIMEOUT_S = 30.0
CAUSE = re.compile(r'\bcause=("(?:[^"\\]|\\.)*")')
"""Why a service has ended, as its log has it: a JSON text."""


class TrialMesh:
    """Meshes with one model, a copy of a folder. Raises LauncherError if it cannot be copied.

    workspace  directory for copy, logs and data
    """

    def __init__(self, model: Path, workspace: Path) -> None:
        self._given = model
        self._folder = workspace / "models" / model.name
        self._workspace = workspace
        self._name = model.name
        try:
            shutil.copytree(model, self._folder, ignore=shutil.ignore_patterns("__pycache__"))
        except shutil.Error as error:
            (_, _, cause), *_ = error.args[0]
            raise LauncherError(f"{model} cannot be copied: {cause}") from error

    def describe(self) -> tuple[dict[str, Any], list[Input]]:
        """The given configuration as the mesh completes it, and the model's inputs. Raises LauncherError if the model
        cannot be loaded.
        """
        try:
            with self._running(None) as mesh:
                config = fetch(mesh, self._name, "/config")
                metadata = fetch(mesh, self._name)
        except LauncherError as error:
            raise LauncherError(self._reason(error)) from error
        batched = int(config.get("max_batch_size", 0)) > 0
        return config, [described_input(one, batched=batched) for one in metadata["inputs"]]

    def measure(self, config: Config, sequences: Sequence[Sequence[Step]], plans: Sequence[LoadPlan]) -> list[Measured]:
        """What a configuration gives under each load, one after the other."""
        try:
            with self._running(config) as mesh:

                async def play(plan: LoadPlan) -> Measured:
                    loop = ClosedLoop(mesh.grpc_address, self._name, sequences, is_sequence=has_sequences(config))
                    return await loop.measure(plan, lambda: memory_of(mesh, self._name))

                return [asyncio.run(play(plan)) for plan in plans]
        except LauncherError as error:
            return [Measured(problem=" ".join(self._reason(error).split()))] * len(plans)

    def _reason(self, error: LauncherError) -> str:
        """Why the copy is not served, as if it was the model that was given."""
        return reason_of(error.message).replace(str(self._folder), str(self._given))

    def _running(self, config: Config | None) -> AbstractContextManager[MeshState]:
        """A mesh for a block. config: of the copy; None: the given one"""
        if config is not None:
            (self._folder / "config.pbtxt").write_text(text_of(config))
        data = self._workspace / "mesh"
        shutil.rmtree(data, ignore_errors=True)
        # A model that cannot be loaded ends the mesh at once.
        settings = {"SEQMESH_EXIT_ON_ERROR": "true"}
        return private_mesh(executors=1, models=(self._folder.parent,), settings=settings, data_dir=data)


def text_of(config: Config) -> str:
    """A configuration as `config.pbtxt` has it."""
    return text_format.MessageToString(parse_json(json.dumps(config)))


def fetch(mesh: MeshState, model: str, what: str = "") -> Any:
    """What a mesh tells of a model, its metadata by default. Raises LauncherError with the mesh's refusal, or where it
    has none.
    """
    url = f"http://{authority(mesh.host, mesh.gateway.http_port)}/v2/models/{quote(model, safe='')}{what}"
    try:
        with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as refused:
        raise LauncherError(f"the mesh does not serve the model: {refused.read().decode(errors='replace')}") from None
    except (OSError, http.client.HTTPException, ValueError) as lost:
        raise LauncherError(f"the mesh does not answer: {lost}") from lost


def described_input(metadata: Mapping[str, Any], *, batched: bool) -> Input:
    """An input of the model's metadata. Of a model with batches the first dimension is the batch: one row."""
    shape = [int(size) for size in metadata["shape"]]
    if batched:
        shape[0] = 1
    return Input(metadata["name"], metadata["datatype"], tuple(shape))


def memory_of(mesh: MeshState, model: str) -> int:
    """Bytes that the executors have resident, and that the model's instances have on GPUs."""
    resident = 0
    for child in mesh.children:
        if child.service == "executor" and child.pid:
            try:
                process = psutil.Process(child.pid)
                resident += sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
            except psutil.NoSuchProcess:
                continue
    uses = [use for one in fetch(mesh, model, "/stats")["model_stats"] for use in one.get("memory_usage", [])]
    return resident + sum(int(use["byte_size"]) for use in uses if use["type"] == "GPU")


def reason_of(message: str) -> str:
    """Why a mesh did not start, from the end of what it said: the executor's own words, if there are any."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    own = [cause for cause in map(json.loads, CAUSE.findall(message)) if "failed to load" in cause]
    return own[-1].strip() if own else " / ".join(lines[-PROBLEM_LINES:])
