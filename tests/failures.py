"""What a failed test leaves behind is nobody else's failure."""

from __future__ import annotations

import gc
import sys
import warnings

import pytest

HAS_FAILED = pytest.StashKey[bool]()


def leave_nothing(item: pytest.Item) -> None:
    """Closes every fixture, of a module and of the whole run as well: the next test gets new ones, and meets no
    sequence, frozen process or dead server of this one. What the test did not close itself is closed here without a
    word: the warning would be an error of whichever test runs when the collector finds it.
    """
    try:
        item.session._setupstate.teardown_exact(None)  # pyright: ignore[reportPrivateUsage]
    finally:
        # pytest keeps the error here for debuggers, and the error keeps the test's variables.
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):
            sys.__dict__.pop(name, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
