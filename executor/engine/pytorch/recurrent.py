"""Puts the weights of recurrent layers where cuDNN wants them.

cuDNN takes all weights of an LSTM, a GRU or an RNN from one piece of memory. In a module that was loaded, each weight
has a piece of its own. Then torch copies them together at every call, which takes several times as long as the layer.
`torch.nn` can do it once (`RNNBase.flatten_parameters`), but neither TorchScript nor an exported program can be told
to. All of them call the same few operators. So these operators are watched during one call, and the weights that they
were given are put together by `torch.nn`'s own means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class _Kind(NamedTuple):
    """gates: how many matrices are stacked in one weight"""

    module: type[nn.LSTM | nn.GRU | nn.RNN]
    gates: int


KINDS: Mapping[Any, _Kind] = {
    torch.ops.aten.lstm.input: _Kind(nn.LSTM, 4),
    torch.ops.aten.gru.input: _Kind(nn.GRU, 3),
    torch.ops.aten.rnn_tanh.input: _Kind(nn.RNN, 1),
    torch.ops.aten.rnn_relu.input: _Kind(nn.RNN, 1),
}
"""Arguments: input, state, weights, has biases, layers, dropout, train, bidirectional, batch first."""


class RecurrentLayers(TorchDispatchMode):
    """Remembers which recurrent layers are called while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[_Kind, Sequence[Any]]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without this, the first call imports torch's compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in KINDS:
            self._calls.append((KINDS[func], args))
        return func(*args, **(kwargs or {}))

    def join_weights(self) -> None:
        """Moves each layer's weights into one piece of memory. The tensors keep their identity, so later calls find
        them there. On a CPU, and where cuDNN is not used, nothing happens.
        """
        with torch.inference_mode(mode=False), torch.no_grad():
            for kind, (_, _, weights, biases, layers, _, _, both_ways, *_) in self._calls:
                # Two weights that share memory could not be told apart afterwards.
                if len({weight.data_ptr() for weight in weights}) == len(weights):
                    _join(kind, weights, biases=biases, layers=layers, both_ways=both_ways)


def _join(kind: _Kind, weights: Sequence[torch.Tensor], *, biases: bool, layers: int, both_ways: bool) -> None:
    from_input, from_hidden, *_ = weights
    hidden, leaving = from_input.size(0) // kind.gates, from_hidden.size(1)
    projection = {"proj_size": leaving} if leaving != hidden else {}
    # On "meta" it has no weights of its own: drawing them would change the random numbers of models.
    sizes = {"input_size": from_input.size(1), "hidden_size": hidden, "num_layers": layers, **projection}
    layer = kind.module(**sizes, bias=biases, bidirectional=both_ways, device="meta", dtype=from_input.dtype)
    layer.to_empty(device=from_input.device)
    for own, given in zip(layer.parameters(), weights, strict=True):
        own.data = given
    layer.flatten_parameters()
    for own, given in zip(layer.parameters(), weights, strict=True):
        given.data = own.data
