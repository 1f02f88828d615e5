"""What the demo needs beyond the mesh: the model and a voice, each from a package of its own (extra `vad`)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

NEEDED = ("silero_vad", "espeakng_loader", "onnxruntime")
REMEDY = "`make vad` in a checkout of seqmesh, or: pip install 'seqmesh[executor,local,vad]'"


def require_packages() -> None:
    """Raises ClickException, with the command that installs them, if a package is absent."""
    absent = [name.replace("_", "-") for name in NEEDED if find_spec(name) is None]
    if absent:
        raise click.ClickException(f"the demo needs {' and '.join(absent)}, not installed here: {REMEDY}")


def model_bytes() -> bytes:
    """The ONNX file in the package silero-vad. It is read without importing the package, which would import torch."""
    package = find_spec("silero_vad")
    assert package is not None, "the packages were asked for"
    assert package.origin is not None
    return (Path(package.origin).parent / "data" / "silero_vad.onnx").read_bytes()
