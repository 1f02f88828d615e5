"""What the gateway expects of a client, over both protocols."""

PATIENCE_S = 30.0
"""How long a request may take to come, and an answer to be read by the client, on top of the time that SLOWEST_BYTES_S
gives. It bounds how long a client can hold memory without sending or reading."""
SLOWEST_BYTES_S = 64 << 10
"""The pace at which a client must at least send or read, bytes per second."""
CROWDED = "the gateway has as many connections as it may: try again later"
"""The answer to a connection beyond the bound."""
