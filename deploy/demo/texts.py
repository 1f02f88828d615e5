"""What the demo streams: texts, cut into the pieces that are sent one after the other."""

from __future__ import annotations

import re

EXCERPTS = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice
she had peeped into the book her sister was reading, but it had no pictures or conversations in it.

The rabbit-hole went straight on like a tunnel for some way, and then dipped suddenly down, so suddenly that Alice had
not a moment to think about stopping herself before she found herself falling down a very deep well.

There was a table set out under a tree in front of the house, and the March Hare and the Hatter were having tea at it: a
Dormouse was sitting between them, fast asleep, and the other two were using it as a cushion.

The Queen turned crimson with fury, and, after glaring at her for a moment like a wild beast, screamed that her head
must come off at once; and nobody in the garden dared to say a word until the King had coughed.

Half way through these words an executor is killed, and if it held this text, then another one takes the text over,
finds its state in Redis, and goes on with the very next word, as if nothing whatever had happened.

In another moment down went Alice after it, never once considering how in the world she was to get out again, and the
White Rabbit was still in sight, hurrying down the passage, and there was not a moment to be lost."""
"""From "Alice's Adventures in Wonderland" (public domain), which the model knows by heart, and not quite from it."""
SAMPLE_TEXTS = tuple(text.replace("\n", " ") for text in EXCERPTS.split("\n\n"))


def pieces_of(text: str) -> tuple[bytes, ...]:
    """The words of a text, each with the blanks behind it; joined they are the text.

    Raises ValueError for an empty text and for characters that are not ASCII: the model's alphabet.
    """
    if not text.strip():
        raise ValueError("a text without words")
    if not text.isascii():
        raise ValueError("the model reads ASCII only")
    return tuple(re.findall(rb"\s*\S+\s*", text.encode()))


def sample_texts(count: int) -> tuple[str, ...]:
    """The first `count` texts, over and over when there are not so many."""
    return tuple(SAMPLE_TEXTS[index % len(SAMPLE_TEXTS)] for index in range(count))
