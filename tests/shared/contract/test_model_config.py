"""What follows from a configuration."""

from __future__ import annotations

import pytest

from shared.contract.model_config import Direct, ModelConfig, SequenceBatching, StateSpec

STATE = StateSpec("state_in", "state_out", "FP32", (1,))


@pytest.mark.parametrize(
    ("states", "state_methods", "recovery", "replays", "remedy"),
    [
        ((), False, {"sequence_recovery": "replay"}, True, "raise the model's parameters sequence_log_steps"),
        ((), False, {}, False, "to have the mesh keep a state"),
        ((STATE,), False, {}, False, ""),
        ((STATE,), False, {"sequence_recovery": "replay"}, False, ""),
        ((), True, {"sequence_recovery": "replay"}, False, ""),
    ],
)
def test_a_state_that_the_mesh_holds_is_not_made_again_from_steps(
    states: tuple[StateSpec, ...], *, state_methods: bool, recovery: dict[str, str], replays: bool, remedy: str
) -> None:
    batching = SequenceBatching(Direct(), 1_000_000, states=states)
    config = ModelConfig(
        "m", "python", "", 4, (), (), sequence_batching=batching, parameters=recovery, state_methods=state_methods
    )

    assert (replays, bool(remedy)) == (config.replays, bool(config.loss_remedy))
    assert remedy in config.loss_remedy


def test_a_sequence_of_the_shortest_idle_time_lives_for_a_millisecond() -> None:
    config = ModelConfig("m", "python", "", 4, (), (), sequence_batching=SequenceBatching(Direct(), 1))

    assert (1, 0) == (config.idle_ms, ModelConfig("m", "python", "", 4, (), ()).idle_ms)


@pytest.mark.parametrize(
    ("stateful", "decoupled", "steps", "keeps"),
    [
        (True, False, {"journal_steps": "5"}, True),
        (True, False, {}, False),
        (True, True, {"journal_steps": "5"}, False),
        (False, False, {"journal_steps": "5"}, False),
    ],
)
def test_a_journal_is_kept_of_sequences_whose_steps_have_one_answer(
    *, stateful: bool, decoupled: bool, steps: dict[str, str], keeps: bool
) -> None:
    batching = SequenceBatching(Direct(), 1) if stateful else None
    config = ModelConfig(
        "m", "python", "", 4, (), (), sequence_batching=batching, decoupled=decoupled, parameters=steps
    )

    assert keeps == config.keeps_journal
