"""Which ensembles can be served, and Triton's words for those that cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from gateway.models.ensembles import unavailable_ensembles, with_decoupled_ensembles
from shared.contract.messages import ModelRecord
from shared.contract.model_config import Direct, EnsembleStep, ModelConfig, SequenceBatching, TensorSpec

pytestmark = pytest.mark.unit


def model(
    name: str,
    *,
    batch: int = 4,
    given: Mapping[str, str] | None = None,
    made: Mapping[str, str] | None = None,
    dims: tuple[int, ...] = (1,),
    optional: bool = False,
    steps: tuple[EnsembleStep, ...] = (),
    cached: bool = False,
    many: bool = False,
) -> ModelRecord:
    config = ModelConfig(
        name=name,
        backend="" if steps else "python",
        platform="ensemble" if steps else "",
        max_batch_size=batch,
        inputs=tuple(TensorSpec(key, kind, dims, optional) for key, kind in (given or {"I": "FP32"}).items()),
        outputs=tuple(TensorSpec(key, kind, dims) for key, kind in (made or {"O": "FP32"}).items()),
        ensemble=steps,
        response_cache=cached,
        decoupled=many,
    )
    return ModelRecord(config, "{}", ("1",))


def step(inner: str, given: str = "I", made: str = "O", *, version: str = "") -> EnsembleStep:
    return EnsembleStep(inner, version, {"I": given}, {"O": made})


def problem(*records: ModelRecord, name: str = "e", served: Mapping[str, tuple[str, ...]] | None = None) -> str:
    found = {record.config.name: record for record in records}
    return unavailable_ensembles(found, dict.fromkeys(found, ("1",)) | dict(served or {}), {}).get(name, "")


CHAIN = model("e", steps=(step("a", "I", "mid"), step("b", "mid", "O")))


def test_models_that_fit_are_served() -> None:
    assert "" == problem(CHAIN, model("a"), model("b"))


def test_a_model_that_is_served_and_whose_record_cannot_be_read_keeps_its_ensembles_from_being_served() -> None:
    """Also when another version of it could not be loaded, so that it is known without its record."""
    found = unavailable_ensembles({"e": CHAIN, "b": model("b")}, dict.fromkeys("eab", ("1",)), {"a": "no luck"})

    assert "which has no loaded version. Model 'a' loading failed with error: no luck" in found["e"]


def test_one_tensor_may_go_to_several_steps() -> None:
    fan = model(
        "e", steps=(step("a", "I", "x"), step("a", "I", "y"), EnsembleStep("c", "", {"I": "x", "J": "y"}, {"O": "O"}))
    )

    assert "" == problem(fan, model("a"), model("c", given={"I": "FP32", "J": "FP32"}))


@pytest.mark.parametrize(
    ("expected", "records", "served"),
    [
        ("ensemble e contains models that are not available or ambiguous: b", (CHAIN, model("a")), {}),
        ("ensemble 'e' depends on 'b' which has no loaded version.", (CHAIN, model("a"), model("b")), {"b": ()}),
        (
            "ensemble 'e' depends on 'a' whose required version 7 is not loaded.",
            (model("e", steps=(step("a", version="7"),)), model("a")),
            {},
        ),
        (
            (
                "ensemble e allows maximum batch size 4, but it contains model b which only allows maximum batch size "
                "to be 2"
            ),
            (CHAIN, model("a"), model("b", batch=2)),
            {},
        ),
        (
            (
                "in ensemble e, ensemble tensor mid: inconsistent data type: TYPE_INT8 is inferred from model a while "
                "TYPE_FP32 is inferred from model b"
            ),
            (CHAIN, model("a", made={"O": "INT8"}), model("b")),
            {},
        ),
        (
            (
                "in ensemble e, ensemble tensor mid: inconsistent shape: [-1,1] is inferred from model a while "
                "[-1,2,2] is inferred from model b"
            ),
            (CHAIN, model("a"), model("b", dims=(2, 2))),
            {},
        ),
        (
            "in ensemble e, input J in model b is not mapped to any ensemble tensors",
            (CHAIN, model("a"), model("b", given={"I": "FP32", "J": "FP32"})),
            {},
        ),
        (
            "in ensemble e, ensemble tensor mid is mapping to non-existing input I in model b",
            (CHAIN, model("a"), model("b", given={"K": "FP32"})),
            {},
        ),
        (
            "in ensemble e, ensemble tensor mid is mapped from non-existing output O in model a",
            (CHAIN, model("a", made={"P": "FP32"}), model("b")),
            {},
        ),
        (
            "circular dependency between ensembles: e -> ... -> f -> e",
            (model("e", steps=(step("f"),)), model("f", steps=(step("e"),))),
            {},
        ),
        (
            (
                "Response Cache does not currently support model e with 'decoupled' transaction policy. Please disable "
                "the response cache."
            ),
            (
                model("e", steps=(step("many", made="mid"), step("a", "mid")), cached=True),
                model("many", many=True),
                model("a"),
            ),
            {},
        ),
        ("circular dependency between ensembles: e -> ... -> e -> e", (model("e", steps=(step("e"),)),), {}),
        (
            (
                "ensemble 'e' depends on 'f' which is not valid. Model 'f' failed with error: ensemble 'f' depends on "
                "'a' which has no loaded version."
            ),
            (model("e", steps=(step("f"),)), model("f", steps=(step("a"),)), model("a")),
            {"a": ()},
        ),
    ],
)
def test_what_does_not_fit_is_told_in_tritons_words(
    expected: str, records: tuple[ModelRecord, ...], served: Mapping[str, tuple[str, ...]]
) -> None:
    assert expected == problem(*records, served=served)


def test_a_model_without_batches_fits_by_its_whole_shape() -> None:
    assert "" == problem(CHAIN, model("a"), model("b", batch=0, dims=(-1, 1)))


def test_an_optional_input_need_not_be_mapped() -> None:
    optional = model("b", given={"I": "FP32", "J": "FP32"}, optional=True)

    assert "" == problem(CHAIN, model("a"), optional)


def test_ensembles_of_ensembles_that_grow_without_measure_are_refused() -> None:
    def twice(name: str, inner: str) -> ModelRecord:
        return model(name, steps=(step(inner, "I", "mid"), step(inner, "mid", "O")))

    towers = [twice(f"e{level}", f"e{level - 1}" if level else "a") for level in range(40)]

    assert "" == problem(*towers, model("a"), name="e7")
    assert "ensemble 'e8' has more than 256 steps, those of its ensembles included" == problem(
        *towers, model("a"), name="e8"
    )
    assert "ensemble 'e9' depends on 'e8' which is not valid." in problem(*towers, model("a"), name="e9")


def test_a_model_that_could_not_be_loaded_is_named_with_its_error_however_deep_it_is() -> None:
    records = {name: model(name, steps=(step(inner),)) for name, inner in (("outer", "inner"), ("inner", "a"))}
    served = dict.fromkeys(records, ("1",))
    told = "ensemble 'inner' depends on 'a' which has no loaded version. Model 'a' loading failed with error: no luck"

    assert {
        "inner": told,
        "outer": f"ensemble 'outer' depends on 'inner' which is not valid. Model 'inner' failed with error: {told}",
    } == unavailable_ensembles(records, served, {"a": "no luck"})


def test_towers_of_ensembles_are_refused_however_high() -> None:
    tower = [model(f"e{level}", steps=(step(f"e{level - 1}" if level else "a"),)) for level in range(3000)]

    assert "" == problem(*tower[:31], model("a"), name="e30")
    assert "ensemble 'e2999' has more than 32 ensembles within each other" == problem(*tower, model("a"), name="e2999")


def test_a_circle_below_makes_those_above_unavailable_too() -> None:
    above = model("e", steps=(step("f"),))
    circle = [model("f", steps=(step("g"),)), model("g", steps=(step("f"),))]

    assert problem(above, *circle)
    assert "ensemble 'e' depends on 'f' which has no loaded version." == problem(above, model("f"), served={"f": ()})


def changed(record: ModelRecord, **fields: Any) -> ModelRecord:
    return ModelRecord(msgspec.structs.replace(record.config, **fields), "{}", ("1",))


MANY = changed(model("many"), decoupled=True)
SEQUENCES = SequenceBatching(strategy=Direct(), idle_us=1)
STATE = changed(model("state"), sequence_batching=SEQUENCES)
ITERATIVE = changed(model("iterative"), sequence_batching=msgspec.structs.replace(SEQUENCES, iterative=True))
TWO_INPUTS = model("two", given={"I": "FP32", "J": "FP32"})
DIFFERENT = "in ensemble e, step of model '{}' receives inputs originated from different decoupled models"


@pytest.mark.parametrize(
    ("expected", "steps"),
    [
        ("", (step("many", made="x"), step("a", "x"))),
        ("", (step("many", made="x"), step("many", "x", "y"), step("iterative", "y"))),
        ("", (step("a", "x"), step("many", "y", "x"), step("state", "I", "y"))),
        (
            DIFFERENT.format("two"),
            (step("many", made="x"), EnsembleStep("two", "", {"I": "x", "J": "I"}, {"O": "O"})),
        ),
        (
            DIFFERENT.format("two"),
            (
                step("many", made="x"),
                step("many", made="y"),
                EnsembleStep("two", "", {"I": "x", "J": "y"}, {"O": "O"}),
            ),
        ),
        (
            (
                "in ensemble e, step of model 'state' keeps state and comes behind the decoupled model 'many': one "
                "request would be any number of steps of its sequence. Keep that state in 'many', or in a step before "
                "it"
            ),
            (step("many", made="x"), step("state", "x")),
        ),
    ],
)
def test_decoupled_steps_come_one_behind_the_other(expected: str, steps: tuple[EnsembleStep, ...]) -> None:
    records = (model("e", steps=steps), model("a"), MANY, STATE, ITERATIVE, TWO_INPUTS)

    assert expected == problem(*records)


def test_a_model_that_hands_its_states_out_by_correlation_id_is_in_one_step_alone() -> None:
    """Also where one of the steps is another ensemble's."""
    methods = changed(STATE, state_methods=True)
    inner = model("inner", steps=(step("state"),))
    once = model("e", steps=(step("state", "I", "x"), step("a", "x")))
    twice = model("e", steps=(step("state", "I", "x"), step("inner", "x")))

    assert "" == problem(once, inner, methods, model("a"))
    assert "" == problem(twice, inner, STATE)
    assert problem(twice, inner, methods).startswith(
        "in ensemble e, model 'state' is in 2 steps, and hands its states out by correlation id, which is the same in "
        "all of them."
    )


def test_outputs_from_different_sides_of_a_decoupled_step() -> None:
    sides = model("e", made={"O": "FP32", "P": "FP32"}, steps=(step("many"), step("a", made="P")))

    assert DIFFERENT.format("e") == problem(sides, MANY, model("a"))


def test_an_ensemble_is_decoupled_as_its_steps_say_however_deep_they_are() -> None:
    records = {
        "e": model("e", steps=(step("inner"),)),
        "inner": model("inner", steps=(step("many"),)),
        "says": changed(model("says", steps=(step("a"),)), decoupled=True),
        "many": MANY,
        "a": model("a"),
    }
    found = with_decoupled_ensembles(records)

    assert ["e", "inner", "many"] == [name for name, record in found.items() if record.config.decoupled]
    assert '{"model_transaction_policy":{"decoupled":true}}' == found["e"].config_json


def test_a_circle_of_tensors_that_another_version_let_through_is_a_problem() -> None:
    circle = model("e", steps=(step("a", "x", "y"), step("a", "y", "x"), step("a")))

    assert "in ensemble e, the tensors of 2 steps are never written" == problem(circle, model("a"))
