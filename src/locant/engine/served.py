"""What a model serves, as a table people read: one row per point, its layers folded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from locant.address import Address, AddressLike, to_address
from locant.anatomy.facts import Facts
from locant.engine.cache import spans_of
from locant.engine.plan import PointStatus
from locant.errors import PointUnavailable
from locant.points import POINTS


@dataclass(frozen=True, slots=True)
class PointRow:
    """One point over the layers that treat it alike.

    Attributes:
        layers: ``0-29``, or ``-`` for a trunk-level point.
        error: the largest proof error among them.
    """

    name: str
    layers: str
    served: bool
    width: str
    how: str
    proof: str
    error: float | None
    reason: str
    instead: str


class Served(Sequence[PointStatus]):
    """Every point at every layer of one model, in forward order."""

    def __init__(self, model: str, facts: Facts, rows: Sequence[PointStatus]) -> None:
        self.model = model
        self.facts = facts
        self._rows = list(rows)
        self._at = {row.address: row for row in self._rows}

    @overload
    def __getitem__(self, key: int | AddressLike) -> PointStatus: ...
    @overload
    def __getitem__(self, key: slice) -> list[PointStatus]: ...
    def __getitem__(self, key: int | slice | AddressLike) -> PointStatus | list[PointStatus]:
        if isinstance(key, (int, slice)):
            return self._rows[key]
        address = to_address(key)
        if address not in self._at:
            raise PointUnavailable(
                f"{address}: this list has the points of {self.model}", instead="ask model.refuses()"
            )
        return self._at[address]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[PointStatus]:
        return iter(self._rows)

    def served(self) -> list[Address]:
        """The addresses that can be captured."""
        return [row.address for row in self._rows if row.served]

    def rows(self) -> list[PointRow]:
        """One row per point and way it is treated, layers that agree folded into one."""
        folded: dict[tuple[str, bool, str, str], list[PointStatus]] = {}
        for row in self._rows:
            folded.setdefault((row.address.name, row.served, row.proof, row.reason), []).append(row)
        return [self._fold(key, rows) for key, rows in folded.items()]

    def _fold(self, key: tuple[str, bool, str, str], rows: list[PointStatus]) -> PointRow:
        name, served, proof, reason = key
        first = rows[0]
        layers = [r.address.layer for r in rows if r.address.layer is not None]
        errors = [r.error for r in rows if r.error is not None]
        widths = {r.width for r in rows}
        width = POINTS[name].width_text if None in widths else "/".join(str(w) for w in sorted(w for w in widths if w))
        how = first.how if len(rows) == 1 else _pattern([r.how for r in rows])
        error = max(errors) if errors else None
        return PointRow(name, spans_of(layers), served, width, how, proof, error, reason, first.instead)

    def __repr__(self) -> str:
        served = sum(r.served for r in self._rows)
        lines = [f"{self.model}: {served} of {len(self._rows)} addresses served"]
        for row in self.rows():
            mark = "yes" if row.served else "no "
            error = "" if row.error is None else f"{row.error:.0e}"
            note = row.how if row.served else row.reason
            lines.append(f"{row.name:20} {row.layers:>8}  {mark}  {row.proof:14} {error:>6}  {note}")
        return "\n".join(lines)


def _pattern(sites: Sequence[str]) -> str:
    """The sites of several layers with the layer number as ``*``, where that is all they differ in."""
    parts = [s.split(".") for s in sites]
    if len({len(p) for p in parts}) > 1:
        return sites[0]
    return ".".join(column[0] if len(set(column)) == 1 else "*" for column in zip(*parts, strict=True))
