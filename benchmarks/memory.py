"""What a live sequence costs: bytes in Redis by kind of key, and in each process.

`python -m benchmarks.memory`. Starts a mesh of its own for each size of state and kind of client, opens sequences,
runs some steps of each, and looks while all of them are idle and live.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import click
import numpy as np
import psutil
import tritonclient.grpc.aio as grpc_aio
from redis import Redis

from deploy.local.data_directory import MeshState
from deploy.local.private_mesh import private_mesh

MODEL = "counted"
FILE = '''"""A state of any size: each step adds its input."""
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            added = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            state = pb_utils.get_input_tensor_by_name(request, "STATE_IN").as_numpy() + added
            outputs = [pb_utils.Tensor("OUTPUT", state[:, :1].copy()), pb_utils.Tensor("STATE_OUT", state)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
'''
CONFIG = """
backend: "python"
max_batch_size: {slots}
input [ {{ name: "INPUT" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "OUTPUT" data_type: TYPE_FP32 dims: [ 1 ] }} ]
sequence_batching {{
  max_sequence_idle_microseconds: 3600000000
  state [ {{ input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [ {floats} ] }} ]
}}
"""
IN_FLIGHT = 64
Client = Literal["plain", "ids", "numbers"]
CLIENTS: tuple[Client, ...] = ("plain", "ids", "numbers")


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes per live sequence. redis: by kind of key, and what the server's memory grew by; processes: by service."""

    redis: dict[str, float]
    redis_total: float
    processes: dict[str, float]


def bytes_by_kind(redis: Redis, prefix: str) -> Counter[str]:
    """What Redis says that its keys take, by the word after the hash tag: seq, idle, checkpoint, deadlines, ..."""
    client = cast("Any", redis)  # redis-py's commands are unions of sync and async
    names: list[bytes] = list(client.scan_iter(match=f"{prefix}:*", count=1000))
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.memory_usage(name, samples=0)
    found: Counter[str] = Counter()
    for name, size in zip(names, pipe.execute(), strict=True):
        found[name.decode().split("}:", 1)[1].split(":", 1)[0]] += size or 0
    return found


async def open_sequences(url: str, sequences: Sequence[int], steps: int, client: Client) -> None:
    """Runs that many steps of each sequence, none of which ends."""
    kind = cast("Any", grpc_aio)
    added = kind.InferInput("INPUT", [1, 1], "FP32")
    added.set_data_from_numpy(np.ones((1, 1), np.float32))
    places = asyncio.Semaphore(IN_FLIGHT)
    async with kind.InferenceServerClient(url) as server:

        async def one(sequence: int) -> None:
            async with places:
                for step in range(1, steps + 1):
                    known: dict[str, Any] = {"request_id": f"{sequence}/{step}"} if client == "ids" else {}
                    if client == "numbers":
                        known = {"parameters": {"sequence_step": step}}
                    await server.infer(MODEL, [added], sequence_id=sequence, sequence_start=step == 1, **known)

        await asyncio.gather(*(one(sequence) for sequence in sequences))


def resident(state: MeshState) -> Counter[str]:
    """Resident bytes of the mesh's processes, by service; Redis tells of itself."""
    found: Counter[str] = Counter()
    for child in state.children:
        if child.service != "redis":
            found[child.service] += psutil.Process(child.pid).memory_info().rss
    return found


def measure(floats: int, count: int, steps: int, client: Client) -> Cost:
    """One mesh, from its start to the look at it."""
    with tempfile.TemporaryDirectory(prefix="seqmesh-") as directory:
        version = Path(directory) / MODEL / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(FILE)
        (version.parent / "config.pbtxt").write_text(CONFIG.format(slots=2 * count, floats=floats))
        with private_mesh(executors=1, models=(Path(directory),)) as state, Redis.from_url(state.redis_url) as redis:
            # What the first sequences bring along (scripts, buffers, pages of the arena) is no cost of a sequence's.
            asyncio.run(open_sequences(state.grpc_address, range(1, count + 1), steps, client))
            before, at_rest, kinds = used(redis), resident(state), bytes_by_kind(redis, state.key_prefix)
            asyncio.run(open_sequences(state.grpc_address, range(count + 1, 2 * count + 1), steps, client))
            grown = bytes_by_kind(redis, state.key_prefix) - kinds
            processes = {name: (size - at_rest[name]) / count for name, size in resident(state).items()}
            return Cost(
                {kind: size / count for kind, size in grown.items() if size > count},
                (used(redis) - before) / count,
                processes,
            )


def used(redis: Redis) -> int:
    """Bytes that the server has allocated."""
    return int(cast("Any", redis).info("memory")["used_memory"])


def line(state_bytes: int, client: str, cost: Cost) -> str:
    """One row of the report."""
    keys = ", ".join(f"{kind} {size:.0f}" for kind, size in sorted(cost.redis.items()))
    processes = ", ".join(f"{name} {size:.0f}" for name, size in sorted(cost.processes.items()))
    return f"{state_bytes:8d} B  {client:8s} redis {cost.redis_total:8.0f}  ({keys})  {processes}"


@click.command("memory", help=__doc__, context_settings={"max_content_width": 110})
@click.option("--count", type=click.IntRange(2), default=1000, show_default=True, help="Sequences that are measured.")
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Of each sequence.")
@click.option("--floats", type=int, multiple=True, default=(1, 1024, 16384), show_default=True, help="Of the state.")
def main(count: int, steps: int, floats: Sequence[int]) -> None:
    """Prints bytes per live sequence."""
    for size in floats:
        for client in CLIENTS:
            click.echo(line(size * 4, client, measure(size, count, steps, client)))


if __name__ == "__main__":
    main()
