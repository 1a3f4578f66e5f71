"""Settling a locator on a model and a prompt: the grid, its filter, the transforms, and every row checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, cast

import numpy as np

from locant.address import Address
from locant.errors import LocatorError
from locant.locators.axes import POSITIONS, ModelAxis, Place, place_of
from locant.locators.bounds import Bounds, Locatable
from locant.locators.checks import Cell, check_count, plain, shown
from locant.locators.columns import Column, choices, constant, expanded, merged, of_cells, prefixes

if TYPE_CHECKING:
    from locant.locators.columns import Codes
    from locant.locators.locator import ModelLocatorConfig
    from locant.locators.parts import Coordinates, Term


@dataclass(frozen=True)
class ParsedLocator:
    """The rows of one locator on one model and prompt.

    Attributes:
        locator: where they come from.
        columns: per axis, in the order of the index; ``ModelAxis.ACTIVATION`` is the last.
        places: for each row what it reads, as codes into the points' own names.
        bounds: of the model and the prompt.
    """

    locator: ModelLocatorConfig
    columns: Mapping[ModelAxis, Column]
    places: Column
    bounds: Bounds

    def __len__(self) -> int:
        return len(self.places)

    @cached_property
    def tensors(self) -> tuple[Sequence[Address], Codes]:
        """The different tensors that the rows read, in the order of the index, and which of them each row reads."""
        key, names = self.places.tabled()
        layer, stream = self.columns.get(ModelAxis.LAYER), self.columns.get(ModelAxis.STREAM)
        streamed = [ModelAxis.STREAM in place_of(cast("str", name)).selecting for name in names]
        if layer is not None:
            key = key * self.bounds.facts.n_layers + layer.codes
        if stream is not None:
            chosen = np.where(np.array(streamed, bool)[self.places.codes], stream.codes + 1, 0)
            key = key * (int(chosen.max(initial=0)) + 1) + chosen
        _, firsts, codes = np.unique(key, return_index=True, return_inverse=True)
        order = np.argsort(firsts)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        return [self._tensor(row, layer, stream) for row in firsts[order].tolist()], rank[codes.reshape(-1)]

    def _tensor(self, row: int, layer: Column | None, stream: Column | None) -> Address:
        name = cast("str", self.places[row])
        if ModelAxis.STREAM not in place_of(name).selecting:
            stream = None
        return Address(name, *(None if c is None else cast("int", c[row]) for c in (layer, stream)))


def parse(locator: ModelLocatorConfig, model: Locatable, n_positions: int | Sequence[int] | None) -> ParsedLocator:
    """What :meth:`ModelLocatorConfig.parse` does.

    Raises:
        LocatorError: a value the model or the prompt does not have.
    """
    bounds = Bounds(model, n_positions)
    if locator.coordinates is not None:
        columns, places = _listed(locator.coordinates, locator.activation, bounds)
    else:
        columns, places = _enumerated(locator, bounds)
    parsed = ParsedLocator(locator, columns, places, bounds)
    for address in parsed.tensors[0]:
        bounds.check_served(place_of(address.name), address.layer, address.stream)
    for axis in POSITIONS.intersection(columns):
        bounds.check_positions(axis, columns[axis])
    return parsed


class _Rows:
    """The rows under way: columns that transforms multiply and merge."""

    def __init__(self, place: Place, bounds: Bounds, columns: dict[ModelAxis, Column]) -> None:
        self.place, self.bounds, self.columns = place, bounds, columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def sized(self, axis: ModelAxis) -> Iterator[tuple[int | None, Codes | slice]]:
        """The rows for each size that an axis has in their layers."""
        layer = self.columns.get(ModelAxis.LAYER)
        sizes = self.bounds.filled(self.place, axis)
        if len(set(sizes)) == 1 or layer is None:
            yield sizes[0], slice(None)
            return
        own = np.array([-1 if size is None else size for size in sizes])[layer.codes]
        for size in np.unique(own).tolist():
            yield size, np.flatnonzero(own == size)

    def group(self, axis: ModelAxis, values: Sequence[int] | str) -> None:
        ranks = np.arange(len(self))
        if not isinstance(values, str):
            ranks = np.full(len(self), -1)
            codes = self.columns[axis].codes
            for size, rows in self.sized(axis):
                for rank, value in enumerate(self.bounds.values(tuple(values), axis, size, f"group, {axis}")):
                    ranks[rows] = np.where(codes[rows] == value, rank, ranks[rows])
        names = list(self.columns)
        self._set(names, merged(list(self.columns.values()), names.index(axis), ranks))

    def increment(self, axis: ModelAxis, values: Sequence[int]) -> None:
        column = self.columns.setdefault(axis, Column(np.zeros(len(self), np.int64), [()]))
        codes, cells = column.tabled()
        ways: list[list[tuple[int, ...]]] = []
        chosen = np.empty(len(self), np.int64)
        for size, rows in self.sized(axis):
            added = self.bounds.values(tuple(values), axis, size, f"incremental, {axis}")
            chosen[rows] = codes[rows] + len(ways)
            ways += [prefixes(_together(cell), added) for cell in cells]
        self._expand(axis, chosen, ways, "incremental")

    def combine(self, axis: ModelAxis, most: int | None) -> None:
        codes, cells = self.columns[axis].tabled()
        self._expand(axis, codes, [choices(_together(cell), most, "combination") for cell in cells], "combination")

    def _expand(self, axis: ModelAxis, codes: Codes, ways: Sequence[Sequence[tuple[int, ...]]], where: str) -> None:
        names = list(self.columns)
        self._set(names, expanded(list(self.columns.values()), names.index(axis), codes, ways, where))

    def _set(self, names: Sequence[ModelAxis], columns: Sequence[Column]) -> None:
        self.columns = dict(zip(names, columns, strict=True))


def _together(cell: int | tuple[int, ...] | str) -> tuple[int, ...]:
    assert not isinstance(cell, str), "an axis holds no names"
    return cell if isinstance(cell, tuple) else (cell,)


def _enumerated(locator: ModelLocatorConfig, bounds: Bounds) -> tuple[dict[ModelAxis, Column], Column]:
    assert locator.activation is not None, "the locator was checked"
    place = place_of(locator.activation)
    for axis, value in place.given.items():
        bounds.check_given(place, axis, value)
    grid = _Grid(locator, place, bounds)
    flat = grid.kept()
    columns = {axis: constant(value, len(flat)) for axis, value in place.given.items()}
    columns |= grid.columns(flat)
    rows = _Rows(place, bounds, columns | {ModelAxis.ACTIVATION: constant(place.name, len(flat))})
    for axis, values in locator.group.values.items():
        rows.group(axis, values)
    for axis, values in locator.incremental.values.items():
        rows.increment(axis, values)
    for axis in locator.combination.location:
        rows.combine(axis, locator.combination.max_elements)
    activation = rows.columns.pop(ModelAxis.ACTIVATION)
    return rows.columns | {ModelAxis.ACTIVATION: activation}, constant(place.point.name, len(activation))


class _Grid:
    """Every combination of the axes' values, as numbers of the cells of a box; only those kept are ever made.

    A term of the filter names the values of each axis it keeps, and the numbers of their combinations are its rows.
    """

    def __init__(self, locator: ModelLocatorConfig, place: Place, bounds: Bounds) -> None:
        self._locator, self._place, self._bounds = locator, place, bounds
        self.axes = locator.location
        keep = [term for term in locator.filter.terms if not term.negated]
        self._keep: Sequence[Term | None] = keep or [None]
        self._drop = [term for term in locator.filter.terms if term.negated]
        self._values = {axis: self._all_values(axis) for axis in self.axes}
        self._shape = [len(values) for values in self._values.values()]
        if prod(self._shape) >= 2**62:
            raise LocatorError("location: the grid cannot be numbered", instead="list fewer axes")

    def kept(self) -> Codes:
        """The numbers of the rows that the filter keeps, ascending.

        Raises:
            LocatorError: there are none, or too many.
        """
        parts = [part for term in self._keep for part in self._boxes(term)]
        check_count(sum(prod(map(len, part)) for part in parts), "location")
        found = [self._numbers(part) for part in parts]
        before = found[0] if len(found) == 1 else np.unique(np.concatenate(found))
        rows = before
        for i, term in enumerate(self._locator.filter.terms, 1):
            if term.negated:
                rows = rows[~self._matches(term, rows, f"filter, term {i}")]
        if not len(rows) and not self._locator.allow_empty:
            raise self._emptied(before)
        return rows

    def columns(self, rows: Codes) -> dict[ModelAxis, Column]:
        """The values of the rows, axis by axis."""
        return {axis: Column(self._values[axis][places]) for axis, places in self._places(rows).items()}

    def _all_values(self, axis: ModelAxis) -> Codes:
        """Every value of an axis in any layer; of a symbolic position those that the filter names."""
        sizes = self._bounds.filled(self._place, axis)
        if sizes != (None,):
            return np.arange(max(size or 0 for size in sizes))
        named: set[int] = set()
        for i, term in enumerate(self._locator.filter.terms, 1):
            if term.negated:
                continue
            if axis not in term.allowed:
                raise _unfiltered(axis, f"filter, term {i}")
            named.update(self._bounds.values(term.allowed[axis], axis, None, f"filter, term {i}"))
        if not named:
            raise _unfiltered(axis, "location")
        return np.array(sorted(named), np.int64)

    def _boxes(self, term: Term | None) -> Iterator[list[Codes]]:
        """For each group of layers whose sizes agree, the places on each axis of what the term allows."""
        where = f"filter, term {self._locator.filter.terms.index(term) + 1}" if term else "location"
        for layers, sizes in self._alike(term, where):
            box: list[Codes] = []
            for axis, every in self._values.items():
                if axis is ModelAxis.LAYER:
                    box.append(layers)
                elif term is not None and axis in term.allowed:
                    values = self._bounds.values(term.allowed[axis], axis, sizes[axis], where)
                    box.append(np.searchsorted(every, np.sort(np.array(values, np.int64))))
                else:
                    box.append(np.arange(len(every) if sizes[axis] is None else cast("int", sizes[axis])))
            yield box

    def _alike(self, term: Term | None, where: str) -> Iterator[tuple[Codes, dict[ModelAxis, int | None]]]:
        """The layers a term allows, those together in which every axis is of one size."""
        given = self._place.given.get(ModelAxis.LAYER)
        layers: Sequence[int] = (
            range(len(self._values[ModelAxis.LAYER])) if ModelAxis.LAYER in self.axes else [given or 0]
        )
        if term is not None and ModelAxis.LAYER in term.allowed:
            size = self._bounds.facts.n_layers
            layers = sorted(self._bounds.values(term.allowed[ModelAxis.LAYER], ModelAxis.LAYER, size, where))
        others = [axis for axis in self.axes if axis is not ModelAxis.LAYER]
        tables = {axis: self._bounds.filled(self._place, axis) for axis in others}
        groups: dict[tuple[int | None, ...], list[int]] = {}
        for layer in layers:
            groups.setdefault(tuple(t[layer % len(t)] for t in tables.values()), []).append(layer)
        for sizes, members in groups.items():
            yield np.array(members, np.int64), dict(zip(others, sizes, strict=True))

    def _numbers(self, box: Sequence[Codes]) -> Codes:
        numbers = np.zeros(1, np.int64)
        for size, places in zip(self._shape, box, strict=True):
            numbers = (numbers[:, None] * size + places).reshape(-1)
        return numbers

    def _places(self, rows: Codes) -> dict[ModelAxis, Codes]:
        found: dict[ModelAxis, Codes] = {}
        for axis, size in zip(reversed(self.axes), reversed(self._shape), strict=True):
            rows, found[axis] = np.divmod(rows, size)
        return {axis: found[axis] for axis in self.axes}

    def _matches(self, term: Term, rows: Codes, where: str) -> Codes:
        """Which rows a ``not`` term drops; it may not name what the axes do not have either."""
        columns = {axis: column.codes for axis, column in self.columns(rows).items()}
        matching = np.zeros(len(rows), bool)
        for layers, sizes in self._alike(term, where):
            here = np.isin(columns[ModelAxis.LAYER], layers) if ModelAxis.LAYER in columns else np.ones(len(rows), bool)
            for axis, constraint in term.allowed.items():
                if axis is not ModelAxis.LAYER:
                    here &= np.isin(columns[axis], self._bounds.values(constraint, axis, sizes[axis], where))
            matching |= here
        return matching

    def _emptied(self, before: Codes) -> LocatorError:
        """The refusal of a filter that leaves no row, with the axis that emptied it."""
        columns = {axis: column.codes for axis, column in self.columns(before).items()}
        for axis, codes in columns.items():
            alone = [term for term in self._drop if set(term.allowed) == {axis}]
            left = before
            for term in alone:
                left = left[~self._matches(term, left, "filter")]
            if alone and not len(left):
                values = np.unique(codes).tolist()
                said = f"the other terms keep {axis} {', '.join(map(str, values[:8]))}{' …' if len(values) > 8 else ''}"
                dropped = [plain(term.allowed[axis]) for term in alone]
                return LocatorError(
                    f"filter: no row is left, its not terms drop every {axis}",
                    f"{said}; dropped: {', '.join(shown(value) for value in dropped)}",
                    "keep one, or write allow_empty: true",
                )
        axes = sorted({axis for term in self._drop for axis in term.allowed}, key=self.axes.index)
        return LocatorError(
            f"filter: no row is left, its not terms on {' and '.join(axes)} drop them all",
            instead="keep one, or write allow_empty: true",
        )


def _unfiltered(axis: ModelAxis, where: str) -> LocatorError:
    return LocatorError(
        f"{where}: {axis} is not narrowed to explicit positions",
        f"these prompts have different lengths, or none that is known, so {axis} has no size",
        f"filter {axis} in every term, e.g. {{{axis}: -1}}, leave it out of location, or say how many tokens there are",
    )


def _listed(coordinates: Coordinates, activation: str | None, bounds: Bounds) -> tuple[dict[ModelAxis, Column], Column]:
    """The columns of explicit rows, in the order of the first one's keys."""
    rows = coordinates.rows
    said = of_cells([cast("str", row.get(ModelAxis.ACTIVATION, activation)) for row in rows])
    codes, names = said.tabled()
    places = [place_of(cast("str", name)) for name in names]
    axes = [*places[int(codes[0])].given, *(axis for axis in rows[0] if axis is not ModelAxis.ACTIVATION)]
    settled: dict[ModelAxis, Column] = {}
    layers: Codes = np.zeros(len(rows), np.int64)
    for axis in sorted(axes, key=lambda axis: axis is not ModelAxis.LAYER):  # whose sizes may depend on it
        cells = [
            row[axis] if axis in row else places[code].given[axis]
            for row, code in zip(rows, codes.tolist(), strict=True)
        ]
        settled[axis] = _counted(of_cells(cells), axis, places, codes, layers, bounds)
        layers = settled[axis].codes if axis is ModelAxis.LAYER else layers
    columns = {axis: settled[axis] for axis in axes}
    columns[ModelAxis.ACTIVATION] = Column(codes, [place.name for place in places])
    return columns, Column(codes, [place.point.name for place in places])


def _counted(
    column: Column, axis: ModelAxis, places: Sequence[Place], said: Codes, layers: Codes, bounds: Bounds
) -> Column:
    """A column of explicit cells with every value counted from the start; each different one is settled once."""
    codes, cells = column.tabled()
    key = (codes * len(places) + said) * (bounds.facts.n_layers + 1) + layers
    _, firsts, which = np.unique(key, return_index=True, return_inverse=True)
    made: dict[int, int | tuple[int, ...]] = {}
    for row in np.sort(firsts).tolist():
        where = f"coordinate {row + 1}"
        cell = cast("Cell", cells[int(codes[row])])
        made[row] = bounds.cell(places[int(said[row])], axis, cell, int(layers[row]), where)
    settled = of_cells([made[row] for row in firsts.tolist()])
    return settled.take(which.reshape(-1))
