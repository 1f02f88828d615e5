"""Model repositories for a test's mesh: light ones, of the sample running sum under other names and settings."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "deploy" / "models"
MISBEHAVING = Path(__file__).resolve().parent / "models"

SLOW_MODEL = '''
import time
from running_sum_model import TritonPythonModel as RunningSum


class TritonPythonModel(RunningSum):
    """The running sum, but each batch takes {seconds} s."""

    def execute(self, requests):
        time.sleep({seconds})
        return super().execute(requests)
'''


def add_sum_model(
    repository: Path,
    name: str = "running_sum",
    *,
    slots: int = 32,
    idle_us: int = 60_000_000,
    batch_s: float = 0.0,
    strategy: str = "direct { }",
) -> str:
    """Puts the sample `running_sum` into a repository, changed; returns its name.

    slots    of one executor
    idle_us  `max_sequence_idle_microseconds`
    batch_s  how long each batch takes
    """
    model = repository / name
    shutil.copytree(SAMPLES / "running_sum", model, ignore=shutil.ignore_patterns("__pycache__"))
    config = (model / "config.pbtxt").read_text()
    for pattern, replacement in (
        (r'^name: "running_sum"', f'name: "{name}"'),
        (r"^max_batch_size: \d+", f"max_batch_size: {slots}"),
        (r"max_sequence_idle_microseconds: \d+", f"max_sequence_idle_microseconds: {idle_us}"),
        (r"direct \{ \}", strategy),
    ):
        config, count = re.subn(pattern, replacement, config, count=1, flags=re.MULTILINE)
        assert count == 1, f"deploy/models/running_sum/config.pbtxt has no {pattern}"
    (model / "config.pbtxt").write_text(config)
    if batch_s:
        (model / "1" / "model.py").rename(model / "1" / "running_sum_model.py")
        (model / "1" / "model.py").write_text(SLOW_MODEL.format(seconds=batch_s))
    return name
