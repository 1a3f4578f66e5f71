"""Columns of an index: one code per row, and a table of the cells that the codes stand for.

A column whose every cell is one value is its own codes. Rows are multiplied and merged by working on the few
different cells and then taking rows, so a million rows cost what numpy needs to copy them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import TYPE_CHECKING, Any

import numpy as np

from locant.locators.checks import check_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Codes = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Column:
    """The cells of one column.

    Attributes:
        codes: one per row: the value itself, or where there are `cells` the number of its cell.
        cells: ints, tuples of ints, or the names of activations; ``None`` where every cell is an int.
    """

    codes: Codes
    cells: Sequence[int | tuple[int, ...] | str] | None = None

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, row: int) -> int | tuple[int, ...] | str:
        code = int(self.codes[row])
        return code if self.cells is None else self.cells[code]

    def values(self) -> Iterator[int | tuple[int, ...] | str]:
        """Its cells, row by row."""
        codes = self.codes.tolist()
        return iter(codes) if self.cells is None else map(self.cells.__getitem__, codes)

    def take(self, rows: Codes) -> Column:
        """Some of the rows, in any order."""
        return Column(self.codes[rows], self.cells)

    def tabled(self) -> tuple[Codes, list[int | tuple[int, ...] | str]]:
        """Codes into a table of cells, whichever kind of column it is."""
        if self.cells is not None:
            return self.codes, list(self.cells)
        values, codes = np.unique(self.codes, return_inverse=True)
        return codes.reshape(-1), values.tolist()

    def different(self) -> list[int | tuple[int, ...] | str]:
        """Its different cells."""
        codes: list[int] = np.unique(self.codes).tolist()
        return list(codes) if self.cells is None else [self.cells[code] for code in codes]

    @property
    def lists(self) -> bool:
        """Whether some cell is a list."""
        return self.cells is not None and any(isinstance(cell, tuple) for cell in self.different())


def constant(cell: int | str, n_rows: int) -> Column:
    """The same cell in every row."""
    if isinstance(cell, int):
        return Column(np.full(n_rows, cell, np.int64))
    return Column(np.zeros(n_rows, np.int64), [cell])


def of_cells(cells: Sequence[int | tuple[int, ...] | str]) -> Column:
    """A column from its cells."""
    if all(type(cell) is int for cell in cells):
        return Column(np.array(cells, np.int64))
    table = {cell: code for code, cell in enumerate(dict.fromkeys(cells))}
    return Column(np.fromiter((table[cell] for cell in cells), np.int64, len(cells)), list(table))


def merged(columns: Sequence[Column], at: int, ranks: Codes) -> list[Column]:
    """Rows that differ in one column only, made one row where that column lists their values together.

    Args:
        columns: of the table.
        at: which of them is merged; it holds ints.
        ranks: for each row the place of its value in the merged list, or -1 for a row that stays alone.

    Returns:
        The columns; a merged row stands where the first of its rows stood.
    """
    n_rows = len(ranks)
    members = np.flatnonzero(ranks >= 0)
    key = np.zeros(len(members), np.int64)
    for i, column in enumerate(columns):
        if i != at:
            _, other = np.unique(column.codes[members], return_inverse=True)
            _, key = np.unique(key * (int(other.max(initial=0)) + 1) + other.reshape(-1), return_inverse=True)
            key = key.reshape(-1)
    order = np.lexsort((ranks[members], key))
    sorted_rows = members[order]
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    values = columns[at].codes[sorted_rows].tolist()
    ends = [*starts[1:].tolist(), len(values)]
    together = [tuple(values[a:b]) for a, b in zip(starts.tolist(), ends, strict=True)] if len(values) else []
    firsts = np.minimum.reduceat(sorted_rows, starts) if len(values) else members
    alone = np.flatnonzero(ranks < 0)
    cells: Any = np.empty(n_rows, object)
    cells[alone] = columns[at].codes[alone].tolist() if len(alone) else None
    for row, cell in zip(firsts.tolist(), together, strict=True):
        cells[row] = cell
    kept = np.sort(np.concatenate([alone, firsts]))
    taken = [column.take(kept) for column in columns]
    taken[at] = of_cells(cells[kept].tolist())
    return taken


def expanded(
    columns: Sequence[Column], at: int, codes: Codes, cells: Sequence[Sequence[tuple[int, ...]]], where: str
) -> list[Column]:
    """Every row made several, which differ in one column.

    Args:
        columns: of the table.
        at: which of them differs.
        codes: for each row which entry of `cells` it becomes.
        cells: the cells, in order, of the rows one row becomes.
        where: for the message.

    Raises:
        LocatorError: that many rows cannot be held.
    """
    counts = np.array([len(c) for c in cells], np.int64)
    total = int(counts[codes].sum())
    check_count(total, where)
    rows = np.repeat(np.arange(len(codes)), counts[codes])
    ends = np.cumsum(counts[codes])
    within = np.arange(total) - np.repeat(ends - counts[codes], counts[codes])
    table = {cell: code for code, cell in enumerate(dict.fromkeys(c for group in cells for c in group))}
    flat = np.fromiter((table[c] for group in cells for c in group), np.int64)
    starts = np.cumsum(counts) - counts
    taken = [column.take(rows) for column in columns]
    taken[at] = Column(flat[starts[codes][rows] + within], list(table))
    return taken


def prefixes(cell: tuple[int, ...], added: Sequence[int]) -> list[tuple[int, ...]]:
    """A cell, then the cell with one more of the added values each time; a value it holds already adds no row."""
    found = [cell] if cell else []
    for value in added:
        if value not in cell:
            cell = (*cell, value)
            found.append(cell)
    return found


def choices(cell: tuple[int, ...], most: int | None, where: str) -> list[tuple[int, ...]]:
    """Every combination of a cell's values, the small ones first.

    Raises:
        LocatorError: there are too many.
    """
    sizes = range(1, min(len(cell), most or len(cell)) + 1)
    count = 0
    for size in sizes:
        count += comb(len(cell), size)
        check_count(count * size, where)
    return [chosen for size in sizes for chosen in combinations(cell, size)]
