"""One copy of a model's weights for all of its instances on a device (`ENABLE_WEIGHT_SHARING`).

Each instance keeps a module of its own, because the module's attributes may be set before each call. Only the memory
of tensors that forward never changes is shared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from threading import Lock
from weakref import finalize

import torch
from torch import nn

WeightsFile = tuple[str, int, int, str]
"""A file as it is now, on a device."""

_shared: dict[WeightsFile, Mapping[str, torch.Tensor]] = {}
"""The weights of the first module of each file on each device, as long as that module is there. Read once: while a
module runs, TorchScript may set its attributes without Python's lock, and who reads them then may read memory that is
freed.
"""
_looking = Lock()


def weights_file(path: Path, device: torch.device) -> WeightsFile:
    """Asked before a module is loaded: a file that changes meanwhile does not get the weights of the one before."""
    file = path.stat()
    return str(path), file.st_mtime_ns, file.st_size, str(device)


def share_weights(module: nn.Module, key: WeightsFile, changing: Collection[str]) -> None:
    """Lets a module use the weights of another one from the same file, if there is one.

    changing  paths of the tensors that forward changes: every module keeps its own of them
    """
    own = {name: tensor for name, tensor in _tensors(module) if name not in changing}
    with _looking:
        shared = _shared.setdefault(key, own)
    if shared is own:
        finalize(module, _shared.pop, key)
        return
    for name, tensor in own.items():
        tensor.data = shared[name].data


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
