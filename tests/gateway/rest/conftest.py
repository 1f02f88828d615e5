"""What HTTP means is the same whatever parses it."""

from __future__ import annotations

from typing import get_args

import pytest

from gateway.settings import HttpParser


@pytest.fixture(params=get_args(HttpParser))
def http_parser(request: pytest.FixtureRequest) -> HttpParser:
    return request.param
