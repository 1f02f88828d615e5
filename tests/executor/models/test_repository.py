"""The executor's models: what a load changes, what the index says, and what the polled folders bring."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from unittest.mock import Mock

import pytest

from executor.engine.python.backend import PythonBackend
from executor.engine.pytorch import devices
from executor.models import repository as repository_module
from executor.models.fingerprints import folder_fingerprint
from executor.models.loader import Loader
from executor.models.polling import Polling, follow_listings
from executor.models.repository import ModelRepository, NoSuchModelError
from executor.models.sources import LocalFolder
from executor.models.version_maker import LoadOptions
from executor.remote.storage import UnreachableError
from executor.workers.devices import DeviceLostError, Devices
from shared.contract.errors import Code, LoadError
from shared.process import collector
from tests.mesh.model_repository import SAMPLES

CODE = (SAMPLES / "running_sum" / "1" / "model.py").read_text()
NO_LABELS = {
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1], "label_filename": "x\0"}],
}
BROKEN = CODE + "\nraise ValueError('it is broken')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with one model, `running_sum`."""
    shutil.copytree(SAMPLES / "running_sum", tmp_path / "running_sum", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.fixture
async def repository(folder: Path) -> AsyncIterator[ModelRepository]:
    repository = ModelRepository((folder,), Devices())
    yield repository
    await repository.close()


def change_config(folder: Path, old: str, new: str) -> None:
    path = folder / "running_sum" / "config.pbtxt"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def waiting_for(gate: Path, waits: Path) -> str:
    """Code of a model whose import says by the file `waits` that it has begun, and ends when there is a file `gate`."""
    return f"""
import os, time
open({str(waits)!r}, "w").close()
while not os.path.exists({str(gate)!r}):
    time.sleep(0.01)
"""


def add_version(folder: Path, version: int) -> None:
    shutil.copytree(folder / "running_sum" / "1", folder / "running_sum" / str(version))


def states(repository: ModelRepository) -> dict[str, tuple[str, str]]:
    return {
        line.version: (line.state, line.reason)
        for line in repository.index(repository.listed(readable_alone=True))
        if line.model == "running_sum"
    }


async def test_only_what_has_changed_is_loaded_anew(repository: ModelRepository, folder: Path) -> None:
    (first,) = repository.load("running_sum").versions

    assert [first] == repository.load("running_sum", generation="2").versions
    change_config(folder, "# The sum", "# A comment is no change. The sum")
    assert [first] == repository.load("running_sum", generation="3").versions
    assert [] == repository.retired

    change_config(folder, "max_batch_size: 32", "max_batch_size: 16")
    (second,) = repository.load("running_sum", generation="4").versions
    assert [first] == repository.retired
    assert first.fingerprint.content != second.fingerprint.content
    assert "4" == repository.loaded["running_sum"].record.generation

    change_config(folder, "count: 1", "count: 2")
    (third,) = repository.load("running_sum", generation="5").versions
    assert second.fingerprint.content == third.fingerprint.content
    assert "4" == repository.loaded["running_sum"].record.generation
    await repository.close_retired(in_use=[second])
    assert [second] == repository.retired


async def test_a_changed_file_of_a_python_based_backend_changes_its_models(folder: Path, tmp_path: Path) -> None:
    """By time and size for a load of the same executor; by content for the states that any executor has left."""
    backend = tmp_path / "backends" / "sums"
    backend.mkdir(parents=True)
    (folder / "running_sum" / "1" / "model.py").rename(backend / "model.py")
    change_config(folder, 'backend: "python"', 'backend: "sums"')

    def opened() -> ModelRepository:
        return ModelRepository((folder,), Devices(), LoadOptions(backend_dirs=(backend.parent,)))

    repository, restarted, changed = opened(), opened(), opened()
    (first,) = repository.load("running_sum").versions
    assert [first] == repository.load("running_sum", generation="2").versions
    (backend / "model.py").touch()
    assert [first.mark] == [served.mark for served in restarted.load("running_sum").versions]

    (backend / "scales.py").write_text("SCALE = 2")
    (second,) = repository.load("running_sum", generation="3").versions
    assert [first] == repository.retired
    assert first.fingerprint.content != second.fingerprint.content
    assert first.mark != second.mark == second.announcement.mark
    assert [second.mark] == [served.mark for served in changed.load("running_sum").versions]
    for one in (repository, restarted, changed):
        await one.close()


async def test_versions_come_and_go_by_the_policy_and_those_that_stay_are_left_alone(
    repository: ModelRepository, folder: Path
) -> None:
    (one,) = repository.load("running_sum").versions
    add_version(folder, 3)
    change_config(folder, "max_batch_size: 32", "max_batch_size: 32\nversion_policy { all { } }")

    both = repository.load("running_sum").versions
    assert ["1", "3"] == [served.version for served in both]
    assert one is both[0]

    change_config(folder, "all { }", "specific { versions: [ 3 ] }")
    assert [both[1]] == repository.load("running_sum").versions
    assert {"1": ("UNAVAILABLE", "unloaded"), "3": ("READY", "")} == states(repository)
    assert ("UNLOADING", "") == {
        line.version: (line.state, line.reason) for line in repository.index(repository.listed(), [one])
    }["1"]


async def test_the_index_says_since_when_a_model_is_being_loaded(repository: ModelRepository) -> None:
    repository.loading["running_sum"] = 0.0
    since = "since 1970-01-01 00:00:00 UTC"
    assert {"": ("LOADING", since)} == states(repository)

    repository.load("running_sum")
    repository.loading["running_sum"] = 0.0
    assert {"1": ("READY", f"is being loaded anew {since}, what was loaded before is served")} == states(repository)


async def test_a_failed_load_keeps_the_old_model_and_says_why(repository: ModelRepository, folder: Path) -> None:
    (one,) = repository.load("running_sum").versions
    (folder / "running_sum" / "1" / "model.py").write_text(BROKEN)

    with pytest.raises(
        LoadError, match="load failed for model 'running_sum': version 1 is at UNAVAILABLE state: "
    ) as no:
        repository.load("running_sum")

    assert Code.INVALID_ARG is no.value.code
    assert "it is broken" in no.value.message
    assert [one] == repository.loaded["running_sum"].versions
    state, reason = states(repository)["1"]
    assert "READY" == state
    assert reason.startswith("the last load failed, what was loaded before is served: ")
    assert "it is broken" in reason

    repository.unload("running_sum")
    with pytest.raises(LoadError):
        repository.load("running_sum")
    state, reason = states(repository)["1"]
    assert "UNAVAILABLE" == state
    assert "it is broken" in reason


def test_a_failed_load_ends_every_engine_and_thread_that_it_made_also_if_one_cannot_be_finalized(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the error is that of the load."""
    change_config(folder, "count: 1", "count: 2")
    change_config(folder, "max_batch_size", "version_policy { all {} } max_batch_size")
    add_version(folder, 2)
    before = set(threading.enumerate())
    made = [Mock(close=Mock(side_effect=RuntimeError("no finalize"))) for _ in range(3)]
    monkeypatch.setattr(PythonBackend, "load", Mock(side_effect=[*made, ValueError("it is broken")]))

    with pytest.raises(LoadError, match="version 2 is at UNAVAILABLE state: Internal: ValueError: it is broken"):
        ModelRepository((folder,), Devices()).load("running_sum")

    assert [1] * 3 == [engine.close.call_count for engine in made]
    assert 3 == caplog.messages.count("model not finalized")
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()


async def test_a_version_that_cannot_be_loaded_is_listed_beside_those_that_are_served(
    repository: ModelRepository, folder: Path
) -> None:
    repository.load("running_sum")
    add_version(folder, 2)
    (folder / "running_sum" / "2" / "model.py").write_text(BROKEN)

    with pytest.raises(LoadError, match="version 2 is at UNAVAILABLE state"):
        repository.load("running_sum")

    found = states(repository)
    assert {"1": "READY", "2": "UNAVAILABLE"} == {version: state for version, (state, _) in found.items()}
    assert "it is broken" in found["2"][1]
    assert f"the last load failed, what was loaded before is served: {found['2'][1]}" == found["1"][1]


async def test_a_wrong_configuration_is_a_failed_poll(repository: ModelRepository, folder: Path) -> None:
    change_config(folder, "max_batch_size: 32", "max_batch_size: -1")

    with pytest.raises(LoadError, match="failed to load 'running_sum', failed to poll from model repository: ") as no:
        repository.load("running_sum")

    assert Code.INTERNAL is no.value.code
    assert "'max_batch_size' must be non-negative" in states(repository)[""][1]
    with pytest.raises(NoSuchModelError, match="no repository has a folder of that name"):
        repository.load("nobody")
    assert {"running_sum"} == {line.model for line in repository.index(repository.listed(readable_alone=True))}


async def test_override_files_take_the_place_of_the_folder_until_the_version_is_closed(
    repository: ModelRepository, folder: Path
) -> None:
    config = repository.load("running_sum").record.config_json
    files = {"7/model.py": CODE.encode()}

    (seven,) = repository.load("running_sum", config, files).versions
    assert "7" == seven.version
    assert seven.files is not None
    place = seven.files.folder
    assert (place / "7" / "model.py").exists()
    assert [seven] == repository.load("running_sum", config, files).versions
    with pytest.raises(LoadError, match="must not leave the model's directory"):
        repository.load("running_sum", config, {"../model.py": b""})

    (one,) = repository.load("running_sum").versions
    await repository.close_retired()
    assert "1" == one.version
    assert not place.exists()


async def test_a_model_that_closes_standard_error_takes_it_neither_from_sockets_nor_from_processes(
    repository: ModelRepository, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its descriptor would be the next socket's, and get the log."""
    closes = """    def initialize(self, args):
        import os
        os.close(2)

    def execute("""
    (folder / "running_sum" / "1" / "model.py").write_text(CODE.replace("    def execute(", closes))
    before = os.dup(2)
    try:
        repository.load("running_sum")
        assert os.path.samestat(os.fstat(2), Path(os.devnull).stat())
        assert os.get_inheritable(2)
    finally:
        os.dup2(before, 2)
        os.close(before)

    assert "model closed standard streams, they lead nowhere now" in caplog.messages


async def test_every_instance_of_a_version_is_finalized_also_if_whoever_closes_it_is_cancelled(
    repository: ModelRepository, folder: Path, tmp_path: Path
) -> None:
    """As a registration is whose lease ends meanwhile."""
    gate = tmp_path / "gate"
    finalize = f"""    def initialize(self, args):
        self.name = args["model_instance_name"]

    def finalize(self):
        import pathlib, time
        pathlib.Path({str(tmp_path)!r}, f"{{self.name}}.ends").touch()
        while not pathlib.Path({str(gate)!r}).exists():
            time.sleep(0.001)

    def execute("""
    (folder / "running_sum" / "1" / "model.py").write_text(CODE.replace("    def execute(", finalize))
    change_config(folder, "count: 1", "count: 2")
    repository.load("running_sum")
    repository.unload("running_sum")
    closing = asyncio.create_task(repository.close_retired())
    while not list(tmp_path.glob("*.ends")):
        await asyncio.sleep(0.001)

    closing.cancel()
    await asyncio.wait([closing])
    gate.touch()
    await repository.close()

    assert 2 == len(list(tmp_path.glob("*.ends")))


async def test_models_are_finalized_side_by_side(
    repository: ModelRepository, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a stop takes as long as all of them together."""
    monkeypatch.setattr("executor.workers.worker.FINALIZE_LIMIT_S", 600)
    finalize = """    def finalize(self):
        import pathlib, time
        here = pathlib.Path(__file__).parents[2]
        (here / "NAME.ends").touch()
        while len(list(here.glob("*.ends"))) < 2:
            time.sleep(0.001)

    def execute("""
    shutil.copytree(folder / "running_sum", folder / "another_sum")
    change_config(folder, 'name: "running_sum"', "")
    shutil.copy(folder / "running_sum" / "config.pbtxt", folder / "another_sum")
    for name in ("running_sum", "another_sum"):
        code = CODE.replace("    def execute(", finalize.replace("NAME", name))
        (folder / name / "1" / "model.py").write_text(code)
        repository.load(name)

    async with asyncio.timeout(60):
        await repository.close()

    assert 2 == len(list(tmp_path.glob("*.ends")))


async def test_what_a_model_held_is_free_when_it_is_unloaded(
    repository: ModelRepository, folder: Path, tmp_path: Path
) -> None:
    """Also of one that refers to itself, which Python would keep until it has made many new objects."""
    initialize = f"""
    def initialize(self, args):
        import pathlib, weakref
        self.itself = self
        weakref.finalize(self, pathlib.Path({str(tmp_path / "free")!r}).touch)

    def execute("""
    (folder / "running_sum" / "1" / "model.py").write_text(CODE.replace("    def execute(", initialize))
    gc.disable()
    try:
        repository.load("running_sum")
        repository.unload("running_sum")
        await repository.close_retired()
        await asyncio.sleep(0)
        is_free = (tmp_path / "free").exists()
    finally:
        gc.enable()

    assert is_free


def test_the_index_names_the_versions_that_were_unloaded_last(
    repository: ModelRepository, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions come and go for years, and every service reads the index."""
    monkeypatch.setattr(repository_module, "UNLOADED_MAX", 2, raising=False)
    repository.load("running_sum")
    for number in (2, 3, 4, 5):
        add_version(folder, number)
        repository.load("running_sum")
    assert ["2", "3", "4", "5"] == sorted(states(repository))

    # Back to a version from before, which was not among the last ones.
    for number in (2, 3, 4, 5):
        shutil.rmtree(folder / "running_sum" / str(number))
    repository.load("running_sum")
    assert ["1", "3", "4", "5"] == sorted(states(repository))
    repository.unload("running_sum")
    assert ["1", "4", "5"] == sorted(states(repository))


async def test_models_that_are_unloaded_one_after_the_other_share_a_look_through_memory(
    repository: ModelRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody waits for it: 290 ms where a thousand models are loaded."""
    looks: list[int] = []

    def look() -> int:
        time.sleep(0.001)
        looks.append(1)
        return 0

    monkeypatch.setattr(gc, "collect", look)
    monkeypatch.setattr(collector, "REST", 1_000_000)
    for _ in range(3):
        repository.load("running_sum")
        repository.unload("running_sum")
        await repository.close_retired()
        await asyncio.sleep(0)

    assert [1] == looks


async def test_polling_follows_the_folders(repository: ModelRepository, loader: Loader, folder: Path) -> None:
    polling = Polling(repository, loader, 15.0, asyncio.Event())

    assert await polling.look()
    assert not await polling.look()
    (one,) = repository.loaded["running_sum"].versions
    shutil.copytree(folder / "running_sum", folder / "other")
    change_config(folder, 'name: "running_sum"', "")
    (folder / "other" / "config.pbtxt").write_text("this is no configuration")
    assert await polling.look()
    assert [one] == repository.loaded["running_sum"].versions
    assert ["running_sum"] == list(repository.loaded)
    # It is not tried again before it changes.
    assert not await polling.look()
    shutil.copy(folder / "running_sum" / "config.pbtxt", folder / "other" / "config.pbtxt")
    assert await polling.look()
    assert ["running_sum", "other"] == list(repository.loaded)
    shutil.rmtree(folder / "running_sum")
    assert await polling.look()
    assert ["other"] == list(repository.loaded)
    assert [one] == repository.retired


async def test_what_a_look_has_changed_is_announced_before_the_next_model_is_loaded(
    repository: ModelRepository, folder: Path
) -> None:
    """A load may take minutes, or for ever."""
    changed, announced = asyncio.Event(), list[tuple[str, bool]]()

    def load(name: str, **_: str) -> None:
        announced.append((name, changed.is_set()))

    loader = Mock(Loader)
    loader.load.side_effect = load
    loader.goes_on.return_value = False
    shutil.copytree(folder / "running_sum", folder / "another_sum")
    polling = Polling(repository, loader, 15.0, changed)

    assert await polling.look()
    assert [("another_sum", False), ("running_sum", True)] == announced

    changed.clear()
    shutil.rmtree(folder / "another_sum")
    (folder / "running_sum" / "1" / "more.py").touch()
    assert await polling.look()
    assert ("running_sum", True) == announced[-1]


async def test_what_changes_while_a_load_goes_on_is_loaded_behind_it(
    repository: ModelRepository, loader: Loader, folder: Path, tmp_path: Path
) -> None:
    """A folder that is being copied changes all the time, and a large model is loaded for longer than a look waits."""
    gate, waits = tmp_path / "gate", tmp_path / "gate.waits"
    (folder / "running_sum" / "1" / "model.py").write_text(CODE + waiting_for(gate, waits))
    polling = Polling(repository, loader, 15.0, asyncio.Event())
    async with asyncio.timeout(60):
        await polling.look(0.0)
        while not waits.exists():
            await asyncio.sleep(0.01)
        change_config(folder, "max_batch_size: 32", "max_batch_size: 16")
        await polling.look(0.0)
        gate.touch()
        while loader.goes_on("running_sum"):
            await asyncio.sleep(0.01)
        assert 32 == repository.loaded["running_sum"].record.config.max_batch_size

        await polling.look()

    assert 16 == repository.loaded["running_sum"].record.config.max_batch_size


async def test_a_failed_load_is_forgotten_when_the_model_is_unloaded(repository: ModelRepository, folder: Path) -> None:
    with pytest.raises(LoadError):
        repository.load("running_sum", "{bad")
    repository.unload("running_sum")
    repository.never_loaded("running_sum")

    assert {"": ("UNAVAILABLE", "unloaded")} == states(repository)


async def test_a_failed_load_is_forgotten_when_the_polled_folder_is_gone(
    repository: ModelRepository, loader: Loader, folder: Path
) -> None:
    polling = Polling(repository, loader, 15.0, asyncio.Event())
    (folder / "running_sum" / "1" / "model.py").write_text(BROKEN)
    await polling.look()
    assert "it is broken" in states(repository)["1"][1]
    (folder / "running_sum").rename(folder / "renamed")

    assert await polling.look()
    assert ["renamed"] == list(repository.failures)
    assert {} == states(repository)


@pytest.mark.parametrize(
    ("name", "config"), [("no\0name", "{}"), ("labelled", json.dumps({"backend": "python", **NO_LABELS}))]
)
async def test_what_no_file_can_be_called_fails_the_load_and_nothing_else(
    repository: ModelRepository, name: str, config: str
) -> None:
    with pytest.raises(LoadError, match=r"failed to poll from model repository: .*embedded null") as raised:
        repository.load(name, config, {"1/model.py": CODE.encode()})

    assert raised.value.code is Code.INTERNAL
    assert {} == repository.loading == repository.failures


async def test_a_failed_load_of_files_is_remembered_of_models_that_are_there_alone(repository: ModelRepository) -> None:
    config = repository.load("running_sum").record.config_json
    bad = {"1/model.py": BROKEN.encode()}
    brought = config.replace('"running_sum"', '"brought"')
    repository.load("brought", brought, {"1/model.py": CODE.encode()})

    for name, override in (("running_sum", config), ("brought", brought), ("stranger", "{}"), ("other", "{")):
        with pytest.raises(LoadError):
            repository.load(name, override, bad)

    assert {"running_sum", "brought"} == repository.failures.keys()
    assert {"running_sum", "brought"} == {line.model for line in repository.index(repository.listed())}


async def test_a_model_that_changes_the_working_directory_takes_no_relative_repository_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    repository = ModelRepository((Path(folder.name),), Devices(), LoadOptions(backend_dirs=[Path(folder.name)]))
    moving = CODE.replace("class TritonPythonModel:", "import os\nos.chdir('/')\n\n\nclass TritonPythonModel:", 1)
    (folder / "running_sum" / "1" / "model.py").write_text(moving)
    assert moving != CODE

    repository.load("running_sum")
    assert Path("/") == Path.cwd()
    change_config(folder, "max_batch_size: 32", "max_batch_size: 16")
    assert 16 == repository.load("running_sum").record.config.max_batch_size
    assert repository.options.backend_dirs == [folder]
    await repository.close()


async def test_a_model_that_ends_the_process_while_it_is_loaded_fails_the_load(
    repository: ModelRepository, folder: Path
) -> None:
    (folder / "running_sum" / "1" / "model.py").write_text(CODE + "\nraise SystemExit(3)\n")

    with pytest.raises(LoadError, match=r"is at UNAVAILABLE state: Invalid argument: cannot import .*: SystemExit: 3"):
        repository.load("running_sum")


async def test_polling_outlives_a_repository_that_cannot_be_read(
    repository: ModelRepository, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = asyncio.Event()
    polling = Polling(repository, loader, 0.01, changed)
    looks = 0

    listed = LocalFolder.names

    def names(folder: LocalFolder) -> Collection[str]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise OSError("Stale file handle")
        return listed(folder)

    monkeypatch.setattr(LocalFolder, "names", names)
    async with asyncio.timeout(60):
        task = asyncio.create_task(polling.run())
        await changed.wait()
        task.cancel()

    assert ["running_sum"] == list(repository.loaded)


def test_the_index_and_a_look_list_a_repository_once_however_many_models_it_has(loader: Loader, tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / "many" / f"m{number}").mkdir(parents=True)
    lists = 0

    class Counted(LocalFolder):
        def names(self) -> Collection[str]:
            nonlocal lists
            lists += 1
            return super().names()

    repository = ModelRepository((Counted(tmp_path / "many"),), Devices())
    assert 50 == len(repository.index(repository.listed(readable_alone=True)))
    assert 1 == lists
    assert 50 == len(Polling(repository, loader, 1.0, asyncio.Event())._fingerprints())
    assert 2 == lists


def test_the_index_of_a_repository_that_cannot_be_read_names_what_was_loaded_from_it(
    repository: ModelRepository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    repository.load("running_sum")

    def names(_self: LocalFolder) -> Collection[str]:
        raise OSError("Stale file handle")

    monkeypatch.setattr(LocalFolder, "names", names)

    assert {"1": ("READY", "")} == states(repository)
    assert "models not listed" in caplog.text


def test_a_misspelt_parameter_is_a_warning_of_the_load(
    folder: Path, repository: ModelRepository, caplog: pytest.LogCaptureFixture
) -> None:
    with (folder / "running_sum" / "config.pbtxt").open("a") as file:
        file.write('parameters { key: "checkpoint_intervall" value { string_value: "4" } }')

    repository.load("running_sum")

    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "unknown model parameter" in warning.getMessage()


def test_models_are_folders_and_links_to_folders(tmp_path: Path) -> None:
    root = tmp_path / "models"
    for name in ("m", ".hidden"):
        (root / name).mkdir(parents=True)
    (root / "notes.txt").write_text("")
    (root / "link").symlink_to(root / "m")
    (root / "dangling").symlink_to(root / "gone")
    (root / "loop").symlink_to(root / "loop")

    assert ["link", "m"] == sorted(LocalFolder(root).names())
    assert LocalFolder(root).take("notes.txt") is None


def test_a_folder_whose_name_is_no_text_is_no_model_and_harms_none(
    folder: Path, repository: ModelRepository, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / os.fsdecode(b"mod\xe8le")).mkdir()
    (folder / "running_sum" / "1" / os.fsdecode(b"donn\xe9es")).write_text("")

    assert ["running_sum"] == repository.names()
    assert "its name is no text" in caplog.text
    repository.load("running_sum")
    assert {"1": ("READY", "")} == states(repository)


async def test_a_repository_that_is_away_for_a_moment_keeps_its_models(
    repository: ModelRepository, loader: Loader, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    polling, elsewhere = Polling(repository, loader, 15.0, asyncio.Event()), tmp_path_factory.mktemp("away") / "models"
    await polling.look()

    folder.rename(elsewhere)
    with pytest.raises(FileNotFoundError):
        await polling.look()
    with pytest.raises(UnreachableError, match=r"failed to poll from model repository: .* No such file"):
        repository.load("running_sum")
    assert not repository.mentions("running_sum")
    assert ["running_sum"] == list(repository.loaded)
    elsewhere.rename(folder)
    assert not await polling.look()


async def test_a_listing_that_cannot_be_read_is_tried_again(
    repository: ModelRepository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where models are loaded on request."""
    changed, refreshed = asyncio.Event(), Mock(side_effect=[OSError("Stale file handle"), True])
    monkeypatch.setattr(ModelRepository, "refresh", refreshed)

    async with asyncio.timeout(60):
        task = asyncio.create_task(follow_listings(repository, 0.01, changed))
        await changed.wait()
        task.cancel()

    assert "models not looked at" in caplog.text


def test_files_behind_links_count_for_a_folders_fingerprint(tmp_path: Path) -> None:
    model, shared = tmp_path / "m", tmp_path / "shared"
    (model / "1").mkdir(parents=True)
    (shared / "weights").mkdir(parents=True)
    (shared / "weights" / "one").write_text("a")
    (model / "1" / "shared").symlink_to(shared)
    (shared / "ring").symlink_to(model)
    before = folder_fingerprint(model)

    (shared / "weights" / "one").write_text("other")
    assert before != (after := folder_fingerprint(model))
    (model / "2").symlink_to(model / "1")
    assert after != folder_fingerprint(model)


def test_a_folders_fingerprint_is_not_moved_by_what_python_leaves_there(folder: Path) -> None:
    before = folder_fingerprint(folder / "running_sum")
    cache = folder / "running_sum" / "1" / "__pycache__"
    cache.mkdir()
    (cache / "model.pyc").write_bytes(b"x")

    assert before == folder_fingerprint(folder / "running_sum")
    (folder / "running_sum" / "labels.txt").write_text("a")
    assert before != folder_fingerprint(folder / "running_sum")


async def test_cached_answers_belong_to_the_content_of_a_versions_files(tmp_path: Path) -> None:
    scopes: list[dict[str, str]] = []
    for folder, enabled in (("here", True), ("there", True), ("plain", False)):
        model = tmp_path / folder / "add_sub"
        shutil.copytree(SAMPLES / "add_sub", model, ignore=shutil.ignore_patterns("__pycache__"))
        config = (model / "config.pbtxt").read_text() + "\nversion_policy { all { } }"
        (model / "config.pbtxt").write_text(config + ("\nresponse_cache { enable: true }" if enabled else ""))
        shutil.copytree(model / "1", model / "2")
        repository = ModelRepository((model.parent,), Devices())
        before = repository.load("add_sub").record
        code = model / "2" / "model.py"
        code.write_text(code.read_text() + "\n# Changed.\n")
        after = repository.load("add_sub", generation="2").record
        # The other version goes on, and so does the load.
        assert before.generation == after.generation
        scopes += [before.cache_scopes, after.cache_scopes]
        await repository.close()

    here, changed, there, there_changed, *plain = scopes
    assert {"1", "2"} == here.keys()
    # Other times of change, as on another machine, make no difference.
    assert (here, changed) == (there, there_changed)
    assert here["1"] == changed["1"]
    assert here["2"] != changed["2"]
    assert [{}, {}] == plain


def changed_meanwhile(model: str, when: str) -> str:
    """Code of a model whose file has another VALUE when its `initialize` returns, if `when` holds."""
    return f"""{(SAMPLES / model / "1" / "model.py").read_text()}
import os

VALUE = 1


def initialize(self, args):
    path = os.path.join(args["model_repository"], args["model_version"], "model.py")
    with open(os.path.join(args["model_repository"], "..", "loads.txt"), "a") as loads:
        print(VALUE, file=loads)
    if {when}:
        with open(path) as file:
            code = file.read()
        with open(path, "w") as file:
            file.write(code.replace(f"VALUE = {{VALUE}}", f"VALUE = {{VALUE + 1}}", 1) + "#")


TritonPythonModel.initialize = initialize
"""


@pytest.mark.parametrize("parameters", ["", "response_cache { enable: true }"], ids=["states", "cached answers"])
async def test_files_that_change_while_a_version_is_loaded_are_loaded(folder: Path, parameters: str) -> None:
    """What two executors take for the same model is the same code."""
    model = "add_sub" if parameters else "running_sum"
    if parameters:
        shutil.copytree(SAMPLES / model, folder / model, ignore=shutil.ignore_patterns("__pycache__"))
        with (folder / model / "config.pbtxt").open("a") as config:
            config.write(parameters)
    (folder / model / "1" / "model.py").write_text(changed_meanwhile(model, "VALUE == 1"))
    repository, other = (ModelRepository((folder,), Devices()) for _ in range(2))

    (here,), (there,) = (one.load(model).versions for one in (repository, other))

    assert ["1", "2", "2"] == (folder / "loads.txt").read_text().split()
    assert (here.mark, here.cache_scope) == (there.mark, there.cache_scope)
    assert [here] == repository.load(model).versions
    for one in (repository, other):
        await one.close()


async def test_a_version_whose_files_change_with_each_load_is_served_and_shares_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "running_sum" / "1" / "model.py").write_text(changed_meanwhile("running_sum", "True"))
    repository, other = (ModelRepository((folder,), Devices()) for _ in range(2))

    (here,), (there,) = (one.load("running_sum").versions for one in (repository, other))

    assert here.mark != there.mark
    assert "" not in (here.mark, there.mark)
    assert "model changed while it was loaded" in caplog.text
    assert ["1", "2", "3", "4"] == (folder / "loads.txt").read_text().split()
    for one in (repository, other):
        await one.close()


def test_a_load_that_costs_the_process_its_gpu_is_no_refused_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be said of every model after it."""
    broken = ModelRepository((folder,), Devices((0,)))
    (folder / "running_sum" / "1" / "model.py").write_text(BROKEN)
    monkeypatch.setattr(devices, "gpu_problem", lambda _: "")  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with pytest.raises(LoadError, match="it is broken"):
        broken.load("running_sum")

    monkeypatch.setattr(devices, "gpu_problem", lambda _: "CUDA error: gone")  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with pytest.raises(DeviceLostError, match="cuda:0: CUDA error: gone"):
        broken.load("running_sum")


@pytest.mark.parametrize("instances", [1, 2])
async def test_a_version_that_was_unloaded_while_another_was_made_is_made_anew(
    repository: ModelRepository, folder: Path, instances: int
) -> None:
    """Else its model would be finalized, and served. With other instances it has been made before the unload, and goes
    on counting, but not beside one that begins.
    """
    (first,) = repository.load("running_sum").versions
    add_version(folder, 3)
    change_config(folder, "count: 1", f"count: {instances}")
    change_config(folder, "max_batch_size: 32", "max_batch_size: 32\nversion_policy { all { } }")
    gate, waits = folder / "gate", folder / "gate.waits"
    initialize = f"def initialize(self, args):{textwrap.indent(waiting_for(gate, waits), '    ')}"
    (folder / "running_sum" / "3" / "model.py").write_text(
        f"{CODE}\n{initialize}\nTritonPythonModel.initialize = initialize"
    )
    loading = asyncio.create_task(asyncio.to_thread(repository.load, "running_sum", generation="2"))
    async with asyncio.timeout(60):
        while not waits.exists():
            await asyncio.sleep(0.01)
        repository.unload("running_sum")
        await repository.close_retired()
        gate.touch()
        model = await loading

    assert ["1", "3"] == [served.version for served in model.versions]
    assert first not in model.versions
    assert {"2"} == {model.record.generation, *(served.statistics.load.generation for served in model.versions)}
