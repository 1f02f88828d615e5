"""Modules that keep state in themselves. TorchScript reads annotations itself: no postponed ones in this file."""

from typing import Dict, List, Optional, Tuple  # noqa: UP035 - TorchScript of attributes

import torch
from torch import Tensor, nn


def with_made_up_weights(layer: nn.Module) -> nn.Module:
    """A layer whose weights are the same each time."""
    chance = torch.Generator().manual_seed(2)
    for weight in layer.parameters():
        weight.data = torch.randn(weight.shape, generator=chance)
    return layer


class Rnn(nn.Module):
    """An ordinary recurrent cell over `x` [batch, 3], its state a buffer; weights, a constant and a norm beside it."""

    scale: Tensor
    hidden_state: Tensor

    def __init__(self) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(1)
        self.read = nn.Linear(3, 4)
        self.read.weight.data = torch.randn(4, 3, generator=chance)
        self.read.bias.data = torch.randn(4, generator=chance)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.tensor([0.5, 0.25, 2.0, 1.0]))
        self.register_buffer("hidden_state", torch.full((1, 4), 0.125))

    def forward(self, x: Tensor) -> Tensor:
        self.hidden_state = torch.tanh(self.norm(self.read(x)) + self.hidden_state * self.scale)
        return self.hidden_state * 2


class InPlace(nn.Module):
    """Adds up `x` [batch, 1] in place, in a submodule's buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = InPlaceSum()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class InPlaceSum(nn.Module):
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x)
        return self.total.clone()


class Vector(nn.Module):
    """A buffer without a batch dimension, a counter, a factor and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))
        self.register_buffer("last", torch.tensor(0.0))
        self.steps = 10
        self.factor = 0.5
        self.odd = False

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x[0]
        self.last = x[0, 0]
        self.steps += 1
        self.factor *= 2
        self.odd = not self.odd
        told = torch.tensor([float(self.steps), self.factor, 1.0 if self.odd else 0.0], device=x.device)
        return torch.cat([self.total, self.last.reshape(1), told]).unsqueeze(0)


class MeanOfBatch(nn.Module):
    """A state that mixes the rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.5 + x.mean(0, keepdim=True).expand(x.size(0), 2)
        return self.mean


class FromNone(nn.Module):
    """As the third seed has it: nothing before the first step."""

    hidden_state: Optional[Tensor]  # noqa: UP045

    def __init__(self) -> None:
        super().__init__()
        self.hidden_state = None

    def forward(self, x: Tensor) -> Tensor:
        before = self.hidden_state
        hidden = x if before is None else before * 0.5 + x
        self.hidden_state = hidden
        return hidden


class TwoFromNone(nn.Module):
    """Nothing before the first step, and zeros are refused."""

    total: Optional[Tensor]  # noqa: UP045
    last: Optional[Tensor]  # noqa: UP045

    def __init__(self) -> None:
        super().__init__()
        self.total = None
        self.last = None

    def forward(self, x: Tensor) -> Tensor:
        if bool(torch.any(x == 0)):
            raise ValueError("a zero")
        before = self.total
        self.total = x if before is None else before + x
        self.last = x
        return x


class FromEmpty(nn.Module):
    """Adds up, with a buffer without elements before the first step."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.total.numel() == 0:
            self.total = torch.zeros_like(x)
        self.total = self.total + x
        return self.total


class LstmFromNone(nn.Module):
    """A real LSTM layer, whose pair of states begins as None."""

    hidden: Optional[Tuple[Tensor, Tensor]]  # noqa: UP006, UP045

    def __init__(self) -> None:
        super().__init__()
        self.layer = with_made_up_weights(nn.LSTM(3, 4, batch_first=True))
        self.hidden = None

    def forward(self, x: Tensor) -> Tensor:
        y, self.hidden = self.layer(x.unsqueeze(1), self.hidden)
        return y.squeeze(1)


