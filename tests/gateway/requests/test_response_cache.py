"""Which requests of a gateway are looked up in the response cache, and under what name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.requests.admission import Admitted
from gateway.requests.response_cache import lookup_of, with_cache_key
from shared.contract.messages import InferMessage, ModelRecord
from shared.contract.model_config import ModelConfig

CONFIG = ModelConfig("m", "python", "", 8, (), ())
RECORD = ModelRecord(CONFIG, "{}", ("1", "2"), "g1", cache_scopes={"1": "s1", "2": "s2"})
ADMITTED = Admitted(InferMessage("m", "2", "id", 0, (), arrived_ns=7))


def name(admitted: Admitted = ADMITTED, record: ModelRecord = RECORD) -> str:
    """What the request's answer is looked for under."""
    lookup = lookup_of(with_cache_key(admitted, record, 100).message, record)
    assert lookup is not None
    return lookup.name


def test_a_request_is_marked_with_what_its_answer_may_be_stored_for() -> None:
    found = with_cache_key(ADMITTED, RECORD, 100)

    lookup = lookup_of(found.message, RECORD)
    assert lookup is not None
    assert ("g1", 7, f"s2.g1.{found.message.cache_key}") == (lookup.generation, lookup.arrived_ns, lookup.name)
    assert 100 == found.message.cache_bytes
    assert ADMITTED == msgspec.structs.replace(
        found, message=msgspec.structs.replace(found.message, cache_key="", cache_bytes=0)
    )


@pytest.mark.parametrize("change", [{"generation": "g2"}, {"cache_scopes": {"2": "s3"}}], ids=str)
def test_what_another_load_or_other_files_answered_is_not_found(change: dict[str, Any]) -> None:
    assert name() != name(record=msgspec.structs.replace(RECORD, **change))


def test_without_a_cache_or_where_the_model_has_it_not_enabled_nothing_is_looked_up() -> None:
    assert ADMITTED is with_cache_key(ADMITTED, RECORD, 0)
    assert ADMITTED is with_cache_key(ADMITTED, msgspec.structs.replace(RECORD, cache_scopes={}), 100)
    assert lookup_of(ADMITTED.message, RECORD) is None
