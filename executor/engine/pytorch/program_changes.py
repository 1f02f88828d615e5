"""Finds what an exported program changes in its module: it lists the buffers that it changes, but not all of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor

from executor.engine.pytorch.attributes import DECIDES, Attribute, Changes, Leaf
from executor.engine.pytorch.signature import placeholders


def program_changes(program: torch.export.ExportedProgram, module: torch.nn.Module) -> Changes:
    """What an exported program changes. module: the program's module, which is called"""
    # A program tells its changes once its code has none in place. Only a copy of it is made so, and only to be read.
    try:
        with warnings.catch_warnings():
            # Torch warns of its own code.
            warnings.simplefilter("ignore", FutureWarning)
            signature: Any = program.run_decompositions({}).graph_signature
            untold = _untold_writes(program)
    except Exception as error:  # noqa: BLE001 - torch raises whatever it comes to, in passes of its own
        reason = f"what forward changes in the module cannot be told (buffers may share memory): {error}"
        return Changes(problems=(reason,))
    # Older torch exports no program that changes a parameter.
    parameters = dict.fromkeys([*getattr(signature, "parameters_to_mutate", {}).values(), *untold["parameters"]])
    for path in parameters:
        parent, _, name = path.rpartition(".")
        owner = module.get_submodule(parent)
        value = getattr(owner, name).detach()
        delattr(owner, name)
        owner.register_buffer(name, value)
    paths = dict.fromkeys([*signature.buffers_to_mutate.values(), *untold["buffers"], *parameters])
    problems = (f"forward writes to '{path}' of the module in place, a constant" for path in untold["constants"])
    decides = any(str(node.target).split(".")[0] in DECIDES for node in program.graph.nodes)
    return Changes(tuple(_buffer(module, path) for path in paths), tuple(problems), decides)


def _untold_writes(program: torch.export.ExportedProgram) -> Mapping[str, list[str]]:
    """What the program's own code writes to: paths of parameters, buffers and constants.

    Torch does not see a write through an operator that returns its argument (`dropout` in evaluation mode, `type_as`),
    nor running statistics that `instance_norm` moves. So the code is run with tensors that have no memory, and each
    tells whether it was written to.
    """
    try:
        written = _written(program, nullcontext())
    except RuntimeError:
        # A recurrent layer of a variable size has only Python's way, in which `dropout` makes a new tensor.
        written = _written(program, enable_python_dispatcher())
    given: Any = program.graph_signature
    kinds = {
        "parameters": given.inputs_to_parameters,
        "buffers": given.inputs_to_buffers,
        "constants": given.inputs_to_lifted_tensor_constants,
    }
    return {kind: [path for name, path in names.items() if name in written] for kind, names in kinds.items()}


def _written(program: torch.export.ExportedProgram, dispatcher: AbstractContextManager[Any]) -> set[str]:
    values = placeholders(program)
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    mode: Any = next((value.fake_mode for value in tensors.values() if isinstance(value, FakeTensor)), None)
    if mode is None:
        return set()
    # Sizes that depend on numbers are nobody's here.
    sizes = mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env else nullcontext()
    with mode, sizes, dispatcher, torch.no_grad():
        made = {name: tensor.clone() for name, tensor in tensors.items()}
        before = {name: tensor._version for name, tensor in made.items()}  # noqa: SLF001 - has no public name
        torch.fx.Interpreter(program.graph_module).run(*(values | made).values(), enable_io_processing=False)
    return {name for name, version in before.items() if made[name]._version != version}  # noqa: SLF001


def _buffer(module: torch.nn.Module, path: str) -> Attribute:
    parent, _, name = path.rpartition(".")
    return Attribute(_Buffers(module.get_submodule(parent)), name, (Leaf(path),))


class _Buffers:
    """A plain module as the owner of its buffers."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def getattr(self, name: str) -> Any:
        return getattr(self._module, name)

    def setattr(self, name: str, value: Any) -> None:
        # The module's own way to set an attribute that is a buffer already: it replaces the tensor.
        setattr(self._module, name, value)
