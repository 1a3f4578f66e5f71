"""The parts of a locator: the filter, the three transforms, and explicit coordinates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, cast

from pydantic import Field, PlainValidator

from locant.errors import LocatorError
from locant.locators.axes import ModelAxis, ModelLayerLocation, activation_of, axis_of, place_of
from locant.locators.checks import (
    Cell,
    Constraint,
    axis_mapping,
    cell,
    config,
    constraint,
    integer,
    integers,
    plain,
    sequence,
    shown,
)

_NOT = "not"


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a filter.

    Attributes:
        allowed: what each axis it names may hold; a row matches if every one holds that.
        negated: the rows that match are dropped instead of kept.
    """

    allowed: Mapping[ModelAxis, Constraint]
    negated: bool = False


def _terms(value: object) -> tuple[Term, ...]:
    return tuple(_term(item, f"filter, term {i}") for i, item in enumerate(sequence(value, "filter"), 1))


def _term(value: object, where: str) -> Term:
    if isinstance(value, Term):
        return Term(axis_mapping(value.allowed, where, constraint), value.negated)
    negated = isinstance(value, Mapping) and list(cast("Mapping[object, object]", value)) == [_NOT]
    body = cast("Mapping[object, object]", value)[_NOT] if negated else value
    if isinstance(body, Mapping) and _NOT in body:
        raise LocatorError(f"{where}: {shown(value)}", "not is the only key of its term", "give it a term of its own")
    allowed = axis_mapping(body, where, constraint)
    if not allowed:
        raise LocatorError(f"{where}: it is empty", "a term names at least one axis", "leave it out")
    return Term(allowed, negated)


def _all_or_integers(value: object, where: str) -> tuple[int, ...] | Literal["all"]:
    if value == "all":
        return "all"
    if isinstance(value, str):
        raise LocatorError(f"{where}: {value!r}", "allowed: a list of values, or all")
    return integers(value, where)


def axes_in(value: object, where: str) -> tuple[ModelAxis, ...]:
    """Different axes, in order.

    Raises:
        LocatorError: one is none, or is listed twice.
    """
    axes = tuple(axis_of(item, where) for item in sequence(value, where))
    for i, axis in enumerate(axes):
        if axis is ModelAxis.ACTIVATION:
            raise LocatorError(f"{where}: activation is no axis", instead="give it a field of its own")
        if axis in axes[:i]:
            raise LocatorError(f"{where}: {axis} is listed twice", instead="leave one out")
    return axes


def _maximum(value: object) -> int | None:
    if value is not None and integer(value, "combination, max_elements") < 1:
        raise LocatorError(f"combination, max_elements: {value}", "a row reads at least one value")
    return cast("int | None", value)


Coordinate = Mapping[ModelAxis, Cell | ModelLayerLocation | str]
"""One explicit row: its value on each axis, and under ``ModelAxis.ACTIVATION`` perhaps what it reads."""


def _coordinates(value: object) -> tuple[Coordinate, ...]:
    rows = tuple(_coordinate(item, f"coordinate {i}") for i, item in enumerate(sequence(value, "coordinates"), 1))
    if not rows:
        raise LocatorError("coordinates: the list is empty", "it holds at least one row")
    first = named(rows[0])
    own = ModelAxis.ACTIVATION in first
    for i, row in enumerate(rows, 1):
        if (own or row.keys() != rows[0].keys()) and named(row) != first:
            raise LocatorError(
                f"coordinate {i} names {', '.join(sorted(named(row)))}",
                f"the first one names {', '.join(sorted(first))}",
                "every coordinate names the same axes; an axis to be read whole is named by none of them",
            )
    return rows


def _coordinate(value: object, where: str) -> Coordinate:
    if not isinstance(value, Mapping):
        raise LocatorError(f"{where}: {shown(value)} is no mapping", "it maps axes to values, e.g. {layer: 5}")
    entries = cast("Mapping[object, object]", value)
    row: dict[ModelAxis, Cell | ModelLayerLocation | str] = {}
    for key, item in entries.items():
        axis = axis_of(key, where)
        row[axis] = activation_of(item) if axis is ModelAxis.ACTIVATION else cell(item, f"{where}, {axis}")
    if not row:
        raise LocatorError(f"{where}: it is empty", "a coordinate names at least one axis")
    return row


def named(row: Coordinate) -> set[ModelAxis]:
    """The axes a coordinate has a value on, by itself or by the address it reads; and whether it says what it reads."""
    said = row.get(ModelAxis.ACTIVATION)
    given = place_of(said).given if isinstance(said, str) else {}
    return {*row, *given}


@config
class Filter:
    """Which rows of the grid are kept: those that match any term, minus those that a ``{not: ...}`` term matches.

    Raises:
        LocatorError: a term or one of its constraints is none.
    """

    terms: Annotated[tuple[Term, ...], PlainValidator(_terms)] = ()

    @classmethod
    def from_config(cls, terms: Sequence[Mapping[str | ModelAxis, object]]) -> Filter:
        """A filter from its terms as a config file has them, e.g. ``[{"layer": {"range": [0, 5]}}]``."""
        return cls(cast("tuple[Term, ...]", terms))

    def to_config(self) -> list[dict[str, object]]:
        """What :meth:`from_config` reads."""
        bodies = [({a.value: plain(c) for a, c in term.allowed.items()}, term.negated) for term in self.terms]
        return [{_NOT: body} if negated else dict[str, object](body) for body, negated in bodies]


@config
class Group:
    """Values of an axis to merge into one row, or ``"all"``; the axes are merged in this order.

    Raises:
        LocatorError: an axis or a list of values is none.
    """

    values: Annotated[
        Mapping[ModelAxis, Sequence[int] | Literal["all"]],
        PlainValidator(lambda value: axis_mapping(value, "group", _all_or_integers)),
    ] = Field(default_factory=dict)


@config
class Incremental:
    """Values to add one after the other to every row, each prefix of them making a row of its own.

    Raises:
        LocatorError: an axis or a list of values is none.
    """

    values: Annotated[
        Mapping[ModelAxis, Sequence[int]], PlainValidator(lambda value: axis_mapping(value, "incremental", integers))
    ] = Field(default_factory=dict)


@config
class Combination:
    """Axes on which every row becomes one row per combination of its values.

    Args:
        location: the axes, expanded in this order.
        max_elements: the most values a combination has; ``None`` for as many as the row has.

    Raises:
        LocatorError: an axis is none, or `max_elements` is below 1.
    """

    location: Annotated[Sequence[ModelAxis], PlainValidator(lambda value: axes_in(value, "combination, location"))] = ()
    max_elements: Annotated[int | None, PlainValidator(_maximum)] = None

    def to_config(self) -> dict[str, object]:
        """What a config file writes."""
        made = {"location": [axis.value for axis in self.location], "max_elements": self.max_elements}
        return {name: value for name, value in made.items() if value}


@config
class Coordinates:
    """The rows themselves, in order: each a mapping from axis to a value or a list of values to read together.

    Raises:
        LocatorError: a row is none, or names other axes than the first.
    """

    rows: Annotated[Sequence[Mapping[ModelAxis, Cell | ModelLayerLocation | str]], PlainValidator(_coordinates)]

    def to_config(self) -> list[dict[str, object]]:
        """What a config file writes."""
        return [{a.value: str(c) if isinstance(c, str) else plain(c) for a, c in row.items()} for row in self.rows]
