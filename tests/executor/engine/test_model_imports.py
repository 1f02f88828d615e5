"""What the import of a `model.py` leaves behind, and what its end costs beside many others."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from executor.engine.python import import_turns
from executor.engine.python.instance_code import InstanceCode
from executor.engine.python.model import called, forget, import_model_class, keep_importable, model_path
from executor.engine.python.model_metrics import custom_families
from shared.contract.errors import LoadError

MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        import parts.one
        return parts.one
"""
PLACE = "a place that counts"


class Counting:
    """An entry of `sys.path` without modules."""

    asked = 0

    @classmethod
    def at(cls, path: str) -> type[Counting]:
        if path != PLACE:
            raise ImportError
        return cls

    @classmethod
    def find_spec(cls, _name: str, _target: object = None) -> None:
        cls.asked += 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package without `__init__.py`, which belongs to no model."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "two.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "elsewhere"
    for name in ("elsewhere.two", "elsewhere"):
        sys.modules.pop(name, None)


def model(root: Path, name: str) -> tuple[Any, InstanceCode, Path]:
    """The class of a model, its code and its folder."""
    path = root / name / "1" / "model.py"
    (path.parent / "parts").mkdir(parents=True)
    (path.parent / "parts" / "one.py").write_text(f"name = '{name}'")
    path.write_text(MODEL)
    imported, code = another(path.parent)
    return imported, code, path.parent


def another(directory: Path) -> tuple[Any, InstanceCode]:
    """Another instance of the model in that folder: its class and its code."""
    code = InstanceCode(directory.parent.name, "1", str(directory))
    imported = import_model_class(directory / "model.py", code)
    keep_importable(directory)
    return imported, code


SLOW = """
import parts, slow
slow.begun.set()
slow.go_on.wait(60)
slow.order.append(parts.name)
try:
    import late
finally:
    slow.met.set()
class TritonPythonModel:
    name = parts.name
"""
MEETING = """
import slow
slow.go_on.set()
slow.met.wait(60)
import late
class TritonPythonModel:
    of = late.Late.__module__
"""
QUICK = """
import parts, slow
slow.order.append(parts.name)
class TritonPythonModel:
    name = parts.name
"""


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two models, whose files are called alike. The import of `a` waits for `go_on`."""
    for name, code in (("a", SLOW), ("b", QUICK)):
        (folder := tmp_path / name / "1").mkdir(parents=True)
        for file, text in (("model.py", code), ("parts.py", f"name = '{name}'"), ("late.py", "class Late: ...")):
            (folder / file).write_text(text)
    slow = SimpleNamespace(begun=threading.Event(), go_on=threading.Event(), met=threading.Event(), order=[])
    monkeypatch.setitem(sys.modules, "slow", slow)
    return slow


def importing(pool: ThreadPoolExecutor, root: Path, name: str) -> Future[tuple[Any, InstanceCode]]:
    return pool.submit(another, root / name / "1")


def test_imports_wait_for_each_other(tmp_path: Path, slow: SimpleNamespace) -> None:
    with ThreadPoolExecutor() as pool:
        first = importing(pool, tmp_path, "a")
        assert slow.begun.wait(60)
        second = importing(pool, tmp_path, "b")
        slow.go_on.set()

    assert ["a", "b"] == slow.order
    for name, done in (("a", first), ("b", second)):
        imported, code = done.result()
        assert name == imported.name
        forget(code, tmp_path / name / "1")


def test_the_end_of_a_model_waits_for_no_import(tmp_path: Path, slow: SimpleNamespace) -> None:
    path = list(sys.path)
    _, code = another(tmp_path / "b" / "1")
    with ThreadPoolExecutor() as pool:
        hanging = importing(pool, tmp_path, "a")
        assert slow.begun.wait(60)
        pool.submit(forget, code, tmp_path / "b" / "1").result(60)
        slow.go_on.set()

    _, other = hanging.result()
    forget(other, tmp_path / "a" / "1")
    assert path == sys.path
    assert not {code.name, other.name} & sys.modules.keys()


def test_an_import_that_hangs_is_given_up_by_the_next_one_and_leaves_it_nothing(
    tmp_path: Path, slow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(import_turns, "LIMIT_S", 0.0)
    path = list(sys.path)
    with ThreadPoolExecutor() as pool:
        hanging = importing(pool, tmp_path, "a")
        assert slow.begun.wait(60)
        imported, code = another(tmp_path / "b" / "1")
        forget(code, tmp_path / "b" / "1")
        left = list(sys.path), "parts" in sys.modules
        slow.go_on.set()

    assert "b" == imported.name
    assert (path, False) == left
    assert (path, False) == (sys.path, "parts" in sys.modules), "what goes on by itself takes nothing away"
    with pytest.raises(LoadError, match="was given up, because others waited for it: load the model again"):
        hanging.result()
    assert f"the import of {tmp_path}/a/1 has taken" in caplog.text
    again, code = another(tmp_path / "a" / "1")
    assert "a" == again.name
    forget(code, tmp_path / "a" / "1")
    assert path == sys.path


def test_nobody_imports_before_all_of_an_import_that_was_given_up_is_taken_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both change `sys.path`."""
    monkeypatch.setattr(import_turns, "LIMIT_S", 0.0)
    turns = import_turns.ImportTurns()
    order: list[str] = []

    def enter(name: str) -> None:
        with turns.alone():
            order.append(name)

    def leave() -> None:
        other = pool.submit(enter, "other")
        with suppress(TimeoutError):
            other.result(0.2)
        order.append("left")

    with ThreadPoolExecutor() as pool, turns.alone() as turn, turn.importing("slow", leave):
        pool.submit(enter, "next").result(60)

    assert "left" == order[0]
    assert {"next", "other"} == set(order[1:])


