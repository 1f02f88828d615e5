"""Tests of clients that take no answers run on asyncio's own event loop. Services run on uvloop."""

from __future__ import annotations

import sys

import pytest

_NOW = sys.version_info[:3]
needs_flow_control = pytest.mark.skipif(
    (3, 12) <= _NOW < (3, 12, 9) or (3, 13) <= _NOW < (3, 13, 2),
    reason="asyncio's writelines keeps what nobody takes in this Python (CVE-2024-12254)",
)
