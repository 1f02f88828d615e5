"""Real processes, and the transformer of examples/attention: its cache, which grows with each character, is the state.

Executors are killed, sequences are paged, moved and copied: each answer is the same, bit by bit, as of a text that
nothing happened to. And a step of a long text sends Redis no more than a step of a short one.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio

from shared.contract.ids import sequence_id
from tests.mesh.running_mesh import RunningMesh, eventually, running_mesh, seqmesh

MAKE_MODEL = Path(__file__).resolve().parents[2] / "examples" / "attention" / "make_model.py"
RARELY = "rarely_saved"
"""The same model with few slots, so that texts are paged, and a checkpoint with every fourth step."""
IN_PYTHON, IN_PROCESS = "in_python", "in_process"
"""The same model as a `model.py`, on a thread of its executor and in a process of its own. A text begins with an empty
cache.
"""
MODELS = ("attention", RARELY, IN_PYTHON, IN_PROCESS)
REPLY_CHARACTERS = 400
"""Of the chat's replies: so many that an executor can be killed in the middle of one."""
POSITION_BYTES = 1024
"""Of the cache, for each character."""

# On a busy machine two executors need a minute to import torch, for whichever test comes first and after each kill.
pytestmark = pytest.mark.timeout(300)

MODEL_PY = """
import pathlib

import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.attention = torch.jit.load(pathlib.Path(__file__).parent / "model.pt")

    def execute(self, requests):
        return [self.read(request) for request in requests]

    def read(self, request):
        given = [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("TEXT", "CACHE_IN")]
        with torch.inference_mode():
            made = self.attention(*map(torch.from_numpy, given))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, made[name].numpy()) for name in made])
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("attention")
    subprocess.run([sys.executable, MAKE_MODEL, repository], check=True, timeout=100)
    rarely = repository / RARELY
    (rarely / "1").mkdir(parents=True)
    (rarely / "1" / "model.pt").symlink_to(repository / "attention" / "1" / "model.pt")
    config = (repository / "attention" / "config.pbtxt").read_text().replace('"attention"', f'"{RARELY}"')
    config = config.replace("max_candidate_sequences: 32", "max_candidate_sequences: 3")
    config += 'parameters { key: "checkpoint_interval" value { string_value: "4" } }\n'
    (rarely / "config.pbtxt").write_text(config)
    for name in (IN_PYTHON, IN_PROCESS):
        _add_python_model(repository, name)
    chat = repository / "chat" / "1" / "model.py"
    chat.write_text(chat.read_text().replace("REPLY_CHARACTERS = 24", f"REPLY_CHARACTERS = {REPLY_CHARACTERS}"))
    return repository


def _add_python_model(repository: Path, name: str) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.pt").symlink_to(repository / "attention" / "1" / "model.pt")
    (version / "model.py").write_text(MODEL_PY)
    config = (repository / "attention" / "config.pbtxt").read_text().replace('"attention"', f'"{name}"')
    config = config.replace('"pytorch"', '"python"').replace(
        "use_growable_memory: true",
        "use_growable_memory: true\n"
        '    initial_state { name: "empty" data_type: TYPE_FP32 dims: [ 4, 4, 0, 16 ] zero_data: true }',
    )
    if name == IN_PROCESS:
        config += 'parameters { key: "instance_process" value { string_value: "true" } }\n'
    (version.parent / "config.pbtxt").write_text(config)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[RunningMesh]:
    with running_mesh(tmp_path_factory.mktemp("growing") / "data", [repository], executors=2) as mesh:
        yield mesh


class Reader:
    """Sends texts piece by piece."""

    def __init__(self, client: Any, model: str = "attention") -> None:
        self._client = client
        self._model = model
        self.steps = 0

    async def step(self, name: str, piece: str, **flags: bool) -> bytes:
        """One piece; the scores of the next characters."""
        text = http_aio.InferInput("TEXT", [1, len(piece)], "UINT8")
        text.set_data_from_numpy(np.frombuffer(piece.encode(), np.uint8)[None])
        answer = await self._client.infer(self._model, [text], sequence_id=name, **flags)
        self.steps += 1
        return answer.as_numpy("SCORES").tobytes()

    async def read(self, name: str, pieces: Sequence[str]) -> list[bytes]:
        """A whole text."""
        last = len(pieces) - 1
        return [
            await self.step(name, piece, sequence_start=number == 0, sequence_end=number == last)
            for number, piece in enumerate(pieces)
        ]

    async def progress(self, steps: int) -> None:
        """Returns when so many steps have been answered."""
        while self.steps < steps:
            await asyncio.sleep(0.01)


async def replies(mesh: RunningMesh, name: str, said: Sequence[str], heard: list[int]) -> list[list[int]]:
    """A conversation with the chat: the characters of each reply. heard: gets each character as it comes"""
    found: list[list[int]] = []

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number, text in enumerate(said):
            while len(found) < number:
                await asyncio.sleep(0.01)
            piece = grpc_aio.InferInput("TEXT", [1, len(text)], "UINT8")
            piece.set_data_from_numpy(np.frombuffer(text.encode(), np.uint8)[None])
            flags = {"sequence_start": number == 0, "sequence_end": number == len(said) - 1}
            yield {"model_name": "chat", "inputs": [piece], "sequence_id": name, **flags}

    connected: Any = grpc_aio.InferenceServerClient(mesh.grpc())
    async with connected as client:
        reply: list[int] = []
        async for answer, error in client.stream_infer(requests()):
            assert error is None, error
            reply.append(answer.as_numpy("NEXT").item())
            heard.append(reply[-1])
            if len(reply) == REPLY_CHARACTERS:
                found.append(reply)
                reply = []
            if len(found) == len(said):
                break
    return found


async def owner_of(mesh: RunningMesh, model: str, name: str) -> str:
    """The executor that has a sequence, by its name; waits while it is taken over."""
    sequence = sequence_id(model, "", name)
    return (await eventually(lambda: mesh.record(sequence).get("ow"), f"{name} has an owner")).rpartition("-")[0]


def pieces_of(seed: int, count: int) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices("abcdefgh ", k=chance.choice([1, 1, 1, 2, 5, 40]))) for _ in range(count)]


async def test_texts_go_on_as_if_undisturbed_though_executors_are_killed(mesh: RunningMesh) -> None:
    texts = {(model, seed): pieces_of(seed, 20) for model in MODELS for seed in range(6)}
    async with http_aio.InferenceServerClient(mesh.http(), conn_limit=64) as client:
        readers = {model: Reader(client, model) for model in MODELS}

        async def read(name: str) -> dict[tuple[str, int], list[bytes]]:
            """Reads all texts at once."""
            async with asyncio.TaskGroup() as group:
                tasks = {
                    one: group.create_task(readers[one[0]].read(f"{name} {one[1]}", pieces))
                    for one, pieces in texts.items()
                }
            return {one: task.result() for one, task in tasks.items()}

        undisturbed = await read("undisturbed")
        async with asyncio.TaskGroup() as group:
            disturbed = group.create_task(read("disturbed"))
            for share, executor in ((1.3, "executor-1"), (1.6, "executor-2")):
                for reader in readers.values():
                    await reader.progress(int(share * 6 * 20))
                await mesh.kill_executor(executor)

    assert undisturbed == disturbed.result()


async def test_a_reply_goes_on_where_its_executor_was_killed(mesh: RunningMesh) -> None:
    """Every character comes once and in its order, and the next reply knows what was said before."""
    said = ["Alice ", "was beginning ", "to get very tired"]
    undisturbed = await replies(mesh, "undisturbed", said, [])
    heard: list[int] = []
    async with asyncio.TaskGroup() as group:
        disturbed = group.create_task(replies(mesh, "disturbed", said, heard))
        for replied in (0.3, 1.3):
            while len(heard) < replied * REPLY_CHARACTERS:
                await asyncio.sleep(0.001)
            owner = await owner_of(mesh, "chat", "disturbed")
            group.create_task(mesh.kill_executor(owner))

    assert undisturbed == disturbed.result()
    assert len({tuple(reply) for reply in undisturbed}) == len(said)


async def test_a_copy_and_a_moved_text_go_on_as_the_text_does(mesh: RunningMesh) -> None:
    begun, rest = ["Alice was beginning ", "to ", "get"], [" very", " tired"]
    async with http_aio.InferenceServerClient(mesh.http()) as client:
        reader = Reader(client)
        expected = (await reader.read("whole", [*begun, *rest, "."]))[3:5]
        for number, piece in enumerate(begun):
            await reader.step("text", piece, sequence_start=number == 0)
        owner = await owner_of(mesh, "attention", "text")
        other = next(name for name in mesh.names("executor") if name != owner)

        await seqmesh(mesh, "seq", "fork", "attention", "text", "copy")
        shown = await seqmesh(mesh, "seq", "show", "attention", "copy")
        await seqmesh(mesh, "seq", "move", "attention", "text", "--to", other)
        for name in ("text", "copy"):
            assert expected == [await reader.step(name, piece) for piece in rest]
            await reader.step(name, ".", sequence_end=True)

    size = POSITION_BYTES * (1 + len("".join(begun)))
    assert any("CACHE_IN" in line and size <= int(line.split()[-2]) < size + 100 for line in shown.splitlines()), shown


@pytest.mark.parametrize("model", ["attention", IN_PYTHON, IN_PROCESS])
async def test_a_step_of_a_long_text_sends_redis_no_more_than_one_of_a_short_text(
    mesh: RunningMesh, model: str
) -> None:
    async def bytes_per_step(reader: Reader, name: str, steps: int) -> float:
        before = mesh.redis.info("stats")["total_net_input_bytes"]
        for _ in range(steps):
            await reader.step(name, "a")
        return (mesh.redis.info("stats")["total_net_input_bytes"] - before) / steps

    async with http_aio.InferenceServerClient(mesh.http()) as client:
        reader = Reader(client, model)
        measured: dict[int, float] = {}
        for length in (16, 1500):
            await reader.step(f"of {length}", "b" * length, sequence_start=True)
            measured[length] = await bytes_per_step(reader, f"of {length}", 100)
        assert await eventually(lambda: len(mesh.alive()) == 2, "nobody was lost")
        for length in measured:
            await reader.step(f"of {length}", "a", sequence_end=True)

    print(measured)
    # The other services send something meanwhile, more while the machine is slow: far less than a cache of 1500.
    assert measured[1500] < measured[16] + 100 * POSITION_BYTES
