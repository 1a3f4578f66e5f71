"""Index: the rows of a locator as a table, and what they read of a capture."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from locant.address import Address
from locant.errors import LocatorError

if TYPE_CHECKING:
    from polars import DataFrame, Series

    from locant.engine.cache import Cache
    from locant.locators.columns import Column
    from locant.locators.locator import ModelLocatorConfig
    from locant.locators.parsed import ParsedLocator
    from locant.locators.reading import Blocks

Row = dict[str, "int | list[int] | str"]
"""One row: column name to its value, the list of values it reads together, or the activation."""


class Index(Sequence[Row]):
    """One row per place that a locator names, which is one row of a result.

    As a sequence it holds each row as a dictionary, e.g. ``{"source_layer": 5, "source_activation": "resid.post"}``.

    Args:
        locator: names the places.
        parsed: what ``locator.parse(model, n_positions)`` returned.
        side: what the names of the columns start with: ``source``, or ``target`` for where a patch is written.

    Attributes:
        columns: names of the columns: the axes in the order the locator names them, then the activation.

    Raises:
        LocatorError: `parsed` is of another locator.
    """

    def __init__(
        self, locator: ModelLocatorConfig, parsed: ParsedLocator, side: Literal["source", "target"] = "source"
    ) -> None:
        if parsed.locator is not locator and parsed.locator != locator:
            raise LocatorError("an index of one locator with the rows of another", instead="pass locator.parse(...)")
        if side not in ("source", "target"):
            raise LocatorError(f"side {side!r}", "allowed: source, target")
        self.locator = locator
        self.parsed = parsed
        self.side = side
        self._columns = {f"{side}_{axis}": column for axis, column in parsed.columns.items()}
        self.columns = tuple(self._columns)

    @property
    def addresses(self) -> Sequence[Address]:
        """The different tensors that the rows read: what to capture. In the order of the rows."""
        return self.parsed.tensors[0]

    def __len__(self) -> int:
        return len(self.parsed)

    @overload
    def __getitem__(self, row: int) -> Row: ...
    @overload
    def __getitem__(self, row: slice) -> list[Row]: ...
    def __getitem__(self, row: int | slice) -> Row | list[Row]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        number = range(len(self))[row]
        return {name: _written(column[number]) for name, column in self._columns.items()}

    def __iter__(self) -> Iterator[Row]:
        values = [column.values() for column in self._columns.values()]
        for cells in zip(*values, strict=True):
            yield {name: _written(cell) for name, cell in zip(self.columns, cells, strict=True)}

    def to_df(self) -> DataFrame:
        """A polars table. A column holds ints where every row has one value there, else lists of ints.

        Raises:
            LocatorError: polars is not installed.
        """
        try:
            import polars as pl
        except ImportError as error:
            raise LocatorError(
                "to_df: polars is not installed", "a table is a polars.DataFrame", "pip install 'locant[tables]'"
            ) from error
        series = [_series(pl.Series, name, column) for name, column in self._columns.items()]
        return pl.DataFrame(series)

    def write_csv(self, path: str | Path) -> Path:
        """Write the rows, a list of values as ``[6, 9]``. Returns the path."""
        target = Path(path)
        with target.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.columns)
            writer.writerows(row.values() for row in self)
        return target

    def read(self, cache: Cache) -> Blocks:
        """What every row reads of a capture of :attr:`addresses`: row by row as views, or stacked.

        Raises:
            LocatorError: the capture is of other prompts than the index, or does not hold what a row reads.
        """
        from locant.locators.reading import Blocks

        return Blocks(self.parsed, cache)

    def __repr__(self) -> str:
        return f"Index({len(self)} rows of {', '.join(self.columns)}; {len(self.addresses)} tensors)"


def _written(cell: int | tuple[int, ...] | str) -> int | list[int] | str:
    return list(cell) if isinstance(cell, tuple) else cell


def _series(make: type[Series], name: str, column: Column) -> Series:
    import polars as pl

    codes, cells = column.codes, column.cells
    if cells is None:
        return make(name, codes, pl.Int64)
    if all(isinstance(cell, str) for cell in cells):
        table, kind = list(cells), pl.String
    elif column.lists:
        table = [list(cell) if isinstance(cell, tuple) else [cell] for cell in cells]
        kind = pl.List(pl.Int64)
    else:
        used = set(column.different())  # a table may have lists that no row holds
        table, kind = [cell if cell in used else 0 for cell in cells], pl.Int64
    return make(name, table, kind).gather(codes)
