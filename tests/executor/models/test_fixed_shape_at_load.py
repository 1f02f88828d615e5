"""A model with `fixed_shape` is loaded in the form that keeps the promise, or is not loaded."""

from __future__ import annotations

import logging
import mmap
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.engine.base import FixesShape, Row
from executor.engine.pytorch.relocation import relocated
from executor.models.fixed_shape import ROUNDS, TrialResult, settle_shape, trials
from executor.models.repository import ModelRepository
from executor.models.served import LoadedModel
from executor.models.version_maker import LoadOptions
from executor.workers.devices import Devices
from shared.contract.errors import LoadError
from tests.executor.engine import torch_modules
from tests.executor.engine.model_workshop import Workshop

CONFIG = """
    backend: "{backend}"
    max_batch_size: 8
    input {{ name: "x" data_type: TYPE_FP32 dims: 1 }}
    output {{ name: "y" data_type: TYPE_FP32 dims: 1 }}
    instance_group {{ kind: KIND_CPU }}
    sequence_batching {{
        {strategy} {{ {slots} }}
        state {{ input_name: "total" output_name: "total_next" data_type: TYPE_FP32 dims: 1 }}
    }}
    parameters {{ key: "fixed_shape" value {{ string_value: "true" }} }}
"""

COUNTING = """
    class TritonPythonModel:
        calls = 0

        def execute(self, requests):
            self.calls += {step}
            answers = []
            for request in requests:
                total = pb_utils.get_input_tensor_by_name(request, "total").as_numpy()
                total = total + pb_utils.get_input_tensor_by_name(request, "x").as_numpy() + np.float32(self.calls)
                tensors = [pb_utils.Tensor("y", total), pb_utils.Tensor("total_next", total)]
                answers.append(pb_utils.InferenceResponse(tensors))
            return answers
"""


def loaded(
    directory: Path,
    module: torch.nn.Module | str,
    *,
    strategy: str = "oldest",
    slots: str = "",
    state_bytes_max: int = 0,
) -> LoadedModel:
    """slots: field of the strategy"""
    workshop = Workshop(directory)
    if isinstance(module, str):
        workshop.python("m", module)
    else:
        workshop.script("m", module)
    backend = "python" if isinstance(module, str) else "pytorch"
    (directory / "m" / "config.pbtxt").write_text(CONFIG.format(backend=backend, strategy=strategy, slots=slots))
    return ModelRepository([directory], Devices(), LoadOptions(state_bytes_max=state_bytes_max)).load("m")


def form(model: LoadedModel) -> tuple[int, str]:
    """Rows of a call, and why they are alone."""
    (worker,) = model.versions[0].workers
    engine: Any = worker._engine
    assert isinstance(engine, FixesShape)
    return engine.batch_rows, engine.alone_because


def said(caplog: pytest.LogCaptureFixture) -> dict[str, object]:
    """What the log says of the shape."""
    (record,) = [record for record in caplog.records if record.message == "fixed shape"]
    return vars(record)["fields"]


@pytest.mark.parametrize("strategy", ["oldest", "direct"])
def test_a_model_whose_rows_do_not_meet_runs_padded_batches(
    tmp_path: Path, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert (64, "") == form(loaded(tmp_path, torch_modules.Folding(), strategy=strategy))
    assert {"model": "m", "rows": 64, "tested": True, "alone": ""}.items() <= said(caplog).items()


@pytest.mark.parametrize("strategy", ["oldest", "direct"])
def test_a_model_whose_rows_meet_runs_each_alone(tmp_path: Path, strategy: str) -> None:
    model = loaded(tmp_path, torch_modules.Coupled(), strategy=strategy)

    assert (1, "results depend on the other rows of a batch") == form(model)


def test_a_place_that_shows_in_few_rows_only_is_found(tmp_path: Path) -> None:
    assert (1, "results depend on the other rows of a batch") == form(loaded(tmp_path, torch_modules.RarelyPlaced()))


@pytest.mark.parametrize(
    ("state_bytes_max", "expected"),
    [(0, (64, "")), (1 << 10, (1, "results depend on the other rows of a batch"))],
    ids=["two slots", "slots by memory"],
)
def test_as_many_rows_are_tried_as_batches_have(
    tmp_path: Path, state_bytes_max: int, expected: tuple[int, str]
) -> None:
    """Not fewer because the configuration names few candidates: memory may give more slots."""
    few = "max_candidate_sequences: 2"
    model = loaded(tmp_path, torch_modules.PlacedBehindTwo(), slots=few, state_bytes_max=state_bytes_max)

    assert expected == form(model)


@pytest.mark.parametrize(("slots", "is_row"), [(8, True), (100, False)])
def test_rows_are_tried_in_the_slots_that_they_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int, *, is_row: bool
) -> None:
    """Direct batches have null rows only where a slot is a row."""
    model = loaded(tmp_path, torch_modules.Folding(), strategy="direct")
    (worker,) = model.versions[0].workers
    engine: Any = worker._engine
    batches: list[list[Row]] = []
    run = engine.run

    def noted(rows: list[Row], want_state: list[bool]) -> object:
        batches.append(rows)
        return run(rows, want_state)

    monkeypatch.setattr(engine, "run", noted)

    assert TrialResult.SAME is trials(engine, model.versions[0].config, 8, slots)
    assert is_row is any(row.null for rows in batches for row in rows)
    assert is_row is all(row.null or row.slot == place for rows in batches for place, row in enumerate(rows))


