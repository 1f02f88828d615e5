"""Products have the same bits everywhere where a model asks for it, or the model is refused."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest
import torch

from executor.engine import mkl
from executor.engine.pytorch.relocation import relocated

PROGRAM = """
import os
os.environ.pop("MKL_CBWR", None)
{before}
from executor.engine import mkl
from shared.contract.errors import LoadError
try:
    mkl.require_fixed_products("m")
    print(os.environ["MKL_CBWR"])
except LoadError as refused:
    print(refused.message)
"""
COMPUTED = "import torch; torch.nn.functional.linear(torch.ones(2, 3), torch.ones(2, 3))"


def said_after(before: str) -> str:
    """What a process says of a model with `fixed_shape` after it has done so much."""
    program = PROGRAM.format(before=before)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("before", ["", "import torch; torch.ones(3) + 1"], ids=["nothing", "torch"])
def test_a_process_that_has_made_no_product_makes_them_reproducible(before: str) -> None:
    assert mkl.SETTING == said_after(before)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has another library for products")
def test_a_model_that_asks_too_late_is_refused_with_the_remedy() -> None:
    expected = (
        "model 'm' asks for fixed_shape, but this executor has begun to compute without MKL's reproducible kernels. "
        "Start it anew: it looks for fixed_shape in its model repository, or set MKL_CBWR=AUTO,STRICT for it"
    )

    assert expected == said_after(COMPUTED)


def test_what_the_operator_has_chosen_stays() -> None:
    assert "COMPATIBLE" == said_after(f'os.environ["MKL_CBWR"] = "COMPATIBLE"\n{COMPUTED}')


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(3, 5), torch.randn(4, 6).t(), torch.arange(7, dtype=torch.int16), torch.tensor(1.5), torch.empty(0)],
    ids=["matrix", "transposed", "int16", "scalar", "empty"],
)
def test_a_moved_tensor_is_the_same_elsewhere(tensor: torch.Tensor) -> None:
    for offset in (0, 64, mmap.PAGESIZE - 64):
        moved = relocated(tensor, offset)

        assert offset == moved.data_ptr() % mmap.PAGESIZE or not tensor.numel()
        assert (tensor.stride(), tensor.dtype) == (moved.stride(), moved.dtype)
        assert torch.equal(tensor, moved)


def test_a_view_is_not_moved() -> None:
    """Others may write what it shows."""
    whole = torch.randn(4, 4)

    assert relocated(whole[1:], 64).data_ptr() == whole[1:].data_ptr()
