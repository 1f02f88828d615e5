"""Finds what a module's forward changes in the module itself: buffers and other attributes.

Such an attribute is the module's memory of what it saw. The module has one of it, so two sequences would share it. The
mesh keeps one value per sequence instead (`kept_state`), and must therefore know every attribute that changes.

TorchScript tells by its code: torch's own pass `freeze` turns every attribute that forward does not change into a
constant, and what stays is what forward may change. The pass does not follow tensors inside of a list: for it such a
tensor may be any other one. So the frozen code is looked at again. A tensor that is neither set nor written to, by
whatever name, does not change (a table by which another tensor is indexed). A write to a constant, or to memory that
two attributes may share, is a change that cannot be kept apart. An exported program lists the buffers that it changes.

A traced module (`torch.jit.trace`) lost its assignments (`self.hidden = ...`) when it was traced: nothing can find
them. Changes in place (`self.hidden.copy_(...)`) are kept by a trace.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor

from executor.engine.pytorch.signature import placeholders

SCALARS: Mapping[str, str] = {"IntType": "INT64", "FloatType": "FP64", "BoolType": "BOOL"}
"""Plain numbers that can be kept as tensors of one element."""


class Owner(Protocol):
    """The module that has an attribute."""

    def getattr(self, name: str) -> Any: ...
    def setattr(self, name: str, value: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor, or one number, of an attribute: the unit that is kept.

    name    the attribute's path; of a tuple, with the position behind it
    scalar  the datatype of a plain number; "" for a tensor
    """

    name: str
    scalar: str = ""


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute that forward changes.

    leaves    what it consists of
    is_tuple  whether the value is a tuple, even of one leaf
    """

    owner: Owner
    name: str
    leaves: tuple[Leaf, ...]
    is_tuple: bool = False

    def read(self) -> list[Any]:
        """The leaves' values; each is None if the attribute is."""
        value = self.owner.getattr(self.name)
        if value is None:
            return [None] * len(self.leaves)
        return list(value) if self.is_tuple else [value]

    def write(self, values: Sequence[Any]) -> None:
        """Sets the leaves' values: all of them are None, or none is."""
        missing = any(value is None for value in values)
        whole = tuple(values) if self.is_tuple else values[0]
        self.owner.setattr(self.name, None if missing else whole)


@dataclass(frozen=True, slots=True)
class Changes:
    """What forward changes.

    problems  changes that cannot be kept apart, each one a sentence that names it
    decides   it makes a number of a tensor, by which it chooses what to compute: one for all rows of a call
    """

    attributes: tuple[Attribute, ...] = ()
    problems: tuple[str, ...] = ()
    decides: bool = False

    @property
    def leaves(self) -> list[Leaf]:
        """All that changes, leaf by leaf."""
        return [leaf for attribute in self.attributes for leaf in attribute.leaves]

    def read(self) -> list[tuple[Leaf, Any]]:
        """Each leaf with its present value (`Attribute.read`)."""
        return [(leaf, value) for each in self.attributes for leaf, value in zip(each.leaves, each.read(), strict=True)]


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
        if all(map(_may_part, _nodes(graph))):
            passes._jit_pass_lower_all_tuples(graph)  # noqa: SLF001
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "the code could not be followed"
        return FileChanges({}, problems=(_untold(reason),), forks=True)
    return _Reading(inner, graph).found()


def _untold(reason: str) -> str:
    """The problem of a module of which it is not known what it changes."""
    return f"what forward changes in the module cannot be told: {reason}"


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
    decides = any(str(node.target).split(".")[0] in _DECIDES for node in program.graph.nodes)
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
        for node in _nodes(graph):
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
                if _has_tensors(outputs[0].type()):
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
        self._decides |= kind.rpartition("::")[2] in _DECIDES and any(map(_is_of_numbers, inputs))
        schema = _schema(node)
        pairs = [] if schema is None else list(zip(schema.arguments, inputs, strict=False))
        keeps_statistics = _keeps_statistics(node)
        for argument, value in pairs:
            is_told = argument.alias_info is not None and argument.alias_info.is_write
            if (is_told and _writes_memory(kind, value)) or (keeps_statistics and argument.name in _STATISTICS):
                self._written.append((value.debugName(), kind.removeprefix("aten::")))
        if schema is None or _hands_on(node):
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
        schema = _schema(use.user)
        arguments = () if schema is None or _hands_on(use.user) else schema.arguments[use.offset : use.offset + 1]
        return any(argument.alias_info is None for argument in arguments)

    # --- memory that may be shared

    def _share_all(self, values: Sequence[Any]) -> None:
        names = [value.debugName() for value in values if _has_tensors(value.type())]
        for name in names[1:]:
            self._share(names[0], name)

    def _share(self, one: str, other: str) -> None:
        self._shares[self._root(one)] = self._root(other)

    def _root(self, name: str) -> str:
        while (above := self._shares.get(name, name)) != name:
            name = above
        return name


