"""The programs of README and docs work as they stand.

A program on an ordinary page runs against the shared mesh; the only thing changed are addresses. A page that is marked
as a story is played from its beginning to its end, in an empty folder: files are written, `seqmesh up` starts a mesh,
the programs and commands run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deploy.local.private_mesh import environment_without_settings
from tests.docs.commands import SEQMESH, Line, check, lines_of
from tests.markdown_pages import (
    HOLDER,
    OUTPUT,
    ROOT,
    Block,
    all_blocks,
    blocks_of,
    name_of,
    pages,
    story_mark,
    story_names,
)
from tests.mesh.running_mesh import RunningMesh, running_mesh, wait

TIMEOUT_S = 100
OPERATING = {"doctor", "drain", "seq", "tenants", "settings", "trace", "version"}
"""Commands of `seqmesh` that stories carry out. The others run for ever or for long, and have tests of their own."""
PROGRAMS = [
    block
    for block in all_blocks()
    if block.language == "python" and block.page not in story_names() and not block.is_excused
]


def at(mesh: RunningMesh, text: str) -> str:
    """A program or a command, with the addresses of a mesh."""
    metrics = f"{mesh.state.host}:{mesh.gateways[0].metrics_port}"
    for port, address in (("8000", mesh.http()), ("8001", mesh.grpc()), ("8002", metrics)):
        text = text.replace(f"localhost:{port}", address)
    return text


def finished(command: list[str], folder: Path) -> str:
    """What a command prints; it must end well."""
    environment = {**environment_without_settings(), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
    return ended.stdout


# Programs of ordinary pages


@pytest.mark.parametrize("block", PROGRAMS, ids=[block.where for block in PROGRAMS])
def test_programs_work_and_print_what_the_page_says(block: Block, mesh: RunningMesh, tmp_path: Path) -> None:
    program = at(mesh, block.text)
    assert program != block.text, "it talks to a mesh"

    printed = finished([sys.executable, "-c", program], tmp_path)

    assert printed
    assert printed == output_after(block, printed)


def output_after(block: Block, default: str) -> str:
    """What the page says that a program prints, if it does."""
    blocks = [one for one in all_blocks() if one.page == block.page]
    after = blocks[blocks.index(block) + 1 :][:1]
    return after[0].text if after and OUTPUT in after[0].marks else default


def test_two_texts_go_on_without_state_in_the_client(mesh: RunningMesh, tmp_path: Path) -> None:
    """Interleaved or one after the other: each text's predictions are its own."""
    program = at(mesh, next(block.text for block in PROGRAMS if block.page == "README.md"))

    lines = finished([sys.executable, "-c", program], tmp_path).splitlines()

    assert 6 == len(lines)
    in_turn = finished([sys.executable, "-c", re.sub(r"send\(2.*\n", "", program)], tmp_path).splitlines()
    assert [line for line in lines if line.startswith("1 ")] == in_turn


QUESTIONS = [
    (block, line)
    for block in all_blocks()
    if block.language == "sh" and block.page not in story_names() and not block.is_excused
    for line in lines_of(block.text)
    if line.program == "curl"
]


@pytest.mark.parametrize(("block", "line"), QUESTIONS, ids=[f"{block.where}" for block, _ in QUESTIONS])
def test_questions_are_answered(block: Block, line: Line, mesh: RunningMesh, tmp_path: Path) -> None:
    *options, url = line.arguments
    assert finished(asked(at(mesh, url), options), tmp_path)


def asked(url: str, options: list[str]) -> list[str]:
    """curl's request, with what every machine has."""
    body = options[options.index("-d") + 1] if "-d" in options else ""
    program = (
        "import sys, urllib.request as r; url, method, body = sys.argv[1:]; "
        "print(r.urlopen(r.Request(url, body.encode() or None, method=method)).read().decode())"
    )
    return [sys.executable, "-c", program, f"http://{url}", "POST" if body or "POST" in options else "GET", body]


# Stories


