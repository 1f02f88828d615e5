"""What a module's forward changes in the module itself: buffers and other attributes.

Such an attribute is the module's memory of what it saw. The module has one of it, so two sequences would share it. The
mesh keeps one value per sequence instead (`kept_state`), and must therefore know every attribute that changes:
`script_changes` finds those of TorchScript, `program_changes` those of an exported program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

DECIDES = (
    *("Bool", "Int", "Float", "IntImplicit", "FloatImplicit", "ScalarImplicit", "is_nonzero", "tolist"),
    *("item", "equal", "allclose", "cond", "while_loop"),
)
"""Operators that make a number of a tensor, or choose what to compute by one."""


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
