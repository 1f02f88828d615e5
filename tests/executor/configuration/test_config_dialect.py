"""The dialect loads as written and means what its documents say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.contract.errors import ConfigError
from shared.contract.model_config import (
    Direct,
    InstanceGroup,
    Oldest,
    SequenceBatching,
    StateSpec,
    TensorSpec,
    TimeoutAction,
)
from tests.executor.configuration.conftest import IO, LoadText, sequence_of

SEEDS = Path(__file__).parents[2] / "fixtures" / "seeds"


def test_first_seed_loads_as_written(load_text: LoadText) -> None:
    """One state tensor in and out, batches of 4 and 8 across sequences within 10 ms, ten minutes of idle time."""
    loaded = load_text((SEEDS / "my_lstm_model.pbtxt").read_text(), name="my_lstm_model", files=["model.pt"])

    expected = SequenceBatching(
        strategy=Oldest(
            max_candidate_sequences=8,
            preferred_batch_sizes=(4, 8),
            max_queue_delay_us=10_000,
            preserve_ordering=True,
        ),
        idle_us=600_000_000,
        states=(StateSpec(input_name="lstm_state", output_name="lstm_state", datatype="FP32", dims=(2, 1024)),),
        implicit_start=True,
    )
    assert expected == loaded.config.sequence_batching
    assert None is loaded.config.dynamic_batching
    assert (InstanceGroup("my_lstm_model_0", "CPU", 1),) == loaded.config.instance_groups
    assert ("pytorch", "tensorflow_savedmodel") == (loaded.config.backend, loaded.config.platform)
    assert (TensorSpec("INPUT__0", "FP32", (128,)),) == loaded.config.inputs
    assert "platform tensorflow_savedmodel is not installed; serving model.pt with pytorch" == loaded.config.notes[0]
    assert 7 == len(loaded.config.notes)


def test_first_seed_without_a_file_of_an_installed_backend_is_refused(load_text: LoadText) -> None:
    with pytest.raises(ConfigError, match="installed backends: python, pytorch"):
        load_text((SEEDS / "my_lstm_model.pbtxt").read_text(), name="my_lstm_model", files=["model.savedmodel"])


def test_fourth_seed_is_completed_from_the_models_signature(load_text: LoadText) -> None:
    """It declares neither inputs nor outputs nor state: the backend fills them in."""

    def complete(config_json: str, version_dir: Path) -> str:
        config = json.loads(config_json)
        config["input"] = [{"name": "sequence", "data_type": "TYPE_INT32", "dims": [-1]}]
        config["output"] = [{"name": "output", "data_type": "TYPE_FP32", "dims": [4]}]
        state = {"input_name": "h", "output_name": "h_out", "data_type": "TYPE_FP32", "dims": [16]}
        config["sequence_batching"]["state"] = [state]
        return json.dumps(config)

    text = (SEEDS / "rnn_model.pbtxt").read_text()
    loaded = load_text(text, name="rnn_model", files=["model.pt"], backends={"pytorch": complete})

    expected = SequenceBatching(
        strategy=Oldest(max_candidate_sequences=8, preferred_batch_sizes=(8,)),
        idle_us=600_000_000,
        states=(StateSpec("h", "h_out", "FP32", (16,)),),
        implicit_start=True,
        describe_on_expiry=True,
    )
    assert expected == loaded.config.sequence_batching
    assert "completed from the model itself: input, output, sequence_batching.state" in loaded.config.notes


@pytest.mark.parametrize(
    "batching",
    [
        "reusable_batch { max_size: 4 }",
        'state { name: "s" data_type: TYPE_FP32 dims: 1 }',
        "timeout_action: TIMEOUT_COMPLETE",
        "default_batch_size: 4",
        "} dynamic_batching {",
        "} model_transaction_policy { stateful_model_policy { }",
    ],
)
def test_any_sign_of_the_dialect_lets_a_sequence_begin_without_start(load_text: LoadText, batching: str) -> None:
    assert sequence_of(load_text(f"{IO} sequence_batching {{ {batching} }}")).implicit_start


def test_dialect_with_direct_strategy_keeps_it(load_text: LoadText) -> None:
    loaded = load_text(
        f'{IO} sequence_batching {{ direct {{ }} state {{ name: "s" data_type: TYPE_FP32 dims: 1 }} }} '
        "dynamic_batching { max_queue_delay_microseconds: 5 }"
    )

    assert Direct() == sequence_of(loaded).strategy
    assert "dynamic_batching beside sequence_batching has no effect on the direct strategy" in loaded.config.notes


def test_what_canonical_fields_say_wins_over_what_dynamic_batching_lends(load_text: LoadText) -> None:
    loaded = load_text(
        f"{IO} sequence_batching {{ oldest {{ max_queue_delay_microseconds: 3 preferred_batch_size: 2 }} }} "
        "dynamic_batching { max_queue_delay_microseconds: 5 preferred_batch_size: 4 priority_levels: 1 "
        "default_priority_level: 1 }"
    )

    expected = Oldest(max_candidate_sequences=8, preferred_batch_sizes=(2,), max_queue_delay_us=3)
    assert expected == sequence_of(loaded).strategy
    assert loaded.config.notes[0].endswith("without effect on sequences: priority_levels, default_priority_level")


def test_dialect_that_contradicts_itself_is_refused(load_text: LoadText) -> None:
    """So is every line of the page's table: `test_dialect_page`."""
    with pytest.raises(ConfigError, match=r"^sequence batching preferred batch size must be positive for m$"):
        load_text(f"{IO} sequence_batching {{ default_batch_size: 0 oldest {{ }} }}")


