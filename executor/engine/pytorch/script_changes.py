"""Finds what the forward of a TorchScript module changes in the module, by its code.

Torch's own pass `freeze` turns every attribute that forward does not change into a constant, and what stays is what
forward may change. The pass does not follow tensors inside of a list: for it such a tensor may be any other one. So the
frozen code is looked at again, node by node (`script_nodes`). A tensor that is neither set nor written to, by whatever
name, does not change (a table by which another tensor is indexed). A write to a constant, or to memory that two
attributes may share, is a change that cannot be kept apart.

A traced module (`torch.jit.trace`) lost its assignments (`self.hidden = ...`) when it was traced: nothing can find
them. Changes in place (`self.hidden.copy_(...)`) are kept by a trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from executor.engine.pytorch.attributes import DECIDES, Attribute, Changes, Leaf, Owner
from executor.engine.pytorch.script_nodes import (
    STATISTICS,
    hands_on,
    has_tensors,
    is_of_numbers,
    keeps_statistics,
    may_part,
    nodes_of,
    schema_of,
    writes_memory,
)

SCALARS: Mapping[str, str] = {"IntType": "INT64", "FloatType": "FP64", "BoolType": "BOOL"}
"""Plain numbers that can be kept as tensors of one element."""


@dataclass(frozen=True, slots=True)
class FileChanges:
    """What the code of a TorchScript file says.

    kinds                   path of an attribute that forward changes -> its type
    in_place                the paths of those whose memory it may write to
    problems, more_problems  before and behind those that the attributes themselves are
    forks                   parts of it may run on threads that torch has for them (`torch.jit.fork`)
    decides                 as of `Changes`
    """

    kinds: Mapping[str, Any]
    in_place: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    more_problems: tuple[str, ...] = ()
    forks: bool = False
    decides: bool = False

    def of(self, module: torch.jit.ScriptModule) -> Changes:
        """The same of a module of that file."""
        inner = cast("Any", module)._c  # noqa: SLF001 - attributes of any type have no public way in
        attributes: list[Attribute] = []
        problems = list(self.problems)
        for path, kind in self.kinds.items():
            found = _attribute(_owner(inner, path), path, kind)
            if found is None:
                problems.append(f"forward changes the attribute '{path}', a {kind.annotation_str} of the module")
            else:
                attributes.append(found)
        problems += self._ties(module)
        return Changes(tuple(attributes), tuple(dict.fromkeys([*problems, *self.more_problems])), self.decides)

    def _ties(self, module: torch.jit.ScriptModule) -> Iterator[str]:
        """What is written in place and lies in another tensor's memory, too: a state of its own would not."""
        tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        spans = {name: _span(tensor) for name, tensor in tensors}
        for path in self.in_place:
            begin, end = spans.get(path, (0, 0))
            for name, (other_begin, other_end) in spans.items():
                if name != path and max(begin, other_begin) < min(end, other_end):
                    yield f"forward writes in place to '{path}', whose memory is that of '{name}'"


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's memory begins and ends."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    elements = steps + 1 if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def script_changes(module: torch.jit.ScriptModule) -> FileChanges:
    """What the forward of a loaded TorchScript module changes. The module must be in evaluation mode.

    The pass leaves the module's tensors behind as constants, which live as long as the module, even if it is given
    others. So a module that is to be served is not read: another one of its file is, which goes first.
    """
    inner = cast("Any", module)._c  # noqa: SLF001 - the passes that tell have no public names
    passes = cast("Any", torch)._C  # noqa: SLF001
    if inner._get_forward_hooks() or inner._get_forward_pre_hooks():  # noqa: SLF001
        # Those of submodules are part of the code of forward.
        reason = "the module itself has hooks, which run beside forward (put it into a module that calls it)"
        return FileChanges({}, problems=(_untold(reason),), forks=True)
    try:
        graph = passes._freeze_module(inner, [], True, False)._get_method("forward").graph  # noqa: FBT003, SLF001
        if all(map(may_part, nodes_of(graph))):
            passes._jit_pass_lower_all_tuples(graph)  # noqa: SLF001
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "the code could not be followed"
        return FileChanges({}, problems=(_untold(reason),), forks=True)
    return _Reading(inner, graph).found()


def _untold(reason: str) -> str:
    """The problem of a module of which it is not known what it changes."""
    return f"what forward changes in the module cannot be told: {reason}"


