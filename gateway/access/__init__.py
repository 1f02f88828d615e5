"""Access control: parts of the protocols that need a secret header."""
