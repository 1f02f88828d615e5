"""The stack of this thread for signals.

OpenVINO gives the thread that calls a model a stack for signals, and puts back the one before when the model goes. Of
two models that go in the order in which they came, the second one puts back the first one's, which is gone: the next
signal ends the process. Services make such calls on threads that get no signals; tests make them on the main thread.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager


class _Stack(ctypes.Structure):
    """`stack_t` of Linux."""

    _fields_ = (("ss_sp", ctypes.c_void_p), ("ss_flags", ctypes.c_int), ("ss_size", ctypes.c_size_t))


@contextmanager
def kept() -> Generator[None]:
    """After the block the stack is as it was before, whatever models of OpenVINO have come and gone in it."""
    if not sys.platform.startswith("linux"):
        yield
        return
    before = _Stack()
    ctypes.CDLL(None).sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        if "openvino" in sys.modules:
            gc.collect()
            ctypes.CDLL(None).sigaltstack(ctypes.byref(before), None)
