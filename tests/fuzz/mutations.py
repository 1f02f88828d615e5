"""Changes of an input that every fuzzer can use: the same chance makes the same change."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, cast

NUMBERS = (
    *(0, 1, -1, 2, 7, 255, 65_536, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64),
    *(10**30, 10**400),
)
"""Whole numbers at the edges of what somebody may keep them in."""
FLOATS = (0.5, -0.0, 1e308, 5e-324, math.inf, -math.inf, math.nan)
TEXTS = (
    *("", " ", "\0", "\n", "x" * 70_000, "../../etc/passwd", "/dev/zero", "a/b", "é\u202e\U0001f9ea", "%s%n{0}", "-1"),
    *("{shard}:*", "a,b=c;d", "true", "null"),
)
SMALL: tuple[Any, ...] = ([], {}, None, True, False, [[]], {"": {}})
DEPTH = 3000
"""Of what is nested for nesting's sake: more than a recursive reader's stack may hold."""
SIZE_MAX = 1 << 18
"""Characters of a tree that may still be changed: each change makes it up to a hundred times as large."""


def mutated_bytes(chance: random.Random, data: bytes) -> bytes:
    """Some of its bytes flipped, left out, doubled, moved, or its end cut off."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        begin, end = _span(chance, len(changed))
        match chance.randrange(6):
            case 0 if changed:
                changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
            case 1:
                del changed[begin:end]
            case 2:
                changed[begin:begin] = changed[begin:end] * chance.choice((1, 2, 50))
            case 3:
                changed[begin:end] = chance.randbytes(chance.choice((1, 4, 64)))
            case 4:
                del changed[chance.randrange(len(changed) + 1) :]
            case _:
                piece = changed[begin:end]
                del changed[begin:end]
                place = chance.randrange(len(changed) + 1)
                changed[place:place] = piece
    return bytes(changed)


def odd_value(chance: random.Random) -> Any:
    """A value of JSON that is seldom what somebody expects."""
    match chance.randrange(9):
        case 0 | 1 | 2:
            return chance.choice(NUMBERS)
        case 3:
            return chance.choice(FLOATS)
        case 4 | 5:
            return chance.choice(TEXTS)
        case 6:
            # A copy: what is changed later must not change the next input.
            return deepcopy(chance.choice(SMALL))
        case 7:
            return [chance.choice(NUMBERS) for _ in range(chance.choice((1, 3, 2000)))]
        case _:
            return chance.choice(("\ud800", "\udfff" * 9))


def mutated_tree(chance: random.Random, tree: Any) -> Any:
    """A tree of JSON or msgpack with some of its members changed, left out, renamed, or put where others were. Not in
    place.
    """
    changed = deepcopy(tree)
    for _ in range(chance.choice((1, 1, 2, 5))):
        if len(repr(changed)) > SIZE_MAX:
            break
        places = list(_places(changed))
        if not places:
            return odd_value(chance)
        holder, key = chance.choice(places)
        match chance.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[chance.choice(TEXTS)] = holder.pop(key)
            case 2:
                other, name = chance.choice(places)
                holder[key] = deepcopy(other[name])
            case 3 if isinstance(holder[key], list):
                holder[key] *= chance.choice((2, 100))
            case _:
                holder[key] = odd_value(chance)
    return changed


def mutated_json(chance: random.Random, tree: Any) -> str:
    """The text of a changed tree, now and then broken as a text too."""
    text = json.dumps(mutated_tree(chance, tree))
    match chance.randrange(12):
        case 0:
            return mutated_bytes(chance, text.encode()).decode(errors="replace")
        case 1:
            return text[:-1] + "," + text[1:]  # every key twice
        case 2:
            return text.replace(":", ":" + "[" * DEPTH, 1)
        case 3:
            return text.replace(":", ":" + '{"a":' * DEPTH + "1" + "}" * DEPTH + ',"b":', 1)
        case _:
            return text


def _span(chance: random.Random, length: int) -> tuple[int, int]:
    begin = chance.randrange(length + 1)
    return begin, min(length, begin + chance.choice((1, 2, 8, 100)))


def _places(tree: Any) -> Sequence[tuple[Any, Any]]:
    """Every (holder, key or index) of a tree."""
    found: list[tuple[Any, Any]] = []
    open_ones: list[Any] = [tree]
    while open_ones:
        holder = open_ones.pop()
        if isinstance(holder, dict | list):
            members = cast("dict[str, Any] | list[Any]", holder)
            keys: list[Any] = list(members) if isinstance(members, dict) else list(range(len(members)))
            found += [(members, key) for key in keys]
            open_ones += [members[key] for key in keys]
    return found
