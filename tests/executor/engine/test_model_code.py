"""Which `model.py` does nothing but compute, so that its batches may run on the event loop."""

from __future__ import annotations

import pytest

from executor.engine.python.model_code import only_computes

MODEL = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.sums, self.config = {}, json.loads(args["model_config"])

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.zeros(1))]) for _ in requests]
"""


def test_a_model_that_keeps_to_itself_only_computes() -> None:
    assert only_computes(MODEL.encode())


@pytest.mark.parametrize(
    "line",
    [
        "import time",
        "import threading",
        "import asyncio",
        "import sqlite3",
        "import torch",
        "import beside_it",
        "from . import beside_it",
        "from numpy import load",
        "import numpy, socket",
        "import numpy.ctypeslib as libraries",
        "from numpy.ctypeslib import load_library",
        "        handle = open('/tmp/file')",
        "        self.table = np.load('table.npy')",
        "        __import__('time').sleep(1)",
        "async def elsewhere(): ...",
        "        return [pb_utils.InferenceRequest(model_name='other') for _ in requests]",
        "        requests[0].exec()",
        "        pb_utils.is_model_ready('other')",
        "        requests[0].async_exec(decoupled=True)",
        "import decimal; decimal.getcontext().prec = 50",
        "from decimal import setcontext",
        "        np.seterr(divide='raise')",
        "        np.set_printoptions(precision=2)",
        "        requests[0].trace().get_context()",
        "this is no Python",
    ],
)
def test_a_model_that_reaches_out_may_wait_or_know_its_thread(line: str) -> None:
    assert not only_computes((MODEL + line + "\n").encode())
