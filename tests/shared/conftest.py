"""Fixtures of the tests of what services share."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator

import pytest

from shared.process import logs

Configure = Callable[..., io.StringIO]


@pytest.fixture
def configured() -> Iterator[Configure]:
    """Configures logging to a buffer; afterwards puts the process's logging back as it was."""
    root = logging.getLogger()
    handlers, level, own_level = root.handlers[:], root.level, logs.LOGGER.level
    own_handlers, propagate = logs.LOGGER.handlers[:], logs.LOGGER.propagate

    def configure(level_name: str = "info", style: str = "text", **bound: object) -> io.StringIO:
        stream = io.StringIO()
        logs.configure(level_name, style, stream=stream, **bound)
        return stream

    yield configure
    root.handlers[:] = handlers
    root.setLevel(level)
    logs.LOGGER.setLevel(own_level)
    logs.LOGGER.handlers[:], logs.LOGGER.propagate = own_handlers, propagate
    logging.captureWarnings(capture=False)
