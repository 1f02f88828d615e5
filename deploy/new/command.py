"""`seqmesh new`: writes a model that works, to be changed into one's own."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import click

from deploy.local.launcher import refuse_a_model

TEMPLATES = Path(__file__).parent / "templates"
KINDS = ("python", "torch", "onnx")
MAKER = "make_model.py"
"""Writes the model's file. A template without it needs none."""
RUN = """
import linecache, sys
from pathlib import Path

file, name = sys.argv[1:]
source = Path(file).read_text()
linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
exec(compile(source, name, "exec"), {"__name__": "__main__", "__file__": file})
"""
"""Runs a program by another name than its file's: TorchScript writes that name into the model, for its errors."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
NAME_LENGTH_MAX = 200
"""File systems take 255 bytes."""
HELP = """Writes the folder of a model that works: configuration, model, and a client.

The model has one input, one output and one state, which the mesh keeps for each sequence. Change it into yours.

\b
  seqmesh new tracker --from torch    models/tracker, a cell of PyTorch
  seqmesh up --models models          serves it
  python models/tracker/client.py     a sequence of four steps
"""


@click.command("new", help=HELP, context_settings={"max_content_width": 110})
@click.argument("model")
@click.option(
    "--from",
    "kind",
    type=click.Choice(KINDS),
    default="python",
    show_default=True,
    help="python: code with Triton's Python API. torch: a module of PyTorch. onnx: a graph for ONNX Runtime.",
)
@click.option(
    "--models",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("models"),
    show_default=True,
    metavar="DIR",
    help="The repository in which the folder is made.",
)
def new(model: str, kind: str, models: Path) -> None:
    if not NAME.fullmatch(model):
        raise click.BadParameter(f"'{model}': letters, digits, '_', '.' and '-' only", param_hint="MODEL")
    if kind != "python" and find_spec(kind) is None:
        raise click.ClickException(f"the package {kind} writes the model's file, and is missing: pip install {kind}")
    folder = models / model
    if len(model) > NAME_LENGTH_MAX:
        raise click.BadParameter(f"{len(model)} characters, of at most {NAME_LENGTH_MAX}", param_hint="MODEL")
    try:
        if folder.exists():
            raise click.ClickException(f"{folder} exists: give another name, or remove it")
        refuse_a_model(models)
        models.mkdir(parents=True, exist_ok=True)
        # Beside its place, and moved there when it is whole: an executor that polls the repository never sees a part.
        with tempfile.TemporaryDirectory(prefix=".new-", dir=models) as made:
            write(Path(made) / model, kind, folder.absolute())
            (Path(made) / model).rename(folder)
    except OSError as error:
        # That of a folder tells of each file that was not copied.
        cause = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise click.ClickException(f"{folder} cannot be written: {cause}") from error
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        click.echo(f"  {path}")
    click.echo(f"\nNow: {shlex.join(['seqmesh', 'up', '--models', str(models)])}")
    click.echo(f"Then, in another terminal: {shlex.join(['python', str(folder / 'client.py')])}")


def write(folder: Path, kind: str, place: Path) -> None:
    """Copies a template, and has it write the model's file. Raises click.ClickException with what that said.

    place  where the folder will be
    """
    shutil.copytree(TEMPLATES / kind, folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TEMPLATES / "client.py", folder)
    if (folder / MAKER).exists():
        command = [sys.executable, "-c", RUN, str(folder / MAKER), str(place / MAKER)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise click.ClickException(f"{MAKER} failed:\n{done.stderr.strip()}")
