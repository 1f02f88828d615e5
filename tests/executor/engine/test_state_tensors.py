"""What a sequence's state begins with, and which tensors of a checkpoint can be it."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.engine.state_tensors import check_checkpoint, initial_state
from shared.contract.errors import LoadError, ModelError
from shared.contract.limits import VALUE_BYTES_MAX
from shared.contract.model_config import StateSpec
from shared.contract.tensors import Tensor, pack_bytes


@pytest.mark.parametrize(
    ("datatype", "raw", "text"),
    [
        ("INT32", bytes(4), r"has 4 bytes, which is not what \(2,\) takes"),
        ("INT32", bytes(12), r"has 12 bytes, which is not what \(2,\) takes"),
        ("BYTES", pack_bytes([b"one"]), r"it has 1 elements, but its shape \[2\] asks for 2"),
        ("BYTES", pack_bytes([b"one", b"two"])[:-1], "incomplete string element"),
    ],
)
def test_a_checkpoint_with_other_bytes_than_its_shape_asks_for_is_refused(datatype: str, raw: bytes, text: str) -> None:
    """It would shift the rows behind it in their batch: they would go on with their neighbours' states."""
    spec = StateSpec("kept", "next", datatype, (2,))

    with pytest.raises(ModelError, match=f"the checkpoint's state 'kept' is damaged: .*{text}"):
        check_checkpoint(spec, Tensor("kept", datatype, (2,), raw))


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_a_state_that_is_too_large_is_refused_before_memory_is_taken_for_it(tmp_path: Path, datatype: str) -> None:
    spec = StateSpec("kept", "next", datatype, (1 << 40,))

    with pytest.raises(LoadError, match=f"state 'kept' cannot be kept: it has {4 << 40} bytes"):
        initial_state(tmp_path, spec, VALUE_BYTES_MAX)
