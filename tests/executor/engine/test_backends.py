"""Which backends there are, how others are added, and that torch is not paid for by those who do not need it."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from executor.engine import backends
from executor.engine.python.backend import PythonBackend
from shared.contract.errors import LoadError


class OtherBackend(PythonBackend):
    name = "other"


def registered(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    group = backends.ENTRY_POINT_GROUP
    found = EntryPoints(EntryPoint(name, value, group) for name, value in entries)

    def entry_points(*, group: str) -> EntryPoints:
        return found.select(group=group)

    monkeypatch.setattr(backends, "entry_points", entry_points)


def test_pytorch_and_python_are_built_in() -> None:
    assert {"onnxruntime", "pytorch", "python"} <= set(backends.installed_backends())


def test_an_unknown_backend_is_refused_with_those_available(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch)

    with pytest.raises(
        LoadError, match="backend 'tensorflow' is not installed; available are: onnxruntime, python, pytorch"
    ):
        backends.find_backend("tensorflow")


def test_another_package_s_backend_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, ("other", f"{__name__}:OtherBackend"))

    assert isinstance(backends.find_backend("other"), OtherBackend)


def test_a_backend_that_cannot_be_imported_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered(monkeypatch, ("broken", "no_such_package:Backend"), ("other", f"{__name__}:OtherBackend"))

    with caplog.at_level(logging.ERROR):
        found = backends.installed_backends()

    assert {"onnxruntime", "pytorch", "python", "other"} == set(found)
    assert "backend 'broken' of no_such_package:Backend cannot be imported" in caplog.text


def test_a_built_in_backend_cannot_be_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered(monkeypatch, ("python", f"{__name__}:OtherBackend"))

    with caplog.at_level(logging.WARNING):
        assert not isinstance(backends.find_backend("python"), OtherBackend)

    assert "that name is taken" in caplog.text


def test_an_executor_of_python_models_imports_no_torch_and_no_grpc() -> None:
    """Each process that is started again after a crash pays for what it imports."""
    script = (
        "import sys, executor.service; from executor.engine.backends import find_backend; find_backend('python'); "
        "from executor.engine.python import triton_python_backend_utils; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'grpc', 'tritonclient')))"
    )

    assert 0 == subprocess.run([sys.executable, "-c", script], check=False).returncode
