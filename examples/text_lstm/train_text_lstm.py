"""Trains the sample model `text_lstm` and writes its TorchScript file.

    python examples/text_lstm/train_text_lstm.py

Truncated back-propagation through time over parallel streams of the corpus (Mikolov et al. 2010; dropout as in Zaremba
et al. 2014). The end of the text is held out, and the epoch that predicts it best is the one that is kept. The same
seed, torch version and number of threads give the same weights. Needs torch and no other package.
"""

from __future__ import annotations

import argparse
import math
import re
import time
import warnings
from copy import deepcopy
from pathlib import Path

import torch
from text_lstm import ASCII_CODES, TextLstm
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus" / "alice29.txt"
MODEL = HERE.parents[1] / "deploy" / "models" / "text_lstm" / "1" / "model.pt"
HELD_OUT_SHARE = 0.08
TITLE_OF_FIRST_CHAPTER = "Down the Rabbit-Hole"
PROMPTS = ("Alice was beginning to ", "The White Rabbit ", "`I don't know what you mean,' said ", "The weather is ")


class CharacterModel(nn.Module):
    """The network in the shape that trains well; `export` brings it into the shape that serves well."""

    def __init__(self, codes: int, embedding: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codes, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.readout = nn.Linear(hidden, codes)

    def forward(self, codes: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Scores of the next character at every position, [batch, time, codes], and the state behind the last."""
        output, after = self.lstm(self.dropout(self.embedding(codes)), state)
        return self.readout(self.dropout(output)), after


def read_story(path: Path) -> bytes:
    """The story as one line of ASCII: title and layout go, since clients send running text."""
    text = path.read_text(encoding="ascii")
    story = text[text.index(TITLE_OF_FIRST_CHAPTER) + len(TITLE_OF_FIRST_CHAPTER) :]
    story = re.sub(r"CHAPTER [IVX]+\n+ *\S.*\n", "\n", story)
    story = re.sub(r"(\* +)+\*?|THE END", " ", story)
    return re.sub(r"\s+", " ", story).strip().encode()


def encode(text: bytes, vocabulary: bytes) -> Tensor:
    """Codes of a text, [characters] int64; 0 for what the vocabulary lacks."""
    return torch.tensor([vocabulary.find(character) + 1 for character in text])


def bits_per_character(model: CharacterModel, codes: Tensor) -> float:
    """How well the model predicts a text that it reads from its beginning (8 is a guess among 256)."""
    model.eval()
    with torch.inference_mode():
        scores, _ = model(codes[None, :-1], None)
        return nn.functional.cross_entropy(scores[0], codes[1:]).item() / math.log(2)


def train_epoch(
    model: CharacterModel, streams: Tensor, window: int, optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> float:  # fmt: skip
    """Reads all streams once, `window` characters at a time, and returns the mean loss in bits per character.

    streams  [parallel streams, characters] int64; the state runs on from window to window, the gradient does not
    """
    model.train()
    state: tuple[Tensor, Tensor] | None = None
    total, windows = 0.0, 0
    # A random beginning keeps the window's edges from falling on the same characters in every epoch.
    for begin in range(int(torch.randint(window, ())), streams.size(1) - 1, window):
        piece = streams[:, begin : begin + window + 1]
        scores, (hidden, cell) = model(piece[:, :-1], state)
        state = (hidden.detach(), cell.detach())
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), piece[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total, windows = total + loss.item(), windows + 1
    return total / windows / math.log(2)


def export(model: CharacterModel, vocabulary: bytes) -> TextLstm:
    """The serving form of the same function: embedding and biases multiplied out into one table."""
    with torch.no_grad():
        weights = dict(model.lstm.named_parameters())
        gates_of_code = model.embedding.weight @ weights["weight_ih_l0"].T
        gates_of_code += weights["bias_ih_l0"] + weights["bias_hh_l0"]
        return TextLstm(
            vocabulary,
            gates_of_code,
            weights["weight_hh_l0"].T.contiguous(),
            model.readout.weight.T.contiguous(),
            model.readout.bias.clone(),
        )


def compiled(serving: TextLstm) -> torch.jit.ScriptModule:
    """The network as TorchScript."""
    with warnings.catch_warnings():
        # torch prefers torch.export for new models; Triton's pytorch backend loads TorchScript.
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(serving.eval())


def show(serving: TextLstm, hidden: int) -> None:
    """Prints how the trained model goes on with a few beginnings."""
    for prompt in PROMPTS:
        text = torch.tensor([list(prompt.encode())], dtype=torch.uint8)
        answer = serving(text, torch.zeros(1, hidden), torch.zeros(1, hidden))
        print(f"  {prompt}|{bytes(answer['CONTINUATION'][0].tolist()).decode()}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train the sample model text_lstm on Alice's Adventures in Wonderland and write its model.pt.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="text to learn from, ASCII")
    parser.add_argument("--output", type=Path, default=MODEL, help="TorchScript file to write")
    parser.add_argument("--epochs", type=int, default=45, help="times to read the corpus")
    parser.add_argument("--hidden", type=int, default=192, help="size of the state; config.pbtxt must say the same")
    parser.add_argument("--embedding", type=int, default=48, help="size of a character's embedding")
    parser.add_argument("--streams", type=int, default=16, help="pieces of the corpus read side by side")
    parser.add_argument("--window", type=int, default=96, help="characters between two updates")
    parser.add_argument("--learning-rate", type=float, default=6e-3, help="peak of the one-cycle schedule")
    parser.add_argument("--dropout", type=float, default=0.2, help="share of the features hidden while training")
    parser.add_argument("--weight-decay", type=float, default=0.02, help="pull of the weights towards zero")
    parser.add_argument("--seed", type=int, default=1865, help="of all randomness")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    """Trains, reports each epoch, writes the file."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    story = read_story(arguments.corpus)
    vocabulary = bytes(sorted(set(story)))
    assert max(vocabulary) < ASCII_CODES
    split = int(len(story) * (1 - HELD_OUT_SHARE))
    training, held_out = encode(story[:split], vocabulary), encode(story[split:], vocabulary)
    length = len(training) // arguments.streams
    streams = training[: length * arguments.streams].view(arguments.streams, length)
    print(f"{len(training)} characters to learn from, {len(held_out)} held out, {len(vocabulary)} different ones")

    model = CharacterModel(len(vocabulary) + 1, arguments.embedding, arguments.hidden, arguments.dropout)
    compiled(export(model, vocabulary))  # what cannot be served should fail now, not after the last epoch
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=arguments.weight_decay)
    windows = arguments.epochs * math.ceil(length / arguments.window)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.learning_rate, windows + 1, pct_start=0.1)
    best_bits, best = math.inf, model.state_dict()
    began = time.monotonic()
    for epoch in range(1, arguments.epochs + 1):
        learned = train_epoch(model, streams, arguments.window, optimizer, schedule)
        bits = bits_per_character(model, held_out)
        print(
            f"epoch {epoch:3}/{arguments.epochs}  {time.monotonic() - began:5.0f} s"
            f"  training {learned:.3f}  held out {bits:.3f} bits per character",
            flush=True,
        )
        if bits < best_bits:
            best_bits, best = bits, deepcopy(model.state_dict())
    model.load_state_dict(best)
    model.eval()
    serving = export(model, vocabulary)
    show(serving, arguments.hidden)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    compiled(serving).save(str(arguments.output))
    size_kib = arguments.output.stat().st_size / 1024
    print(f"{arguments.output}: {size_kib:.0f} KiB, {best_bits:.3f} bits per character on the held-out part")


if __name__ == "__main__":
    main()
