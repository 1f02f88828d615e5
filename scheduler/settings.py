"""What a scheduler can be told."""

from __future__ import annotations

from dataclasses import dataclass

from shared.settings import CommonSettings, lease_setting, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings(CommonSettings):
    """Leadership and placement."""

    lease_ms: int = lease_setting()
    tick_ms: int = setting(
        100,
        help="Pause between two looks at the clock. Expiry, leases and the backlog are late by at most this.",
        unit="ms",
        minimum=1,
    )
    bounded_load: float = setting(
        1.25,
        help="No executor holds more than this many times the mean number of sequences (consistent hashing with "
        "bounded loads): lower is more even, higher moves fewer sequences.",
        group="Placement",
        minimum=1.0,
        maximum=1000.0,
    )
    spare_slots: int = setting(
        32,
        help="Free slots of each executor and version that new sequences may take without asking the scheduler. With 0 "
        "it gives every slot itself.",
        minimum=0,
        maximum=64,
    )
    check_invariants: bool = setting(
        default=False,
        help="Check the whole state after every turn, and rebuild it when it contradicts itself. For staging: costs "
        "time that grows with the number of sequences.",
        group="Service",
    )
