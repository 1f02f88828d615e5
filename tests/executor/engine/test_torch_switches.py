"""Parameters of Triton's PyTorch backend: each changes what it says, or the log says that it does not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import msgspec
import pytest
import torch

from executor.engine.base import Row
from executor.engine.pytorch import switches
from executor.engine.pytorch.switches import Switches, switches_of
from shared.contract.errors import LoadError
from shared.contract.model_config import ModelConfig, TensorSpec
from tests.executor.engine import torch_modules
from tests.executor.engine.model_workshop import Workshop, array, plain_config, results, wire


def config_with(**parameters: str) -> ModelConfig:
    config = plain_config(
        "doubled", "pytorch", inputs=[TensorSpec("x", "FP32", (1,))], outputs=[TensorSpec("y", "FP32", (1,))]
    )
    return msgspec.structs.replace(config, parameters=parameters)


@pytest.mark.parametrize("truth", ["true", "True", "1", "on"])
def test_parameters_are_read_as_truth(truth: str) -> None:
    config = config_with(
        DISABLE_OPTIMIZED_EXECUTION=truth,
        ENABLE_JIT_EXECUTOR=truth,
        ENABLE_JIT_PROFILING=truth,
        ENABLE_TENSOR_FUSER=truth,
        DISABLE_CUDNN=truth,
        ENABLE_CACHE_CLEANING=truth,
        ENABLE_WEIGHT_SHARING=truth,
        INFERENCE_MODE="false",
    )

    expected = Switches(
        inference_mode=False,
        optimized=False,
        jit_executor=True,
        jit_profiling=True,
        tensor_fuser=True,
        cudnn=False,
        cache_cleaning=True,
        weight_sharing=True,
    )
    assert expected == switches_of(config)
    assert Switches() == switches_of(config_with())


@pytest.mark.parametrize("name", ["INFERENCE_MODE", "ENABLE_JIT_EXECUTOR"])
def test_what_is_neither_true_nor_false_is_refused(name: str) -> None:
    with pytest.raises(LoadError, match=f"parameter {name} must be true or false, not 'perhaps'"):
        switches_of(config_with(**{name: "perhaps"}))


@pytest.mark.parametrize(("value", "expected"), [("true", 1), ("false", 0)])
def test_a_model_runs_in_inference_mode_or_outside_of_it(workshop: Workshop, value: str, expected: int) -> None:
    workshop.script("doubled", torch_modules.TellsInferenceMode())
    engine = workshop.load(config_with(INFERENCE_MODE=value))

    (result,) = results(engine, [Row({"x": wire("x", [[3]])})])

    assert expected == array(result, "y").item()


@pytest.mark.parametrize("value", [True, False])
def test_settings_of_torchscript_hold_during_the_call(*, value: bool) -> None:
    native = cast("Any", torch)._C
    before = native._jit_set_profiling_executor(True), native._jit_set_profiling_mode(True)
    fuser = native._jit_texpr_fuser_enabled()
    chosen = Switches(optimized=value, jit_executor=value, jit_profiling=value, tensor_fuser=value, cudnn=value)
    try:
        with chosen.applied():
            optimized = native._get_graph_executor_optimize()
            fused, cudnn = native._jit_texpr_fuser_enabled(), torch.backends.cudnn.enabled
            executor, profiling = native._jit_set_profiling_executor(value), native._jit_set_profiling_mode(value)
        after = native._get_graph_executor_optimize()
    finally:
        native._jit_set_profiling_executor(before[0])
        native._jit_set_profiling_mode(before[1])
        native._jit_set_texpr_fuser_enabled(fuser)

    assert [value] * 5 == [optimized, fused, cudnn, executor, profiling]
    assert after
    assert torch.backends.cudnn.enabled


def test_cudnn_is_off_until_the_last_of_the_calls_that_want_it_off_and_on_again_then() -> None:
    first, second = Switches(cudnn=False).applied(), Switches(cudnn=False).applied()
    first.__enter__()
    second.__enter__()

    first.__exit__(None, None, None)
    assert not torch.backends.cudnn.enabled
    second.__exit__(None, None, None)
    assert torch.backends.cudnn.enabled


def test_a_model_with_every_switch_answers_as_without(workshop: Workshop) -> None:
    workshop.script("doubled", torch_modules.Doubled())
    engine = workshop.load(
        config_with(DISABLE_OPTIMIZED_EXECUTION="true", ENABLE_CACHE_CLEANING="true", DISABLE_CUDNN="true")
    )

    (result,) = results(engine, [Row({"x": wire("x", [[3]])})])

    assert 6 == array(result, "y").item()


def test_what_changes_nothing_here_is_told_in_the_log(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    workshop.device = "cpu"
    workshop.program("doubled", torch_modules.Doubled(), (torch.zeros(2, 1),))
    workshop.load(config_with(ENABLE_NVFUSER="true", ENABLE_CACHE_CLEANING="true", ENABLE_TENSOR_FUSER="true"))

    for name, reason in (
        ("ENABLE_NVFUSER", "torch has no nvFuser any more"),
        ("ENABLE_CACHE_CLEANING", "the instance runs on a CPU"),
        ("ENABLE_TENSOR_FUSER", "the model is an exported program, not TorchScript"),
    ):
        assert f"parameter '{name}' has no effect: {reason}" in caplog.text


def test_a_number_of_threads_is_that_of_its_model_alone(workshop: Workshop) -> None:
    """A model that is loaded later, on a thread of its own, computes with as many as torch decides."""

    def on_a_thread(number: int) -> int:
        with ThreadPoolExecutor(1) as thread:
            if number:
                thread.submit(workshop.load, config_with(torch_threads=str(number))).result()
            return thread.submit(torch.get_num_threads).result()

    workshop.script("doubled", torch_modules.Doubled())
    before = on_a_thread(0)

    assert [before + 1, before] == [on_a_thread(before + 1), on_a_thread(0)]


@pytest.mark.parametrize("name", ["torch_threads", "INTRA_OP_THREAD_COUNT"])
@pytest.mark.parametrize("text", ["0", "many", ""])
def test_what_is_no_number_of_threads_is_refused_under_the_name_that_was_written(
    workshop: Workshop, name: str, text: str
) -> None:
    workshop.script("doubled", torch_modules.Doubled())

    with pytest.raises(LoadError, match=f"parameter {name} must be a positive number, not '{text}'"):
        workshop.load(config_with(**{name: text}))


def test_threads_between_operators_are_set_once_and_later_wishes_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wishes: list[int] = []

    def once(count: int) -> None:
        if wishes:
            raise RuntimeError("cannot set number of interop threads")
        wishes.append(count)

    monkeypatch.setattr(torch, "set_num_interop_threads", once)
    monkeypatch.setattr(torch, "get_num_interop_threads", lambda: 7)
    for count in ("3", "7", "5"):
        switches.use_inter_op_threads(config_with(INTER_OP_THREAD_COUNT=count))

    assert [3] == wishes
    assert "'INTER_OP_THREAD_COUNT' has no effect: this process has 7 such threads already" in caplog.text
    with pytest.raises(LoadError, match="INTER_OP_THREAD_COUNT must be a positive number, not '0'"):
        switches.use_inter_op_threads(config_with(INTER_OP_THREAD_COUNT="0"))
