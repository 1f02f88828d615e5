"""What a graph does with variables when it is asked for its outputs: which ones it reads, and whether it writes.

A sequence model that writes keeps state where the mesh cannot see it: all of its sequences share it, and a takeover
loses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_WRITES = re.compile(
    r"Assign(Add|Sub)?(VariableOp)?|Resource(Scatter|Apply|Sparse|StridedSliceAssign).*|LookupTableInsert.*"
    r"|Scatter(Nd)?(Update|Add|Sub)|Scatter(Mul|Div|Min|Max)|CountUpTo|ResourceCountUpTo"
)


def written_variable(graph: Any, fetches: Iterable[str]) -> str:
    """The first operation that writes, and its node; "" if there is none.

    graph    a GraphDef
    fetches  names of tensors (`node:0`)
    """
    functions: Mapping[str, Any] = {function.signature.name: function for function in graph.library.function}
    waiting, called = _needed(graph, fetches), set[str]()
    while waiting:
        node = waiting.pop()
        if _WRITES.fullmatch(node.op):
            return f"{node.op} '{node.name}'"
        for name in _functions(node).intersection(functions) - called:
            called.add(name)
            # In a function every node counts: it has an effect, or it would not have been kept.
            waiting += functions[name].node_def
    return ""


def variables_read(graph: Any, fetches: Iterable[str]) -> list[str]:
    """The names of the nodes that are variables, of those from which the fetched tensors are made."""
    return [node.name for node in _needed(graph, fetches) if node.op == "VarHandleOp"]


def _needed(graph: Any, fetches: Iterable[str]) -> list[Any]:
    """The graph's own nodes from which the fetched tensors are made."""
    nodes: Mapping[str, Any] = {node.name: node for node in graph.node}
    waiting = [_node(name) for name in fetches]
    needed: dict[str, Any] = {}
    while waiting:
        if (name := waiting.pop()) not in needed:
            needed[name] = nodes[name]
            waiting += map(_node, nodes[name].input)
    return list(needed.values())


def _node(tensor: str) -> str:
    return tensor.removeprefix("^").partition(":")[0]


def _functions(node: Any) -> set[str]:
    """Names of the functions that a node calls; its operation's among them."""
    names = {node.op}
    for value in node.attr.values():
        names.add(value.func.name)
        names.update(function.name for function in value.list.func)
    return names
