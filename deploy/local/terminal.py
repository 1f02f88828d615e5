"""What a terminal may be told."""


def printable(text: str) -> str:
    """The text as one line: characters that would move the cursor become blanks."""
    return "".join(character if character.isprintable() else " " for character in text)
