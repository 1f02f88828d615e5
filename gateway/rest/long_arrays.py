"""Finds the long arrays of a JSON document, and reads them a piece at a time. Pure.

A parser is one call, in which no other thread runs: the event loop would wait for all of a tensor. And its numbers as
Python objects take 30 times their text. So a long array is left out of the document until somebody wants its elements.
Of a document that is no JSON, an array may be found where there is none: then the rest of the document is broken, or
what was found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LONG_BYTES = 4 << 10
"""Arrays up to this size are read with their document."""
PIECE_BYTES = 1 << 15
"""Text that is looked through, or parsed, in one call. It takes about 0.3 ms."""
ARRAY = re.compile(rb"[ \t\r\n]{0,64}\[")
QUOTE, COMMA, COLON, OPEN, CLOSE, BEGIN, END, SPACE = b'",:[]{} '

Parse = Callable[[bytes, int], Any]
"""Text, and where its first byte stands in the document -> the value. Raises RequestError."""


class _Piece(NamedTuple):
    """Text between two commas of an array, and how deep these are in arrays: 0 where the array begins or ends."""

    begin: int
    end: int
    depth: int
    depth_behind: int


class LongArray:
    """A valid array without objects: [begin, end) of the document `text`.

    count   of its own elements
    values  at most so many are in it, with those of the arrays within
    depth   of the arrays within, itself included
    """

    def __init__(self, text: bytes, begin: int, end: int, parse: Parse, depth_max: int) -> None:
        """Raises RequestError for what is no array, or too deep."""
        self.begin, self.end = begin, end
        self._text = text
        self._parse = parse
        self.count = self.values = self.depth = 0
        self._pieces: list[_Piece] = []
        for piece in self._cut():
            if self.depth <= depth_max:
                self._check(piece)
            self._pieces.append(piece)

    def elements(self) -> Iterator[list[Any]]:
        """Its elements, with the arrays within as they are cut, piece by piece."""
        return map(self._read, self._pieces)

    def whole(self) -> Any:
        """The array as a Python value, read in one piece."""
        return self._parse(self._text[self.begin : self.end], self.begin)

    def _cut(self) -> Iterator[_Piece]:
        begin, depth, depth_before, marks = self.begin, 0, 0, 0
        for at, codes in outside_strings(self._text, self.begin, self.end):
            levels = np.cumsum((codes == OPEN).astype(np.int8) - (codes == CLOSE), dtype=np.int32) + depth
            commas = np.flatnonzero(codes == COMMA)
            self.count += int(np.count_nonzero(levels[commas] == 1))
            self.values += len(commas) + int(np.count_nonzero(codes == OPEN))
            self.depth = max(self.depth, int(levels.max()))
            depth, marks = int(levels[-1]), marks + int(np.count_nonzero(codes > SPACE))
            if len(commas):
                cut = int(commas[-1])
                yield _Piece(begin, at + cut, depth_before, int(levels[cut]))
                begin, depth_before = at + cut + 1, int(levels[cut])
        # Besides its brackets there is something in it.
        self.count += marks > len(b"[]")
        yield _Piece(begin, self.end, depth_before, 0)

    def _check(self, piece: _Piece) -> None:
        """Parses a piece with an element where each comma is: `[,1` and `1,]` are no pieces."""
        begin = b"[" * piece.depth + (b"0," if piece.begin > self.begin else b"")
        end = (b",0" if piece.end < self.end else b"") + b"]" * piece.depth_behind
        self._parse(begin + self._text[piece.begin : piece.end] + end, piece.begin - len(begin))

    def _read(self, piece: _Piece) -> list[Any]:
        text = b"[" * piece.depth + self._text[piece.begin : piece.end] + b"]" * piece.depth_behind
        return self._parse(text, piece.begin - piece.depth)


def outside_strings(text: bytes, begin: int, end: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Where each piece of [begin, end) begins, and its bytes, with spaces in place of strings but for their last
    quotes. No string has begun at `begin`."""
    within = np.False_
    while begin < end:
        piece = text[begin : min(begin + PIECE_BYTES, end)]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = text[begin : begin + len(piece) + 1]
        size = len(piece)
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
        codes = np.frombuffer(piece, np.uint8)
        if within or b'"' in piece:
            in_strings = np.logical_xor.accumulate(codes == QUOTE) ^ within
            within = in_strings[-1]
            codes = np.where(in_strings, np.uint8(SPACE), codes)
        yield begin, codes
        begin += size


class _Marks(NamedTuple):
    """The braces and colons outside strings, in their order. closed: where an array was closed last before each; -1"""

    places: NDArray[np.int64]
    codes: NDArray[np.uint8]
    closed: NDArray[np.int64]


def _marks(text: bytes, check: Callable[[int, int], None]) -> _Marks:
    found: list[_Marks] = []
    members = braces = 0
    closed_last = -1
    for at, codes in outside_strings(text, 0, len(text)):
        places = np.flatnonzero((codes == COLON) | (codes == BEGIN) | (codes == END))
        closes = np.concatenate(([closed_last], np.flatnonzero(codes == CLOSE) + at))
        found.append(_Marks(places + at, codes[places], closes[np.searchsorted(closes, places + at) - 1]))
        closed_last = int(closes[-1])
        members += int(np.count_nonzero(found[-1].codes == COLON))
        braces += int(np.count_nonzero(found[-1].codes != COLON))
        check(members, braces)
    return _Marks(*map(np.concatenate, zip(*found, strict=True)))


def long_arrays(text: bytes, parse: Parse, depth_max: int, check: Callable[[int, int], None]) -> list[LongArray]:
    """The long arrays without objects that are members of objects, in their order.

    parse      parses a piece
    depth_max  arrays that are deeper are not checked, and not to be read
    check      is given the number of members and braces as they are found, and may raise
    """
    marks = _marks(text, check)
    far = np.flatnonzero(
        (marks.codes[:-1] == COLON) & (np.diff(marks.places) > LONG_BYTES) & (marks.codes[1:] != BEGIN)
    )
    found: list[LongArray] = []
    for mark in far.tolist():
        array, end = ARRAY.match(text, int(marks.places[mark]) + 1), int(marks.closed[mark + 1]) + 1
        if array is not None and end - array.end() > LONG_BYTES:
            found.append(LongArray(text, array.end() - 1, end, parse, depth_max))
    return found
