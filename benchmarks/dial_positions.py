"""The positions of the recovery dial: the settings of a model that are measured side by side."""

from __future__ import annotations

from dataclasses import dataclass

INTERVALS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Setting:
    """One position of the dial. source: file of its model; recovers: whether its sequences outlive their executor."""

    name: str
    source: str
    parameters: dict[str, str]
    recovers: bool = True

    @property
    def interval(self) -> int:
        """The checkpoint interval in steps; only for a setting with checkpoints."""
        return int(self.parameters.get("checkpoint_interval", "1"))


def settings() -> list[Setting]:
    """All positions of the dial."""
    every = [Setting(f"declared_{n}", "declared", {"checkpoint_interval": str(n)}) for n in INTERVALS]
    handed = [Setting(f"methods_{n}", "handed", {"checkpoint_interval": str(n)}) for n in (1, 8)]
    replay = Setting("replay", "kept", {"sequence_recovery": "replay"})
    return [*every, *handed, replay, Setting("nothing", "kept", {"sequence_recovery": "none"}, recovers=False)]
