"""Writes a model repository with a small transformer whose attention cache is the state of a sequence: `attention`
reads a text, `chat` replies to one.

    python examples/attention/make_model.py build/attention
    seqmesh up --models build/attention --executors 2

The weights are random numbers: what it says of a text is nonsense, but always the same nonsense. The guide "States that
grow" (docs/guides/growing-states.md) explains it.
"""

# No `from __future__ import annotations` here: TorchScript needs the annotations below as types, not as strings.
import argparse
import math
import shutil
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

LAYERS, HEADS, WIDTH = 2, 4, 64
"""WIDTH: numbers of a character, divided among the heads."""
CODES = 256


class Layer(nn.Module):
    """Attention and a feed-forward network."""

    # Class attributes, because TorchScript sees no constants of the module.
    heads: Final[int] = HEADS
    width: Final[int] = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_feed = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, cache: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """x: [batch, new, width]; cache: keys and values so far, [batch, 2, heads, positions, width / heads]; returns
        the layer's output, and the cache with the new positions behind the old ones
        """
        batch, new = x.size(0), x.size(1)
        found = self.queries_keys_values(self.before_attention(x)).view(batch, new, 3, self.heads, -1)
        found = found.permute(2, 0, 3, 1, 4)  # [3, batch, heads, new, width / heads]
        cache = torch.cat([cache, torch.stack([found[1], found[2]], 1)], 3)
        scores = torch.matmul(found[0], cache[:, 0].transpose(2, 3)) / math.sqrt(self.width // self.heads)
        seen = torch.matmul(torch.softmax(scores + mask, -1), cache[:, 1])
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, new, self.width))
        return x + self.feed(self.before_feed(x)), cache


class Attention(nn.Module):
    """Reads the next characters of a text, given the cache of those before. A new sequence's cache has one position of
    zeros, as Triton begins every dimension of -1 with 1: a character can attend to it, and finds nothing there.
    """

    wavelengths: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(CODES, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.readout = nn.Linear(WIDTH, CODES)
        self.register_buffer("wavelengths", torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH)))

    def forward(self, TEXT: Tensor, CACHE_IN: Tensor) -> dict[str, Tensor]:  # noqa: N803 - tensor names of config.pbtxt
        """TEXT: [batch, new] uint8; CACHE_IN: [batch, 2 * layers, heads, positions, width / heads] FP32"""
        before, new = CACHE_IN.size(3), TEXT.size(1)
        places = torch.arange(before, before + new, device=TEXT.device)
        angles = places.unsqueeze(1) * self.wavelengths
        x = self.characters(TEXT.long()) + torch.cat([angles.sin(), angles.cos()], 1)
        # A character sees everything before it, and itself.
        mask = torch.full([new, before + new], -math.inf, device=TEXT.device).triu(before + 1)
        caches: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            x, cache = layer(x, CACHE_IN[:, 2 * index : 2 * index + 2], mask)
            caches.append(cache)
        scores = self.readout(x[:, -1])
        return {
            "NEXT": scores.argmax(1, keepdim=True).to(torch.uint8),
            "SCORES": scores,
            "CACHE_OUT": torch.cat(caches, 1),
        }


def make_models(repository: Path) -> None:
    """Writes the folders of both models into a repository."""
    torch.manual_seed(1865)
    attention, here = torch.jit.script(Attention().eval()), Path(__file__).parent
    for name, source in (("attention", here), ("chat", here / "chat")):
        version = repository / name / "1"
        version.mkdir(parents=True, exist_ok=True)
        attention.save(str(version / "model.pt"))
        shutil.copy(source / "config.pbtxt", version.parent)
    shutil.copy(here / "chat" / "model.py", repository / "chat" / "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path, help="folder that is to hold the models")
    make_models(parser.parse_args().repository)


if __name__ == "__main__":
    main()
