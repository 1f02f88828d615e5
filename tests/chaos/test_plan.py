"""A seed gives one plan of faults and one list of sequences, and both are what they are meant to be."""

from __future__ import annotations

import string
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.chaos.command import command_again, kinds_of, run_name
from deploy.chaos.faults import KINDS, Act, plan_faults
from deploy.chaos.models import VARIANTS, variant
from deploy.chaos.scripts import NAMED_STEPS_MAX, STREAM_WINDOW_MAX, UNARY_WINDOW_MAX, ProtocolName, Script, script

ALL: list[ProtocolName] = ["http", "grpc", "client", "stream"]
SEEDS = st.integers(0, 2**32)


def make(seed: int, index: int, steps_max: int = 1000) -> Script:
    return script(seed, index, run="abc", steps_max=steps_max, protocols=ALL)


@given(SEEDS, st.integers(0, 300), st.sets(st.sampled_from(sorted(KINDS)), min_size=1))
def test_the_same_seed_gives_the_same_faults_of_every_kind_equally_often(
    seed: int, count: int, kinds: set[str]
) -> None:
    plan = plan_faults(seed, count, sorted(kinds), lease_s=2.0)

    assert plan == plan_faults(seed, count, sorted(kinds), lease_s=2.0)
    assert count == len(plan)
    numbers = Counter(fault.kind for fault in plan)
    assert max(numbers.values(), default=0) - min((numbers[kind] for kind in kinds), default=0) <= 1
    times = [fault.at for fault in plan]
    assert times == sorted(times)
    assert all(0 < at < 1 for at in times)


@given(SEEDS)
def test_a_process_is_frozen_for_longer_than_the_lease_or_only_blinks(seed: int) -> None:
    for fault in plan_faults(seed, 100, list(KINDS), lease_s=2.0):
        match KINDS[fault.kind].act:
            case Act.FREEZE:
                assert fault.seconds > 2.0
            case Act.BLINK:
                assert 0 < fault.seconds < 2.0
            case _:
                pass


def test_another_seed_gives_another_plan() -> None:
    assert plan_faults(1, 50, list(KINDS), lease_s=2.0) != plan_faults(2, 50, list(KINDS), lease_s=2.0)
    assert [make(1, n) for n in range(20)] != [make(2, n) for n in range(20)]


@given(SEEDS, st.integers(0, 10**6), st.integers(1, 1000))
def test_a_sequence_asks_for_nothing_that_the_mesh_does_not_promise(seed: int, index: int, steps_max: int) -> None:
    made = make(seed, index, steps_max)

    assert made == make(seed, index, steps_max)
    assert 1 <= len(made.values) <= steps_max
    assert made.numbered or len(made.values) <= NAMED_STEPS_MAX
    if made.protocol in ("client", "stream"):
        assert made.window <= STREAM_WINDOW_MAX
    else:
        assert made.window <= (UNARY_WINDOW_MAX if made.numbered else 1)
    assert made.silent_at <= len(made.values)
    assert made.silent_at == 0 or variant(made.model).idle_s < 10
    assert set(made.hang_ups) <= set(range(1, len(made.values) + 1))


def test_a_list_of_sequences_has_every_kind() -> None:
    sequences = [make(3, index) for index in range(300)]

    assert {one.name for one in VARIANTS} == {made.model for made in sequences}
    assert set(ALL) == {made.protocol for made in sequences}
    assert {int, str} == {type(made.correlation_id) for made in sequences}
    assert len(sequences) == len({made.correlation_id for made in sequences})
    assert all(any(made.numbered is numbered and made.window > 1 for made in sequences) for numbered in (True, False))
    assert any(made.hang_ups for made in sequences)
    assert any(made.silent_at for made in sequences)
    assert any(not made.ends for made in sequences)
    assert any(len(made.values) > 100 for made in sequences)


def test_kinds_are_chosen_by_name_act_or_victim() -> None:
    chosen = kinds_of("kill-redis,freeze,clients")

    freezes = [name for name in KINDS if name.startswith("freeze-")]
    assert {"kill-redis": ["kill-redis"], "freeze": freezes, "clients": ["drop-clients"]} == chosen
    with pytest.raises(Exception, match="'kill-nobody' is no fault"):
        kinds_of("kill-nobody")


@pytest.mark.parametrize(
    ("options", "again"),
    [
        (["--out", "chaos"], "--seed 7 --out chaos"),
        (["--seed", "7", "--steps=9"], "--seed 7 --steps=9"),
        (["--seed=7"], "--seed=7"),
    ],
)
def test_a_run_is_repeated_with_its_seed_and_its_options(
    monkeypatch: pytest.MonkeyPatch, options: list[str], again: str
) -> None:
    monkeypatch.setattr("sys.argv", ["seqmesh", "chaos", *options])

    assert f"seqmesh chaos {again}" == command_again(7)


def test_a_runs_name_can_be_part_of_any_id() -> None:
    assert set(run_name()) <= set(string.digits + string.ascii_lowercase)
    assert 0 < script(1, 1 << 23, run="zzzzzz", steps_max=9, protocols=ALL).index
    for index in range(40):
        identity = script(1, index, run=run_name(), steps_max=9, protocols=ALL).correlation_id
        assert isinstance(identity, str) or 0 < identity < 1 << 63
