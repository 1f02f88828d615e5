"""Adds up numbers in one sequence of `running_sum`, and goes on whatever is killed meanwhile.

Each step carries its number since START. So it can be sent again, to any gateway: the mesh runs it once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

NOT_NOW = ("503", "429")
"""Statuses that ask for the same step again: nothing was changed, or the step is still under way."""
PAUSE_S = 0.2


def answer_of(gateway: str, sequence: str, number: int, value: int, *, last: bool) -> int:
    """Sends one step once. Raises InferenceServerException, or OSError when the connection breaks."""
    tensor = httpclient.InferInput("INPUT", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[value]], np.int32))
    client: Any = httpclient.InferenceServerClient(gateway)
    with contextlib.closing(client):
        answer = client.infer(
            "running_sum",
            [tensor],
            sequence_id=sequence,
            sequence_start=number == 1,
            sequence_end=last,
            parameters={"sequence_step": number},
        )
        return int(answer.as_numpy("OUTPUT").item())


def step(gateways: Iterator[str], sequence: str, number: int, value: int, *, last: bool, patience_s: float) -> int:
    """Sends one step until it is answered, to one gateway after the other. Raises TimeoutError."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            return answer_of(next(gateways), sequence, number, value, last=last)
        except InferenceServerException as error:
            if error.status() not in NOT_NOW:
                raise
            print(f"step {number}: {error.message()}", file=sys.stderr)
        except OSError as error:
            # Nobody knows whether the step was accepted. Its number makes it safe to send it again.
            print(f"step {number}: {error}", file=sys.stderr)
        time.sleep(PAUSE_S)
    raise TimeoutError(f"step {number} had no answer for {patience_s} seconds")


def main() -> int:
    """Returns 0 when the sum is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateway", action="append", help="host:port of HTTP; may be repeated", dest="gateways")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two steps: time to kill something")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that one step may take in all")
    options = parser.parse_args()
    gateways = itertools.cycle(options.gateways or ["localhost:8000"])
    sequence = f"survive-{uuid.uuid4().hex[:8]}"
    total = 0
    for number in range(1, options.steps + 1):
        last = number == options.steps
        total = step(gateways, sequence, number, number, last=last, patience_s=options.patience)
        print(f"{sequence} step {number}: {total}", flush=True)
        time.sleep(0 if last else options.pause)
    return 0 if total == sum(range(1, options.steps + 1)) else 1


if __name__ == "__main__":
    sys.exit(main())
