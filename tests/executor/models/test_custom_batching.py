"""Where batch strategies are found, and what is said of one that cannot be loaded."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from executor.configuration.parameters import STRATEGY
from executor.core.dynamic_batcher import BatchRules
from executor.models import custom_batching
from executor.models.custom_batching import (
    HOOKS,
    BatchRequest,
    BatchStrategy,
    StrategyError,
    find_strategy,
)
from shared.contract.errors import LoadError
from shared.contract.messages import InferMessage
from shared.contract.model_config import Direct, DynamicBatching, ModelConfig, SequenceBatching
from shared.contract.tensors import Tensor
from shared.store.work_scripts import Front, RequestId, Seen
from tests.markdown_pages import ROOT, blocks_of, rows_below

WHOLE = "\n".join(f"def {hook}(*arguments): return __file__" for hook in HOOKS)
PLAIN = ModelConfig("m", "python", "", 4, (), (), dynamic_batching=DynamicBatching())


def configured(path: str) -> ModelConfig:
    return ModelConfig("m", "python", "", 4, (), (), dynamic_batching=DynamicBatching(), parameters={STRATEGY: path})


def put(path: Path, text: str = WHOLE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def found(config: ModelConfig, root: Path) -> Path | None:
    strategy = find_strategy(config, root / "m", "1", [root / "backends"])
    return strategy.path if strategy else None


def test_the_parameter_then_the_versions_then_the_models_then_the_backends_directory(tmp_path: Path) -> None:
    assert found(PLAIN, tmp_path) is None
    backends = put(tmp_path / "backends" / "python" / "batchstrategy.py")
    assert backends == found(PLAIN, tmp_path)
    models = put(tmp_path / "m" / "batchstrategy.py")
    assert models == found(PLAIN, tmp_path)
    versions = put(tmp_path / "m" / "1" / "batchstrategy.py")
    assert versions == found(PLAIN, tmp_path)
    named, absolute = put(tmp_path / "m" / "own.py"), put(tmp_path / "elsewhere.py")
    assert named == found(configured("own.py"), tmp_path)
    assert absolute == found(configured(str(absolute)), tmp_path)


def test_a_named_file_lies_in_the_repository_or_a_backends_directory(tmp_path: Path) -> None:
    """A load request may bring the parameter; what it names is run."""
    here, outside = tmp_path / "models", put(tmp_path / "outside.py")
    (here / "m" / "1").mkdir(parents=True)
    (here / "m" / "link.py").symlink_to(outside)
    for name in ("../../outside.py", str(outside), "link.py", "/etc/hosts.py", "../../models/../outside.py"):
        with pytest.raises(LoadError, match="is not in the model repository"):
            found(configured(name), here)
    beside = put(here / "shared.py")
    assert beside == found(configured("../shared.py"), here)


def test_a_sequence_models_is_named_in_the_log_and_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = put(tmp_path / "m" / "own.py", "raise RuntimeError")
    sequences = ModelConfig(
        "m",
        "python",
        "",
        4,
        (),
        (),
        sequence_batching=SequenceBatching(Direct(), 1),
        parameters={STRATEGY: named.name},
    )

    assert found(sequences, tmp_path) is None
    assert "batch strategy ignored" in caplog.messages


@pytest.mark.parametrize("batching", [None, SequenceBatching(Direct(), 1)])
def test_a_file_that_is_not_asked_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, batching: SequenceBatching | None
) -> None:
    put(tmp_path / "m" / "batchstrategy.py", "raise RuntimeError")

    assert found(ModelConfig("m", "python", "", 4, (), (), sequence_batching=batching), tmp_path) is None
    assert "batch strategy ignored" in caplog.messages


def test_a_model_without_dynamic_batching_and_without_a_strategy_is_not_told_of_any(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert found(ModelConfig("m", "python", "", 4, (), ()), tmp_path) is None
    assert not caplog.messages


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise RuntimeError('broken')", "cannot be imported: RuntimeError: broken"),
        (WHOLE.replace("def model_batch_finalize", "def other"), "has no model_batch_finalize"),
        ("import sys; sys.exit('gone')", "cannot be imported: SystemExit: gone"),
        (
            WHOLE.replace("return __file__", "return 1 / 0"),
            "model_batcher_initialize of the batch strategy of model 'm'",
        ),
        (
            WHOLE.replace("return __file__", "raise SystemExit('gone')"),
            "model_batcher_initialize of the batch strategy of model 'm' failed: SystemExit: gone",
        ),
    ],
)
def test_one_that_cannot_be_loaded_says_why_and_leaves_nothing(tmp_path: Path, text: str, reason: str) -> None:
    before = set(sys.modules)

    with pytest.raises(LoadError, match="batch strategy") as caught:
        BatchStrategy(put(tmp_path / "own.py", text), PLAIN)

    assert reason in caught.value.message
    # Those of tests before may go meanwhile.
    assert set(sys.modules) <= before


def test_the_strategy_of_the_guide_bounds_a_batch_by_its_bytes(tmp_path: Path) -> None:
    page = ROOT / "docs" / "guides" / "batch-strategies.md"
    text = next(block.text for block in blocks_of(page) if block.language == "python")
    config = ModelConfig("m", "python", "", 4, (), (), parameters={"MAX_BYTES": "10"})
    module = vars(BatchStrategy(put(tmp_path / "batchstrategy.py", text), config))["_hooks"]
    batch = module["model_batch_initialize"](module["model_batcher_initialize"](config))
    joined = [
        module["model_batch_include_request"](
            BatchRequest("", 1, {"TEXT": Tensor("TEXT", "BYTES", (1,), bytes(size))}, 0, 0, 0, {}), batch
        )
        for size in (6, 4, 1)
    ]

    assert [True, True, False] == joined


def test_the_guide_names_every_hook_in_both_languages() -> None:
    rows = rows_below(ROOT / "docs" / "guides" / "batch-strategies.md", "## The five functions")

    assert list(HOOKS) == [re.findall(r"\w+", python)[0] for _, python, _ in rows]
    for c, python, _ in rows:
        assert c.strip("`").removeprefix("TRITONBACKEND_").lower() == re.findall(r"\w+", python)[0].replace("_", "")


def test_one_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="is not a Python file"):
        find_strategy(configured("nowhere.py"), tmp_path / "m", "1")


def test_two_models_with_the_same_file_have_a_batcher_each(tmp_path: Path) -> None:
    path = put(tmp_path / "own.py", WHOLE + "\ncount = []\n")

    first, second = BatchStrategy(path, PLAIN), BatchStrategy(path, PLAIN)

    assert first._hooks["model_batch_initialize"] is not second._hooks["model_batch_initialize"]


def test_its_batcher_is_made_when_it_is_loaded_and_finalized_when_the_model_is_unloaded(tmp_path: Path) -> None:
    path = put(
        tmp_path / "own.py",
        WHOLE + "\nfrom pathlib import Path"
        "\ndef model_batcher_initialize(model): return Path(__file__).with_name(model.name)"
        "\ndef model_batcher_finalize(batcher): batcher.touch()",
    )
    strategy = BatchStrategy(path, PLAIN)

    assert not (tmp_path / "m").exists()
    strategy.close_now()
    assert (tmp_path / "m").exists()


ON_ONE_THREAD = """
import sqlite3

