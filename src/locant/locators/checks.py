"""Reading the parts of a locator: strictly, and every refusal says what was asked and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, TypeGuard, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass as validated

from locant.errors import LocatorError, did_you_mean
from locant.locators.axes import ModelAxis, axis_of

T = TypeVar("T")
_SHOWN = 60
_MOST = 20_000_000


@dataclass(frozen=True, slots=True)
class Range:
    """``{range: [start, end]}``, both ends included; a negative end counts from the end of the axis."""

    start: int
    end: int


Constraint = int | Range | tuple[int | Range, ...]
"""What a filter's term allows on one axis: a value, a range, or any of a list of these."""

Cell = int | tuple[int, ...]
"""What a row holds on one axis: one value, or several that it reads together."""


@dataclass_transform(frozen_default=True)
def config(cls: type[T]) -> type[T]:
    """A frozen pydantic dataclass whose every refusal is a :class:`LocatorError`."""
    made: Any = validated(cls, frozen=True, config=ConfigDict(extra="forbid"))
    build = made.__init__

    @wraps(build)
    def __init__(self: object, *args: object, **kwargs: object) -> None:  # noqa: N807 - it becomes that method
        try:
            build(self, *args, **kwargs)
        except ValidationError as error:
            raise _refusal(made, error) from None

    made.__init__ = __init__
    return made


def shown(value: object) -> str:
    """A value for a message, not at any length."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Whether a value is a list as a config file has it, or a tuple."""
    return isinstance(value, (list, tuple))


def sequence(value: object, where: str) -> Sequence[object]:
    """A list or a tuple.

    Raises:
        LocatorError: it is something else.
    """
    if not is_list(value):
        raise LocatorError(f"{where}: {shown(value)} is no list", "it is a list", f"write [{shown(value)}]")
    return value


def integer(value: object, where: str) -> int:
    """An ``int`` and nothing that only looks like one: no bool, no float, no string.

    Raises:
        LocatorError: it is something else.
    """
    if type(value) is not int:
        raise LocatorError(f"{where}: {shown(value)} is of type {type(value).__name__}", "a value on an axis is an int")
    return value


def integers(value: object, where: str) -> tuple[int, ...]:
    """A list of different ints, at least one.

    Raises:
        LocatorError: it is something else.
    """
    found = tuple(integer(item, where) for item in sequence(value, where))
    _check_items(found, where)
    return found


def cell(value: object, where: str) -> Cell:
    """An int, or a list of ints to read together.

    Raises:
        LocatorError: it is neither.
    """
    return integers(value, where) if is_list(value) else integer(value, where)


def constraint(value: object, where: str) -> Constraint:
    """What a term allows on one axis.

    Raises:
        LocatorError: it is no int, ``{range: [start, end]}`` or list of these.
    """
    if is_list(value):
        found = tuple(_span(item, where) for item in value)
        _check_items(found, where)
        return found
    return _span(value, where)


def axis_mapping(value: object, where: str, read: Callable[[object, str], T]) -> dict[ModelAxis, T]:
    """A mapping from axes to what `read` makes of each value.

    Raises:
        LocatorError: it is no mapping, or has a key that is no axis.
    """
    if not isinstance(value, Mapping):
        raise LocatorError(f"{where}: {shown(value)} is no mapping", "it maps axes to values, e.g. {layer: 5}")
    entries = cast("Mapping[object, object]", value)
    axes = [axis_of(key, where) for key in entries]
    if ModelAxis.ACTIVATION in axes:
        raise LocatorError(f"{where}: activation is no axis", instead="name it beside location, or in coordinates")
    return {axis: read(item, f"{where}, {axis}") for axis, item in zip(axes, entries.values(), strict=True)}


def fields_of(value: object, where: str) -> dict[str, Any]:
    """The fields of a class, as a config file writes them.

    Raises:
        LocatorError: it is no mapping, or a key is no name.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise LocatorError(f"{where}: {shown(value)} is no mapping of names", f"a {where} is a mapping of its fields")
    return dict(cast("Mapping[str, Any]", value))


def plain(value: Constraint) -> object:
    """A constraint or a cell as a config file writes it."""
    if isinstance(value, Range):
        return {"range": [value.start, value.end]}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def _span(value: object, where: str) -> int | Range:
    if isinstance(value, Range):
        value = plain(value)
    if not isinstance(value, Mapping):
        if is_list(value):
            raise LocatorError(f"{where}: {shown(value)} is a list inside a list", "a list holds ints and ranges")
        return integer(value, where)
    entries = cast("Mapping[object, object]", value)
    if list(entries) != ["range"]:
        raise LocatorError(
            f"{where}: {shown(value)} is no constraint", "allowed: an int, {range: [start, end]}, or a list of these"
        )
    ends = entries["range"]
    if not is_list(ends) or len(ends) != 2:
        raise LocatorError(f"{where}: range {shown(ends)}", "a range is [start, end], both included")
    start, end = (integer(item, f"{where}, range") for item in ends)
    if start > end and (start < 0) == (end < 0):
        raise reversed_range(Range(start, end), where)
    return Range(start, end)


def check_count(count: int, where: str) -> None:
    """Refuse more rows, or more values on an axis, than a machine holds."""
    if count > _MOST:
        raise LocatorError(
            f"{where}: {count:,} rows, and {_MOST:,} are the most",
            "an index holds every row",
            "filter the axes, or set max_elements",
        )


def reversed_range(span: Range, where: str) -> LocatorError:
    """The refusal of a range that selects nothing."""
    return LocatorError(
        f"{where}: the range [{span.start}, {span.end}] selects nothing",
        "a range is [start, end], both included, its start before its end",
    )


def _check_items(items: Sequence[object], where: str) -> None:
    if not items:
        raise LocatorError(f"{where}: the list is empty", "a list holds at least one value")
    if len(set(items)) < len(items):
        twice = next(item for i, item in enumerate(items) if item in items[:i])
        raise LocatorError(f"{where}: {shown(twice)} is listed twice", "each value counts once", "leave one out")


def _refusal(cls: Any, error: ValidationError) -> LocatorError:
    """Pydantic's first complaint, as one of ours."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, LocatorError):
        return cause
    names = [field.name for field in fields(cls)]
    field = str(first["loc"][0]) if first["loc"] else ""
    if field in names:
        return LocatorError(f"{field} {shown(first['input'])}: {first['msg']}")
    return LocatorError(
        f"{cls.__name__} has no field {field!r}", f"its fields are {', '.join(names)}", did_you_mean(field, names)
    )
