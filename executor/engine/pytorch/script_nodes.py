"""Answers questions about one node of a TorchScript module's code: what it writes to, hands on, and decides by.

Its operator's schema tells most of it. What schemas do not tell stands here, operator by operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch

_HANDS_ON = (
    *("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "native_dropout"),
    *("type_as", "atleast_1d", "atleast_2d", "atleast_3d", "sum_to_size", "to_dense", "lift", "conj_physical"),
    *("einsum", "cartesian_prod", "chain_matmul", "wait"),
)
"""Operators that return their argument itself where nothing is to be done, though torch tells of no such thing."""

STATISTICS = ("running_mean", "running_var")


def nodes_of(graph: Any) -> Iterator[Any]:
    """Every node of a graph, in order, those of branches and loops behind the node that has them."""
    for node in graph.nodes():
        yield node
        for block in node.blocks():
            yield from nodes_of(block)
        if node.hasAttribute("Subgraph"):
            yield from nodes_of(node.g("Subgraph"))


def may_part(node: Any) -> bool:
    """Whether torch can put the elements of a node's tuples into their place. It says so where it cannot. It also drops
    code without results, as far as it knows: not a write of which it does not know.
    """
    if node.kind().removeprefix("aten::") in _HANDS_ON or keeps_statistics(node):
        return False
    parts = ("prim::TupleConstruct", "prim::TupleUnpack", "prim::TupleIndex", "prim::If", "prim::Loop")
    values = (*node.inputs(), *node.outputs())
    return node.kind() in parts or not any(
        value.type().kind() == "TupleType" and has_tensors(value.type()) for value in values
    )


def schema_of(node: Any) -> Any:
    text = node.schema()
    is_told = text and text != "(no schema)" and not node.kind().startswith("prim::")
    return cast("Any", torch)._C.parse_schema(text) if is_told else None  # noqa: SLF001


def hands_on(node: Any) -> bool:
    """Whether an operator may hand its arguments on, of which its schema does not tell: those that return a container
    of tensors, or take a tensor out of one, and a few more.
    """
    schema = schema_of(node)
    takes_out = schema is not None and any(
        told.alias_info and "*" in told.alias_info.after_set for told in schema.returns
    )
    is_known = takes_out or node.kind().removeprefix("aten::") in _HANDS_ON
    return is_known or any(has_tensors(value.type()) and not _is_tensor(value) for value in node.outputs())


def is_of_numbers(value: Any) -> bool:
    """Whether a tensor comes from others than constants and sizes, which a trace has as tensors, too."""
    seen = set[str]()
    left = [value] if _is_tensor(value) else []
    while left:
        value = left.pop()
        node, name = value.node(), value.debugName()
        if name in seen or node.kind() in ("prim::Constant", "prim::NumToTensor"):
            continue
        seen.add(name)
        before = [each for each in node.inputs() if has_tensors(each.type())]
        if not before:
            return True
        left += before
    return False


def keeps_statistics(node: Any) -> bool:
    """Whether a normalisation moves its running statistics, of which its schema does not tell."""
    schema = schema_of(node)
    pairs = () if schema is None else zip(schema.arguments, node.inputs(), strict=False)
    return any(
        argument.name in ("training", "train", "use_input_stats")
        and not (value.node().kind() == "prim::Constant" and value.toIValue() is False)
        for argument, value in pairs
    )


def writes_memory(operator: str, value: Any) -> bool:
    """Whether a write goes to a tensor's memory. Others change a list or a dict, which is no tensor."""
    return _is_tensor(value) or operator.startswith("aten::_foreach")


def _is_tensor(value: Any) -> bool:
    return value.type().kind() == "TensorType"


def has_tensors(kind: Any) -> bool:
    return kind.kind() == "TensorType" or any(has_tensors(inner) for inner in kind.containedTypes())
