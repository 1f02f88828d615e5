"""One copy of a model's weights for all of its instances on a device (`ENABLE_WEIGHT_SHARING`).

Each instance keeps a module of its own, because the module's attributes may be set before each call. Only the memory
of tensors that forward never changes is shared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

import torch
from torch import nn

_first: WeakValueDictionary[tuple[str, int, int, str], nn.Module] = WeakValueDictionary()
_looking = Lock()


def share_weights(module: nn.Module, path: Path, device: torch.device, changing: Collection[str]) -> None:
    """Lets a module use the weights of another one from the same file, if there is one.

    changing  paths of the tensors that forward changes: every module keeps its own of them
    """
    file = path.stat()
    key = (str(path), file.st_mtime_ns, file.st_size, str(device))
    with _looking:
        first = _first.setdefault(key, module)
    if first is module:
        return
    of_first = dict(_tensors(first))
    for name, tensor in _tensors(module):
        if name not in changing:
            tensor.data = of_first[name].data


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
