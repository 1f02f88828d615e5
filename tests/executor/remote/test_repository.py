"""A repository in an S3 server: what is loaded from it, and what happens when it changes or goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import s3fs

from executor.engine.base import Engine, LoadRequest
from executor.engine.python.backend import PythonBackend
from executor.models.loader import Loader
from executor.models.polling import Polling
from executor.models.repository import ModelRepository, NoSuchModelError
from executor.models.sources import open_sources
from executor.remote import storage as storage_module
from executor.remote.listing import RemoteFile
from executor.remote.storage import Storage, UnreachableError, options, without_secrets
from executor.service import reach
from executor.workers.devices import Devices
from shared.contract.errors import MeshError
from shared.contract.locations import RemoteLocation, parse_location
from shared.process.lifecycle import Stop
from tests.mesh.model_repository import SAMPLES
from tests.object_store import BUCKET, CREDENTIALS, ObjectStore

CODE = (SAMPLES / "running_sum" / "1" / "model.py").read_text()
COMPLETES = """
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(3)
        config.add_input({"name": "INPUT", "data_type": "TYPE_INT32", "dims": [1]})
        config.add_output({"name": "OUTPUT", "data_type": "TYPE_INT32", "dims": [1]})
        return config
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with ObjectStore() as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The server with the sample `running_sum`, whose configuration is read by its usual variables."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    server.upload(SAMPLES / "running_sum", "models/running_sum")
    yield server
    for key in server.names():
        server.delete(key)


@pytest.fixture
async def repository(store: ObjectStore, tmp_path: Path) -> AsyncIterator[ModelRepository]:
    repository = ModelRepository(open_sources([parse_location(store.url())], tmp_path / "cache", 1 << 20), Devices())
    repository.refresh()
    yield repository
    await repository.close()


def copies(tmp_path: Path) -> int:
    return len(list((tmp_path / "cache").glob("*/running_sum/config.pbtxt")))


async def test_a_new_version_is_loaded_beside_the_old_one_which_is_left_alone(
    repository: ModelRepository, store: ObjectStore, tmp_path: Path
) -> None:
    (one,) = repository.load("running_sum").versions
    assert [one] == repository.load("running_sum").versions
    config = (SAMPLES / "running_sum" / "config.pbtxt").read_text()
    store.put("models/running_sum/config.pbtxt", config + "\nversion_policy { all { } }")
    store.put("models/running_sum/2/model.py", CODE)

    both = repository.load("running_sum").versions

    assert ["1", "2"] == [served.version for served in both]
    assert one is both[0]
    assert 2 == copies(tmp_path)
    store.delete("models/running_sum/1/model.py")
    (two,) = repository.load("running_sum").versions
    assert two is both[1]
    await repository.close_retired()
    assert 1 == copies(tmp_path)
    repository.unload("running_sum")
    await repository.close_retired()
    assert 0 == copies(tmp_path)


async def test_overrides_and_completion_work_as_with_a_folder(repository: ModelRepository, store: ObjectStore) -> None:
    config = json.loads(repository.load("running_sum").record.config_json)

    (override,) = repository.load("running_sum", json.dumps(config), {"7/model.py": CODE.encode()}).versions
    assert "7" == override.version
    config["max_batch_size"] = 8
    assert 8 == repository.load("running_sum", json.dumps(config)).record.config.max_batch_size
    store.put("models/completed/1/model.py", CODE.replace("    def execute(", f"{COMPLETES}\n    def execute("))
    assert 3 == repository.load("completed").record.config.max_batch_size
    with pytest.raises(NoSuchModelError):
        repository.load("../models/running_sum")


