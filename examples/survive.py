"""Adds up numbers in one sequence of `running_sum`, and goes on whatever is killed meanwhile.

`seqmesh_client` numbers the steps and sends them again, through any gateway, until they are answered. The token would
carry the sequence over a restart of this program, too.
"""

from __future__ import annotations

import argparse
import sys
import time

from seqmesh_client import Client, Patience, SeqmeshError


def main() -> int:
    """Returns 0 when the sum is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateway", action="append", help="host:port of gRPC; may be repeated", dest="gateways")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two steps: time to kill something")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that one step may take in all")
    options = parser.parse_args()
    total = 0
    with Client(options.gateways or ["localhost:8001"], patience=Patience(options.patience)) as client:
        sequence = client.sequence("running_sum")
        for number in range(1, options.steps + 1):
            last = number == options.steps
            total = sequence.step([[number]], last=last).single.item()
            print(f"{sequence.id} step {number}: {total}", flush=True)
            time.sleep(0 if last else options.pause)
    return 0 if total == sum(range(1, options.steps + 1)) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SeqmeshError as error:
        sys.exit(f"{error} `make run` starts a mesh; --gateway names another one.")
