"""What the gateway expects of a client, over both protocols."""

PATIENCE_S = 30.0
"""How long a request may take to come, and an answer to be read, on top of what SLOWEST_BYTES_S allows: a client that
sends nothing, or reads nothing, keeps no memory of the gateway."""
SLOWEST_BYTES_S = 64 << 10
"""Bytes per second that a client sends or reads at least."""
CROWDED = "the gateway has as many connections as it may: try again later"
"""The answer to a connection beyond the bound."""