kept = sqlite3.connect(":memory:")  # refuses every other thread

def model_batcher_initialize(model):
    kept.execute("CREATE TABLE sizes (rows INTEGER)")

def model_batch_initialize(batcher):
    kept.execute("DELETE FROM sizes")

def model_batch_include_request(request, batch):
    kept.execute("INSERT INTO sizes VALUES (?)", (request.rows,))
    return True

def model_batch_finalize(batch):
    kept.execute("DELETE FROM sizes")

def model_batcher_finalize(batcher):
    kept.close()
"""


async def test_all_that_a_strategy_does_it_does_on_one_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = BatchStrategy(put(tmp_path / "own.py", ON_ONE_THREAD), PLAIN)
    seen, message = Seen(RequestId("7"), 1, 0, ""), InferMessage("m", "1", "7", 0, ())

    assert 1 == await strategy.decide(BatchRules(4, 4, (), 0), Front(1, None, 0, (seen,)), {seen.id: message})
    await strategy.close()
    BatchStrategy(put(tmp_path / "other.py", ON_ONE_THREAD), PLAIN).close_now()
    assert [] == caplog.messages


async def test_a_batcher_whose_finalize_does_not_return_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would hold up the unloading of its model, and the end of its process."""
    monkeypatch.setattr(custom_batching, "FINALIZE_LIMIT_S", 0.01)
    gate = threading.Event()
    strategy = BatchStrategy(put(tmp_path / "own.py"), PLAIN)

    def hangs(_batcher: object) -> None:
        gate.wait()

    monkeypatch.setitem(strategy._hooks, "model_batcher_finalize", hangs)

    async with asyncio.timeout(60):
        await strategy.close()
    gate.set()

    assert ["batch strategy not finalized"] == caplog.messages