@dataclass(slots=True)
class Story:
    """A page that is being played."""

    folder: Path
    repository: str
    """Where the models lie when `seqmesh up` is not told; as the mark says."""
    start: Callable[..., RunningMesh]
    files: dict[Path, str] = field(default_factory=dict[Path, str])
    mesh: RunningMesh | None = None
    printed: list[tuple[Line, str]] = field(default_factory=list[tuple[Line, str]])

    def play(self, block: Block) -> None:
        """Carries one block out."""
        if block.title:
            self.files[self.folder / block.title] = block.text
            self.write()
        elif block.language == "sh":
            text = block.text.replace("executor-1", self.holder()) if HOLDER in block.marks else block.text
            for line in lines_of(text):
                self.carry_out(line)
        elif OUTPUT in block.marks:
            assert block.text == self.printed[-1][1], block.where

    def write(self) -> None:
        """Writes the files so far, with the addresses of the mesh that runs."""
        for path, text in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(at(self.mesh, text) if self.mesh and path.parent == self.folder else text)

    def carry_out(self, line: Line) -> None:
        """Runs a command; those that stories do not run must at least exist."""
        check(line)
        match line.program, line.arguments:
            case "mkdir", (name,):
                (self.folder / name).mkdir()
            case "cd", (name,):
                self.folder /= name
            case "seqmesh", ("up", *options):
                self.run_mesh(options)
            case "make", ("run", options):
                self.run_mesh(options.removeprefix("UP=").split())
            case "seqmesh", (name, *_) if name in OPERATING:
                if line.arguments[:2] == ("seq", "move"):
                    wait(self.every_executor_serves, "an executor that was drained before serves again")
                self.keep(line, [sys.executable, "-m", "deploy.cli", *line.arguments])
            case "python", (file, *arguments):
                self.keep(line, [sys.executable, file, *arguments])
            case "curl", (*options, url):
                assert self.mesh
                self.keep(line, asked(at(self.mesh, url), options))
            case _:
                pass

    def run_mesh(self, options: list[str]) -> None:
        """`seqmesh up`, on free ports. Its data lie where the reader's would."""
        given = understood(options)
        models = [self.folder / str(path) for path in given["models"]] or [ROOT / self.repository]
        self.mesh = self.start(self.folder / ".seqmesh", models, executors=given["executors"])
        self.write()

    def keep(self, line: Line, command: list[str]) -> None:
        """Runs a command here and keeps what it prints."""
        self.printed.append((line, finished(command, self.folder)))

    def every_executor_serves(self) -> bool:
        """Whether a sequence could be moved to any of them."""
        assert self.mesh
        alive = self.mesh.alive()
        return len(alive) == len(self.mesh.names("executor")) and not any(
            served.closing for one in alive for served in one.models
        )

    def holder(self) -> str:
        """The executor that holds a sequence, as `seqmesh drain --list` says."""
        said = finished([sys.executable, "-m", "deploy.cli", "drain", "--list"], self.folder)
        rows = [line.split() for line in said.splitlines()[1:]]
        return next(row[0] for row in rows if int(row[3]) > 0)

    def printed_by(self, file: str) -> list[str]:
        """The lines that a program of the page has printed, over all its runs."""
        return [one for line, text in self.printed if line.arguments[:1] == (file,) for one in text.splitlines()]


def understood(options: list[str]) -> dict[str, Any]:
    """What `seqmesh up` understands."""
    return SEQMESH["up"].make_context("up", list(options)).params


@pytest.fixture
def start() -> Iterator[Callable[..., RunningMesh]]:
    with ExitStack() as stack:

        def run(directory: Path, models: list[Path], executors: int) -> RunningMesh:
            return stack.enter_context(running_mesh(directory, models, executors=executors))

        yield run


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [page for page in pages() if story_mark(page)], ids=name_of)
def test_stories_go_as_they_are_told(page: Path, tmp_path: Path, start: Callable[..., RunningMesh]) -> None:
    repository = story_mark(page).partition("models=")[2]
    story = Story(tmp_path, repository, start)

    for block in blocks_of(page):
        if not block.is_excused:
            story.play(block)

    assert story.mesh, "a story without a mesh"
    assert [] == story.mesh.tracebacks()
    assert [one for one in story.files if one.suffix == ".py" and one.parent == story.folder] == [
        story.folder / name
        for name in dict.fromkeys(line.arguments[0] for line, _ in story.printed if line.program == "python")
    ], "every program of the page is run"
    if "alone.py" in {path.name for path in story.files}:
        assert story.printed_by("step.py") == story.printed_by("alone.py"), "the state survived its executor"
        assert 1 == len(story.mesh.deaths())
