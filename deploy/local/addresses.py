"""Addresses as they are given on the command line."""

PORT_MAX = 65535
"""asyncio takes a larger port for another one."""


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of host:port. Raises ValueError when there are none."""
    host, separator, port = address.rpartition(":")
    if not (separator and host and "/" not in host and is_number(port, 1, PORT_MAX)):
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def is_number(text: str, least: int, most: int) -> bool:
    """Whether a text is a whole number within bounds."""
    # isdecimal alone takes other scripts' digits, too.
    return text.isascii() and text.isdecimal() and least <= int(text) <= most
