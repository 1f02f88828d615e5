"""The network of the sample model `text_lstm`: a character LSTM whose state the caller holds.

It owns the arithmetic of one step and nothing else: no training (`train_text_lstm.py`), no sequences (the mesh). Two
things are unusual for an LSTM, and both are there because strangers share its batches:

* It computes in FP64 and keeps weights and states in FP32. A matrix product of one row and the same row inside a
  product of eight differ in their last bits. In FP64 those bits vanish when the state is rounded to FP32, so what a
  sequence is answered does not depend on who else was in the batch, nor on which executor ran it.
* The input's embedding is multiplied into the gates beforehand (one row of `gates_of_code` per character), and the
  recurrence is one plain product per character: `nn.LSTM` repacks its weights on every call, which at the batch sizes
  of streaming costs more than the step.
"""

# No `from __future__ import annotations` here: TorchScript needs the annotations below as types, not as strings.
from typing import Final

import torch
from torch import Tensor, nn

UNKNOWN_CODE = 0
"""Code of every byte that the training text does not contain; never predicted."""

CONTINUATION_CHARACTERS = 24
"""Length of the greedy continuation that accompanies each step."""

ASCII_CODES = 128
"""Width of `PROBABILITIES`: the vocabulary is ASCII, indexed by character code."""


class TextLstm(nn.Module):
    """Predicts the next character of a text from a piece of it and the state that earlier pieces left.

    vocabulary      the characters that it knows, ASCII, ascending; code k + 1 means vocabulary[k]
    gates_of_code   [1 + len(vocabulary), 4 * hidden] FP32: a character's share of the gates, bias included
    recurrent       [hidden, 4 * hidden] FP32: the previous output's share; gates as in torch: in, forget, cell, out
    readout         [hidden, 1 + len(vocabulary)] FP32
    readout_bias    [1 + len(vocabulary)] FP32
    """

    # Class attributes, because TorchScript sees no constants of the module.
    ascii_codes: Final[int] = ASCII_CODES
    continuation_characters: Final[int] = CONTINUATION_CHARACTERS
    byte_of_code: Tensor
    code_of_byte: Tensor
    gates_of_code: Tensor
    recurrent: Tensor
    readout: Tensor
    readout_bias: Tensor

    def __init__(
        self, vocabulary: bytes, gates_of_code: Tensor, recurrent: Tensor, readout: Tensor, readout_bias: Tensor
    ) -> None:
        super().__init__()
        code_of_byte = torch.full((256,), UNKNOWN_CODE, dtype=torch.int64)
        code_of_byte[torch.tensor(list(vocabulary))] = torch.arange(1, len(vocabulary) + 1)
        # The unknown code's entry is never read: its probability is cut off before anything is looked up.
        self.register_buffer("byte_of_code", torch.tensor([0, *vocabulary], dtype=torch.int64))
        self.register_buffer("code_of_byte", code_of_byte)
        self.register_buffer("gates_of_code", gates_of_code)
        self.register_buffer("recurrent", recurrent)
        self.register_buffer("readout", readout)
        self.register_buffer("readout_bias", readout_bias)

    def advance(
        self, codes: Tensor, hidden: Tensor, cell: Tensor, gates_of_code: Tensor, recurrent: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Reads one character per row.

        codes    [batch] int64
        hidden   [batch, hidden] FP64, and `cell` the same
        returns  the new hidden and cell
        """
        gates = torch.addmm(gates_of_code.index_select(0, codes), hidden, recurrent)  # [batch, 4 * hidden] FP64
        admit, forget, candidate, expose = gates.chunk(4, 1)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(admit) * torch.tanh(candidate)
        return torch.sigmoid(expose) * torch.tanh(cell), cell

    def forward(self, TEXT: Tensor, HIDDEN_IN: Tensor, CELL_IN: Tensor) -> dict[str, Tensor]:  # noqa: N803 - tensor names of config.pbtxt
        """One step: a piece of text of any length, 0 included, in which case it only predicts.

        TEXT       [batch, characters] UINT8
        HIDDEN_IN  [batch, hidden] FP32, zeros at a text's start; `CELL_IN` the same
        returns    NEXT [batch, 1] UINT8; PROBABILITIES [batch, 128] FP32; CONTINUATION [batch, 24] UINT8, which begins
                   with NEXT and leaves no trace in the states; HIDDEN_OUT and CELL_OUT like their inputs
        """
        gates_of_code = self.gates_of_code.double()
        recurrent = self.recurrent.double()
        readout = self.readout.double()
        readout_bias = self.readout_bias.double()
        codes = self.code_of_byte[TEXT.long()]  # [batch, characters] int64
        hidden = HIDDEN_IN.double()
        cell = CELL_IN.double()
        for position in range(codes.size(1)):
            hidden, cell = self.advance(codes[:, position], hidden, cell, gates_of_code, recurrent)
        # What is predicted from here on is predicted from the states as they are kept.
        hidden_out = hidden.float()
        cell_out = cell.float()
        hidden = hidden_out.double()
        cell = cell_out.double()

        scores = torch.addmm(readout_bias, hidden, readout)[:, 1:]  # [batch, vocabulary], the unknown code cut off
        probabilities = torch.zeros([TEXT.shape[0], self.ascii_codes], dtype=torch.float32, device=TEXT.device)
        probabilities[:, self.byte_of_code[1:]] = torch.softmax(scores, 1).float()

        picked = scores.argmax(1) + 1  # [batch] code
        continuation = [picked]
        for _ in range(self.continuation_characters - 1):
            hidden, cell = self.advance(picked, hidden, cell, gates_of_code, recurrent)
            picked = torch.addmm(readout_bias, hidden, readout)[:, 1:].argmax(1) + 1
            continuation.append(picked)
        characters = self.byte_of_code[torch.stack(continuation, 1)].to(torch.uint8)  # [batch, 24]
        return {
            "NEXT": characters[:, :1].contiguous(),
            "PROBABILITIES": probabilities,
            "CONTINUATION": characters,
            "HIDDEN_OUT": hidden_out,
            "CELL_OUT": cell_out,
        }
