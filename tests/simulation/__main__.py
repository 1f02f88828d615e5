"""`make sim`: many seeds, on all cores. A seed that fails prints its story and the command that shows it again.

python -m tests.simulation --seeds 1000 --from 1     seeds 1..1000
python -m tests.simulation --seed 17                 one of them, with its whole story
python -m tests.simulation --mutants                 every fault that is put in on purpose must be found
... --scripts                                        the scripts alone, without services (script_fuzz.py)
... --operator                                       with an operator in the middle of it (operator.py)
... --reload                                         with loads and unloads of the model besides (reloading.py)
... --vary                                           with what the others leave out (varying.py)
... --ask                                            with what clients ask for beside their steps (asking.py)
... --beside                                         with a second model on the same executors (beside.py)
... --chain                                          with ensembles of two states (chaining.py)
... --calls                                          with models that call other ones (calling.py)
... --lose                                           with a store that loses its newest data (losing.py)
... --refuse                                         with a store that refuses for a while (refusing.py)
... --refuse-lose                                    with a store that does both (refusing.py)
... --cluster                                        with a Cluster, whose nodes do that each by itself (refusing.py)
... --lose-node                                      with a Cluster, one of whose nodes does that (losing.py)
... --reshard                                        to another number of shards in the middle of it (resharding.py)
... --drill "killed executor"                        how long things take when that goes wrong (drills.py)
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain

from tests.simulation.asking import asked
from tests.simulation.beside import two_models
from tests.simulation.calling import called
from tests.simulation.chaining import chained
from tests.simulation.drills import DRILLS, drilled
from tests.simulation.losing import lost, lost_node
from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.operator import operated
from tests.simulation.refusing import clustered, refused, refused_and_lost
from tests.simulation.reloading import reloaded
from tests.simulation.resharding import resharded
from tests.simulation.script_fuzz import fuzz
from tests.simulation.varying import varied
from tests.simulation.world import Result, simulate

LINES_SHOWN = 60
MUTANT_SEEDS = 300

Play = Callable[[int], Result]
"""Runs a seed."""
KINDS: Mapping[str, tuple[Play, str]] = {
    "--scripts": (fuzz, "the scripts alone, under random calls"),
    "--operator": (operated, "an operator pauses, moves, copies and ends sequences"),
    "--reload": (reloaded, "the operator loads and unloads the model, too"),
    "--reshard": (resharded, "the mesh is stopped, and has other shards afterwards"),
    "--beside": (two_models, "a second model on the same executors"),
    "--chain": (chained, "ensembles of two models with states"),
    "--calls": (called, "models that call sequences of others in each step"),
    "--lose": (lost, "the store comes back without its newest data"),
    "--lose-node": (lost_node, "so does one node of a Cluster at a time"),
    "--refuse": (refused, "the store is full, a replica, or silent for a while"),
    "--refuse-lose": (refused_and_lost, "and it comes back without its newest data, too"),
    "--cluster": (clustered, "so is each node of a Cluster"),
    "--vary": (varied, "clients, models and losses that the others leave out"),
    "--ask": (asked, "connections that close, waits, ends by name, tenants"),
}
"""Flags, and what is played with them in the place of whole meshes."""


def main(arguments: Sequence[str]) -> int:
    """The process's exit code: 0 when nothing was found (or, of the mutants, each)."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulates the mesh.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--from", type=int, default=1, dest="first", help="the first of them")
    parser.add_argument("--seed", type=int, help="this one alone, with its story")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--mutants", action="store_true", help="put faults in and find them")
    parser.add_argument("--keep-going", action="store_true", help="go on after the first seed that fails")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--drill", choices=list(DRILLS), help="how long things take when this goes wrong")
    for flag, (kind, what) in KINDS.items():
        kinds.add_argument(flag, action="store_const", const=kind, default=simulate, dest="play", help=what)
    given = parser.parse_args(arguments)
    play: Play = partial(drilled, given.drill) if given.drill else given.play
    if given.mutants:
        return find_mutants(given.jobs, range(given.first, given.first + MUTANT_SEEDS), play)
    if given.seed is not None:
        result = play(given.seed)
        print("\n".join(result.lines))
        print(summary(result))
        return 1 if result.violations else 0
    return run_many(range(given.first, given.first + given.seeds), given.jobs, play, keep_going=given.keep_going)


