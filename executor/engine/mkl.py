"""Has MKL promise that the bits of a product do not depend on its operands' addresses, nor on the places of their rows.

On a CPU, torch's products are MKL's. By default MKL chooses kernels by addresses and remainders: on AMD processors a
row of a narrow product then rounds differently by its place in the batch. With `MKL_CBWR` it does not ("conditional
numerical reproducibility", in the developer guide of oneMKL). `AUTO` keeps the best instructions of the processor,
`STRICT` holds for any alignment.

MKL reads the variable once, at its first call in a process. Torch is not imported here.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

from shared.contract.errors import LoadError

VARIABLE = "MKL_CBWR"
SETTING = "AUTO,STRICT"

_ASKED_FOR_BRANCH = 1
_BRANCH_OFF = 1
"""MKL_CBWR_BRANCH and MKL_CBWR_BRANCH_OFF of mkl_types.h."""


def ask_for_fixed_products() -> None:
    """Asks for reproducible products, from MKL's first call on. A value that the operator has set stays."""
    os.environ.setdefault(VARIABLE, SETTING)


def require_fixed_products(model: str) -> None:
    """As `ask_for_fixed_products`, for a model that is about to be loaded.

    raises  LoadError if MKL has computed in another mode in this process: it cannot change any more
    """
    ask_for_fixed_products()
    branch = _branch_reader()
    if branch is not None and branch(_ASKED_FOR_BRANCH) == _BRANCH_OFF:
        raise LoadError(
            f"model '{model}' asks for fixed_shape, but this executor has begun to compute without MKL's reproducible "
            "kernels. Start it anew: it looks for fixed_shape in its model repository, or set "
            f"{VARIABLE}={SETTING} for it"
        )


def _branch_reader() -> Callable[[int], int] | None:
    """MKL's function that tells its mode; None if torch's MKL has none, or torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None or torch.__file__ is None:
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        # MKL's `mkl_cbwr_get`, under the name that it has in a library that it is linked into.
        return library.mkl_serv_cbwr_get
    except (OSError, AttributeError):
        return None
