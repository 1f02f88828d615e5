"""What the catalog makes of registrations and records, under a clock of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import pytest

from gateway.models import catalog as catalog_module
from gateway.models import ensembles
from gateway.models.catalog import ABSENCE_GRACE_S, STALE_S, UNSERVED_S, Catalog, merged_index
from gateway.models.ensembles import unavailable_ensembles
from gateway.models.statistics import Statistics
from shared.contract.errors import Code, MeshError
from shared.contract.ids import ExecutorId
from shared.contract.messages import ExecutorRegistration, ModelRecord, RepositoryEntry, ServedModel
from shared.contract.model_config import EnsembleStep
from shared.store.membership import Member
from tests.gateway.fake_executor import running_sum


def member(*versions: str, alive: bool = True, state: str = "READY", **changes: Any) -> Member:
    """An executor that serves these versions of model `m`."""
    registration = ExecutorRegistration(
        executor=ExecutorId("e"),
        name="e",
        host="h",
        pid=1,
        started_ms=1,
        models=tuple(ServedModel("m", version, 1, 8) for version in versions),
        repository=tuple(RepositoryEntry("m", version, state) for version in versions),
    )
    return Member(msgspec.structs.replace(registration, **changes), alive)


class Mesh:
    """A membership that says what the test says, and the test's clock."""

    def __init__(
        self, *members: Member, versions: tuple[str, ...] = ("1", "2", "10"), strict_readiness: bool = False
    ) -> None:
        self.now = 100.0
        self.present: Sequence[Member] = members
        self.records: Mapping[str, ModelRecord] = {"m": ModelRecord(running_sum("m"), "{}", versions)}
        self.catalog = Catalog(cast("Any", self), strict_readiness=strict_readiness, clock=lambda: self.now)

    async def models(self) -> Mapping[str, ModelRecord]:
        return self.records

    async def members(self) -> Sequence[Member]:
        return self.present

    async def at(self, now: float, *members: Member) -> Catalog:
        """The catalog after a refresh at that time, with these members."""
        self.now, self.present = now, members
        await self.catalog.refresh()
        return self.catalog


def error_of(catalog: Catalog, model: str, version: str = "") -> tuple[Code, str]:
    with pytest.raises(MeshError) as caught:
        catalog.find(model, version)
    return caught.value.code, caught.value.message


async def test_highest_version_by_number_serves_who_names_none():
    catalog = await Mesh().at(100, member("2", "10"), member("1"))

    assert catalog.find("m", "")[1] == "10"
    assert catalog.find("m", "2")[1] == "2"
    assert catalog.record("m")[1] == ("1", "2", "10")
    assert catalog.record("m", "1")[1] == ("1",)


async def test_version_is_not_ready_when_all_executors_say_so_and_is_served_nevertheless():
    def saying(ready: bool, *versions: str) -> Member:
        models = tuple(ServedModel("m", version, 1, 8, says_ready=ready) for version in versions)
        return member(*versions, models=models)

    mesh = Mesh()
    catalog = await mesh.at(100, saying(False, "1", "2"), saying(True, "2"), member("10"))
    assert [False, True, True, True] == [catalog.is_model_ready("m", one) for one in ("1", "2", "10", "")]
    assert ("1", "2", "10") == catalog.record("m")[1]
    assert "1" == catalog.find("m", "1")[1]

    catalog = await mesh.at(101, saying(False, "1"))
    assert not catalog.is_model_ready("m")


async def test_a_model_whose_record_cannot_be_read_is_not_ready_and_has_no_statistics() -> None:
    mesh = Mesh()
    mesh.records = {}
    catalog = await mesh.at(100, member("1"))

    assert not catalog.is_model_ready("m")
    assert [] == await Statistics(cast("Any", None), catalog, cast("Any", None)).read()


def ensemble(name: str, of: str) -> ModelRecord:
    """The record of an ensemble with one step."""
    spec = running_sum("m")
    names = tuple({tensor.name: tensor.name for tensor in specs} for specs in (spec.inputs, spec.outputs))
    config = msgspec.structs.replace(spec, name=name, sequence_batching=None, ensemble=(EnsembleStep(of, "", *names),))
    return ModelRecord(config, "{}", ("1",))