def test_an_import_that_was_given_up_and_goes_on_takes_no_file_of_the_next_one(
    tmp_path: Path, slow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file belongs to the instance that runs it first."""
    monkeypatch.setattr(import_turns, "LIMIT_S", 0.0)
    (tmp_path / "b" / "1" / "model.py").write_text(MEETING)
    with ThreadPoolExecutor() as pool:
        hanging = importing(pool, tmp_path, "a")
        assert slow.begun.wait(60)
        monkeypatch.setattr(import_turns, "LIMIT_S", 300.0)  # else the end of the first gives the next one up
        imported, code = another(tmp_path / "b" / "1")

    assert f"{code.name}.late" == imported.of
    assert isinstance(hanging.exception(), LoadError)
    forget(code, tmp_path / "b" / "1")


def test_what_a_method_imports_while_another_instance_is_imported_stays(tmp_path: Path, slow: SimpleNamespace) -> None:
    """Taken away in the middle of its import, it would fail the request."""
    folder = tmp_path / "a" / "1"
    (folder / "method.py").write_text("")
    slow.go_on.set()
    _, first = another(folder)
    slow.go_on.clear()
    slow.begun.clear()
    with ThreadPoolExecutor() as pool:
        importing_second = importing(pool, tmp_path, "a")
        assert slow.begun.wait(60)
        with called(first):
            imported = importlib.import_module("method")
        slow.go_on.set()

    _, second = importing_second.result()
    assert imported is sys.modules["method"]
    for code in (first, second):
        forget(code, folder)
    assert "method" not in sys.modules


def test_who_goes_through_the_path_while_another_model_ends_misses_no_entry(tmp_path: Path) -> None:
    """An import in a method does, on the model's thread."""
    (_, first, first_folder), (_, second, second_folder) = (model(tmp_path, name) for name in ("a", "b"))
    rest = iter(sys.path)
    assert str(first_folder) in rest  # it is behind that entry now

    forget(first, first_folder)

    assert str(second_folder) in rest
    forget(second, second_folder)


def test_the_end_of_a_model_searches_no_path(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model has an entry in `sys.path`. To search all of them at each end would take n * n questions."""
    _, first, first_folder = model(tmp_path, "a")
    _, second, second_folder = model(tmp_path, "b")
    importlib.import_module("elsewhere.two")
    monkeypatch.setattr(sys, "path_hooks", [Counting.at, *sys.path_hooks])
    monkeypatch.setattr(sys, "path", [PLACE, *sys.path])
    importlib.invalidate_caches()
    before = Counting.asked

    forget(first, first_folder)

    assert before == Counting.asked
    forget(second, second_folder)
    assert "elsewhere.two" in sys.modules


def test_folders_that_a_model_has_imported_are_forgotten_with_it(tmp_path: Path) -> None:
    """The next load may find other code in them."""
    for name in ("a", "b"):
        imported, code, directory = model(tmp_path, name)
        assert name == imported().execute([]).name
        assert {"parts", "parts.one"} <= sys.modules.keys()
        forget(code, directory)
        assert not {"parts", "parts.one"} & sys.modules.keys()


def test_what_a_method_imports_is_shared_until_a_load_finds_other_code(tmp_path: Path) -> None:
    first, code, directory = model(tmp_path, "a")
    shared = first().execute([])

    second, second_code = another(directory)
    assert shared is second().execute([])

    (directory / "parts" / "one.py").write_text("name = 'b'")
    third, third_code = another(directory)
    assert "b" == third().execute([]).name
    for each in (code, second_code, third_code):
        forget(each, directory)
    assert "parts" not in sys.modules


@pytest.mark.parametrize(
    ("code", "is_told"),
    [
        ("import shared", True),
        ("from shared import x", True),
        ("from . import shared", False),
        ("import sharedd", False),
    ],
)
def test_the_log_names_a_file_that_a_module_of_its_name_hides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: str, is_told: bool
) -> None:
    path = tmp_path / "a" / "1" / "model.py"
    path.parent.mkdir(parents=True)
    path.write_text(f"class TritonPythonModel:\n    def execute(self, requests):\n        {code}\n")
    path.with_name("shared.py").touch()

    _, imported = another(path.parent)

    told = [record.getMessage() for record in caplog.records]
    assert is_told == any("model 'a': 'import shared' finds <module 'shared' from " in line for line in told)
    forget(imported, path.parent)


def test_a_file_without_a_model_leaves_nothing_and_its_predecessor_is_found_as_before(tmp_path: Path) -> None:
    """A thread of the model's own finds the classes of the newest instance, when it reads what was pickled."""
    imported, code, directory = model(tmp_path, "a")
    (directory / "model.py").write_text(
        "import triton_python_backend_utils as pb_utils\npb_utils.MetricFamily('no_model', 'none', 'COUNTER')\n"
    )

    with pytest.raises(LoadError, match="has no class"):
        another(directory)

    assert imported is sys.modules[code.name].TritonPythonModel
    assert "no_model" not in [family.name for family in custom_families()]
    forget(code, directory)
    assert code.name not in sys.modules


@pytest.mark.parametrize(
    ("file", "text"), [("model.txt", "is no file that Python imports"), ("model.so", "cannot import")]
)
def test_a_file_that_is_no_code_of_python_is_refused(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text("no code")
    code = InstanceCode("a", "1", str(tmp_path))

    with pytest.raises(LoadError, match=text):
        import_model_class(tmp_path / file, code)
    assert code.name not in sys.modules


def test_a_folder_that_lacks_the_model_names_the_file_that_may_be_it(tmp_path: Path) -> None:
    (tmp_path / "weights.npz").touch()
    with pytest.raises(LoadError, match=rf"^there is no model\.py in {tmp_path}$"):
        model_path(tmp_path, "")
    (tmp_path / "Model.py").touch()
    with pytest.raises(LoadError, match=rf"^there is no model\.py in {tmp_path}, but Model\.py$"):
        model_path(tmp_path, "")


def test_a_model_may_take_its_folder_off_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "a" / "1" / "model.py"
    path.parent.mkdir(parents=True)
    path.write_text(f"import sys\nsys.path.remove({str(path.parent)!r})\n{MODEL}")
    _, code = another(path.parent)
    sys.path.remove(str(path.parent))

    forget(code, path.parent)

    assert str(path.parent) not in sys.path


def test_a_load_takes_what_other_code_has_put_in_the_place_of_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library's, or another model's: an object without attributes of its own, say."""
    monkeypatch.setitem(sys.modules, "odd", object())

    _, code, directory = model(tmp_path, "a")

    forget(code, directory)


def test_an_object_that_a_file_puts_in_its_module_s_place_is_its_own_model_s_alone(tmp_path: Path) -> None:
    """As files with settings do. Such an object has no file by which it could be told."""
    for name in ("a", "b"):
        path = tmp_path / name / "1" / "model.py"
        path.parent.mkdir(parents=True)
        path.write_text("import settings\nclass TritonPythonModel:\n    name = settings.name\n")
        path.with_name("settings.py").write_text(
            f"import sys\nclass Settings:\n    name = {name!r}\nsys.modules[__name__] = Settings()\n"
        )

        imported, code = another(path.parent)

        assert name == imported.name
        assert "settings" not in sys.modules
        forget(code, path.parent)


@pytest.mark.parametrize("line", ["sys.modules[__name__] = object()", "del sys.modules[__name__]"])
def test_a_model_that_gives_its_own_name_away_ends_as_others_do_and_is_loaded_again(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a" / "1" / "model.py"
    path.parent.mkdir(parents=True)
    path.write_text(f"import sys\n{line}\nclass TritonPythonModel: ...\n")
    before = list(sys.path)

    codes = [another(path.parent)[1] for _ in range(2)]
    for code in codes:
        forget(code, path.parent)

    assert before == sys.path
    assert codes[0].name not in sys.modules


def test_who_goes_through_all_modules_meets_one_whose_model_has_just_ended(tmp_path: Path) -> None:
    """`inspect` does, for one, and asks for files that a module may lack."""
    _, code, directory = model(tmp_path, "a")
    met = sys.modules[code.name]

    forget(code, directory)

    assert getattr(met, "__file__", None) is None
