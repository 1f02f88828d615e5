"""Whether what a gateway does in threads goes one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest


@contextmanager
def one_at_a_time(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> Generator[list[int]]:
    """Within the block this function takes a while, and must not be called while it runs. Gives the threads that it was
    called in."""
    work, threads, runs = getattr(module, name), list[int](), threading.Lock()

    def noted(*given: Any) -> Any:
        assert runs.acquire(blocking=False), f"{name} is called twice at a time"
        threads.append(threading.get_ident())
        time.sleep(0.02)
        runs.release()
        return work(*given)

    monkeypatch.setattr(module, name, noted)
    yield threads