def serving(*names: str, ready: bool = True) -> Member:
    """An executor with version 1 of models and ensembles. ready: whether models say that they are"""
    models = tuple(ServedModel(name, "1", 1, 8, says_ready=ready or name != "m") for name in names)
    return member(models=models, repository=tuple(RepositoryEntry(name, "1", "READY") for name in names))


async def test_an_ensemble_is_not_ready_when_a_model_says_so_however_deep_it_is():
    mesh = Mesh(versions=("1",))
    mesh.records = {**mesh.records, "outer": ensemble("outer", "inner"), "inner": ensemble("inner", "m")}
    names = ("m", "outer", "inner")

    catalog = await mesh.at(100, serving(*names, ready=False))
    assert [False] * 3 == [catalog.is_model_ready(name) for name in names]

    catalog = await mesh.at(101, serving(*names))
    assert [True] * 3 == [catalog.is_model_ready(name) for name in names]


async def test_ensembles_are_looked_at_anew_only_when_a_model_has_changed(monkeypatch: pytest.MonkeyPatch):
    judged: list[Any] = []

    def judge(*asked: Any) -> dict[str, str]:
        judged.append(asked)
        return unavailable_ensembles(*asked)

    monkeypatch.setattr(ensembles, "unavailable_ensembles", judge)
    mesh = Mesh(versions=("1",))
    mesh.records = {**mesh.records, "e": ensemble("e", "m")}

    offers = [(await mesh.at(now, serving("m", "e"))).offer for now in (100, 101, 102)]
    assert 2 == len(judged), "among the versions that take requests, and among those that are ready"
    assert offers[0] is offers[1] is offers[2]

    mesh.records = {**mesh.records, "e": ensemble("e", "gone")}
    catalog = await mesh.at(103, serving("m", "e"))
    assert error_of(catalog, "e") == (Code.NOT_FOUND, "Request for unknown model: 'e' has no available versions")
    assert offers[0] is not catalog.offer


async def test_what_living_executors_say_is_merged_anew_only_when_it_has_changed(monkeypatch: pytest.MonkeyPatch):
    """Whoever asks for unknown models has the mesh read ten times a second."""
    merged: list[Sequence[Member]] = []

    def merge(members: Sequence[Member]) -> tuple[RepositoryEntry, ...]:
        merged.append(members)
        return merged_index(members)

    monkeypatch.setattr(catalog_module, "merged_index", merge)
    mesh = Mesh()

    for now in (100, 101, 102):
        await mesh.at(now, member("1"), member("2"))
    assert 1 == len(merged)
    catalog = await mesh.at(103, member("1"), member("2", alive=False))
    assert (2, ("1",)) == (len(merged), catalog.record("m")[1])


