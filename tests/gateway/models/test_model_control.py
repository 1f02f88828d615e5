"""What becomes of a load, from what the executors say; and what is refused before they are asked."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import redis as redis_py

from gateway.bounds.byte_budget import ByteBudget
from gateway.grpc import repository as grpc_repository
from gateway.grpc.pb import pb
from gateway.models import repository as module
from gateway.models.catalog import Catalog, CatalogView
from gateway.models.repository import RepositoryControl, behind, check_model_name, check_overrides, decisive_failure
from gateway.rest import models as rest_models
from shared.contract.errors import LoadError, RequestError, UnavailableError
from shared.contract.ids import ExecutorId
from shared.contract.limits import CONTROL_FILES_MAX
from shared.contract.messages import ControlMessage, ExecutorRegistration, LoadFailure, RepositoryEntry, encode
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.membership import Member, Membership
from tests.gateway.models.test_ensembles import model, step

ENTRY = "5-0"


def member(name: str, *failures: LoadFailure, applied: str = ENTRY, beyond: tuple[str, ...] = ()) -> Member:
    told = ExecutorRegistration(ExecutorId(name), name, "host", 1, 1, applied=applied, failures=failures, beyond=beyond)
    return Member(told, alive=True)


def failure(error: str, *, entry: str = ENTRY, found: bool = True) -> LoadFailure:
    return LoadFailure(entry, "m", "INTERNAL", error, found, "g")


@pytest.fixture
def catalog(redis: Redis, keys: Keyspace) -> Catalog:
    return Catalog(Membership(redis, keys))


@pytest.fixture
def control(redis: Redis, keys: Keyspace, catalog: Catalog) -> RepositoryControl:
    return RepositoryControl(redis, keys, catalog, ByteBudget(1 << 30))


def test_one_executors_reason_decides_but_a_model_that_only_others_have_is_no_failure() -> None:
    missing, broken = failure("not there", found=False), failure("broken")

    assert decisive_failure([member("a"), member("b")], ENTRY, "g") is None
    assert broken == decisive_failure([member("a"), member("b", broken)], ENTRY, "g")
    assert broken == decisive_failure([member("b", broken), member("a", missing)], ENTRY, "g")
    assert decisive_failure([member("a", missing), member("b")], ENTRY, "g") is None
    assert missing == decisive_failure([member("a", missing), member("b", missing)], ENTRY, "g")
    assert decisive_failure([member("a", failure("earlier", entry="4-9"))], ENTRY, "g") is None


def test_an_executor_that_started_since_tells_by_the_load_what_it_found_in_what_was_asked() -> None:
    fatal = failure("it ended its executors", entry="")

    assert fatal == decisive_failure([member("a", fatal)], ENTRY, "g")
    assert decisive_failure([member("a", fatal)], ENTRY, "another") is None


def test_entries_are_compared_as_numbers() -> None:
    late, there, beyond = member("a", applied="5-0"), member("b", applied="10-0"), member("c", applied="10-2")

    assert ["a"] == behind([late, there, beyond], "10-0")


def test_who_has_carried_out_a_message_beside_one_that_takes_long_is_not_behind() -> None:
    assert ["b"] == behind([member("a", applied="1-0", beyond=("4-0", ENTRY)), member("b", applied="1-0")], ENTRY)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "a\\b", "a\0b"])
def test_names_that_may_mean_another_place_are_refused(name: str) -> None:
    with pytest.raises(RequestError):
        check_model_name(name)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../model.py", "1/../../model.py", "1\\model.py", "1/\0"])
def test_files_stay_in_the_models_directory(name: str) -> None:
    with pytest.raises(RequestError, match="must not leave the model's directory"):
        check_overrides("m", {name: b""}, "{}")


def test_files_need_a_configuration() -> None:
    check_overrides("m", {"1/model.py": b""}, "{}")
    check_overrides("m", {}, None)
    with pytest.raises(RequestError, match="but the model config was not"):
        check_overrides("m", {"1/model.py": b""}, None)


def test_a_load_request_brings_so_many_files_at_most() -> None:
    """90,000 empty ones, which are 1 MiB, took the event loop half a second, and an executor many seconds."""
    files = {f"1/{number}": b"" for number in range(CONTROL_FILES_MAX)}
    check_overrides("m", files, "{}")
    with pytest.raises(RequestError, match="4097 override files exceed the mesh's limit of 4096: put them into"):
        check_overrides("m", files | {"1/more": b""}, "{}")


def test_an_empty_configuration_is_one_that_was_given() -> None:
    http, _ = rest_models.load_parameters({"config": ""})
    grpc, _ = grpc_repository.load_parameters(
        pb.RepositoryModelLoadRequest(parameters={"config": pb.ModelRepositoryParameter(string_param="")}).parameters
    )

    for given in http, grpc:
        with pytest.raises(RequestError, match="'config' is empty"):
            check_overrides("m", {}, given)


@pytest.mark.parametrize(
    ("loaded", "unloaded"),
    [
        (["e", "other", "inner", "a", "b", "c"], ["e", "a"]),
        (["e", "inner", "a", "b", "c"], ["e", "a", "b", "c", "inner"]),
    ],
)
async def test_an_ensemble_leaves_the_models_that_another_loaded_ensemble_has_in_its_steps(
    catalog: Catalog,
    control: RepositoryControl,
    monkeypatch: pytest.MonkeyPatch,
    loaded: list[str],
    unloaded: list[str],
) -> None:
    """However deep. `other` shares `inner`, whose steps are of `b` and `c`, with `e`."""
    ensembles = {"e": ("a", "inner"), "other": ("inner",), "inner": ("b", "c")}
    records = {name: model(name, steps=tuple(map(step, ensembles.get(name, ())))) for name in (*ensembles, *"abc")}
    lines = tuple(RepositoryEntry(name, "1", "READY") for name in loaded)
    registration = msgspec.structs.replace(member("x").registration, repository=lines)
    catalog.view = CatalogView(records, members=(Member(registration, alive=True),))
    done: list[str] = []

    async def noted(_: RepositoryControl, name: str = "") -> None:
        done.extend([name] if name else [])

    monkeypatch.setattr(RepositoryControl, "_check_mode", noted)
    monkeypatch.setattr(RepositoryControl, "_unload", noted)
    await control.unload("e", dependents=True)

    assert unloaded == done


async def test_all_steps_of_an_ensemble_are_loaded_if_they_can_be_and_the_first_error_is_told(
    catalog: Catalog, control: RepositoryControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = {"e": model("e", steps=(step("a"), step("b"))), "a": model("a"), "b": model("b")}
    catalog.view = CatalogView(records, repository=(RepositoryEntry("e", "1", "READY"),))
    tried: list[str] = []

    async def mode(_: RepositoryControl) -> None: ...

    async def load(_: RepositoryControl, name: str, *what: object) -> None:
        del what
        tried.append(name)
        if name != "e":
            raise LoadError(f"{name} is broken")

    monkeypatch.setattr(RepositoryControl, "_check_mode", mode)
    monkeypatch.setattr(RepositoryControl, "_load", load)

    with pytest.raises(LoadError, match="a is broken"):
        await control.load("e")
    assert ["e", "a", "b"] == tried


async def test_files_replace_those_that_the_model_had_and_count_with_all_others(
    redis: Redis, keys: Keyspace, control: RepositoryControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.models.repository.CONTROL_BYTES_MAX", 1000)
    await redis.hset(keys.wanted, "m", bytes(600))

    await control._check_size("m", 1000)
    await control._check_size("other", 400)
    with pytest.raises(UnavailableError, match="the mesh holds 600 bytes of override files already"):
        await control._carry_out(ControlMessage("load", "other", "{}", {"1/model.py": bytes(401)}))


async def test_what_a_client_brings_counts_until_it_is_loaded(
    redis: Redis, keys: Keyspace, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load may take minutes, and many of them would have the gateway refuse everybody's requests."""
    catalog.view = CatalogView(repository=(RepositoryEntry("m", "1", "READY"),))
    budget = ByteBudget(1000)
    control = RepositoryControl(redis, keys, catalog, budget)
    taken: list[int] = []

    async def mode(_: RepositoryControl) -> None: ...

    async def load(_: RepositoryControl, *what: object) -> None:
        del what
        taken.append(budget.taken)
        with pytest.raises(UnavailableError, match="the gateway has requests of 802 bytes in flight, of at most 1000"):
            await control.load("other", config_json="{}", files={"1/model.py": bytes(200)})

    monkeypatch.setattr(RepositoryControl, "_check_mode", mode)
    monkeypatch.setattr(RepositoryControl, "_load", load)
    await control.load("m", config_json="{}", files={"1/model.py": bytes(300), "1/weights": bytes(99)})

    assert [802] == taken
    assert 0 == budget.taken


