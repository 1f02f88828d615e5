"""What was written in the first format of this schema is read for ever, and what is written now was readable then.

How to add a field stands in docs/contributing.md, "Changing what services write for each other".
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, cast, get_args

import msgspec
import pytest

from shared.contract import messages, tensors
from shared.contract import model_config as values
from shared.statistics import reports
from shared.store import company
from shared.store.release import REVISION
from tests.shared.format_samples import ADDED, SAMPLES, recorded

NAMES = sorted(SAMPLES)
READ = get_args(messages.InboxEntry)


def test_every_sample_is_recorded() -> None:
    assert NAMES == sorted(recorded())


@pytest.mark.parametrize("name", NAMES)
def test_what_the_first_format_says_is_read_as_it_was(name: str) -> None:
    assert SAMPLES[name].value == SAMPLES[name].read(recorded()[name])


@pytest.mark.parametrize("name", NAMES)
def test_readers_of_the_first_format_find_everything_where_it_was(name: str) -> None:
    """Arrays have become longer at their ends, and maps have more names: nothing else."""
    before, now = plain(recorded()[name]), plain(SAMPLES[name].write())

    assert [] == list(differences(before, now))


def test_every_field_of_every_message_is_in_a_sample_or_has_its_revision() -> None:
    """A field that is said nowhere could change its meaning, and no test would see it."""
    known = {f"{struct.__name__}.{name}" for struct in structs() for name in struct.__struct_fields__}
    said = {found for sample in SAMPLES.values() for found in said_fields(sample.value)}

    assert known - set(ADDED) == said & known
    assert set() == set(ADDED) - known
    assert max(ADDED.values(), default=0) == REVISION


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        ([1, [2], 9], ""),
        ([1, [2, 3]], ""),
        ([1], "1 of 2 elements are left"),
        ([1, [5]], "2 has become 5"),
        ([[2], 1], "1 has become [2]"),
        ([1, {"a": 2}], "[2] has become {'a': 2}"),
    ],
)
def test_the_comparison_sees_what_older_readers_could_not_read(now: Any, problem: str) -> None:
    assert [problem] if problem else [] == list(differences([1, [2]], now))[:1]


def plain(data: bytes) -> Any:
    """The value, without the classes."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return msgspec.msgpack.decode(data)


def differences(before: Any, now: Any) -> Iterator[str]:
    """What a reader of the value before would not find in the one now."""
    if isinstance(before, list) and isinstance(now, list):
        old, new = cast("list[Any]", before), cast("list[Any]", now)
        if len(new) < len(old):
            yield f"{len(new)} of {len(old)} elements are left"
        for one, other in zip(old, new, strict=False):
            yield from differences(one, other)
    elif isinstance(before, dict) and isinstance(now, dict):
        for name, value in cast("dict[Any, Any]", before).items():
            if name not in now:
                yield f"{name} is gone"
            else:
                yield from differences(value, now[name])
    elif isinstance(before, bytes) and isinstance(now, bytes) and before != now:
        yield from differences(plain(before), plain(now))
    elif before != now:
        yield f"{before} has become {now}"


def structs() -> list[type[msgspec.Struct]]:
    """Everything that travels as it is. What an inbox brings is made from the fields of its entries."""
    found: list[type[msgspec.Struct]] = []
    for module in (messages, tensors, values, reports, company):
        for _, member in inspect.getmembers(module, inspect.isclass):
            if issubclass(member, msgspec.Struct) and member.__module__ == module.__name__ and member not in READ:
                found.append(member)
    return found


def said_fields(value: Any) -> Iterator[str]:
    """`Class.field` of every field in a value that does not have its default."""
    if isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            inner = getattr(value, field.name)
            if inner != field.default:
                yield f"{type(value).__name__}.{field.name}"
            yield from said_fields(inner)
    elif isinstance(value, dict):
        for inner in cast("dict[Any, Any]", value).values():
            yield from said_fields(inner)
    elif isinstance(value, list | tuple):
        for inner in cast("Sequence[Any]", value):
            yield from said_fields(inner)
