"""`auto_complete_config`: what a model adds to its configuration, and that its code cannot hurt the executor."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from executor.engine.python.model_completion import completed_apart, completed_here
from shared.contract.errors import ConfigError, LoadError
from tests.executor.engine.model_workshop import Workshop, find_backend

CONFIG: dict[str, Any] = {
    "name": "auto",
    "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [3]}],
    "output": [{"name": "OUT", "data_type": "TYPE_STRING", "dims": [-1]}],
}


def test_auto_complete_config_fills_what_is_missing(workshop: Workshop) -> None:
    path = workshop.python(
        "auto",
        """
        import numpy

        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                assert config.as_dict()["name"] == "auto"
                config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [3]})
                config.add_output({"name": "OUT", "data_type": "TYPE_INT32", "dims": [-1]})
                config.set_max_batch_size(numpy.int64(4))
                config.set_dynamic_batching()
                config.set_model_transaction_policy({"decoupled": False})
                return config

            def execute(self, requests): ...
        """,
    )
    config = {"name": "auto", "input": [{"name": "IN", "dims": ["3"]}]}

    assert {
        "name": "auto",
        "max_batch_size": 4,
        "input": [{"name": "IN", "dims": [3], "data_type": "TYPE_FP32"}],
        "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [-1]}],
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": False},
    } == json.loads(find_backend("python").auto_complete(json.dumps(config), path.parent))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "config.set_max_batch_size(2); return config",
            "max_batch_size 8, but in auto-complete-config function for model",
        ),
        (
            "config.add_input({'name': 'IN', 'data_type': 'TYPE_INT8', 'dims': [3]}); return config",
            "configuration expects datatype TYPE_FP32 for input 'IN', model provides TYPE_INT8",
        ),
        (
            "config.add_output({'name': 'NEW'}); return config",
            "output 'NEW' in auto-complete-config function for model 'auto' is missing 'data_type'",
        ),
        ("config.set_dynamic_batching(); return config", "tries to set scheduling_choice as 'dynamic_batching'"),
        (
            "config.add_output({'name': 'NEW', 'data_type': 'TYPE_FP32', 'dims': [{1}]}); return config",
            "TypeError: 'set' object cannot be interpreted as an integer",
        ),
        ("return None", "must return the ModelConfig it was given, not NoneType"),
    ],
)
def test_a_contradiction_in_auto_complete_config_is_a_config_error(workshop: Workshop, body: str, text: str) -> None:
    path = workshop.python(
        "auto",
        f"""
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                {body}
        """,
    )
    config: dict[str, Any] = {**CONFIG, "max_batch_size": 8, "sequence_batching": {}}

    with pytest.raises(ConfigError, match="auto_complete_config of model 'auto'") as caught:
        completed_here(json.dumps(config), path)

    assert text in caught.value.message


@pytest.mark.parametrize("head", ["def auto_complete_config(self, config):", "def auto_complete_config():"])
def test_an_auto_complete_config_with_other_parameters_is_told_what_it_must_be(workshop: Workshop, head: str) -> None:
    path = workshop.python("auto", f"class TritonPythonModel:\n    {head}\n        pass\n")

    with pytest.raises(ConfigError, match="it must be a @staticmethod with one parameter, the ModelConfig"):
        completed_here(json.dumps(CONFIG), path)


def test_a_model_without_auto_complete_config_is_not_even_imported(workshop: Workshop) -> None:
    path = workshop.python("auto", "raise RuntimeError('imported')")

    assert '{"name": "auto"}' == find_backend("python").auto_complete('{"name": "auto"}', path.parent)


def completing(workshop: Workshop, *lines: str) -> Any:
    """The file of a model whose `auto_complete_config(config)` consists of these lines."""
    body = "".join(f"\n        {line}" for line in lines)
    return workshop.python(
        "auto", f"import os, signal, sys\nclass TritonPythonModel:\n    def auto_complete_config(config):{body}\n"
    )


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("os._exit(3)", "exited with code 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
    ],
)
def test_a_model_that_ends_its_process_is_refused_and_nothing_else_happens(
    workshop: Workshop, line: str, status: str
) -> None:
    path = completing(workshop, line)

    with pytest.raises(ConfigError, match=f"^auto_complete_config of model 'auto': its process {status}$"):
        completed_apart(json.dumps(CONFIG), path)


def test_what_a_model_leaves_running_holds_up_nobody_and_ends(workshop: Workshop, tmp_path: Path) -> None:
    told = tmp_path / "told"
    path = completing(
        workshop,
        "import subprocess, threading, time",
        "threading.Thread(target=time.sleep, args=(600,)).start()",
        f"open({str(told)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))",
        "return config",
    )

    completed_apart(json.dumps(CONFIG), path)

    process = Path(f"/proc/{told.read_text()}/stat")
    with suppress(FileNotFoundError, ProcessLookupError):
        while process.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.001)


def test_a_model_that_never_returns_is_given_up(workshop: Workshop) -> None:
    path = completing(workshop, "while True: pass")

    with pytest.raises(ConfigError, match=r"^auto_complete_config of model 'auto' did not finish within 0\.2 s"):
        completed_apart(json.dumps(CONFIG), path, 0.2)


def test_what_a_model_prints_and_changes_stays_in_its_process(
    workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    path = completing(
        workshop,
        "print('said', os.getpid()); os.system('echo shouted')",
        "os.environ['CHANGED'] = '1'",
        "config.set_max_batch_size(2)",
        "return config",
    )

    assert 2 == json.loads(completed_apart(json.dumps(CONFIG), path))["max_batch_size"]
    assert "CHANGED" not in os.environ
    captured = capfd.readouterr()
    assert "said" in captured.err and "shouted" in captured.err
    assert f"said {os.getpid()}" not in captured.err


def test_a_model_that_cannot_be_imported_says_why(workshop: Workshop) -> None:
    path = workshop.python("auto", "# auto_complete_config\nimport no_such_module")

    with pytest.raises(LoadError, match="No module named 'no_such_module'") as caught:
        completed_apart(json.dumps(CONFIG), path)

    assert not isinstance(caught.value, ConfigError)
