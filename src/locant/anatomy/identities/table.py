"""The table of identities: equations that hold between the points of one forward.

Which identities must hold for a point to count as proven stands in POINTS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from locant.anatomy.evidence import Equation, Evidence

Measure = Callable[[Evidence], list[Equation]]


@dataclass(frozen=True, slots=True)
class Identity:
    """An equation between points.

    Attributes:
        formula: as people write it.
        measure: its instances at one layer; none where it does not apply.
        doubt_from: the members whose refusal refuses the others, since two tensors read at wrong places may agree;
            ``None`` for all of them. With none, the equation is evidence by itself: the block's input is the last
            block's output, whatever that is made of.
    """

    name: str
    formula: str
    measure: Measure
    doubt_from: tuple[str, ...] | None = None


IDENTITIES: dict[str, Identity] = {}


def identity(name: str, formula: str, *, doubt_from: tuple[str, ...] | None = None) -> Callable[[Measure], Measure]:
    """Add to the table the equation that the decorated function measures."""

    def add(measure: Measure) -> Measure:
        IDENTITIES[name] = Identity(name, formula, measure, doubt_from)
        return measure

    return add