async def test_while_a_hook_hangs_requests_run_one_by_one_and_the_log_names_the_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, gate = BatchStrategy(put(tmp_path / "own.py"), PLAIN, 0.01), threading.Event()
    loop, timeouts = asyncio.get_running_loop(), list[asyncio.Timeout]()
    waiting = Front(2, None, 0, tuple(Seen(RequestId(id), 1, 0, "") for id in "78"))
    messages = {seen.id: InferMessage("m", "1", seen.id, 0, ()) for seen in waiting.front}
    decide = partial(strategy.decide, BatchRules(4, 4, (), 0), waiting, messages)

    def hangs(_request: object, _batch: object) -> bool:
        if not gate.is_set():
            loop.call_soon_threadsafe(timeouts[-1].reschedule, loop.time())
        return gate.wait(60)

    def limit(_seconds: float) -> asyncio.Timeout:
        """Reached when the hook hangs, and not before: its thread may be late."""
        timeouts.append(asyncio.timeout(None))
        return timeouts[-1]

    monkeypatch.setattr(custom_batching, "asyncio", SimpleNamespace(timeout=limit))
    monkeypatch.setitem(strategy._hooks, "model_batch_include_request", hangs)
    assert [1, 1] == [await decide(), await decide()]
    assert ["batch strategy hangs"] == caplog.messages
    assert "model_batch_include_request" == vars(caplog.records[0])["fields"]["hook"]

    gate.set()
    async with asyncio.timeout(60):
        while await decide() != 2:
            await asyncio.sleep(0.01)
    await strategy.close()


def test_hooks_that_nobody_waits_for_may_leave_the_process_without_ending_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = put(tmp_path / "own.py", WHOLE + "\ndef model_batcher_finalize(batcher): raise SystemExit('gone')")
    strategy = BatchStrategy(path, PLAIN)

    strategy.close_now()

    assert "batch strategy failed" in caplog.messages


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import numpy\n    return numpy.array([True, False])", "ValueError: The truth value of an array"),
        ("pass", "TypeError: it returned None, and not whether the request joins the batch"),
        ("raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})", "Mute: <its text cannot be made>"),
    ],
)
async def test_an_answer_that_is_none_is_the_error_of_its_request(tmp_path: Path, code: str, reason: str) -> None:
    hook = f"\ndef model_batch_include_request(request, batch):\n    {code}\n"
    strategy = BatchStrategy(put(tmp_path / "own.py", WHOLE + hook), PLAIN)
    seen, message = Seen(RequestId("7"), 1, 0, ""), InferMessage("m", "1", "7", 0, ())

    with pytest.raises(StrategyError, match=reason) as caught:
        await strategy.decide(BatchRules(4, 4, (), 0), Front(1, None, 0, (seen,)), {seen.id: message})

    assert seen.id == caught.value.request
    await strategy.close()