async def test_loads_that_wait_at_once_look_at_the_mesh_together(
    control: RepositoryControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them looks ten times a second, and a thousand had steps take ten times as long."""
    looks: list[int] = []

    async def refresh(_: Catalog) -> None:
        looks.append(len(looks))

    monkeypatch.setattr(Catalog, "refresh", refresh)
    refused = await asyncio.gather(*(control.load("m") for _ in range(20)), return_exceptions=True)

    assert ["no executor is running that could load or unload a model"] * 20 == [str(error) for error in refused]
    assert [0] == looks


@pytest.mark.parametrize("error", [ConnectionError("gone"), redis_py.ResponseError("NOPERM no permissions")])
async def test_a_change_that_redis_does_not_let_begin_can_be_tried_later(
    redis: Redis, control: RepositoryControl, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It is no fault of this gateway (500), and nothing has changed."""

    async def refused(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Catalog, "refresh", refused)
        for change in (control.load("m"), control.unload("m")):
            with pytest.raises(UnavailableError, match=f"Redis cannot be read: {error}; nothing was changed"):
                await change
    monkeypatch.setattr(type(redis), "hexists", refused)
    with pytest.raises(UnavailableError, match=f"Redis cannot be read: {error}; 'm' did not change"):
        await control._unload("m")


async def test_a_load_that_comes_while_a_failed_one_is_withdrawn_stays(
    redis: Redis, redis_url: str, keys: Keyspace, control: RepositoryControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors that hear of it would otherwise find nothing to do, and its caller would be told that it is done."""
    failed, late = (ControlMessage("load", "m", generation=generation) for generation in ("1", "2"))
    to_come = [late]

    def compared(word: ControlMessage) -> bytes:
        """Called when what is stored has been read: the late load comes then."""
        if to_come:
            with redis_py.Redis.from_url(redis_url) as another:
                another.hset(keys.wanted, "m", encode(to_come.pop()))
        return encode(word)

    monkeypatch.setattr(module, "encode", compared)
    await redis.hset(keys.wanted, "m", encode(failed))
    await control._withdraw(failed)
    assert encode(late) == await redis.hget(keys.wanted, "m")

    await control._withdraw(late)
    assert await redis.hget(keys.wanted, "m") is None