_SCRIPT_MODULE = cast("Any", torch)._C.ScriptModule  # noqa: SLF001


def _may_part(node: Any) -> bool:
    """Whether torch can put the elements of a node's tuples into their place. It says so where it cannot. It also drops
    code without results, as far as it knows: not a write of which it does not know.
    """
    if node.kind().removeprefix("aten::") in _HANDS_ON or _keeps_statistics(node):
        return False
    parts = ("prim::TupleConstruct", "prim::TupleUnpack", "prim::TupleIndex", "prim::If", "prim::Loop")
    values = (*node.inputs(), *node.outputs())
    return node.kind() in parts or not any(
        value.type().kind() == "TupleType" and _has_tensors(value.type()) for value in values
    )


def _nodes(graph: Any) -> Iterator[Any]:
    """Every node of a graph, in order, those of branches and loops behind the node that has them."""
    for node in graph.nodes():
        yield node
        for block in node.blocks():
            yield from _nodes(block)
        if node.hasAttribute("Subgraph"):
            yield from _nodes(node.g("Subgraph"))


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


def _schema(node: Any) -> Any:
    text = node.schema()
    is_told = text and text != "(no schema)" and not node.kind().startswith("prim::")
    return cast("Any", torch)._C.parse_schema(text) if is_told else None  # noqa: SLF001


def _hands_on(node: Any) -> bool:
    """Whether an operator may hand its arguments on, of which its schema does not tell: those that return a container
    of tensors, or take a tensor out of one, and a few more.
    """
    schema = _schema(node)
    takes_out = schema is not None and any(
        told.alias_info and "*" in told.alias_info.after_set for told in schema.returns
    )
    hands_on = takes_out or node.kind().removeprefix("aten::") in _HANDS_ON
    return hands_on or any(_has_tensors(value.type()) and not _is_tensor(value) for value in node.outputs())


_HANDS_ON = (
    *("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "native_dropout"),
    *("type_as", "atleast_1d", "atleast_2d", "atleast_3d", "sum_to_size", "to_dense", "lift", "conj_physical"),
    *("einsum", "cartesian_prod", "chain_matmul", "wait"),
)
"""Operators that return their argument itself where nothing is to be done, though torch tells of no such thing."""

_DECIDES = (
    *("Bool", "Int", "Float", "IntImplicit", "FloatImplicit", "ScalarImplicit", "is_nonzero", "tolist"),
    *("item", "equal", "allclose", "cond", "while_loop"),
)
"""Operators that make a number of a tensor, or choose what to compute by one."""


def _is_of_numbers(value: Any) -> bool:
    """Whether a tensor comes from others than constants and sizes, which a trace has as tensors, too."""
    seen = set[str]()
    left = [value] if _is_tensor(value) else []
    while left:
        value = left.pop()
        node, name = value.node(), value.debugName()
        if name in seen or node.kind() in ("prim::Constant", "prim::NumToTensor"):
            continue
        seen.add(name)
        before = [each for each in node.inputs() if _has_tensors(each.type())]
        if not before:
            return True
        left += before
    return False


_STATISTICS = ("running_mean", "running_var")


def _keeps_statistics(node: Any) -> bool:
    """Whether a normalisation moves its running statistics, of which its schema does not tell."""
    schema = _schema(node)
    pairs = () if schema is None else zip(schema.arguments, node.inputs(), strict=False)
    return any(
        argument.name in ("training", "train", "use_input_stats")
        and not (value.node().kind() == "prim::Constant" and value.toIValue() is False)
        for argument, value in pairs
    )


def _writes_memory(operator: str, value: Any) -> bool:
    """Whether a write goes to a tensor's memory. Others change a list or a dict, which is no tensor."""
    return _is_tensor(value) or operator.startswith("aten::_foreach")


def _is_tensor(value: Any) -> bool:
    return value.type().kind() == "TensorType"


def _has_tensors(kind: Any) -> bool:
    return kind.kind() == "TensorType" or any(_has_tensors(inner) for inner in kind.containedTypes())


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _place(path: str) -> str:
    """The name of an attribute among the values: one that no value has."""
    return f"attribute {path}"
