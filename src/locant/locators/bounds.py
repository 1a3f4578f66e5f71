"""Bounds: how long every axis is on one model and one prompt, and whether the model has what a row reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from locant.address import Address
from locant.anatomy.facts import Facts, LayerFacts
from locant.errors import LocatorError
from locant.locators.axes import POSITIONS, ModelAxis, Place
from locant.locators.checks import Cell, Constraint, check_count, is_list, plain, reversed_range, shown
from locant.points import INSTEAD, REQUIREMENTS, Requirement

if TYPE_CHECKING:
    from locant.locators.columns import Column


@runtime_checkable
class Model(Protocol):
    """A loaded model, as far as a locator needs it."""

    @property
    def facts(self) -> Facts: ...
    def refuses(self, address: Address) -> str | None: ...


Locatable = Model | Facts
"""What a locator is settled on."""


class Bounds:
    """The sizes of one model, and the positions of its prompts.

    Args:
        model: a loaded model, or the facts of one.
        n_positions: as :meth:`ModelLocatorConfig.parse` takes it.

    Attributes:
        n_positions: tokens of the prompt, or of every prompt; ``None`` where positions stay as they are written.
        lengths: the different token counts of the prompts; none where they are not known.
        shortest: tokens of the shortest prompt; ``None`` where that is not known.

        sizes: how long an axis is in each layer (once, for an activation outside the blocks); ``None`` where it is
            not.
        filled: the same, where a layer without the axis has the longest one: the rows it gives there are refused
            later. Raises a LocatorError where no layer has a size that is known.

    Raises:
        LocatorError: it is no model, or no number of positions.
    """

    def __init__(self, model: Locatable, n_positions: int | Sequence[int] | None) -> None:
        if not isinstance(model, (Facts, Model)):
            raise LocatorError(
                f"a {type(model).__name__} is no model",
                "a locator is settled on a loaded model or on Facts",
                "load it with locant.load_model, or write Facts.from_dict({...})",
            )
        facts = model if isinstance(model, Facts) else model.facts
        self.facts = facts
        self._refuses: Callable[[Address], str | None] = (
            (lambda address: _lacks(facts, address)) if isinstance(model, Facts) else model.refuses
        )
        several = is_list(n_positions)
        lengths = n_positions if several else () if n_positions is None else (n_positions,)
        if (several and not lengths) or any(type(n) is not int or n < 1 for n in lengths):
            raise LocatorError(
                f"n_positions {shown(n_positions)}", "it is the prompt's token count, a list of them, or None"
            )
        self.lengths = frozenset(cast("Sequence[int]", lengths))
        self.shortest = min(self.lengths, default=None)
        self.n_positions = self.shortest if len(self.lengths) == 1 else None
        self.sizes = lru_cache(maxsize=None)(self._measured)
        self.filled = lru_cache(maxsize=None)(self._filled)

    def _filled(self, place: Place, axis: ModelAxis) -> tuple[int | None, ...]:
        sizes = self.sizes(place, axis)
        longest = max((size for size in sizes if size is not None), default=None)
        if longest is not None:
            return tuple(longest if size is None else size for size in sizes)
        if axis in POSITIONS:
            return sizes
        missing = " * ".join(place.factors(axis))
        raise LocatorError(
            f"{axis} of {place.name}: its size is not known",
            f"it is {missing}, and the facts have {', '.join(self.facts.to_dict())}",
            f"give the facts {missing}, or load the model",
        )

    def cell(self, place: Place, axis: ModelAxis, cell: Cell, layer: int | None, where: str) -> Cell:
        """What a coordinate holds on one axis, counted from the start.

        Raises:
            LocatorError: a value is past an end of the axis, or one is named twice.
        """
        sizes = self.filled(place, axis)
        size = sizes[(layer or 0) % len(sizes)]
        if not isinstance(cell, tuple):
            return self._value(cell, axis, size, where)
        found = tuple(self._value(value, axis, size, where) for value in cell)
        if len(set(found)) < len(found):
            twice = next(value for i, value in enumerate(found) if value in found[:i])
            raise LocatorError(f"{where}: {axis} {shown(plain(cell))} names {twice} twice", "each value counts once")
        return found

    def check_given(self, place: Place, axis: ModelAxis, value: int) -> None:
        """The model has the layer and the stream that an address names.

        Raises:
            LocatorError: it has not.
        """
        self._value(
            value,
            axis,
            self.filled(place, axis)[0],
            f"activation {Address(place.point.name, place.layer, place.stream)}",
        )

    def check_positions(self, axis: ModelAxis, column: Column, lengths: Iterable[int] | None = None) -> None:
        """Positions kept as they are written exist in every prompt, and no row names one token from both ends.

        Args:
            axis: of the column, for the message.
            column: of positions.
            lengths: of the prompts; by default those that the locator was settled on.

        Raises:
            LocatorError: one does not exist, or two of a row's are the same.
        """
        if self.n_positions is not None:
            return
        known = sorted(self.lengths if lengths is None else set(lengths))
        for cell in column.different():
            values = cell if isinstance(cell, tuple) else (cell,)
            for value in values if known else ():
                _check_reached(cast("int", value), axis, known[0], "the rows")
            ahead = {value for value in values if cast("int", value) >= 0}
            for length in known:
                both = [value for value in cast("tuple[int, ...]", values) if value < 0 and value + length in ahead]
                if both:
                    raise LocatorError(
                        f"{axis} {list(values)}: {both[0] + length} and {both[0]} are one token",
                        f"a prompt has {length} tokens",
                        "count all of a row's positions from one end",
                    )

    def values(self, constraint: Constraint, axis: ModelAxis, size: int | None, where: str) -> tuple[int, ...]:
        """The values a constraint allows, in the order it lists them, each once.

        Args:
            constraint: an int, a range, or a tuple of these.
            axis: for the message, and for whether a ``None`` size is a prompt's.
            size: of the axis; ``None`` leaves positions as they are written.
            where: in which part of the locator.

        Raises:
            LocatorError: a value is past an end of the axis.
        """
        items = constraint if isinstance(constraint, tuple) else (constraint,)
        found: dict[int, None] = {}
        for item in items:
            if isinstance(item, int):
                found[self._value(item, axis, size, where)] = None
                continue
            start, end = (self._value(v, axis, size, where) for v in (item.start, item.end))
            if size is None and (item.start < 0) != (item.end < 0):
                raise LocatorError(
                    f"{where}: the range [{item.start}, {item.end}]",
                    "these prompts have different lengths, so a range stays on one side",
                    "count both ends from the start, or both from the end",
                )
            if start > end:
                raise reversed_range(item, where)
            check_count(end - start + 1, where)
            found.update(dict.fromkeys(range(start, end + 1)))
        return tuple(found)

    def check_served(self, place: Place, layer: int | None, stream: int | None) -> None:
        """The model computes what a row reads.

        Raises:
            LocatorError: it does not, or not in this layer.
        """
        address = Address(place.point.name, layer, stream)
        reason = self._refuses(address)
        if reason is None:
            return
        others = [] if layer is None else range(self.facts.n_layers)
        having = [n for n in others if self._refuses(Address(place.point.name, n, stream)) is None]
        where = "" if layer is None else f" in layer {layer}"
        raise LocatorError(
            f"{place.name}{where}: {reason}",
            f"layers {', '.join(map(str, having))} have it" if having else None,
            f"keep them with a filter on layer: [{', '.join(map(str, having))}]" if having else None,
        )

    def _value(self, value: int, axis: ModelAxis, size: int | None, where: str) -> int:
        if size is None:
            if self.shortest is not None:
                _check_reached(value, axis, self.shortest, where)
            return value
        if not -size <= value < size:
            raise LocatorError(
                f"{where}: {axis} {value}",
                f"{axis} has {size} values here, 0 to {size - 1}, or -{size} to -1 from the end",
            )
        return value if value >= 0 else value + size

    def _measured(self, place: Place, axis: ModelAxis) -> tuple[int | None, ...]:
        if axis in POSITIONS:
            return (self.n_positions,)
        if axis is ModelAxis.LAYER:
            return (self.facts.n_layers,)
        layers = range(self.facts.n_layers) if place.point.scope == "block" and self.facts.layers else [None]
        return tuple(_product(self.facts.at(layer), place.factors(axis)) for layer in layers)


def _check_reached(value: int, axis: ModelAxis, length: int, where: str) -> None:
    if not -length <= value < length:
        raise LocatorError(
            f"{where}: {axis} {value}",
            f"the shortest prompt has {length} tokens, 0 to {length - 1}, or -{length} to -1 from the end",
        )


def _product(facts: Facts, factors: Sequence[str]) -> int | None:
    sizes: list[int | None] = [getattr(facts, factor) for factor in factors]
    return None if None in sizes or not sizes else prod(size for size in sizes if size is not None)


_HAVING: Mapping[Requirement, Callable[[LayerFacts], bool]] = {
    "sequential_block": lambda layer: not layer.parallel,
    "attention": lambda layer: layer.mixer == "attention",
    "qk_norm": lambda layer: layer.qk_norm,
    "mlp": lambda layer: layer.channel in ("plain", "gated"),
    "gated_mlp": lambda layer: layer.channel == "gated",
    "moe": lambda layer: layer.channel == "moe",
}
"""What the facts of a layer say of a requirement; of the others they say nothing, and only a loaded model knows."""


def _lacks(facts: Facts, address: Address) -> str | None:
    point = address.point
    assert point is not None, "a locator's places are points"
    needs, layer = point.needs, address.layer
    if facts.layers and layer is not None and needs in _HAVING and not _HAVING[needs](facts.layers[layer]):
        return _takes(needs)
    if facts.n_streams == 1 and (needs == "streams" or address.stream is not None):
        return _takes("streams")
    if facts.n_streams > 1 and point.takes_stream and "stream" not in point.axes and address.stream is None:
        return f"the residual of this model is {facts.n_streams} streams; list stream, or read resid_streams"
    return None


def _takes(needs: Requirement) -> str:
    instead = INSTEAD.get(needs)
    return f"it takes {REQUIREMENTS[needs]}" + (f"; {instead}" if instead else "")