def run_many(seeds: Sequence[int], jobs: int, play: Play, *, keep_going: bool) -> int:
    """Runs them in processes of their own; stops at the first that fails."""
    began, steps, failed, virtual_s = time.monotonic(), 0, list[int](), 0.0
    with multiprocessing.Pool(jobs) as pool:
        for done, result in enumerate(pool.imap_unordered(play, seeds), 1):
            steps, virtual_s = steps + result.steps, virtual_s + result.virtual_s
            if result.violations:
                failed.append(result.seed)
                show_failure(result, play)
                if not keep_going:
                    return 1
            if done % max(1, len(seeds) // 20) == 0:
                print(f"{done} of {len(seeds)} seeds, {time.monotonic() - began:.0f} s", flush=True)
    hours = virtual_s / 3600
    print(f"{len(seeds)} seeds: {steps} steps committed in {hours:.1f} hours of virtual time, {len(failed)} failed")
    if failed:
        print("failed:", *sorted(failed))
    return 1 if failed else 0


def show_failure(result: Result, play: Play) -> None:
    """The end of its story, what was wrong, and how to see it again."""
    print("\n".join(result.lines[-LINES_SHOWN:]))
    print(summary(result))
    kind = next((f" {flag}" for flag, (each, _) in KINDS.items() if each is play), "")
    if isinstance(play, partial):
        kind = f' --drill "{play.args[0]}"'
    print(f"commit {commit()}; again: python -m tests.simulation{kind} --seed {result.seed}", flush=True)


def summary(result: Result) -> str:
    """One seed in a few lines."""
    head = (
        f"seed {result.seed}: {result.steps} steps committed, {result.answers} answered, {result.events} events in "
        f"{result.virtual_s:.0f} s; story {result.digest[:16]}"
    )
    return "\n".join([head, *(f"  VIOLATION: {text}" for text in result.violations)])


def commit() -> str:
    """Of the code that runs."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def find_mutants(jobs: int, seeds: Sequence[int], play: Play) -> int:
    """Looks for each fault in these seeds until it is found: those that this kind of play can show.

    A seed for each process at a time: a pool runs everything that it was given, also when the fault is long found.
    """
    missed = 0
    with multiprocessing.Pool(jobs) as pool:
        for mutant in MUTANTS:
            if mutant.only or not mutant.edits if play is fuzz else mutant.scripts_only:
                continue
            shown_by = KINDS[mutant.only][0] if mutant.only else play
            shown_by = partial(drilled, mutant.late) if mutant.late else shown_by
            run = partial(run_mutant, mutant.name, play=shown_by)
            at_once = (pool.map(run, seeds[at : at + jobs]) for at in range(0, len(seeds), jobs))
            found = first_failing(chain.from_iterable(at_once))
            missed += found is None
            print(f"{mutant.name}: {describe(mutant, found)}", flush=True)
    return 1 if missed else 0


def run_mutant(name: str, seed: int, play: Play = simulate) -> Result:
    """One seed with a fault put in."""
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == name)
    with mutant.applied():
        return play(seed)


def first_failing(results: Iterable[Result]) -> Result | None:
    """The first result with a violation, in the order of seeds."""
    return next((result for result in results if result.violations), None)


def describe(mutant: Mutant, found: Result | None) -> str:
    """What became of looking for a fault."""
    if found is None:
        return f"NOT FOUND ({mutant.story})"
    return f"found by seed {found.seed}: {found.violations[0]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