def test_weights_lie_elsewhere_from_round_to_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do in another executor. In the end they begin at a page."""
    addresses: list[int] = []

    def noted(tensor: torch.Tensor, offset_bytes: int) -> torch.Tensor:
        addresses.append(offset_bytes)
        return relocated(tensor, offset_bytes)

    monkeypatch.setattr("executor.engine.pytorch.engine.relocated", noted)
    module = torch_modules.Weighted()
    model = loaded(tmp_path, module)
    (worker,) = model.versions[0].workers
    engine: Any = worker._engine
    weight: torch.Tensor = next(iter(engine._forward.parameters()))

    assert (64, "") == form(model)
    assert len(set(addresses)) == len(addresses) == ROUNDS + 1
    assert 0 == addresses[-1] == weight.data_ptr() % mmap.PAGESIZE
    assert torch.equal(module.factor, weight)


def test_a_result_that_depends_on_the_weights_addresses_is_found(tmp_path: Path) -> None:
    model = loaded(tmp_path, torch_modules.Weighted())
    (worker,) = model.versions[0].workers
    engine: Any = worker._engine

    def moved(offset_bytes: int) -> None:
        engine._forward.factor.data = torch.tensor([1.0 + offset_bytes * 1e-6])

    engine.move_weights = moved

    assert TrialResult.DIFFERENT is trials(engine, model.versions[0].config, 8, 8)


def test_configurations_are_looked_through_before_anything_is_loaded(tmp_path: Path) -> None:
    """So that an executor asks for reproducible kernels before it computes."""
    repository = ModelRepository([tmp_path], Devices())
    (tmp_path / "m" / "configs").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('name: "m"')
    (tmp_path / "odd" / "config.pbtxt").mkdir(parents=True)
    os.mkfifo(tmp_path / "odd" / "pipe.pbtxt")
    (tmp_path / "odd" / "long.pbtxt").touch()
    os.truncate(tmp_path / "odd" / "long.pbtxt", 1 << 40)

    assert not repository.mentions("fixed_shape")
    (tmp_path / "m" / "configs" / "exact.pbtxt").write_bytes(b"\xff" + CONFIG.encode())
    assert repository.mentions("fixed_shape")


def test_a_model_without_room_for_a_padded_batch_runs_each_row_alone(tmp_path: Path) -> None:
    assert (1, "the model fails on made-up rows") == form(loaded(tmp_path, torch_modules.FewRows()))


@pytest.mark.parametrize("module", [torch_modules.Random(), COUNTING.format(step=1)], ids=["random", "counting"])
def test_a_model_without_one_result_for_one_row_is_not_loaded(tmp_path: Path, module: torch.nn.Module | str) -> None:
    with pytest.raises(LoadError) as caught:
        loaded(tmp_path, module)

    assert "model 'm' cannot have fixed_shape: even alone, the same row has different results" in caught.value.message


@pytest.mark.parametrize("late", [False, True])
def test_a_python_model_is_tested_row_by_row(tmp_path: Path, caplog: pytest.LogCaptureFixture, *, late: bool) -> None:
    """Also one that answers by a response sender, behind its batch."""
    caplog.set_level(logging.INFO)
    code = COUNTING.format(step=0)
    if late:
        answer = "answers.append(pb_utils.InferenceResponse(tensors))"
        send = "request.get_response_sender().send, [pb_utils.InferenceResponse(tensors), 1]"
        code = "import threading\n" + textwrap.dedent(code).replace(
            answer, f"answers.append(threading.Timer(0.001, {send}).start())"
        )
    model = loaded(tmp_path, code)

    assert (1, "a python model is given one request at a time") == form(model)
    assert said(caplog)["tested"]


def test_a_python_model_with_a_state_of_its_own_is_not_touched_at_load(tmp_path: Path) -> None:
    """Made-up sequences would stay in it."""
    workshop = Workshop(tmp_path)
    workshop.python("m", "class TritonPythonModel:\n    def execute(self, requests):\n        raise SystemExit")
    config = CONFIG.format(backend="python", strategy="oldest", slots="")
    stateless = config[: config.index("state {")] + config[config.index("dims: 1 }\n    }") + len("dims: 1 }") :]
    (tmp_path / "m" / "config.pbtxt").write_text(stateless)

    assert 1 == form(ModelRepository([tmp_path], Devices()).load("m"))[0]


def test_a_backend_that_does_not_know_the_mode_refuses_it(tmp_path: Path) -> None:
    model = loaded(tmp_path, torch_modules.Folding())
    config = model.versions[0].config

    with pytest.raises(LoadError, match="parameter 'fixed_shape' is not supported by the backend of model 'm'"):
        settle_shape(object(), config, "m_0", 8)  # type: ignore[arg-type]


def test_the_arena_is_as_new_after_the_trials(tmp_path: Path) -> None:
    """A state of variable shape is kept per slot: nothing is kept."""
    growing = CONFIG.replace("dims: 1 }}\n    }}", "dims: -1 }}\n    }}").replace("total", "seen")
    workshop = Workshop(tmp_path)
    workshop.script("m", torch_modules.Growing())
    (tmp_path / "m" / "config.pbtxt").write_text(growing.format(backend="pytorch", strategy="oldest", slots=""))
    model = ModelRepository([tmp_path], Devices()).load("m")
    (worker,) = model.versions[0].workers
    engine: Any = worker._engine

    assert (1, "the shape of 'seen' varies") == form(model)
    assert [{}] == [state._slots for state in engine._arena.states]
