"""Makes tiny models in a directory, and rows for them."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from executor.engine.backends import installed_backends
from executor.engine.base import Backend, Engine, LoadRequest, Row, RowError, RowResult, SeesCancellation
from executor.engine.pytorch.signature import script_deprecation_ignored
from shared.contract.limits import VALUE_BYTES_MAX
from shared.contract.model_config import (
    ControlKind,
    ControlSpec,
    Direct,
    ModelConfig,
    Oldest,
    SequenceBatching,
    StateSpec,
    TensorSpec,
)
from shared.contract.tensors import Tensor, from_numpy, to_numpy

CONTROLS = (
    ControlSpec("START", ControlKind.START, "INT32", (0, 1)),
    ControlSpec("END", ControlKind.END, "INT32", (0, 1)),
    ControlSpec("READY", ControlKind.READY, "INT32", (0, 1)),
    ControlSpec("CORRID", ControlKind.CORRID, "UINT64"),
)

MODEL_HEAD = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n"


def fp32(name: str, *dims: int, **more: Any) -> TensorSpec:
    return TensorSpec(name, "FP32", dims, **more)


def fp32_state(name: str, *dims: int, **more: Any) -> StateSpec:
    """A state `s`, which leaves a model as `s_next`."""
    return StateSpec(name, f"{name}_next", "FP32", dims, **more)


def sequence_config(
    name: str,
    backend: str,
    *,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    states: Sequence[StateSpec] = (),
    controls: Sequence[ControlSpec] = (),
    direct: bool = False,
    max_batch_size: int = 8,
    parameters: Mapping[str, str] | None = None,
) -> ModelConfig:
    """A stateful model's configuration."""
    return ModelConfig(
        name=name,
        backend=backend,
        platform="",
        max_batch_size=max_batch_size,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        sequence_batching=SequenceBatching(
            Direct() if direct else Oldest(max_batch_size), 1_000_000, tuple(controls), tuple(states)
        ),
        parameters=dict(parameters or {}),
    )


def plain_config(
    name: str,
    backend: str,
    *,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_batch_size: int = 8,
    default_model_filename: str = "",
) -> ModelConfig:
    """A stateless model's configuration."""
    return ModelConfig(
        name=name,
        backend=backend,
        platform="",
        max_batch_size=max_batch_size,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        default_model_filename=default_model_filename,
    )


def parameters(**texts: str) -> dict[str, Any]:
    """Parameters as the JSON of a configuration has them."""
    return {name: {"string_value": text} for name, text in texts.items()}


def find_backend(name: str, folders: Sequence[Path] = ()) -> Backend:
    return installed_backends(folders)[name]


class Workshop:
    """A model repository in a directory; the engines it loads are closed with the test.

    device       on which they run
    own_process  each instance of a python model is a process of its own
    """

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        self.directory = directory
        self.device = device
        self.own_process = False
        self.engines: list[Engine] = []

    def version_dir(self, name: str) -> Path:
        directory = self.directory / name / "1"
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def script(self, name: str, module: torch.nn.Module) -> Path:
        """Saves a module as TorchScript."""
        path = self.version_dir(name) / "model.pt"
        with script_deprecation_ignored():
            torch.jit.save(scripted(module), str(path))
        return path

    def program(
        self,
        name: str,
        module: torch.nn.Module,
        example: tuple[torch.Tensor, ...],
        *,
        dynamic: bool = True,
        batch_max: int = 64,
    ) -> None:
        """Saves a module as an exported program. dynamic: for any batch, not only that of the example."""
        sizes = {0: torch.export.Dim("batch", min=1, max=batch_max)} if dynamic else None
        shapes = tuple(sizes for _ in example) if dynamic else None
        torch.export.save(
            torch.export.export(module, example, dynamic_shapes=shapes), self.version_dir(name) / "model.pt2"
        )

    def python(self, name: str, source: str, **siblings: str) -> Path:
        """Writes a `model.py`, which imports numpy and Triton's interface at its top, and modules beside it."""
        directory = self.version_dir(name)
        (directory / "model.py").write_text(MODEL_HEAD + textwrap.dedent(source))
        for sibling, text in siblings.items():
            (directory / f"{sibling}.py").write_text(textwrap.dedent(text))
        return directory / "model.py"

    def load(
        self,
        config: ModelConfig,
        *,
        slots: int = 8,
        model_dir: Path | None = None,
        config_json: str = "{}",
        state_value_bytes_max: int = VALUE_BYTES_MAX,
    ) -> Engine:
        """One instance of the model."""
        if self.own_process and config.backend == "python":
            config = msgspec.structs.replace(config, parameters={**config.parameters, "instance_process": "true"})
        engine = find_backend(config.backend).load(
            LoadRequest(
                config=config,
                config_json=config_json,
                model_dir=model_dir or self.directory / config.name,
                version="1",
                instance_name=f"{config.name}_0_{len(self.engines)}",
                device=self.device,
                slots=slots,
                state_value_bytes_max=state_value_bytes_max,
            )
        )
        self.engines.append(engine)
        return engine

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def scripted(module: torch.nn.Module) -> torch.jit.ScriptModule:
    """A module as TorchScript, without torch's advice to use something else."""
    with script_deprecation_ignored():
        return torch.jit.script(module)


def wire(name: str, values: object, dtype: str = "<f4", datatype: str | None = None) -> Tensor:
    """A tensor from nested lists (or an array) of numbers, bytes or strings."""
    return from_numpy(name, np.array(values, dtype=dtype), datatype)


def controls(*, start: bool = False, end: bool = False, ready: bool = True, corrid: int = 0) -> dict[str, Tensor]:
    """The control tensors that go with `CONTROLS`, as the batcher makes them."""
    return {
        "START": wire("START", [[int(start)]], "<i4"),
        "END": wire("END", [[int(end)]], "<i4"),
        "READY": wire("READY", [[int(ready)]], "<i4"),
        "CORRID": wire("CORRID", [[corrid]], "<u8"),
    }


def results(engine: Engine, rows: Sequence[Row], *, want_state: bool = True) -> list[RowResult]:
    """Runs a batch that must succeed; null rows are left out."""
    ran = engine.run(rows, [want_state] * len(rows)).rows
    assert len(rows) == len(ran)
    failed = [row for row in ran if isinstance(row, RowError)]
    assert [] == failed, failed
    return [row for row in ran if isinstance(row, RowResult)]


def error(engine: Engine, row: Row) -> RowError:
    """Runs one row that must fail."""
    (ran,) = engine.run([row], [True]).rows
    assert isinstance(ran, RowError), ran
    return ran


@contextmanager
def nobody_waits(engine: Engine, row: Row) -> Generator[None]:
    """Within the block an engine hears again and again that nobody waits for a row: also once that row runs."""
    assert isinstance(engine, SeesCancellation)
    over = threading.Event()

    def cancel() -> None:
        while not over.wait(0.01):
            engine.cancel(row)

    cancelling = threading.Thread(target=cancel, daemon=True)
    cancelling.start()
    try:
        yield
    finally:
        over.set()
        cancelling.join()


def array(result: RowResult, name: str) -> NDArray[Any]:
    """One output of a row."""
    (tensor,) = [tensor for tensor in result.outputs if tensor.name == name]
    return to_numpy(tensor)


def raws(result: RowResult) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """A row's outputs and states as bytes, to compare bit by bit."""
    return {t.name: t.raw for t in result.outputs}, {name: t.raw for name, t in result.states.items()}