class PairInPlace(nn.Module):
    """An LSTM cell over `x` [batch, 3], twice, that writes its two states in place and returns both."""

    hidden: Tensor
    cell: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = with_made_up_weights(nn.LSTMCell(3, 4))
        self.register_buffer("hidden", torch.zeros(1, 4))
        self.register_buffer("cell", torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        hidden, cell = self.hidden, self.cell
        for _ in range(2):
            hidden, cell = self.layer(x, (hidden, cell))
        self.hidden.copy_(hidden)
        self.cell.copy_(cell)
        return self.hidden, self.cell


class Tied(nn.Module):
    """Writes in place to a buffer that two others see: a part of it, and the rest of its memory."""

    whole: Tensor
    part: Tensor
    apart: Tensor

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(1, 3)
        self.register_buffer("whole", memory[:, :2])
        self.register_buffer("part", memory[:, 1:2])
        self.register_buffer("apart", memory[:, 2:])

    def forward(self, x: Tensor) -> Tensor:
        self.whole.add_(x)
        return self.part + self.apart


class LayersInPlace(nn.Module):
    """A real LSTM of two layers, whose states are written in place. Its own checks put sizes into tuples."""

    hidden: Tensor
    cell: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = with_made_up_weights(nn.LSTM(3, 4, 2, batch_first=True))
        self.register_buffer("hidden", torch.zeros(2, 1, 4))
        self.register_buffer("cell", torch.zeros(2, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        y, (hidden, cell) = self.layers(x.unsqueeze(1), (self.hidden, self.cell))
        self.hidden.copy_(hidden)
        self.cell.copy_(cell)
        return y.squeeze(1)


class TwoNames(nn.Module):
    """One buffer under two names."""

    total: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1, 1))
        self.register_buffer("last", self.total)

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x)
        return self.last.clone()


class Learns(nn.Module):
    """Changes a parameter, as an online learner does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.add_(x)
        return self.weight.clone()


class Grows(nn.Module):
    """A cache that begins with one position."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.cat([self.cache, x.unsqueeze(1)], 1)
        return self.cache.sum(1)


class InAMadeList(nn.Module):
    """A write to a tensor that an operator has put into a list; torch tells nothing of such lists."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        both = [self.total] * 2
        both[1].add_(x)
        return self.total.clone()


class ListOfStates(nn.Module):
    """A cache that grows: not a tensor."""

    cache: List[Tensor]  # noqa: UP006

    def __init__(self) -> None:
        super().__init__()
        self.cache = []

    def forward(self, x: Tensor) -> Tensor:
        self.cache.append(x)
        return torch.stack(self.cache).sum(0)


class ByCorrelationId(nn.Module):
    """Keeps its sequences apart itself."""

    totals: Dict[int, Tensor]  # noqa: UP006

    def __init__(self) -> None:
        super().__init__()
        self.totals = {}

    def forward(self, x: Tensor, START: Tensor, CORRID: Tensor) -> Tensor:  # noqa: N803 - names of control tensors
        answers: List[Tensor] = []  # noqa: UP006
        for row in range(x.size(0)):
            sequence = int(CORRID[row].item())
            if bool(START[row].item()) or sequence not in self.totals:
                self.totals[sequence] = torch.zeros(1, device=x.device)
            self.totals[sequence] = self.totals[sequence] + x[row]
            answers.append(self.totals[sequence])
        return torch.stack(answers)


class InAList(nn.Module):
    """A write to a tensor inside of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.totals = [torch.zeros(1, 1)]

    def forward(self, x: Tensor) -> Tensor:
        self.totals[0].add_(x)
        return self.totals[0].clone()