class _Reading:
    """One look through a frozen module's code: attributes that are left, and values that may share memory."""

    def __init__(self, module: Any, graph: Any) -> None:
        self._module = module
        self._objects: dict[str, str] = {}  # name of a value that is a module -> path of that module
        self._kept: dict[str, Any] = {}  # path of an attribute -> its type
        self._set = set[str]()  # paths of attributes that get another value
        self._shares: dict[str, str] = {}  # value -> another that may share its memory; a forest
        self._written: list[tuple[str, str]] = []  # value that is written to, by which operator
        self._constants: list[str] = []
        self._unclear: list[str] = []
        self._forks = self._decides = False
        self._returned = {value.debugName() for value in graph.outputs()}
        self._objects[next(iter(graph.inputs())).debugName()] = ""
        for node in nodes_of(graph):
            self._see(node)

    def found(self) -> FileChanges:
        written = {self._root(name) for name, _ in self._written}
        # A tensor that is neither set nor written to is only read.
        kinds = {
            path: kind
            for path, kind in self._kept.items()
            if kind.kind() != "TensorType" or path in self._set or self._root(_place(path)) in written
        }
        in_place = tuple(path for path in kinds if self._root(_place(path)) in written)
        return FileChanges(
            kinds, in_place, tuple(self._unclear), tuple(self._shared_writes(kinds)), self._forks, self._decides
        )

    def _shared_writes(self, changed: Iterable[str]) -> Iterator[str]:
        """changed: paths of attributes"""
        constants = {self._root(name): name for name in self._constants}
        attributes: dict[str, list[str]] = {}
        for path in changed:
            attributes.setdefault(self._root(_place(path)), []).append(path)
        for name, operator in self._written:
            root = self._root(name)
            if root in constants:
                called = constants[root].removeprefix("self.")
                yield f"forward writes to '{called}' of the module in place ({operator}), where it cannot be kept"
            if len(together := attributes.get(root, ())) > 1:
                names = " and ".join(f"'{path}'" for path in together)
                yield f"forward writes in place ({operator}) to memory that {names} may share"

    # --- one node

    def _see(self, node: Any) -> None:
        inputs, outputs = list(node.inputs()), list(node.outputs())
        self._forks |= node.kind() in ("prim::fork", "prim::CallMethod")
        match node.kind():
            case "prim::GetAttr" if (owner := self._objects.get(inputs[0].debugName())) is not None:
                self._see_read(_joined(owner, node.s("name")), outputs[0])
            case "prim::SetAttr" if (owner := self._objects.get(inputs[0].debugName())) is not None:
                path = _joined(owner, node.s("name"))
                self._kept.setdefault(path, inputs[1].type())
                self._set.add(path)
                self._share(_place(path), inputs[1].debugName())
            case "prim::CallMethod":
                self._unclear.append(f"forward calls '{node.s('name')}' of an interface, whose effects cannot be told")
            case "prim::Constant":
                if has_tensors(outputs[0].type()):
                    self._constants.append(outputs[0].debugName())
            case kind:
                self._see_operator(node, kind, inputs, outputs)

    def _see_read(self, path: str, value: Any) -> None:
        if isinstance(_owner(self._module, path).getattr(path.rpartition(".")[2]), _SCRIPT_MODULE):
            self._objects[value.debugName()] = path
            return
        self._kept[path] = value.type()
        self._share(_place(path), value.debugName())

    def _see_operator(self, node: Any, kind: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """What the operator writes to, and which of its values may share memory."""
        if blocks := list(node.blocks()):
            # Branches and loops hand values on, each to the one at its place, counted from the last.
            columns = [inputs, *(list(part.inputs()) for block in blocks for part in (block, block.returnNode()))]
            for place, output in enumerate(reversed(outputs), start=1):
                self._share_all([output, *(column[-place] for column in columns if place <= len(column))])
            return
        if kind.endswith("Construct") and all(self._only_reads(use, outputs[0]) for use in outputs[0].uses()):
            return
        self._decides |= kind.rpartition("::")[2] in DECIDES and any(map(is_of_numbers, inputs))
        schema = schema_of(node)
        pairs = [] if schema is None else list(zip(schema.arguments, inputs, strict=False))
        moves_statistics = keeps_statistics(node)
        for argument, value in pairs:
            is_told = argument.alias_info is not None and argument.alias_info.is_write
            if (is_told and writes_memory(kind, value)) or (moves_statistics and argument.name in STATISTICS):
                self._written.append((value.debugName(), kind.removeprefix("aten::")))
        if schema is None or hands_on(node):
            self._share_all([*inputs, *outputs])
            return
        shared = [value for argument, value in pairs if argument.alias_info is not None]
        shared += [value for told, value in zip(schema.returns, outputs, strict=False) if told.alias_info is not None]
        self._share_all(shared)

    def _only_reads(self, use: Any, whole: Any) -> bool:
        """Whether no element of a list, tuple or dictionary comes out of it there: forward returns it, or an operator
        makes something new of it.
        """
        if use.user.kind() == "prim::Return":
            return whole.debugName() in self._returned
        schema = schema_of(use.user)
        arguments = () if schema is None or hands_on(use.user) else schema.arguments[use.offset : use.offset + 1]
        return any(argument.alias_info is None for argument in arguments)

    # --- memory that may be shared

    def _share_all(self, values: Sequence[Any]) -> None:
        names = [value.debugName() for value in values if has_tensors(value.type())]
        for name in names[1:]:
            self._share(names[0], name)

    def _share(self, one: str, other: str) -> None:
        self._shares[self._root(one)] = self._root(other)

    def _root(self, name: str) -> str:
        while (above := self._shares.get(name, name)) != name:
            name = above
        return name


_SCRIPT_MODULE = cast("Any", torch)._C.ScriptModule  # noqa: SLF001


def _owner(module: Any, path: str) -> Owner:
    for part in path.split(".")[:-1]:
        module = module.getattr(part)
    return module


def _attribute(owner: Owner, path: str, kind: Any) -> Attribute | None:
    """The attribute as it can be kept; None if its type cannot."""
    is_optional = kind.kind() == "OptionalType"
    if is_optional:
        (kind,) = kind.containedTypes()
    is_tuple = kind.kind() == "TupleType"
    parts = list(kind.containedTypes()) if is_tuple else [kind]
    names = [f"{path}.{index}" for index in range(len(parts))] if is_tuple else [path]
    leaves: list[Leaf] = []
    for name, part in zip(names, parts, strict=True):
        if part.kind() != "TensorType" and (part.kind() not in SCALARS or is_optional):
            return None
        leaves.append(Leaf(name, SCALARS.get(part.kind(), "")))
    return Attribute(owner, path.rpartition(".")[2], tuple(leaves), is_tuple) if leaves else None


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _place(path: str) -> str:
    """The name of an attribute among the values: one that no value has."""
    return f"attribute {path}"
