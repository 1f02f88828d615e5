"""Where instances run: how many GPUs there are, and which device each instance of a model gets."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.model_config.values import ModelConfig


@dataclass(frozen=True, slots=True)
class Devices:
    """gpus: indexes that this executor may use; empty on a machine without one."""

    gpus: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many GPUs configurations may count on."""
        return len(self.gpus)

    def places(self, config: ModelConfig) -> Iterator[tuple[str, str]]:
        """Name and device of every instance, groups in order; a group on several GPUs puts `count` on each."""
        for group in config.instance_groups:
            places = [f"cuda:{gpu}" for gpu in group.gpus or self.gpus] if group.kind == "GPU" else ["cpu"]
            for place in places:
                for index in range(group.count):
                    yield f"{group.name}_{index}" + (f"_{place}" if len(places) > 1 else ""), place


def find_devices(choice: str) -> Devices:
    """The GPUs to use. choice: "auto", "none", or indexes such as "0,1".

    Asks torch only where the machine has an NVIDIA device at all, so that an executor of `python` models on a CPU
    machine starts without importing it.
    """
    if choice == "none":
        return Devices()
    if choice != "auto":
        return Devices(tuple(int(index) for index in choice.split(",")))
    if not Path("/proc/driver/nvidia").exists() and not Path("/dev/nvidiactl").exists():
        return Devices()
    if importlib.util.find_spec("torch") is None:
        return Devices()
    from executor.engine.torch_devices import gpu_count  # noqa: PLC0415 - imports torch, seconds and 200 MB

    return Devices(tuple(range(gpu_count())))
