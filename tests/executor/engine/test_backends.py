"""Which backends there are, how others are added, and that torch is not paid for by those who do not need it."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint

import pytest

from executor.engine import backends
from executor.engine.python.backend import PythonBackend


class OtherBackend(PythonBackend):
    name = "other"


def registered(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    found = tuple(EntryPoint(name, value, backends.ENTRY_POINT_GROUP) for name, value in entries)
    monkeypatch.setattr(backends, "announced_backends", lambda: found)


def test_pytorch_and_python_are_built_in() -> None:
    assert {"onnxruntime", "openvino", "pytorch", "python"} <= set(backends.installed_backends())


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """As in an executor where these are not installed."""
    find = importlib.util.find_spec

    def find_spec(name: str) -> ModuleSpec | None:
        return None if name in modules else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    # Without what is remembered.
    monkeypatch.setattr(backends, "installed_runtimes", backends.installed_runtimes.__wrapped__)


def test_a_backend_without_its_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch)
    without(monkeypatch, "tensorflow", "openvino")

    assert {"onnxruntime", "python", "pytorch"} == backends.installed_backends().keys()


def test_another_package_s_backend_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, ("other", f"{__name__}:OtherBackend"))

    assert isinstance(backends.installed_backends()["other"], OtherBackend)


def test_a_backend_that_cannot_be_imported_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered(monkeypatch, ("broken", "no_such_package:Backend"), ("other", f"{__name__}:OtherBackend"))

    with caplog.at_level(logging.ERROR):
        found = backends.installed_backends()

    assert {"onnxruntime", "openvino", "pytorch", "python", "other"} == set(found) - {"tensorflow"}
    assert "backend 'broken' of no_such_package:Backend cannot be imported" in caplog.text


def test_a_built_in_backend_cannot_be_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered(monkeypatch, ("python", f"{__name__}:OtherBackend"))

    with caplog.at_level(logging.WARNING):
        assert not isinstance(backends.installed_backends()["python"], OtherBackend)

    assert "that name is taken" in caplog.text


def test_an_executor_of_python_models_imports_no_other_runtime_and_no_grpc() -> None:
    """Each process that is started again after a crash pays for what it imports."""
    script = (
        "import sys, executor.service; from executor.engine.backends import installed_backends; installed_backends(); "
        "from executor.engine.python import triton_python_backend_utils; "
        "absent = ('torch', 'onnxruntime', 'openvino', 'tensorflow', 'grpc', 'tritonclient'); "
        "sys.exit(any(name in sys.modules for name in absent))"
    )

    assert 0 == subprocess.run([sys.executable, "-c", script], check=False).returncode
