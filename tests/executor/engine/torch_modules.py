"""Modules that the tests script or export. TorchScript reads annotations itself: no postponed ones in this file."""

from typing import Any

import torch
from torch import Tensor, nn


class Cell(nn.Module):
    """An LSTM step over `x` [batch, 3]; exact, so that batches can be compared bit by bit."""

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = c * 0.5 + x
        h = h + c
        return h * 2, h, c


class CrossedStates(nn.Module):
    """Two states whose output names sort the other way round than their input names."""

    def forward(self, x: Tensor, alpha: Tensor, beta: Tensor) -> dict[str, Tensor]:
        return {"y": alpha * 100 + beta, "zz_alpha": alpha + x, "aa_beta": beta + 10 * x}


class CrossedTuple(nn.Module):
    """The same by order: the output, then the states as they are declared."""

    def forward(self, x: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return alpha * 100 + beta, alpha + x, beta + 10 * x


class Indexed(nn.Module):
    """Arguments and results that are found by NAME__INDEX only."""

    def forward(self, first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
        return first - second, third + first


class Picky(nn.Module):
    """Fails when any number of the batch is negative."""

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        if bool((x < 0).any()):
            raise RuntimeError("negative number")
        total = total + x
        return total, total


class Unreadable(nn.Module):
    """An output without content where any number of the batch is negative."""

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        total = total + x
        y = total
        if bool((x < 0).any()):
            y = torch.empty_like(total, device="meta")
        return y, total


class OddState(nn.Module):
    """Returns `x` as its state; where a number is negative, a state without content, or a sparse one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        if bool((x >= 0).all()):
            return total, x
        if self.kind == "meta":
            return total, torch.empty_like(total, device="meta")
        return total, x.to_sparse()


class Nested(nn.Module):
    """One of its values is two tensors."""

    def __init__(self, *, named: bool) -> None:
        super().__init__()
        self.named = named

    def forward(self, x: Tensor) -> Any:
        pair = (x + 1, x + 2)
        return {"y": x * 2, "pair": pair} if self.named else (x * 2, pair)


class Unfit(nn.Module):
    """Its values, but the first one, can be no outputs."""

    def forward(self, x: Tensor) -> Any:
        return x * 2, None, 3, x.shape[0], x.to(torch.complex64)


class NoTensor(nn.Module):
    """One of its values is no tensor."""

    def forward(self, x: Tensor) -> Any:
        return {"y": x * 2, "nothing": None}


class Negated(nn.Module):
    """Both results are views in which torch notes that their numbers are to be negated."""

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        negated = torch.conj(torch.complex(x, x)).imag
        return negated, negated


class Recurrent(nn.Module):
    """A real recurrent layer, for one step of it: `kind` is LSTM, GRU or RNN."""

    is_lstm: torch.jit.Final[bool]  # pyright: ignore[reportPrivateImportUsage] - documented

    def __init__(self, kind: str, size: int, layers: int) -> None:
        super().__init__()
        self.is_lstm = kind == "LSTM"
        self.layer = getattr(nn, kind)(size, size, layers, batch_first=True)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        before = h.transpose(0, 1).contiguous()
        if self.is_lstm:
            y, after = self.layer(x, (before, torch.zeros_like(before)))
            return y, after[0].transpose(0, 1)
        y, after = self.layer(x, before)
        return y, after.transpose(0, 1)


class Vocabulary(nn.Module):
    """Adds up the numbers of words 0 to 9. On a GPU another word is a kernel's failed assertion, which ends the GPU for
    the whole process."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Embedding(10, 1)
        self.numbers.weight = nn.Parameter(torch.arange(10.0).unsqueeze(1))

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        total = total + self.numbers(x.squeeze(1))
        return total, total


class Folding(nn.Module):
    """Sums rows of any length into a state of fixed shape."""

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        total = total + x.sum(1, keepdim=True)
        return total, total


class Growing(nn.Module):
    """Keeps everything it has seen: a state of variable shape."""

    def forward(self, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([seen, x], 1)
        return seen.sum(1, keepdim=True), seen


class Identity(nn.Module):
    """Returns its input and adds it to its state with an exclusive or, in the dtype that they have."""

    def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Texts(nn.Module):
    """Remembers the last string and returns it before the new one."""

    def forward(self, text: list[str], last: list[str]) -> tuple[list[str], list[str]]:
        return [last[i] + text[i] for i in range(len(text))], text


class WithControls(nn.Module):
    """Adds where READY; START is part of the result."""

    def forward(self, x: Tensor, start: Tensor, ready: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        s = s + x * ready
        return s + 1000 * start, s


class WithOptional(nn.Module):
    """One argument that may be absent."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            return x + bias
        return x


class Unbatched(nn.Module):
    """No batch dimension."""

    def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        s = s + x
        return s, s


class Doubled(nn.Module):
    """Any shape."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Forks(nn.Module):
    """A part of it is computed by another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Doubled()

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 0).any()):
            return torch.jit.wait(torch.jit.fork(self.part, x))
        return x


class OwnMemory(nn.Module):
    """Returns memory of its own, to which its next call writes."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        own = self.total[: x.size(0)]
        own.add_(x)
        return own


class Placed(nn.Module):
    """Tells each row its position in the batch."""

    def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.arange(x.size(0), device=x.device).unsqueeze(1).float()
        return x * 0 + place, s


class HalfPrecision(nn.Module):
    """Returns another dtype than the configuration says."""

    def forward(self, x: Tensor) -> Tensor:
        return x.half()


class Sparse(nn.Module):
    """Returns a tensor that has only its numbers beside zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to_sparse()


class Shorter(nn.Module):
    """Returns one row too few."""

    def forward(self, x: Tensor) -> Tensor:
        return x[1:]


class Segments(nn.Module):
    """Sums each request's part of the ragged `x` into its state, and returns the doubled parts behind each other."""

    def forward(self, x: Tensor, ends: Tensor, lengths: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if x.dim() != 1 or ends.dim() != 1 or bool((ends[1:] - ends[:-1] != lengths).any()):
            raise RuntimeError("not ragged")
        if bool((x < 0).any()):
            raise RuntimeError("negative number")
        sums = torch.cat([torch.zeros(1, device=x.device), torch.cumsum(x, 0)])
        at = ends.to(torch.int64)
        total = total + (sums[at[1:]] - sums[at[:-1]]).unsqueeze(1)
        return x * 2, total, total


class Sentences(nn.Module):
    """Strings of ragged rows, each with the number of its row's strings behind it."""

    def forward(self, words: list[str], items: Tensor) -> list[str]:
        result: list[str] = []
        at = 0
        for row in range(items.shape[0]):
            count = int(items[row, 0])
            result += [word + str(count) for word in words[at : at + count]]
            at += count
        return result


class Indivisible(nn.Module):
    """One string more than it was given."""

    def forward(self, words: list[str], items: Tensor) -> list[str]:
        return words + ["another"]  # noqa: RUF005 - TorchScript knows no starred lists


class Gated(nn.Module):
    """An LSTM step over `x` [batch, 5] with a hidden state of 21: not exact, so that every kernel's rounding shows."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(5 + 21, 4 * 21)
        self.out = nn.Linear(21, 3)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        i, f, g, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = torch.sigmoid(f.contiguous()) * c + torch.sigmoid(i.contiguous()) * torch.tanh(g)
        h = torch.sigmoid(o.contiguous()) * torch.tanh(c)
        return torch.sigmoid(self.out(h)), h, c


class Coupled(nn.Module):
    """Each row's result depends on the rows before it."""

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        total = total + torch.cumsum(x, 0)
        return total, total


class Numbered(nn.Module):
    """Adds a row's number."""

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        total = total + x + torch.arange(x.size(0), device=x.device).unsqueeze(1)
        return total, total


class Shared(nn.Module):
    """Divides by the number of rows."""

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        total = total + x / x.size(0)
        return total, total


class Limited(nn.Module):
    """Makes all rows smaller if one of them is very large."""

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        largest = x.abs().max()
        total = total + torch.where(largest > 100, x * 100 / largest, x)
        return total, total


class Touched(nn.Module):
    """Adds nothing of the other rows, unless they have NaN."""

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        total = total + x + 0 * x.sum(0)
        return total, total


class Choosing(nn.Module):
    """Forgets everything if any row asks for it."""

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        total = total + x
        if bool(x.max() > 1000):
            total = total * 0
        return total, total


class Weighted(nn.Module):
    """Has a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        total = total + x * self.factor
        return total, total


class RarelyPlaced(nn.Module):
    """Of few rows the result depends on the place, as if a kernel rounded four rows at a time."""

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.arange(x.size(0)).unsqueeze(1)
        total = total + x + 1e-3 * ((x > 1.6) & (place % 4 == 0))
        return total, total


class PlacedBehindTwo(nn.Module):
    """The first two rows of a batch are computed otherwise than the others."""

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.arange(x.size(0)).unsqueeze(1)
        total = total + x + 1e-3 * (place >= 2)
        return total, total


class Random(nn.Module):
    """Never the same result twice."""

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        total = total + x + torch.rand_like(x)
        return total, total


class FewRows(nn.Module):
    """Has room for eight rows only."""

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        if x.size(0) > 8:
            raise RuntimeError("too many rows")
        total = total + x
        return total, total


class Normalised(nn.Module):
    """Adds up directions: a row of zeros has none, and becomes NaN."""

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        total = total + x / x.abs().sum(1, keepdim=True)
        return total, total


class TellsInferenceMode(nn.Module):
    """1 where its tensors are made in inference mode, else 0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x) + float(torch.zeros_like(x).is_inference())


class Edited(nn.Module):
    """Keeps the first positions of its state along an axis (of a row), and adds others behind them."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis + 1

    def forward(self, keep: Tensor, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        count = int(keep[0, 0])
        if count < 0:
            raise ValueError("nothing is kept")
        # Whatever is done to the input is nobody's state.
        kept = seen.narrow(self.axis, 0, count).clone()
        seen.zero_()
        new = torch.cat([kept, x], self.axis)
        return torch.full([1, 1], new.size(self.axis)), new


class TwoEdited(nn.Module):
    """Two states, of which the first keeps only some of its positions."""

    def forward(self, keep: Tensor, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        new = torch.cat([a[:, : int(keep[0, 0])], x], 1)
        return torch.full([1, 1], new.size(1)), new, torch.cat([b, x], 1)
