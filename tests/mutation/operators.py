"""What is changed in the code: Cosmic Ray's operators that make realistic faults, and a few that it lacks.

Its own cover comparisons, arithmetic, booleans, numbers and loops. Ours are the faults that people make beside those:
an effect that is left out, two effects in the wrong order, a condition or one of its parts that is not asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import cosmic_ray.operators.operator
import cosmic_ray.operators.provider
from parso.python.tree import Name

# Neither Cosmic Ray nor its trees have types that say what they are.
Operator: Any = cosmic_ray.operators.operator.Operator
OperatorProvider: Any = cosmic_ray.operators.provider.OperatorProvider

Position = tuple[tuple[int, int], tuple[int, int]]

CORE = (
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Eq_NotEq", "NotEq_Eq")),
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Is_IsNot", "IsNot_Is")),
    *(f"ReplaceBinaryOperator_{pair}" for pair in ("Add_Sub", "Sub_Add", "Mul_FloorDiv", "FloorDiv_Mul", "Div_Mul")),
    *("ReplaceAndWithOr", "ReplaceOrWithAnd", "AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
    *("ReplaceUnaryOperator_Delete_Not", "NumberReplacer", "ZeroIterationForLoop", "ReplaceBreakWithContinue"),
    "ReplaceContinueWithBreak",
)
"""Of Cosmic Ray's operators. Left out is what hardly anybody does by mistake: `x << y` for `x + y`."""

COUNTERPARTS = {"all": "any", "any": "all", "min": "max", "max": "min"}
CHAINS = {"and_test", "or_test", "arith_expr"}


class Exchange(Operator):
    """The base of ours: some nodes, and the texts that may stand in the place of each."""

    def texts(self, node: Any) -> Sequence[str]:
        """What may stand there instead."""
        raise NotImplementedError

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        for _ in self.texts(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        # A leaf whose text is any code: the tree is written out next, and is not looked at any more.
        return Name(self.texts(node)[index], node.start_pos, node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> Sequence[Any]:
        return ()


class Counterpart(Exchange):
    """`all` for `any`, `min` for `max`."""

    def texts(self, node: Any) -> Sequence[str]:
        if node.type != "name" or node.value not in COUNTERPARTS or node.parent.type not in ("atom_expr", "power"):
            return []
        return [COUNTERPARTS[node.value]] if node.parent.children[0] is node else []


class DropOperand(Exchange):
    """One part of `a and b`, `a or b`, `a - b` less."""

    def texts(self, node: Any) -> Sequence[str]:
        if node.type not in CHAINS:
            return []
        parts = [_code(child) for child in node.children]
        without_first = parts[2:]
        return [
            " ".join(without_first),
            *(" ".join(parts[: at - 1] + parts[at + 1 :]) for at in range(2, len(parts), 2)),
        ]


class ForceCondition(Exchange):
    """A condition that is not asked: always so, or never."""

    def texts(self, node: Any) -> Sequence[str]:
        parent = node.parent
        is_condition = parent is not None and parent.type == "if_stmt" and node in _conditions(parent)
        return ["True", "False"] if is_condition else []


class DropEffect(Exchange):
    """A call or an assignment less."""

    def texts(self, node: Any) -> Sequence[str]:
        return ["pass\n"] if _is_effect(node) else []


class SwapEffects(Exchange):
    """An effect and the next one in the other order."""

    def texts(self, node: Any) -> Sequence[str]:
        siblings: list[Any] = node.parent.children if _is_effect(node) else []
        pair = siblings[siblings.index(node) :][:2] if siblings else []
        if len(pair) < 2 or not _is_effect(pair[1]) or not any(_is_call(one.children[0]) for one in pair):
            return []
        return [f"{_code(pair[1])}\n"]

    def mutate(self, node: Any, index: int) -> Any:
        siblings = node.parent.children
        after = siblings.index(node) + 1
        second = super().mutate(node, index)
        first = Name(f"{_code(node)}\n", node.start_pos, siblings[after].get_first_leaf().prefix)
        siblings[after] = first
        return second


def operators() -> dict[str, Any]:
    """All operators, by name."""
    core, ours = OperatorProvider(), (Counterpart, DropOperand, ForceCondition, DropEffect, SwapEffects)
    return {name: core[name]() for name in CORE} | {kind.__name__: kind() for kind in ours}


def _code(node: Any) -> str:
    return str(node.get_code(include_prefix=False)).rstrip("\n")


def _conditions(statement: Any) -> Sequence[Any]:
    """Of an `if` with its `elif`s."""
    return [
        statement.children[at + 1]
        for at, child in enumerate(statement.children)
        if getattr(child, "value", "") in ("if", "elif")
    ]


def _is_effect(node: Any) -> bool:
    """Whether a line is a call (not of the log), or changes or deletes something that is not a name of its function."""
    if node.type != "simple_stmt" or node.parent.type != "suite":
        return False
    statement = node.children[0]
    if statement.type == "expr_stmt":
        target, operator = statement.children[:2]
        return target.type in ("atom_expr", "power") or getattr(operator, "value", "=") != "="
    return statement.type == "del_stmt" or (_is_call(statement) and not _code(statement).startswith("logs."))


def _is_call(statement: Any) -> bool:
    return statement.type in ("atom_expr", "power") and _code(statement).endswith(")")
