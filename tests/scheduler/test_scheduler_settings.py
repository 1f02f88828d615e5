"""What a scheduler refuses to be told."""

from __future__ import annotations

import pytest

from scheduler.settings import SchedulerSettings
from shared.settings import parse_settings


def test_a_load_without_a_bound_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Infinitely many times the mean is no number of sequences: no leader could place one."""
    with pytest.raises(SystemExit):
        parse_settings(SchedulerSettings, ["--bounded-load", "inf"], program="scheduler", help="")

    assert "inf is not in the range 1.0<=x<=1000.0" in capsys.readouterr().err