async def test_polling_follows_the_store(
    repository: ModelRepository, loader: Loader, store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    polling = Polling(repository, loader, 15.0, asyncio.Event())
    assert await polling.look()
    assert not await polling.look()
    (one,) = repository.loaded["running_sum"].versions

    store.put("models/running_sum/1/model.py", CODE + "\n# changed\n")
    assert await polling.look()
    (two,) = repository.loaded["running_sum"].versions
    assert one.fingerprint != two.fingerprint

    store.stop()
    assert await polling.look()
    assert not await polling.look()
    assert [two] == repository.loaded["running_sum"].versions
    (line,) = repository.index(repository.listed(readable_alone=True))
    assert ("READY", True) == (line.state, "cannot be read" in line.reason)
    assert store.url().removeprefix("s3://") in line.reason
    assert 1 == len([one for one in caplog.records if one.message.startswith("model repository cannot be read")])
    with pytest.raises(UnreachableError, match=r"failed to poll from model repository: .* cannot be read"):
        repository.load("running_sum")

    store.start()
    assert await polling.look()
    (line,) = repository.index(repository.listed(readable_alone=True))
    assert ("READY", "") == (line.state, line.reason)
    for key in store.names():
        store.delete(key)
    assert await polling.look()
    assert {} == repository.loaded


async def test_a_model_that_could_not_be_fetched_is_tried_again_at_the_next_look(
    repository: ModelRepository, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    polling = Polling(repository, loader, 15.0, asyncio.Event())

    def fails(*_: object) -> None:
        raise storage_module.StorageError("not now", lasting=False)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "fetch", fails)
        await polling.look()
    assert {} == repository.loaded
    await polling.look()
    assert ["running_sum"] == list(repository.loaded)


async def test_a_model_that_changes_while_it_is_fetched_is_never_loaded_half(
    repository: ModelRepository, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = Storage.fetch
    changes = 0

    def changing(self: Storage, model: str, files: Sequence[RemoteFile], folder: Path) -> None:
        nonlocal changes
        changes += 1
        fetch(self, model, files[:1], folder)
        if changes <= 2:
            store.put("models/running_sum/config.pbtxt", (SAMPLES / "running_sum" / "config.pbtxt").read_text())
            store.put("models/running_sum/1/model.py", f"# {changes}\n{CODE}")
        fetch(self, model, files[1:], folder)

    monkeypatch.setattr(Storage, "fetch", changing)

    (served,) = repository.load("running_sum").versions

    assert 3 == changes
    assert served.files is not None
    assert (served.files.folder / "1" / "model.py").read_text().startswith("# 2\n")
    assert 1 == copies(tmp_path)
    store.put("models/running_sum/1/model.py", CODE)
    changes = -1000
    with pytest.raises(UnreachableError, match="changes while it is fetched"):
        repository.load("running_sum")
    assert [served] == repository.loaded["running_sum"].versions


async def test_what_changes_in_the_store_while_a_model_is_loaded_is_no_part_of_its_mark(
    repository: ModelRepository, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = parse_location(store.url())
    other = ModelRepository(open_sources([location], tmp_path / "other cache", 1 << 20), Devices())
    (before,) = other.load("running_sum").versions
    load = PythonBackend.load

    def changing(self: PythonBackend, request: LoadRequest) -> Engine:
        store.put("models/running_sum/1/model.py", f"# Changed.\n{CODE}")
        return load(self, request)

    monkeypatch.setattr(PythonBackend, "load", changing)

    assert [before.mark] == [served.mark for served in repository.load("running_sum").versions]
    assert [before.mark] != [served.mark for served in other.load("running_sum").versions]
    await other.close()


async def test_an_object_that_goes_while_it_is_fetched_is_a_change(
    repository: ModelRepository, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("models/running_sum/extra", "x")
    fetch = Storage.fetch

    def losing(self: Storage, model: str, files: Sequence[RemoteFile], folder: Path) -> None:
        store.delete("models/running_sum/extra")
        fetch(self, model, files, folder)

    monkeypatch.setattr(Storage, "fetch", losing)

    (served,) = repository.load("running_sum").versions

    assert served.files is not None
    assert not (served.files.folder / "extra").exists()


async def test_what_leads_out_of_its_folder_fails_its_model_alone(
    repository: ModelRepository, loader: Loader, store: ObjectStore, tmp_path: Path
) -> None:
    store.put("models/evil/1/../../../escaped", "x")
    store.put("models/evil/config.pbtxt", "")

    await Polling(repository, loader, 15.0, asyncio.Event()).look()

    reasons = {
        line.model: (line.state, line.reason) for line in repository.index(repository.listed(readable_alone=True))
    }
    assert ("READY", "") == reasons["running_sum"]
    assert "leads out of the folder of model 'evil'" in reasons["evil"][1]
    assert not list(tmp_path.rglob("escaped"))


async def test_a_start_waits_for_a_store_and_gives_up_where_that_cannot_help(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.service.REACH_PAUSE_S", 0.01)
    store.stop()
    repository = ModelRepository(open_sources([parse_location(store.url())], tmp_path, 1 << 20), Devices())
    waiting = asyncio.create_task(reach(repository, Stop()))
    while not repository.problems():
        await asyncio.sleep(0.01)
    store.start()
    await asyncio.wait_for(waiting, 60)
    assert ["running_sum"] == repository.names()
    assert not repository.mentions("fixed_shape")
    assert repository.mentions("sequence_batching")

    wrong = RemoteLocation("s3", store.endpoint, "no-such-bucket/models")
    with pytest.raises(MeshError, match=r"no-such-bucket/models cannot be read: .*does not exist"):
        await reach(ModelRepository(open_sources([wrong], tmp_path, 1 << 20), Devices()), Stop())
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    again = ModelRepository(open_sources([parse_location(store.url())], tmp_path, 1 << 20), Devices())
    with pytest.raises(MeshError, match=r"(?i)credentials"):
        await reach(again, Stop())


def test_the_endpoint_may_come_from_the_environment(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
    repository = ModelRepository(open_sources([parse_location(f"s3://{BUCKET}/models")], tmp_path, 1 << 20), Devices())
    repository.refresh()

    assert ["running_sum"] == repository.names()


async def test_of_two_repositories_the_first_that_has_a_model_gives_it(store: ObjectStore, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    sources = open_sources([parse_location(store.url()), local], tmp_path / "cache", 1 << 20)
    repository = ModelRepository(sources, Devices())
    (local / "running_sum").mkdir()
    repository.refresh()
    assert ["1"] == list(repository.load("running_sum").record.versions)
    assert ["running_sum"] == repository.names()
    await repository.close()


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"type": "file", "size": 1, "LastModified": "yesterday"}, "ValueError: Invalid isoformat string: 'yesterday'"),
        ({"type": "file", "LastModified": 1}, "KeyError: 'size'"),
        ({"type": "file", "size": 1, "LastModified": [1]}, "TypeError: "),
        ({"type": "file", "size": 1, "LastModified": float("inf")}, "OverflowError: "),
    ],
)
async def test_a_listing_of_another_form_is_a_problem_of_its_repository_and_ends_nothing(
    repository: ModelRepository, monkeypatch: pytest.MonkeyPatch, told: dict[str, object], problem: str
) -> None:
    found = {f"{BUCKET}/models/m/config.pbtxt": told}
    monkeypatch.setattr(s3fs.S3FileSystem, "find", Mock(return_value=found))

    assert repository.refresh()

    (said,) = map(str, repository.problems())
    assert f"{BUCKET}/models lists an object in a form that is not known: {problem}" in said
    assert ["running_sum"] == repository.names()


def test_credentials_stand_in_no_error(monkeypatch: pytest.MonkeyPatch, store: ObjectStore) -> None:
    for secret in CREDENTIALS["AWS_SECRET_ACCESS_KEY"], CREDENTIALS["AWS_ACCESS_KEY_ID"]:
        assert secret not in without_secrets(f"wrong key {secret} in use")
    assert "GET https://a/b?..." == without_secrets("GET https://a/b?X-Amz-Signature=abc&sig=x")

    def leaks(*_: object, **__: object) -> Any:
        raise RuntimeError(f"signed with {CREDENTIALS['AWS_SECRET_ACCESS_KEY']}")

    here = Storage(RemoteLocation("s3", store.endpoint, BUCKET))
    monkeypatch.setattr(s3fs.S3FileSystem, "find", leaks)
    with pytest.raises(storage_module.StorageError) as raised:
        here.models()
    assert "signed with ..." in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(("url", "extra"), [("s3://b", "s3"), ("gs://b", "gcs"), ("as://a/c", "azure")])
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    url: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "find_spec", lambda _: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]

    with pytest.raises(MeshError, match=rf"pip install 'seqmesh\[{extra}\]'"):
        open_sources([parse_location(url)], tmp_path, 1)


def test_azure_is_told_its_account_and_tritons_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's library needs neither: it looks for GOOGLE_APPLICATION_CREDENTIALS by itself."""
    monkeypatch.setenv("AZURE_STORAGE_KEY", "a2V5")

    azure = options(RemoteLocation("as", "account", "container/models"))

    assert ("account", "a2V5") == (azure["account_name"], azure["account_key"])
    assert "account_name" not in options(RemoteLocation("gs", "", "bucket"))
