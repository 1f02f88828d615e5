"""`make fuzz`: broken inputs of every kind against what takes them, for as long as asked.

python -m tests.fuzz --minutes 10                      every fuzzer, the time shared among them
python -m tests.fuzz --only http,grpc --inputs 5000    two of them, so many inputs each
python -m tests.fuzz --only http --seed 17 --inputs 1  one input again
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.fuzz.fuzzing import Findings, OpenFuzzer, fuzz

MODULES = {
    "http": "tests.fuzz.http_requests",
    "grpc": "tests.fuzz.grpc_messages",
    "config": "tests.fuzz.configurations",
    "redis": "tests.fuzz.redis_values",
}
"""Each has a function `fuzzer` (`fuzzing.OpenFuzzer`)."""
FUZZERS = tuple(name for name, module in MODULES.items() if importlib.util.find_spec(module))
MINUTES = 10.0


def main(arguments: Sequence[str]) -> int:
    """The process's exit code: 0 when nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Broken inputs of every kind.")
    parser.add_argument("--seed", type=int, help="of the first input; those after it have the next ones")
    parser.add_argument("--minutes", type=float, help=f"of all fuzzers together; {MINUTES:g} unless inputs are given")
    parser.add_argument("--inputs", type=int, help="of each fuzzer")
    parser.add_argument("--only", type=names, default=FUZZERS, help=f"some of {','.join(FUZZERS)}")
    given = parser.parse_args(arguments)
    seed = secrets.randbits(32) if given.seed is None else given.seed
    minutes = MINUTES if given.minutes is None and given.inputs is None else given.minutes
    seconds = None if minutes is None else minutes * 60 / len(given.only)
    print(f"seed {seed}", flush=True)
    findings = {name: asyncio.run(run(name, seed, given.inputs, seconds)) for name in given.only}
    print(table(findings))
    print(failures(findings))
    return 1 if any(found.failures for found in findings.values()) else 0


def names(text: str) -> tuple[str, ...]:
    """A list of fuzzers, as an option gives it."""
    chosen = tuple(text.split(","))
    unknown = [name for name in chosen if name not in FUZZERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no fuzzer {', '.join(unknown)}: there are {', '.join(FUZZERS)}")
    return chosen


async def run(name: str, seed: int, inputs: int | None, seconds: float | None) -> Findings:
    """One fuzzer, from the start of what it attacks to its end."""
    opened: OpenFuzzer = importlib.import_module(MODULES[name]).fuzzer
    with tempfile.TemporaryDirectory(prefix="seqmesh-fuzz-") as folder:
        async with opened(Path(folder)) as fuzzer:
            began = time.monotonic()

            def tell(found: Findings) -> None:
                print(f"[{time.monotonic() - began:5.0f} s] {name}: {line(found)}", flush=True)

            found = await fuzz(fuzzer, seed=seed, inputs=inputs, seconds=seconds, tell=tell)
            tell(found)
            return found


def line(found: Findings) -> str:
    """How it goes, in a line."""
    return (
        f"{found.inputs} inputs, at worst {found.memory_bytes / 2**20:.0f} MiB, health after "
        f"{found.health_s * 1000:.0f} ms, {len(found.failures)} failures"
    )


def table(findings: Mapping[str, Findings]) -> str:
    """A line for each fuzzer."""
    rows = [("fuzzer", "inputs", "memory, MiB", "health, ms", "failures")]
    rows += [
        (
            name,
            str(found.inputs),
            f"{found.memory_bytes / 2**20:.0f}",
            f"{found.health_s * 1000:.0f}",
            str(len(found.failures)),
        )
        for name, found in findings.items()
    ]
    return "\n".join("{:8} {:>10} {:>12} {:>12} {:>10}".format(*row) for row in rows)


def failures(findings: Mapping[str, Findings]) -> str:
    """Each failure, and the command that shows it again."""
    return "\n".join(
        f"FAILURE, {failure.times} times: {failure.text}\n"
        f"  again: python -m tests.fuzz --only {name} --seed {failure.seed} --inputs 1"
        for name, found in findings.items()
        for failure in found.failures
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