class OneOfTwo(nn.Module):
    """Writes to memory of which the code does not say whose it is."""

    even: Tensor
    odd: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("even", torch.zeros(1, 1))
        self.register_buffer("odd", torch.zeros(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        total = self.even if bool(x.sum() > 0) else self.odd
        total.add_(x)
        return total.clone()


class Fails(nn.Module):
    """Changes its state before it fails on a negative number."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x)
        if bool((x < 0).any()):
            raise RuntimeError("negative number")
        return self.total.clone()


class Dictionary(nn.Module):
    """Takes its tensors by name."""

    def forward(self, tensors: Dict[str, Tensor]) -> Tensor:  # noqa: UP006
        return tensors["left"] - tensors["right"]


class OpenDictionary(nn.Module):
    """Takes its tensors by name, and one of them may be absent."""

    def forward(self, tensors: Dict[str, Tensor]) -> Tensor:  # noqa: UP006
        return tensors["left"] - tensors["right"] if "right" in tensors else tensors["left"]


class Complex(nn.Module):
    """Its state is of a type that no state can have."""

    phase: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.zeros(1, 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        self.phase = self.phase + torch.complex(x, x)
        return self.phase.real.contiguous()


class Numbers(nn.Module):
    """Reads words of a vocabulary, any number of them; its state a buffer."""

    hidden_state: Tensor

    def __init__(self, words: int = 7) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(3)
        self.words = nn.Embedding(words, 4)
        self.words.weight.data = torch.randn(words, 4, generator=chance)
        self.register_buffer("hidden_state", torch.zeros(1, 4))

    def forward(self, sequence: Tensor) -> Tensor:
        for position in range(sequence.size(1)):
            self.hidden_state = torch.tanh(self.hidden_state * 0.5 + self.words(sequence[:, position]))
        return self.hidden_state


class Sum(nn.Module):
    """The running sum of one INT32 number a step, its state a buffer."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1, 1, dtype=torch.int32))

    def forward(self, number: Tensor) -> Tensor:
        self.total = self.total + number
        return self.total


class SumInPlace(Sum):
    """The same, changed in place: a trace keeps that."""

    def forward(self, number: Tensor) -> Tensor:
        self.total += number
        return self.total.clone()


class SumFromNone(nn.Module):
    """The same, with nothing before the first step."""

    total: Optional[Tensor]  # noqa: UP045

    def __init__(self) -> None:
        super().__init__()
        self.total = None

    def forward(self, number: Tensor) -> Tensor:
        before = self.total
        total = number if before is None else before + number
        self.total = total
        return total


class LookedUp(nn.Module):
    """Has a table by which other tensors are indexed, and a sum. Only the sum changes."""

    table: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor([2, 0, 1, 2]))
        self.register_buffer("total", torch.zeros(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        spread = torch.zeros_like(x)
        spread[:, self.table[1:]] = x
        self.total = self.total + spread
        return self.total.sum(1, keepdim=True)


class WrittenThroughAView(nn.Module):
    """Writes to its buffer by other names: a slice, a list's element and a transposed view."""

    total: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("total", torch.zeros(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "slice":
            part = self.total[:, 1:]
            part.add_(x[:, 1:])
        elif self.way == "list":
            parts = [x, self.total]
            parts[1].add_(x)
        else:
            view = self.total.t().view(3, -1)
            view[0] = view[0] + x[:, 0]
        return self.total.sum(1, keepdim=True)


class WrittenUnknownToTorch(nn.Module):
    """Writes to its memory in ways of which torch's schemas do not tell; `x` [batch, 3]."""

    total: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("total", torch.zeros(1, 3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))
        self.drop = nn.Dropout(0.5)
        self.totals = {"total": torch.zeros(1, 3)}

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "batch_norm":
            y = nn.functional.batch_norm(torch.cat([x, x + 1]), self.mean, self.variance, training=True)
            return (y[:1] + self.mean).sum(1, keepdim=True)
        if self.way == "instance_norm":
            y = nn.functional.instance_norm(torch.stack([x, x + 1], 2), self.mean, self.variance)
            return (y.sum(2) + self.mean).sum(1, keepdim=True)
        if self.way == "dropout":
            total = self.drop(self.total)
        elif self.way == "type_as":
            total = self.total.type_as(x)
        elif self.way == "fork":
            total = torch.jit.wait(torch.jit.fork(_same, self.total))
        else:
            total = self.totals["total"]
        total += x
        return total.sum(1, keepdim=True)


def _same(total: Tensor) -> Tensor:
    return total


class Forgets(nn.Module):
    """Adds up `x` [batch, 3], and forgets all of it once a number is large: right for one row a call."""

    total: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("total", torch.zeros(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "where":
            self.total = torch.where(x.max() > 9.0, torch.zeros_like(self.total), self.total) + x
        elif bool((self.total > 1000.0).any()):
            self.total = x
        else:
            self.total = self.total + x
        return self.total.sum(1, keepdim=True)


class Hooked(nn.Module):
    """Its state is changed by a hook of its own, which TorchScript keeps."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1, 3))
        self.register_forward_hook(adds_up)

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True)


def adds_up(self: Hooked, input: Tuple[Tensor], output: Tensor) -> Tensor:  # noqa: A002, UP006 - TorchScript's names
    self.total = self.total + input[0]
    return output + self.total.sum(1, keepdim=True)
