"""What the rows of an index read of a capture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, cast, overload

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from locant.address import Address, format_address
from locant.engine.cache import Cache
from locant.errors import LocatorError
from locant.locators.axes import POSITIONS, ModelAxis, Place
from locant.points import POINTS

if TYPE_CHECKING:
    from locant.locators.checks import Cell
    from locant.locators.parsed import ParsedLocator

_HEADS = frozenset({"n_heads", "n_kv_heads"})


class Blocks(Sequence[Tensor]):
    """The block of values that each row reads.

    A block has the batch first, then the axes of the tensor that the row reads whole or holds a list on, in the
    tensor's own order. An axis with one value is not there; a row that holds lists on several axes reads every
    combination of their values. A block is a view of the capture, unless values lie at uneven distances, or prompts of
    different lengths are counted from their ends.
    """

    def __init__(self, parsed: ParsedLocator, cache: Cache) -> None:
        self._parsed, self._cache = parsed, cache
        self._addresses, self._codes = parsed.tensors
        self._named = [a for a in parsed.columns if a not in (ModelAxis.ACTIVATION, ModelAxis.LAYER)]
        self._tensor = lru_cache(maxsize=None)(self._found)
        if POSITIONS.intersection(self._named):
            self._check_prompts()
        for address in self._addresses:
            self._tensor(address)

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, row: int) -> Shaped[Tensor, "batch ..."]: ...
    @overload
    def __getitem__(self, row: slice) -> list[Tensor]: ...
    def __getitem__(self, row: int | slice) -> Tensor | list[Tensor]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        number = range(len(self))[row]
        address = self._addresses[int(self._codes[number])]
        tensor, axes = self._tensor(address)
        cells = {a: cast("Cell", self._parsed.columns[a][number]) for a in self._named if a in axes}
        lengths = self._cache.lengths
        if len(set(lengths)) > 1 and any(_symbolic(cells[a]) for a in POSITIONS.intersection(cells)):
            own = [
                _block(tensor[i : i + 1], axes, {a: _counted(c, n) if a in POSITIONS else c for a, c in cells.items()})
                for i, n in enumerate(lengths)
            ]
            return torch.cat(own)
        return _block(tensor, axes, {a: _counted(c, lengths[0]) if a in POSITIONS else c for a, c in cells.items()})

    def __iter__(self) -> Iterator[Tensor]:
        return (self[row] for row in range(len(self)))

    def stack(self) -> Shaped[Tensor, "row batch ..."]:
        """Every block in one new tensor.

        Raises:
            LocatorError: there is no row, or they have different shapes.
        """
        if not len(self):
            raise LocatorError("stack: the index has no rows")
        ragged = len(set(self._cache.lengths)) > 1
        if ragged or any(self._parsed.columns[axis].lists for axis in self._named):
            return self._joined([self[row] for row in range(len(self))])
        parts = [self._gathered(code) for code in range(len(self._addresses))]
        order = np.argsort(np.argsort(self._codes, kind="stable"), kind="stable")
        return self._joined(parts, torch.cat)[torch.from_numpy(order).to(parts[0].device)]

    def _gathered(self, code: int) -> Tensor:
        """The blocks of the rows that read one tensor, where each row has one value on every axis it names."""
        rows = np.flatnonzero(self._codes == code)
        tensor, axes = self._tensor(self._addresses[code])
        named = [a for a in axes if a in self._named]
        if not named:
            return tensor.expand(len(rows), *tensor.shape)
        length = self._cache.lengths[0]
        moved = tensor.movedim([1 + axes.index(a) for a in named], list(range(len(named))))
        values = [self._parsed.columns[a].codes[rows] for a in named]
        counted = [v % length if a in POSITIONS else v for a, v in zip(named, values, strict=True)]
        return moved[tuple(torch.from_numpy(v).to(tensor.device) for v in counted)]

    def _joined(self, parts: Sequence[Tensor], how: object = torch.stack) -> Tensor:
        shapes = {tuple(p.shape[1:] if how is torch.cat else p.shape) for p in parts}
        if len(shapes) > 1:
            raise LocatorError(
                "stack: the rows read blocks of different shapes",
                f"e.g. {' and '.join(str(shape) for shape in sorted(shapes, key=str)[:2])}",
                "go through them one by one",
            )
        return torch.cat(list(parts)) if how is torch.cat else torch.stack(list(parts))

    def _found(self, address: Address) -> tuple[Tensor, Sequence[ModelAxis]]:
        """A tensor of the capture, heads apart, and its axes after the batch, as long as the rows took them."""
        if address not in self._cache:
            raise LocatorError(
                f"{format_address(address)}: a row reads it, and it was not captured",
                f"the capture holds {len(self._cache)} tensors",
                "capture index.addresses",
            )
        place = Place(POINTS[address.name], address.layer, address.stream)
        axes = [ModelAxis(axis) for axis in place.point.axes]
        heads = _HEADS.intersection(place.point.width) and ModelAxis.DESTINATION_POSITION not in axes
        tensor = self._cache.per_head(address) if heads else self._cache[address]
        if tensor.dim() != len(axes) + 1:
            raise LocatorError(
                f"{format_address(address)}: its tensor of shape {tuple(tensor.shape)} has not the axes of its rows",
                f"they are batch, {', '.join(axes)}",
                "capture every position",
            )
        for axis in self._named:
            if axis in axes and axis not in POSITIONS:
                sizes = self._parsed.bounds.sizes(place, axis)
                size, real = sizes[(address.layer or 0) % len(sizes)], tensor.shape[1 + axes.index(axis)]
                if size != real:
                    raise LocatorError(
                        f"{format_address(address)}: its {axis} axis has {real} values",
                        f"the index took it for {size}",
                        instead="settle the locator on the model that was captured",
                    )
        return tensor, axes

    def _check_prompts(self) -> None:
        """The capture is of prompts as long as the index took them to be."""
        if self._cache.positions is not None:
            raise LocatorError("a capture of some positions", "the rows name positions of whole prompts", "capture all")
        bounds, lengths = self._parsed.bounds, self._cache.lengths
        if bounds.n_positions is not None and set(lengths) != {bounds.n_positions}:
            raise LocatorError(
                f"a capture of prompts of {', '.join(map(str, sorted(set(lengths))))} tokens",
                f"the index was made for {bounds.n_positions} tokens",
                "parse the locator again, with the lengths of these prompts",
            )
        for axis in POSITIONS.intersection(self._named):
            bounds.check_positions(axis, self._parsed.columns[axis], lengths)


def _symbolic(cell: Cell) -> bool:
    return cell < 0 if isinstance(cell, int) else any(value < 0 for value in cell)


def _counted(cell: Cell, length: int) -> Cell:
    """Positions counted from the start of a prompt."""
    return cell % length if isinstance(cell, int) else tuple(value % length for value in cell)


def _block(tensor: Tensor, axes: Sequence[ModelAxis], cells: dict[ModelAxis, Cell]) -> Tensor:
    for dim in range(len(axes), 0, -1):
        cell = cells.get(axes[dim - 1])
        if cell is None:
            continue
        if isinstance(cell, int):
            tensor = tensor.select(dim, cell)
            continue
        first, last = min(cell), max(cell)
        step = (last - first) // max(len(cell) - 1, 1) or 1
        if cell == tuple(range(first, last + 1, step)):
            tensor = tensor[(*[slice(None)] * dim, slice(first, last + 1, step))]
        else:
            tensor = tensor.index_select(dim, torch.tensor(cell, device=tensor.device))
    return tensor
