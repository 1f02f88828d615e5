"""`make mutants`: puts faults into the code, one at a time, and tells which of them no test sees.

python -m tests.mutation --base main --sample 20 --seed 7     of the files changed against a branch
python -m tests.mutation --files shared/store/connections/link.py --sample 20   of these files, or folders
python -m tests.mutation --files gateway/requests/exchange/dispatch.py --only 113:DropEffect:0   this one fault alone

The tests of a file are those of its package (tests/<package>) that run the changed line: which do is measured once at
the beginning, with coverage contexts. Everything happens in a copy of the working tree.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import cosmic_ray.ast
import cosmic_ray.mutating
import cosmic_ray.testing
import coverage
from cosmic_ray.work_item import TestOutcome

from tests.mutation.operators import operators

# These have no types.
get_ast: Callable[[str], Any] = cast("Any", cosmic_ray.ast).get_ast
ast_nodes: Callable[[Any], Iterable[Any]] = cast("Any", cosmic_ray.ast).ast_nodes
mutate_code: Callable[[str, Any, int], str | None] = cast("Any", cosmic_ray.mutating).mutate_code
run_tests: Callable[[str, float], tuple[TestOutcome, str]] = cast("Any", cosmic_ray.testing).run_tests

PACKAGES = ("gateway", "scheduler", "executor", "shared")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--hypothesis-seed=0")
PATIENCE_S = 60
"""How much longer than they took before tests may take with a fault, beside three times as long."""
ARGUMENT_BYTES_MAX = 100_000
"""Of test names in one command."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of one file. line: where it begins; occurrence: which of the operator's places in the file."""

    path: str
    line: int
    operator: str
    occurrence: int

    @property
    def name(self) -> str:
        """What `--only` takes."""
        return f"{self.line}:{self.operator}:{self.occurrence}"


@dataclass(frozen=True, slots=True)
class Tests:
    """Which tests run which line of which file, and how long each took, s."""

    by_line: Mapping[str, Mapping[int, Sequence[str]]]
    duration_s: Mapping[str, float]

    def of(self, fault: Fault) -> list[str]:
        """Those that run the line of a fault, the quickest first."""
        found = set(self.by_line.get(fault.path, {}).get(fault.line, ()))
        return sorted(found, key=lambda test: (self.duration_s.get(test, 0.0), test))


def main(arguments: Sequence[str]) -> int:
    """The process's exit code: 0 when every fault of the sample was seen."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="Puts faults into the code.")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--base", default="HEAD", help="the files that were changed since this commit, or branch")
    chosen.add_argument("--files", nargs="+", help="these files or folders")
    parser.add_argument("--sample", type=int, default=20, help="faults, drawn by place first, then by kind")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--only", help="one fault, as it was printed")
    parser.add_argument("--tests", nargs="+", help="test files or folders, if not those of the packages")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no other fault is tried")
    given = parser.parse_args(arguments)
    root = Path.cwd()
    files = chosen_files(root, given.files, given.base)
    if not files:
        print(f"nothing to change: no file of {', '.join(PACKAGES)} differs from {given.base}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copied(root, Path(folder) / "tree")
        os.chdir(copy)
        # Before the working tree, in which the two distributions are installed.
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (copy, copy / "client")))
        faults = [fault for path in files for fault in faults_of(path)]
        sample = (
            [one for one in faults if one.name == given.only] if given.only else drawn(faults, given.sample, given.seed)
        )
        tests = measured_tests(given.tests or sorted({f"tests/{Path(path).parts[0]}" for path in files}), files)
        return try_all(sample, tests, given, out_of=len(faults))


# -- what is changed -------------------------------------------------------------------------------------------------


def chosen_files(root: Path, given: Sequence[str] | None, base: str) -> list[str]:
    """The modules that are to be changed, relative to the root."""
    if given is None:
        changed = _git("diff", "--name-only", "--diff-filter=d", base, "--", *PACKAGES)
        return [path for path in changed if path.endswith(".py")]
    found = {file for path in map(Path, given) for file in ([path] if path.is_file() else (root / path).rglob("*.py"))}
    return sorted(str(file.relative_to(root) if file.is_absolute() else file) for file in found)


def copied(root: Path, copy: Path) -> Path:
    """A copy of the working tree, without what git ignores."""
    for name in _git("ls-files", "--cached", "--others", "--exclude-standard"):
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
    return copy


def faults_of(path: str) -> list[Fault]:
    """Every fault that can be put into the functions of a file; some mean the same as what stands there."""
    source = Path(path).read_text()
    nodes, lines = list(ast_nodes(get_ast(source))), lines_that_do(source)
    return [
        Fault(path, line, name, occurrence)
        for name, operator in operators().items()
        for occurrence, (line, _) in enumerate(
            start for node in nodes for start, _ in operator.mutation_positions(node)
        )
        if line in lines
    ]


def changed(source: str, fault: Fault) -> str:
    """The file with the fault."""
    return mutate_code(source, operators()[fault.operator], fault.occurrence) or source


def meaning_of(source: str) -> str | None:
    """What is run of a file: its tree without docstrings and annotations. None: it is no Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Name("any")
        elif isinstance(node, ast.Assert):
            # Ours state what cannot happen; so does `strict`.
            node.test, node.msg = ast.Constant(value=True), None
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            node.value = ast.Constant(value=True)
    return ast.dump(tree)