def test_late_stateless_requests_are_delayed_or_rejected_as_the_dialect_says(load_text: LoadText) -> None:
    complete = load_text(f"{IO} dynamic_batching {{ timeout_action: TIMEOUT_COMPLETE default_batch_size: 4 }}").config
    reject = load_text(f"{IO} dynamic_batching {{ timeout_action: TIMEOUT_REJECT }}").config

    assert complete.dynamic_batching is not None
    assert reject.dynamic_batching is not None
    assert TimeoutAction.DELAY == complete.dynamic_batching.default_queue_policy.timeout_action
    assert TimeoutAction.REJECT == reject.dynamic_batching.default_queue_policy.timeout_action
    assert (4,) == complete.dynamic_batching.preferred_batch_sizes


def test_a_timeout_action_is_that_of_every_level_and_lets_requests_bring_timeouts(load_text: LoadText) -> None:
    levels = """priority_levels: 2 default_priority_level: 1 priority_queue_policy {{ key: 2 value {{
        timeout_action: {action} default_timeout_microseconds: 9 }} }}"""
    complete = load_text(
        f"{IO} dynamic_batching {{ timeout_action: TIMEOUT_COMPLETE {levels.format(action='REJECT')} }}"
    ).config.dynamic_batching
    silent = load_text(f"{IO} dynamic_batching {{ {levels.format(action='DELAY')} }}").config.dynamic_batching

    assert complete is not None
    assert silent is not None
    assert [TimeoutAction.DELAY] * 2 == [
        policy.timeout_action for policy in (complete.default_queue_policy, complete.priority_queue_policies[2])
    ]
    assert (True, False) == (complete.own_timeouts, silent.own_timeouts)
    with pytest.raises(ConfigError, match=r"priority_queue_policy\[2\]\.timeout_action' contradict"):
        load_text(f"{IO} dynamic_batching {{ timeout_action: TIMEOUT_REJECT {levels.format(action='DELAY')} }}")
    with pytest.raises(ConfigError, match="can not have DELAY as timeout action when 'preserve_ordering' is true"):
        load_text(f"{IO} dynamic_batching {{ timeout_action: TIMEOUT_COMPLETE preserve_ordering: true }}")


def test_the_timeout_action_of_a_lent_batcher_counts_where_the_sequence_batcher_has_none(load_text: LoadText) -> None:
    lent = "dynamic_batching { timeout_action: TIMEOUT_COMPLETE }"
    own = [load_text(f"{IO} {lent} sequence_batching {{ {own} }}") for own in ("", "timeout_action: TIMEOUT_REJECT")]

    assert [TimeoutAction.DELAY, TimeoutAction.REJECT] == [sequence_of(each).timeout_action for each in own]


@pytest.mark.parametrize(
    ("action", "expected", "late"),
    [
        ("TIMEOUT_REJECT", TimeoutAction.REJECT, "refused with its sequence"),
        ("TIMEOUT_COMPLETE", TimeoutAction.DELAY, "served late"),
    ],
)
def test_step_that_waits_too_long_for_a_slot_is_refused_or_served_late(
    load_text: LoadText, action: str, expected: TimeoutAction, late: str
) -> None:
    """Both are told in a note; without any, Triton's refusal holds."""
    loaded = load_text(f"{IO} sequence_batching {{ timeout_action: {action} }}")
    silent = load_text(f"{IO} sequence_batching {{ }}")

    assert [expected, TimeoutAction.REJECT] == [sequence_of(each).timeout_action for each in (loaded, silent)]
    note = (
        f"sequence_batching: a step that waits for a slot longer than its timeout is {late} (timeout_action {action})"
    )
    assert (f"{note}; an idle sequence ends either way",) == loaded.config.notes


def test_unknown_timeout_action_is_a_syntax_error(load_text: LoadText) -> None:
    with pytest.raises(ConfigError, match="has no value named TIMEOUT_MAYBE"):
        load_text(f"{IO} sequence_batching {{ timeout_action: TIMEOUT_MAYBE }}")


def test_timeout_action_that_has_no_name_is_refused(load_text: LoadText) -> None:
    with pytest.raises(ConfigError, match="there is no timeout_action -1 for m"):
        load_text(f"{IO} dynamic_batching {{ timeout_action: -1 }}")
