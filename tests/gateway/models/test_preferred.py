"""Which executor a new sequence prefers, as the gateway knows it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from gateway.models.preferred import PreferredExecutors, offers_of
from shared.contract.hashing import HashRing
from shared.contract.ids import ExecutorId, SequenceId
from shared.contract.messages import ExecutorRegistration, ServedModel
from shared.store.membership import Member

SEQUENCES = [SequenceId(f"sum||i{number}") for number in range(20)]
SUM = ServedModel("sum", "1", instances=1, slots=4)


def member(name: str, *models: ServedModel, alive: bool = True) -> Member:
    executor = ExecutorId(name)
    registration = ExecutorRegistration(executor, name=name, host="", pid=1, started_ms=0, models=models)
    return Member(registration, alive)


def preferred(members: list[Member]) -> set[str]:
    executors = PreferredExecutors(cast(Any, SimpleNamespace(view=SimpleNamespace(members=members))))
    return {executors.of("sum", "1", sequence) for sequence in SEQUENCES}


def test_a_sequence_prefers_what_the_leaders_ring_says() -> None:
    members = [member(name, SUM) for name in ("b", "a", "c")]
    executors = PreferredExecutors(cast(Any, SimpleNamespace(view=SimpleNamespace(members=members))))
    ring = HashRing(("a", "b", "c"))

    assert [next(ring.walk(one)) for one in SEQUENCES] == [executors.of("sum", "1", one) for one in SEQUENCES]


def test_only_usable_executors_with_slots_of_the_version_are_preferred() -> None:
    closing = msgspec.structs.replace(SUM, closing=True)
    stateless = msgspec.structs.replace(SUM, slots=0)
    other = msgspec.structs.replace(SUM, version="2")
    others = [member("b", closing), member("c", stateless), member("d", other), member("e", SUM, alive=False)]

    assert {"a"} == preferred([member("a", SUM), *others])
    assert {""} == preferred(others)


def test_another_list_of_executors_counts_at_once() -> None:
    view = SimpleNamespace(members=[member("a", SUM)])
    executors = PreferredExecutors(cast(Any, SimpleNamespace(view=view)))
    assert "a" == executors.of("sum", "1", SEQUENCES[0])

    view.members = [member("b", SUM)]

    assert "b" == executors.of("sum", "1", SEQUENCES[0])


def test_what_executors_offer_alike_is_gone_over_once() -> None:
    """A repository has thousands of models, and hundreds of executors offer it."""
    looked_at: list[str] = []

    class Counted(tuple[ServedModel, ...]):
        __slots__ = ()

        def __iter__(self) -> Iterator[ServedModel]:
            looked_at.append("")
            return super().__iter__()

    models = Counted([SUM])
    members = [Member(cast(Any, SimpleNamespace(executor=name, models=models, leaving=False)), True) for name in "abc"]

    assert [["a", "b", "c"]] == [offer.executors for offer in offers_of(members)]
    assert 1 == len(looked_at)