def lines_that_do(source: str) -> set[int]:
    """Lines in functions, but for those that only write to the log."""
    inside, silent = set[int](), set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside |= _lines(node.body[0], node.body[-1])
        elif isinstance(node, ast.Expr) and ast.unparse(node).startswith("logs."):
            silent |= _lines(node, node)
    return inside - silent


def _lines(first: ast.stmt, last: ast.stmt) -> set[int]:
    return set(range(first.lineno, (last.end_lineno or last.lineno) + 1))


def drawn(faults: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    """A sample: a line of the code, then one of its faults, so that a line with many kinds counts no more."""
    chance = random.Random(seed)
    by_line: dict[tuple[str, int], list[Fault]] = {}
    for fault in faults:
        by_line.setdefault((fault.path, fault.line), []).append(fault)
    lines = sorted(by_line)
    chance.shuffle(lines)
    found: list[Fault] = []
    for line in lines:
        kinds = by_line[line]
        chance.shuffle(kinds)
        found += [fault for fault in kinds if is_another(fault)][:1]
        if len(found) == count:
            break
    return found


def is_another(fault: Fault) -> bool:
    """Whether the file with the fault is Python, and means something else."""
    source = Path(fault.path).read_text()
    return meaning_of(changed(source, fault)) not in (None, meaning_of(source))


# -- which tests see it ----------------------------------------------------------------------------------------------


def measured_tests(where: Sequence[str], files: Sequence[str]) -> Tests:
    """Runs the tests once, without a fault. A test that fails as it is says nothing, and is left out."""
    began = time.monotonic()
    print("which tests run which line:", *where, flush=True)
    packages = sorted({Path(path).parts[0] for path in files})
    Path(".coveragerc").write_text("[run]\ncore = ctrace\n")
    command = [*PYTEST, "--cov-context=test", "--cov-report=", "-rfE", "--durations=0", "--durations-min=0.001"]
    command += ["--cov-config=.coveragerc", *(f"--cov={package}" for package in packages), *where]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    unfit = {line.split()[1] for line in ran.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))}
    if unfit or ran.returncode > 1:
        print(ran.stdout[-2000:], ran.stderr[-2000:], "left out, for they fail without any fault:", *sorted(unfit))
    if ran.returncode > 1:
        sys.exit("the tests cannot be run")
    data = coverage.CoverageData()
    data.read()
    by_line: dict[str, Mapping[int, Sequence[str]]] = {}
    for path in files:
        contexts = data.contexts_by_lineno(str(Path.cwd() / path))
        by_line[path] = {
            line: sorted({one.rpartition("|")[0] for one in tests} - unfit - {""}) for line, tests in contexts.items()
        }
    print(f"measured in {time.monotonic() - began:.0f} s", flush=True)
    return Tests(by_line, dict(_durations(ran.stdout.splitlines())))


def _durations(lines: Iterable[str]) -> Iterable[tuple[str, float]]:
    for line in lines:
        match line.split():
            case [seconds, "call", test] if seconds.endswith("s"):
                yield test, float(seconds.removesuffix("s"))
            case _:
                pass


def try_all(sample: Sequence[Fault], tests: Tests, given: argparse.Namespace, *, out_of: int) -> int:
    """Each fault by itself. Prints which are seen, how to repeat the others, and the score by room."""
    deadline, tried, survivors = time.monotonic() + 60 * given.minutes, dict[str, int](), dict[str, int]()
    print(f"{len(sample)} of {out_of} faults, seed {given.seed}", flush=True)
    for number, fault in enumerate(sample, 1):
        if time.monotonic() > deadline:
            print(f"stopped after {given.minutes:g} minutes")
            break
        room = "/".join(Path(fault.path).parts[:-1][:2])
        tried[room] = tried.get(room, 0) + 1
        if survives(fault, tests.of(fault), tests.duration_s):
            survivors[room] = survivors.get(room, 0) + 1
            print_survivor(fault, covered=bool(tests.of(fault)))
        else:
            print(f"{number} of {len(sample)}: {fault.path} {fault.name} is seen", flush=True)
    for room in sorted(tried):
        seen = tried[room] - survivors.get(room, 0)
        print(f"{room}: {seen} of {tried[room]} seen ({100 * seen / tried[room]:.0f} %)")
    return 1 if survivors else 0


def survives(fault: Fault, tests: Sequence[str], duration_s: Mapping[str, float]) -> bool:
    """Whether all of these tests pass with the fault."""
    while sum(map(len, tests)) > ARGUMENT_BYTES_MAX:
        tests = tests[: len(tests) // 2]
    if not tests:
        return True
    module = Path(fault.path)
    source = module.read_text()
    limit_s = PATIENCE_S + 3 * sum(duration_s.get(test, 0.0) for test in tests)
    try:
        module.write_text(changed(source, fault))
        outcome, _ = run_tests(shlex.join([*PYTEST, "-x", *tests]), limit_s)
    finally:
        module.write_text(source)
    return outcome is TestOutcome.SURVIVED


def print_survivor(fault: Fault, *, covered: bool) -> None:
    """The change that no test saw, and how to see it again."""
    source = Path(fault.path).read_text()
    before, after = source.splitlines(), changed(source, fault).splitlines()
    why = "" if covered else " (no test runs this line)"
    print(f"\nNOT SEEN{why}: python -m tests.mutation --files {fault.path} --only {fault.name}")
    print(
        "\n".join(list(difflib.unified_diff(before, after, fault.path, fault.path, lineterm="", n=2))[2:]), flush=True
    )


def _git(*arguments: str) -> list[str]:
    asked: Any = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    return asked.stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
