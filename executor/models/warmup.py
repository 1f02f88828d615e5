"""Runs a model's warm-up samples on a new instance, before it is ready (`model_warmup`).

A sample is a batch of equal rows that goes to the engine itself. It meets no scheduler and is not counted. It leaves no
implicit state, because its rows begin from the initial state and have no slot. A control tensor that the sample leaves
out is that of a sequence of one step (Triton gives the model no tensor at all then).

Random numbers are reproducible; floating-point ones lie in [0, 1), where Triton's are random bytes.

Source: triton-spec section 4, "model_warmup"; Triton core, backend_model_instance.cc (GenerateWarmupData, WarmUp).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from executor.core.controls import ControlTensors
from executor.engine.base import Engine, Row, RowError
from executor.engine.null_rows import zeros
from shared.contract.errors import Code, LoadError
from shared.contract.model_config import ControlSpec, ModelConfig, WarmupInput, WarmupSample, WarmupSource
from shared.contract.tensors import ELEMENT_BYTES, FLOATS, Tensor, element_count, float_bytes
from shared.process import logs

WARMUP_DIR = "warmup"
"""Beside the version directories; holds the files that samples name."""

_SEED = 0


def warm_up(engine: Engine, config: ModelConfig, model_dir: Path, instance: str) -> None:
    """Runs every sample as often as it says. Stops at the first that fails: raises LoadError in Triton's words."""
    for sample in config.warmup:
        row = warmup_row(config, sample, model_dir)
        for iteration in range(1, sample.count + 1):
            logs.debug("warm-up", instance=instance, sample=sample.name, iteration=iteration)
            _run(engine, sample, row)


def warmup_row(config: ModelConfig, sample: WarmupSample, model_dir: Path) -> Row:
    """One request of a sample's batch; all are equal.

    raises  LoadError for a tensor that the model does not have, and for a file that cannot be read
    """
    specs = {spec.name for spec in config.inputs}
    controls = {control.name: control for control in config.controls}
    leading = (1,) if config.max_batch_size > 0 else ()
    inputs: dict[str, Tensor] = {}
    given: dict[str, Tensor] = {}
    for name, described in sample.inputs.items():
        if name in controls:
            given[name] = _control(config, sample, controls[name], described, model_dir)
        elif name in specs:
            shape = (*leading, *described.dims)
            inputs[name] = Tensor(name, described.datatype, shape, _content(sample, described, model_dir))
        else:
            raise _failed(sample, f"unexpected inference input '{name}' for model '{config.name}'")
    usual = ControlTensors(config).of_nobody(start=True, end=True)
    return Row(inputs=inputs, controls={**usual, **given}, start=config.sequence_batching is not None)


def _run(engine: Engine, sample: WarmupSample, row: Row) -> None:
    rows = [row] * sample.batch_size
    try:
        results = engine.run(rows, [False] * len(rows)).rows
    except Exception as error:
        raise _failed(sample, str(error)) from error
    messages = [result.message for result in results if isinstance(result, RowError)]
    if messages:
        raise _failed(sample, *messages)


def _failed(sample: WarmupSample, *messages: str) -> LoadError:
    reasons = "".join(f"{message}; " for message in messages)
    return LoadError(f"failed to run warmup sample '{sample.name}': {reasons}", Code.INVALID_ARG)


def _control(
    config: ModelConfig, sample: WarmupSample, control: ControlSpec, described: WarmupInput, model_dir: Path
) -> Tensor:
    shape = (1, 1) if config.max_batch_size > 0 else (1,)
    if described.datatype != control.datatype:
        raise _failed(
            sample,
            f"inference input '{control.name}' data-type is '{described.datatype}', but model '{config.name}' expects "
            f"'{control.datatype}'",
        )
    if element_count(described.dims) != 1:
        raise _failed(
            sample, f"control tensor '{control.name}' of model '{config.name}' has one element, not {described.dims}"
        )
    return Tensor(control.name, control.datatype, shape, _content(sample, described, model_dir))


def _content(sample: WarmupSample, described: WarmupInput, model_dir: Path) -> bytes:
    if described.source is WarmupSource.FILE:
        return _file_content(sample, described, model_dir / WARMUP_DIR / described.file)
    if described.datatype == "BYTES" or described.source is WarmupSource.ZERO:
        return zeros(described.datatype, described.dims)
    return _random(described.datatype, element_count(described.dims))


def _file_content(sample: WarmupSample, described: WarmupInput, path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _failed(sample, f"cannot read {path}: {error.strerror}") from error
    if described.datatype == "BYTES":
        return content
    return content[: element_count(described.dims) * ELEMENT_BYTES[described.datatype]]


def _random(datatype: str, count: int) -> bytes:
    generator = np.random.default_rng(_SEED)
    if datatype in FLOATS:
        return float_bytes(datatype, generator.random(count))
    if datatype == "BOOL":
        return generator.integers(0, 2, count, np.uint8).tobytes()
    return generator.bytes(count * ELEMENT_BYTES[datatype])
