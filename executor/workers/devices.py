"""Where instances run: how many GPUs there are, which device each instance of a model gets, and whether it still
computes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.contract.model_config import ModelConfig


class DeviceLostError(Exception):
    """A GPU computes nothing more for this process. Another process must take over what was given to it."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of this machine. gpus: indexes that this executor may use; empty on a machine without GPU"""

    gpus: tuple[int, ...] = ()

    def places(self, config: ModelConfig) -> Iterator[tuple[str, str]]:
        """Name and device of every instance, groups in order; a group on several GPUs puts `count` on each.

        A configuration's GPUs are counted among those of this executor, so that it is the same on all with as many.
        """
        for group in config.instance_groups:
            places = [f"cuda:{self.gpus[gpu]}" for gpu in group.gpus] if group.kind == "GPU" else ["cpu"]
            for place in places:
                for index in range(group.count):
                    yield f"{group.name}_{index}" + (f"_{place}" if len(places) > 1 else ""), place

    def check(self) -> None:
        """Raises DeviceLostError if a GPU is lost. Called after a failure only, because it waits until the GPUs are
        idle.
        """
        # A process that never imported torch has used no GPU through it.
        if not self.gpus or "torch" not in sys.modules:
            return
        from executor.engine.pytorch.devices import gpu_problem  # noqa: PLC0415 - imports torch

        for gpu in self.gpus:
            if problem := gpu_problem(gpu):
                raise DeviceLostError(f"cuda:{gpu}: {problem}")


NO_GPUS = Devices()


def find_devices(choice: str) -> Devices:
    """The GPUs to use. choice: "auto", "none", or indexes such as "0,1".

    Asks torch only where the machine has an NVIDIA device at all, so that an executor of `python` models on a CPU
    machine starts without importing it.
    """
    if choice == "none":
        return NO_GPUS
    if choice != "auto":
        return Devices(tuple(int(index) for index in choice.split(",")))
    if not Path("/proc/driver/nvidia").exists() and not Path("/dev/nvidiactl").exists():
        return NO_GPUS
    if importlib.util.find_spec("torch") is None:
        return NO_GPUS
    from executor.engine.pytorch.devices import gpu_count  # noqa: PLC0415 - imports torch, seconds and 200 MB

    return Devices(tuple(range(gpu_count())))
