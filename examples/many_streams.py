"""Many sequences of `running_sum` at once, each over a gRPC stream of its own. Every answer is checked."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as grpcclient
from tritonclient.utils import InferenceServerException


def request(sequence: int, number: int, value: int, steps: int) -> dict[str, Any]:
    """One message of a stream, as `stream_infer` takes it."""
    tensor = grpcclient.InferInput("INPUT", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[value]], np.int32))
    return {
        "model_name": "running_sum",
        "inputs": [tensor],
        "sequence_id": sequence,
        "sequence_start": number == 1,
        "sequence_end": number == steps,
    }


async def play(client: Any, sequence: int, steps: int) -> int:
    """Plays one sequence, a step at a time. Returns how many answers were wrong."""
    values = [random.randrange(100) for _ in range(steps)]
    answered = asyncio.Event()
    answered.set()

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number, value in enumerate(values, 1):
            # The next step goes when the one before is answered: then an error leaves nothing half done.
            await answered.wait()
            answered.clear()
            yield request(sequence, number, value, steps)

    wrong = 0
    sums = itertools.accumulate(values)
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        wrong += result.as_numpy("OUTPUT").item() != next(sums)
        answered.set()
    return wrong


async def run(gateway: str, sequences: int, steps: int) -> int:
    """Plays all sequences together. Returns how many answers were wrong."""
    async with grpcclient.InferenceServerClient(gateway) as client:
        first = random.randrange(1, 1 << 62)
        try:
            # Not gather: the client must not be closed while a stream of it runs.
            async with asyncio.TaskGroup() as group:
                plays = [group.create_task(play(client, first + index, steps)) for index in range(sequences)]
        except ExceptionGroup as failures:
            # All streams mostly fail for the same reason.
            raise failures.exceptions[0] from None
        return sum(one.result() for one in plays)


def main() -> int:
    """Returns 0 when every answer is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateway", default="localhost:8001", help="host:port of gRPC")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    began = time.monotonic()
    wrong = asyncio.run(run(options.gateway, options.sequences, options.steps))
    took = time.monotonic() - began
    total = options.sequences * options.steps
    print(f"{total} steps of {options.sequences} sequences, {total / took:.0f} steps/s, {wrong} wrong answers")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (grpc.aio.AioRpcError, InferenceServerException) as error:
        said = error.details() if isinstance(error, grpc.aio.AioRpcError) else error.message()
        sys.exit(f"{said}. `make run` starts a mesh; --gateway names another one.")