async def test_the_log_tells_once_why_an_ensemble_is_not_served_and_when_it_is(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    mesh = Mesh(versions=("1",))
    mesh.records = {**mesh.records, "e": ensemble("e", "gone")}
    await mesh.at(100, serving("m", "e"))
    await mesh.at(101, serving("m", "e"))
    mesh.records = {**mesh.records, "e": ensemble("e", "m")}
    await mesh.at(102, serving("m", "e"))

    assert ["ensemble not served", "ensemble served again"] == [record.message for record in caplog.records]
    assert "ensemble e contains models that are not available" in vars(caplog.records[0])["fields"]["cause"]


async def test_the_log_tells_why_a_model_in_an_ensembles_steps_could_not_be_loaded(caplog: pytest.LogCaptureFixture):
    mesh = Mesh(versions=("1",))
    mesh.records = {**mesh.records, "e": ensemble("e", "gone")}
    await mesh.at(100, serving("m", "e"), member(repository=(RepositoryEntry("gone", "1", "UNAVAILABLE", "no luck"),)))

    told = "Model 'gone' loading failed with error: version 1 is at UNAVAILABLE state: no luck;"
    assert vars(caplog.records[0])["fields"]["cause"].endswith(told)


async def test_words_for_what_cannot_be_found():
    mesh = Mesh()
    assert error_of(mesh.catalog, "m")[0] is Code.UNAVAILABLE
    catalog = await mesh.at(100, member("1"))

    assert error_of(catalog, "x") == (Code.NOT_FOUND, "Request for unknown model: 'x' is not found")
    assert error_of(catalog, "m", "7") == (Code.NOT_FOUND, "Request for unknown model: 'm' version 7 is not found")
    assert error_of(catalog, "m", "2") == (
        Code.UNAVAILABLE,
        "Request for unknown model: 'm' version 2 is not at ready state",
    )
    catalog = await mesh.at(200, member(repository=(RepositoryEntry("m", "7", "UNAVAILABLE", "unloaded"),)))
    assert error_of(catalog, "m", "7") == (
        Code.UNAVAILABLE,
        "Request for unknown model: 'm' version 7 is not at ready state",
    )
    catalog = await mesh.at(300, member(repository=(RepositoryEntry("m", "1", "UNAVAILABLE", "unloaded"),)))
    assert error_of(catalog, "m") == (Code.NOT_FOUND, "Request for unknown model: 'm' has no available versions")


async def test_requests_still_enter_for_a_while_after_the_last_executor_died_but_the_model_is_not_ready():
    mesh = Mesh()
    await mesh.at(100, member("1"))
    catalog = await mesh.at(101, member("1", alive=False))

    assert catalog.find("m", "")[1] == "1"
    assert not catalog.is_model_ready("m")
    assert not catalog.is_ready

    catalog = await mesh.at(101 + ABSENCE_GRACE_S)
    assert error_of(catalog, "m") == (
        Code.UNAVAILABLE,
        "no executor serves model 'm' at the moment: try again later",
    )


async def test_a_model_whose_executors_are_gone_is_asked_for_again_later_though_others_serve_other_models():
    mesh, others = Mesh(), member(models=(), repository=())
    # The gateway is no new one, which has not seen whom it has lost.
    await mesh.at(100 - UNSERVED_S, others)
    await mesh.at(100, member("1"), others)
    catalog = await mesh.at(101 + ABSENCE_GRACE_S, others)

    assert {"m"} == catalog.unserved
    assert error_of(catalog, "m") == (
        Code.UNAVAILABLE,
        "no executor serves model 'm' at the moment: try again later",
    )
    await mesh.at(200 + UNSERVED_S, others)
    catalog = await mesh.at(201 + UNSERVED_S, others)
    assert error_of(catalog, "m") == (Code.NOT_FOUND, "Request for unknown model: 'm' has no available versions")


async def test_executors_that_died_while_redis_did_not_answer_have_the_whole_grace():
    """They register anew, one before the other."""
    mesh = Mesh()
    await mesh.at(100, member("1"))
    others = member(models=(), repository=())
    back = 101 + STALE_S + ABSENCE_GRACE_S
    catalog = await mesh.at(back, member("1", alive=False), others)
    assert catalog.find("m", "")[1] == "1"

    catalog = await mesh.at(back + STALE_S, member("1", alive=False), others)
    assert catalog.find("m", "")[1] == "1"

    catalog = await mesh.at(back + ABSENCE_GRACE_S, member("1", alive=False), others)
    assert error_of(catalog, "m")[0] is Code.UNAVAILABLE


async def test_a_model_that_only_drained_executors_have_loaded_is_asked_for_again_later():
    mesh = Mesh()
    await mesh.at(100, member("1"))
    drained = member(models=(), repository=(RepositoryEntry("m", "1", "READY"),))
    catalog = await mesh.at(101 + ABSENCE_GRACE_S, drained)

    assert error_of(catalog, "m") == (
        Code.UNAVAILABLE,
        "no executor serves model 'm' at the moment: try again later",
    )


async def test_a_gateway_that_has_not_seen_a_models_executors_says_to_ask_again_as_long_as_one_that_has():
    mesh, others = Mesh(), member(models=(), repository=())
    catalog = await mesh.at(100, others)

    assert (set(), {"m"}) == (catalog.unserved, catalog.unlisted)
    assert error_of(catalog, "m")[0] is Code.UNAVAILABLE
    unloaded = member(models=(), repository=(RepositoryEntry("m", "1", "UNAVAILABLE", "unloaded"),))
    assert error_of(await mesh.at(101, unloaded), "m")[0] is Code.NOT_FOUND
    assert error_of(await mesh.at(100 + UNSERVED_S, others), "m")[0] is Code.NOT_FOUND


async def test_an_unloaded_model_has_no_grace():
    mesh = Mesh()
    await mesh.at(100, member("1"))
    catalog = await mesh.at(101, member(repository=(RepositoryEntry("m", "1", "UNAVAILABLE", "unloaded"),)))

    assert set() == catalog.unserved
    assert error_of(catalog, "m")[0] is Code.NOT_FOUND


async def test_a_version_that_is_unloaded_takes_no_other_one_its_grace():
    mesh = Mesh()
    await mesh.at(100, member("1", "2"))
    catalog = await mesh.at(101, member(repository=(RepositoryEntry("m", "1", "UNAVAILABLE", "unloaded"),)))

    assert "2" == catalog.find("m", "2")[1]
    assert Code.UNAVAILABLE is error_of(catalog, "m", "1")[0]


async def test_gateway_that_starts_after_a_crash_gives_the_dead_the_same_grace():
    catalog = await Mesh().at(100, member("1", alive=False))

    assert catalog.find("m", "")[1] == "1"


async def test_ready_needs_an_executor_that_stays():
    mesh = Mesh()

    assert "cannot read the mesh" in mesh.catalog.obstacle
    assert (await mesh.at(100, member("1"))).is_ready
    assert "no executor serves" == (await mesh.at(101, member("1", leaving=True))).obstacle
    assert (await mesh.at(103, member("1"))).is_ready
    mesh.now += STALE_S + 1
    assert "cannot read the mesh" in mesh.catalog.obstacle


@pytest.mark.parametrize(
    ("entry", "is_ready"),
    [
        (RepositoryEntry("other", "", "LOADING"), False),
        (RepositoryEntry("other", "1", "UNAVAILABLE", "Internal: broken"), False),
        (RepositoryEntry("other", "1", "UNAVAILABLE", "unloaded"), True),
        (RepositoryEntry("other"), True),
    ],
)
async def test_strict_readiness_waits_for_every_model_that_was_wanted(entry: RepositoryEntry, is_ready: bool):
    mesh = Mesh(strict_readiness=True)
    ready = RepositoryEntry("m", "1", "READY")

    assert is_ready == (await mesh.at(100, member("1", repository=(ready, entry)))).is_ready
    assert is_ready == ("the repository index says which" not in mesh.catalog.obstacle)
    assert (await Mesh().at(100, member("1", repository=(ready, entry)))).is_ready


async def test_a_version_that_is_being_unloaded_takes_nothing_new_though_it_is_still_served():
    mesh = Mesh()
    await mesh.at(100, member("1", "2"))
    lines = (RepositoryEntry("m", "1", "READY"), RepositoryEntry("m", "2", "UNLOADING"))
    catalog = await mesh.at(101, member("1", "2", repository=lines))

    assert catalog.find("m", "")[1] == "1"
    assert not catalog.is_model_ready("m", "2")
    assert error_of(catalog, "m", "2")[0] is Code.UNAVAILABLE


def test_index_takes_the_word_of_the_executor_that_is_furthest():
    one = member(repository=(RepositoryEntry("a", "1", "LOADING"), RepositoryEntry("b", "", ""), RepositoryEntry("c")))
    two = member(repository=(RepositoryEntry("a", "1", "READY"), RepositoryEntry("b", "2", "UNAVAILABLE", "why")))

    assert merged_index([one, two]) == (
        RepositoryEntry("a", "1", "READY"),
        RepositoryEntry("b", "2", "UNAVAILABLE", "why"),
        RepositoryEntry("c"),
    )


async def test_a_version_counts_as_unserved_from_when_nobody_was_seen_to_take_its_requests():
    mesh = Mesh()
    unloading = member("1", repository=(RepositoryEntry("m", "1", "UNLOADING"),))
    assert set() == (await mesh.at(90, unloading)).unserved_for(0)
    unloaded = member(repository=(RepositoryEntry("m", "1", "UNAVAILABLE", "unloaded"),))
    assert {("m", "1")} == (await mesh.at(100, unloaded)).unserved_for(0)
    catalog = await mesh.at(104)

    assert {("m", "1")} == catalog.unserved_for(4)
    assert set() == catalog.unserved_for(5)
    catalog = await mesh.at(110, member("1"))
    assert set() == catalog.unserved_for(0)


async def test_versions_that_come_and_go_for_years_are_forgotten_when_their_requests_were_told():
    mesh = Mesh()
    await mesh.at(100, member("1"))
    await mesh.at(101)
    # Redis was away meanwhile, and their requests were not looked for.
    catalog = await mesh.at(101 + 2 * UNSERVED_S)
    assert {("m", "1")} == catalog.unserved_for(0)

    assert set() == (await mesh.at(102 + 2 * UNSERVED_S)).unserved_for(0)


async def test_a_model_that_appears_while_the_mesh_is_read_has_a_record_once_it_is_ready() -> None:
    class Joining:
        """An executor joins right after the first answer."""

        def __init__(self) -> None:
            self.joined = False

        async def models(self) -> Mapping[str, ModelRecord]:
            joined, self.joined = self.joined, True
            return {"m": ModelRecord(running_sum("m"), "{}", ("1",))} if joined else {}

        async def members(self) -> Sequence[Member]:
            joined, self.joined = self.joined, True
            return [member("1")] if joined else []

    catalog = Catalog(cast("Any", Joining()))
    await catalog.refresh()

    assert catalog.view.ready.keys() <= catalog.view.records.keys()
    assert {"m"} == catalog.view.records.keys()


async def test_who_asks_while_the_mesh_is_read_hears_after_the_next_reading() -> None:
    """What is being read may be older than the load after which the request was sent."""
    reading, may_go_on = asyncio.Event(), asyncio.Event()
    heard: list[str] = []

    class Slow:
        readings = 0

        async def models(self) -> Mapping[str, ModelRecord]:
            return {}

        async def members(self) -> Sequence[Member]:
            self.readings += 1
            reading.set()
            await may_go_on.wait()
            return []

    mesh = Slow()
    catalog = Catalog(cast("Any", mesh))
    running = asyncio.create_task(catalog.run())
    await reading.wait()
    catalog.ask(lambda: heard.append(f"after reading {mesh.readings}"))
    may_go_on.set()

    async with asyncio.timeout(60):
        while not heard:
            await asyncio.sleep(0.01)

    assert ["after reading 2"] == heard
    running.cancel()


async def test_who_asks_while_nothing_is_read_does_not_wait_until_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.models.catalog.REFRESH_ASKED_S", 0)
    monkeypatch.setattr("gateway.models.catalog.REFRESH_S", 3600)
    monkeypatch.setattr(Catalog, "_is_served", True)
    readings, heard = 0, asyncio.Event()

    async def refresh(_: Catalog) -> None:
        nonlocal readings
        readings += 1

    monkeypatch.setattr(Catalog, "refresh", refresh)
    catalog = Catalog(cast("Any", None))
    running = asyncio.create_task(catalog.run())
    async with asyncio.timeout(60):
        while not readings:
            await asyncio.sleep(0)
        catalog.ask(heard.set)
        await heard.wait()

    assert 2 == readings
    running.cancel()


async def test_an_older_answer_never_replaces_a_newer_one() -> None:
    """A load is answered after a refresh of its own: what another one has read before it must not come back."""

    class Slow(Mesh):
        async def models(self) -> Mapping[str, ModelRecord]:
            if not self.present:
                reading.set()
                await may_go_on.wait()
            return self.records

    reading, may_go_on = asyncio.Event(), asyncio.Event()
    mesh = Slow()
    older = asyncio.create_task(mesh.catalog.refresh())
    await reading.wait()
    await mesh.at(100, member("1"))
    may_go_on.set()
    await older

    assert {"m": ("1",)} == mesh.catalog.view.ready
    assert {} == (await mesh.at(100)).view.ready
