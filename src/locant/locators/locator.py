"""ModelLocatorConfig: a locator as it is written, in Python or in a config file, checked as far as it alone can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Self, cast

from pydantic import PlainValidator

from locant.errors import LocatorError
from locant.locators.axes import ModelAxis, ModelLayerLocation, Place, activation_of, place_of
from locant.locators.checks import config, fields_of, plain, shown
from locant.locators.parts import Combination, Coordinates, Filter, Group, Incremental, axes_in

if TYPE_CHECKING:
    from locant.locators.parsed import Locatable, ParsedLocator


def _activation(value: object) -> ModelLayerLocation | str | None:
    return None if value is None else activation_of(value)


def _location(value: object) -> tuple[ModelAxis, ...]:
    return axes_in(value, "location")


def _read(cls: Callable[..., object], of: type, name: str) -> PlainValidator:
    """How a field takes one of the classes above, or what a config file writes for it."""

    def read(value: object) -> object:
        if isinstance(value, cast("type", cls)) or (value is None and cls is Coordinates):
            return value
        if not isinstance(value, of) or isinstance(value, str):
            kind = "list" if of is Sequence else "mapping"
            raise LocatorError(f"{name}: {shown(value)} is no {kind}", f"a config file writes {name} as a {kind}")
        return cls(**fields_of(value, name)) if cls is Combination else cls(value)

    return PlainValidator(read)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise LocatorError(f"allow_empty: {shown(value)}", "allowed: true, false")
    return value


@config
class ModelLocatorConfig:
    """Where to read or write: rows of a grid of axes (`location`), or the rows themselves (`coordinates`).

    Args:
        activation: what every row reads: a :class:`ModelLayerLocation`, any point's name, or an address, which says
            the layer too. Unset where every coordinate has its own.
        location: the axes to enumerate, the first one slowest. An axis no row names is read whole.
        filter: which rows of the grid to keep.
        group, incremental, combination: make rows that read several values together, in this order.
        coordinates: the rows themselves; then none of the four above.
        allow_empty: a filter that leaves no row is no mistake.

    Each takes its class or what a config file writes for it. Equal locators name the same rows of every model.

    Raises:
        LocatorError: a value is not allowed there, or the fields contradict each other.
    """

    activation: Annotated[ModelLayerLocation | str | None, PlainValidator(_activation)] = None
    location: Annotated[Sequence[ModelAxis], PlainValidator(_location)] = ()
    filter: Annotated[Filter, _read(Filter, Sequence, "filter")] = Filter()
    group: Annotated[Group, _read(Group, Mapping, "group")] = Group()
    incremental: Annotated[Incremental, _read(Incremental, Mapping, "incremental")] = Incremental()
    combination: Annotated[Combination, _read(Combination, Mapping, "combination")] = Combination()
    coordinates: Annotated[Coordinates | None, _read(Coordinates, Sequence, "coordinates")] = None
    allow_empty: Annotated[bool, PlainValidator(_flag)] = False

    def __post_init__(self) -> None:
        if self.coordinates is not None:
            _check_explicit(self, self.coordinates)
        else:
            _check_declarative(self)

    @classmethod
    def from_config(cls, mapping: Mapping[str, object]) -> Self:
        """A locator from what a YAML or JSON file holds: the fields by name, enums by their values.

        Raises:
            LocatorError: it is no mapping, has other fields, or a value is not allowed.
        """
        return cls(**fields_of(mapping, "locator"))

    def to_config(self) -> dict[str, object]:
        """What :meth:`from_config` reads back to an equal locator; nothing that is left at its default."""
        made: dict[str, object] = {
            "activation": self.activation and str(self.activation),
            "location": [axis.value for axis in self.location],
            "filter": self.filter.to_config(),
            "group": _values(self.group.values),
            "incremental": _values(self.incremental.values),
            "combination": self.combination.to_config(),
            "coordinates": [] if self.coordinates is None else self.coordinates.to_config(),
            "allow_empty": self.allow_empty,
        }
        return {name: value for name, value in made.items() if value}

    def parse(self, model: Locatable, n_positions: int | Sequence[int] | None = None) -> ParsedLocator:
        """Settle the locator on a model and a prompt; nothing is run.

        Args:
            model: a loaded model, or the :class:`Facts` of one.
            n_positions: tokens of the prompt; for prompts of different lengths their lengths, or ``None`` where those
                are not known yet. Positions then stay as they are written: from the start, or from each prompt's end.

        Raises:
            LocatorError: a value the model or the prompt does not have.
        """
        from locant.locators.parsed import parse

        return parse(self, model, n_positions)


def _values(values: Mapping[ModelAxis, Sequence[int] | str]) -> dict[str, object]:
    return {axis.value: listed if isinstance(listed, str) else list(listed) for axis, listed in values.items()}


def _check_declarative(locator: ModelLocatorConfig) -> None:
    if locator.activation is None:
        raise LocatorError(
            "activation: a locator names what it reads",
            instead="set activation, e.g. resid.post, or give each coordinate its own",
        )
    place = place_of(locator.activation)
    added = [axis for axis in locator.incremental.values if axis not in locator.location]
    named = [*locator.location, *added]
    _check_axes(place, named, f"activation {locator.activation}")
    for i, term in enumerate(locator.filter.terms, 1):
        _check_known(term.allowed, locator.location, f"filter, term {i}", "location enumerates")
    _check_known(locator.group.values, locator.location, "group", "location enumerates")
    _check_known(locator.combination.location, named, "combination", "location or incremental names")
    for name, axes in (
        ("group", locator.group.values),
        ("incremental", locator.incremental.values),
        ("combination", locator.combination.location),
    ):
        for axis in place.selecting.intersection(axes):
            raise LocatorError(
                f"{name}: {axis}",
                f"every {axis} is a tensor of its own, so a row reads one",
                f"list {axis} in location, and keep what you need with a filter",
            )


def _check_explicit(locator: ModelLocatorConfig, coordinates: Coordinates) -> None:
    for name in ("location", "filter", "group", "incremental", "combination"):
        if getattr(locator, name) not in ((), Filter(), Group(), Incremental(), Combination()):
            raise LocatorError(
                f"coordinates together with {name}", "coordinates are the rows themselves", "leave one of them out"
            )
    own = ModelAxis.ACTIVATION in coordinates.rows[0]
    if own and locator.activation is not None:
        raise LocatorError("activation: set on the locator and on the coordinates", instead="set it in one place")
    if not own and locator.activation is None:
        raise LocatorError("activation: neither the locator nor its coordinates name one", instead="set one of them")
    seen: set[tuple[object, ...]] = set()
    for i, row in enumerate(coordinates.rows, 1):
        said = cast("str", row.get(ModelAxis.ACTIVATION, locator.activation))
        place = place_of(said)
        if (said, *row) not in seen:
            seen.add((said, *row))
            _check_axes(place, [axis for axis in row if axis is not ModelAxis.ACTIVATION], f"coordinate {i}, {said}")
        for axis in place.selecting:
            cell = row.get(axis)
            if isinstance(cell, tuple):
                raise LocatorError(
                    f"coordinate {i}, {axis}: {shown(plain(cell))}",
                    f"every {axis} is a tensor of its own, so a row reads one",
                    "write a coordinate for each",
                )


def _check_axes(place: Place, named: Sequence[ModelAxis], where: str) -> None:
    """The activation has these axes, an address has not said them already, and a block's activation has its layer."""
    for axis in named:
        if axis in place.given:
            raise LocatorError(f"{where}: the address says the {axis} already", instead=f"leave {axis} out")
        if axis not in place.axes:
            raise LocatorError(
                f"{where}: {place.name} has no axis {axis}", f"its axes are {', '.join(place.axes)}", _why(place, axis)
            )
    if place.point.scope == "block" and ModelAxis.LAYER not in (*named, *place.given):
        raise LocatorError(
            f"{where}: no layer",
            f"every block has its own {place.name}, and a row reads one layer",
            f"list layer, or write an address such as {place.point.name}.5",
        )


def _why(place: Place, axis: ModelAxis) -> str | None:
    if axis is ModelAxis.LAYER:
        return f"{place.name} is not in a block; leave layer out"
    if axis is ModelAxis.STREAM and place.point.axes.count("stream") > 1:
        return "two of its axes are streams, and stream does not say which; read it whole"
    return None


def _check_known(
    used: Mapping[ModelAxis, object] | Sequence[ModelAxis], known: Sequence[ModelAxis], where: str, whose: str
) -> None:
    for axis in used:
        if axis not in known:
            raise LocatorError(
                f"{where}: {axis}",
                f"it takes the axes that {whose}: {', '.join(known) or 'none'}",
                f"add {axis} to location",
            )
