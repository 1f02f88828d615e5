"""The code of one instance of a `model.py`: its folder, and the modules that its files are.

Every instance has module objects of its own, and pickle finds a class by the name of its module. So these names are the
same for all instances of a version, on every executor: the classes of `model.py` are of `seqmesh_model_NAME_VERSION`,
those of a file `sort.py` beside it, which it imports, of `seqmesh_model_NAME_VERSION.sort`. What one instance has
pickled any other one can read. Under such a name `sys.modules` has a `StandIn`: the module of whichever instance is
called.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from types import FunctionType, ModuleType
from typing import Any

MODULE_PREFIX = "seqmesh_model_"
"""How the names of these modules begin."""


class InstanceCode:
    """What belongs to an instance while its model is called.

    model      the model's name, for log lines
    model_dir  what `get_model_dir` returns
    adopts     whether the modules that are imported now are the instance's own: while `model.py` is imported. What a
               method imports later, all instances share
    given_up   whether its import was, though it may go on: what it finds now may be another model's
    imported   names in `sys.modules` of the files beside `model.py`, which may have put other objects there
    """

    __slots__ = ("_modules", "adopts", "given_up", "imported", "model", "model_dir", "name")

    def __init__(self, model: str, version: str, model_dir: str) -> None:
        self.model = model
        self.model_dir = model_dir
        self.adopts = False
        self.given_up = False
        self.imported: set[str] = set()
        # A class that TorchScript compiles takes the name of its module over, which must be made of words.
        self.name = MODULE_PREFIX + re.sub("[^0-9a-zA-Z_]", "_", f"{model}_{version}")
        """The name of `model.py`."""
        self._modules: dict[str, ModuleType] = {}

    def adopt(self, module: ModuleType, name: str) -> None:
        """Lets a module be found under that name; its classes and functions are of it."""
        _rename(vars(module), module.__name__, name)
        if name not in self._modules:  # else it is reloaded
            self._modules[name] = module
            _adopted[name] = (*_adopted.get(name, ()), module)
            sys.modules[name] = StandIn(name)

    def module(self, name: str) -> ModuleType | None:
        """The instance's module of that name."""
        return self._modules.get(name)

    def forget(self) -> None:
        """The modules are found no longer."""
        for name, module in self._modules.items():
            _adopted[name] = tuple(other for other in _adopted[name] if other is not module)
            if not _adopted[name]:
                del _adopted[name]
                # The model's own code may have taken it away, or put something else there.
                sys.modules.pop(name, None)
        self._modules.clear()


_adopted: dict[str, tuple[ModuleType, ...]] = {}
"""The modules of all instances under each name, the newest last."""

current_code: ContextVar[InstanceCode] = ContextVar("current_code")
"""Set by the engine around every call into a model."""


class StandIn(ModuleType):
    """Stands for the modules that the instances of a version have under one name. It is the module of the instance that
    is called; for a thread of a model's own, which nobody has called, that of the newest instance.
    """

    def __getattribute__(self, name: str) -> Any:
        return getattr(_present(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_present(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_present(self), name)


def _rename(members: Mapping[str, Any], before: str, after: str) -> None:
    """Makes what a module, or a class in it, defines a part of another module."""
    for member in list(members.values()):
        if isinstance(member, FunctionType) and member.__module__ == before:
            member.__module__ = after
        elif isinstance(member, type) and member.__module__ == before != after:
            type.__setattr__(member, "__module__", after)  # past a metaclass that would refuse it
            _rename(vars(member), before, after)


def _present(stand_in: StandIn) -> ModuleType:
    code = current_code.get(None)
    name: str = object.__getattribute__(stand_in, "__name__")
    module = None if code is None else code.module(name)
    if module is None and (modules := _adopted.get(name)):
        module = modules[-1]
    if module is None:
        # Whoever goes through all modules while a model ends, and asks for what one may lack, takes this error alone.
        raise AttributeError(f"the model of the module '{name}' is gone")
    return module
